"""Few-bit kinds of `moelab.kernels.vectors` back to numbers of plain ones: what
`moelab.store.fewbit` says."""

from __future__ import annotations

from functools import cache

from moelab.kernels.compile import c_function
from moelab.kernels.emit import emitted, read, take
from moelab.kernels.tiles import beside, span
from moelab.kernels.vectors import BLOCK, Kind, joined

ROWS = 32  # that a thread widens at a time


@cache
def widening(kind: Kind, to: Kind) -> int:
    """The address of what a thread does to widen rows of such weights: some rows at a time until
    none is left."""

    tag = kind.tag
    to_tag = to.tag

    def work(job):
        codes = read(job, 1)
        scales = read(job, 2)
        R = read(job, 3)
        n = read(job, 4)
        out = read(job, 5)
        while True:
            begin = take(job) * ROWS
            if begin >= R:
                return
            for r in range(begin, min(begin + ROWS, R)):
                _widen_row(
                    tag,
                    to_tag,
                    codes + span(tag, r * n),
                    scales + beside(tag, r, n),
                    n,
                    out + span(to_tag, r * n),
                )

    return c_function(work)


@emitted()
def _widen_row(kind: Kind, to: Kind, w, other, n, out):
    """Write n weights of a few-bit kind, a multiple of `BLOCK`, as numbers of the plain kind `to`
    at `out`."""
    order = kind.order
    with n.steps(BLOCK) as i:
        found = kind.vectors(w + kind.span(i), other + kind.beside(i), None)
        (out + to.span(i)).store(
            joined([to.rounded(part) for part in found]).shuffled(
                [order.index(number) for number in range(BLOCK)]
            )
        )
