"""Few-bit weights: int8, fp8, MXFP4 and int4, a matrix as one blob that is read, and multiplied, as
it lies.

Sources: OCP Microscaling Formats v1.0, §5.3.3, §6.3 (MXFP4, in the layout of GPT-OSS's
checkpoints); DeepSeek-V3, §3.3 (fp8 in blocks of 128 × 128, `weight_scale_inv`); llama.cpp's Q8_0
and Q4_0 (groups of 32 inputs, symmetric).

    format   a code                    a scale                                           bits a weight
    int8     −127 … 127                bf16 for 32 inputs of a row: max |w| / 127        8.5
    fp8      e4m3, at most 448         fp32 for 128 rows × 128 inputs: max |w| / 448     8.002
    mxfp4    e2m1: 0 ½ 1 1½ 2 3 4 6, ± e8m0, a power of two, for 32 inputs               4.25
    int4     −8 … 7, stored plus 8     bf16 for 32 inputs: the widest weight / −8        4.5

A blob is the codes of all rows, one after another, then the scales; of two codes in a byte, the
even input's is in the low half. A weight is code · scale in fp32, rounded to the tensor's dtype;
codes are rounded to nearest. Scales are bf16 because they have the weights' own range, which fp16
cuts; codes are chosen for the rounded scale. int4's scale has the sign that gives the widest weight
the code −8, so that all 16 codes are used.

Of a matrix whose inputs are its first axis the transpose is stored, and the format's name ends in
".T". What does not fit stays as it is: vectors, an n that is no multiple of 32, weights that are
not finite.

Shapes: weights [R, n], inputs along n (leading axes count as rows); codes and scales as `parts`
says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from math import prod
from operator import not_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from moelab.kernels.products import KINDS, PACKED
from moelab.kernels.threads import TEAM, in_threads
from moelab.kernels.vectors import BLOCK as PART
from moelab.kernels.vectors import WIDTH
from moelab.registry import Entry
from moelab.store import packings
from moelab.store.bits import as_bytes
from moelab.store.fewbit_kernels import round_groups, widening
from moelab.store.headers import Shape, Tensors

GROUP, BLOCK = 32, 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 of a code is the sign
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
#: byte → the values of its low and its high half: [256, 2]
_E2M1 = torch.tensor(
    [[(E2M1 + tuple(-v for v in E2M1))[half] for half in (b & 15, b >> 4)] for b in range(256)]
)


@dataclass(frozen=True)
class Format:
    """How weights become codes and scales and come back.

    code, scale : their dtypes.    group : codes' entries for 32 weights, or 0 for blocks of 128 × 128.
    quantize : fp32 weights [R, n] → codes, scales.    dequantize : codes, scales → fp32 weights of as many entries.
    """

    code: torch.dtype
    group: int
    scale: torch.dtype
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantize: Callable[[Tensor, Tensor], Tensor]

    def shapes(self, R: int, n: int) -> tuple[Shape, Shape]:
        """Of the codes and of the scales of a matrix [R, n]."""
        if not self.group:
            return (R, n), (-(-R // BLOCK), -(-n // BLOCK))
        return (R, n // GROUP, self.group), (R, n // GROUP)


def quantize_mxfp4(w: Tensor, saturate: bool = True) -> tuple[Tensor, Tensor]:
    """MXFP4 by OCP's rule, X = ⌊log₂ max |w|⌋ − 2, under which what is above 6 · 2^X saturates;
    with `saturate=False` by the smallest X with max |w| ≤ 6 · 2^X. w : fp32 [..., n] → blocks [...,
    n/32, 16], scales [..., n/32]."""
    return _in_groups("mxfp4", w, not saturate)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., n/32, 32] of blocks uint8 [..., n/32, 16] and scales uint8 [..., n/32]."""
    return torch.ldexp(
        _E2M1.to(blocks.device)[blocks.int()].flatten(-2), scales.int()[..., None] - 127
    )


def _dequantize_int8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales.float()[..., None]


def _dequantize_int4(codes: Tensor, scales: Tensor) -> Tensor:
    wide = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float() - 8
    return wide * scales.float()[..., None]


