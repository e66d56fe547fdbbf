"""GGUF files in transformers' words: the config that their metadata say, and their tensors under the
keys that a checkpoint of that model has.

Which of llama.cpp's names is which key of a checkpoint, gguf-py's own tables know; here is what they
leave out: what llama.cpp's code of an architecture takes for granted (`ARCHITECTURES`), and what
its converter changes in a tensor (`RULES`, which `moelab.checkpoint.export` follows, and which are
undone here). What no table has a word for is refused by name, never guessed.

Source: gguf-py's `constants` and `tensor_mapping`; the conventions of llama.cpp's
`convert_hf_to_gguf.py`; the hyperparameters that its loaders read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.base.records import Record
from moelab.models import compat
from moelab.store.headers import DTYPES, Header, Shape, Stored

Parts = list[Tensor]


class Made(NamedTuple):
    """A tensor of a checkpoint that differs from what lies in a GGUF file, or is made of several.

    stored : the tensors of the file, or slices of them.
    rows : which of their rows, one part's after the other's, is each of its own; None for all as
        they are. No block is cut, so they can stay packed.
    make : of decoded parts, what no order of rows can give; else None.
    transposed : whether its last two dimensions are exchanged then."""

    stored: tuple[Stored, ...]
    rows: Tensor | None
    make: Callable[[Parts], Tensor] | None
    shape: Shape
    dtype: str
    transposed: bool = False

    @property
    def file(self) -> Path:
        return self.stored[0].file

    def slice(self, i: int, rows: int = 1) -> Made:
        """The i-th of its parts of so many experts, where these are stacked."""
        parts = tuple(part.slice(i, rows) for part in self.stored)
        return self._replace(stored=parts, shape=(rows, *self.shape[1:]))

    def empty(self, device: str = "cpu") -> Tensor:
        """A new tensor of its shape, fp32, as its parts are decoded."""
        return torch.empty(self.shape, device=device)

    def join(self, parts: Parts) -> Tensor:
        """Its rows, of the parts' decoded values or of their packed rows (uint8)."""
        joined = torch.cat(parts, -2)
        return joined if self.rows is None else joined.index_select(-2, self.rows)

    def values(self, parts: Parts) -> Tensor:
        """The tensor, of the parts' decoded values."""
        made = self.make(parts) if self.make else self.join(parts)
        return (made.mT if self.transposed else made).reshape(self.shape)


# --------------------------------------------------------------------------------------------------
# configs


class Metadata(dict[str, Any]):
    """What a file says of its architecture, keys without their prefix: of lists the largest, of floats
    of 32 bits the numbers that were meant. Beside it, the tensors by name and all their names without
    "blk.N."."""

    def __init__(self, values: Record, header: Header) -> None:
        self.arch = values.get("general.architecture")
        for name, value in values.items():
            if name.startswith(f"{self.arch}."):
                value = int(np.max(value, initial=0)) if np.ndim(value) else value
                value = float(str(np.float32(value))) if isinstance(value, float) else value
                self[name.removeprefix(f"{self.arch}.")] = value
        self.header = header
        self.names = {re.sub(r"^blk\.\d+\.", "", name) for name in header}

    def __missing__(self, key: str) -> Any:
        raise ValueError(
            f"the file does not say {self.arch}.{key}, without which no model of experts can be made; "
            f"convert it again"
        )

    def kinds(self, name: str, there: str, absent: str) -> list[str]:
        """Of each layer, a word for whether it has a tensor; not of layers that predict further
        tokens, which transformers has not."""
        layers = range(self["block_count"] - self.get("nextn_predict_layers", 0))
        return [there if f"blk.{i}.{name}" in self.header else absent for i in layers]


