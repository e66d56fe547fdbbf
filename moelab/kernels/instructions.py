"""How inputs times weights are summed: as fp32, as pairs of bf16 or as whole numbers, by what the
processor has.

With AVX512_BF16, one instruction multiplies pairs of bf16: bf16 weights and packed ones become such
pairs, which takes half the instructions. Inputs are cut into their upper 8 bits and the rest, if
there is one; subnormals are 0. Codes of few bits are else multiplied as whole numbers, with inputs in
fixed point of 16 bits for 32 of them: a third of the instructions, and llama.cpp's take 8 bits. On
AVX2 inputs are cut into bytes where codes are bytes without signs, with AVX512_VNNI for int8.

An instruction takes `prepared` inputs, from vectors of fp32 in its `order`, and `weights`: vectors
that take their inputs one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, reduce
from operator import add
from typing import Any

from llvmlite import ir

from moelab.kernels.emit import F32, I8, I16, I32, Value
from moelab.kernels.vectors import (
    BFLOAT16,
    BLOCK,
    BYTES,
    FLOATS,
    GROUP,
    HAS_BYTE_SUMS,
    HAS_PAIRS,
    INT8,
    PROCESSOR,
    WIDTH,
    WORDS,
    FewBits,
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
        order = getattr(kind, self.ordered)
        self.order = [at + i for at in range(0, kind.step, len(order)) for i in order]

    @property
    def floats(self) -> ir.VectorType:
        """Of inputs and of sums."""
        return ir.VectorType(F32, self.lanes)

    def prepared(self, inputs: list[Value]) -> list[Value]:
        return inputs

    def weights(self, x_kind: Kind, at: tuple) -> Iterable[tuple[Value | None, list[Value]]]:
        """(scales or None, vectors that they multiply) of a step.

        at : the addresses of weights and of what lies beside them, and the table."""
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
        pairs = self.kind.pairs(*at)
        scales = None
        if hasattr(self.kind, "scales_of"):
            groups = [lane % 8 // 4 for lane in range(WIDTH)]
            scales = self.kind.scales_of(at[1], groups)
        return [(scales, pairs if x_kind is BFLOAT16 else pairs * 2)]


class Integers(Floats):
    """Products of codes and inputs, both whole numbers of 16 bits, summed in 32; by vectors of 256
    bits, which LLVM cuts into what the processor has."""

    lanes = 8
    each = 2  # vectors of 32 codes

    def __init__(self, kind: FewBits) -> None:
        self.kind = kind
        self.order = list(range(kind.step))
        self.groups = kind.step // kind.group
        codes = kind.step // 16
        lanes = -(-self.groups // self.lanes)
        #: where which vectors are among those of a step's inputs
        self.scales = slice(codes, codes + lanes)
        self.sums = slice(codes + lanes, codes + 2 * lanes)

    def prepared(self, inputs):
        """Of a step: the inputs in fixed point, in the kind's order; for each group of weights the
        scale of its inputs, and their sum times the codes' offset, or what minima are to multiply.

        A scale is a power of two, a quantum at most 2⁻¹⁴ of the largest of 32: bf16 is exact down
        to 1/128 of that. An infinity makes NaN."""
        size = GROUP // inputs[0].type.count
        parts = [joined(inputs[at : at + size]) for at in range(0, len(inputs), size)]
        wholes, scales = zip(*map(_group_in_fixed_point, parts))
        blocks = zip(wholes[::2], wholes[1::2])
        found = [part for both in blocks for part in self.laid(joined([*both]))]
        sums = []
        for at in range(0, self.kind.step, size := self.kind.group):
            mine = wholes[at // GROUP].shuffled([at % GROUP + i for i in range(size)])
            total = mine.call(f"vector.reduce.add.v{size}i32", of=I32).to(F32, "sitofp")
            sums.append(total * scales[at // GROUP] * (-self.kind.offset or 1))
        scales = [scales[at // GROUP] for at in range(0, self.kind.step, size)]
        for numbers, share in ((scales, 1.0), (sums, min(1.0, self.groups / self.lanes))):
            whole = joined([one.everywhere(1) for one in numbers]) * share
            found += self._spread(whole)
        return [one.to(self.floats) for one in found]

    def laid(self, block: Value) -> list[Value]:
        """64 inputs, two vectors for each 32 codes."""
        short = block.to(I16, "trunc")
        return [short.shuffled(self.kind.order[i : i + 16]) for i in range(0, BLOCK, 16)]

    def _spread(self, groups: Value) -> list[Value]:
        """Numbers of the groups in as many lanes as there are, or again and again."""
        return [
            groups.shuffled([(begin + i) % self.groups for i in range(self.lanes)])
            for begin in range(0, max(self.groups, self.lanes), self.lanes)
        ]

    def codes(self, *at: Value) -> Iterable[list[Value]]:
        """Vectors whose products are added up as whole numbers."""
        return self.kind.codes(*at)

    def dot(self, codes: list[Value], inputs: list[Value]) -> Value:
        """The products, of two neighbours added up, as the processor's instruction has them."""
        products = (
            one.to(I32, "sext") * other.to(one.type).to(I32, "sext")
            for one, other in zip(codes, inputs)
        )
        return reduce(add, [reduce(add, map(one.shuffled, _PAIRED)) for one in products])

    def weights(self, x_kind, at):
        """(The scales of all groups, codes), at last what is added."""
        scales = self.kind.factors(*at[:2])
        for codes in self.codes(*at[:2]):
            yield scales, codes
        if added := scales if self.kind.offset else self.kind.minima(*at[:2]):
            yield added, []

    def terms(self, inputs, part, vectors, scales):
        if not vectors:
            return list(zip(inputs[self.sums], self._spread(scales)))
        mine = joined(inputs[self.scales]).shuffled(list(range(self.groups)))
        number = part // self.each
        of = [self.kind.group_of(GROUP * number + 2 * lane) for lane in range(self.lanes)]
        whole = self.dot(vectors, inputs[2 * number :])
        return [(whole.to(F32, "sitofp"), (scales * mine).shuffled(of))]


