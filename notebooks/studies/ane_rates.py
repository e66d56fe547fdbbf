"""The device model's fitted parameters: expert graphs on the ANE (NPUMoE Table 5), and the CPU
beside it.

One launch of a graph of G experts of capacity C takes, in ms,

    serial:    a + b·G + c·G·C + s·max(0, G·C − 1024)          parallel, G·C ≤ 1024:
    G·C · (p/C + q + w·log2 G)

a the launch, b to bring an expert's weights, c a row, s what a row more costs once activations
exceed 1024 rows. Weights and rows add up (a roofline, max(b, c·C), fits worse), so loading does not
hide behind computing. Graphs submitted at once overlap in part, up to 1024 rows; above, they run as
if serial. Energy is e·ms + f per slot, for each mode: a power and a work. All are least squares of
relative errors; half a digit of the smallest published figure, 0.07 ms, is 7 %. A slot is a row of
a graph, padding included, not a prompt token (docs/papers/npumoe.md).

An expert on the CPU costs its weights once a chunk and then each of its tokens, whatever the chunk.
Each CPU parameter is read off one published figure (§5.3, Fig. 7, Tables 4, 6, 7), so there is no
fit error; notebook 06 judges what follows from them. Times are for PhiMoE's experts (157.3 million
weights, H = 4096), to be scaled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from .ane_published import (
    ATTENTION_CPU,
    FIGURE_7,
    OUTLIERS,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    Sample,
)

SPILL_ROWS = 1024
MODES = ("serial", "parallel")
#: Table 4's run: 1024 prompt tokens in 4 chunks of 256, 16 experts, top-2; graphs of the worst
#: case, four times the mean load (§1), where Core ML places them
VISITS = 4 * 16
ROUTED = 1024 * 2
WORST_CASE = 128


@dataclass(frozen=True)
class Rates:
    """The ANE's parameters, for experts of the size they were fitted on; times in ms."""

    launch: float  # a
    expert: float  # b
    row: float  # c
    spill: float  # s
    overlap: tuple[float, float, float]  # p, q, w
    power: tuple[float, float]  # e, W, serial and parallel
    work: tuple[float, float]  # f, mJ a row, serial and parallel

    def graph_ms(self, G: int, C: int, mode: str = "serial") -> float:
        """Milliseconds of one launch of G experts of capacity C."""
        rows = G * C
        if mode == "parallel" and rows <= SPILL_ROWS:
            return rows * float(np.dot(self.overlap, _overlap_features(G, C)))
        return (
            self.launch + self.expert * G + self.row * rows + self.spill * max(0, rows - SPILL_ROWS)
        )

    def graph_mj(self, G: int, C: int, mode: str = "serial") -> float:
        """Millijoules of one launch."""
        which = MODES.index(mode)
        return self.power[which] * self.graph_ms(G, C, mode) + self.work[which] * G * C

    def scaled(self, weights: float, work: float, power: float = 1.0) -> Rates:
        """For graphs whose weights (b, p) and operations (c, s, q, w) take that many times as
        long."""
        p, q, w = self.overlap
        return Rates(
            self.launch,
            self.expert * weights,
            self.row * work,
            self.spill * work,
            (p * weights, q * work, w * work),
            tuple(e * power for e in self.power),
            tuple(f * work * power for f in self.work),
        )


def fit(samples: Sequence[Sample] = TABLE_5) -> Rates:
    """Least squares of relative errors; ValueError for too few serial samples to tell the
    parameters apart."""
    serial = [s for s in samples if s.mode == "serial"]
    design = [[1 / (s.G * s.C), 1 / s.C, 1, max(0, 1 - SPILL_ROWS / (s.G * s.C))] for s in serial]
    if np.linalg.matrix_rank(design) < 4:
        raise ValueError(
            f"{len(serial)} serial samples do not determine launch, weights, row and spill: "
            "time at least two group sizes, two capacities and one graph of more than "
            f"{SPILL_ROWS} rows"
        )
    small = [s for s in samples if s.mode == "parallel" and s.G * s.C <= SPILL_ROWS]
    overlap = _relative([_overlap_features(s.G, s.C) for s in small], [s.ms for s in small])
    energies = []
    for mode in MODES:
        rows = [s for s in samples if s.mode == mode and s.mj is not None and s not in OUTLIERS]
        energies.append(_relative([[s.ms, 1] for s in rows], [s.mj for s in rows]))
    return Rates(*_relative(design, [s.ms for s in serial]), overlap, *zip(*energies))


