"""Weights as vectors: LLVM code, piece by piece, of which `moelab.kernels.tiles` makes the parts of
kernels.

A *kind* is a numba type that says how weights are stored: float32, uint16 for bf16, int16 for fp16,
int8 for bf12 (`moelab.store.bf12`): low bytes of bf16 at one address, at another 4 bits a weight
that stand for the high byte, by a table of 16. A shift, a table look-up and two unpacks make bf16
pairs of 64 such weights, of which 96 bytes are read instead of 128. The other packed kinds are the
formats of `moelab.store.fewbit`: codes at one address, scales at another, each code widened and
multiplied by its scale, four-bit ones by a look-up of each of the four in a 16-bit word. What is
multiplied is fp32, pairs of bf16 (`PAIRED`) or bytes (`FIXED`), by what the processor can."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from math import nan
from struct import pack, unpack
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from moelab.kernels.emit import F16, F32, I8, I16, I32, Value

_FEATURES = llvm.get_host_cpu_features()
WIDTH = (
    16 if _FEATURES.get("avx512bw") else 8 if _FEATURES.get("avx2") else 4
)  # fp32 numbers in a vector register
STEP = 2 * WIDTH  # weights a step of the loops below takes of plain kinds
BLOCK = 64  # and of packed ones
BF12, INT8, INT4, MXFP4, FP8 = types.int8, types.uint8, types.uint32, types.int32, types.uint64
FEW = (INT8, INT4, MXFP4, FP8)
GROUP = 32  # weights of a scale, but FP8's
_BYTES_LOOKED_UP = bool(
    _FEATURES.get("avx512vbmi")
)  # in tables of 64 and 128, by the low bits of bytes
#: kinds that are multiplied as pairs of bf16 in one instruction, see `moelab.kernels.tiles`
PAIRED = (
    (types.uint16, BF12, INT4, MXFP4, FP8)
    if WIDTH == 16 and _BYTES_LOOKED_UP and _FEATURES.get("avx512bf16")
    else ()
)
#: and as bytes, by inputs in fixed point, each larger than its value by so much
OFFSETS = {INT4: 8, MXFP4: 12, INT8: 128}
FIXED = (
    (INT4, MXFP4) if WIDTH == 8 else (INT8,) if WIDTH == 16 and _FEATURES.get("avx512vnni") else ()
)
#: kind → bytes of `BLOCK` weights at their first address, and at the other one
SIZES = {
    types.float32: (256, 0),
    types.uint16: (128, 0),
    types.int16: (128, 0),
    BF12: (64, 32),
    INT8: (64, 4),
    INT4: (32, 4),
    MXFP4: (32, 2),
    FP8: (64, 2),
}
_DOUBLED = [0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12]  # twice the values of e2m1
FLOATS, WORDS = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH)
#: (processor, bytes) → its instruction that looks up each byte of a vector in a table of 16
_LOOK_UPS = {
    ("x86_64", 64): "x86.avx512.pshuf.b.512",
    ("x86_64", 32): "x86.avx2.pshuf.b",
    ("aarch64", 16): "aarch64.neon.tbl1.v16i8",
}
if _FEATURES.get("ssse3"):
    _LOOK_UPS["x86_64", 16] = "x86.ssse3.pshuf.b.128"
if _BYTES_LOOKED_UP:
    _LOOK_UPS["x86_64", 64] = "x86.avx512.permvar.qi.512"
_PROCESSOR = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def step_of(kind: type) -> int:
    """Weights that are widened at a time: kinds of 16 bits in pairs, packed ones in blocks."""
    return BLOCK if SIZES[kind][1] else STEP


def order_of(kind: Any, plain: bool = False) -> list[int]:
    """In which order the weights of a step come out of `groups`, or `plain`, out of `vectors`."""
    if kind == types.uint16:
        return [*range(0, STEP, 2), *range(1, STEP, 2)]
    if kind == BF12 or kind == FP8 and kind in PAIRED and not plain:
        return [
            begin + 16 * lane + 8 * half + 2 * pair + odd
            for begin in range(0, BLOCK, 4 * WIDTH)
            for half in range(2)
            for odd in range(2)
            for lane in range(WIDTH // 4)
            for pair in range(4)
        ]
    if kind in PAIRED and not plain:
        return [
            8 * (lane % 8) + 4 * odd + lane // 8 + k
            for k in (0, 2)
            for odd in range(2)
            for lane in range(WIDTH)
        ]
    if kind not in (INT4, MXFP4):
        return list(range(step_of(kind)))
    if kind in FIXED and not plain:
        return [*range(0, BLOCK, 2), *range(1, BLOCK, 2)]
    return [
        begin + 4 * lane + k
        for begin in range(0, BLOCK, 4 * WIDTH)
        for k in range(4)
        for lane in range(WIDTH)
    ]


def span_of(kind: Any, count: Value, which: int = 0) -> Value:
    """Bytes of so many weights where they lie, or of what else belongs to them."""
    if kind == FP8 and which:  # a scale for 128 weights, of which this may be the second half
        return count >> 7 << 2
    size = SIZES[kind][which]
    return count * (size // BLOCK) if size % BLOCK == 0 else count * size >> 6


def vectors(
    kind: Any, weights: Value, other: Value | None = None, table: Value | None = None
) -> list[Value]:
    """The weights of a step as fp32 vectors, exact, in the plain `order_of`."""
    if kind == types.float32:
        return [(weights + 4 * at).load(FLOATS) for at in (0, WIDTH)]
    if kind == types.int16:
        return [
            (weights + 2 * at).load(ir.VectorType(F16, WIDTH)).to(F32, "fpext") for at in (0, WIDTH)
        ]
    if kind == types.uint16:
        return _widened(weights.load(WORDS))
    if kind == BF12:
        return [
            value
            for both in halves(kind, weights, other, table)
            for pair in _pairs(*both)
            for value in _widened(pair)
        ]
    found = []
    for scales, values in _few(kind, weights, other):
        if kind == MXFP4:  # 2⁻¹²⁷ is a subnormal, which products may take for 0
            scales = scales.is_("==", 0.0).made("select", scales.of(2.0**-127), scales)
        found += [value * scales for value in values]
    return found


def groups(
    x_kind: Any, kind: Any, weights: Value, other: Value, table: Value | None
) -> Iterator[tuple[Value | None, list[Value]]]:
    """The weights of a step in `order_of`: a vector of scales, or None, and the vectors that it
    multiplies; pairs once for the upper halves of inputs, and again for the lower ones, which bf16
    does not have."""
    if kind in PAIRED:
        scales = (
            None
            if kind not in FEW
            else _scales(kind, other, [lane % 8 // 4 for lane in range(WIDTH)])
        )
        if kind == types.uint16:
            pairs = [weights.load(WORDS)]
        elif kind in (
            INT4,
            MXFP4,
        ):  # a code of each word in one half of a register, the next one in the other
            words = weights.load(ir.VectorType(I16, WIDTH)).shuffled([*range(WIDTH)] * 2)
            values = [value / 2 for value in _DOUBLED] if kind == MXFP4 else range(-8, 8)
            table = words.of([_in_bf16(value) for value in values] * 2)
            pairs = [
                table.call(
                    "x86.avx512.permvar.hi.512", words >> [4 * k] * WIDTH + [4 * k + 4] * WIDTH
                ).to(WORDS)
                for k in (0, 2)
            ]
        else:
            pairs = [pair for both in halves(kind, weights, other, table) for pair in _pairs(*both)]
        yield scales, pairs if x_kind == types.uint16 else pairs * 2
    elif kind in FIXED:
        yield (
            _scales(kind, other, [2 * lane // WIDTH for lane in range(WIDTH)]),
            _bytes(kind, weights),
        )
    elif kind in FEW:
        yield from _few(kind, weights, other)
    else:
        yield None, vectors(kind, weights, other, table)


def _few(kind: Any, weights: Value, other: Value) -> Iterator[tuple[Value, list[Value]]]:
    """Scales of a few-bit kind and the vectors of fp32 that they multiply."""
    size = BLOCK if kind == FP8 else GROUP if kind == INT8 else 4 * WIDTH  # weights of one yield
    for begin in range(0, BLOCK, size):
        if kind in (INT4, MXFP4):  # four codes a word, one from each word at a time
            four = (weights + begin // 2).load(ir.VectorType(I16, WIDTH)).to(I32, "zext")
            found = [_decoded(kind, four >> 4 * k) for k in range(4)]
        elif kind == INT8:
            found = [
                (weights + at).load(ir.VectorType(I8, WIDTH)).to(I32, "sext").to(F32, "sitofp")
                for at in range(begin, begin + size, WIDTH)
            ]
        else:
            found = [
                vector
                for at in range(0, BLOCK, STEP)
                for vector in _from_e4m3((weights + at).load(ir.VectorType(I8, STEP)))
            ]
        scales = _scales(
            kind, other, [(begin + lane * size // WIDTH) // GROUP for lane in range(WIDTH)]
        )
        yield scales * 256.0 if kind == FP8 else scales, found


def _scales(kind: Any, address: Value, groups: list[int]) -> Value:
    """A vector of the scales of the given groups of a block."""
    if kind == FP8:
        return address.load(F32).everywhere(WIDTH)
    # both lie in one word: each lane moves its own to where fp32 has those bits
    both = (
        address.load(I16).everywhere(2 * WIDTH).to(WORDS)
        if kind == MXFP4
        else address.load(I32).everywhere(WIDTH)
    )
    left = [23 - 8 * group if kind == MXFP4 else 16 - 16 * group for group in groups]
    return (both << left & (0x7F800000 if kind == MXFP4 else 0xFFFF0000)).to(F32)


def _decoded(kind: Any, words: Value) -> Value:
    """The values of codes in the low four bits of words, as fp32."""
    values, factor = (_DOUBLED, 0.5) if kind == MXFP4 else (list(range(-8, 8)), 1.0)
    if WIDTH == 16:  # a look-up that ignores the other bits
        table = words.of([factor * value for value in values], FLOATS)
        return table.call("x86.avx512.permvar.sf.512", words)
    codes = words.to(ir.VectorType(I8, 4 * WIDTH))
    found = _looked_up(words.of([*map(int, values)], ir.VectorType(I8, 16)), codes).to(WORDS)
    return (found << 24).made("ashr", 24).to(F32, "sitofp") * factor  # of each word the lowest byte


def _bytes(kind: Any, weights: Value) -> list[Value]:
    """The codes of a block as bytes, each larger than its value by `OFFSETS`, or than MXFP4's
    doubled one; even codes of four bits and the odd ones."""
    codes = weights.load(ir.VectorType(I8, SIZES[kind][0]))
    if kind == INT8:
        return [codes + OFFSETS[INT8]]
    if kind == INT4:
        return [codes & 15, codes >> 4]
    table = codes.of([int(value) + OFFSETS[MXFP4] for value in _DOUBLED], ir.VectorType(I8, 16))
    return [_looked_up(table, part) for part in (codes, codes >> 4)]


def joined(parts: list[Value]) -> Value:
    """Vectors, one after the other, as one."""
    while len(parts) > 1:
        parts = [
            a.shuffled(list(range(2 * a.type.count)), b) for a, b in zip(parts[::2], parts[1::2])
        ]
    return parts[0]


def _from_e4m3(codes: Value) -> list[Value]:
    """`STEP` codes as fp32: 1/256 of their values, which they are as half precision, whose
    exponents are 8 more."""
    half = codes.to(I16, "sext") << 7 & 0xBFFF
    half = (half & 0x3F80).is_("==", 0x3F80).made("select", half.of(0x7E00), half).to(F16)  # NaN
    return [half.shuffled(list(range(at, at + WIDTH))).to(F32, "fpext") for at in (0, WIDTH)]


def _in_bf16(value: float) -> int:
    """The bits of a number that is one of bf16."""
    return unpack("<I", pack("<f", value))[0] >> 16


def _pairs(low: Value, high: Value) -> list[Value]:
    """Words of two bf16, from bytes, by halves of each 16: as processors unpack."""
    n = low.type.count
    return [
        low.shuffled(
            [
                16 * lane + 8 * half + i + n * byte
                for lane in range(n // 16)
                for i in range(8)
                for byte in (0, 1)
            ],
            high,
        ).to(WORDS)
        for half in range(2)
    ]


def _widened(words: Value) -> list[Value]:
    """Pairs of bf16 as fp32: the even ones, the odd ones."""
    return [(words << 16).to(F32), (words & 0xFFFF0000).to(F32)]


def rounded(kind: Any, value: Value) -> Value:
    """Numbers of a plain kind, from fp32."""
    if kind == types.int16:
        return value.to(F16, "fptrunc")
    if kind != types.uint16:
        return value
    bits = value.to(I32)
    rounded = bits + ((bits >> 16 & 1) + 0x7FFF)  # ties to even
    bits = value.is_("uno", value).made("select", bits.of(0x7FC00000), rounded)
    return (bits >> 16).to(I16, "trunc")


def halves(
    kind: Any, weights: Value, other: Value, table: Value | None
) -> Iterator[tuple[Value, Value]]:
    """The low and the high bytes of a block of bf12 or paired FP8 as bf16, a vector register of
    each at a time."""
    n, half = 4 * WIDTH, BLOCK // 2
    if kind == FP8:
        codes = weights.load(ir.VectorType(I8, n))
        words = [
            _in_bf16(
                code / 512
                if code < 8
                else (8 + code % 8) * 2.0 ** (code // 8 - 10)
                if code < 127
                else nan
            )
            for code in range(128)
        ]
        tables = [
            codes.of([word >> shift & 255 for word in words[at : at + 64]])
            for shift in (0, 8)
            for at in (0, 64)
        ]
        low, high = (
            tables[at].call("x86.avx512.vpermi2var.qi.512", codes, tables[at + 1]) for at in (0, 2)
        )
        yield low, high | codes & 128
        return
    for begin in range(0, BLOCK, n):
        low, at = (weights + begin).load(ir.VectorType(I8, n)), other + begin % half
        if n > half:  # low nibbles in one half of a register, high ones in the other
            codes = at.load(ir.VectorType(I16, half // 2)).shuffled([*range(half // 2)] * 2)
            codes = (codes >> [0] * (half // 2) + [4] * (half // 2)).to(ir.VectorType(I8, n))
        else:
            codes = at.load(ir.VectorType(I8, n)) >> begin // half * 4
        yield low, _looked_up(table, codes)


def _looked_up(table: Value, codes: Value) -> Value:
    """For each byte of a vector, table[its low four bits]; `table` has 16 bytes."""
    n = codes.type.count
    if name := _LOOK_UPS.get((_PROCESSOR, n)):
        table = table.shuffled([i % 16 for i in range(n)])
        return table.call(name, codes if _BYTES_LOOKED_UP and n == 64 else codes & 15)
    found = codes.of(0)
    for code in range(16):
        found = (codes & 15).is_("==", code).made("select", table.shuffled([code] * n), found)
    return found


def table_of(kind: Any, address: Value) -> Value | None:
    return address.load(ir.VectorType(I8, 16)) if kind == BF12 else None
