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

A *packing* is the name under which a store keeps such tensors of matrices that lie one below the
other in the model's: kind, bits, their number, and the tensors of one, "gptq:4*2
qweight:I32[256,768] …". Its blob has the tensors' own bytes, the first one's of all matrices, the
second one's … Where kernels can multiply it as it lies (symmetric, bf16 scales for a multiple of 32
inputs), each scale stands there once for 32 inputs: "weight_scale:BF16[768,16]x4"."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.store.bits import as_bytes
from moelab.store.headers import DTYPES, NAMES, Shape, Tensors

BLOCK, GROUP = 128, 32
_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the outputs 0 … 7 are in a word of AWQ


# --------------------------------------------------------------------------------------------------
# from a config.json


def scheme(config: dict[str, Any], checkpoint: str = "the checkpoint") -> tuple[str, int]:
    """(kind, bits) of a quantization_config. Raises ValueError, by name and with a remedy, for what
    is not read."""
    try:
        return _scheme(config, checkpoint)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the quantization_config of {checkpoint} makes no sense ({type(error).__name__}: {error}); "
            f"correct it"
        ) from error


def _scheme(config: dict[str, Any], checkpoint: str) -> tuple[str, int]:
    method = getattr(config.get("quant_method"), "value", config.get("quant_method"))

    def need(ok: Any, what: str, known: str) -> None:
        if not ok:
            raise ValueError(
                f"{checkpoint} is quantised with {method}, {what}, which is not read here; {known}. Take "
                f"one of these, or the unquantised checkpoint of the model"
            )

    if method != "compressed-tensors":
        field, kinds, widths = {
            "gptq": ("checkpoint_format", ("gptq", "gptq_v2"), (4, 8)),
            "awq": ("version", ("gemm",), (4,)),
        }[method]
        bits, kind = config.get("bits"), str(config.get(field) or kinds[0]).lower()
        need(
            type(bits) is int and bits in widths,
            f"in {bits} bits",
            f"{' and '.join(map(str, widths))} bits are",
        )
        need(kind in kinds, f"in the layout {kind[:40]!r}", f"{' and '.join(kinds)} are")
        need(config.get("zero_point", True), "without zero points", "zero_point: true is")
        for pattern in config.get("dynamic") or ():
            need(
                pattern.startswith("-:"),
                f"in another way for {pattern[:40]}",
                "one way for all layers is",
            )
        return kind if method == "gptq" else method, bits
    need(
        not config.get("kv_cache_scheme"), "its KV cache too (kv_cache_scheme)", "weights alone are"
    )
    need(
        not config.get("transform_config"),
        "after transforms (transform_config)",
        "plain weights are",
    )
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    need(sparse == "dense", f"sparse ({sparse})", "dense weights are")
    packed: set[int] = set()
    for group in config["config_groups"].values():
        weights, layout = group["weights"], str(group.get("format") or config.get("format"))
        kind, bits, strategy = (
            weights.get("type", "int"),
            weights.get("num_bits"),
            weights.get("strategy"),
        )
        need(
            layout in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
            f"in the layout {layout[:40]!r}",
            "pack-quantized, int-quantized and float-quantized are",
        )
        need(
            (kind, bits) in (("int", 4), ("int", 8), ("float", 8)),
            f"in {kind}{bits}",
            "int4, int8 and fp8 are",
        )
        for name in ("input_activations", "output_activations"):
            # What would be quantised as it comes stays as it is, like DeepSeek's FP8: more exact
            # than the model's own.
            need(
                (group.get(name) or {"dynamic": True}).get("dynamic") is True,
                f"{name} by stored scales",
                "weights alone, or with dynamic activations, are",
            )
        need(
            weights.get("actorder") not in ("group", True),
            "in act-order (actorder: group)",
            "the inputs' order is",
        )
        need(
            strategy in ("tensor", "channel", "group", "block"),
            f"by {strategy}",
            "a scale a tensor, channel, group or block is",
        )
        need(
            strategy != "block" or weights.get("block_structure") in ("128x128", [128, 128]),
            f"in blocks of {weights.get('block_structure')}",
            "128 × 128 are",
        )
        packed |= {bits} if layout == "pack-quantized" else set()
    need(len(packed) < 2, "packed in several widths", "one is")
    return method, packed.pop() if packed else 8


