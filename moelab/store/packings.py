"""Quantised linear layers as compressed-tensors, GPTQ and AWQ publish them, kept byte for byte.

Sources: the compressed-tensors library (pack-, int- and float-quantized); Frantar et al., GPTQ, in
the files of AutoGPTQ and GPTQModel; Lin et al., AWQ, in AutoAWQ's layout "gemm". R outputs, n
inputs, a scale for g inputs of an output; a word is an int32 of 32/b codes, b bits each, the first
in the lowest bits:

    kind                 codes                                  scales                     zero points
    compressed-tensors   weight_packed, words [R, nb/32], or    weight_scale [R, n/g]      weight_zero_point, words
                         weight [R, n], int8 or e4m3                                       [Rb/32, n/g] or int8 [R, n/g]
    gptq, gptq_v2        qweight, words [nb/32, R]              scales [n/g, R]            qzeros, words [n/g, Rb/32]
    awq                  qweight, words [n, R/8]                scales [n/g, R]            qzeros, words [n/g, R/8]

Codes and zero points in words of compressed-tensors have 2^(b−1) added; there a scale may also be
one for an output, for a matrix, or for blocks of 128 × 128. Zero points of "gptq" are stored less
1; `g_idx` says the group of each input. In AWQ's words the outputs are in the order 0 2 4 6 1 3 5
7. A weight is (code − zero point) · scale, rounded to the scale's dtype, then to the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.base.files import beside
from moelab.base.records import Record
from moelab.store import fewbit
from moelab.store.codec import rows_in_blocks
from moelab.store.headers import DTYPES, NAMES, Shape, Tensors

_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the outputs 0 … 7 are in a word of AWQ

# ---------------------------------------------------------------------------------------------
# from a config.json

#: method → field of its quantization_config → what is read there
READ = beside(__file__)


def scheme(config: Record, checkpoint: str = "the checkpoint") -> tuple[str, int]:
    """(kind, bits) of a quantization_config; bits are those of packed codes. Raises ValueError, by
    name and with a remedy, for what is not read."""
    method = getattr(config.get("quant_method"), "value", config.get("quant_method"))
    try:
        widths = sorted(
            {
                group["weights"]["num_bits"]
                for group in (config.get("config_groups") or {}).values()
                if (group.get("format") or config.get("format")) == "pack-quantized"
            }
        )
        config = config | {"packed widths": widths}
        fields = [(field, of) for field in READ[method] for of in _at(config, field.split("."))]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the quantization_config of {checkpoint} makes no sense ({type(error).__name__}: {error}); "
            f"correct it"
        ) from error
    for field, value in fields:
        text = str(value).lower()
        known = READ[method][field]
        if text not in known:
            raise ValueError(
                f"{checkpoint} is quantised with {method}, and {field} {text[:60]!r} is not read here; "
                f"{', '.join(known)} are. Take one of these, or the unquantised checkpoint of the model"
            )
    if method == "compressed-tensors":
        return method, max(widths, default=8)
    return str(config.get("checkpoint_format") or method).lower(), int(config["bits"])


def _at(node: Any, path: list[str]) -> Iterator[Any]:
    """What lies at a path through dictionaries; None where it ends too early."""
    if not path or node is None:
        yield node
    elif path[0] == "*":
        for member in node.values():
            yield from _at(member, path[1:])
    else:
        yield from _at(node.get(path[0]), path[1:])


# ---------------------------------------------------------------------------------------------
# from tensors to weights


def _codes(words: Tensor, bits: int) -> Tensor:
    """The codes in words int32 that are packed along the last axis: uint8."""
    *rows, n = words.shape
    codes = words.reshape(-1).view(torch.uint8).view(*rows, 4 * n)
    return codes if bits == 8 else fewbit.nibbles(codes)


def _product(codes: Tensor, zeros: Tensor | None, scales: Tensor) -> Tensor:
    """codes [R, n], zero points and scales [R, n/g] or [1, 1], g any number."""
    wide = codes.unflatten(1, (scales.shape[1], -1)).float()
    if zeros is not None:
        wide.sub_(zeros.unsqueeze(-1))
    return wide.mul_(scales.unsqueeze(-1)).to(scales.dtype).flatten(1)


def _compressed(t: Tensors, bits: int) -> Tensor:
    scales = t["weight_scale"]
    zeros = t.get("weight_zero_point")
    if (codes := t.get("weight")) is None:
        codes = _codes(t["weight_packed"], bits).view(torch.int8) - (1 << bits - 1)
    R, n = codes.shape
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _codes(zeros.mT, bits).view(torch.int8).mT[:R] - (1 << bits - 1)
    blocks = -(-R // fewbit.BLOCK), -(-n // fewbit.BLOCK)
    if scales.numel() > 1 and scales.shape == blocks and blocks[0] != R:
        scales = fewbit.spread_blocks(scales, R, n)
    scales = scales.reshape(R if scales.numel() > 1 else 1, -1)
    return _product(codes, None if zeros is None else zeros.reshape(scales.shape), scales)


def _gptq(t: Tensors, bits: int, less: int = 1) -> Tensor:
    codes = _codes(t["qweight"].transpose(0, 1), bits)
    scales = t["scales"].mT
    zeros = (_codes(t["qzeros"], bits) + less & (1 << bits) - 1).mT
    groups = t["g_idx"].long()
    negative = not groups.is_meta and bool((groups < 0).any())
    if negative or groups.shape != codes.shape[1:] or not scales.shape[1]:
        raise ValueError(f"g_idx does not name a group for each of {codes.shape[1]} inputs")
    return _product(codes, zeros[:, groups], scales[:, groups])


def _awq(t: Tensors, bits: int) -> Tensor:
    words = _codes(t["qweight"], bits), _codes(t["qzeros"], bits)
    codes, zeros = (of.unflatten(-1, (-1, 8))[..., _ORDER].flatten(-2).mT for of in words)
    return _product(codes, zeros, t["scales"].mT)


#: kind → (names of tensors, as they may follow each other in a blob; what makes weights [R, n] of
#: them)
KINDS = {
    "compressed-tensors": (
        ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape"),
        _compressed,
    ),
    "gptq": (("qweight", "scales", "qzeros", "g_idx"), _gptq),
    "gptq_v2": (("qweight", "scales", "qzeros", "g_idx"), lambda t, bits: _gptq(t, bits, 0)),
    "awq": (("qweight", "scales", "qzeros"), _awq),
}


def dequantize(kind: str, bits: int, tensors: Tensors) -> Tensor:
    """Weights [R, n] of a layer's tensors by name, in the scales' dtype. Raises ValueError where
    they do not fit."""
    try:
        return KINDS[kind][1](tensors, bits)
    except (KeyError, IndexError, RuntimeError, ZeroDivisionError) as error:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in tensors.items())
        raise ValueError(
            f"{shapes} are no {kind} layer of {bits} bits ({type(error).__name__}: {error})"
        ) from error


# ---------------------------------------------------------------------------------------------
# what is kept


@dataclass(frozen=True)
class Packing(fewbit.FewBits):
    """The tensors of matrices that lie one below the other in the model's: the first tensor of all
    matrices, the second one of all … Where kernels can multiply them as they lie, each scale stands
    in the blob once for 32 inputs.

    name : the kind.
    bits : of a code.
    matrices : how many.
    tensors : (name, dtype as safetensors names it, shape) of those of one matrix.
    """

    bits: int
    matrices: int
    tensors: tuple[tuple[str, str, Shape], ...]

    @property
    def record(self) -> Record:
        about = asdict(self)
        return {"kind": about.pop("name"), **about}

    @cached_property
    def times(self) -> int:
        """How often each scale stands in the blob, for kernels that want one for 32 inputs; 0 if
        they cannot multiply it: they can symmetric codes with bf16 scales of whole groups."""
        given = {name: (dtype, shape) for name, dtype, shape in self.tensors}
        scales, grid = given.get("weight_scale", ("", ()))
        _, codes, shape = self.tensors[0]
        packed = {("I32", 4): 8, ("I8", 8): 1}.get((codes, self.bits))
        if not packed or scales != "BF16" or "weight_zero_point" in given or len(grid) != 2:
            return 0
        R = shape[0]
        n = shape[1] * packed
        groups = n // fewbit.GROUP  # of 32 inputs
        whole = n % (2 * fewbit.GROUP) == 0 and grid[0] == R and grid[1] and groups % grid[1] == 0
        return groups // grid[1] if whole else 0

    def parts(self, shape: Shape) -> dict[str, tuple[torch.dtype, Shape, int]]:
        """Of the tensors of each matrix, "qweight.0" and so on."""
        if tuple(shape) != _shape_of(self):
            raise ValueError(f"a tensor {list(shape)} cannot be {str(self)[:200]}")
        return {
            f"{name}.{i}": (DTYPES[dtype], of, self.repeats(name))
            for name, dtype, of in self.tensors
            for i in range(self.matrices)
        }

    def repeats(self, tensor: str) -> int:
        """How often each entry of a tensor stands in the blob."""
        return (self.times or 1) if tensor == "weight_scale" else 1

    def decompress(self, blob: Any, out: Tensor) -> None:
        found = self.split(blob, out.shape)
        matrices = (
            {name: found[f"{name}.{i}"] for name, *_ in self.tensors} for i in range(self.matrices)
        )
        out.copy_(torch.cat([dequantize(self.name, self.bits, of) for of in matrices]))

    def kernel(self, dtype: str, shape: Shape) -> str:
        """A format's, whose blob this is. Rounding to the scales' bf16 is left out there, which is
        within the tolerance of a model in bf16, and of no other."""
        if not self.times or dtype != "BF16" or not rows_in_blocks(shape):
            return ""
        return "int4" if self.tensors[0][0] == "weight_packed" else "int8"

    def row(self, address: int, length: int, shape: Shape) -> list[int]:
        return fewbit.find_format(self.kernel("BF16", shape)).row(address, length, shape)


@lru_cache(4096)
def _shape_of(packing: Packing) -> Shape:
    """Of the weights. Raises ValueError where there can be none."""
    try:
        tensors = {
            name: torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            for name, dtype, shape in packing.tensors
        }
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{packing} has an impossible type or size") from error
    made = dequantize(packing.name, packing.bits, tensors)
    return packing.matrices * made.shape[0], *made.shape[1:]


def from_record(record: Record) -> Packing:
    """The packing of a `Packing.record`. Raises ValueError and the like for any other."""
    kind = record["kind"]
    bits = record["bits"]
    matrices = record["matrices"]
    if kind not in KINDS or bits not in (4, 8) or matrices not in range(1, 100):
        raise ValueError(f"{str(record)[:200]} is no packing")
    tensors = tuple((name, dtype, tuple(shape)) for name, dtype, shape in record["tensors"])
    return Packing(kind, bits, int(matrices), tensors)


def gathered(
    kind: str, bits: int, sources: Iterable[tuple[str, int, Tensor]]
) -> tuple[Packing, np.ndarray]:
    """The packing and the blob of what a checkpoint stores of a tensor; LookupError if that is not
    quantised.

    sources : (key, 0, tensor) of each, as of `moelab.checkpoint.experts.CheckpointExperts.made`.
    """
    layers = {}
    for key, _, tensor in sources:
        layer, _, name = key.rpartition(".")
        layers.setdefault(layer, {})[name] = tensor
    one = next(iter(layers.values()))
    tensors = tuple(
        (name, NAMES[one[name].dtype], tuple(one[name].shape))
        for name in KINDS[kind][0]
        if name in one
    )
    packing = Packing(kind, bits, len(layers), tensors)
    parts = (
        layer[name].reshape(-1).repeat_interleave(packing.repeats(name))
        for name, *_ in tensors
        for layer in layers.values()
    )
    return packing, fewbit.joined(*parts)
