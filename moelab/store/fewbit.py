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
codes are rounded to nearest, a tie to the even one. Scales are bf16 because they have the weights' own range, which fp16
cuts; codes are chosen for the rounded scale. int4's scale has the sign that gives the widest weight
the code −8, so that all 16 codes are used.

Of a matrix whose inputs are its first axis the transpose is stored, and the format's name ends in
".T". What does not fit stays as it is: vectors, an n that is no multiple of 32, weights that are
not finite.

Shapes: weights [R, n], inputs along n (leading axes count as rows); codes and scales as `parts`
says."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from moelab.base.files import beside
from moelab.base.registry import Entry, require
from moelab.kernels.linear import widened
from moelab.kernels.products import KINDS, PACKED, Matrices
from moelab.kernels.vectors import BLOCK as PART
from moelab.kernels.vectors import Kind
from moelab.store.bits import as_bytes
from moelab.store.codec import Codec, rows_in_blocks
from moelab.store.gptq import E2M1, GROUP, fit, naive_scales, rounded, spread
from moelab.store.headers import DTYPES, Shape, Tensors

BLOCK = 128
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448


def nibbles(codes: Tensor) -> Tensor:
    """The low half and the high one of each byte [..., n]: uint8 [..., 2n]."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


#: byte → the values of its low and its high half: [256, 2]
_E2M1 = torch.tensor(E2M1 + tuple(-value for value in E2M1), dtype=torch.float32)[
    nibbles(torch.arange(256, dtype=torch.uint8)).int()
].view(256, 2)


class FewBits(Codec):
    """A codec whose blob is a few tensors one after another: codes, scales, perhaps more.

    parts(shape) : by name the dtype and shape of what is in the blob of a tensor of this shape, and
        how often each of its entries stands there. Raises ValueError for a tensor that has none.
    """

    in_place = few_bits = True

    @property
    def kind(self) -> str:
        """The format's name without ".T"."""
        return self.name.removesuffix(".T")

    @property
    def transposed(self) -> bool:
        """Whether a blob is that of the transpose."""
        return self.name.endswith(".T")

    @property
    def T(self) -> Any:
        """The format of matrices whose inputs are their first axis."""
        return replace(self, name=f"{self.kind}.T")

    def stored(self, shape: Shape) -> Shape:
        """The shape of what is in the blob of a tensor of a shape."""
        return (*shape[:-2], *shape[:-3:-1]) if self.transposed else tuple(shape)

    def rows(self, data: Tensor, multiple: int = GROUP) -> Tensor | None:
        """A matrix's rows in fp32 [R, n], inputs along n, a multiple; None for what stays as it is."""
        w = data.mT if self.transposed and data.dim() > 1 else data
        fits = w.dim() > 1 and w.numel() and w.shape[-1] % multiple == 0 and w.is_floating_point()
        if not fits or not w.abs().max().isfinite():
            return None
        return w.detach().reshape(-1, w.shape[-1]).float().contiguous()

    def nbytes(self, shape: Shape, dtype: str = "") -> int:
        parts = self.parts(shape).values()
        return sum(prod(of) * times * dtype.itemsize for dtype, of, times in parts)

    def split(self, blob: Any, shape: Shape) -> Tensors:
        """The parts of a blob, as views of it where they can be; ValueError unless it is as long as
        it must be."""
        if not isinstance(blob, Tensor):
            raw = as_bytes(blob)
            blob = torch.from_numpy(raw if raw.flags.writeable else raw.copy())
        size = self.nbytes(shape)
        if len(blob) != size:
            raise ValueError(f"the {self.name} blob has {len(blob)} bytes; {size} were expected")
        found = {}
        at = 0
        for name, (dtype, of, times) in self.parts(shape).items():
            end = at + prod(of) * times * dtype.itemsize
            piece = blob[at:end].clone() if at % dtype.itemsize else blob[at:end]
            found[name], at = piece.view(dtype)[::times].view(of), end
        return found

    def admits(self, dtype: str, shape: Shape, planes: int, lengths: list[int]) -> bool:
        floating = planes == 1 and DTYPES[dtype].is_floating_point
        return floating and lengths == [self.nbytes(shape)]


