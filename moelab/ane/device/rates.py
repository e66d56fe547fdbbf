"""How fast the Neural Engine runs expert graphs: a formula fitted to timed configurations (NPUMoE Table 5).

One launch of a graph of G experts of capacity C takes, in ms,

    serial:    a + b·G + c·G·C + s·max(0, G·C − 1024)          parallel, G·C ≤ 1024:  G·C · (p/C + q + w·log2 G)

a the launch, b to bring an expert's weights, c a row, s what a row more costs once activations exceed 1024 rows.
Weights and rows add up: a roofline, max(b, c·C), fits worse, so loading does not hide behind computing. Graphs
submitted at once overlap in part, up to 1024 rows; above, they run as if serial. Energy is e·ms + f per slot, for each
mode: a power and a work. All are least squares of relative errors; half a digit of the smallest published figure,
0.07 ms, is 7 %.

A slot is a row of a graph, padding included, not a prompt token; `moelab.ane.device.published` says how one can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from moelab.ane.device.published import OUTLIERS, TABLE_5, Sample
from moelab.specs import Figure

SPILL_ROWS = 1024
MODES = ("serial", "parallel")


@dataclass(frozen=True)
class Rates:
    """The fitted parameters, for experts of the size they were fitted on (PhiMoE's, of 157.3 MB).

    launch (a), expert (b), row (c), spill (s) in ms; overlap = (p, q, w) in ms;
    power (e) in W and work (f) in mJ a row, each (serial, parallel).
    """

    launch: float
    expert: float
    row: float
    spill: float
    overlap: tuple[float, float, float]
    power: tuple[float, float]
    work: tuple[float, float]

    def graph_ms(self, G: int, C: int, mode: str = "serial") -> float:
        """Milliseconds of one launch of G experts of capacity C."""
        rows = G * C
        if mode == "parallel" and rows <= SPILL_ROWS:
            return rows * float(np.dot(self.overlap, _overlap_features(G, C)))
        return self.launch + self.expert * G + self.row * rows + self.spill * max(0, rows - SPILL_ROWS)

    def graph_mj(self, G: int, C: int, mode: str = "serial") -> float:
        """Millijoules of one launch."""
        which = MODES.index(mode)
        return self.power[which] * self.graph_ms(G, C, mode) + self.work[which] * G * C

    def scaled(self, weights: float, work: float, power: float = 1.0) -> Rates:
        """For graphs whose weights and operations take that many times as long; a launch stays what it is.

        Parallel graphs have no launch of their own in the formula: p is weights, q and w are rows. The energy a row
        goes with time times power.
        """
        p, q, w = self.overlap
        return Rates(self.launch, self.expert * weights, self.row * work, self.spill * work,
                     (p * weights, q * work, w * work), tuple(e * power for e in self.power),
                     tuple(f * work * power for f in self.work))

    def figures(self, source: str = "least squares on NPUMoE Table 5 (PhiMoE, M2 Ultra)") -> dict[str, Figure]:
        """Each parameter as a figure of kind "fitted"."""
        units = {"power": "W", "work": "mJ"}
        flat = [(f"ANE {name} {part}".strip(), value, units.get(name, "ms")) for name, values in asdict(self).items()
                for part, value in (zip(("p", "q", "w") if name == "overlap" else MODES, values)
                                    if isinstance(values, tuple) else [("", values)])]
        return {name: Figure(float(value), unit, "fitted", source) for name, value, unit in flat}


class Residual(NamedTuple):
    """One published or measured number beside the fit's."""

    sample: Sample
    quantity: str       # "latency" or "energy"
    given: float
    fitted: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.fitted / self.given - 1


def fit(samples: Sequence[Sample] = TABLE_5) -> Rates:
    """Least squares of relative errors.

    Where nothing was timed in parallel, parallel graphs are taken to run as serial ones do; energy needs two samples
    with energy a mode, else its parameters are nan.

    Raises
    ------
    ValueError : too few serial samples, or not varied enough to tell the parameters apart.
    """
    serial = [s for s in samples if s.mode == "serial"]
    design = [[1 / (s.G * s.C), 1 / s.C, 1, max(0, 1 - SPILL_ROWS / (s.G * s.C))] for s in serial]
    if len(serial) < 4 or np.linalg.matrix_rank(design) < 4:
        raise ValueError(f"{len(serial)} serial samples do not determine launch, weights, row and spill: time at least "
                         f"two group sizes, two capacities and one graph of more than {SPILL_ROWS} rows")
    launch, expert, row, spill = _relative(design, [s.ms for s in serial])
    small = [s for s in samples if s.mode == "parallel" and s.G * s.C <= SPILL_ROWS]
    overlap = (_relative([_overlap_features(s.G, s.C) for s in small], [s.ms for s in small]) if len(small) >= 3
               else (expert, row, 0.0))
    lines = []
    for mode in MODES:
        timed = [s for s in samples if s.mode == mode and s.mj is not None and s not in OUTLIERS]
        lines.append(_relative([[s.ms, 1] for s in timed], [s.mj for s in timed]) if len(timed) >= 2
                     else (np.nan, np.nan))
    power, work = zip(*lines)
    return Rates(launch, expert, row, spill, tuple(overlap), power, work)


def residuals(rates: Rates, samples: Sequence[Sample] = TABLE_5, quantity: str = "latency", mode: str | None = None
              ) -> list[Residual]:
    """The fit beside the samples; energies from the given latencies' own fit, outliers left out."""
    rows = [s for s in samples if mode in (None, s.mode)]
    if quantity == "latency":
        return [Residual(s, quantity, s.ms, rates.graph_ms(s.G, s.C, s.mode) / (s.G * s.C)) for s in rows]
    return [Residual(s, quantity, s.mj, rates.graph_mj(s.G, s.C, s.mode) / (s.G * s.C)) for s in rows
            if s.mj is not None and s not in OUTLIERS]


def leave_one_out(samples: Sequence[Sample] = TABLE_5, quantity: str = "latency", mode: str | None = None
                  ) -> list[Residual]:
    """Each sample as predicted by a fit to the others; those that a fit needs to exist at all are left out."""
    found = []
    for i, sample in enumerate(samples):
        if mode not in (None, sample.mode):
            continue
        try:
            rates = fit([*samples[:i], *samples[i + 1:]])
        except ValueError:
            continue
        found += residuals(rates, [sample], quantity)
    return found


def summary(errors: Sequence[Residual]) -> dict[str, Any]:
    """Root mean square and worst relative error, and where the worst is."""
    worst = max(errors, key=lambda r: abs(r.error))
    return {"RMS": float(np.sqrt(np.mean([r.error ** 2 for r in errors]))), "worst": abs(worst.error),
            "worst at": f"{worst.sample.G}x{worst.sample.C} {worst.sample.mode}", "n": len(errors)}


def _overlap_features(G: int, C: int) -> list[float]:
    return [1 / C, 1.0, float(np.log2(G))]


def _relative(design: Any, y: Any) -> tuple[float, ...]:
    """Least squares of (design·x − y)/y."""
    y = np.asarray(y, dtype=float)
    return tuple(float(v) for v in np.linalg.lstsq(np.asarray(design, dtype=float) / y[:, None], np.ones(len(y)),
                                                   rcond=None)[0])
