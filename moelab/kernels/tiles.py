"""Products of a few tokens with a few weight rows in vector registers, for numba kernels; weights stay as they are.

Source: register blocking (Goto & van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008), with
sums along the vectors, so that nothing is packed. A weight is loaded once for all tokens of the tile and widened to
fp32. bf16 comes in pairs, so inputs lie in the order of `place`: of each 2·WIDTH the even ones first, then the odd
ones. A *kind* is a numba type that says how weights are stored: float32, uint16 for bf16, int16 for fp16, and uint8 for
the two bytes of `moelab.store.bits`, exponents at one address and `mantissa << 1 | sign` at another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


_FEATURES = llvm.get_host_cpu_features()
WIDTH = 16 if _FEATURES.get("avx512bw") else 8 if _FEATURES.get("avx2") else 4     # fp32 numbers in a vector register
STEP = 2 * WIDTH                # weights a step of the loops below
SIZES = {types.float32: 4, types.uint16: 2, types.int16: 2, types.uint8: 1}        # bytes of a weight at an address
PAIRED = (types.uint16, types.uint8)                                               # kinds widened two by two

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


def _all(kind: Any, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _joined(builder: Any, exponent: Any, rest: Any, words: Any) -> Any:
    """16-bit weights of their two bytes: one shift to put them together, one rotation."""
    rotated = builder.or_(builder.shl(builder.zext(exponent, words), _all(words, 8)), builder.zext(rest, words))
    return builder.or_(builder.lshr(rotated, _all(words, 1)), builder.shl(rotated, _all(words, 15)))


def _vectors(builder: Any, kind: Any, weights: Any, other: Any) -> list[Any]:
    """STEP weights at an address as two fp32 vectors."""
    if kind == types.float32:
        return [_load(builder, _FLOATS, _at(builder, weights, WIDTH * i, 4)) for i in range(2)]
    if kind == types.int16:
        halves = ir.VectorType(ir.HalfType(), WIDTH)
        return [builder.fpext(_load(builder, halves, _at(builder, weights, WIDTH * i, 2)), _FLOATS) for i in range(2)]
    if kind == types.uint16:
        words = _load(builder, _WORDS, weights)
    else:
        plane = ir.VectorType(_I8, STEP)
        bits = _joined(builder, _load(builder, plane, weights), _load(builder, plane, other), ir.VectorType(_I16, STEP))
        words = builder.bitcast(bits, _WORDS)
    return [builder.bitcast(builder.shl(words, _all(_WORDS, 16)), _FLOATS),
            builder.bitcast(builder.and_(words, _all(_WORDS, 0xFFFF0000)), _FLOATS)]


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


def _steps(builder: Any, n: Any) -> Any:
    return cgutils.for_range_slice(builder, ir.Constant(_I64, 0), n, ir.Constant(_I64, STEP), _I64)


@intrinsic(prefer_literal=True)
def dots(typing, tokens, rows, kind, x, w, other, stride, n, out, apart):
    """Write fp32 [tokens, rows] at `out`, tokens `apart` numbers apart: sums over n inputs, a multiple of STEP.

    x : where the addresses of the tokens' fp32 rows lie. w, other : address of the first row of weights, `stride`
    weights apart; `other` only of split bytes.
    """
    T, R, size = tokens.literal_value, rows.literal_value, SIZES[kind]

    def code(context, builder, signature, args):
        x, w, other, stride, n, out, apart = args[3:]
        inputs = [_load(builder, _I64, _at(builder, x, t, 8)) for t in range(T)]
        skip = [builder.mul(stride, ir.Constant(_I64, r)) for r in range(R)]
        matrix = [(_at(builder, w, s, size), _at(builder, other, s, 1)) for s in skip]
        sums = [[cgutils.alloca_once_value(builder, _all(_FLOATS, 0.0)) for _ in range(R)] for _ in range(T)]
        fma = _fma(builder)
        with _steps(builder, n) as (i, _):
            values = [_vectors(builder, types.float32, _at(builder, p, i, 4), None) for p in inputs]
            for r, (first, second) in enumerate(matrix):
                for half, weights in enumerate(_vectors(builder, kind, _at(builder, first, i, size),
                                                        _at(builder, second, i, 1))):
                    for t in range(T):
                        builder.store(fma(values[t][half], weights, builder.load(sums[t][r])), sums[t][r])
        for t in range(T):
            to = _at(builder, out, builder.mul(apart, ir.Constant(_I64, t)), 4)
            found = [builder.load(s) for s in sums[t]]
            if R == 4:
                _store(builder, _four_sums(builder, *found), to)
            else:
                for r in range(R):
                    _store(builder, _sum(builder, found[r]), _at(builder, to, r, 4))
        return context.get_dummy_value()

    return types.void(tokens, rows, kind, x, w, other, stride, n, out, apart), code


@intrinsic(prefer_literal=True)
def add_rows(typing, rows, kind, x, w, other, stride, n, sums):
    """Add to n fp32 sums, a multiple of STEP, rows of weights times one input each: the transposed layout.

    x : where the inputs lie, fp32 [rows]. Sums of bf16 and split bytes come in the order of `place`.
    """
    R, size = rows.literal_value, SIZES[kind]

    def code(context, builder, signature, args):
        x, w, other, stride, n, sums = args[2:]
        skip = [builder.mul(stride, ir.Constant(_I64, r)) for r in range(R)]
        matrix = [(_at(builder, w, s, size), _at(builder, other, s, 1)) for s in skip]
        inputs = []
        for r in range(R):
            one = builder.insert_element(_all(_FLOATS, 0.0), _load(builder, _F32, _at(builder, x, r, 4)), _all(_I32, 0))
            inputs.append(builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * WIDTH)))
        fma = _fma(builder)
        with _steps(builder, n) as (i, _):
            places = [_at(builder, _at(builder, sums, i, 4), WIDTH * half, 4) for half in range(2)]
            values = [_load(builder, _FLOATS, place) for place in places]
            for r, (first, second) in enumerate(matrix):
                pair = _vectors(builder, kind, _at(builder, first, i, size), _at(builder, second, i, 1))
                values = [fma(inputs[r], weights, value) for weights, value in zip(pair, values)]
            for value, place in zip(values, places):
                _store(builder, value, place)
        return context.get_dummy_value()

    return types.void(rows, kind, x, w, other, stride, n, sums), code


@intrinsic
def spread(typing, kind, order, x, n, out):
    """Write n numbers, a multiple of STEP, of a kind as fp32 in `place`'s order for weights of the kind `order`."""
    def code(context, builder, signature, args):
        x, n, out = args[2:]
        with _steps(builder, n) as (i, _):
            pair = _vectors(builder, kind, _at(builder, x, i, SIZES[kind]), None)
            if (kind in PAIRED) != (order in PAIRED):
                mixed = [i + half for i in range(WIDTH) for half in (0, WIDTH)]
                orders = (range(0, STEP, 2), range(1, STEP, 2)) if order in PAIRED else (mixed[:WIDTH], mixed[WIDTH:])
                pair = [_shuffle(builder, *pair, list(of)) for of in orders]
            for half, vector in enumerate(pair):
                _store(builder, vector, _at(builder, _at(builder, out, i, 4), WIDTH * half, 4))
        return context.get_dummy_value()

    return types.void(kind, order, x, n, out), code


