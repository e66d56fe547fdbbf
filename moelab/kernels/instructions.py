"""How inputs times weights are summed: as fp32, as pairs of bf16 or as bytes, by what the processor
has.

With AVX512_BF16, one instruction multiplies pairs of bf16: bf16 weights and packed ones become such
pairs, which takes half the instructions. Inputs are cut into their upper 8 bits and the rest, if
there is one; subnormals are 0. On AVX2, four-bit codes are multiplied as bytes, with inputs in fixed
point of 16 bits for 32 of them, which takes a third of the instructions; so are int8's codes with
AVX512_VNNI.

An instruction takes `prepared` inputs, from vectors of fp32 in its `order`, and `weights`: vectors
that take their inputs one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add

from llvmlite import ir

from moelab.kernels.emit import F32, I8, I16, I32, TAGS, Value
from moelab.kernels.vectors import (
    BF12,
    BFLOAT16,
    FLOATS,
    FP8,
    GROUP,
    HAS_BYTE_SUMS,
    HAS_PAIRS,
    INT4,
    INT8,
    MXFP4,
    WIDTH,
    WORDS,
    Kind,
    joined,
)


class Floats:
    """Products in fp32."""

    ordered = "order"  # the kind's attribute for `order`

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.order = getattr(kind, self.ordered)

    def prepared(self, inputs: list[Value]) -> list[Value]:
        return inputs

    def weights(self, x_kind: Kind, at: tuple) -> Iterable[tuple[Value | None, list[Value]]]:
        """(scales or None, vectors that they multiply) of a step.

        at : the addresses of weights and of what lies beside them, and the table."""
        if self.kind.scaled:
            return self.kind.codes(*at[:2])
        return [(None, self.kind.vectors(*at))]

    def terms(
        self, inputs: list[Value], vectors: list[Value], scales: Value | None
    ) -> list[tuple[Value, Value]]:
        """Pairs of vectors whose products (`product`) are to be added up."""
        pairs = list(zip(inputs, vectors))
        if scales is None:
            return pairs
        return [(reduce(lambda total, one: product(*one, total), pairs, None), scales)]


class Pairs(Floats):
    """Products of pairs of bf16, summed in fp32."""

    ordered = "pair_order"

    def prepared(self, inputs):
        """Pairs of the inputs' upper halves, then of what these lack, which is exact to 2⁻¹⁷; an
        infinity in fp32 makes NaN."""
        upper = [(part.to(I32) + 0x8000 & 0xFFFF0000).to(F32) for part in inputs]
        lower = [((part - top).to(I32) + 0x8000).to(F32) for part, top in zip(inputs, upper)]
        return [
            ((even.to(I32) >> 16) | (odd.to(I32) & 0xFFFF0000)).to(F32)
            for half in (upper, lower)
            for even, odd in zip(half[::2], half[1::2])
        ]

    def weights(self, x_kind, at):
        """Once for the upper halves of inputs, and again for the lower ones, which bf16 does not
        have."""
        groups = [lane % 8 // 4 for lane in range(WIDTH)]
        pairs = self.kind.pairs(*at)
        scales = self.kind.scales(at[1], groups) if self.kind.scaled else None
        return [(scales, pairs if x_kind is BFLOAT16 else pairs * 2)]


class Bytes(Floats):
    """Products of codes as bytes and inputs in fixed point, summed in whole numbers."""

    ordered = "byte_order"

    def prepared(self, inputs):
        """Whole numbers as `_whole_sums` has them, what the codes' offset adds to its sums, and the
        scales of both groups.

        A scale is a power of two, a quantum at most 2⁻¹⁴ of a group's largest: bf16 is exact down to
        1/128 of that."""
        group_of = [self.order[i * WIDTH] // GROUP for i in range(len(inputs))]
        found = [
            _exponent([one for one, of in zip(inputs, group_of) if of == group]) for group in (0, 1)
        ]
        wholes = [_fixed_point(one, found[of][1]) for one, of in zip(inputs, group_of)]
        # Infinities make NaN.
        scales = [(exponent - (14 << 23)).to(F32) + (most - most) for most, exponent in found]
        scale = scales[0].shuffled([2 * lane // WIDTH * WIDTH for lane in range(WIDTH)], scales[1])
        inputs = [
            joined([one.to(I8, "trunc") for one in half[at : at + 4]])
            for half in ([one + 128 >> 8 for one in wholes], wholes)
            for at in range(0, len(wholes), 4)
        ]
        offset = [inputs[0].of(self.kind.offset)] * (len(inputs) // 2)
        sums = _whole_sums(offset, inputs).to(FLOATS)
        return [*(one.to(FLOATS) for one in inputs), sums, scale * (1 / self.kind.factor)]

    def weights(self, x_kind, at):
        groups = [2 * lane // WIDTH for lane in range(WIDTH)]
        return [(self.kind.scales(at[1], groups), self.kind.bytes(at[0]))]

    def terms(self, inputs, vectors, scales):
        *inputs, offset, scale = inputs[: 2 * len(vectors) + 2]
        inputs = [one.to(vectors[0].type) for one in inputs]
        whole = _whole_sums(vectors, inputs) - offset.to(I32)
        return [(whole.to(F32, "sitofp"), scale * scales)]


def _exponent(parts: list[Value]) -> tuple[Value, Value]:
    """The largest size among vectors of fp32 and the exponent by which they are scaled, in each
    lane."""
    largest = parts[0].of(2.0**-100).to(I32)  # of zeros and subnormals
    for size in [part.to(I32) & 0x7FFFFFFF for part in parts]:
        # as integers NaN is larger than all numbers
        largest = size.is_(">", largest).made("select", size, largest)
    largest = largest.call(f"vector.reduce.umax.v{WIDTH}i32", of=I32).to(F32).everywhere(WIDTH)
    return largest, (largest * 1.004).to(I32) & 0x7F800000  # 128 upper bytes would be too many


def _fixed_point(part: Value, exponent: Value) -> Value:
    scaled = part * (exponent.of(268 << 23) - exponent).to(F32)
    return scaled.call(f"rint.v{WIDTH}f32").call(f"fptosi.sat.v{WIDTH}i32.v{WIDTH}f32", of=WORDS)


def _whole_sums(codes: list[Value], inputs: list[Value]) -> Value:
    """Σ code × input of four bytes of each register of codes, in whole numbers.

    inputs : the upper bytes for each of these registers, then the lower ones; all with signs, codes
        without.
    """
    total = codes[0].to(WORDS).of(0)
    for half in (inputs[: len(codes)], inputs[len(codes) :]):
        total = total << 8
        if WIDTH == 16:
            for code, one in zip(codes, half):
                total = total.call("x86.avx512.vpdpbusd.512", code.to(WORDS), one.to(WORDS))
            continue
        sixteen = ir.VectorType(I16, 2 * WIDTH)  # in 16 bits: at most 4 · 24 · 128
        pairs = (
            code.call("x86.avx2.pmadd.ub.sw", one, of=sixteen) for code, one in zip(codes, half)
        )
        pairs = reduce(add, pairs)
        total += pairs.call("x86.avx2.pmadd.wd", pairs.of(1), of=WORDS)
    return total


def product(x: Value, weights: Value, total: Value | None) -> Value:
    """Inputs times weights, which are fp32 or words of two bf16, plus a sum, if there is one."""
    if weights.scalar == I32:
        return (total or x.of(0.0)).call("x86.avx512bf16.dpbf16ps.512", x.to(WORDS), weights)
    return fma(x, weights, total) if total else x * weights


def fma(a: Value, b: Value, c: Value) -> Value:
    return a.call(f"fma.v{WIDTH}f32", b, c)


def _instructions() -> dict[Kind, Floats]:
    found = {}
    if HAS_PAIRS:
        found |= {kind: Pairs(kind) for kind in (BFLOAT16, BF12, INT4, MXFP4, FP8)}
    if HAS_BYTE_SUMS:
        found[INT8] = Bytes(INT8)
    if WIDTH == 8:
        found |= {kind: Bytes(kind) for kind in (INT4, MXFP4)}
    return {kind: found.get(kind) or Floats(kind) for kind in TAGS.values()}


#: kind → how its weights are multiplied on this processor
INSTRUCTIONS = _instructions()
