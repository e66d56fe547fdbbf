"""Products of a few tokens with a few weight rows in vector registers, for numba kernels; weights stay as they are.

Source: register blocking (Goto & van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008), with
sums along the vectors, so that nothing is packed. A weight is loaded once for all tokens of the tile and widened to
fp32 (`moelab.kernels.vectors`, which says what a kind of weights is); the inputs lie in the order in which a kind's
weights come out (`place`).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moelab.kernels import vectors as v
from moelab.kernels.vectors import BF12, BLOCK, FP8, SIZES, STEP, WIDTH


def in_turn(tokens: Any, kind: Any) -> bool:
    """Whether `dots` reads the rows of a tile one after the other; what takes less than a byte computes too much."""
    return tokens.literal_value <= 2 and SIZES[kind][0] >= BLOCK


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
        inputs = [v.load(builder, v.I64, v.addr(builder, x, t, 8)) for t in range(T)]
        table = v.table_of(builder, kind, table)
        skip = [builder.mul(stride, ir.Constant(v.I64, r)) for r in range(R)]
        matrix = [(v.skip(builder, kind, w, s), other if kind == FP8 else v.skip(builder, kind, other, s, 1))
                  for s in skip]                        # rows of a tile are rows of a block
        # Rows in turn where memory limits: read from front to back, and what adds up a vector is shared by the tile.
        turns = [[r] for r in range(R)] if in_turn(tokens, kind) else [list(range(R))]
        chains = 4 if T * len(turns[0]) == 1 else 1     # one sum of a row would wait for itself
        sums = [[[cgutils.alloca_once_value(builder, v.fill(v.FLOATS, 0.0)) for _ in range(chains)] for _ in range(R)]
                for _ in range(T)]
        fma, step, (size, rest), near = v.fma(builder), v.step_of(kind), SIZES[kind], 3 if len(turns[0]) == 1 else 2
        for turn in turns:
            with v.steps(builder, n, step) as (i, _):
                values = [[v.load(builder, v.FLOATS, v.addr(builder, v.addr(builder, p, i, 4), at, 4))
                           for at in range(0, step, WIDTH)] for p in inputs]
                for r in turn:
                    first, second = matrix[r]
                    part, here, beside = 0, v.skip(builder, kind, first, i), v.skip(builder, kind, second, i, 1)
                    for line in range(0, size * step // BLOCK, 64):
                        v.prefetch(builder, near, v.addr(builder, builder.add(here, ahead), line, 1))
                    if rest:
                        v.prefetch(builder, near, builder.add(beside, builder.udiv(ahead, v.fill(v.I64, size // rest))))
                    for number, (scales, vectors) in enumerate(v.groups(builder, kind, here, beside, table)):
                        for t in range(T):
                            terms = list(zip(values[t][part:], vectors))
                            if scales is not None:
                                terms = [(reduce(lambda sum_, term: fma(*term, sum_), terms[1:],
                                                 builder.fmul(*terms[0])), scales)]
                            for at, term in enumerate(terms, number):
                                total = sums[t][r][at % chains]
                                builder.store(fma(*term, builder.load(total)), total)
                        part += len(vectors)
        for t in range(T):
            to = v.addr(builder, out, builder.mul(apart, ir.Constant(v.I64, t)), 4)
            found = [reduce(builder.fadd, map(builder.load, chain)) for chain in sums[t]]
            if R == 4:
                v.store(builder, v.four_sums(builder, *found), to)
            else:
                for r in range(R):
                    v.store(builder, v.sum_of(builder, found[r]), v.addr(builder, to, r, 4))
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
        skip, table = [builder.mul(stride, ir.Constant(v.I64, r)) for r in range(R)], v.table_of(builder, kind, table)
        matrix = [(v.skip(builder, kind, w, s), v.skip(builder, kind, other, s, 1)) for s in skip]
        inputs = []
        for r in range(R):
            inputs.append(v.everywhere(builder, v.load(builder, v.F32, v.addr(builder, x, r, 4))))
        fma, step = v.fma(builder), v.step_of(kind)
        with v.steps(builder, n, step) as (i, _):
            places = [v.addr(builder, v.addr(builder, sums, i, 4), at, 4) for at in range(0, step, WIDTH)]
            values = [v.load(builder, v.FLOATS, place) for place in places]
            for r, (first, second) in enumerate(matrix):
                parts = v.vectors(builder, kind, v.skip(builder, kind, first, i), v.skip(builder, kind, second, i, 1),
                                 table)
                values = [fma(inputs[r], weights, value) for weights, value in zip(parts, values)]
            for value, place in zip(values, places):
                v.store(builder, value, place)
        return context.get_dummy_value()

    return types.void(rows, kind, x, w, other, table, stride, n, sums), code


@intrinsic
def spread(typing, kind, order, x, n, out):
    """Write n numbers, a multiple of `step(order)`, of a plain kind as fp32 in the order of weights of `order`."""
    def code(context, builder, signature, args):
        x, n, out = args[2:]
        size, given, wanted = v.step_of(order), v.order_of(kind), v.order_of(order)
        with v.steps(builder, n, size) as (i, _):
            parts, where = [], {}
            for begin in range(0, size, STEP):
                where |= {begin + number: begin + at for at, number in enumerate(given)}
                parts += v.vectors(builder, kind, v.skip(builder, kind, x, builder.add(i, ir.Constant(v.I64, begin))))
            if wanted != [begin + number for begin in range(0, size, STEP) for number in given]:
                while len(parts) > 1:                   # all of the step in one vector, for the shuffles
                    parts = [v.shuffle(builder, a, b, list(range(2 * a.type.count)))
                             for a, b in zip(parts[::2], parts[1::2])]
                order_of = [wanted[at:at + WIDTH] for at in range(0, size, WIDTH)]
                parts = [v.shuffle(builder, parts[0], parts[0], [where[number] for number in one]) for one in order_of]
            for at, vector in enumerate(parts):
                v.store(builder, vector, v.addr(builder, v.addr(builder, out, i, 4), WIDTH * at, 4))
        return context.get_dummy_value()

    return types.void(kind, order, x, n, out), code


@intrinsic
def join(typing, w, other, table, n, out):
    """Write n weights of bf12, a multiple of `BLOCK`, as bf16 at `out`."""
    def code(context, builder, signature, args):
        w, other, table, n, out = args
        table = v.table_of(builder, BF12, table)
        with v.steps(builder, n, BLOCK) as (i, _):
            at = v.addr(builder, out, i, 2)
            for low, high in v.halves(builder, v.skip(builder, BF12, w, i), v.skip(builder, BF12, other, i, 1), table):
                count = low.type.count
                order = [number + count * byte for number in range(count) for byte in (0, 1)]
                v.store(builder, v.shuffle(builder, low, high, order), at)
                at = v.addr(builder, at, count, 2)
        return context.get_dummy_value()

    return types.void(w, other, table, n, out), code


@intrinsic
def weight(typing, kind, w, i):
    """The i-th weight at an address, as fp32; a packed matrix has biases of bf16."""
    def code(context, builder, signature, args):
        as_stored = {types.float32: v.F32, types.int16: ir.HalfType()}.get(kind, v.I16)
        found = builder.load(v.element(builder, as_stored, *args[1:]), align=1)
        if kind == types.float32:
            return found
        if kind == types.int16:
            return builder.fpext(found, v.F32)
        return builder.bitcast(builder.shl(builder.zext(found, v.I32), v.fill(v.I32, 16)), v.F32)
    return types.float32(kind, w, i), code


@intrinsic
def place(typing, kind, i):
    """Where the i-th input lies among those that `dots` is given; i counts from a multiple of `step`."""
    def code(context, builder, signature, args):
        i, step, order = args[1], v.step_of(kind), v.order_of(kind)
        if order == list(range(step)):
            return i
        values = ir.ArrayType(v.I64, step)([ir.Constant(v.I64, order.index(number)) for number in range(step)])
        known = cgutils.global_constant(builder, f"moelab_place_{step}_{kind}", values)
        inside = builder.and_(i, v.fill(v.I64, step - 1))
        return builder.add(builder.sub(i, inside), builder.load(builder.gep(known, [v.fill(v.I32, 0), inside])))
    return types.int64(kind, types.int64), code


@intrinsic
def step(typing, kind):
    """Weights of a kind that the loops above take at a time."""
    return types.int64(kind), lambda context, builder, signature, args: v.fill(v.I64, v.step_of(kind))


@intrinsic
def span(typing, kind, count):
    """Bytes of so many weights at their first address."""
    return types.int64(kind, types.int64), lambda context, builder, signature, args: v.skip(
        builder, kind, v.fill(v.I64, 0), args[1])


@intrinsic
def beside(typing, kind, row, n):
    """Bytes before a row of n weights at their other address."""
    def code(context, builder, signature, args):
        _, row, n = args
        if kind != FP8:
            return v.skip(builder, kind, v.fill(v.I64, 0), builder.mul(row, n), 1)
        blocks = builder.lshr(builder.add(n, v.fill(v.I64, 127)), v.fill(v.I64, 7))
        return builder.mul(builder.mul(builder.lshr(row, v.fill(v.I64, 7)), blocks), v.fill(v.I64, 4))
    return types.int64(kind, types.int64, types.int64), code


@intrinsic(prefer_literal=True)
def prefetch(typing, near, address):
    """Prefetch a cache line, into the first level (near 3) or the second (2); any address is valid."""
    def code(context, builder, signature, args):
        v.prefetch(builder, near.literal_value, args[1])
        return context.get_dummy_value()
    return types.void(near, types.int64), code


@intrinsic
def take(typing, counter):
    """Add one to the int64 at an address, atomically; returns what it was before."""
    def code(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], v.I64.as_pointer()), v.fill(v.I64, 1), "monotonic")
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
        body = ir.FunctionType(ir.VoidType(), [v.I64]).as_pointer()
        run = ir.FunctionType(ir.VoidType(), [body, v.I64, v.I32, v.I32]).as_pointer()
        function = builder.inttoptr(function, body)
        address = builder.ptrtoint(context.make_array(signature.args[3])(context, builder, job).data, v.I64)
        several = builder.and_(builder.icmp_unsigned("!=", team, v.fill(v.I64, 0)),
                               builder.icmp_signed(">", threads, v.fill(v.I64, 1)))
        with builder.if_else(several) as (then, otherwise):
            with then:
                builder.call(builder.inttoptr(team, run),
                             [function, address, builder.trunc(threads, v.I32), v.fill(v.I32, 0)])
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
            of = ir.FunctionType(v.F32, [v.F32] * len(args))
            return builder.call(cgutils.get_or_insert_function(builder.module, of, f"llvm.{name}.f32"), args)

        def number(value):
            return v.fill(v.F32, float(np.float32(value)))
        x, = args
        bound = f("minnum", f("maxnum", x, number(-88.0)), number(89.0))
        n = f("rint", builder.fmul(bound, number(1.44269504)))
        r = f("fma", n, number(2.12194440e-4), f("fma", n, number(-0.693359375), bound))
        total = number(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
            total = f("fma", total, r, number(factor))
        bits = builder.shl(builder.add(builder.fptosi(n, v.I32), v.fill(v.I32, 127)), v.fill(v.I32, 23))
        return builder.select(builder.fcmp_unordered("uno", x, x), x, builder.fmul(total, builder.bitcast(bits, v.F32)))
    return types.float32(types.float32), code


@intrinsic
def read(typing, address, i):
    """The i-th int64 at an address."""
    return types.int64(types.int64, types.int64), lambda context, builder, signature, args: v.load(
        builder, v.I64, v.addr(builder, args[0], args[1], 8))


@intrinsic
def number(typing, address, i):
    """The i-th uint32 at an address."""
    return types.int64(types.int64, types.int64), lambda context, builder, signature, args: builder.zext(v.load(
        builder, v.I32, v.addr(builder, args[0], args[1], 4)), v.I64)


@intrinsic
def write(typing, kind, address, i, value):
    """Set the i-th number of a plain kind at an address to an fp32 value, rounded to the nearest."""
    def code(context, builder, signature, args):
        _, address, i, value = args
        if kind == types.int16:
            value = builder.fptrunc(value, ir.HalfType())
        elif kind == types.uint16:
            bits = builder.bitcast(value, v.I32)
            odd = builder.and_(builder.lshr(bits, v.fill(v.I32, 16)), v.fill(v.I32, 1))
            rounded = builder.add(bits, builder.add(odd, v.fill(v.I32, 0x7FFF)))        # ties to even
            nan = builder.fcmp_unordered("uno", value, value)
            bits = builder.select(nan, v.fill(v.I32, 0x7FC00000), rounded)
            value = builder.trunc(builder.lshr(bits, v.fill(v.I32, 16)), v.I16)
        builder.store(value, v.element(builder, value.type, address, i), align=1)
        return context.get_dummy_value()
    return types.void(kind, types.int64, types.int64, types.float32), code
