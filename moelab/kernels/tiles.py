"""Products of a few tokens with a few weight rows in vector registers, for numba kernels; weights
stay as they are.

Source: register blocking (Goto & van de Geijn, "Anatomy of high-performance matrix multiplication",
TOMS 2008), with sums along the vectors, so that nothing is packed. A weight is loaded once for all
tokens of the tile and becomes a vector (`moelab.kernels.vectors`), which an instruction multiplies
(`moelab.kernels.instructions`); the inputs lie in the order in which its weights come out (`place`).

What ends in `: int` must be a number in the kernel's code, `: Kind` the tag of a kind."""

from __future__ import annotations

from functools import reduce
from operator import add

from llvmlite import ir
from numba import types
from numba.core import cgutils

from moelab.kernels.emit import F16, F32, I8, I16, I32, I64, VOID, Value, emitted, fill
from moelab.kernels.instructions import Floats, Pairs, fma, instruction, product
from moelab.kernels.vectors import (
    BLOCK,
    FLOAT16,
    FLOAT32,
    FLOATS,
    STEP,
    WIDTH,
    Kind,
    joined,
)

ROWS = 4  # at most, that `add_rows` adds: their sums are loaded and stored once


@emitted()
def dots(
    tokens: int,
    rows: int,
    x_kind: Kind,
    kind: Kind,
    x,
    w,
    other,
    table,
    n,
    out,
    apart,
    ahead,
):
    """Write fp32 [tokens, rows] at `out`, tokens `apart` numbers apart: sums over n inputs, but for
    those beyond the whole steps.

    x : where the addresses of the tokens' rows lie, as `spread` writes them, from `x_kind`. w,
    other, table : addresses of the first row of n weights; the last two only of packed kinds. What
    lies `ahead` bytes behind a weight is prefetched with it: asked for in bursts, memory and
    arithmetic would wait for each other."""
    inputs = [(x + 8 * t).load(I64) for t in range(tokens)]
    table = kind.table(table)
    before = [(kind.span(n * r), kind.beside_rows(n.of(r), n)) for r in range(rows)]
    matrix = [(w + first, other + second) for first, second in before]
    # Rows in turn where memory limits: read from front to back. What takes less than a byte
    # computes too much, unless it is one stream for one token.
    in_turn = tokens <= 2 and kind.size >= kind.block or tokens == 1 and not kind.other
    turns = [[r] for r in range(rows)] if in_turn else [list(range(rows))]
    chains = 4 if tokens * len(turns[0]) == 1 else 1
    floats = instruction(kind).floats
    sums = [[_Sum(x.builder, floats, chains) for _ in range(rows)] for _ in range(tokens)]
    for turn in turns:
        with (n & -kind.step).steps(kind.step) as i:
            places = range(0, kind.step, floats.count)
            values = [[(p + i * 4 + 4 * at).load(floats) for at in places] for p in inputs]
            for r in turn:
                here = matrix[r][0] + kind.span(i)
                beside = matrix[r][1] + kind.beside(i)
                _fetch_ahead(kind, here, beside, ahead)
                weights = instruction(kind).weights(x_kind, (here, beside, table))
                _add_products(kind, [of[r] for of in sums], values, weights)
    for t in range(tokens):
        _store_sums(out + apart * t * 4, [one.total() for one in sums[t]])


class _Sum:
    """A vector of sums in a register, or in several, as one would wait for itself."""

    def __init__(self, builder: ir.IRBuilder, of: ir.Type, chains: int) -> None:
        self.builder = builder
        zeros = fill(of, 0.0)
        self.chains = [cgutils.alloca_once_value(builder, zeros) for _ in range(chains)]

    def add(self, number: int, x: Value, weights: Value) -> None:
        chain = self.chains[number % len(self.chains)]
        total = Value(self.builder, self.builder.load(chain))
        self.builder.store(product(x, weights, total).llvm, chain)

    def total(self) -> Value:
        return reduce(add, (Value(self.builder, self.builder.load(one)) for one in self.chains))


