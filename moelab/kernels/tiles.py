"""Products of a few tokens with a few weight rows in vector registers, for numba kernels; weights stay as they are.

Source: register blocking (Goto & van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008), with
sums along the vectors, so that nothing is packed. A weight is loaded once for all tokens of the tile and widened to
fp32; the inputs lie in the order in which a kind's weights come out (`place`). A *kind* is a numba type that says how
weights are stored: float32, uint16 for bf16, int16 for fp16, int8 for bf12 (`moelab.store.bf12`): low bytes of bf16 at
one address, at another 4 bits a weight that stand for the high byte, by a table of 16. Two masks, a shift, a table
look-up and an unpack make bf16 pairs of 64 such weights, of which 96 bytes are read instead of 128. The other packed
kinds are the formats of `moelab.store.fewbit`: codes at one address, scales at another, each code widened and
multiplied by its scale, four-bit ones by a look-up of each of the four in a 16-bit word.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


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

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, WIDTH), ir.VectorType(_I32, WIDTH)


def _at(builder: Any, address: Any, count: Any, size: int) -> Any:
    """The address `count` things of `size` bytes further on."""
    count = ir.Constant(_I64, count) if isinstance(count, int) else count
    return builder.add(address, builder.mul(count, ir.Constant(_I64, size)))


def _load(builder: Any, kind: ir.Type, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _element(builder: Any, kind: ir.Type, address: Any, i: Any) -> Any:
    """A pointer to the i-th number at an address, of which LLVM knows that the next one lies beside it: for vectors."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [i])