def _quantize_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    R, n = w.shape
    blocks = (
        pad(w, (0, -n % BLOCK, 0, -R % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    )
    scales = blocks.abs().amax((1, 3)) / FP8_MAX  # blocks [R/128, 128, n/128, 128]
    scales = scales.masked_fill(scales == 0, 1)
    codes = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).flatten(2).flatten(0, 1)
    return codes[:R, :n].to(torch.float8_e4m3fn), scales


def _dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    R, n = codes.shape
    return codes.float() * scales.repeat_interleave(BLOCK, 0)[:R].repeat_interleave(BLOCK, 1)[:, :n]


def _in_groups(name: str, w: Tensor, above: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups of 32 finite weights, fp32 [..., n]; `above` as of
    `moelab.store.fewbit_kernels`."""
    form, flat = FORMATS[name].home, w.cpu().contiguous()
    shape = (*w.shape[:-1], w.shape[-1] // GROUP)
    codes, scales = (
        torch.empty(*shape, form.group, dtype=form.code),
        torch.empty(shape, dtype=form.scale),
    )
    round_groups(
        PACKED[name].tag, above, flat.data_ptr(), flat.numel(), codes.data_ptr(), scales.data_ptr()
    )
    return codes.to(w.device), scales.to(w.device)


#: what a model can be quantised to: name → `Format` in an entry of `moelab.registry`
FORMATS: dict[str, Entry] = {
    "int8": Entry(
        Format(torch.int8, 32, torch.bfloat16, partial(_in_groups, "int8"), _dequantize_int8),
        "8.5 bits a weight: nearly lossless",
    ),
    "fp8": Entry(
        Format(torch.float8_e4m3fn, 0, torch.float32, _quantize_fp8, _dequantize_fp8),
        "8 bits, as DeepSeek-V3 and Qwen3 are published",
    ),
    "mxfp4": Entry(
        Format(torch.uint8, 16, torch.uint8, quantize_mxfp4, dequantize_mxfp4),
        "4.25 bits, as GPT-OSS is published",
    ),
    "int4": Entry(
        Format(torch.uint8, 16, torch.bfloat16, partial(_in_groups, "int4"), _dequantize_int4),
        "4.5 bits: the most accurate of the four-bit formats",
    ),
}


def is_format(name: str) -> bool:
    """Whether this is the name of a format, with or without ".T", or of a packing of
    `moelab.store.packings`."""
    return name.removesuffix(".T") in FORMATS or packings.is_packing(name)


def find_format(name: str) -> Format:
    """The format of a name, with or without ".T". Raises ValueError, listing those there are."""
    if name.removesuffix(".T") not in FORMATS:
        raise ValueError(
            f"unknown format {name!r}; a model can be quantised to {', '.join(FORMATS)}"
        )
    return FORMATS[name.removesuffix(".T")].home


def parts(name: str, shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
    """(dtype, shape) of the "codes" and of the "scales" in the blob of a tensor of this shape."""
    if packings.is_packing(name):
        return packings.parts(name, shape)
    form, shape = (
        find_format(name),
        (*shape[:-2], *shape[:-3:-1]) if name.endswith(".T") else tuple(shape),
    )
    if len(shape) < 2 or shape[-1] % GROUP:
        raise ValueError(
            f"a tensor {list(shape)} cannot be {name}: its inputs are no multiple of {GROUP}"
        )
    codes, scales = form.shapes(prod(shape[:-1]), shape[-1])
    return {"codes": (form.code, codes), "scales": (form.scale, scales)}


def nbytes(name: str, shape: Shape) -> int:
    """Bytes of the blob of a tensor of this shape; ValueError for one that has none."""
    if packings.is_packing(name):
        return packings.nbytes(name, shape)
    return sum(prod(of) * dtype.itemsize for dtype, of in parts(name, shape).values())


def kernel(name: str, shape: Shape, dtype: str) -> str:
    """The format, perhaps with ".T", whose kernels multiply such a blob of a tensor of this dtype
    (safetensors' name) as it lies; "" for none. A packing's weights are rounded to their scales'
    bf16 first, which kernels leave out: that is within the tolerance of a model in bf16, and of no
    other."""
    if not packings.is_packing(name):
        return name
    return packings.find(name, shape).kernel if dtype == "BF16" else ""


def row(name: str, address: int, shape: Shape) -> list[int]:
    """Of `moelab.kernels.products.multiply`'s matrices: a blob in memory, without a bias."""
    dtype, of = parts(name, shape)["codes"]
    return [address, address + prod(of) * dtype.itemsize, 0, 0]


def pack(name: str, w: Tensor) -> np.ndarray | None:
    """The blob of a tensor, uint8; None for one that stays as it is."""
    w = w.mT if name.endswith(".T") and w.dim() > 1 else w
    if (
        w.dim() < 2
        or w.shape[-1] % GROUP
        or not w.numel()
        or not w.is_floating_point()
        or not w.abs().max().isfinite()
    ):
        return None
    return joined(
        *find_format(name).quantize(w.detach().reshape(-1, w.shape[-1]).float().contiguous())
    )


def joined(*tensors: Tensor) -> np.ndarray:
    """The bytes of tensors one after another: of codes and scales, a blob."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]).numpy()


def gathered(tensors: list[Tensor]) -> tuple[str, np.ndarray, list[Tensor]] | None:
    """What a checkpoint stores of a tensor: the format, perhaps with ".T", the blob, and the
    tensors as they are in it.

    tensors : codes and scales, of several matrices one below the other perhaps: e4m3 with scales of
        128 × 128, or GPT-OSS's blocks and scales, both uint8; None for others. Scales of a narrower
        type are widened to fp32.
    """
    fp8, deepest = (
        any(t.dtype == torch.float8_e4m3fn for t in tensors),
        max(t.dim() for t in tensors),
    )
    if not fp8 and any(t.dtype != torch.uint8 for t in tensors):
        return None
    is_code = [t.dtype == torch.float8_e4m3fn if fp8 else t.dim() == deepest for t in tensors]
    wide = [t if code or not fp8 else t.float() for code, t in zip(is_code, tensors)]
    return (
        "fp8" if fp8 else "mxfp4",
        joined(*compress(wide, is_code), *compress(wide, map(not_, is_code))),
        wide,
    )


def published(tensors: list[Tensor], made: Tensor) -> tuple[str, np.ndarray, list[Tensor]] | None:
    """What a checkpoint stores of a tensor as `gathered` has it, with the very format, or None
    unless that unpacks to `made` bit for bit."""
    if (found := gathered(tensors)) is None:
        return None
    form, blob, wide = found
    if not all(same_bits(w.to(t.dtype), t) for w, t in zip(wide, tensors) if w is not t):
        return None
    for name in (form, f"{form}.T"):
        out = torch.empty_like(made)
        try:
            unpack(name, blob, out)
        except ValueError:  # other sizes: no blob of this format
            continue
        if same_bits(out, made):
            return name, blob, wide
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes, NaNs included."""
    return np.array_equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))


def split(name: str, blob: Any, shape: Shape) -> Tensors:
    """The "codes" and "scales" in a blob, as views of it; ValueError unless it is as long as it
    must be."""
    raw = as_bytes(blob)
    if len(raw) != nbytes(name, shape):
        raise ValueError(
            f"the {name} blob has {len(raw)} bytes; {nbytes(name, shape)} were expected"
        )
    if packings.is_packing(name):
        return packings.split(name, raw, shape)
    found, rest = {}, torch.from_numpy(raw if raw.flags.writeable else raw.copy())
    for part, (dtype, of) in parts(name, shape).items():
        size = prod(of) * dtype.itemsize
        found[part], rest = rest[:size].view(dtype).view(of), rest[size:]
    return found


def unpack(name: str, blob: Any, out: Tensor) -> None:
    """Write the weights of a blob into `out`, a tensor of their shape and any floating-point
    dtype."""
    tensors = split(name, blob, tuple(out.shape))
    if packings.is_packing(name):
        out.copy_(packings.weights(name, tensors, tuple(out.shape)))
        return
    codes, scales = tensors.values()
    target = out.mT if name.endswith(".T") else out
    if (found := _widened(name.removesuffix(".T"), codes, scales, target)) is not target:
        target.copy_(found.view(target.shape))


def _widened(form: str, codes: Tensor, scales: Tensor, target: Tensor) -> Tensor:
    """The weights in `target`'s dtype; `target` itself if they are written there. By a kernel where
    rows are whole blocks and scales can be what it takes them for: fp8's times 256, a power of two
    that fp32 has."""
    kind, n = PACKED[form], target.shape[-1]
    beyond = {"fp8": 2.0**119, "mxfp4": 255 if WIDTH == 16 else 0}.get(
        form
    )  # narrower look-ups know no −0
    if (
        n % PART
        or target.dtype not in KINDS
        or beyond is not None
        and not bool((scales.abs() < beyond).all())
        or form == "fp8"
        and int((codes.view(torch.uint8) << 1).amax()) == 254
    ):  # NaN, with torch's bits
        return find_format(form).dequantize(codes, scales).to(target.dtype)
    out = (
        target
        if target.is_cpu and target.is_contiguous()
        else torch.empty(target.shape, dtype=target.dtype)
    )
    job = np.array([0, codes.data_ptr(), scales.data_ptr(), out.numel() // n, n, out.data_ptr()])
    in_threads(TEAM, widening(kind, KINDS[out.dtype]), torch.get_num_threads(), job)
    return out
