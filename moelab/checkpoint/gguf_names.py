"""GGUF files in transformers' words: the config that their metadata say, and their tensors under the
keys that a checkpoint of that model has.

Which of gguf-py's names is which key of a checkpoint, gguf-py's own tables know; here is what they
leave out: what llama.cpp's code of an architecture takes for granted (`ARCHITECTURES`), and what
its converter changes in a tensor (`RULES`), each of which is read here and written by
`moelab.checkpoint.export`. What a table has no word for is refused by name, never guessed.

Source: gguf-py's `constants` and `tensor_mapping`; the conventions of llama.cpp's
`convert_hf_to_gguf.py`; the hyperparameters that its loaders read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.base.configs import NAMES
from moelab.base.records import Record
from moelab.models import compat
from moelab.store.headers import DTYPES, Header, Shape, Stored

Tensors = list[Tensor]


class Made(NamedTuple):
    """A tensor of a checkpoint that differs from what lies in a GGUF file, or is made of several.

    stored : the tensors of the file, or slices of them.
    rows : which of their rows, one part's after the other's, is each of its own; None for all as
        they are. No block is cut, so they can stay packed.
    make : of decoded parts, what no order of rows can give; else None.
    transposed : whether its last two dimensions are exchanged then."""

    stored: tuple[Stored, ...]
    rows: np.ndarray | None
    make: Callable[[Tensors], Tensor] | None
    shape: Shape
    dtype: str
    transposed: bool = False

    def slice(self, i: int, rows: int = 1) -> Made:
        """The i-th of its parts of so many experts, where these are stacked."""
        parts = tuple(part.slice(i, rows) for part in self.stored)
        return self._replace(stored=parts, shape=(rows, *self.shape[1:]))

    def empty(self, device: str = "cpu") -> Tensor:
        """A new tensor of its shape; fp32 where it is decoded."""
        dtype = DTYPES.get(self.dtype, torch.float32)
        return torch.empty(self.shape, dtype=dtype, device=device)

    def join(self, parts: Tensors) -> Tensor:
        """Its rows, of the parts' decoded values or of their packed rows (uint8)."""
        joined = torch.cat(parts, -2 if parts[0].dim() > 1 else 0)
        if self.rows is None:
            return joined
        return joined.index_select(-2 if joined.dim() > 1 else 0, torch.from_numpy(self.rows))

    def values(self, parts: Tensors) -> Tensor:
        """The tensor, of the parts' decoded values."""
        made = self.make(parts) if self.make else self.join(parts)
        return (made.mT if self.transposed else made).reshape(self.shape)


# --------------------------------------------------------------------------------------------------
# configs


class Architecture(NamedTuple):
    """transformers' model type (or which one, by the metadata), fields of its config that
    llama.cpp's code takes for granted, further ones by the metadata, and how experts' scores are
    made (1 softmax, 2 sigmoid, 3 softmax of the chosen)."""

    model_type: str | Callable[[Metadata], str]
    fixed: Record = {}
    further: Callable[[Metadata], Record] = lambda m: {}
    gating: int = 1


class Metadata:
    """The metadata of an architecture, and which tensors there are; it notes what was asked for."""

    def __init__(self, values: Record, header: Header) -> None:
        self.values, self.header, self.asked = values, header, set()
        self.arch = values.get("general.architecture")

    def __call__(self, key: str, default: Any = None) -> Any:
        """The value of a key without its prefix; of a list, the one that is not 0; of a float of 32
        bits, the number that was meant."""
        self.asked.add(key)
        value = self.values.get(f"{self.arch}.{key}", default)
        if isinstance(value, float):
            return float(str(np.float32(value)))
        if not isinstance(value, (list, tuple, np.ndarray)):
            return value
        if len(found := {v for v in map(int, value) if v}) > 1:
            raise ValueError(f"{self.arch}.{key} differs from layer to layer, which is not read")
        return found.pop() if found else 0

    def need(self, key: str) -> Any:
        value = self(key)
        if value is None:
            raise ValueError(
                f"the file's metadata lack {self.arch}.{key}, without which no model of experts can "
                f"be made; convert it again"
            )
        return value

    def has(self, name: str, layer: int | None = None) -> bool:
        """Whether a layer, or any, has a tensor."""
        layers = range(self.layers) if layer is None else [layer]
        return any(f"blk.{i}.{name}" in self.header for i in layers)

    @property
    def layers(self) -> int:
        """Layers, without those that predict further tokens, which transformers has not."""
        return self.need("block_count") - (self("nextn_predict_layers") or 0)

    def kinds(self, name: str, there: str, else_: str) -> list[str]:
        """Of each layer, a word for whether it has a tensor."""
        return [there if self.has(name, i) else else_ for i in range(self.layers)]


