"""Weights as fp32 vectors: LLVM code, piece by piece, of which `moelab.kernels.tiles` makes the parts of kernels.

A *kind* is a numba type that says how weights are stored: float32, uint16 for bf16, int16 for fp16, int8 for bf12
(`moelab.store.bf12`): low bytes of bf16 at one address, at another 4 bits a weight that stand for the high byte, by a
table of 16. Two masks, a shift, a table look-up and an unpack make bf16 pairs of 64 such weights, of which 96 bytes are
read instead of 128. The other packed kinds are the formats of `moelab.store.fewbit`: codes at one address, scales at
another, each code widened and multiplied by its scale, four-bit ones by a look-up of each of the four in a 16-bit word.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

_FEATURES = llvm.get_host_cpu_features()
WIDTH = 16 if _FEATURES.get("avx512bw") else 8 if _FEATURES.get("avx2") else 4     # fp32 numbers in a vector register
STEP = 2 * WIDTH                # weights a step of the loops below takes of plain kinds
BLOCK = 64                      # and of packed ones
BF12, INT8, INT4, MXFP4, FP8 = types.int8, types.uint8, types.uint32, types.int32, types.uint64
FEW = (INT8, INT4, MXFP4, FP8)
GROUP = 32                      # weights of a scale, but FP8's
#: kind → bytes of `BLOCK` weights at their first address, and at the other one
SIZES = {types.float32: (256, 0), types.uint16: (128, 0), types.int16: (128, 0), BF12: (64, 32),
         INT8: (64, 4), INT4: (32, 4), MXFP4: (32, 2), FP8: (64, 2)}
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)               # twice the values of e2m1

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, _WORDS = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH)


def addr(builder: Any, address: Any, count: Any, size: int) -> Any:
    """The address `count` things of `size` bytes further on."""
    count = ir.Constant(I64, count) if isinstance(count, int) else count
    return builder.add(address, builder.mul(count, ir.Constant(I64, size)))


def load(builder: Any, kind: ir.Type, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def element(builder: Any, kind: ir.Type, address: Any, i: Any) -> Any:
    """A pointer to the i-th number at an address, of which LLVM knows that the next one lies beside it: for vectors."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [i])


