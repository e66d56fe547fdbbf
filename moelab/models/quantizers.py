"""Quantised checkpoints are dequantised while they are loaded, by quantisers under names of our own
where transformers' want packages that dequantising does not use."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any

import torch
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)
from transformers.quantizers.auto import (
    get_hf_quantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config, QuantizationConfigMixin

from moelab.base.configs import quantisation
from moelab.models.compat import kept_in_fp32
from moelab.store import packings

#: methods whose layouts `moelab.store.packings` reads
PACKED = ("compressed-tensors", "gptq", "awq")
#: names under which transformers knows our quantisers
FP8 = "moelab-fp8"
UNPACKED = "moelab-unpacked"
#: experts that checkpoints stack, and that are quantised one by one as linear layers: whether the
#: stack is transposed
APART = {"Llama4TextExperts": True, "Qwen3VLMoeTextExperts": False}


def readable(config: Any) -> Any:
    """The config, told to dequantise while loading, by our quantisers where transformers' want GPU
    packages.

    Raises ValueError, by name, for what of compressed-tensors, GPTQ and AWQ is not read."""
    method = quantisation(config)
    if method not in (*PACKED, "fp8", "mxfp4"):
        return config
    config, fields = copy(config), config.quantization_config
    fields = dict(fields if isinstance(fields, dict) else fields.to_dict())
    if method in PACKED:
        packings.scheme(fields, config.name_or_path)
        config.quantization_config = {"quant_method": UNPACKED, "fields": fields}
    else:
        name = FP8 if method == "fp8" else method
        config.quantization_config = fields | {"quant_method": name, "dequantize": True}
    return config


def quantizer_for(config: Any) -> HfQuantizer | None:
    """The quantizer of a `readable` config, set to dequantise; None for a plain one."""
    if getattr(config, "quantization_config", None) is None:
        return None
    config = deepcopy(config)
    return get_hf_quantizer(config, None, device_map=None, weights_only=True, user_agent={})[0]


@register_quantizer(FP8)
class _Fp8(FineGrainedFP8HfQuantizer):
    """transformers' own, without the package accelerate."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        pass


register_quantization_config(FP8)(FineGrainedFP8Config)


@register_quantization_config(UNPACKED)
class _PackedConfig(QuantizationConfigMixin):
    def __init__(self, quant_method: str, fields: dict[str, Any]) -> None:
        self.quant_method = quant_method
        self.fields = fields
        self.dequantize = True


@register_quantizer(UNPACKED)
class _Packed(HfQuantizer):
    """Unpacks the layouts that `moelab.store.packings` reads."""

    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def __init__(self, config: QuantizationConfigMixin, **options: Any) -> None:
        super().__init__(config, **options)
        self.scheme = packings.scheme(config.fields)
        names = packings.KINDS[self.scheme[0]][0]
        self.serialized_names = {"weight": ["weight", *(n for n in names if n != "weight")]}

    def get_load_operations(self) -> dict[str, type]:
        return {"dequantize": _Dequantize}

    def update_weight_conversions(self, weight_conversions: list, model: Any) -> list:
        for kind in {type(module).__name__ for module in model.modules()} & APART.keys():
            steps = [Transpose(1, 2)] * APART[kind]
            gate_up = ["experts.*.gate_proj.weight", "experts.*.up_proj.weight"]
            joined = [MergeModulelist(0), Concatenate(1), *steps]
            weight_conversions = [
                *weight_conversions,
                WeightConverter(gate_up, "experts.gate_up_proj", joined),
                WeightConverter(
                    "experts.*.down_proj.weight",
                    "experts.down_proj",
                    [MergeModulelist(0), *steps],
                ),
            ]
        return super().update_weight_conversions(weight_conversions, model)

    def _convert_model_for_quantization(self, model: Any) -> None:
        pass


class _Dequantize(ConversionOps):
    """The tensors of each layer become its weight, one for each expert where they come in lists."""

    def __init__(self, quantizer: _Packed) -> None:
        self.hf_quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str, model: Any, **_: Any
    ) -> dict[str, Any]:
        layers = {}
        for pattern, found in input_dict.items():
            layer, dot, name = pattern.rpartition(".")
            found = found if isinstance(found, list) else [found]
            layers.setdefault(layer + dot, {})[name] = found
        target = model.get_parameter(full_layer_name)
        dtype = torch.float32 if kept_in_fp32(model, full_layer_name, target) else target.dtype
        return {
            f"{layer}weight" if layer else full_layer_name: [
                self._weight(dict(zip(tensors, one))).to(dtype)
                for one in zip(*tensors.values(), strict=True)
            ]
            for layer, tensors in layers.items()
        }

    def _weight(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        weight = tensors.get("weight")
        plain = weight is not None and weight.is_floating_point() and weight.itemsize > 1
        if plain and len(tensors) == 1:
            return weight  # not quantised
        return packings.dequantize(*self.hf_quantizer.scheme, tensors)
