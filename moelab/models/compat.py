"""The one file that uses what is not public API of transformers.

Three things: a model class and a meta-device twin for a config; construction with some classes replaced, which
is how a model comes into being without its experts; and the key renaming and weight conversion that turn any hub
checkpoint's expert tensors into the ones the model computes with. Written against transformers 5.20 to 5.23;
when a later release moves something, `tests/models/test_compat.py` says what.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch


def model_class(config: Any) -> type:
    """The generating class for a config: causal language model, or encoder-decoder."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        found = auto._model_mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"transformers has no generating model for model_type {config.model_type!r}; "
                     f"moelab runs causal language models and encoder-decoders")


def meta_twin(config: Any) -> torch.nn.Module:
    """The whole model without any memory behind it (the meta device), unquantised."""
    config = deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        return model_class(config)._from_config(config)


@contextmanager
def classes_replaced(classes: Iterable[type], replacement: Callable[[type], type]) -> Iterator[None]:
    """Within the block, the modules that define `classes` construct `replacement(cls)` instead of `cls`.

    The names are put back whatever happens inside.
    """
    homes = [(sys.modules[cls.__module__], cls) for cls in classes]
    try:
        for module, cls in homes:
            setattr(module, cls.__name__, replacement(cls))
        yield
    finally:
        for module, cls in homes:
            setattr(module, cls.__name__, cls)


def dequantising(config: Any) -> Any:
    """The config, told to dequantise while loading where its quantiser can; otherwise MXFP4 wants GPU packages."""
    quantised = getattr(config, "quantization_config", None)
    method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
    if getattr(method, "value", method) not in ("mxfp4", "fp8"):
        return config
    config = deepcopy(config)
    if isinstance(config.quantization_config, dict):
        config.quantization_config["dequantize"] = True
    else:
        config.quantization_config.dequantize = True
    return config


def quantizer_for(config: Any):
    """The quantizer of a quantised checkpoint, set to dequantise; None for a plain one."""
    if getattr(config, "quantization_config", None) is None:
        return None
    from transformers.quantizers.auto import get_hf_quantizer
    config = dequantising(deepcopy(config))
    quantizer, *_ = get_hf_quantizer(config, None, device_map=None, weights_only=True, user_agent={})
    return quantizer


def share_conversion(model_type: str, like: str) -> None:
    """Make checkpoints of `model_type` load by the conversion table of another model type."""
    from transformers import conversion_mapping
    conversion_mapping.register_checkpoint_conversion_mapping(
        model_type, conversion_mapping.get_checkpoint_conversion_mapping(like))


# ------------------------------------------------------------------------------- checkpoint keys → expert tensors

@dataclass
class ParameterPlan:
    """Where one parameter of one experts module comes from.

    sources : checkpoint keys by pattern; either one key that holds all E experts, or E keys, one an expert.
    converter : transformers' WeightConverter from these sources, or None where a key is merely renamed.
    """

    name: str
    sources: dict[str, list[str]]
    converter: Any = None


def expert_plan(twin: torch.nn.Module, keys: Iterable[str], experts: Iterable[str], quantizer: Any = None
                ) -> dict[str, dict[str, ParameterPlan]]:
    """For each experts module, how its parameters are made of checkpoint keys: {module: {parameter: plan}}.

    twin : the model on the meta device, with its experts.
    keys : all keys of the checkpoint.
    experts : names of the experts modules.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(twin, hf_quantizer=quantizer)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    parameters = twin.state_dict()
    owners = sorted(experts, key=len, reverse=True)
    plans: dict[str, dict[str, ParameterPlan]] = {name: {} for name in owners}

    for key in sorted(keys, key=dot_natural_key):
        if "expert" not in key:
            continue
        target, pattern = rename_source_key(key, renamings, converters, twin.base_model_prefix, parameters)
        if target not in parameters and key in parameters:
            target, pattern = key, None
        owner = next((name for name in owners if target.startswith(name + ".")), None)
        if owner is None or target not in parameters:
            continue
        name = target[len(owner) + 1:]
        plan = plans[owner].setdefault(name, ParameterPlan(name, {}, by_pattern.get(pattern)))
        plan.sources.setdefault(pattern or key, []).append(key)
    return plans


def convert_expert(plan: ParameterPlan, tensors: dict[str, torch.Tensor], full_name: str, twin: torch.nn.Module,
                   quantizer: Any = None) -> torch.Tensor:
    """One expert's parameter [1, …] from its source tensors by pattern, by transformers' own conversion.

    full_name : the parameter's full name in the model.
    """
    if plan.converter is None:
        return next(iter(tensors.values()))
    converter = deepcopy(plan.converter)
    for pattern, tensor in tensors.items():
        converter.add_tensor(full_name, pattern, pattern, tensor)
    made = converter.convert(full_name, model=twin, config=twin.config, hf_quantizer=quantizer)
    made = made[full_name]
    return made[0] if isinstance(made, list) else made


def numbered_expert(name: str) -> tuple[int, str] | None:
    """`expert_12.wi.weight` → (12, "wi.weight"); None for a parameter that holds all experts."""
    match = re.fullmatch(r"expert_(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else None