def relative_errors(rates: Rates, samples: Sequence[Sample], quantity: str) -> list[float]:
    """Of the fit, for the "latency" or the "energy" of samples, outliers of energy left out."""
    if quantity == "latency":
        return [rates.graph_ms(*s[:3]) / (s.G * s.C) / s.ms - 1 for s in samples]
    known = [s for s in samples if s.mj is not None and s not in OUTLIERS]
    return [rates.graph_mj(*s[:3]) / (s.G * s.C) / s.mj - 1 for s in known]


@cache
def leave_one_out(samples: tuple[Sample, ...], quantity: str, mode: str) -> tuple[float, ...]:
    """The errors of each sample of a mode as predicted by a fit to the others; those that a fit
    needs to exist at all are left out."""
    found = []
    for i, sample in enumerate(samples):
        if mode == sample.mode:
            with suppress(ValueError):
                others = fit([*samples[:i], *samples[i + 1 :]])
                found += relative_errors(others, [sample], quantity)
    return tuple(found)


def rms(errors: Sequence[float]) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(errors))))


def _overlap_features(G: int, C: int) -> list[float]:
    return [1 / C, 1.0, float(np.log2(G))]


def _relative(design: Any, y: Any) -> tuple[float, ...]:
    """Least squares of (design·x − y)/y."""
    scaled = np.asarray(design, dtype=float) / np.asarray(y, dtype=float)[:, None]
    return tuple(np.linalg.lstsq(scaled, np.ones(len(scaled)), rcond=None)[0].tolist())


@dataclass(frozen=True)
class CPURates:
    """The CPU's parameters, in ms and W.

    `dispatch` is taken to grow with the graph's weights: were it the same for each graph,
    Qwen3-30B's naïve system would take 48 times as long as ours, not 3.9 (§5.2)."""

    expert: float  # to bring an expert's weights: Table 4, CPU
    row: float  # a token of it: Fig. 7
    choice: float  # router, gather (twice) and padding of one choice of an expert: Table 4, ours
    dispatch: float  # what a graph of one expert takes more if Core ML places it: Table 4, naïve
    attention: float  # CPU attention over ANE attention: §5.3
    cpu_w: float  # the busy CPU: Tables 6 and 7
    wait_w: float  # the CPU while the ANE works: Tables 6 and 7
    comm_w: float  # communication, at all times: Tables 6 and 7, mean of three

    @property
    def waiting(self) -> float:
        """Share of the whole CPU that is busy while the ANE works, by its power."""
        return self.wait_w / self.cpu_w

    def scaled(self, time: float) -> CPURates:
        """A CPU that takes `time` times as long and draws so much less power."""
        times, powers = ("expert", "row", "choice", "dispatch"), ("cpu_w", "wait_w", "comm_w")
        changed = {name: getattr(self, name) * time for name in times}
        return replace(self, **changed | {name: getattr(self, name) / time for name in powers})


def fit_cpu(rates: Rates, attention: float = ATTENTION_CPU) -> CPURates:
    """The CPU's parameters of the M2 Ultra, given the rates of its ANE.

    attention : of the CPU over the ANE; §5.3 does not say which of the two is the slower.
    """
    cpu_ffn, naive_ffn, _, _ = TABLE_4["expert FFN"]
    row = rates.row * (FIGURE_7[0] * FIGURE_7[1]) ** 0.5
    watts = {
        name: [j / TABLE_6[name][0] for j in joules] for name, joules in TABLE_7.items()
    }  # all, CPU, ANE, comm.
    return CPURates(
        expert=(cpu_ffn - ROUTED * row) / VISITS,
        row=row,
        # what is gathered is written back: as many rows once more
        choice=(TABLE_4["router"][3] + 2 * TABLE_4["gather"][3] + TABLE_4["padding"][3]) / ROUTED,
        dispatch=naive_ffn / VISITS - rates.graph_ms(1, WORST_CASE),
        attention=attention,
        cpu_w=watts["cpu"][1],
        wait_w=watts["npumoe"][1],
        comm_w=sum(of_system[3] for of_system in watts.values()) / len(watts),
    )