# ------------------------------------------------------------------------------------------- from
# tensors to weights


def _codes(words: Tensor, bits: int) -> Tensor:
    """The codes in words int32 that are packed along the last axis: uint8."""
    codes = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    return codes if bits == 8 else torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def _product(codes: Tensor, zeros: Tensor | None, scales: Tensor) -> Tensor:
    """codes [R, n], zero points and scales [R, n/g], g any number."""
    scales, zeros = (None if of is None else of.unsqueeze(-1) for of in (scales, zeros))
    wide = codes.unflatten(1, (scales.shape[1], -1)).float()
    wide = wide if zeros is None else wide.sub_(zeros)
    return wide.mul_(scales).to(scales.dtype).flatten(1)


def _compressed(t: Tensors, bits: int) -> Tensor:
    scales, zeros, codes = t["weight_scale"], t.get("weight_zero_point"), t.get("weight")
    if codes is None:
        codes = _codes(t["weight_packed"], bits).view(torch.int8) - (1 << bits - 1)
    elif codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"weight is {codes.dtype}; codes are int8 or e4m3")
    R, n = codes.shape
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _codes(zeros.mT, bits).view(torch.int8).mT[:R] - (1 << bits - 1)
    if scales.numel() == 1:
        scales, zeros = (
            None if of is None else of.reshape(1, 1).expand(R, 1) for of in (scales, zeros)
        )
    elif scales.shape == (-(-R // BLOCK), -(-n // BLOCK)) and scales.shape[0] != R:
        scales = scales.repeat_interleave(BLOCK, 0)[:R].repeat_interleave(BLOCK, 1)[:, :n]
    return _product(codes, zeros, scales.reshape(R, -1))


def _gptq(t: Tensors, bits: int, less: int = 1) -> Tensor:
    codes, groups, scales = (
        _codes(t["qweight"].transpose(0, 1), bits),
        t["g_idx"].long(),
        t["scales"].mT,
    )
    zeros = (_codes(t["qzeros"], bits) + less & (1 << bits) - 1).mT
    if (
        groups.shape != codes.shape[1:]
        or not groups.is_meta
        and not (int(groups.min()) >= 0 and int(groups.max()) < scales.shape[1])
    ):
        raise ValueError(
            f"g_idx should name one of {scales.shape[1]} groups for each of {codes.shape[1]} inputs"
        )
    if (
        len(groups) % scales.shape[1]
        or not groups.is_meta
        and not torch.equal(groups, torch.arange(len(groups)) // (len(groups) // scales.shape[1]))
    ):
        scales, zeros = scales[:, groups], zeros[:, groups]  # act-order
    return _product(codes, zeros, scales)


def _awq(t: Tensors, bits: int) -> Tensor:
    codes, zeros = (
        _codes(t[name], bits).unflatten(-1, (-1, 8))[..., _ORDER].flatten(-2)
        for name in ("qweight", "qzeros")
    )
    return _product(codes.mT, zeros.mT, t["scales"].mT)


#: kind → (names of tensors, as they may follow each other in a blob; what makes weights [R, n] of
#: them)
KINDS: dict[str, tuple[tuple[str, ...], Callable[[Tensors, int], Tensor]]] = {
    "compressed-tensors": (
        ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape"),
        _compressed,
    ),
    "gptq": (("qweight", "scales", "qzeros", "g_idx"), _gptq),
    "gptq_v2": (("qweight", "scales", "qzeros", "g_idx"), lambda t, bits: _gptq(t, bits, 0)),
    "awq": (("qweight", "scales", "qzeros"), _awq),
}
#: last parts of keys that are a quantised layer's scales
SCALES = ("weight_scale", "scales")


def dequantize(kind: str, bits: int, tensors: Tensors) -> Tensor:
    """Weights [R, n] of a layer's tensors by name, in the scales' dtype. Raises ValueError where
    they do not fit."""
    try:
        made = KINDS[kind][1](tensors, bits)
    except (KeyError, IndexError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{', '.join(f'{name} {list(t.shape)}' for name, t in tensors.items())} are no {kind} layer "
            f"of {bits} bits ({type(error).__name__}: {error})"
        ) from error
    shape = tensors.get("weight_shape")
    if shape is not None and not shape.is_meta and shape.tolist() != list(made.shape):
        raise ValueError(f"weight_shape is {shape.tolist()} and the codes are {list(made.shape)}")
    return made


# ------------------------------------------------------------------------------------------------------
# what is kept


class Packing(NamedTuple):
    """What a blob is of, see above.

    tensors : (name, dtype by safetensors' name, shape, how often each entry stands in the blob) of
    one matrix."""

    kind: str
    bits: int
    matrices: int
    tensors: tuple[tuple[str, str, Shape, int], ...]

    @property
    def kernel(self) -> str:
        """The format whose kernels multiply the blob as it lies, "" for none."""
        spread = any(times for *_, times in self.tensors)
        return "" if not spread else "int4" if self.tensors[0][0] == "weight_packed" else "int8"

    def __str__(self) -> str:
        return f"{self.kind}:{self.bits}*{self.matrices} " + " ".join(
            f"{name}:{dtype}[{','.join(map(str, shape))}]" + f"x{times}" * (times > 0)
            for name, dtype, shape, times in self.tensors
        )


def is_packing(name: str) -> bool:
    return name.partition(":")[0] in KINDS


@lru_cache(4096)
def find(name: str, shape: Shape) -> Packing:
    """The packing of a name; ValueError unless it is one of a tensor of this shape."""
    parts = name.split(" ")
    head = re.fullmatch(r"([a-z0-9_-]+):([48])\*([1-9]\d?)", parts[0])
    tensors = [
        re.fullmatch(
            r"([a-z_]+):([A-Z0-9_]+)\[((?:\d{1,12},)*\d{1,12}|)\](?:x([1-9]\d{0,5}))?", part
        )
        for part in parts[1:]
    ]
    if (
        not head
        or not is_packing(name)
        or not all(tensors)
        or not all(t[2] in DTYPES for t in tensors)
    ):
        raise ValueError(f"{name[:200]!r} is no packing")
    found = Packing(
        head[1],
        int(head[2]),
        int(head[3]),
        tuple(
            (t[1], t[2], tuple(int(n) for n in t[3].split(",") if n), int(t[4] or 0))
            for t in tensors
        ),
    )
    try:
        one = {
            name: torch.empty(dims, dtype=DTYPES[dtype], device="meta")
            for name, dtype, dims, _ in found.tensors
        }
    except RuntimeError as error:
        raise ValueError(f"{name[:200]!r} has an impossible size") from error
    made = dequantize(found.kind, found.bits, one)
    if (
        tuple(shape) != (found.matrices * made.shape[0], *made.shape[1:])
        or str(found) != name
        or (found.kernel and found != _spread(found))
    ):
        raise ValueError(f"a tensor {list(shape)} cannot be {name[:200]}")
    return found


def parts(name: str, shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
    """(dtype, shape) of each tensor of each matrix, "qweight.0" and so on."""
    found = find(name, tuple(shape))
    return {
        f"{tensor}.{i}": (DTYPES[dtype], dims)
        for tensor, dtype, dims, _ in found.tensors
        for i in range(found.matrices)
    }


def nbytes(name: str, shape: Shape) -> int:
    """Bytes of the blob."""
    found = find(name, tuple(shape))
    return found.matrices * sum(
        prod(dims) * max(1, times) * DTYPES[dtype].itemsize
        for _, dtype, dims, times in found.tensors
    )


def split(name: str, blob: Any, shape: Shape) -> Tensors:
    """The tensors of `parts` in a blob of the right length, as views of it where they can be."""
    raw = as_bytes(blob)
    rest, found = torch.from_numpy(raw if raw.flags.writeable else raw.copy()), {}
    at, packing = 0, find(name, tuple(shape))
    for tensor, dtype, dims, times in packing.tensors:
        for i in range(packing.matrices):
            end = at + prod(dims) * max(1, times) * DTYPES[dtype].itemsize
            piece = rest[at:end].clone() if at % DTYPES[dtype].itemsize else rest[at:end]
            piece = piece.view(DTYPES[dtype])
            found[f"{tensor}.{i}"], at = (piece[::times] if times else piece).view(dims), end
    return found


def weights(name: str, tensors: Tensors, shape: Shape) -> Tensor:
    """The weights of a blob's tensors, see `split`, in the scales' dtype. Raises ValueError where
    they have none."""
    found = find(name, tuple(shape))
    return torch.cat(
        [
            dequantize(
                found.kind,
                found.bits,
                {tensor: tensors[f"{tensor}.{i}"] for tensor, *_ in found.tensors},
            )
            for i in range(found.matrices)
        ]
    )


def gathered(
    kind: str, bits: int, sources: Iterable[tuple[str, int, Tensor]]
) -> tuple[str, np.ndarray]:
    """The packing and the blob of what a checkpoint stores of a tensor; KeyError if that is not
    quantised.

    sources : (key, 0, tensor) of each, as of `moelab.checkpoint.experts.CheckpointExperts.made`.
    """
    layers: dict[str, Tensors] = {}
    for key, _, tensor in sources:
        layer, _, name = key.rpartition(".")
        layers.setdefault(layer, {})[name] = tensor
    one = next(iter(layers.values()))
    packing = _spread(
        Packing(
            kind,
            bits,
            len(layers),
            tuple(
                (name, NAMES[one[name].dtype], tuple(one[name].shape), 0)
                for name in KINDS[kind][0]
                if name in one
            ),
        )
    )
    return str(packing), np.concatenate(
        [
            as_bytes(layer[tensor].reshape(-1).repeat_interleave(max(1, times)))
            for tensor, _, _, times in packing.tensors
            for layer in layers.values()
        ]
    )


def keep(
    kind: str, bits: int, sources: Iterable[tuple[str, int, Tensor]], made: Tensor
) -> tuple[str, np.ndarray] | None:
    """As `gathered`, or None unless that is `made` bit for bit."""
    try:
        name, blob = gathered(kind, bits, sources)
        if len(blob) != nbytes(name, shape := tuple(made.shape)):
            return None  # matrices of several sizes
        unpacked = weights(name, split(name, blob, shape), shape).to(made.dtype)
    except (KeyError, ValueError):  # not quantised, or no rows of the tensor
        return None
    return (name, blob) if np.array_equal(as_bytes(unpacked), as_bytes(made.contiguous())) else None


def _spread(packing: Packing) -> Packing:
    """The packing with scales for 32 inputs each, if kernels then multiply it as it lies; else
    without."""
    plain, times = {name: (dtype, dims) for name, dtype, dims, _ in packing.tensors}, 0
    (codes, shape), (scales, grid) = (
        packing.tensors[0][1:3] if plain else ("", ()),
        plain.get("weight_scale", ("", ())),
    )
    if (
        len(shape) == len(grid) == 2
        and scales == "BF16"
        and "weight_zero_point" not in plain
        and grid[0] == shape[0]
        and (codes, packing.bits) in (("I32", 4), ("I8", 8))
    ):
        n = shape[1] * (8 if codes == "I32" else 1)
        times = (
            n // (GROUP * grid[1])
            if n % (2 * GROUP) == 0 < grid[1] and n % (GROUP * grid[1]) == 0
            else 0
        )
    return Packing(
        packing.kind,
        packing.bits,
        packing.matrices,
        tuple((name, *plain[name], times if name == "weight_scale" else 0) for name in plain),
    )
