"""GGUF files in transformers' words: the config that their metadata say, and their tensors under the
keys that a checkpoint of that model has.

Which of llama.cpp's names is which key of a checkpoint, gguf-py's own tables know; here is what they
leave out: what llama.cpp's code of an architecture takes for granted, in which words a config says what
the metadata say, and what llama.cpp's converter changes in a tensor. That is in `gguf_names.toml`, which
is followed here from the file to the checkpoint, and in `moelab.checkpoint.export` back. What no table
has a word for is refused by name, never guessed.

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

from moelab.base.files import beside
from moelab.base.records import Record
from moelab.models import compat
from moelab.store.headers import DTYPES, Header, Shape, Stored

Parts = list[Tensor]


class Made(NamedTuple):
    """A tensor of a checkpoint that differs from what lies in a GGUF file, or is made of several;
    beside `Stored`, in whose place it can be.

    parts : the tensors of the file, or slices of them.
    rows : which of their rows, one part's after the other's, is each of its own; None for all as
        they are. No block is cut, so they can stay packed.
    make : of decoded parts, what no order of rows can give; else None.
    transposed : whether its last two dimensions are exchanged then."""

    parts: tuple[Stored, ...]
    rows: Tensor | None
    make: Callable[[Parts], Tensor] | None
    shape: Shape
    dtype: str
    transposed: bool = False

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def slice(self, i: int, rows: int = 1) -> Made:
        """The i-th of its parts of so many experts, where these are stacked."""
        parts = tuple(part.slice(i, rows) for part in self.parts)
        return self._replace(parts=parts, shape=(rows, *self.shape[1:]))

    def join(self, read: Parts) -> Tensor:
        """Its rows, of the parts' decoded values or of their packed rows (uint8)."""
        joined = torch.cat(read, -2)
        return joined if self.rows is None else joined.index_select(-2, self.rows)

    def values(self, read: Parts) -> Tensor:
        """The tensor, of the parts' decoded values."""
        made = self.make(read) if self.make else self.join(read)
        return (made.mT if self.transposed else made).reshape(self.shape)


# --------------------------------------------------------------------------------------------------
# configs


class Metadata(dict[str, Any]):
    """What a file says of its architecture, keys without their prefix: of lists the largest, of floats
    of 32 bits the numbers that were meant. Beside it, the tensors by name and all their names without
    "blk.N."."""

    def __init__(self, values: Record, header: Header) -> None:
        super().__init__(TABLES["defaults"])
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
    key, value = (
        m.get(f"attention.{of}_length_mla", m.get(f"attention.{of}_length"))
        for of in ("key", "value")
    )
    grouped = m["expert_group_count"] > 1
    return {
        "num_key_value_heads": m["attention.head_count"],
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "head_dim": rotary,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "rope_parameters": _rope(m, rotary),
    }


class Architecture(NamedTuple):
    """One of llama.cpp's, see `gguf_names.toml`."""

    name: str
    type: str
    scores: int = 1
    tensor: str = ""
    config: Record = {}
    layers: tuple[str, ...] = ()
    written: bool = True

    @property
    def fixed(self) -> Record:
        """Fields of the config that llama.cpp's code takes for granted."""
        return {field: value or None for field, value in self.config.items()}


TABLES = beside(__file__)
ARCHITECTURES = [Architecture(**of) for of in TABLES["architectures"]]
#: key of the metadata → fields that may state it
FIELDS = TABLES["needed"] | TABLES["optional"] | TABLES["fields"]
TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
#: keys that change what is computed, so that one without a word for it must not be ignored
CHANGES = re.compile(
    r"(?!rope\.(dim|freq_base$|scaling\.(type|factor|orig|fine|yarn_(beta|log)))|ssm\.)"
    r".*(scal|softcap|clamp|temperature|window|norm$|group|rope\.)"
)
#: values of such keys that change nothing
NEUTRAL = (None, False, 1, "none")


