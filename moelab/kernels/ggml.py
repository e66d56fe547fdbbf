"""GGML's blocks of weights, as kinds: codes with their scales inside, at one address.

A weight is scale · (code − offset) or scale · code + minimum. Byte by byte the layouts are those of `ggml-common.h`:

    Q8_0         scale fp16, 32 codes of 8 bits with a sign
    Q4_0 Q4_1    scale fp16, of the second the minimum fp16, 16 bytes: the codes of weights i and i + 16
    Q5_0 Q5_1    as these, but 32 fifth bits before the codes
    MXFP4        scale e8m0, 16 bytes as of Q4_0: e2m1
    Q4_K Q5_K    for 256 weights: a scale and a minimum fp16, for each 32 weights 6 bits that multiply each of
                 them, (of the second 256 fifth bits,) 4 × 32 bytes: the codes of weights i and i + 32
    Q6_K         for 256 weights: 4 bits of each code, 2 bits of each, for each 16 weights 8 bits that
                 multiply the scale, the scale fp16"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from moelab.kernels.emit import F16, F32, I1, I8, I16, I32, Value
from moelab.kernels.vectors import (
    BLOCK,
    FewBits,
    bytes_with_signs,
    from_e2m1,
    halved_e8m0,
    joined,
)

BYTES = ir.VectorType(I8, 32)
WORDS = ir.VectorType(I16, 16)


class Blocks(FewBits):
    """Blocks of 32, two in a step."""

    block = 32
    other = 0
    first = 2  # where the codes of a block begin
    byte_order = [*range(16), *range(32, 48), *range(16, 32), *range(48, 64)]

    def scales(self, weights, other):
        return _halves(self._words(weights))

    def bytes(self, weights, other):
        codes = joined(self._loaded(weights + self.first, ir.VectorType(I8, 16)))
        for half in (0, 1):
            yield self.whole(codes >> 4 * half, weights, half)

    def whole(self, codes: Value, weights: Value, half: int) -> Value:
        """Of a half of both blocks, from their codes' lower four bits."""
        return codes & 15

    def _loaded(self, weights: Value, of: ir.Type) -> list[Value]:
        return [weights.load(of), (weights + self.size).load(of)]

    def _words(self, weights: Value) -> Value:
        """16 bits of each block."""
        first, second = (one.to(I32, "zext") for one in self._loaded(weights, I16))
        return first | second << 16


class Q8(Blocks):
    size = 34
    order = list(range(BLOCK))
    byte_order = []

    def codes(self, weights, other):
        for block in (weights, weights + self.size):
            yield bytes_with_signs(block + self.first)


class Q4(Blocks):
    size = 18
    offset = 8


class Q4Min(Blocks):
    size = 20
    first = 4

    def minima(self, weights, other):
        return self.scales(weights + 2, other)


class Q5(Blocks):
    size = 22
    offset = 16
    first = 6

    def whole(self, codes, weights, half):
        bits = self._words(weights + (self.first - 4 + 2 * half))
        fifth = bits.to(ir.VectorType(I1, 32)).to(I8, "sext")
        return codes & 15 | fifth & 16


class Q5Min(Q5, Q4Min):
    size = 24
    offset = 0
    first = 8


class Mxfp4(Blocks):
    size = 17
    offset = 12
    first = 1

    def scales(self, weights, other):
        return halved_e8m0(self._exponents(weights))

    def factors(self, weights, other):
        return halved_e8m0(self._exponents(weights), exact=False)

    def _exponents(self, weights: Value) -> Value:
        return joined(self._loaded(weights, ir.VectorType(I8, 1)))

    def whole(self, codes, weights, half):
        return from_e2m1(codes)


class Q4K(FewBits):
    block = step = 256
    size = 144
    other = 0
    byte_order = list(range(BLOCK))

    def scales(self, weights, other):
        return self._times(weights, 0)

    def minima(self, weights, other):
        return self._times(weights, 1) * -1.0

    def _times(self, block: Value, which: int) -> Value:
        """The scale or the minimum times 6 bits for each 32 weights: of the first four in bytes of their
        own, of the others 4 bits in bytes of both and 2 in those of the first."""
        own = (block + (4 + 4 * which)).load(I32)
        split = (block + 12).load(I32) >> 4 * which & 0x0F0F0F0F | own >> 2 & 0x30303030
        parts = [part.to(ir.VectorType(I8, 4)) for part in (own & 0x3F3F3F3F, split)]
        factor = _halves(block.load(I32)).shuffled([which] * 8)
        return joined(parts).to(I32, "zext").to(F32, "uitofp") * factor

    def bytes(self, weights, other):
        for group in range(8):
            words = (weights + (self.size - 128 + group // 2 * 32)).load(WORDS)
            yield self.whole(words >> group % 2 * 4 & 0x0F0F, weights, group).to(BYTES)

    def whole(self, codes: Value, block: Value, group: int) -> Value:
        """The codes of a group, from their lower four bits."""
        return codes


class Q5K(Q4K):
    size = 176

    def whole(self, codes, block, group):
        return codes | _moved((block + 16).load(WORDS), 4 - group) & 0x1010


class Q6K(FewBits):
    block = step = 256
    size = 210
    other = 0
    group = 16
    offset = 32
    byte_order = Q4K.byte_order

    def scales(self, weights, other):
        times = (weights + 192).load(ir.VectorType(I8, 16)).to(I32, "sext").to(F32, "sitofp")
        return times * _halves((weights + 208).load(I16).to(I32, "zext")).shuffled([0] * 16)

    def bytes(self, weights, other):
        for group in range(8):
            half, part = group // 4, group % 4
            low = (weights + (64 * half + 32 * (part % 2))).load(WORDS) >> part // 2 * 4
            high = _moved((weights + (128 + 32 * half)).load(WORDS), 4 - 2 * part)
            yield (low & 0x0F0F | high & 0x3030).to(BYTES)


def _halves(word: Value) -> Value:
    """Two numbers of fp16. Loaded as such, they would get into a register that still adds up."""
    return word.to(ir.VectorType(F16, 2)).to(F32, "fpext")


def _moved(words: Value, up: int) -> Value:
    return words << up if up > 0 else words >> -up


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
GGML: dict[str, FewBits] = {
    name: of((np.int8(0),) * number) for number, (name, of) in enumerate(_KINDS.items(), 1)
}