@intrinsic
def weight(typing, kind, w, other, i):
    """The i-th weight at an address, as fp32."""
    def code(context, builder, signature, args):
        _, w, other, i = args
        place = _at(builder, w, i, SIZES[kind])
        if kind == types.float32:
            return _load(builder, _F32, place)
        if kind == types.int16:
            return builder.fpext(_load(builder, ir.HalfType(), place), _F32)
        bits = _load(builder, _I16, place) if kind == types.uint16 else \
            _joined(builder, _load(builder, _I8, place), _load(builder, _I8, _at(builder, other, i, 1)), _I16)
        return builder.bitcast(builder.shl(builder.zext(bits, _I32), _all(_I32, 16)), _F32)
    return types.float32(kind, w, other, i), code


@intrinsic
def place(typing, kind, i):
    """Where the i-th input lies among those that `dots` is given; i counts from a multiple of STEP."""
    def code(context, builder, signature, args):
        i = args[1]
        if kind not in PAIRED:
            return i
        inside, one = builder.and_(i, _all(_I64, STEP - 1)), _all(_I64, 1)
        odd = builder.mul(builder.and_(i, one), _all(_I64, WIDTH))
        return builder.add(builder.sub(i, inside), builder.add(odd, builder.lshr(inside, one)))
    return types.int64(kind, types.int64), code


@intrinsic
def size_of(typing, kind):
    """Bytes of a weight at an address."""
    return types.int64(kind), lambda context, builder, signature, args: _all(_I64, SIZES[kind])


@intrinsic(prefer_literal=True)
def prefetch(typing, near, address):
    """Prefetch a cache line, into the first level (near 3) or the second (2); any address is valid."""
    def code(context, builder, signature, args):
        kinds = [_I8.as_pointer(), _I32, _I32, _I32]
        f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0")
        options = (_all(_I32, v) for v in (0, near.literal_value, 1))
        builder.call(f, [builder.inttoptr(args[1], kinds[0]), *options])
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
def read(typing, address, i):
    """The i-th int64 at an address."""
    return types.int64(types.int64, types.int64), lambda context, builder, signature, args: _load(
        builder, _I64, _at(builder, args[0], args[1], 8))


@intrinsic
def write(typing, kind, address, i, value):
    """Set the i-th number of a kind (not split bytes) at an address to an fp32 value, rounded to the nearest."""
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
        _store(builder, value, _at(builder, address, i, SIZES[kind]))
        return context.get_dummy_value()
    return types.void(kind, types.int64, types.int64, types.float32), code
