"""Kinds of weights, each with the LLVM code that makes vectors of fp32 of them.

A *kind* says how weights are stored. Plain ones are arrays of fp32, bf16 or fp16. Packed ones lie at
two addresses, in blocks of 64 weights: bf12 (`moelab.store.bf12`) has the low bytes of bf16 at one,
and at the other 4 bits a weight that stand for the high byte, by a table of 16; the formats of
`moelab.store.fewbit` have codes at one and scales at the other. In a kernel's signature a number of
the type of its `tag` stands for a kind: only the type matters.

Adding a format is a subclass of `Kind` and a line in `moelab.kernels.products.PACKED`. How vectors of
weights are multiplied is in `moelab.kernels.instructions`."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from math import nan
from struct import pack, unpack
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, typeof

from moelab.kernels.emit import F16, F32, I8, I16, I32, TAGS, Value


def _features() -> dict[str, bool]:
    """Of the processor that numba compiles for: this one, or that of NUMBA_CPU_FEATURES."""
    if config.CPU_FEATURES is None:
        return llvm.get_host_cpu_features()
    return {one[1:]: one[0] == "+" for one in config.CPU_FEATURES.split(",") if one}


_FEATURES = _features()
#: fp32 numbers in a vector register
WIDTH = 16 if _FEATURES.get("avx512bw") else 8 if _FEATURES.get("avx2") else 4
STEP = 2 * WIDTH  # weights that a loop takes at a time of plain kinds
BLOCK = 64  # and of packed ones
GROUP = 32  # weights that share a scale, but of fp8
FLOATS = ir.VectorType(F32, WIDTH)
WORDS = ir.VectorType(I32, WIDTH)
BYTES = ir.VectorType(I8, 4 * WIDTH)
#: whether bytes are looked up in tables of 64 and 128, by their low bits
LOOKS_UP_BYTES = bool(_FEATURES.get("avx512vbmi"))
HAS_PAIRS = WIDTH == 16 and LOOKS_UP_BYTES and bool(_FEATURES.get("avx512bf16"))
HAS_BYTE_SUMS = WIDTH == 16 and bool(_FEATURES.get("avx512vnni"))
#: (processor, bytes) → its instruction that looks up each byte of a vector in a table of 16
_LOOK_UPS = {
    ("x86_64", 64): f"x86.avx512.{'permvar.qi' if LOOKS_UP_BYTES else 'pshuf.b'}.512",
    ("x86_64", 32): "x86.avx2.pshuf.b",
    ("x86_64", 16): "x86.ssse3.pshuf.b.128",
    ("aarch64", 16): "aarch64.neon.tbl1.v16i8",
}
PROCESSOR = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


#: the order of a block of bytes that `_unpacked` has made words of
UNPACKED = [
    begin + 16 * lane + 8 * half + 2 * pair + odd
    for begin in range(0, BLOCK, 4 * WIDTH)
    for half in range(2)
    for odd in range(2)
    for lane in range(WIDTH // 4)
    for pair in range(4)
]


class Kind:
    """How weights are stored.

    tag : a value of the type that stands for this kind in kernels' signatures.
    size, other : bytes of `block` weights at their first address and at the other one.
    step : weights that a loop takes at a time. order : which of them is where in what
        `vectors(weights, other, table)` returns, vectors of fp32 of the weights of a step, exact.

    A kind that is multiplied as pairs of bf16 has `pairs(weights, other, table)`, words of two bf16 in
    `pair_order`. One that is multiplied in whole numbers is one of `FewBits`.
    """

    size = 128
    other = 0
    block = BLOCK
    step = STEP
    order = list(range(STEP))

    def __init__(self, tag: Any) -> None:
        self.tag = tag
        TAGS[typeof(tag)] = self

    def span(self, count: Value) -> Value:
        """Bytes of so many weights at their first address."""
        return self._portion(count, self.size)

    def beside(self, count: Value) -> Value:
        """Bytes at the other address of so many weights of a row."""
        return self._portion(count, self.other)

    def beside_rows(self, rows: Value, n: Value) -> Value:
        """Bytes at the other address of so many rows of n weights."""
        return self.beside(rows * n)

    def table(self, address: Value) -> Value | None:
        """What all weights of a matrix are looked up in, from its address."""
        return None

    def _portion(self, count: Value, size: int) -> Value:
        whole = size % self.block == 0
        return count * (size // self.block) if whole else count * size // self.block


class Float32(Kind):
    size = 256

    def vectors(self, weights, other, table):
        return [(weights + 4 * at).load(FLOATS) for at in (0, WIDTH)]

    def rounded(self, value):
        """Numbers of this kind, from fp32."""
        return value


class Float16(Kind):
    def vectors(self, weights, other, table):
        halves = ((weights + 2 * at).load(ir.VectorType(F16, WIDTH)) for at in (0, WIDTH))
        return [half.to(F32, "fpext") for half in halves]

    def rounded(self, value):
        return value.to(F16, "fptrunc")


class BFloat16(Kind):
    """Two weights are one word, so the even ones and the odd ones are widened apart."""

    order = pair_order = [*range(0, STEP, 2), *range(1, STEP, 2)]

    def vectors(self, weights, other, table):
        return _widened(weights.load(WORDS))

    def pairs(self, weights, other, table):
        return [weights.load(WORDS)]

    def rounded(self, value):
        bits = value.to(I32)
        rounded = bits + ((bits >> 16 & 1) + 0x7FFF)  # ties to even
        bits = value.is_("uno", value).made("select", bits.of(0x7FC00000), rounded)
        return (bits >> 16).to(I16, "trunc")


class Bf12(Kind):
    size = 64
    other = 32
    step = BLOCK
    order = pair_order = UNPACKED

    def table(self, address):
        return address.load(ir.VectorType(I8, 16))

    def vectors(self, weights, other, table):
        pairs = self.pairs(weights, other, table)
        return [value for pair in pairs for value in _widened(pair)]

    def pairs(self, weights, other, table):
        return [pair for both in self.halves(weights, other, table) for pair in _unpacked(*both)]

    def halves(self, weights, other, table):
        """The low and the high bytes of a block as bf16, a vector register of each at a time."""
        half = BLOCK // 2
        for begin in range(0, BLOCK, BYTES.count):
            at = other + begin % half
            if BYTES.count > half:  # low nibbles in one half of a register, high ones in the other
                codes = at.load(ir.VectorType(I16, half // 2)).shuffled([*range(half // 2)] * 2)
                codes = (codes >> [0] * (half // 2) + [4] * (half // 2)).to(BYTES)
            else:
                codes = at.load(BYTES) >> begin // half * 4
            yield (weights + begin).load(BYTES), looked_up(table, codes)


class FewBits(Kind):
    """Codes, whole numbers less an offset, times scales, of some plus minima.

    group : weights that share a scale. offset : by how much codes are larger than what scales
        multiply. byte_order : which of 64 weights comes when in `bytes`, order : in `codes`.
    """

    size = 32
    other = 4
    step = BLOCK
    group = GROUP
    offset = 0
    byte_order: list[int] = []

    def scales(self, weights: Value, other: Value) -> Value:
        """fp32 [step / group], of a step; here bf16, for each 32 weights."""
        return self.scales_of(other, [0, 1])

    def scales_of(self, address: Value, groups: list[int]) -> Value:
        """A vector of the scales of the given groups of a block, 0 or 1.

        Both lie in one word: each lane moves its own to where fp32 has those bits."""
        both = address.load(I32).everywhere(len(groups))
        return (both << [16 - 16 * group for group in groups] & 0xFFFF0000).to(F32)

    def factors(self, weights: Value, other: Value) -> Value:
        """Scales as products take them: subnormals, with which processors are slow, may be 0."""
        return self.scales(weights, other)

    def minima(self, weights: Value, other: Value) -> Value | None:
        """What is added, as `scales`."""
        return None

    def bytes(self, weights: Value, other: Value) -> Iterator[Value]:
        """For each 32 weights a vector of bytes, below 64; none of kinds whose codes have signs. Those of
        four bytes in a row share a scale."""
        raise NotImplementedError

    def codes(self, weights: Value, other: Value) -> Iterator[list[Value]]:
        """For each 32 weights two vectors of 16 whole numbers of 16 bits."""
        for codes in self.bytes(weights, other):
            words = codes.to(ir.VectorType(I16, 16))
            yield [words & 255, words >> 8]

    @property
    def order(self) -> list[int]:
        """The even ones of 32 bytes, then the odd ones."""
        starts = (begin + odd for begin in range(0, BLOCK, GROUP) for odd in (0, 1))
        return [self.byte_order[at + i] for at in starts for i in range(0, GROUP, 2)]

    def group_of(self, place: int) -> int:
        """Of the code that comes in this place of a step."""
        return (place // BLOCK * BLOCK + self.order[place % BLOCK]) // self.group

    def vectors(self, weights, other, table):
        scales = self.scales(weights, other)
        minima = self.minima(weights, other)
        found = []
        for part in (part for both in self.codes(weights, other) for part in both):
            groups = [self.group_of(16 * len(found) + i) for i in range(16)]
            whole = (part - self.offset).to(I32, "sext").to(F32, "sitofp")
            value = whole * scales.shuffled(groups)
            found.append(value + minima.shuffled(groups) if minima else value)
        return found


class Int8(FewBits):
    size = 64
    order = list(range(BLOCK))

    def codes(self, weights, other):
        for begin in range(0, BLOCK, GROUP):
            yield bytes_with_signs(weights + begin)


class FourBits(FewBits):
    """Two codes a byte.

    values : of the 16 codes, times `factor` whole numbers."""

    factor = 1.0
    byte_order = [*range(0, BLOCK, 2), *range(1, BLOCK, 2)]
    pair_order = [
        8 * (lane % 8) + 4 * odd + lane // 8 + k
        for k in (0, 2)
        for odd in range(2)
        for lane in range(WIDTH)
    ]

    def bytes(self, weights, other):
        codes = weights.load(ir.VectorType(I8, BLOCK // 2))
        for part in (codes, codes >> 4):
            yield self.whole(part)

    def whole(self, codes: Value) -> Value:
        """Bytes from codes in their lower four bits."""
        return codes & 15

    def pairs(self, weights, other, table):
        # A code of each word in one half of a register, the next one in the other.
        words = weights.load(ir.VectorType(I16, WIDTH)).shuffled([*range(WIDTH)] * 2)
        table = words.of([_in_bf16(value / self.factor) for value in self.values] * 2)
        codes = (words >> [4 * k] * WIDTH + [4 * k + 4] * WIDTH for k in (0, 2))
        return [table.call("x86.avx512.permvar.hi.512", one).to(WORDS) for one in codes]


class Int4(FourBits):
    offset = 8
    values = [*range(-8, 8)]


class Mxfp4(FourBits):
    """e2m1 times e8m0, a byte for each 32 weights; in whole numbers twice e2m1 times half of it."""

    other = 2
    offset = 12
    factor = 2.0
    values = [0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12]

    def scales(self, weights, other):
        return halved_e8m0(other.load(ir.VectorType(I8, 2)))

    def factors(self, weights, other):
        return halved_e8m0(other.load(ir.VectorType(I8, 2)), exact=False)

    def scales_of(self, address, groups):
        both = address.load(I16).everywhere(2 * len(groups)).to(ir.VectorType(I32, len(groups)))
        return (both << [23 - 8 * group for group in groups] & 0x7F800000).to(F32)

    def whole(self, codes):
        return from_e2m1(codes)

    def vectors(self, weights, other, table):
        """With the sign of −0, which whole numbers do not have."""
        found = weights.load(ir.VectorType(I8, BLOCK // 2))
        words = [part.to(ir.VectorType(I16, 16)) for part in (found, found >> 4)]
        codes = (code for both in words for code in (both & 255, both >> 8))
        return [
            ((code & 8).to(I32, "zext") << 28 | value.to(I32)).to(F32)
            for code, value in zip(codes, super().vectors(weights, other, table))
        ]


class Fp8(Kind):
    """e4m3, fp32 scales for 128 rows × 128 inputs, of which a block is half a row."""

    size = 64
    other = 2
    step = BLOCK
    order = list(range(BLOCK))
    pair_order = UNPACKED

    def beside(self, count):
        return count >> 7 << 2

    def beside_rows(self, rows, n):
        return (rows >> 7) * (n + 127 >> 7) * 4

    def scales_of(self, address: Value, groups: list[int]) -> Value:
        return address.load(F32).everywhere(len(groups))

    def vectors(self, weights, other, table):
        found = [(weights + at).load(ir.VectorType(I8, STEP)) for at in range(0, BLOCK, STEP)]
        scale = self.scales_of(other, [0] * WIDTH) * 256.0
        return [vector * scale for codes in found for vector in _from_e4m3(codes)]

    def pairs(self, weights, other, table):
        codes = weights.load(BYTES)
        words = [_in_bf16(_e4m3(code)) for code in range(128)]
        low, high = (
            self._of_128(codes, [word >> shift & 255 for word in words]) for shift in (0, 8)
        )
        return _unpacked(low, high | codes & 128)

    def _of_128(self, codes: Value, table: list[int]) -> Value:
        first = codes.of(table[:64])
        second = codes.of(table[64:])
        return first.call("x86.avx512.vpermi2var.qi.512", codes, second)


def bytes_with_signs(address: Value) -> list[Value]:
    """32 of them as two vectors of 16 bits."""
    parts = ((address + at).load(ir.VectorType(I8, 16)) for at in (0, 16))
    return [part.to(I16, "sext") for part in parts]


def from_e2m1(codes: Value) -> Value:
    """Twice the values of codes, plus 12: bytes."""
    values = [int(value) + Mxfp4.offset for value in Mxfp4.values]
    return looked_up(codes.of(values, ir.VectorType(I8, 16)), codes)


def halved_e8m0(codes: Value, exact: bool = True) -> Value:
    """Half of each power of two, fp32; the lowest two are subnormals, or 0."""
    bits = codes.to(I32, "zext")
    if not exact:
        return (bits.call(f"usub.sat.v{bits.type.count}i32", 1) << 23).to(F32)
    name = f"smax.v{bits.type.count}i32"  # (0 + 1) << 21 and (1 + 1) << 21 are the subnormals
    return (bits - 1 << 23).call(name, bits + 1 << 21).to(F32)


def _e4m3(code: int) -> float:
    """The value of a code without a sign."""
    if code == 127:
        return nan
    return code / 512 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10)


def _from_e4m3(codes: Value) -> list[Value]:
    """`STEP` codes as fp32: 1/256 of their values, which they are as half precision, whose
    exponents are 8 more."""
    half = codes.to(I16, "sext") << 7 & 0xBFFF
    half = (half & 0x3F80).is_("==", 0x3F80).made("select", half.of(0x7E00), half).to(F16)  # NaN
    return [half.shuffled(list(range(at, at + WIDTH))).to(F32, "fpext") for at in (0, WIDTH)]


def _unpacked(low: Value, high: Value) -> list[Value]:
    """Words of two bf16, from bytes, by halves of each 16: as processors unpack."""
    n = low.type.count
    return [
        low.shuffled([16 * lane + 8 * half + i + n * byte
                      for lane in range(n // 16) for i in range(8) for byte in (0, 1)], high).to(WORDS)
        for half in range(2)
    ]  # fmt: skip


def _widened(words: Value) -> list[Value]:
    """Pairs of bf16 as fp32: the even ones, the odd ones."""
    return [(words << 16).to(F32), (words & 0xFFFF0000).to(F32)]


def looked_up(table: Value, codes: Value) -> Value:
    """For each byte of a vector, table[its low four bits]; `table` has 16 bytes."""
    n = codes.type.count
    if n > BYTES.count:
        halves = (codes.shuffled(list(range(at, at + n // 2))) for at in (0, n // 2))
        return joined([looked_up(table, half) for half in halves])
    table = table.shuffled([i % 16 for i in range(n)])
    ignores_others = LOOKS_UP_BYTES and n == 64
    return table.call(_LOOK_UPS[PROCESSOR, n], codes if ignores_others else codes & 15)


def joined(parts: list[Value]) -> Value:
    """Vectors, one after the other, as one."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2])
        parts = [a.shuffled(list(range(2 * a.type.count)), b) for a, b in pairs]
    return parts[0]


def _in_bf16(value: float) -> int:
    """The bits of a number that is one of bf16."""
    return unpack("<I", pack("<f", value))[0] >> 16


FLOAT32 = Float32(np.float32(0))
FLOAT16 = Float16(np.int16(0))
BFLOAT16 = BFloat16(np.uint16(0))
BF12 = Bf12(np.int8(0))
INT8 = Int8(np.uint8(0))
INT4 = Int4(np.uint32(0))
MXFP4 = Mxfp4(np.int32(0))
FP8 = Fp8(np.uint64(0))