def _rope(m: Metadata, head_dim: int) -> Record:
    """Rotary positions, as transformers' `rope_parameters`."""
    kind = m("rope.scaling.type", "none")
    rope = {"rope_type": "default" if kind == "none" else kind}
    rope["rope_theta"] = m("rope.freq_base", 1e4)
    if (dims := m("rope.dimension_count", head_dim)) != head_dim:
        rope["partial_rotary_factor"] = dims / head_dim
    original = m("rope.scaling.original_context_length")
    factor = m("rope.scaling.factor")
    if kind == "none":
        return rope
    rope |= {"factor": factor, "original_max_position_embeddings": original}
    if kind == "yarn":
        rope["beta_fast"] = m("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = m("rope.scaling.yarn_beta_slow", 1.0)
        if log := m("rope.scaling.yarn_log_multiplier"):
            rope["mscale"] = rope["mscale_all_dim"] = 10 * log
    if kind == "longrope":
        for length in ("short", "long"):
            stored = m.header[f"rope_factors_{length}.weight"]
            rope[f"{length}_factor"] = stored.read(0, stored.nbytes).view(np.float32).tolist()
            rope[f"{length}_mscale"] = m("rope.scaling.attn_factor", 1.0)
    return rope


def _latent(m: Metadata) -> Record:
    """DeepSeek's latent attention; files of before 2025 have whole heads."""
    rotary = m.need("rope.dimension_count")
    whole = m("attention.key_length_mla")
    key = whole or m.need("attention.key_length")
    value = m("attention.value_length_mla") or m.need("attention.value_length")
    groups = m("expert_group_count", 1)
    return {
        "num_key_value_heads": m.need("attention.head_count"),
        "kv_lora_rank": m.need("attention.kv_lora_rank"),
        "q_lora_rank": m("attention.q_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "head_dim": rotary,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "rope_parameters": _rope(m, rotary),
    }


def _linear_attention(m: Metadata) -> Record:
    values = m.need("ssm.time_step_rank")
    return {
        "linear_conv_kernel_dim": m.need("ssm.conv_kernel"),
        "linear_key_head_dim": m.need("ssm.state_size"),
        "linear_num_key_heads": m.need("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": m.need("ssm.inner_size") // values,
        "layer_types": m.kinds("ssm_a", "linear_attention", "full_attention"),
    }


#: llama.cpp's name of an architecture → what its files do not say
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("mixtral"),
    "qwen2moe": Architecture("qwen2_moe", {"norm_topk_prob": False}),
    "qwen3moe": Architecture("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3next": Architecture("qwen3_next", {"norm_topk_prob": True}, _linear_attention),
    "olmoe": Architecture("olmoe", {"norm_topk_prob": False}),
    "phimoe": Architecture("phimoe"),
    "granitemoe": Architecture(
        lambda m: "granitemoeshared" if m.has("ffn_gate_shexp.weight") else "granitemoe"
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {},
        lambda m: {
            "rope_parameters": _rope(m, m.need("attention.key_length")) | {"truncate": False}
        },
        gating=3,
    ),
    "deepseek2": Architecture(
        lambda m: "deepseek_v3" if m.has("exp_probs_b.bias") else "deepseek_v2",
        {"rope_interleave": True},
        _latent,
    ),
    "glm4moe": Architecture("glm4_moe", gating=2),
    "ernie4_5-moe": Architecture("ernie4_5_moe"),
    "hunyuan-moe": Architecture("hunyuan_v1_moe"),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {"norm_topk_prob": True},
        lambda m: {"layer_types": m.kinds("attn_q.weight", "full_attention", "conv")},
        gating=2,
    ),
    "minimax-m2": Architecture("minimax_m2", gating=2),
    "dots1": Architecture("dots1", {"sliding_window": None}, gating=2),
    "afmoe": Architecture("afmoe", {"mup_enabled": True}, gating=2),
}

#: key of the metadata → fields that may state it; the first that a config has is given its value
FIELDS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": NAMES["dense_I"],
    "attention.head_count": NAMES["heads"],
    "attention.head_count_kv": NAMES["kv_heads"],
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
    "shortconv.l_cache": ("conv_L_cache",),
    "expert_count": NAMES["E"],
    "expert_used_count": NAMES["K"],
    "expert_feed_forward_length": NAMES["I"],
    "expert_shared_count": NAMES["shared_count"],
    "expert_shared_feed_forward_length": NAMES["shared_I"],
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": ("norm_topk_prob", "route_norm"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "interleave_moe_layer_step": ("moe_layer_interval",),
}
#: of these, what a model of experts cannot be without
NEEDED = (
    "context_length",
    "embedding_length",
    "attention.head_count",
    "expert_count",
    "expert_used_count",
)
#: what llama.cpp takes where the metadata do not say
DEFAULTS: Record = {
    "expert_weights_norm": False,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "attention.sliding_window": None,
    "attention.clamp_kqv": None,
}
#: keys that change what is computed, so that no word for them must not be ignored
CHANGES = re.compile(r"scale|scaling|softcap|clamp|temperature|window|norm$|group|gating|rope\.")
#: values of such keys that change nothing
NEUTRAL = (None, False, 0, 1, "none")


def config_of(values: Record, header: Header) -> Any:
    """transformers' config of a GGUF file's model.

    values : its metadata by key.    header : its tensors by name.

    Raises ValueError, by name: an architecture that is not known, metadata that are missing, and
    what changes the model in a way that transformers' config has no word for."""
    from transformers import CONFIG_MAPPING, AutoConfig

    m = Metadata(values, header)
    if m.arch not in ARCHITECTURES:
        raise ValueError(
            f"the architecture of the file is {str(m.arch)[:100]!r}, and of GGUF files are read "
            f"{', '.join(ARCHITECTURES)}"
        )
    known = ARCHITECTURES[m.arch]
    model_type = known.model_type if isinstance(known.model_type, str) else known.model_type(m)
    there = CONFIG_MAPPING[model_type].__dataclass_fields__
    for key in NEEDED:
        m.need(key)
    facts = _facts_of_tensors(m)
    for key, fields in FIELDS.items():
        value = m(key, DEFAULTS.get(key, ...))
        field = next((name for name in fields if name in there), None)
        if value is not ... and field:
            facts[field] = value
        elif value not in NEUTRAL and value is not ... and CHANGES.search(key):
            raise _no_word(m, key)
    head_dim = m("attention.key_length") or facts["hidden_size"] // m("attention.head_count")
    facts["rope_parameters"] = _rope(m, head_dim)
    facts |= known.fixed | known.further(m)
    gating = 2 if model_type == "deepseek_v3" else known.gating
    if m("expert_gating_func", gating) not in (0, gating):
        raise _no_word(m, "expert_gating_func")
    for name in sorted(values):
        key = name.removeprefix(f"{m.arch}.")
        if key != name and key not in m.asked and CHANGES.search(key) and m(key) not in NEUTRAL:
            raise _no_word(m, key)
    for token in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{token.replace('pad', 'padding')}_token_id"
        facts[f"{token}_token_id"] = values.get(key)
    always = ("tie_word_embeddings", "vocab_size", *(f"{t}_token_id" for t in ("bos", "eos", "pad")))
    facts = {name: value for name, value in facts.items() if name in there or name in always}
    return AutoConfig.for_model(model_type, **facts)


def _no_word(m: Metadata, key: str) -> ValueError:
    return ValueError(
        f"the file says {m.arch}.{key} = {str(m(key))[:100]}, and this is not read for {m.arch}"
    )


def _facts_of_tensors(m: Metadata) -> Record:
    """What a config says and one sees from the tensors that there are."""
    if "token_embd.weight" not in m.header:
        raise ValueError("the file has no tensor token_embd.weight; download it again")
    bias = m.has("attn_q.bias") or m.has("attn_qkv.bias")
    kinds = m.kinds("ffn_gate_inp.weight", "sparse", "dense")
    leading = (*kinds, "sparse").index("sparse")
    return {
        "num_hidden_layers": m.layers,
        "vocab_size": m.header["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in m.header,
        "lm_head_bias": "output.bias" in m.header,
        "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind == "dense"],
        "mlp_layer_types": kinds,
        "moe_layer_end_index": m.layers - 1 - kinds[::-1].index("sparse"),
        "first_k_dense_replace": leading,
        "num_dense_layers": leading,
        "moe_layer_start_index": leading,
        "use_qk_norm": m.has("attn_q_norm.weight"),
        "use_expert_bias": m.has("exp_probs_b.bias"),
        "conv_bias": m.has("shortconv.conv.bias"),
        **dict.fromkeys(("attention_bias", "qkv_bias", "use_bias"), bias),
    }


# --------------------------------------------------------------------------------------------------
# tensors


class Rule(NamedTuple):
    """How a tensor of a checkpoint lies in a GGUF file of some architectures, if not as it is.

    key : what its key ends with, a regular expression.
    names : of its parts in the file, after "blk.N."; none for the one name that gguf-py knows.
    rows, transposed : as of `Made`; rows by the config and the key.
    read, write : as `Made.make`, and back, by the config."""

    key: str
    archs: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    rows: Callable[[Any, str], np.ndarray] | None = None
    transposed: bool = False
    read: Callable[[Any, Tensors], Tensor] | None = None
    write: Callable[[Any, Tensor], Tensors] | None = None


def _halves(config: Any, key: str) -> np.ndarray:
    """Rotary rows of heads, which llama.cpp has in pairs and transformers in halves."""
    attribute = "num_attention_heads" if ".q_proj" in key else "num_key_value_heads"
    heads = getattr(config, attribute)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return np.arange(heads * size).reshape(heads, size // 2, 2).swapaxes(1, 2).ravel()


def _in_turn(config: Any, key: str) -> np.ndarray:
    """Rows of gate and up in turn."""
    return np.arange(2 * config.intermediate_size).reshape(2, -1).T.ravel()


def _by_head(config: Any, key: str) -> np.ndarray:
    """Rows of q, k, v and z of one key head after the other, which the file has apart."""
    heads = config.linear_num_key_heads
    values = config.linear_num_value_heads * config.linear_value_head_dim // heads
    at, parts = 0, []
    for size in (config.linear_key_head_dim, config.linear_key_head_dim, values, values):
        parts.append(at + np.arange(heads * size).reshape(heads, size))
        at += heads * size
    return np.concatenate(parts, 1).ravel()


def _join_latent(config: Any, parts: Tensors) -> Tensor:
    return torch.cat([parts[0].mT, parts[1]], 1).flatten(0, 1)


def _split_latent(config: Any, whole: Tensor) -> Tensors:
    heads = whole.view(config.num_attention_heads, -1, whole.shape[-1])
    nope = config.qk_nope_head_dim
    return [heads[:, :nope].mT.contiguous(), heads[:, nope:].contiguous()]


GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
ROTARY = ("llama", "granitemoe")
LINEAR = ("qwen3next",)
RULES = (
    Rule(r"self_attn\.[qk]_proj\.(weight|bias)", ROTARY, rows=_halves),
    Rule(r"block_sparse_moe\.input_linear\.weight", ("granitemoe",), GATE_UP),
    Rule(
        r"shared_mlp\.input_linear\.weight",
        ("granitemoe",),
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    ),
    Rule(r"experts\.gate_up_proj", ("gpt-oss",), GATE_UP, _in_turn, True),
    Rule(r"experts\.down_proj", ("gpt-oss",), ("ffn_down_exps.weight",), None, True),
    Rule(r"experts\.down_proj_bias", ("gpt-oss",), ("ffn_down_exps.bias",)),
    Rule(
        r"experts\.gate_up_proj_bias",
        ("gpt-oss",),
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
        read=lambda config, parts: torch.stack(parts, -1).flatten(-2),
        write=lambda config, whole: [whole[..., ::2], whole[..., 1::2]],
    ),
    Rule(
        r"kv_b_proj\.weight",
        ("deepseek2",),
        ("attn_k_b.weight", "attn_v_b.weight"),
        read=_join_latent,
        write=_split_latent,
    ),
    Rule(r"in_proj_qkvz\.weight", LINEAR, ("attn_qkv.weight", "attn_gate.weight"), _by_head),
    Rule(
        r"\.A_log",
        LINEAR,
        ("ssm_a",),
        read=lambda config, parts: (-parts[0]).log(),
        write=lambda config, whole: [-whole.exp()],
    ),
    Rule(
        r"(?<!linear_attn\.)norm\.weight",
        LINEAR,
        read=lambda config, parts: parts[0] - 1,
        write=lambda config, whole: [whole + 1],
    ),
)
#: what gguf-py's tables call otherwise than transformers: pattern → replacement
RENAMED = (
    (r"e_score_correction_bias$", "e_score_correction.bias"),
    (r"\.expert_bias$", ".expert_bias.bias"),
    (r"\.sinks$", ".sinks.weight"),
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"^model\.(layers\.\d+\.feed_forward\.experts\.)", r"\1"),
)
EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.")


class Place(NamedTuple):
    """Where a tensor of a checkpoint lies in a GGUF file: the names of its parts, the rule, if
    there is one, and which expert it is of those that are stacked."""

    names: tuple[str, ...]
    rule: Rule
    expert: int | None


def places(arch: str, config: Any, keys: list[str]) -> Iterator[tuple[str, Place]]:
    """(key, its place) of a checkpoint's tensors that a GGUF file of an architecture has a name
    for."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    rules = [rule for rule in RULES if arch in rule.archs]
    for key in keys:
        expert = EXPERT.search(key)
        name = EXPERT.sub("", key)
        rule = next((r for r in rules if re.search(f"{r.key}$", key)), Rule(""))
        if rule.names:
            layer = re.search(r"\.layers\.(\d+)\.", key)[1]
            found = tuple(f"blk.{layer}.{part}" for part in rule.names)
        else:
            for pattern, other in RENAMED:
                name = re.sub(pattern, other, name)
            found = (names.get_name(name, (".weight", ".bias")),)
        if None not in found:
            yield key, Place(found, rule, int(expert[1]) if expert else None)


def header_of(config: Any, values: Record, header: Header) -> dict[str, Stored | Made]:
    """The tensors of a GGUF file by the keys of a checkpoint of its config.

    Those that no key asks for keep their own names, so that the plan refuses them; but not the
    layers that predict further tokens, nor what the config has said already."""
    arch = values["general.architecture"]
    shapes = {k: tuple(t.shape) for k, t in compat.checkpoint_tensors(config).items()}
    found: dict[str, Stored | Made] = {}
    used = {"rope_factors_long.weight", "rope_factors_short.weight"}
    for key, place in places(arch, config, list(shapes)):
        whole = place.names[0].replace("attn_k_b", "attn_kv_b")
        if whole not in place.names and whole in header:  # a file of before 2025
            place = Place((whole,), Rule(""), None)
        parts = [_part(header, name, place.expert) for name in place.names]
        if None in parts:
            continue
        used |= {part.key for part in parts}
        found[key] = _entry(config, key, place.rule, tuple(parts), shapes[key])
    layers = config.num_hidden_layers
    for name, stored in header.items():
        block = re.match(r"blk\.(\d+)\.", name)
        if name not in used and not (block and int(block[1]) >= layers):
            found[name] = stored
    return found


def _part(header: Header, name: str, expert: int | None) -> Stored | None:
    """A tensor of the file: one expert's of a stack, of a stack that has gate and up together, or
    of its own, as files of before 2024 have it; None where there is none."""
    stored = header.get(name)
    if expert is None:
        return stored
    if stored is None and re.search(r"ffn_(gate|up)_exps", name):
        stored = header.get(re.sub("(gate|up)_exps", "gate_up_exps", name))
        if stored is not None and len(stored.shape) == 3:
            E, rows, columns = stored.shape
            stored = stored._replace(shape=(2 * E, rows // 2, columns))
            expert = 2 * expert + ("ffn_up" in name)
    if stored is None:
        return header.get(name.replace("_exps", "").replace(".weight", f".{expert}.weight"))
    if len(stored.shape) < 2 or expert >= stored.shape[0]:
        return None
    part = stored.slice(expert)
    return part._replace(shape=part.shape[1:])


def _entry(
    config: Any, key: str, rule: Rule, parts: tuple[Stored, ...], shape: Shape
) -> Stored | Made:
    """What a checkpoint's tensor is made of: the file's, where that is the same but for dimensions of
    1; otherwise a `Made`."""
    first = parts[0]
    if len(parts) == 1 and not (rule.rows or rule.transposed or rule.read):
        same = prod(first.shape) == prod(shape) and first.dtype in DTYPES
        return first._replace(shape=shape) if same else first
    rows = rule.rows(config, key) if rule.rows else None
    make = None
    kind = {part.dtype for part in parts}
    if rule.read:
        make = lambda tensors: rule.read(config, tensors)  # noqa: E731
    elif len(kind) > 1:  # which cannot be joined as they lie
        make = Made(parts, rows, None, shape, "F32").join
    dtype = first.dtype if make is None else "F32"
    return Made(parts, rows, make, shape, dtype, rule.transposed)