def _all(kind: Any, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _step(kind: Any) -> int:
    """Weights that are widened at a time: kinds of 16 bits in pairs, packed ones in blocks."""
    return BLOCK if SIZES[kind][1] else STEP


def _order(kind: Any) -> list[int]:
    """In which order the weights of a step come out of `_vectors`."""
    if kind == types.uint16:
        return [*range(0, STEP, 2), *range(1, STEP, 2)]
    if kind in (INT4, MXFP4):
        return [begin + 4 * lane + k for begin in range(0, BLOCK, 4 * WIDTH) for k in range(4) for lane in range(WIDTH)]
    if kind != BF12:
        return list(range(_step(kind)))
    return [begin + 16 * lane + 8 * half + 2 * pair + odd for begin in range(0, BLOCK, 4 * WIDTH) for half in range(2)
            for odd in range(2) for lane in range(WIDTH // 4) for pair in range(4)]


def _skip(builder: Any, kind: Any, address: Any, count: Any, which: int = 0) -> Any:
    """The address `count` weights of a kind further on: where they begin, or of what else belongs to them."""
    size = SIZES[kind][which]
    if kind == FP8 and which:                           # a scale for 128 weights, of which this may be the second half
        return builder.add(address, builder.shl(builder.lshr(count, ir.Constant(_I64, 7)), ir.Constant(_I64, 2)))
    if size % BLOCK == 0:
        return _at(builder, address, count, size // BLOCK)
    return builder.add(address, builder.lshr(builder.mul(count, ir.Constant(_I64, size)), ir.Constant(_I64, 6)))


def _vectors(builder: Any, kind: ir.Type, weights: Any, other: Any = None, table: Any = None) -> list[Any]:
    """The weights of a step as fp32 vectors, in `_order`."""
    if kind == types.float32:
        return [_load(builder, _FLOATS, _at(builder, weights, WIDTH * i, 4)) for i in range(2)]
    if kind == types.int16:
        halves = ir.VectorType(ir.HalfType(), WIDTH)
        return [builder.fpext(_load(builder, halves, _at(builder, weights, WIDTH * i, 2)), _FLOATS) for i in range(2)]
    if kind == types.uint16:
        return _widened(builder, _load(builder, _WORDS, weights))
    found = []
    for low, high in _halves(builder, weights, other, table):
        n = low.type.count
        for half in range(2):                           # within 16 bytes, as processors unpack
            order = [16 * lane + 8 * half + i + n * byte
                     for lane in range(n // 16) for i in range(8) for byte in (0, 1)]
            found += _widened(builder, builder.bitcast(_shuffle(builder, low, high, order), _WORDS))
    return found


def _groups(builder: Any, kind: Any, weights: Any, other: Any, table: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The weights of a step in `_order`: a vector of scales, or None, and the vectors that it multiplies."""
    if kind not in FEW:
        yield None, _vectors(builder, kind, weights, other, table)
        return
    size = BLOCK if kind == FP8 else GROUP if kind == INT8 else 4 * WIDTH           # weights of one yield
    for begin in range(0, BLOCK, size):
        if kind in (INT4, MXFP4):                       # four codes a word, one from each word at a time
            four = _load(builder, ir.VectorType(_I16, WIDTH), _at(builder, weights, begin // 2, 1))
            four = builder.zext(four, _WORDS)
            found = [_decoded(builder, kind, builder.lshr(four, _all(_WORDS, 4 * k))) for k in range(4)]
        elif kind == INT8:
            bytes_ = ir.VectorType(_I8, WIDTH)
            found = [builder.sitofp(builder.sext(_load(builder, bytes_, _at(builder, weights, at, 1)), _WORDS), _FLOATS)
                     for at in range(begin, begin + size, WIDTH)]
        else:
            found = [vector for at in range(0, BLOCK, STEP)
                     for vector in _from_e4m3(builder, _load(builder, ir.VectorType(_I8, STEP),
                                                             _at(builder, weights, at, 1)))]
        yield _scales(builder, kind, other, [(begin + lane * size // WIDTH) // GROUP for lane in range(WIDTH)]), found


def _scales(builder: Any, kind: Any, address: Any, groups: list[int]) -> Any:
    """A vector of the scales of the given groups of a block, of FP8 with the factor of `_from_e4m3`."""
    if kind == FP8:
        return builder.fmul(_everywhere(builder, _load(builder, _F32, address)), _all(_FLOATS, 256.0))
    # both lie in one word: each lane moves its own to where fp32 has those bits
    both = builder.zext(_load(builder, _I16, address), _I32) if kind == MXFP4 else _load(builder, _I32, address)
    left = [23 - 8 * group if kind == MXFP4 else 16 - 16 * group for group in groups]
    bits = builder.shl(_everywhere(builder, both), ir.Constant(_WORDS, left))
    return builder.bitcast(builder.and_(bits, _all(_WORDS, 0x7F800000 if kind == MXFP4 else 0xFFFF0000)), _FLOATS)


def _decoded(builder: Any, kind: Any, words: Any) -> Any:
    """The values of codes in the low four bits of words, as fp32."""
    values, factor = (_DOUBLED, 0.5) if kind == MXFP4 else (range(-8, 8), 1.0)
    if WIDTH == 16:                                     # a look-up that ignores the other bits
        f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS, _WORDS]),
                                           "llvm.x86.avx512.permvar.sf.512")
        return builder.call(f, [ir.Constant(_FLOATS, [factor * value for value in values]), words])
    codes, of = builder.and_(words, _all(_WORDS, 15)), ir.VectorType(_I8, 16)
    found = _looked_up(builder, ir.Constant(of, list(values)), builder.bitcast(codes, ir.VectorType(_I8, 4 * WIDTH)))
    found = builder.shl(builder.bitcast(found, _WORDS), _all(_WORDS, 24))           # of each word the lowest byte
    return builder.fmul(builder.sitofp(builder.ashr(found, _all(_WORDS, 24)), _FLOATS), _all(_FLOATS, factor))


def _from_e4m3(builder: Any, codes: Any) -> list[Any]:
    """`STEP` codes as fp32: 1/256 of their values, which they are as half precision, whose exponents are 8 more."""
    of = ir.VectorType(_I16, STEP)
    half = builder.and_(builder.shl(builder.sext(codes, of), _all(of, 7)), _all(of, 0xBFFF))
    nan = builder.icmp_unsigned("==", builder.and_(half, _all(of, 0x3F80)), _all(of, 0x3F80))
    half = builder.bitcast(builder.select(nan, _all(of, 0x7E00), half), ir.VectorType(ir.HalfType(), STEP))
    return [builder.fpext(_shuffle(builder, half, half, list(range(at, at + WIDTH))), _FLOATS) for at in (0, WIDTH)]


def _everywhere(builder: Any, number: Any) -> Any:
    """A vector of one number of 32 bits."""
    one = builder.insert_element(ir.Constant(ir.VectorType(number.type, WIDTH), ir.Undefined), number, _all(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * WIDTH))


def _widened(builder: Any, words: Any) -> list[Any]:
    """Pairs of bf16 as fp32: the even ones, the odd ones."""
    return [builder.bitcast(builder.shl(words, _all(_WORDS, 16)), _FLOATS),
            builder.bitcast(builder.and_(words, _all(_WORDS, 0xFFFF0000)), _FLOATS)]


def _halves(builder: Any, weights: Any, other: Any, table: Any) -> Iterator[tuple[Any, Any]]:
    """The low and the high bytes of a block of bf12 weights, one vector register after the other."""
    n, half = 4 * WIDTH, BLOCK // 2
    for begin in range(0, BLOCK, n):
        low = _load(builder, ir.VectorType(_I8, n), _at(builder, weights, begin, 1))
        codes = _load(builder, ir.VectorType(_I8, min(n, half)), _at(builder, other, begin % half, 1))
        parts = [builder.and_(codes, _all(codes.type, 15)), builder.lshr(codes, _all(codes.type, 4))]
        yield low, _looked_up(builder, table, _shuffle(builder, *parts, list(range(n))) if n > half
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
        return builder.call(f, [_shuffle(builder, table, table, [i % 16 for i in range(n)]), codes])
    found = _all(codes.type, 0)
    for code in range(16):
        one = _shuffle(builder, table, table, [code] * n)
        found = builder.select(builder.icmp_unsigned("==", codes, _all(codes.type, code)), one, found)
    return found


def _table(builder: Any, kind: Any, address: Any) -> Any:
    return _load(builder, ir.VectorType(_I8, 16), address) if kind == BF12 else None


def _fma(builder: Any) -> Callable:
    f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{WIDTH}f32")
    return lambda a, b, c: builder.call(f, [a, b, c])


def _sum(builder: Any, vector: Any) -> Any:
    f = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_F32, [_F32, _FLOATS]), f"llvm.vector.reduce.fadd.v{WIDTH}f32")
    return builder.call(f, [_all(_F32, 0.0), vector], fastmath=("reassoc",))


def _shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(order)), order))


def _four_sums(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of four vectors, as a vector of four: transposed by halves, with an addition for each half."""
    ones = [i for lane in range(0, WIDTH, 4) for i in (lane, lane + WIDTH, lane + 1, lane + 1 + WIDTH)]
    twos = [i for lane in range(0, WIDTH, 4) for i in (lane, lane + 1, lane + WIDTH, lane + 1 + WIDTH)]

    def folded(u: Any, v: Any, order: list[int]) -> Any:
        return builder.fadd(_shuffle(builder, u, v, order), _shuffle(builder, u, v, [i + 2 for i in order]))

    total = folded(folded(a, b, ones), folded(c, d, ones), twos)                # of each four lanes: a b c d
    width = WIDTH
    while width > 4:
        width //= 2
        total = builder.fadd(_shuffle(builder, total, total, list(range(width))),
                             _shuffle(builder, total, total, list(range(width, 2 * width))))
    return total


def _prefetch(builder: Any, near: int, address: Any) -> None:
    kinds = [_I8.as_pointer(), _I32, _I32, _I32]
    f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0")
    builder.call(f, [builder.inttoptr(address, kinds[0]), *(_all(_I32, v) for v in (0, near, 1))])


def _steps(builder: Any, n: Any, step: int) -> Any:
    return cgutils.for_range_slice(builder, ir.Constant(_I64, 0), n, ir.Constant(_I64, step), _I64)


@intrinsic(prefer_literal=True)
def dots(typing, tokens, rows, kind, x, w, other, table, stride, n, out, apart, ahead):
    """Write fp32 [tokens, rows] at `out`, tokens `apart` numbers apart: sums over n inputs, a multiple of `step`.

    x : where the addresses of the tokens' fp32 rows lie. w, other, table : addresses of the first row of weights,
    `stride` weights apart; the last two only of packed kinds. What lies `ahead` bytes behind a weight is prefetched
    with it: asked for in bursts, memory and arithmetic would wait for each other.
    """
    T, R = tokens.literal_value, rows.literal_value

    def code(context, builder, signature, args):
        x, w, other, table, stride, n, out, apart, ahead = args[3:]
        inputs, table = [_load(builder, _I64, _at(builder, x, t, 8)) for t in range(T)], _table(builder, kind, table)
        skip = [builder.mul(stride, ir.Constant(_I64, r)) for r in range(R)]
        matrix = [(_skip(builder, kind, w, s), other if kind == FP8 else _skip(builder, kind, other, s, 1))
                  for s in skip]                        # rows of a tile are rows of a block
        chains = 4 if T * R == 1 else 1                 # one sum of a row would wait for itself
        sums = [[[cgutils.alloca_once_value(builder, _all(_FLOATS, 0.0)) for _ in range(chains)] for _ in range(R)]
                for _ in range(T)]
        fma, step, (size, rest), near = _fma(builder), _step(kind), SIZES[kind], 3 if R == 1 else 2
        with _steps(builder, n, step) as (i, _):
            values = [[_load(builder, _FLOATS, _at(builder, _at(builder, p, i, 4), at, 4))
                       for at in range(0, step, WIDTH)] for p in inputs]
            for r, (first, second) in enumerate(matrix):
                part, here, beside = 0, _skip(builder, kind, first, i), _skip(builder, kind, second, i, 1)
                for line in range(0, size * step // BLOCK, 64):
                    _prefetch(builder, near, _at(builder, builder.add(here, ahead), line, 1))
                if rest:
                    _prefetch(builder, near, builder.add(beside, builder.udiv(ahead, _all(_I64, size // rest))))
                for number, (scales, vectors) in enumerate(_groups(builder, kind, here, beside, table)):
                    for t in range(T):
                        terms = list(zip(values[t][part:], vectors))
                        if scales is not None:
                            terms = [(reduce(lambda sum_, term: fma(*term, sum_), terms[1:], builder.fmul(*terms[0])),
                                      scales)]
                        for at, term in enumerate(terms, number):
                            total = sums[t][r][at % chains]
                            builder.store(fma(*term, builder.load(total)), total)
                    part += len(vectors)
        for t in range(T):
            to = _at(builder, out, builder.mul(apart, ir.Constant(_I64, t)), 4)
            found = [reduce(builder.fadd, map(builder.load, chain)) for chain in sums[t]]
            if R == 4:
                _store(builder, _four_sums(builder, *found), to)
            else:
                for r in range(R):
                    _store(builder, _sum(builder, found[r]), _at(builder, to, r, 4))
        return context.get_dummy_value()

    return types.void(tokens, rows, kind, x, w, other, table, stride, n, out, apart, ahead), code


@intrinsic(prefer_literal=True)
def add_rows(typing, rows, kind, x, w, other, table, stride, n, sums):
    """Add to n fp32 sums, a multiple of `step`, rows of weights times one input each: the transposed layout.

    x : where the inputs lie, fp32 [rows]. Sums come in the order of `place`.
    """
    R = rows.literal_value

    def code(context, builder, signature, args):
        x, w, other, table, stride, n, sums = args[2:]
        skip, table = [builder.mul(stride, ir.Constant(_I64, r)) for r in range(R)], _table(builder, kind, table)
        matrix = [(_skip(builder, kind, w, s), _skip(builder, kind, other, s, 1)) for s in skip]
        inputs = []
        for r in range(R):
            inputs.append(_everywhere(builder, _load(builder, _F32, _at(builder, x, r, 4))))
        fma, step = _fma(builder), _step(kind)
        with _steps(builder, n, step) as (i, _):
            places = [_at(builder, _at(builder, sums, i, 4), at, 4) for at in range(0, step, WIDTH)]
            values = [_load(builder, _FLOATS, place) for place in places]
            for r, (first, second) in enumerate(matrix):
                parts = _vectors(builder, kind, _skip(builder, kind, first, i), _skip(builder, kind, second, i, 1),
                                 table)
                values = [fma(inputs[r], weights, value) for weights, value in zip(parts, values)]
            for value, place in zip(values, places):
                _store(builder, value, place)
        return context.get_dummy_value()

    return types.void(rows, kind, x, w, other, table, stride, n, sums), code


@intrinsic
def spread(typing, kind, order, x, n, out):
    """Write n numbers, a multiple of `step(order)`, of a plain kind as fp32 in the order of weights of `order`."""
    def code(context, builder, signature, args):
        x, n, out = args[2:]
        size, given, wanted = _step(order), _order(kind), _order(order)
        with _steps(builder, n, size) as (i, _):
            parts, where = [], {}
            for begin in range(0, size, STEP):
                where |= {begin + number: begin + at for at, number in enumerate(given)}
                parts += _vectors(builder, kind, _skip(builder, kind, x, builder.add(i, ir.Constant(_I64, begin))))
            if wanted != [begin + number for begin in range(0, size, STEP) for number in given]:
                while len(parts) > 1:                   # all of the step in one vector, for the shuffles
                    parts = [_shuffle(builder, a, b, list(range(2 * a.type.count)))
                             for a, b in zip(parts[::2], parts[1::2])]
                order_of = [wanted[at:at + WIDTH] for at in range(0, size, WIDTH)]
                parts = [_shuffle(builder, parts[0], parts[0], [where[number] for number in one]) for one in order_of]
            for at, vector in enumerate(parts):
                _store(builder, vector, _at(builder, _at(builder, out, i, 4), WIDTH * at, 4))
        return context.get_dummy_value()

    return types.void(kind, order, x, n, out), code


@intrinsic
def join(typing, w, other, table, n, out):
    """Write n weights of bf12, a multiple of `BLOCK`, as bf16 at `out`."""
    def code(context, builder, signature, args):
        w, other, table, n, out = args
        table = _table(builder, BF12, table)
        with _steps(builder, n, BLOCK) as (i, _):
            at = _at(builder, out, i, 2)
            for low, high in _halves(builder, _skip(builder, BF12, w, i), _skip(builder, BF12, other, i, 1), table):
                count = low.type.count
                order = [number + count * byte for number in range(count) for byte in (0, 1)]
                _store(builder, _shuffle(builder, low, high, order), at)
                at = _at(builder, at, count, 2)
        return context.get_dummy_value()

    return types.void(w, other, table, n, out), code


@intrinsic
def weight(typing, kind, w, i):
    """The i-th weight at an address, as fp32; a packed matrix has biases of bf16."""
    def code(context, builder, signature, args):
        as_stored = {types.float32: _F32, types.int16: ir.HalfType()}.get(kind, _I16)
        found = builder.load(_element(builder, as_stored, *args[1:]), align=1)
        if kind == types.float32:
            return found
        if kind == types.int16:
            return builder.fpext(found, _F32)
        return builder.bitcast(builder.shl(builder.zext(found, _I32), _all(_I32, 16)), _F32)
    return types.float32(kind, w, i), code


@intrinsic
def place(typing, kind, i):
    """Where the i-th input lies among those that `dots` is given; i counts from a multiple of `step`."""
    def code(context, builder, signature, args):
        i, step, order = args[1], _step(kind), _order(kind)
        if order == list(range(step)):
            return i
        values = ir.ArrayType(_I64, step)([ir.Constant(_I64, order.index(number)) for number in range(step)])
        known = cgutils.global_constant(builder, f"moelab_place_{step}_{kind}", values)
        inside = builder.and_(i, _all(_I64, step - 1))
        return builder.add(builder.sub(i, inside), builder.load(builder.gep(known, [_all(_I32, 0), inside])))
    return types.int64(kind, types.int64), code


@intrinsic
def step(typing, kind):
    """Weights of a kind that the loops above take at a time."""
    return types.int64(kind), lambda context, builder, signature, args: _all(_I64, _step(kind))


@intrinsic
def span(typing, kind, count):
    """Bytes of so many weights at their first address."""
    return types.int64(kind, types.int64), lambda context, builder, signature, args: _skip(
        builder, kind, _all(_I64, 0), args[1])


@intrinsic
def beside(typing, kind, row, n):
    """Bytes before a row of n weights at their other address."""
    def code(context, builder, signature, args):
        _, row, n = args
        if kind != FP8:
            return _skip(builder, kind, _all(_I64, 0), builder.mul(row, n), 1)
        blocks = builder.lshr(builder.add(n, _all(_I64, 127)), _all(_I64, 7))
        return builder.mul(builder.mul(builder.lshr(row, _all(_I64, 7)), blocks), _all(_I64, 4))
    return types.int64(kind, types.int64, types.int64), code


@intrinsic(prefer_literal=True)
def prefetch(typing, near, address):
    """Prefetch a cache line, into the first level (near 3) or the second (2); any address is valid."""
    def code(context, builder, signature, args):
        _prefetch(builder, near.literal_value, args[1])
        return context.get_dummy_value()
    return types.void(near, types.int64), code


@intrinsic
def take(typing, counter):
    """Add one to the int64 at an address, atomically; returns what it was before."""
    def code(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), _all(_I64, 1), "monotonic")
    return types.int64(types.int64), code


@intrinsic
def kept(typing, array):
    """A use of an array: numba frees its memory after the last one, even if its address is still used."""
    return types.void(array), lambda context, builder, signature, args: context.get_dummy_value()


@intrinsic
def together(typing, team, function, threads, job):
    """Call the C function at an address with that of the array `job` in so many threads, by OpenMP's GOMP_parallel at
    the address `team`; once, in this thread, where that is 0 or threads 1."""
    def code(context, builder, signature, args):
        team, function, threads, job = args
        body = ir.FunctionType(ir.VoidType(), [_I64]).as_pointer()
        run = ir.FunctionType(ir.VoidType(), [body, _I64, _I32, _I32]).as_pointer()
        function = builder.inttoptr(function, body)
        address = builder.ptrtoint(context.make_array(signature.args[3])(context, builder, job).data, _I64)
        several = builder.and_(builder.icmp_unsigned("!=", team, _all(_I64, 0)),
                               builder.icmp_signed(">", threads, _all(_I64, 1)))
        with builder.if_else(several) as (then, otherwise):
            with then:
                builder.call(builder.inttoptr(team, run),
                             [function, address, builder.trunc(threads, _I32), _all(_I32, 0)])
            with otherwise:
                builder.call(function, [address])
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, types.int64, job), code


@intrinsic
def exponential(typing, x):
    """e^x of an fp32 number, to one unit in the last place, in steps of which loops make vectors; subnormals are 0.

    Source: Cephes, expf: x = n ln 2 + r with |r| ≤ ln 2 / 2, a polynomial for e^r, n added to its exponent.
    """
    def code(context, builder, signature, args):
        def f(name, *args):
            of = ir.FunctionType(_F32, [_F32] * len(args))
            return builder.call(cgutils.get_or_insert_function(builder.module, of, f"llvm.{name}.f32"), args)

        def number(value):
            return _all(_F32, float(np.float32(value)))
        x, = args
        bound = f("minnum", f("maxnum", x, number(-88.0)), number(89.0))
        n = f("rint", builder.fmul(bound, number(1.44269504)))
        r = f("fma", n, number(2.12194440e-4), f("fma", n, number(-0.693359375), bound))
        total = number(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
            total = f("fma", total, r, number(factor))
        bits = builder.shl(builder.add(builder.fptosi(n, _I32), _all(_I32, 127)), _all(_I32, 23))
        return builder.select(builder.fcmp_unordered("uno", x, x), x, builder.fmul(total, builder.bitcast(bits, _F32)))
    return types.float32(types.float32), code


@intrinsic
def read(typing, address, i):
    """The i-th int64 at an address."""
    return types.int64(types.int64, types.int64), lambda context, builder, signature, args: _load(
        builder, _I64, _at(builder, args[0], args[1], 8))


@intrinsic
def number(typing, address, i):
    """The i-th uint32 at an address."""
    return types.int64(types.int64, types.int64), lambda context, builder, signature, args: builder.zext(_load(
        builder, _I32, _at(builder, args[0], args[1], 4)), _I64)


@intrinsic
def write(typing, kind, address, i, value):
    """Set the i-th number of a plain kind at an address to an fp32 value, rounded to the nearest."""
    def code(context, builder, signature, args):
        _, address, i, value = args
        if kind == types.int16:
            value = builder.fptrunc(value, ir.HalfType())
        elif kind == types.uint16:
            bits = builder.bitcast(value, _I32)
            odd = builder.and_(builder.lshr(bits, _all(_I32, 16)), _all(_I32, 1))
            rounded = builder.add(bits, builder.add(odd, _all(_I32, 0x7FFF)))        # ties to even
            nan = builder.fcmp_unordered("uno", value, value)
            bits = builder.select(nan, _all(_I32, 0x7FC00000), rounded)
            value = builder.trunc(builder.lshr(bits, _all(_I32, 16)), _I16)
        builder.store(value, _element(builder, value.type, address, i), align=1)
        return context.get_dummy_value()
    return types.void(kind, types.int64, types.int64, types.float32), code