def fill(kind: Any, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def step_of(kind: Any) -> int:
    """Weights that are widened at a time: kinds of 16 bits in pairs, packed ones in blocks."""
    return BLOCK if SIZES[kind][1] else STEP


def order_of(kind: Any) -> list[int]:
    """In which order the weights of a step come out of `vectors`."""
    if kind == types.uint16:
        return [*range(0, STEP, 2), *range(1, STEP, 2)]
    if kind in (INT4, MXFP4):
        return [begin + 4 * lane + k for begin in range(0, BLOCK, 4 * WIDTH) for k in range(4) for lane in range(WIDTH)]
    if kind != BF12:
        return list(range(step_of(kind)))
    return [begin + 16 * lane + 8 * half + 2 * pair + odd for begin in range(0, BLOCK, 4 * WIDTH) for half in range(2)
            for odd in range(2) for lane in range(WIDTH // 4) for pair in range(4)]


def skip(builder: Any, kind: Any, address: Any, count: Any, which: int = 0) -> Any:
    """The address `count` weights of a kind further on: where they begin, or of what else belongs to them."""
    size = SIZES[kind][which]
    if kind == FP8 and which:                           # a scale for 128 weights, of which this may be the second half
        return builder.add(address, builder.shl(builder.lshr(count, ir.Constant(I64, 7)), ir.Constant(I64, 2)))
    if size % BLOCK == 0:
        return addr(builder, address, count, size // BLOCK)
    return builder.add(address, builder.lshr(builder.mul(count, ir.Constant(I64, size)), ir.Constant(I64, 6)))


def vectors(builder: Any, kind: ir.Type, weights: Any, other: Any = None, table: Any = None) -> list[Any]:
    """The weights of a step as fp32 vectors, in `order_of`."""
    if kind == types.float32:
        return [load(builder, FLOATS, addr(builder, weights, WIDTH * i, 4)) for i in range(2)]
    if kind == types.int16:
        half = ir.VectorType(ir.HalfType(), WIDTH)
        return [builder.fpext(load(builder, half, addr(builder, weights, WIDTH * i, 2)), FLOATS) for i in range(2)]
    if kind == types.uint16:
        return _widened(builder, load(builder, _WORDS, weights))
    found = []
    for low, high in halves(builder, weights, other, table):
        n = low.type.count
        for half in range(2):                           # within 16 bytes, as processors unpack
            order = [16 * lane + 8 * half + i + n * byte
                     for lane in range(n // 16) for i in range(8) for byte in (0, 1)]
            found += _widened(builder, builder.bitcast(shuffle(builder, low, high, order), _WORDS))
    return found


def groups(builder: Any, kind: Any, weights: Any, other: Any, table: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The weights of a step in `order_of`: a vector of scales, or None, and the vectors that it multiplies."""
    if kind not in FEW:
        yield None, vectors(builder, kind, weights, other, table)
        return
    size = BLOCK if kind == FP8 else GROUP if kind == INT8 else 4 * WIDTH           # weights of one yield
    for begin in range(0, BLOCK, size):
        if kind in (INT4, MXFP4):                       # four codes a word, one from each word at a time
            four = load(builder, ir.VectorType(I16, WIDTH), addr(builder, weights, begin // 2, 1))
            four = builder.zext(four, _WORDS)
            found = [_decoded(builder, kind, builder.lshr(four, fill(_WORDS, 4 * k))) for k in range(4)]
        elif kind == INT8:
            bytes_ = ir.VectorType(I8, WIDTH)
            found = [builder.sitofp(builder.sext(load(builder, bytes_, addr(builder, weights, at, 1)), _WORDS), FLOATS)
                     for at in range(begin, begin + size, WIDTH)]
        else:
            found = [vector for at in range(0, BLOCK, STEP)
                     for vector in _from_e4m3(builder, load(builder, ir.VectorType(I8, STEP),
                                                             addr(builder, weights, at, 1)))]
        yield _scales(builder, kind, other, [(begin + lane * size // WIDTH) // GROUP for lane in range(WIDTH)]), found


def _scales(builder: Any, kind: Any, address: Any, groups: list[int]) -> Any:
    """A vector of the scales of the given groups of a block, of FP8 with the factor of `_from_e4m3`."""
    if kind == FP8:
        return builder.fmul(everywhere(builder, load(builder, F32, address)), fill(FLOATS, 256.0))
    # both lie in one word: each lane moves its own to where fp32 has those bits
    both = builder.zext(load(builder, I16, address), I32) if kind == MXFP4 else load(builder, I32, address)
    left = [23 - 8 * group if kind == MXFP4 else 16 - 16 * group for group in groups]
    bits = builder.shl(everywhere(builder, both), ir.Constant(_WORDS, left))
    return builder.bitcast(builder.and_(bits, fill(_WORDS, 0x7F800000 if kind == MXFP4 else 0xFFFF0000)), FLOATS)


def _decoded(builder: Any, kind: Any, words: Any) -> Any:
    """The values of codes in the low four bits of words, as fp32."""
    values, factor = (_DOUBLED, 0.5) if kind == MXFP4 else (range(-8, 8), 1.0)
    if WIDTH == 16:                                     # a look-up that ignores the other bits
        f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOATS, [FLOATS, _WORDS]),
                                           "llvm.x86.avx512.permvar.sf.512")
        return builder.call(f, [ir.Constant(FLOATS, [factor * value for value in values]), words])
    codes, of = builder.and_(words, fill(_WORDS, 15)), ir.VectorType(I8, 16)
    found = _looked_up(builder, ir.Constant(of, list(values)), builder.bitcast(codes, ir.VectorType(I8, 4 * WIDTH)))
    found = builder.shl(builder.bitcast(found, _WORDS), fill(_WORDS, 24))           # of each word the lowest byte
    return builder.fmul(builder.sitofp(builder.ashr(found, fill(_WORDS, 24)), FLOATS), fill(FLOATS, factor))


def _from_e4m3(builder: Any, codes: Any) -> list[Any]:
    """`STEP` codes as fp32: 1/256 of their values, which they are as half precision, whose exponents are 8 more."""
    of = ir.VectorType(I16, STEP)
    half = builder.and_(builder.shl(builder.sext(codes, of), fill(of, 7)), fill(of, 0xBFFF))
    nan = builder.icmp_unsigned("==", builder.and_(half, fill(of, 0x3F80)), fill(of, 0x3F80))
    half = builder.bitcast(builder.select(nan, fill(of, 0x7E00), half), ir.VectorType(ir.HalfType(), STEP))
    return [builder.fpext(shuffle(builder, half, half, list(range(at, at + WIDTH))), FLOATS) for at in (0, WIDTH)]


def everywhere(builder: Any, number: Any, count: int = WIDTH) -> Any:
    """A vector of one number of 32 bits."""
    one = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    one = builder.insert_element(one, number, fill(I32, 0))
    return shuffle(builder, one, one, [0] * count)


def _widened(builder: Any, words: Any) -> list[Any]:
    """Pairs of bf16 as fp32: the even ones, the odd ones."""
    return [builder.bitcast(builder.shl(words, fill(_WORDS, 16)), FLOATS),
            builder.bitcast(builder.and_(words, fill(_WORDS, 0xFFFF0000)), FLOATS)]


def halves(builder: Any, weights: Any, other: Any, table: Any) -> Iterator[tuple[Any, Any]]:
    """The low and the high bytes of a block of bf12 weights, one vector register after the other."""
    n, half = 4 * WIDTH, BLOCK // 2
    for begin in range(0, BLOCK, n):
        low = load(builder, ir.VectorType(I8, n), addr(builder, weights, begin, 1))
        codes = load(builder, ir.VectorType(I8, min(n, half)), addr(builder, other, begin % half, 1))
        parts = [builder.and_(codes, fill(codes.type, 15)), builder.lshr(codes, fill(codes.type, 4))]
        yield low, _looked_up(builder, table, shuffle(builder, *parts, list(range(n))) if n > half
                              else parts[begin // half])


def _looked_up(builder: Any, table: Any, codes: Any) -> Any:
    """table[code] of each byte of a vector; `table` has 16 bytes."""
    n = codes.type.count
    names = {"x86_64": {64: "x86.avx512.pshuf.b.512", 32: "x86.avx2.pshuf.b", 16: "x86.ssse3.pshuf.b.128"},
             "AMD64": {64: "x86.avx512.pshuf.b.512", 32: "x86.avx2.pshuf.b"},
             "aarch64": {16: "aarch64.neon.tbl1.v16i8"}, "arm64": {16: "aarch64.neon.tbl1.v16i8"}}
    name = names.get(platform.machine(), {}).get(n)
    if name is not None and (n > 16 or "aarch64" in name or _FEATURES.get("ssse3")):
        of = ir.FunctionType(codes.type, [codes.type] * 2)
        f = cgutils.get_or_insert_function(builder.module, of, "llvm." + name)
        return builder.call(f, [shuffle(builder, table, table, [i % 16 for i in range(n)]), codes])
    found = fill(codes.type, 0)
    for code in range(16):
        one = shuffle(builder, table, table, [code] * n)
        found = builder.select(builder.icmp_unsigned("==", codes, fill(codes.type, code)), one, found)
    return found


def table_of(builder: Any, kind: Any, address: Any) -> Any:
    return load(builder, ir.VectorType(I8, 16), address) if kind == BF12 else None


def fma(builder: Any) -> Callable:
    f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOATS, [FLOATS] * 3), f"llvm.fma.v{WIDTH}f32")
    return lambda a, b, c: builder.call(f, [a, b, c])


def sum_of(builder: Any, vector: Any) -> Any:
    f = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(F32, [F32, FLOATS]), f"llvm.vector.reduce.fadd.v{WIDTH}f32")
    return builder.call(f, [fill(F32, 0.0), vector], fastmath=("reassoc",))


def shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))


def four_sums(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of four vectors, as a vector of four: transposed by halves, with an addition for each half."""
    ones = [i for lane in range(0, WIDTH, 4) for i in (lane, lane + WIDTH, lane + 1, lane + 1 + WIDTH)]
    twos = [i for lane in range(0, WIDTH, 4) for i in (lane, lane + 1, lane + WIDTH, lane + 1 + WIDTH)]

    def folded(u: Any, v: Any, order: list[int]) -> Any:
        return builder.fadd(shuffle(builder, u, v, order), shuffle(builder, u, v, [i + 2 for i in order]))

    total = folded(folded(a, b, ones), folded(c, d, ones), twos)                # of each four lanes: a b c d
    width = WIDTH
    while width > 4:
        width //= 2
        total = builder.fadd(shuffle(builder, total, total, list(range(width))),
                             shuffle(builder, total, total, list(range(width, 2 * width))))
    return total


def prefetch(builder: Any, near: int, address: Any) -> None:
    kinds = [I8.as_pointer(), I32, I32, I32]
    f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0")
    builder.call(f, [builder.inttoptr(address, kinds[0]), *(fill(I32, v) for v in (0, near, 1))])


def steps(builder: Any, n: Any, step: int) -> Any:
    return cgutils.for_range_slice(builder, ir.Constant(I64, 0), n, ir.Constant(I64, step), I64)
