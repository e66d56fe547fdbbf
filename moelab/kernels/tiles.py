"""Products of a few tokens with a few weight rows in vector registers, for numba kernels; weights
stay as they are.

Source: register blocking (Goto & van de Geijn, "Anatomy of high-performance matrix multiplication",
TOMS 2008), with sums along the vectors, so that nothing is packed. A weight is loaded once for all
tokens of the tile and widened to fp32 (`moelab.kernels.vectors`, which says what a kind of weights
is); the inputs lie in the order in which a kind's weights come out (`place`). Where one instruction
multiplies pairs of bf16 (AVX512_BF16), these weights and packed ones become such pairs: half the
instructions, with inputs cut into their upper 8 bits and the rest, if there is one; subnormals are
0. Where none does, on AVX2, four-bit codes are multiplied as bytes with inputs in fixed point, 16
bits for 32 of them: a third. So are int8's where AVX512_VNNI is.

What ends in `: int` must be a number in the kernel's code, `: type` one of a kind.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from moelab.kernels import vectors as v
from moelab.kernels.emit import F16, F32, I8, I16, I32, I64, VOID, Value, emitted, fill
from moelab.kernels.vectors import (
    BLOCK,
    FIXED,
    FLOATS,
    FP8,
    GROUP,
    MXFP4,
    PAIRED,
    SIZES,
    STEP,
    WIDTH,
    WORDS,
    joined,
)


@emitted()
def dots(
    tokens: int,
    rows: int,
    x_kind: type,
    kind: type,
    x,
    w,
    other,
    table,
    stride,
    n,
    out,
    apart,
    ahead,
):
    """Write fp32 [tokens, rows] at `out`, tokens `apart` numbers apart: sums over n inputs, a
    multiple of `step`.

    x : where the addresses of the tokens' rows lie, as `spread` writes them, from `x_kind`. w,
    other, table : addresses of the first row of weights, `stride` weights apart; the last two only
    of packed kinds. What lies `ahead` bytes behind a weight is prefetched with it: asked for in
    bursts, memory and arithmetic would wait for each other."""
    inputs, table = [(x + 8 * t).load(I64) for t in range(tokens)], v.table_of(kind, table)
    matrix = [
        (w + v.span_of(kind, skip), other if kind == FP8 else other + v.span_of(kind, skip, 1))
        for skip in [stride * r for r in range(rows)]
    ]  # rows of a tile are rows of a block
    # Rows in turn where memory limits: read from front to back. What takes less than a byte
    # computes too much.
    in_turn = tokens <= 2 and SIZES[kind][0] >= BLOCK
    turns = [[r] for r in range(rows)] if in_turn else [list(range(rows))]
    chains = 4 if tokens * len(turns[0]) == 1 else 1  # one sum of a row would wait for itself
    b, zeros = x.builder, fill(FLOATS, 0.0)
    sums = [
        [[cgutils.alloca_once_value(b, zeros) for _ in range(chains)] for _ in range(rows)]
        for _ in range(tokens)
    ]
    step, (size, rest) = v.step_of(kind), SIZES[kind]
    for turn in turns:
        with n.steps(step) as i:
            values = [
                [(p + i * 4 + 4 * at).load(FLOATS) for at in range(0, step, WIDTH)] for p in inputs
            ]
            for r in turn:
                part, here, beside = (
                    0,
                    matrix[r][0] + v.span_of(kind, i),
                    matrix[r][1] + v.span_of(kind, i, 1),
                )
                for line in range(0, size * step // BLOCK, 64):
                    _fetch(here + ahead + line)
                if rest:
                    _fetch(beside + ahead // (size // rest))
                for number, (scales, vectors) in enumerate(
                    v.groups(x_kind, kind, here, beside, table)
                ):
                    for t in range(tokens):
                        for at, term in enumerate(
                            _terms(kind, values[t][part:], vectors, scales), number
                        ):
                            total = sums[t][r][at % chains]
                            b.store(_product(*term, Value(b, b.load(total))).llvm, total)
                    part += len(vectors)
    for t in range(tokens):
        to = out + apart * t * 4
        found = [reduce(add, (Value(b, b.load(one)) for one in chain)) for chain in sums[t]]
        if rows == 4:
            to.store(_four_sums(*found))
        else:
            for r in range(rows):
                (to + 4 * r).store(
                    found[r]
                    .of(0.0, F32)
                    .call(f"vector.reduce.fadd.v{WIDTH}f32", found[r], fastmath=("reassoc",))
                )


@emitted()
def add_rows(rows: int, kind: type, x, w, other, table, stride, n, sums):
    """Add to n fp32 sums, a multiple of `step`, rows of weights times one input each: the
    transposed layout.

    x : where the inputs lie, fp32 [rows]. Sums come in the order of `place`.
    """
    skip, table, step = [stride * r for r in range(rows)], v.table_of(kind, table), v.step_of(kind)
    matrix = [(w + v.span_of(kind, s), other + v.span_of(kind, s, 1)) for s in skip]
    inputs = [(x + 4 * r).load(F32).everywhere(WIDTH) for r in range(rows)]
    with n.steps(step) as i:
        places = [sums + i * 4 + 4 * at for at in range(0, step, WIDTH)]
        values = [place.load(FLOATS) for place in places]
        for one, (first, second) in zip(inputs, matrix):
            parts = v.vectors(
                kind, first + v.span_of(kind, i), second + v.span_of(kind, i, 1), table
            )
            values = [_fma(one, weights, value) for weights, value in zip(parts, values)]
        for value, place in zip(values, places):
            place.store(value)


@emitted()
def spread(kind: type, order: type, x, n, out):
    """Write n numbers, a multiple of `step(order)`, of a plain kind as fp32 in the order of weights
    of `order`, as these are multiplied."""
    size, given, wanted = v.step_of(order), v.order_of(kind), v.order_of(order)
    begins = range(0, size, STEP)
    come = [begin + number for begin in begins for number in given]
    with n.steps(size) as i:
        parts = [
            part for begin in begins for part in v.vectors(kind, x + v.span_of(kind, i + begin))
        ]
        if wanted != come:
            where, all_of_it = [come.index(number) for number in wanted], joined(parts)
            parts = [all_of_it.shuffled(where[at : at + WIDTH]) for at in range(0, size, WIDTH)]
        for at, vector in enumerate(_prepared(order, parts)):
            (out + i * 4 + 4 * WIDTH * at).store(vector)


@emitted(types.float32)
def weight(kind: type, w, i):
    """The i-th weight at an address, as fp32; a packed matrix has biases of bf16."""
    if kind == types.float32:
        return w.load(F32, i)
    if kind == types.int16:
        return w.load(F16, i).to(F32, "fpext")
    return _from_bf16(w, i)


@emitted()
def write(kind: type, address, i, value):
    """Set the i-th number of a plain kind at an address to an fp32 value, rounded to the
    nearest."""
    address.store(v.rounded(kind, value), i)


def _place(kind: type, i):
    """Where the i-th input lies among those that `dots` is given; i counts from a multiple of
    `step`."""
    step, order = v.step_of(kind), v.order_of(kind)
    if order == list(range(step)):
        return i
    values = ir.ArrayType(I64, step)([fill(I64, order.index(number)) for number in range(step)])
    b, inside = i.builder, i & step - 1
    known = cgutils.global_constant(b, f"moelab_place_{step}_{kind}", values)
    return i - inside + Value(b, b.load(b.gep(known, [fill(I32, 0), inside.llvm])))


@emitted(types.float32)
def given(kind: type, x, i):
    """The i-th input among those that `dots` is given, of kinds that are multiplied as fp32 or as
    pairs."""
    at = _place(kind, i)
    if kind not in PAIRED:
        return x.load(F32, at)
    upper = (
        (at & -BLOCK) * 2 + (at & 32) + (at & 15) * 2 + (at >> 4 & 1)
    )  # as `_paired` writes a block
    return _from_bf16(x, upper) + _from_bf16(x, upper + BLOCK)


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


def _fetch(address: Value) -> None:
    """Prefetch a cache line into the second level: the first takes so few at a time that memory
    would wait; any address is valid."""
    args = [
        Value(address.builder, address.at(I8)),
        *(address.of(value, I32) for value in (0, 2, 1)),
    ]
    args[0].call("prefetch.p0", *args[1:], of=VOID)


def _from_bf16(address: Value, i: Value) -> Value:
    return (address.load(I16, i).to(I32, "zext") << 16).to(F32)


place, step, prefetch = (
    emitted(types.int64)(_place),
    emitted(types.int64)(v.step_of),
    emitted()(_fetch),
)


def _prepared(kind: Any, parts: list[Value]) -> list[Value]:
    """What `_terms` takes as inputs of a step, in vectors of fp32, perhaps fewer: of inputs in
    `order_of` a kind."""
    return _paired(parts) if kind in PAIRED else _fixed(kind, parts) if kind in FIXED else parts


def _paired(parts: list[Value]) -> list[Value]:
    """Inputs as paired kinds are multiplied: pairs of their upper halves, pairs of what these lack,
    which is exact to 2⁻¹⁷; an infinity in fp32 makes NaN."""
    upper = [(part.to(I32) + 0x8000 & 0xFFFF0000).to(F32) for part in parts]
    lower = [((part - top).to(I32) + 0x8000).to(F32) for part, top in zip(parts, upper)]
    return [
        ((even.to(I32) >> 16) | (odd.to(I32) & 0xFFFF0000)).to(F32)
        for half in (upper, lower)
        for even, odd in zip(half[::2], half[1::2])
    ]


def _fixed(kind: Any, parts: list[Value]) -> list[Value]:
    """Inputs of a block in fixed point: whole numbers as `_whole_sums` has them, what the codes'
    offset adds to its sums, and the scales of both groups.

    A scale is a power of two, a quantum at most 2⁻¹⁴ of a group's largest: bf16 is exact down to
    1/128 of that."""
    wholes, scales, order = list(parts), [], v.order_of(kind)
    for group in (0, 1):
        members = [i for i in range(len(parts)) if order[i * WIDTH] // GROUP == group]
        largest = parts[0].of(2.0**-100).to(I32)  # of zeros and subnormals
        for size in [
            parts[i].to(I32) & 0x7FFFFFFF for i in members
        ]:  # as integers NaN is larger than all numbers
            largest = size.is_(">", largest).made("select", size, largest)
        largest = largest.call(f"vector.reduce.umax.v{WIDTH}i32", of=I32).to(F32).everywhere(WIDTH)
        exponent = (largest * 1.004).to(I32) & 0x7F800000  # 128 upper bytes would be too many
        for i in members:
            scaled = (parts[i] * (exponent.of(268 << 23) - exponent).to(F32)).call(
                f"rint.v{WIDTH}f32"
            )
            wholes[i] = scaled.call(f"fptosi.sat.v{WIDTH}i32.v{WIDTH}f32", of=WORDS)
        scales.append((exponent - (14 << 23)).to(F32) + (largest - largest))  # infinities make NaN
    scale = scales[0].shuffled([2 * lane // WIDTH * WIDTH for lane in range(WIDTH)], scales[1])
    scale *= 0.5 if kind == MXFP4 else 1.0
    inputs = [
        joined([one.to(I8, "trunc") for one in half[at : at + 4]])
        for half in ([one + 128 >> 8 for one in wholes], wholes)
        for at in range(0, len(parts), 4)
    ]
    offset = [inputs[0].of(v.OFFSETS[kind])] * (len(inputs) // 2)
    return [*(one.to(FLOATS) for one in inputs), _whole_sums(offset, inputs).to(FLOATS), scale]


def _terms(
    kind: Any, inputs: list[Value], weights: list[Value], scales: Value | None
) -> list[tuple[Value, Value]]:
    """Pairs of vectors whose products are to be added up, from inputs and what `groups` gives."""
    if kind in FIXED:
        *inputs, offset, scale = inputs[: 2 * len(weights) + 2]
        whole = _whole_sums(weights, [one.to(weights[0].type) for one in inputs]) - offset.to(I32)
        return [(whole.to(F32, "sitofp"), scale * scales)]
    if scales is None:
        return list(zip(inputs, weights))
    return [
        (reduce(lambda total, term: _product(*term, total), zip(inputs, weights), None), scales)
    ]


def _product(x: Value, weights: Value, total: Value | None) -> Value:
    """Inputs times weights, which are fp32 or words of two bf16, plus a sum, if there is one."""
    if weights.scalar == I32:
        return (total or x.of(0.0)).call("x86.avx512bf16.dpbf16ps.512", x.to(WORDS), weights)
    return _fma(x, weights, total) if total else x * weights


def _whole_sums(codes: list[Value], inputs: list[Value]) -> Value:
    """Σ code × input of four bytes of each register of codes, in whole numbers.

    inputs : the upper bytes for each of these registers, then the lower ones; all with signs, codes
    without."""
    sixteen, total = ir.VectorType(I16, 2 * WIDTH), codes[0].to(WORDS).of(0)
    for half in (inputs[: len(codes)], inputs[len(codes) :]):
        total, both = total << 8, list(zip(codes, half))
        if WIDTH == 16:
            total = reduce(
                lambda total, one: total.call(
                    "x86.avx512.vpdpbusd.512", *(of.to(WORDS) for of in one)
                ),
                both,
                total,
            )
        else:
            pairs = reduce(
                add, (one.call("x86.avx2.pmadd.ub.sw", beside, of=sixteen) for one, beside in both)
            )
            total += pairs.call(
                "x86.avx2.pmadd.wd", pairs.of(1), of=WORDS
            )  # in 16 bits: at most 4 · 24 · 128
    return total


def _fma(a: Value, b: Value, c: Value) -> Value:
    return a.call(f"fma.v{WIDTH}f32", b, c)


def _four_sums(a: Value, b: Value, c: Value, d: Value) -> Value:
    """The sums of four vectors, as a vector of four: transposed by halves, with an addition for
    each half."""
    ones = [
        i for lane in range(0, WIDTH, 4) for i in (lane, lane + WIDTH, lane + 1, lane + 1 + WIDTH)
    ]
    twos = [
        i for lane in range(0, WIDTH, 4) for i in (lane, lane + 1, lane + WIDTH, lane + 1 + WIDTH)
    ]

    def folded(u: Value, v: Value, order: list[int]) -> Value:
        return u.shuffled(order, v) + u.shuffled([i + 2 for i in order], v)

    total, width = (
        folded(folded(a, b, ones), folded(c, d, ones), twos),
        WIDTH,
    )  # of each four lanes: a b c d
    while width > 4:
        width //= 2
        total = total.shuffled(list(range(width))) + total.shuffled(list(range(width, 2 * width)))
    return total
