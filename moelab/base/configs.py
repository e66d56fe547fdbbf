"""From a transformers config to a `MoESpec`.

Nothing is built and no torch is needed, so it works on a config object of any origin. Left out:
layers whose experts differ from each other (lists of sizes, one an MoE layer), and what `REFUSED`
says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

from moelab.base.files import beside
from moelab.base.records import Record
from moelab.base.specs import DTYPE_BYTES, MoESpec

#: where a multimodal config keeps its language model
NESTED = ("thinker_config", "text_config", "language_config", "llm_config")

#: what `configs.toml` says
_KNOWN = beside(__file__)
#: fact → attributes that may state it; the first one present wins
NAMES: dict[str, list[str]] = _KNOWN["names"]

#: attribute → is layer i MoE?; the first attribute present decides, and without any every layer is
MOE_LAYERS: dict[str, Callable[[Any, int], bool]] = {
    "mlp_layer_types": lambda c, i: c.mlp_layer_types[i] != "dense",
    "moe_layers": lambda c, i: i in c.moe_layers,
    "expert_layer_period": lambda c, i: i % c.expert_layer_period == c.expert_layer_offset,
    "moe_layer_start_index": lambda c, i: (
        (i + 1) % c.moe_layer_interval == 0
        and c.moe_layer_start_index <= i <= c.moe_layer_end_index
    ),
    "num_dense_layers": lambda c, i: i >= c.num_dense_layers,
    "first_k_dense_replace": lambda c, i: (
        i >= c.first_k_dense_replace and i % (getattr(c, "moe_layer_freq", None) or 1) == 0
    ),
    "decoder_sparse_step": lambda c, i: (
        (i + 1) % c.decoder_sparse_step == 0
        and i not in (getattr(c, "mlp_only_layers", None) or ())
    ),
}

#: model_type → what its code does and its config does not say; a callable reads it from the config
EXCEPTIONS: dict[str, Record] = {
    name: {fact: attrgetter(of["of"]) if isinstance(of, dict) else of for fact, of in facts.items()}
    for name, facts in _KNOWN["exceptions"].items()
}
EXCEPTIONS["switch_transformers"] |= {
    "num_layers": lambda c: c.num_layers + c.num_decoder_layers,
    "moe_layers": lambda c: _switch_layers(c),
}
EXCEPTIONS["longcat_flash"]["shared_I"] = lambda c: 2 * c.ffn_hidden_size
EXCEPTIONS["deepseek_v2"] = {
    "router": lambda c: "softmax-group" if c.topk_method == "group_limited_greedy" else "softmax"
}
EXCEPTIONS["nemotron_h"] |= {
    "dense_I": lambda c: c.intermediate_size if "mlp" in c.layers_block_type else 0,
    "moe_layers": lambda c: [i for i, kind in enumerate(c.layers_block_type) if kind == "moe"],
}

#: model_type → why the seam cannot run it, though it is a mixture of experts
REFUSED: dict[str, str] = _KNOWN["refused"]

#: where configs say how they are quantised: transformers', and what MLX writes
QUANTISATION = ("quantization_config", "quantization")
FP8 = "float8_e4m3fn"


def spec_from_config(config: Any, name: str | None = None) -> MoESpec:
    """The geometry that a transformers config describes.

    config : a transformers config, or any object with the attributes of a config.json. Of a
        multimodal model the language model counts, and its model_type is the spec's.
    name : the config's `_name_or_path`, or its model_type, without.

    Raises ValueError: the config is dense, lacks a fact, has layers that differ, or is quantised in
    a way unknown here."""
    outer, config = config, language_model(config)
    model_type = config.model_type
    name = name or getattr(outer, "_name_or_path", None) or model_type
    if reason := REFUSED.get(model_type) or REFUSED.get(outer.model_type):
        raise ValueError(
            f"{name} ({model_type}) is a mixture of experts that moelab does not run: it {reason}. "
            f"moelab.names('model') lists models that it runs"
        )
    find = partial(_find, config)

    def size(fact: str) -> int:
        if not isinstance(value := find(fact), int):
            raise ValueError(
                f"{name} ({model_type}): {fact} should be a whole number under one of {', '.join(NAMES[fact])}, but "
                f"is {value!r}; set it in the config, or name the attribute in moelab/base/configs.toml"
            )
        return value

    layers = size("num_layers")
    moe_layers = _moe_layers(config, layers) if find("E") else ()
    if not moe_layers:
        raise ValueError(
            f"{name} ({model_type}) is a dense model: its config has no experts, or none of its layers is "
            f"MoE (looked for {', '.join(NAMES['E'])}; {', '.join(MOE_LAYERS)}). Open a "
            f"mixture-of-experts model; moelab.names('model') lists the known ones"
        )
    shared, I = find("shared_I"), size("I")
    heads, kv_heads, head_dim = (
        max(value) if isinstance(value, list) else value or 0  # for costs: widest layer
        for value in map(find, ("heads", "kv_heads", "head_dim"))
    )
    return MoESpec(
        name=name,
        model_type=model_type,
        num_layers=layers,
        moe_layers=tuple(moe_layers),
        E=size("E"),
        K=size("K"),
        H=size("H"),
        I=I,
        router=find("router") or _router(config),
        gated=find("gated") is not False,
        bias=bool(find("bias")),
        shared_I=(find("shared_count") or 0) * I if shared is None else shared,
        dense_I=size("dense_I") if len(moe_layers) < layers else 0,
        vocab=find("vocab") or 0,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim or (size("H") // heads if heads else 0),
        dtype=_dtype(outer, config, name),
    )


def language_model(config: Any) -> Any:
    """The config of the language model in a multimodal one."""
    inner = next(filter(None, (getattr(config, key, None) for key in NESTED)), None)
    return config if inner is None else language_model(inner)


def _find(config: Any, fact: str) -> Any:
    """What a config, or its architecture, says of a fact; None for nothing."""
    known = EXCEPTIONS.get(config.model_type, {})
    if fact in known:
        return known[fact](config) if callable(known[fact]) else known[fact]
    values = (_read(config, key) for key in NAMES.get(fact, ()))
    return next((value for value in values if value is not None), None)


def _moe_layers(config: Any, num_layers: int) -> list[int]:
    if (layers := _find(config, "moe_layers")) is not None:
        return layers
    said = (rule for key, rule in MOE_LAYERS.items() if getattr(config, key, None) is not None)
    rule = next(said, lambda config, i: True)
    return [i for i in range(num_layers) if rule(config, i)]


def _read(config: Any, key: str) -> Any:
    """An attribute of a config, or None; of one that layers have of their own, the value if they
    agree, else a list."""
    if key not in (getattr(config, "per_layer_attributes", None) or ()):
        return getattr(config, key, None)
    values = [getattr(of_layer, key, None) for of_layer in config.per_layer_config]
    return values[0] if values.count(values[0]) == len(values) else values


def _router(config: Any) -> str:
    """The habit where the architecture is no exception: groups come with sigmoid scores, as in
    DeepSeek-V3."""
    groups = getattr(config, "topk_group", None) is not None
    named = getattr(config, "scoring_func", None) or getattr(config, "expert_selection_fn", None)
    scores = named or ("sigmoid" if groups else "softmax")
    return "sigmoid-group" if scores == "sigmoid" and groups else scores


def _switch_layers(config: Any) -> list[int]:
    """Switch's own rule: every `step`-th layer from the second one on, in the encoder and in the
    decoder."""

    def sparse(layers: int, step: int) -> range:
        return range(step > 1, layers if step > 0 else 0, step or 1)

    encoder = sparse(config.num_layers, config.encoder_sparse_step)
    decoder = sparse(config.num_decoder_layers, config.decoder_sparse_step)
    return [*encoder, *(config.num_layers + i for i in decoder)]


def quantisation(config: Any) -> str | None:
    """What a config says that weights are quantised with: transformers' name of the method ("fp8",
    …) and, where it says one, the algorithm ("modelopt NVFP4"); or the software that gives it no
    name; None for not at all."""
    if not (said := _quantised(config)):
        return None
    unnamed = (name for key, name in _KNOWN["unnamed"].items() if said.get(key))
    method = said.get("quant_method") or next(unnamed, "an unnamed method")
    return f"{getattr(method, 'value', method)} {said.get('quant_algo') or ''}".strip()


def _quantised(config: Any) -> Record:
    """The fields of what a config says of quantisation; {} for nothing."""
    said = next(filter(None, (getattr(config, name, None) for name in QUANTISATION)), {})
    return said if isinstance(said, dict) else vars(said)


def _dtype(outer: Any, config: Any, name: str) -> str:
    """How the experts are stored; bfloat16 where neither config says."""
    if method := quantisation(outer) or quantisation(config):
        said = _quantised(outer) or _quantised(config)
        dtype = {"mxfp4": "mxfp4", "fp8": FP8}.get(method)
        with suppress(KeyError, TypeError, AttributeError, StopIteration):  # of a foreign config
            if method in ("gptq", "awq"):
                dtype = f"int{said['bits']}"
            elif dtype is None:
                weights = next(iter(said["config_groups"].values()))["weights"]
                dtype = FP8 if weights.get("type") == "float" else f"int{weights['num_bits']}"
        if dtype in DTYPE_BYTES:
            return dtype
        raise ValueError(
            f"{name} is quantised with {method}, in a form that is not read here; known are mxfp4, "
            f"fp8, gptq, awq, compressed-tensors. Take one of these, or the unquantised checkpoint "
            f"of the model"
        )
    dtype = str(_find(config, "dtype") or _find(outer, "dtype")).removeprefix("torch.")
    return dtype if dtype in DTYPE_BYTES else "bfloat16"


def geometric_bytes(spec: MoESpec, config: Any) -> int:
    """`MoESpec.dense_bytes`, less what the config of multi-head latent attention saves, whose
    projections are small."""
    if not (rank := getattr(config, "kv_lora_rank", None)):
        return round(spec.dense_bytes)
    H = spec.H
    keys = config.qk_nope_head_dim
    turned = config.qk_rope_head_dim
    wide = spec.heads * (keys + turned)
    queries = getattr(config, "q_lora_rank", None)
    attention = (H + wide) * queries if queries else H * wide
    attention += H * (rank + turned) + spec.heads * (
        rank * (keys + spec.head_dim) + spec.head_dim * H
    )
    more = attention - 2 * H * spec.head_dim * (spec.heads + spec.kv_heads)
    return round(spec.dense_bytes + spec.num_layers * more * max(DTYPE_BYTES[spec.dtype], 2.0))