def _rope(m: Metadata, head_dim: int) -> Record:
    """Rotary positions, as transformers' `rope_parameters`."""
    kind = m.get("rope.scaling.type", "none")
    if "rope_factors_long.weight" in m.header:
        kind = "longrope"
    rope = {"rope_type": kind, "rope_theta": m.get("rope.freq_base", 1e4)}
    if (dims := m.get("rope.dimension_count", head_dim)) != head_dim:
        rope["partial_rotary_factor"] = dims / head_dim
    factor = m.get("rope.scaling.factor")
    original = m.get("rope.scaling.original_context_length")
    if kind == "none":
        return rope | {"rope_type": "default"}
    if kind == "yarn":
        rope["truncate"] = m.arch != "gpt-oss"
        rope["beta_fast"] = m.get("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = m.get("rope.scaling.yarn_beta_slow", 1.0)
        if log := m.get("rope.scaling.yarn_log_multiplier", 0):
            rope["mscale"] = rope["mscale_all_dim"] = round(10 * log, 6)
    if kind == "longrope":
        factor = m["context_length"] / original
        scale = m.pop("rope.scaling.attn_factor", 1.0)
        for length in ("short", "long"):
            stored = m.header[f"rope_factors_{length}.weight"]
            rope[f"{length}_factor"] = stored.read(0, stored.nbytes).view(np.float32).tolist()
            rope[f"{length}_mscale"] = scale
    return rope | {"factor": factor, "original_max_position_embeddings": original}


def _latent(m: Metadata) -> Record:
    """DeepSeek's latent attention; files of before 2025 have whole heads."""
    rotary = m["rope.dimension_count"]
    key, value = (m.get(f"attention.{of}_length") for of in ("key", "value"))
    grouped = m.get("expert_group_count", 1) > 1
    return {
        "num_key_value_heads": m["attention.head_count"],
        "kv_lora_rank": m["attention.kv_lora_rank"],
        "q_lora_rank": m.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": m.get("attention.key_length_mla", key) - rotary,
        "v_head_dim": m.get("attention.value_length_mla", value),
        "head_dim": rotary,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "rope_interleave": True,
        "rope_parameters": _rope(m, rotary),
    }


def _linear_attention(m: Metadata) -> Record:
    values = m["ssm.time_step_rank"]
    return {
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": m["ssm.conv_kernel"],
        "linear_key_head_dim": m["ssm.state_size"],
        "linear_num_key_heads": m["ssm.group_count"],
        "linear_num_value_heads": values,
        "linear_value_head_dim": m["ssm.inner_size"] // values,
        "layer_types": m.kinds("ssm_a", "linear_attention", "full_attention"),
    }


def _convolutions(m: Metadata) -> Record:
    kinds = m.kinds("attn_q.weight", "full_attention", "conv")
    return {"norm_topk_prob": True, "layer_types": kinds}


#: llama.cpp's name of an architecture → transformers' model type; how experts' scores are made (1
#: softmax, 2 sigmoid, 3 softmax of the chosen); fields of the config that llama.cpp's code takes for
#: granted or the metadata say in other terms. The last may be a function of the metadata
ARCHITECTURES: dict[str, tuple[str, int, Any]] = {
    "llama": ("mixtral", 1, {}),
    "qwen2moe": ("qwen2_moe", 1, {}),
    "qwen3moe": ("qwen3_moe", 1, {"norm_topk_prob": True}),
    "qwen3vlmoe": ("qwen3_moe", 1, {"norm_topk_prob": True}),
    "qwen3next": ("qwen3_next", 1, _linear_attention),
    "qwen35moe": ("qwen3_5_moe_text", 1, _linear_attention),
    "olmoe": ("olmoe", 1, {}),
    "phimoe": ("phimoe", 1, {}),
    "granitemoe": ("granitemoe", 1, {}),
    "gpt-oss": ("gpt_oss", 3, {}),
    "deepseek": ("deepseek", 1, {}),
    "deepseek2": ("deepseek_v2", 1, _latent),
    "glm4moe": ("glm4_moe", 2, {}),
    "ernie4_5-moe": ("ernie4_5_moe", 1, {}),
    "hunyuan-moe": ("hunyuan_v1_moe", 1, {}),
    "lfm2moe": ("lfm2_moe", 2, _convolutions),
    "minimax-m2": ("minimax_m2", 2, {}),
    "dots1": ("dots1", 2, {"sliding_window": None}),
    "exaone-moe": ("exaone_moe", 2, {}),
}
#: an architecture → a tensor that makes it another one
OTHERS = {
    "granitemoe": ("ffn_gate_shexp.weight", "granitemoeshared", 1),
    "deepseek2": ("exp_probs_b.bias", "deepseek_v3", 2),
}

#: key of the metadata → fields that may state it; the first that a config has is given its value
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.clamp_kqv": "clip_qkv",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "shortconv.l_cache": "conv_L_cache",
    "expert_count": "n_routed_experts num_local_experts num_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok moe_topk moe_k",
    "expert_feed_forward_length": "moe_intermediate_size intermediate_size",
    "expert_shared_count": "n_shared_experts num_shared_experts moe_num_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size shared_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "interleave_moe_layer_step": "moe_layer_interval",
}
#: what llama.cpp takes where the metadata do not say; what is not here may be missing
DEFAULTS = {
    "expert_weights_norm": False,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "attention.sliding_window": None,
    "attention.clamp_kqv": None,
}
#: what no model of experts is without
NEEDED = {
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "expert_count",
    "expert_used_count",
}
#: fields that tell whether there is a tensor
SEEN = {
    "lm_head_bias": "output.bias",
    "attention_bias": "attn_q.bias",
    "qkv_bias": "attn_q.bias",
    "use_bias": "attn_q.bias",
    "use_qk_norm": "attn_q_norm.weight",
    "use_expert_bias": "exp_probs_b.bias",
    "conv_bias": "shortconv.conv.bias",
}
#: keys that change what is computed, so that one without a word for it must not be ignored
CHANGES = re.compile(
    r"(?!rope\.(dim|freq_base$|scaling\.(type|factor|orig|fine|yarn_(beta|log)))|ssm\.)"
    r".*(scal|softcap|clamp|temperature|window|norm$|group|rope\.)"
)
#: values of such keys that change nothing
NEUTRAL = (None, False, 1, "none")
TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def config_of(values: Record, header: Header) -> Any:
    """transformers' config of a GGUF file's model.

    values : its metadata by key.    header : its tensors by name.

    Raises ValueError, by name: an architecture that is not known, metadata that are missing, and
    what changes the model in a way that transformers' config has no word for."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from moelab.models import deepseek  # noqa: F401  (makes transformers know it)

    m = Metadata(values, header)
    if m.arch not in ARCHITECTURES:
        raise ValueError(
            f"the architecture of the file is {str(m.arch)[:100]!r}, and of GGUF files are read "
            f"{', '.join(ARCHITECTURES)}"
        )
    model_type, gating, further = ARCHITECTURES[m.arch]
    if m.arch in OTHERS and OTHERS[m.arch][0] in m.names:
        _, model_type, gating = OTHERS[m.arch]
    there = CONFIG_MAPPING[model_type].__dataclass_fields__
    facts = _facts_of_tensors(m, values)
    told = {"attention.sliding_window_pattern"}
    for key, fields in FIELDS.items():
        if field := next((name for name in fields.split() if name in there), None):
            value = m[key] if key in NEEDED else m.get(key, DEFAULTS.get(key, there))
            told.add(key)
            if value is not there:
                facts[field] = value or None if "window" in key else value
    head_dim = m.get("attention.key_length") or m["embedding_length"] // m["attention.head_count"]
    facts["rope_parameters"] = _rope(m, head_dim)
    facts |= further(m) if callable(further) else further
    for key in sorted(m.keys() - told):
        wrong = CHANGES.match(key) and m[key] not in NEUTRAL
        if wrong or key == "expert_gating_func" and m[key] not in (0, gating):
            raise ValueError(
                f"the file says {m.arch}.{key} = {str(m[key])[:100]}, and this is not read of {m.arch}"
            )
    always = {"tie_word_embeddings", "vocab_size", *(f"{of}_token_id" for of in TOKENS)}
    return AutoConfig.for_model(
        model_type, **{name: facts[name] for name in facts if name in always | there.keys()}
    )


def _facts_of_tensors(m: Metadata, values: Record) -> Record:
    """What a config says and one sees from the tensors that there are, and special tokens."""
    for name in ("token_embd.weight", "ffn_gate_inp.weight"):
        if name not in m.names:
            raise ValueError(f"the file has no tensor {name}, so it holds no model of experts")
    kinds = m.kinds("ffn_gate_inp.weight", "sparse", "dense")
    facts = {field: name in m.names for field, name in SEEN.items()} | {
        "num_hidden_layers": len(kinds),
        "vocab_size": m.header["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in m.names,
        "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind == "dense"],
        "mlp_layer_types": kinds,
        "moe_layer_end_index": len(kinds) - 1 - kinds[::-1].index("sparse"),
    }
    for field in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        facts[field] = kinds.index("sparse")
    for token, name in TOKENS.items():
        facts[f"{token}_token_id"] = values.get(f"tokenizer.ggml.{name}_token_id")
    windows = values.get(f"{m.arch}.attention.sliding_window_pattern")
    if np.ndim(windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        facts["layer_types"] = kinds[: len(facts["mlp_layer_types"])]
    return facts


# --------------------------------------------------------------------------------------------------
# tensors


class Rule(NamedTuple):
    """How a tensor of a checkpoint lies in GGUF files of some architectures, if not as it is.

    key : what its key ends with, a regular expression.
    names : of its parts in the file, after "blk.N."; none for the one name that gguf-py knows.
    split : its parts, by the config and the tensor [..., R, columns].
    transposed : whether its last two dimensions are exchanged first.
    rows : whether the parts are rows of it, so that no block is cut.
    change : a function of each value, and its inverse."""

    key: str
    archs: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    split: Callable[[Any, Tensor], Parts] = lambda config, of: [of]
    transposed: bool = False
    rows: bool = True
    change: tuple[Callable[[Tensor], Tensor], ...] = ()


def _in_pairs(config: Any, of: Tensor) -> Parts:
    """Rotary rows of heads, which transformers has in halves and llama.cpp in pairs."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [of.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)]


