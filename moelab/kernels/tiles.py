"""Products of a few tokens with a few weight rows in vector registers, for numba kernels; weights stay as they are.

Source: register blocking (Goto & van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008), with
sums along the vectors, so that nothing is packed. A weight is loaded once for all tokens of the tile and widened to
fp32 (`moelab.kernels.vectors`, which says what a kind of weights is); the inputs lie in the order in which a kind's
weights come out (`place`). What ends in `: int` must be a number in the kernel's code, `: type` one of a kind.
"""

from __future__ import annotations

from functools import reduce
from operator import add

from llvmlite import ir
from numba import types
from numba.core import cgutils

from moelab.kernels import vectors as v
from moelab.kernels.emit import F16, F32, I8, I16, I32, I64, VOID, Value, emitted, fill
from moelab.kernels.vectors import BLOCK, FP8, SIZES, STEP, WIDTH

@emitted()
def dots(tokens: int, rows: int, kind: type, x, w, other, table, stride, n, out, apart, ahead):
    """Write fp32 [tokens, rows] at `out`, tokens `apart` numbers apart: sums over n inputs, a multiple of `step`.

    x : where the addresses of the tokens' rows lie, as `spread` writes them. w, other, table : addresses of the first
    row of weights, `stride` weights apart; the last two only of packed kinds. What lies `ahead` bytes behind
    a weight is prefetched with it: asked for in bursts, memory and arithmetic would wait for each other.
    """
    inputs, table = [(x + 8 * t).load(I64) for t in range(tokens)], v.table_of(kind, table)
    matrix = [(w + v.span_of(kind, skip), other if kind == FP8 else other + v.span_of(kind, skip, 1))
              for skip in [stride * r for r in range(rows)]]                # rows of a tile are rows of a block
    # Rows in turn where memory limits: read from front to back. What takes less than a byte computes too much.
    in_turn = tokens <= 2 and SIZES[kind][0] >= BLOCK
    turns = [[r] for r in range(rows)] if in_turn else [list(range(rows))]
    chains = 4 if tokens * len(turns[0]) == 1 else 1    # one sum of a row would wait for itself
    b, zeros = x.builder, fill(v.FLOATS, 0.0)
    sums = [[[cgutils.alloca_once_value(b, zeros) for _ in range(chains)] for _ in range(rows)] for _ in range(tokens)]
    step, (size, rest) = v.step_of(kind), SIZES[kind]
    for turn in turns:
        with n.steps(step) as i:
            values = [[(p + i * 4 + 4 * at).load(v.FLOATS) for at in range(0, step, WIDTH)] for p in inputs]
            for r in turn:
                part, here, beside = 0, matrix[r][0] + v.span_of(kind, i), matrix[r][1] + v.span_of(kind, i, 1)
                for line in range(0, size * step // BLOCK, 64):
                    v.fetch(here + ahead + line)
                if rest:
                    v.fetch(beside + ahead // (size // rest))
                for number, (scales, vectors) in enumerate(v.groups(kind, here, beside, table)):
                    for t in range(tokens):
                        for at, term in enumerate(v.terms(kind, values[t][part:], vectors, scales), number):
                            total = sums[t][r][at % chains]
                            b.store(v.fma(*term, Value(b, b.load(total))).llvm, total)
                    part += len(vectors)
    for t in range(tokens):
        to = out + apart * t * 4
        found = [reduce(add, (Value(b, b.load(one)) for one in chain)) for chain in sums[t]]
        if rows == 4:
            to.store(v.four_sums(*found))
        else:
            for r in range(rows):
                (to + 4 * r).store(found[r].of(0.0, F32).call(f"vector.reduce.fadd.v{WIDTH}f32", found[r],
                                                              fastmath=("reassoc",)))


@emitted()
def add_rows(rows: int, kind: type, x, w, other, table, stride, n, sums):
    """Add to n fp32 sums, a multiple of `step`, rows of weights times one input each: the transposed layout.

    x : where the inputs lie, fp32 [rows]. Sums come in the order of `place`.
    """
    skip, table, step = [stride * r for r in range(rows)], v.table_of(kind, table), v.step_of(kind)
    matrix = [(w + v.span_of(kind, s), other + v.span_of(kind, s, 1)) for s in skip]
    inputs = [(x + 4 * r).load(F32).everywhere(WIDTH) for r in range(rows)]
    with n.steps(step) as i:
        places = [sums + i * 4 + 4 * at for at in range(0, step, WIDTH)]
        values = [place.load(v.FLOATS) for place in places]
        for one, (first, second) in zip(inputs, matrix):
            parts = v.vectors(kind, first + v.span_of(kind, i), second + v.span_of(kind, i, 1), table)
            values = [v.fma(one, weights, value) for weights, value in zip(parts, values)]
        for value, place in zip(values, places):
            place.store(value)


@emitted()
def spread(kind: type, order: type, x, n, out):
    """Write n numbers, a multiple of `step(order)`, of a plain kind as fp32 in the order of weights of `order`, or as
    `vectors.paired` or `fixed` with these."""
    size, given, wanted = v.step_of(order), v.order_of(kind), v.order_of(order)
    begins = range(0, size, STEP)
    come = [begin + number for begin in begins for number in given]
    with n.steps(size) as i:
        parts = [part for begin in begins for part in v.vectors(kind, x + v.span_of(kind, i + begin))]
        if wanted != come:
            where, all_of_it = [come.index(number) for number in wanted], v.joined(parts)
            parts = [all_of_it.shuffled(where[at:at + WIDTH]) for at in range(0, size, WIDTH)]
        if order in v.PAIRED or order in v.FIXED:
            parts = v.paired(parts) if order in v.PAIRED else v.fixed(order, parts)
        for at, vector in enumerate(parts):
            (out + i * 4 + 4 * WIDTH * at).store(vector)


@emitted(types.float32)
def weight(kind: type, w, i):
    """The i-th weight at an address, as fp32; a packed matrix has biases of bf16."""
    if kind == types.float32:
        return w.load(F32, i)
    if kind == types.int16:
        return w.load(F16, i).to(F32, "fpext")
    return (w.load(I16, i).to(I32, "zext") << 16).to(F32)


@emitted(types.int64)
def place(kind: type, i):
    """Where the i-th input lies among those that `dots` is given; i counts from a multiple of `step`."""
    step, order = v.step_of(kind), v.order_of(kind)
    if order == list(range(step)):
        return i
    values = ir.ArrayType(I64, step)([fill(I64, order.index(number)) for number in range(step)])
    b, inside = i.builder, i & step - 1
    known = cgutils.global_constant(b, f"moelab_place_{step}_{kind}", values)
    return i - inside + Value(b, b.load(b.gep(known, [fill(I32, 0), inside.llvm])))


@emitted(types.int64)
def span(kind: type, count):
    """Bytes of so many weights at their first address."""
    return v.span_of(kind, count)


@emitted(types.int64)
def beside(kind: type, row, n):
    """Bytes before a row of n weights at their other address."""
    if kind != FP8:
        return v.span_of(kind, row * n, 1)
    return (row >> 7) * (n + 127 >> 7) * 4


step, prefetch = emitted(types.int64)(v.step_of), emitted()(v.fetch)


@emitted(types.int64)
def take(counter):
    """Add one to the int64 at an address, atomically; returns what it was before."""
    return Value(counter.builder, counter.builder.atomic_rmw("add", counter.at(I64), fill(I64, 1), "monotonic"))


@emitted(types.int64)
def now(function, clock):
    """Nanoseconds of a clock, by the C library's clock_gettime at an address."""
    b, time = function.builder, cgutils.alloca_once(function.builder, ir.ArrayType(I64, 2))
    b.call(function.at(ir.FunctionType(I32, [I32, time.type])), [clock.to(I32, "trunc").llvm, time])
    seconds, rest = (Value(b, b.load(cgutils.gep_inbounds(b, time, 0, i))) for i in (0, 1))
    return seconds * 1_000_000_000 + rest


@emitted(types.int64)
def address(array):
    """Where an array's numbers lie; `ctypes.data` would be uint64, and every kernel compiled for these as well."""
    return array


@emitted()
def kept(array):
    """A use of an array: numba frees its memory after the last one, even if its address is still used."""


@emitted()
def together(team, function, threads, job):
    """Call the C function at an address with that of the array `job` in so many threads, by OpenMP's GOMP_parallel at
    the address `team`; once, in this thread, where that is 0 or threads 1."""
    b, body = team.builder, ir.FunctionType(VOID, [I64])
    run = ir.FunctionType(VOID, [body.as_pointer(), I64, I32, I32])
    several = b.and_(b.icmp_unsigned("!=", team.llvm, fill(I64, 0)), threads.is_(">", 1).llvm)
    with b.if_else(several) as (then, otherwise):
        with then:
            b.call(team.at(run), [function.at(body), job.llvm, threads.to(I32, "trunc").llvm, fill(I32, 0)])
        with otherwise:
            b.call(function.at(body), [job.llvm])


@emitted(types.float32)
def exponential(x):
    """e^x of an fp32 number, to one unit in the last place, in steps of which loops make vectors; subnormals are 0.

    Source: Cephes, expf: x = n ln 2 + r with |r| ≤ ln 2 / 2, a polynomial for e^r, n added to its exponent.
    """
    bound = x.call("maxnum.f32", -88.0).call("minnum.f32", 89.0)
    n = (bound * 1.44269504).call("rint.f32")
    r = n.call("fma.f32", 2.12194440e-4, n.call("fma.f32", -0.693359375, bound))
    total = x.of(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        total = total.call("fma.f32", r, factor)
    power = (n.to(I32, "fptosi") + 127 << 23).to(F32)
    return x.is_("uno", x).made("select", x, total * power)


@emitted(types.int64)
def read(address, i):
    """The i-th int64 at an address."""
    return (address + i * 8).load(I64)


@emitted(types.voidptr)
def pointer(address):
    """An address as `numba.carray` takes it."""
    return Value(address.builder, address.at(I8))


@emitted()
def write(kind: type, address, i, value):
    """Set the i-th number of a plain kind at an address to an fp32 value, rounded to the nearest."""
    address.store(v.rounded(kind, value), i)
