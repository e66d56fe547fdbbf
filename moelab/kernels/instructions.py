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

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

from llvmlite import ir

from moelab.kernels.emit import F32, I8, I16, I32, TAGS, Value
from moelab.kernels.ggml import GGML, Blocks
from moelab.kernels.vectors import (
    BF12,
    BFLOAT16,
    BLOCK,
    FLOATS,
    FP8,
    GROUP,
    HAS_BYTE_SUMS,
    HAS_PAIRS,
    INT4,
    INT8,
    MXFP4,
    PROCESSOR,
    WIDTH,
    WORDS,
    Kind,
    joined,
)

#: of 16 numbers those that an instruction multiplies and adds to the others
_PAIRED = (
    ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
    if PROCESSOR == "aarch64"
    else (list(range(0, 16, 2)), list(range(1, 16, 2)))
)


class Floats:
    """Products in fp32."""

    lanes = WIDTH  # of a vector of inputs and of sums
    ordered = "order"  # the kind's attribute for `order`

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.order = getattr(kind, self.ordered)

    @property
    def floats(self) -> ir.VectorType:
        """Of inputs and of sums."""
        return ir.VectorType(F32, self.lanes)

    def prepared(self, inputs: list[Value]) -> list[Value]:
        return inputs

    def weights(self, x_kind: Kind, at: tuple) -> Iterable[tuple[Value | None, list[Value]]]:
        """(scales or None, vectors that they multiply) of a step.

        at : the addresses of weights and of what lies beside them, and the table."""
        if self.kind.scaled:
            return self.kind.codes(*at[:2])
        return [(None, self.kind.vectors(*at))]

    def terms(
        self, inputs: list[Value], part: int, vectors: list[Value], scales: Any
    ) -> list[tuple[Value, Value]]:
        """Pairs of vectors whose products (`product`) are to be added up, of a step's inputs and
        vectors that take theirs from number `part` on."""
        pairs = list(zip(inputs[part:], vectors))
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

    def terms(self, inputs, part, vectors, scales):
        *inputs, offset, scale = inputs[: 2 * len(vectors) + 2]
        inputs = [one.to(vectors[0].type) for one in inputs]
        whole = _whole_sums(vectors, inputs) - offset.to(I32)
        return [(whole.to(F32, "sitofp"), scale * scales)]


class Integers(Floats):
    """Products of codes and inputs, both whole numbers of 16 bits, summed in 32; by vectors of 256 bits,
    which LLVM cuts into what the processor has."""

    lanes = 8

    def __init__(self, kind: Blocks) -> None:
        self.kind = kind
        self.order = list(range(kind.step))

    def prepared(self, inputs):
        """Of a step: the inputs in fixed point, in the kind's order; what the codes' offset adds to the
        sums of each group; the scales of each `kind.group`; and, if the kind has minima, what these multiply.

        A scale is a power of two, a quantum at most 2⁻¹⁴ of the largest of 32: bf16 is exact down to
        1/128 of that. An infinity makes NaN."""
        size = GROUP // inputs[0].type.count
        groups = [joined(inputs[at : at + size]) for at in range(0, len(inputs), size)]
        wholes, scales = zip(*map(_rounded, groups))
        sums = [
            whole.call("vector.reduce.add.v32i32", of=I32).to(F32, "sitofp") * scale
            for whole, scale in zip(wholes, scales)
        ]
        parts = [one.to(I16, "trunc") for one in wholes]
        parts = [
            joined(parts[at : at + 2]).shuffled(self.kind.order[begin : begin + 16])
            for at in range(0, len(parts), 2)
            for begin in range(0, BLOCK, 16)
        ]
        offsets = [
            _dot([one.of(self.kind.offset) for one in of], of)
            for of in zip(parts[::2], parts[1::2])
        ]
        return [
            *(one.to(self.floats) for one in [*parts, *offsets]),
            *self._spread(scales, max(self.lanes, self.kind.step // self.kind.group), 1.0),
            *self._spread(sums, self.lanes, len(sums) / self.lanes),
        ]

    def _spread(self, numbers: Sequence[Value], count: int, factor: float) -> list[Value]:
        """Numbers of groups of 32, times a factor, in so many lanes: those of a vector of `kind.scales` again
        and again."""
        lanes = self.kind.step // self.kind.group
        of = [i % lanes * len(numbers) // lanes for i in range(count)]
        found = joined([numbers[i].everywhere(1) for i in of]) * factor
        return [
            found.shuffled(list(range(at, at + self.lanes))) for at in range(0, count, self.lanes)
        ]

    def weights(self, x_kind, at):
        scales, minima = self.kind.scales(at[0]), self.kind.minima(at[0])
        for number, codes in enumerate(self.kind.codes(at[0])):
            yield (number, scales), codes
        if minima:
            yield (None, minima.shuffled([i % minima.type.count for i in range(self.lanes)])), []

    def terms(self, inputs, part, vectors, scales):
        number, scales = scales
        count = self.kind.step // 16
        at = count + count // 2
        if number is None:
            return [(inputs[at + max(1, scales.type.count // self.lanes)], scales)]
        whole = _dot(
            vectors, [one.to(vectors[0].type) for one in inputs[part : part + len(vectors)]]
        )
        if self.kind.offset:
            whole = whole - inputs[count + number].to(whole.type)
        lanes = scales.type.count
        mine = joined(inputs[at : at + max(1, lanes // self.lanes)]).shuffled(list(range(lanes)))
        places = [32 * number + 2 * i for i in range(self.lanes)]
        of = [self.kind.group_of(place) for place in places]
        return [(whole.to(F32, "sitofp"), (scales * mine).shuffled(of))]


def _rounded(group: Value) -> tuple[Value, Value]:
    """32 inputs as whole numbers of at most 15 bits and a sign, and the power of two that is one."""
    sizes = group.to(I32) & 0x7FFFFFFF  # as integers NaN is larger than all numbers
    largest = sizes.call("vector.reduce.umax.v32i32", of=I32).call("umax.i32", 27 << 23)
    largest = largest.to(F32)
    exponent = (largest * (1 + 2.0**-14)).to(I32) & 0x7F800000
    scaled = group * (exponent.of(268 << 23) - exponent).to(F32).everywhere(GROUP)
    whole = scaled.call("rint.v32f32").call("fptosi.sat.v32i32.v32f32", of=scaled.to(I32).type)
    return whole, (exponent - (14 << 23)).to(F32) + (largest - largest)


def _dot(a: Sequence[Value], b: Sequence[Value]) -> Value:
    """The products of vectors of 16 numbers of 16 bits, two of each added up, as the processor's
    instruction has them."""
    products = (
        one.shuffled(half).to(I32, "sext") * other.shuffled(half).to(I32, "sext")
        for one, other in zip(a, b)
        for half in _PAIRED
    )
    return reduce(add, products)


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
    return a.call(f"fma.v{a.type.count}f32", b, c)


def _instructions() -> dict[Kind, Floats]:
    found = {}
    if HAS_PAIRS:
        found |= {kind: Pairs(kind) for kind in (BFLOAT16, BF12, INT4, MXFP4, FP8)}
    if HAS_BYTE_SUMS:
        found[INT8] = Bytes(INT8)
    if WIDTH == 8:
        found |= {kind: Bytes(kind) for kind in (INT4, MXFP4)}
    found |= {kind: Integers(kind) for kind in GGML.values()}
    return {kind: found.get(kind) or Floats(kind) for kind in TAGS.values()}


#: kind → how its weights are multiplied on this processor
INSTRUCTIONS = _instructions()