@dataclass(frozen=True)
class Format(FewBits):
    """How weights become codes and scales and come back.

    code, scale : their dtypes.
    group : codes' entries for 32 weights, or 0 for blocks of 128 × 128.
    """

    code: torch.dtype
    group: int
    scale: torch.dtype

    def parts(self, shape: Shape) -> dict[str, tuple[torch.dtype, Shape, int]]:
        """Of the "codes" and of the "scales"."""
        shape = self.stored(shape)
        if len(shape) < 2 or shape[-1] % GROUP:
            raise ValueError(
                f"a tensor {list(shape)} cannot be {self.name}: its inputs are no multiple of {GROUP}"
            )
        R = prod(shape[:-1])
        n = shape[-1]
        if self.group:
            codes = (R, n // GROUP, self.group)
            scales = (R, n // GROUP)
        else:
            codes = (R, n)
            scales = (-(-R // BLOCK), -(-n // BLOCK))
        return {"codes": (self.code, codes, 1), "scales": (self.scale, scales, 1)}

    def compress(self, data: Tensor, moments: Tensor | None = None) -> np.ndarray | None:
        """The blob of a tensor, uint8; None for one that stays as it is.

        moments : of its inputs, which rounding then looks at (`moelab.store.gptq`)."""
        if (rows := self.rows(data)) is None:
            return None
        parts = rows.split(BLOCK if moments is None else len(rows))  # which a cache holds
        codes, scales = zip(*(_coded(self.kind, part, moments) for part in parts))
        return joined(*codes, *scales)

    def decompress(self, blob: Any, out: Tensor) -> None:
        """Write a blob's weights into a tensor of their shape and any floating-point dtype."""
        codes, scales = self.split(blob, tuple(out.shape)).values()
        target = out.mT if self.transposed else out
        # by a kernel, where codes and scales are what it takes them for
        known = target.shape[-1] % PART == 0 and target.dtype in KINDS and codes.is_cpu
        if known and self.kind == "fp8":  # no NaN, scales that times 256 are still numbers of fp32
            known = int((codes.view(torch.uint8) << 1).amax()) < 254
            known = known and bool((scales.abs() < 2.0**119).all())
        if known and self.kind == "mxfp4":  # no NaN
            known = bool((scales < 255).all())
        if known:
            widen(PACKED[self.kind], codes, scales, target)
        else:
            target.copy_(self.dequantize(codes, scales).view(target.shape))

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """fp32 weights of as many entries as the codes stand for."""
        if self.kind == "fp8":
            return codes.float() * spread_blocks(scales, *codes.shape)
        scales = scales[..., None]
        if self.kind == "mxfp4":
            values = _E2M1.to(codes.device)[codes.int()].flatten(-2)
            return torch.ldexp(values, scales.int() - 127)
        values = nibbles(codes).float() - 8 if self.kind == "int4" else codes.float()
        return values * scales.float()

    def kernel(self, dtype: str, shape: Shape) -> str:
        return self.name if rows_in_blocks(self.stored(shape)) else ""

    def row(self, address: int, length: int, shape: Shape) -> list[int]:
        dtype, of, _ = self.parts(shape)["codes"]
        return [address, address + prod(of) * dtype.itemsize, 0, 0]


def spread_blocks(scales: Tensor, R: int, n: int) -> Tensor:
    """Scales of blocks of 128 × 128, one for each weight [R, n]."""
    return scales.repeat_interleave(BLOCK, 0)[:R].repeat_interleave(BLOCK, 1)[:, :n]


def _coded(kind: str, w: Tensor, moments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of finite weights, fp32 [R, n]."""
    if kind == "fp8":
        R, n = w.shape
        blocks = pad(w, (0, -n % BLOCK, 0, -R % BLOCK)).unflatten(1, (-1, BLOCK))
        scales = blocks.unflatten(0, (-1, BLOCK)).abs().amax((1, 3)) / FP8_MAX
        scales = scales.masked_fill(scales == 0, 1)
        naive = spread_blocks(scales, R, n)[:, ::GROUP]
    else:
        naive = naive_scales(kind, w)
    if moments is None:
        values = rounded(kind, w, spread(naive))
        found = naive
    else:
        values, found = fit(kind, w, naive, moments)
    if kind == "fp8":
        return values.to(torch.float8_e4m3fn), scales
    if kind == "int8":
        return values.to(torch.int8), found.bfloat16()
    if kind == "int4":
        codes = (values + 8).byte()
        found = found.bfloat16()
    else:
        size = values.abs()
        codes = torch.where(size < 1, 2 * size, (size.view(torch.int32) >> 22) - 252).byte()
        codes |= values.signbit().byte() << 3
        found = (found.view(torch.int32) >> 23).byte()
    return codes[:, ::2] | codes[:, 1::2] << 4, found


#: what a model can be quantised to: name → `Format` in an entry of `moelab.base.registry`
FORMATS = {
    name: Entry(Format(name, getattr(torch, code), group, getattr(torch, scale)), purpose)
    for name, (code, group, scale, purpose) in beside(__file__).items()
}


def require_rounding(text: str) -> None:
    """ValueError unless a text is a format or "auto:BITS", perhaps with a calibration's digest behind
    an "@"."""
    name = text.partition("@")[0]
    if not re.fullmatch(r"auto:\d+(\.\d+)?", name):
        require("format", name, [*FORMATS, "auto:4.5"])


def find_format(name: str) -> Format:
    """The format of a name, with or without ".T". Raises ValueError, listing those there are."""
    require("format", name.removesuffix(".T"), FORMATS)
    found = FORMATS[name.removesuffix(".T")].home
    return found.T if name.endswith(".T") else found


def joined(*tensors: Tensor) -> np.ndarray:
    """The bytes of tensors one after another: of codes and scales, a blob."""
    return np.concatenate([as_bytes(tensor.contiguous()) for tensor in tensors])


def gathered(tensors: list[Tensor]) -> tuple[Format, np.ndarray] | None:
    """The format and the blob of what a checkpoint stores of a tensor; the transpose's are alike.

    tensors : codes and scales, of several matrices one below the other perhaps: e4m3 with scales of
        128 × 128, or GPT-OSS's blocks and scales, both uint8; None for others. Scales of a narrower
        type are widened to fp32.
    """
    codes = [t for t in tensors if t.dtype == torch.float8_e4m3fn]
    if codes:
        scales = [t.float() for t in tensors if t.dtype != torch.float8_e4m3fn]
        return FORMATS["fp8"].home, joined(*codes, *scales)
    if all(t.dtype == torch.uint8 for t in tensors):
        return FORMATS["mxfp4"].home, joined(*sorted(tensors, key=Tensor.dim, reverse=True))
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes, NaNs included."""
    return np.array_equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))


def widen(kind: Kind, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write weights into a tensor on the CPU.

    codes, scales : what lies at a kind's two addresses. Rows of `out` are whole steps of the kind."""
    plain = out.is_contiguous() and out.dtype in KINDS
    made = out if plain else torch.empty(out.shape, dtype=torch.float32)
    row = np.array([[codes.data_ptr(), scales.data_ptr(), 0, 0]])
    out.copy_(widened(Matrices(kind, row, len(out)), 0, 0, made))