def config_of(values: Record, header: Header) -> Any:
    """transformers' config of a GGUF file's model.

    values : its metadata by key.
    header : its tensors by name.

    Raises ValueError, by name: an architecture that is not known, metadata that are missing, and
    what changes the model in a way that transformers' config has no word for."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from moelab.models import deepseek  # noqa: F401  (makes transformers know it)

    m = Metadata(values, header)
    arch = next(
        (of for of in ARCHITECTURES if of.name == m.arch and of.tensor in ("", *m.names)), None
    )
    if arch is None:
        raise ValueError(
            f"the architecture of the file is {str(m.arch)[:100]!r}, and of GGUF files are read "
            f"{', '.join(of.name for of in ARCHITECTURES)}"
        )
    there = CONFIG_MAPPING[arch.type].__dataclass_fields__
    facts = _facts_of_tensors(m, values)
    told = {"attention.sliding_window_pattern"}
    for key, fields in FIELDS.items():
        if field := next((name for name in fields.split() if name in there), None):
            told.add(key)
            if key in TABLES["optional"]:
                facts[field] = m.get(key) or None
            elif key in m or key in TABLES["needed"]:
                facts[field] = m[key]
    head_dim = m.get("attention.key_length") or m["embedding_length"] // m["attention.head_count"]
    facts["rope_parameters"] = _rope(m, head_dim)
    if "linear_value_head_dim" in there:
        facts["linear_value_head_dim"] = m["ssm.inner_size"] // m["ssm.time_step_rank"]
    if arch.layers:
        facts["layer_types"] = m.kinds(*arch.layers)
    facts |= (_latent(m) if "kv_lora_rank" in there else {}) | arch.fixed
    for key in sorted(m.keys() - told):
        wrong = CHANGES.match(key) and m[key] not in NEUTRAL
        if wrong or key == "expert_gating_func" and m[key] not in (0, arch.scores):
            raise ValueError(
                f"the file says {m.arch}.{key} = {str(m[key])[:100]}, and this is not read of {m.arch}"
            )
    always = {"tie_word_embeddings", "vocab_size", *(f"{of}_token_id" for of in TOKENS)}
    return AutoConfig.for_model(
        arch.type, **{name: facts[name] for name in facts if name in always | there.keys()}
    )


def _facts_of_tensors(m: Metadata, values: Record) -> Record:
    """What a config says and one sees from the tensors that there are, and special tokens."""
    for name in ("token_embd.weight", "ffn_gate_inp.weight"):
        if name not in m.names:
            raise ValueError(f"the file has no tensor {name}, so it holds no model of experts")
    kinds = m.kinds("ffn_gate_inp.weight", "sparse", "dense")
    facts = {field: name in m.names for field, name in TABLES["seen"].items()} | {
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
    split : by which of `SPLITS` parts are made of the tensor [..., R, columns].
    transposed : whether its last two dimensions are exchanged first.
    rows : whether the parts are rows of it, so that no block is cut.
    change : which of `CHANGED` is done to each value."""

    key: str = ""
    archs: str = ""
    names: str = ""
    split: str = ""
    transposed: bool = False
    rows: bool = True
    change: str = ""

    def parts(self, config: Any, of: Tensor) -> Parts:
        """A tensor's parts in the file, but for `change`."""
        return SPLITS[self.split](config, of.mT if self.transposed else of)


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
    keys = config.linear_num_key_heads
    k = config.linear_key_head_dim
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


#: name → the parts in a file of a tensor, by the config
SPLITS = {
    "": lambda config, of: [of],
    "in_pairs": _in_pairs,
    "halves": lambda config, of: of.chunk(2, -2),
    "in_turn": lambda config, of: [of[..., ::2, :], of[..., 1::2, :]],
    "latent_heads": _latent_heads,
    "apart": _apart,
    "tiled": _tiled,
    "tiled_columns": lambda config, of: [_tiled(config, of.mT)[0].mT],
}
#: what is done to each value, and undone
CHANGED = {
    "": (lambda of: of, lambda of: of),
    "decay": (lambda of: -of.exp(), lambda of: (-of).log()),
    "shift": (lambda of: of + 1, lambda of: of - 1),
}
RULES = [Rule(**of) for of in TABLES["rules"]]
EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.")


def places(
    arch: str, config: Any, keys: Iterable[str]
) -> Iterator[tuple[str, list[str], Rule, int | None]]:
    """(key, names of its parts in a GGUF file, the rule, which expert it is of those that are
    stacked) of a checkpoint's tensors that a file of an architecture has a name for."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    rules = [rule for rule in RULES if arch in rule.archs.split()]
    for key in keys:
        expert = EXPERT.search(key)
        name = EXPERT.sub("", key)
        for pattern, other in TABLES["renamed"].items():
            name = re.sub(pattern, other, name)
        rule = next((rule for rule in rules if re.search(f"({rule.key})$", key)), Rule())
        layer = re.search(r"\.layers\.(\d+)\.", key)
        found = [f"blk.{layer[1]}.{part}" for part in rule.names.split()]
        found = found or [names.get_name(name, (".weight", ".bias"))]
        if None not in found:
            yield key, found, rule, int(expert[1]) if expert else None


def header_of(config: Any, values: Record, header: Header) -> dict[str, Stored | Made]:
    """The tensors of a GGUF file by the keys of a checkpoint of its config.

    Those that no key asks for keep their own names, so that the plan refuses them; but not the
    layers that predict further tokens, nor what the config has said already."""
    model = compat.meta_twin(config)
    twin = compat.as_saved(model, model.state_dict())
    found = {}
    used = {"rope_factors_long.weight", "rope_factors_short.weight"}
    for key, names, rule, expert in places(values["general.architecture"], config, twin):
        older = names[0].replace("attn_k_b", "attn_kv_b").replace("attn_qkv", "ssm_in")
        if names[0] not in header and older in header:
            names = [older]
            rule = Rule()
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
    if rule[2:] == Rule()[2:]:
        same = prod(first.shape) == prod(shape) and first.dtype in DTYPES
        return first._replace(shape=shape) if same else first
    if len(shape) == 1 or key.endswith("_bias"):  # vectors are columns
        parts = [part._replace(shape=(*part.shape, 1)) for part in parts]
    rows = make = None
    if not rule.rows:
        make = partial(_gathered, rule, config, shape)
    else:
        index = torch.arange(sum(part.shape[-2] for part in parts))
        order = torch.cat([*SPLITS[rule.split](config, index[:, None])])[:, 0]
        rows = None if torch.equal(order, index) else order.argsort()
    return Made(tuple(parts), rows, make, shape, first.dtype, rule.transposed)


def _gathered(rule: Rule, config: Any, shape: Shape, parts: Parts) -> Tensor:
    """A tensor of parts that are no rows of it, or other values."""
    whole = parts[0].new_empty(prod(shape))
    places = rule.parts(config, torch.arange(prod(shape)).view(shape))
    for place, part in zip(places, parts, strict=True):
        whole[place] = CHANGED[rule.change][1](part).view(place.shape)
    return whole
