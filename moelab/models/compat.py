"""The one file that uses what is not public API of transformers (5.20 to 5.23).

A model class and a meta-device twin for a config; construction and loading that change nothing
global, so that other threads may use transformers meanwhile; the key renaming and weight conversion
of any hub checkpoint."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def model_class(config: Any) -> type:
    """The generating class for a config, whole: causal language model, encoder-decoder, or
    multimodal model."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    autos = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText)
    for auto in reversed(autos) if config.get_text_config() is not config else autos:
        if found := auto._model_mapping.get(type(config), None):
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(
        f"transformers has no generating model for model_type {config.model_type!r}; moelab runs causal "
        f"language models, encoder-decoders, and those that read images and write text"
    )


class _NewTensors(TorchFunctionMode):
    """Within the block, in this thread, floating-point numbers that follow from none are of this
    dtype, unless another is given: what `torch.set_default_dtype` does for all threads."""

    asked = (Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        asked = kwargs.get("dtype") is not None or func in self.asked
        if asked or not isinstance(made, Tensor) or not made.is_floating_point():
            return made
        known = (
            value.is_floating_point() if isinstance(value, Tensor) else hasattr(value, "dtype")
            for value in tree_leaves((args, kwargs))
        )
        return made if any(known) else made.to(self.dtype)


@cache
def _tie_weights() -> Callable[..., None]:
    """transformers' own `tie_weights`, which each of its `from_pretrained` switches off for all
    threads meanwhile."""
    from transformers import PreTrainedModel

    while (found := PreTrainedModel.tie_weights).__name__ != "tie_weights":
        time.sleep(0.001)
    return found


@cache
def _private(cls: type) -> type:
    """A model class whose models are constructed without changing anything that other threads see.

    `from_pretrained` does that within contexts that set torch's default dtype and methods of
    `PreTrainedModel`."""

    def tie_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        _tie_weights()(self, *args, **kwargs)

    def get_init_context(_: type, dtype: torch.dtype, *_args: Any) -> list[Any]:
        return [torch.device("meta"), _NewTensors(dtype)]

    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    members |= {"tie_weights": tie_weights, "get_init_context": classmethod(get_init_context)}
    return type(cls.__name__, (cls,), members)


def meta_twin(config: Any, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The whole model without any memory behind it (the meta device), unquantised.

    dtype : of its weights, if that is another one than its config's."""
    config = deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    config.dtype = dtype or config.dtype
    config._experts_implementation = "eager"
    for part in config.sub_configs:
        if (of := getattr(config, part)) is not None:
            of.dtype = config.dtype
    with torch.device("meta"), _NewTensors(config.dtype or torch.float32):
        model = _private(model_class(config))(config)
    model.__class__ = type(model).__base__
    return model


def fill(model: torch.nn.Module, config: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Give a model on the meta device its tensors, by transformers' `from_pretrained`; returns what
    that reports.

    It is given a model where it would construct one, and tensors instead of a folder, so it looks
    for nothing else there: no adapters, other weights or code.

    config : the checkpoint's, which says how it is quantised (`models.quantizers.readable`)."""
    from transformers.utils import logging

    stock = type(model)
    model.__class__ = private = _private(stock)
    filled = type(stock.__name__, (private,), {"__new__": lambda cls, config, model: model})
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        _, report = filled.from_pretrained(
            None,
            model=model,
            config=config,
            state_dict=tensors,
            dtype=model.config.dtype,
            output_loading_info=True,
            trust_remote_code=False,
        )
    finally:
        if bars:
            logging.enable_progress_bar()
    model.__class__ = stock
    return report


# --------------------------------------------------------------------------------------------------
# transformers' experts

#: the name of moelab's implementation of experts
MOELAB = "moelab"


def dispatches_by_name(cls: type) -> bool:
    """Whether the forward of an experts class is the one of `use_experts_implementation`, which asks
    the config whose function to call."""
    code = getattr(cls.forward, "__code__", None)
    return bool(code) and code.co_qualname.startswith("use_experts_implementation.")


def dispatch(config: Any, name: str | None) -> str | None:
    """Have all experts of a config computed by the implementation of this name; returns the one
    before. The config is where the decorator's forward looks."""
    before = config._experts_implementation
    config._experts_implementation = name
    return before


def register_experts(forward: Callable[..., Tensor]) -> None:
    """Make a function `MOELAB`'s: called with an experts module, x, ids and weights."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(MOELAB, forward)


def apply_gate(experts: nn.Module, h: Tensor) -> Tensor:
    """The gate of an experts class [n, 2I] → [n, I], the usual one where it has none: there is no
    public way to it."""
    if hasattr(experts, "_apply_gate"):
        return experts._apply_gate(h)
    gate, up = h.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def initialised(*modules: nn.Module) -> None:
    """Keep `from_pretrained` from initialising what is to have no parameters."""
    for module in modules:
        module._is_hf_initialized = True


def is_sdpa(config: Any) -> bool:
    """Whether attention is torch's `scaled_dot_product_attention`; the config has no public getter."""
    return config._attn_implementation == "sdpa"


#: the method that makes the source of drafts of an assisted generation
CANDIDATES = "_get_candidate_generator"


#: ways of splitting text, by llama.cpp's name, that are the same as another
SPLITS = {
    **dict.fromkeys(("olmo", "mpt", "gpt2", "default"), "gpt-2"),
    **dict.fromkeys(("glm4", "chatglm-bpe"), "llama-bpe"),
    "hunyuan": "qwen2",
}


def model_output(x: Tensor, cache: Any) -> Any:
    """What a decoder model with experts returns: hidden states after its last norm, and a cache."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    return MoeModelOutputWithPast(last_hidden_state=x, past_key_values=cache)


#: whether a model keeps what cannot be cut back to a part of the text
is_stateful = attrgetter("_is_stateful")


def empty_cache(model: nn.Module) -> Any:
    """The cache that `generate` would make, which can be cut back where its layers can; None for a
    model that makes its own."""
    from transformers import DynamicCache

    if not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not is_stateful(model):
        cache.activate_past_recording()
    return cache


def describe(model: nn.Module, folder: Path) -> None:
    """Say where a model is from, which its config has no public setter for, and how it generates: by
    its checkpoint's generation_config.json, or else by what its config says."""
    from transformers import GenerationConfig

    model.name_or_path = model.config._name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    else:
        model.generation_config = GenerationConfig.from_model_config(model.config)


def gguf_tokenizer(fields: dict[str, Any]) -> Any:
    """The tokenizer that the fields of a GGUF file describe, tokenizer.json itself if that is among
    them. Raises ValueError for one that splits text in a way that is not known."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    of = GGUF_TOKENIZER_MAPPING["tokenizer"].items()
    said = {ours: fields[f"tokenizer.{key}"] for key, ours in of if f"tokenizer.{key}" in fields}
    kind = said.get("tokenizer_type")
    split = said.get("pre_tokenizer_type", "default")
    split = SPLITS.get(split, split)
    if whole := fields.get("tokenizer.huggingface.json"):
        backend = Tokenizer.from_str(whole)
    elif kind == "gpt2" and split not in {*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2"}:
        raise ValueError(f"it splits text as {split!r} does, which is not known here")
    else:
        said["pre_tokenizer_type"] = split
        backend, _ = convert_gguf_tokenizer(fields["general.architecture"], said)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{ours}_token": token
        for ours, name in names.items()
        if (i := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None
        and (token := backend.id_to_token(i))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        add_bos_token=fields.get("tokenizer.ggml.add_bos_token", kind == "llama"),
        add_eos_token=fields.get("tokenizer.ggml.add_eos_token", False),
        **special,
    )


def pre_tokenizer(tokenizer: Any) -> str | None:
    """llama.cpp's name of the way in which a byte-level tokenizer splits text; None where it has none
    that is known."""
    import json

    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if tokenizer is None or not tokenizer.is_fast:
        return None
    first = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    first = first.get("pretokenizers", [first])[0]
    if first.get("type") == "ByteLevel" and first["use_regex"]:
        return "gpt-2"
    split = first.get("pattern", {}).get("Regex")
    return next((name for name, of in GGUF_PRE_TOKENIZER_SPLITS.items() if of == split), None)


# --------------------------------------------------------------------------------------------------
# torch: what its public ways copy or walk through, which takes too long for each token


#: a module's dictionaries, by name
parameters_of = attrgetter("_parameters")
buffers_of = attrgetter("_buffers")
children_of = attrgetter("_modules")
#: its forward pre-hooks and hooks; there is no public way to see them
hooks_on = attrgetter("_forward_pre_hooks", "_forward_hooks")


def hooks_made() -> int:
    """How many hooks were ever put on anything."""
    return torch.utils.hooks.RemovableHandle.next_id


#: `torch.compiler.disable`, which loads the compiler, 3 s, only when a function of its is called
uncompiled = torch._disable_dynamo

#: a number that is another one once a dict was changed; Python has no public way to it
version = torch._C._dynamo.guards.dict_version


def with_children(module: nn.Module, children: dict[str, Any]) -> nn.Module:
    """A shallow copy of a module with other children, which need be no modules."""
    twin = copy(module)
    twin._modules = module._modules | children
    return twin


def hooks_on_all() -> bool:
    """Whether there are forward hooks on all modules; there is no public way to see them."""
    everywhere = nn.modules.module
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


def copy_each(into: list[Tensor], given: list[Tensor]) -> None:
    """Copy tensors in one launch."""
    torch._foreach_copy_(into, given)


# -------------------------------------------------------------------------- checkpoint keys → the
# model's parameters


@dataclass
class ParameterPlan:
    """Where one parameter, or the parameters that are made together with it, come from.

    target : its full name in the model.
    sources : checkpoint keys by pattern, in the order in which they are joined; one each, or, where
        they lie `apart`, one for each number (expert) from 0 on.
    converter : transformers' WeightConverter from these sources, or None where a key is merely
        renamed.
    single : whether it is one expert's alone, where others are stacked.
    rows : how many of its rows are one expert's; 0 where experts are stacked, [E, …]."""

    target: str
    sources: dict[str, list[str]]
    converter: Any = None
    apart: bool = False
    single: bool = False
    rows: int = 0

    @property
    def keys(self) -> list[str]:
        return [key for keys in self.sources.values() for key in keys]


def loading_plan(
    twin: torch.nn.Module, keys: Iterable[str], quantizer: Any = None
) -> tuple[dict[str, ParameterPlan], dict[str, str]]:
    """How a model's parameters are made of checkpoint keys, as transformers would load them:
    ({target: plan}, foreign).

    twin : the whole model on the meta device.
    foreign : {name it would have: key} of what it has no parameter for.

    Raises ValueError where numbered keys lack a number or have one twice, or two keys claim one
    parameter."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(twin, hf_quantizer=quantizer)
    renamings, converters = (
        [t for t in transforms if isinstance(t, kind)]
        for kind in (loading.WeightRenaming, loading.WeightConverter)
    )
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    parameters = twin.state_dict()
    plans = {}
    foreign = {}
    for key in sorted(keys, key=loading.dot_natural_key):
        for rules in ((renamings, converters), ([], [])):  # some keys are names already
            target, pattern = loading.rename_source_key(
                key, *rules, twin.base_model_prefix, parameters
            )
            if target in parameters or key not in parameters:
                break
        if target not in parameters:
            foreign[target] = key
            continue
        plan = plans.setdefault(target, ParameterPlan(target, {}, by_pattern.get(pattern)))
        if pattern is None and plan.sources or (plan.converter is None) != (pattern is None):
            raise ValueError(f"{key} and {plan.keys[0]} both are {target}")
        plan.sources.setdefault(pattern or key, []).append(key)
    for plan in plans.values():
        patterns = dict.fromkeys((*getattr(plan.converter, "source_patterns", ()), *plan.sources))
        plan.apart = any("*" in pattern for pattern in plan.sources)
        plan.sources = {
            pattern: _in_order(plan, pattern, renamings)
            for pattern in patterns
            if pattern in plan.sources
        }
    return plans, foreign


def as_saved(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model by the keys of a checkpoint, as transformers would save them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def _in_order(plan: ParameterPlan, pattern: str, renamings: list[Any]) -> list[str]:
    """A pattern's keys in the order of their numbers; ValueError unless these are 0, 1, …, each once.
    How many there must be, the parameter's shape says."""
    from transformers.core_model_loading import apply_renamings

    keys = plan.sources[pattern]
    number = r"(0|[1-9]\d{0,8})\."
    if "*" not in pattern and len(keys) == 1:
        return keys
    shape = re.compile(pattern.replace("*.", number))
    found = [(shape.search(apply_renamings(key, renamings)), key) for key in keys]
    numbered = {int(match[1]): key for match, key in found if match and match.groups()}
    if absent := set(range(len(keys))) - numbered.keys():
        raise ValueError(
            f"{pattern.replace('*', str(min(absent)))} is missing of what {plan.target} is made of, or "
            f"there are others ({', '.join(keys[:4])})"
        )
    return [numbered[number] for number in range(len(keys))]


def converted(
    plan: ParameterPlan, tensors: dict[str, Any], twin: Any, quantizer: Any = None
) -> dict[str, torch.Tensor]:
    """The parameters that a plan makes, by full name, from its sources by pattern: a tensor or a
    list of them each."""
    if plan.converter is None:
        return {plan.target: next(iter(tensors.values()))}
    converter = copy(plan.converter)
    converter.collected_tensors = defaultdict(list)
    converter.layer_targets = defaultdict(set)  # these two are all of its state
    given = [
        (pattern, tensor)
        for pattern, found in tensors.items()
        for tensor in (found if isinstance(found, list) else [found])
    ]
    mixed = quantizer is None and len({tensor.dtype for _, tensor in given}) > 1
    for pattern, tensor in given:
        tensor = tensor.double() if mixed else tensor  # which holds all of the others
        converter.add_tensor(plan.target, pattern, pattern, tensor)
    made = converter.convert(plan.target, model=twin, config=twin.config, hf_quantizer=quantizer)
    return {name: of[0] if isinstance(of, list) else of for name, of in made.items()}


def is_concatenation(plan: ParameterPlan, quantizer: Any = None) -> bool:
    """Whether one expert's parameter is the bytes of its sources, one after another; not where they
    are transposed, interleaved or dequantised."""
    if plan.converter is None:
        return True
    steps = {(type(op).__name__, getattr(op, "dim", None)) for op in plan.converter.operations}
    return quantizer is None and steps <= {("MergeModulelist", 0), ("Concatenate", 1)}


def may_lack(
    twin: torch.nn.Module, missing: set[str], made: set[str], foreign: set[str]
) -> tuple[set[str], set[str]]:
    """(missing, unexpected) without what the architecture declares tied, optional or superfluous.

    missing, made, foreign : names of what the checkpoint lacks, has, and has beyond the parameters
    and buffers."""
    tied = dict(twin.all_tied_weights_keys)
    present = {tied.get(name, name) for name in made}
    missing = {name for name in missing if tied.get(name, name) not in present}
    report = SimpleNamespace(missing_keys=missing, unexpected_keys=foreign)
    twin._adjust_missing_and_unexpected_keys(report)
    return report.missing_keys, report.unexpected_keys


def kept_in_fp32(
    twin: torch.nn.Module, name: str, parameter: torch.Tensor, dtype: torch.dtype | None = None
) -> bool:
    """Whether a parameter is fp32 whatever the dtype of the model, by the architecture's own
    declaration or code.

    dtype : of the model, if that is another one than its config's.
    """
    own = twin.config.dtype
    if parameter.dtype == torch.float32 and (dtype is None or own != torch.float32):
        return True
    declared = twin._get_dtype_plan(dtype or own)
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in declared)
