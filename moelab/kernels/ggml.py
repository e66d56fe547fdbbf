"""GGML's blocks of weights, as kinds: codes with their scales inside, at one address.

A weight is scale · (code − offset) or scale · code + minimum; the codes come out as whole numbers of 16 bits,
in `order`. Byte by byte the layouts are those of `ggml-common.h`:

    Q8_0         scale fp16, 32 codes of 8 bits with a sign
    Q4_0 Q4_1    scale fp16, of the second the minimum fp16, 16 bytes: the codes of weights i and i + 16
    Q5_0 Q5_1    as these, but 32 fifth bits before the codes
    MXFP4        scale e8m0, 16 bytes as of Q4_0: e2m1
    Q4_K Q5_K    for 256 weights: a scale and a minimum fp16, for each 32 weights 6 bits that multiply each of
                 them, (of the second 256 fifth bits,) 4 × 32 bytes: the codes of weights i and i + 32
    Q6_K         for 256 weights: 4 bits of each code, 2 bits of each, for each 16 weights 8 bits that
                 multiply the scale, the scale fp16"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from llvmlite import ir

from moelab.kernels.emit import F16, F32, I8, I16, I32, Value
from moelab.kernels.vectors import BLOCK, GROUP, Kind, joined, looked_up

CODES = ir.VectorType(I16, 16)
CODE_BYTES = ir.VectorType(I8, GROUP)
_LOW_HALVES = 0x0F0F0F0F


class Blocks(Kind):
    """Kinds of this file.

    block, size : weights and bytes of a block. step : weights that a loop takes at a time. group : weights
        that share a scale. offset : by how much codes are larger than what scales multiply.
    order : which of 64 weights comes when.
    """

    block = 32
    step = BLOCK
    group = GROUP
    offset = 0
    order = [begin + i for begin in (0, 32) for odd in (0, 1) for i in range(odd, 32, 2)]

    def scales(self, at: Value) -> Value:
        """fp32 [step / group], of the blocks at an address."""
        raise NotImplementedError

    def minima(self, at: Value) -> Value | None:
        """fp32 [step / group], what is to be added, if anything is."""
        return None

    def codes(self, at: Value) -> Iterator[list[Value]]:
        """Of each 32 weights two vectors of 16 whole numbers."""
        raise NotImplementedError

    def vectors(self, weights, other, table):
        scales, minima = self.scales(weights), self.minima(weights)
        found = []
        for parts in self.codes(weights):
            for part in parts:
                of = [self.group_of(16 * len(found) + i) for i in range(16)]
                value = (part - self.offset).to(I32, "sext").to(F32, "sitofp") * scales.shuffled(of)
                found.append(value + minima.shuffled(of) if minima else value)
        return found

    def group_of(self, place: int) -> int:
        """Of the code in this place of a step."""
        return (place // BLOCK * BLOCK + self.order[place % BLOCK]) // self.group

    def _each(self, at: Value, of: ir.Type, count: int = 1) -> Value:
        """So many numbers of each block of a step."""
        begins = range(0, self.step // self.block * self.size, self.size)
        return joined([(at + begin).load(ir.VectorType(of, count)) for begin in begins])


class Q8(Blocks):
    size = 34
    order = list(range(BLOCK))

    def scales(self, at):
        return self._each(at, F16).to(F32, "fpext")

    def codes(self, at):
        for begin in (2, 36):
            parts = ((at + begin + half).load(ir.VectorType(I8, 16)) for half in (0, 16))
            yield [part.to(I16, "sext") for part in parts]


class Q4(Blocks):
    size = 18
    offset = 8
    first = 2  # where codes begin

    def scales(self, at):
        return self._each(at, F16).to(F32, "fpext")

    def codes(self, at):
        for begin in (0, self.size):
            words = (at + begin + self.first).load(ir.VectorType(I32, 4)).shuffled([*range(4)] * 2)
            halves = words >> [0] * 4 + [4] * 4 & _LOW_HALVES
            yield _in_turn(self.whole(halves.to(CODE_BYTES), at + begin))

    def whole(self, halves: Value, at: Value) -> Value:
        """The codes of a block, bytes, from their lower four bits."""
        return halves


class Q4Min(Q4):
    size = 20
    offset = 0
    first = 4

    def minima(self, at):
        return self.scales(at + 2)


class Q5(Q4):
    size = 22
    offset = 16
    first = 6

    def whole(self, halves, at):
        bits = (at + (self.first - 4)).load(I32).to(ir.VectorType(ir.IntType(1), GROUP))
        return halves | bits.to(I8, "sext") & 16


class Q5Min(Q5, Q4Min):
    size = 24
    offset = 0
    first = 8


class Mxfp4(Q4):
    size = 17
    offset = 12
    first = 1
    values = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]

    def scales(self, at):
        """Half of e8m0, as values are doubled; the lowest two are subnormals."""
        bits = self._each(at, I8).to(I32, "zext")
        small = bits.of(0x200000) << bits
        return bits.is_("<", 2).made("select", small, bits - 1 << 23).to(F32)

    def whole(self, halves, at):
        table = [value + self.offset for value in self.values]
        return looked_up(halves.of(table, ir.VectorType(I8, 16)), halves)


class Q4K(Blocks):
    block = step = 256
    size = 144

    def scales(self, at):
        return self._times(at, 0)

    def minima(self, at):
        return self._times(at + 2, 4) * -1.0

    def _times(self, at: Value, first: int) -> Value:
        """A scale times the six bits of each 32 weights: of the first four whole, of the others split."""
        begin = at + (4 - first // 2)
        whole, low = (begin + first).load(I32), (begin + 8).load(I32) >> first
        split = low & _LOW_HALVES | whole >> 2 & 0x30303030
        bits = [part.to(ir.VectorType(I8, 4)) for part in (whole & 0x3F3F3F3F, split)]
        scale = at.load(F16).to(F32, "fpext")
        return joined(bits).to(I32, "zext").to(F32, "uitofp") * scale.everywhere(8)

    def codes(self, at):
        for chunk in range(4):
            both = (at + (self.size - 128 + 32 * chunk)).load(ir.VectorType(I32, 8))
            for half in (0, 1):
                halves = (both >> 4 * half & _LOW_HALVES).to(CODE_BYTES)
                yield _in_turn(self.whole(halves, at, 2 * chunk + half))

    def whole(self, halves: Value, at: Value, group: int) -> Value:
        return halves


class Q5K(Q4K):
    size = 176

    def whole(self, halves, at, group):
        bits = (at + 16).load(CODES)
        bits = bits << 4 - group if group < 4 else bits >> group - 4
        return halves | (bits & 0x1010).to(CODE_BYTES)


class Q6K(Blocks):
    block = step = 256
    size = 210
    group = 16
    offset = 32

    def scales(self, at):
        bits = (at + 192).load(ir.VectorType(I8, 16)).to(I32, "sext").to(F32, "sitofp")
        return bits * (at + 208).load(F16).to(F32, "fpext").everywhere(16)

    def codes(self, at):
        for number in range(8):
            half, part = number // 4, number % 4
            low = (at + (64 * half + 32 * (part % 2))).load(CODES)
            high = (at + (128 + 32 * half)).load(CODES)
            low = low >> 4 if part > 1 else low
            high = high << 4 - 2 * part if part < 2 else high >> 2 * part - 4
            yield _in_turn((low & 0x0F0F | high & 0x3030).to(CODE_BYTES))


def _in_turn(codes: Value) -> list[Value]:
    """Bytes without signs as 16 bits: the even ones, the odd ones."""
    words = codes.to(CODES)
    return [words & 0xFF, words >> 8]


_KINDS = {
    "Q8_0": Q8,
    "Q4_0": Q4,
    "Q4_1": Q4Min,
    "Q5_0": Q5,
    "Q5_1": Q5Min,
    "MXFP4": Mxfp4,
    "Q4_K": Q4K,
    "Q5_K": Q5K,
    "Q6_K": Q6K,
}
#: GGML's name of a type → its kind; their tags are tuples of different lengths
GGML: dict[str, Blocks] = {
    name: of((np.int8(0),) * number) for number, (name, of) in enumerate(_KINDS.items(), 1)
}