class Bytes(Integers):
    """Products of codes as bytes and of inputs' upper and lower bytes, summed in whole numbers: the
    same sums, by AVX2's instruction for bytes without signs times bytes with signs.

    It pays where two vectors have the same groups in their lanes; their sums in 16 bits are at most
    4 · 31 · 128."""

    each = 1

    def laid(self, block):
        parts = (block + 128).made("ashr", 8), block
        order = self.kind.byte_order
        return [
            part.to(I8, "trunc").shuffled(order[at : at + GROUP])
            for at in (0, GROUP)
            for part in parts
        ]

    def codes(self, *at):
        yield [*self.kind.bytes(*at)]

    def dot(self, codes, inputs):
        halves = (
            reduce(add, map(_bytes_in_pairs, codes, inputs[half : 2 * len(codes) : 2]))
            for half in (0, 1)
        )
        return reduce(add, map(_in_pairs, halves, (256, 1)))


class SignedBytes(Floats):
    """Products of bytes with signs and inputs in fixed point, summed in whole numbers by
    AVX512_VNNI."""

    offset = 128

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
        offset = [inputs[0].of(self.offset)] * (len(inputs) // 2)
        sums = _whole_sums(offset, inputs).to(FLOATS)
        return [*(one.to(FLOATS) for one in inputs), sums, scale]

    def weights(self, x_kind, at):
        groups = [2 * lane // WIDTH for lane in range(WIDTH)]
        return [(self.kind.scales_of(at[1], groups), [at[0].load(BYTES) + self.offset])]

    def terms(self, inputs, part, vectors, scales):
        *inputs, offset, scale = inputs[: 2 * len(vectors) + 2]
        inputs = [one.to(vectors[0].type) for one in inputs]
        whole = _whole_sums(vectors, inputs) - offset.to(I32)
        return [(whole.to(F32, "sitofp"), scale * scales)]


def _group_in_fixed_point(group: Value) -> tuple[Value, Value]:
    """32 inputs as whole numbers of at most 15 bits and a sign, and the power of two that is one."""
    sizes = group.to(I32) & 0x7FFFFFFF  # as integers NaN is larger than all numbers
    largest = sizes.call("vector.reduce.umax.v32i32", of=I32).call("umax.i32", 27 << 23)
    largest = largest.to(F32)
    exponent = (largest * 1.004).to(I32) & 0x7F800000  # 128 upper bytes would be too many
    scaled = group * (exponent.of(268 << 23) - exponent).to(F32).everywhere(GROUP)
    whole = scaled.call("rint.v32f32").call("fptosi.sat.v32i32.v32f32", of=scaled.to(I32).type)
    return whole, (exponent - (14 << 23)).to(F32) + (largest - largest)


def _bytes_in_pairs(codes: Value, inputs: Value) -> Value:
    """Bytes without signs times bytes with signs, two of them added up: 16 bits."""
    return codes.call("x86.avx2.pmadd.ub.sw", inputs.to(codes.type), of=ir.VectorType(I16, 16))


def _in_pairs(sums: Value, times: int) -> Value:
    """Numbers of 16 bits times one, two of them added up: 32 bits."""
    return sums.call("x86.avx2.pmadd.wd", sums.of(times), of=ir.VectorType(I32, 8))


def _exponent(parts: list[Value]) -> tuple[Value, Value]:
    """The largest size among vectors of fp32 and the exponent by which they are scaled, in each
    lane."""
    largest = parts[0].of(2.0**-100).to(I32)  # of zeros and subnormals
    for size in [part.to(I32) & 0x7FFFFFFF for part in parts]:
        # as integers NaN is larger than all numbers
        largest = size.is_(">", largest).made("select", size, largest)
    largest = largest.call(f"vector.reduce.umax.v{WIDTH}i32", of=I32).to(F32).everywhere(WIDTH)
    return largest, (largest * 1.004).to(I32) & 0x7F800000  # as in `_group_in_fixed_point`


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
        for code, one in zip(codes, half):
            total = total.call("x86.avx512.vpdpbusd.512", code.to(WORDS), one.to(WORDS))
    return total


def product(x: Value, weights: Value, total: Value | None) -> Value:
    """Inputs times weights, which are fp32 or words of two bf16, plus a sum, if there is one."""
    if weights.scalar == I32:
        return (total or x.of(0.0)).call("x86.avx512bf16.dpbf16ps.512", x.to(WORDS), weights)
    return fma(x, weights, total) if total else x * weights


def fma(a: Value, b: Value, c: Value) -> Value:
    return a.call(f"fma.v{a.type.count}f32", b, c)


@cache
def instruction(kind: Kind) -> Floats:
    """How weights of a kind are multiplied on this processor."""
    if HAS_PAIRS and hasattr(kind, "pairs"):
        return Pairs(kind)
    if kind is INT8 and HAS_BYTE_SUMS:
        return SignedBytes(kind)
    if not isinstance(kind, FewBits):
        return Floats(kind)
    pays = WIDTH == 8 and kind.step == BLOCK and kind.byte_order
    return Bytes(kind) if pays else Integers(kind)