def _latent_heads(config: Any, of: Tensor) -> Parts:
    heads = of.unflatten(0, (config.num_attention_heads, -1))
    nope = config.qk_nope_head_dim
    return [heads[:, :nope].mT, heads[:, nope:]]


def _apart(config: Any, of: Tensor) -> Parts:
    """q, k, v and z, which a checkpoint has of one key head after the other."""
    keys, k = config.linear_num_key_heads, config.linear_key_head_dim
    heads = of.unflatten(0, (keys, -1))
    v = heads.shape[1] // 2 - k
    q, k, v, z = (part.flatten(0, 1) for part in heads.split([k, k, v, v], 1))
    return [torch.cat([q, k, v]), z]


def _tiled(config: Any, of: Tensor) -> Parts:
    """Value heads, the last rows, which a checkpoint has by their key head, and llama.cpp one of each
    in turn."""
    values = config.linear_num_value_heads
    before = max(0, len(of) - values * config.linear_value_head_dim)
    keys = config.linear_num_key_heads
    heads = of[before:].unflatten(0, (keys, values // keys, -1))
    return [torch.cat([of[:before], heads.transpose(0, 1).flatten(0, 2)])]


GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
BIASES = ("ffn_gate_exps.bias", "ffn_up_exps.bias")
SHARED = ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")
HALVES = lambda config, of: of.chunk(2, -2)  # noqa: E731
TURNS = lambda config, of: [of[..., ::2, :], of[..., 1::2, :]]  # noqa: E731
COLUMNS = lambda config, of: [_tiled(config, of.mT)[0].mT]  # noqa: E731
DECAY = (lambda of: -of.exp(), lambda of: (-of).log())
SHIFT = (lambda of: of + 1, lambda of: of - 1)
PLAIN = Rule("")
NEXT, NEWER, GRANITE, OSS = ("qwen3next",), ("qwen35moe",), ("granitemoe",), ("gpt-oss",)
RULES = (
    Rule(r"self_attn\.[qk]_proj\.\w+", ("llama", "granitemoe", "deepseek"), (), _in_pairs),
    Rule(r"block_sparse_moe\.input_linear\.weight", GRANITE, GATE_UP, HALVES),
    Rule(r"shared_mlp\.input_linear\.weight", GRANITE, SHARED, HALVES),
    Rule(r"experts\.gate_up_proj", OSS, GATE_UP, TURNS, True),
    Rule(r"experts\.gate_up_proj_bias", OSS, BIASES, TURNS),
    Rule(r"experts\.down_proj", OSS, ("ffn_down_exps.weight",), transposed=True),
    Rule(r"experts\.down_proj_bias", OSS, ("ffn_down_exps.bias",)),
    Rule(
        r"kv_b_proj\.weight",
        ("deepseek2",),
        ("attn_k_b.weight", "attn_v_b.weight"),
        _latent_heads,
        rows=False,
    ),
    Rule(r"in_proj_qkvz\.weight", NEXT, ("attn_qkv.weight", "attn_gate.weight"), _apart),
    Rule(r"in_proj_(qkv|z|a|b)\.weight|conv1d\.weight|dt_bias", NEWER, (), _tiled),
    Rule(r"linear_attn\.out_proj\.weight", NEWER, (), COLUMNS, rows=False),
    Rule(r"A_log", NEWER, ("ssm_a",), _tiled, rows=False, change=DECAY),
    Rule(r"A_log", NEXT, ("ssm_a",), rows=False, change=DECAY),
    Rule(r"(?<!attn\.)norm\.weight", NEXT + NEWER, rows=False, change=SHIFT),
)
#: what gguf-py's tables call otherwise than transformers: pattern → replacement
RENAMED = {
    r"e_score_correction_bias$": "e_score_correction.bias",
    r"\.expert_bias$": ".expert_bias.bias",
    r"\.sinks$": ".sinks.weight",
    r"\.dt_bias$": ".dt_proj.bias",
    r"^model\.(layers\.\d+\.feed_forward\.experts\.)": r"\1",
}
EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.")


def places(
    arch: str, config: Any, keys: Iterable[str]
) -> Iterator[tuple[str, list[str], Rule, int | None]]:
    """(key, names of its parts in a GGUF file, the rule, which expert it is of those that are
    stacked) of a checkpoint's tensors that a file of an architecture has a name for."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    rules = [rule for rule in RULES if arch in rule.archs]
    for key in keys:
        expert = EXPERT.search(key)
        name = EXPERT.sub("", key)
        for pattern, other in RENAMED.items():
            name = re.sub(pattern, other, name)
        rule = next((rule for rule in rules if re.search(f"({rule.key})$", key)), PLAIN)
        layer = re.search(r"\.layers\.(\d+)\.", key)
        found = [f"blk.{layer[1]}.{part}" for part in rule.names]
        found = found or [names.get_name(name, (".weight", ".bias"))]
        if None not in found:
            yield key, found, rule, int(expert[1]) if expert else None


def header_of(config: Any, values: Record, header: Header) -> dict[str, Stored | Made]:
    """The tensors of a GGUF file by the keys of a checkpoint of its config.

    Those that no key asks for keep their own names, so that the plan refuses them; but not the
    layers that predict further tokens, nor what the config has said already."""
    model = compat.meta_twin(config)
    twin = compat.as_saved(model, model.state_dict())
    found: dict[str, Stored | Made] = {}
    used = {"rope_factors_long.weight", "rope_factors_short.weight"}
    for key, names, rule, expert in places(values["general.architecture"], config, twin):
        older = names[0].replace("attn_k_b", "attn_kv_b").replace("attn_qkv", "ssm_in")
        if names[0] not in header and older in header:
            names, rule = [older], PLAIN
        parts = [_part(header, name, expert) for name in names]
        if None not in parts:
            used |= {part.key for part in parts}
            found[key] = _entry(config, key, rule, parts, tuple(twin[key].shape))
    for name, stored in header.items():
        block = re.match(r"blk\.(\d+)\.", name)
        if name not in used and not (block and int(block[1]) >= config.num_hidden_layers):
            found[name] = stored
    return found


def _part(header: Header, name: str, expert: int | None) -> Stored | None:
    """A tensor of the file: one expert's of a stack, of a stack that has gate and up together, or
    of its own, as files of before 2024 have it; None where there is none."""
    both = re.sub("_(gate|up)_exps", "_gate_up_exps", name)
    if expert is None or name in header:
        stack = header.get(name)
    elif stack := header.get(both):
        E, rows, columns = stack.shape
        stack = stack._replace(shape=(2 * E, rows // 2, columns))
        expert = 2 * expert + ("_up_" in name)
    else:
        return header.get(name.replace("_exps.weight", f".{expert}.weight"))
    if stack is None or expert is None:
        return stack
    part = stack.slice(expert)
    return part._replace(shape=part.shape[1:])


def _entry(config: Any, key: str, rule: Rule, parts: list[Stored], shape: Shape) -> Stored | Made:
    """What a checkpoint's tensor is made of: the file's, where that is the same but for dimensions of
    1; otherwise a `Made`."""
    first = parts[0]
    if rule[2:] == PLAIN[2:]:
        same = prod(first.shape) == prod(shape) and first.dtype in DTYPES
        return first._replace(shape=shape) if same else first
    if len(shape) == 1 or key.endswith("_bias"):  # vectors are columns
        parts = [part._replace(shape=(*part.shape, 1)) for part in parts]
    if not rule.rows:
        make = partial(_gathered, rule, config, shape)
        return Made(tuple(parts), None, make, shape, first.dtype)
    index = torch.arange(sum(part.shape[-2] for part in parts))
    order = torch.cat([*rule.split(config, index[:, None])])[:, 0]
    rows = None if torch.equal(order, index) else order.argsort()
    return Made(tuple(parts), rows, None, shape, first.dtype, rule.transposed)


def _gathered(rule: Rule, config: Any, shape: Shape, parts: Parts) -> Tensor:
    """A tensor of parts that are no rows of it, or other values."""
    whole = parts[0].new_empty(prod(shape))
    places = rule.split(config, torch.arange(prod(shape)).view(shape))
    for place, part in zip(places, parts, strict=True):
        back = rule.change[1](part) if rule.change else part
        whole[place] = back.view(place.shape)
    return whole