def _fetch_ahead(kind: Kind, here: Value, beside: Value, ahead: Value) -> None:
    for line in range(0, kind.size * kind.step // kind.block, 64):
        _fetch(here + ahead + line)
    if kind.other:
        _fetch(beside + ahead // (kind.size // kind.other))


def _add_products(kind: Kind, sums: list[_Sum], values: list[list[Value]], weights) -> None:
    """Add to each token's sum of a row the products of a step."""
    part = 0
    for number, (scales, vectors) in enumerate(weights):
        for total, inputs in zip(sums, values):
            terms = instruction(kind).terms(inputs, part, vectors, scales)
            for at, term in enumerate(terms, number):
                total.add(at, *term)
        part += len(vectors)


def _store_sums(to: Value, found: list[Value]) -> None:
    if len(found) == 4:
        to.store(_four_sums(*found))
        return
    for r, vector in enumerate(found):
        name = f"vector.reduce.fadd.v{vector.type.count}f32"
        zero = vector.of(0.0, F32)
        (to + 4 * r).store(zero.call(name, vector, fastmath=("reassoc",)))


@emitted()
def add_rows(kind: Kind, x, rows, w, other, table, stride, n, sums):
    """Add to n fp32 sums, a multiple of `step`, up to `ROWS` rows of weights times one input each:
    the transposed layout.

    x : where the inputs lie, fp32 [rows]. Sums come in the order of `place`.
    """
    table = kind.table(table)
    inputs = []
    matrix = []
    for r in range(ROWS):  # one that there is not is the first, times 0
        there = rows.is_(">", r)
        row = there.made("select", rows.of(r), rows.of(0))
        one = (x + row * 4).load(F32)
        inputs.append(there.made("select", one, one.of(0.0)).everywhere(WIDTH))
        matrix.append((w + kind.span(stride * row), other + kind.beside(stride * row)))
    with n.steps(kind.step) as i:
        places = [sums + i * 4 + 4 * at for at in range(0, kind.step, WIDTH)]
        values = [place.load(FLOATS) for place in places]
        for one, (first, second) in zip(inputs, matrix):
            parts = kind.vectors(first + kind.span(i), second + kind.beside(i), table)
            values = [fma(one, weights, value) for weights, value in zip(parts, values)]
        for value, place in zip(values, places):
            place.store(value)


@emitted()
def decode(in_turn: int, kind: Kind, to: Kind, w, other, table, n, out):
    """Write n weights of a kind, a multiple of `step`, as numbers of the plain kind `to` at `out`:
    one after the other, if they are to be `in_turn`, else in the kind's order."""
    table = kind.table(table)
    size = len(kind.order)
    places = [kind.order.index(number) for number in range(size)]
    with n.steps(kind.step) as i:
        found = kind.vectors(w + kind.span(i), other + kind.beside(i), table)
        each = size // found[0].type.count
        for begin in range(0, len(found), each):
            numbers = joined([to.rounded(part) for part in found[begin : begin + each]])
            at = i + begin * found[0].type.count
            (out + to.span(at)).store(numbers.shuffled(places) if in_turn else numbers)


@emitted()
def spread(kind: Kind, order: Kind, x, n, out):
    """Write n numbers, a multiple of `step(order)`, of a plain kind as fp32 in the order of weights
    of `order`, as these are multiplied."""
    _spread(instruction(order), kind, x, n, out)


@emitted()
def arranged(kind: Kind, order: Kind, x, n, out):
    """`spread`, for weights of `order` as `decode` writes them."""
    _spread(Floats(order), kind, x, n, out)


def _spread(how: Floats, kind: Kind, x: Value, n: Value, out: Value) -> None:
    size = how.kind.step
    begins = range(0, size, STEP)
    given = [begin + number for begin in begins for number in kind.order]
    with n.steps(size) as i:
        parts = [part for at in begins for part in kind.vectors(x + kind.span(i + at), x, None)]
        if how.order != given:
            where = [given.index(number) for number in how.order]
            whole = joined(parts)
            parts = [whole.shuffled(where[at : at + WIDTH]) for at in range(0, size, WIDTH)]
        for at, vector in enumerate(how.prepared(parts)):
            (out + i * 4 + 4 * vector.type.count * at).store(vector)


@emitted(types.float32)
def weight(kind: Kind, w, i):
    """The i-th number of a plain kind at an address, as fp32."""
    if kind is FLOAT32:
        return w.load(F32, i)
    if kind is FLOAT16:
        return w.load(F16, i).to(F32, "fpext")
    return _from_bf16(w, i)


@emitted()
def write(kind: Kind, address, i, value):
    """Set the i-th number of a plain kind at an address to an fp32 value, rounded to the
    nearest."""
    address.store(kind.rounded(value), i)


def _place(kind: Kind, i: Value) -> Value:
    """Where the i-th input lies among those that `dots` is given; i counts from a multiple of
    `step`."""
    order = instruction(kind).order
    if order == list(range(kind.step)):
        return i
    places = [fill(I64, order.index(number)) for number in range(kind.step)]
    values = ir.ArrayType(I64, kind.step)(places)
    b = i.builder
    inside = i & kind.step - 1
    known = cgutils.global_constant(b, f"moelab_place_{type(kind).__name__}", values)
    return i - inside + Value(b, b.load(b.gep(known, [fill(I32, 0), inside.llvm])))


place = emitted(types.int64)(_place)


@emitted(types.float32)
def given(kind: Kind, x, i):
    """The i-th input among those that `dots` is given, of kinds that are multiplied as fp32 or as
    pairs."""
    at = _place(kind, i)
    if not isinstance(instruction(kind), Pairs):
        return x.load(F32, at)
    # as `Pairs.prepared` writes a block
    upper = (at & -BLOCK) * 2 + (at & 32) + (at & 15) * 2 + (at >> 4 & 1)
    return _from_bf16(x, upper) + _from_bf16(x, upper + BLOCK)


@emitted(types.int64)
def step(kind: Kind):
    """Weights that a loop takes at a time."""
    return kind.step


@emitted(types.int64)
def span(kind: Kind, count):
    """Bytes of so many weights at their first address."""
    return kind.span(count)


@emitted(types.int64)
def beside(kind: Kind, row, n):
    """Bytes before a row of n weights at their other address."""
    return kind.beside_rows(row, n)


def _fetch(address: Value) -> None:
    """Prefetch a cache line into the second level: the first takes so few at a time that memory
    would wait; any address is valid."""
    args = [address.of(value, I32) for value in (0, 2, 1)]
    Value(address.builder, address.at(I8)).call("prefetch.p0", *args, of=VOID)


prefetch = emitted()(_fetch)


def _from_bf16(address: Value, i: Value) -> Value:
    return (address.load(I16, i).to(I32, "zext") << 16).to(F32)


def _four_sums(a: Value, b: Value, c: Value, d: Value) -> Value:
    """The sums of four vectors, as a vector of four: transposed by halves, with an addition for
    each half."""
    width = a.type.count
    lanes = range(0, width, 4)
    ones = [i for lane in lanes for i in (lane, lane + width, lane + 1, lane + 1 + width)]
    twos = [i for lane in lanes for i in (lane, lane + 1, lane + width, lane + 1 + width)]

    def folded(u: Value, v: Value, order: list[int]) -> Value:
        return u.shuffled(order, v) + u.shuffled([i + 2 for i in order], v)

    total = folded(folded(a, b, ones), folded(c, d, ones), twos)  # of each four lanes: a b c d
    while width > 4:
        width //= 2
        total = total.shuffled(list(range(width))) + total.shuffled(list(range(width, 2 * width)))
    return total
