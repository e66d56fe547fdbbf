"""Fits the device model's parameters: expert graphs on the ANE (NPUMoE Table 5), and the CPU beside
it.

The formulas of graphs that run one after the other are `moelab.ane.predict`'s. Graphs submitted at
once overlap in part, up to 1024 rows,

    parallel, G·C ≤ 1024:    G·C · (p/C + q + w·log2 G)

and run as if serial above. Weights and rows add up (a roofline, max(b, c·C), fits worse), so
loading does not hide behind computing. Energy is e·ms + f per slot, for each mode: a power and a
work. All are least squares of relative errors; half a digit of the smallest published figure, 0.07
ms, is 7 %. A slot is a row of a graph, padding included, not a prompt token (docs/papers/npumoe.md).

Each CPU parameter is read off one published figure (§5.3, Fig. 7, Tables 4, 6, 7), so there is no
fit error; notebook 06 judges what follows from them. `python -m notebooks.studies.ane_rates` writes
what is fitted into the cards of both Macs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moelab.ane.predict import SPILL_ROWS, CPURates, Rates
from moelab.base.files import write_text
from moelab.cards import UNITS, load_device

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

MODES = ("serial", "parallel")
#: Table 4's run: 1024 prompt tokens in 4 chunks of 256, 16 experts, top-2; graphs of the worst
#: case, four times the mean load (§1), where Core ML places them
VISITS = 4 * 16
ROUTED = 1024 * 2
WORST_CASE = 128


@dataclass(frozen=True)
class Parallel:
    """Graphs that are submitted at once, for experts of the size they were fitted on; times in
    ms."""

    serial: Rates
    overlap: tuple[float, float, float]  # p, q, w
    power: float  # e, W
    work: float  # f, mJ a row

    def graph_ms(self, G: int, C: int) -> float:
        """Milliseconds of one launch of G experts of capacity C."""
        rows = G * C
        if rows > SPILL_ROWS:
            return self.serial.graph_ms(G, C)
        return rows * float(np.dot(self.overlap, _overlap_features(G, C)))

    def graph_mj(self, G: int, C: int) -> float:
        """Millijoules of one launch."""
        return self.power * self.graph_ms(G, C) + self.work * G * C


def fit(samples: Sequence[Sample] = TABLE_5) -> dict[str, Any]:
    """Mode → `Rates` or `Parallel`, by least squares of relative errors; parallel only if there are
    such samples. ValueError for too few serial samples to tell the parameters apart."""
    by = {mode: [s for s in samples if s.mode == mode] for mode in MODES}
    design = [
        [1 / (s.G * s.C), 1 / s.C, 1, max(0, 1 - SPILL_ROWS / (s.G * s.C))] for s in by["serial"]
    ]
    if np.linalg.matrix_rank(design) < 4:
        raise ValueError(
            f"{len(by['serial'])} serial samples do not determine launch, weights, row and spill: "
            "time at least two group sizes, two capacities and one graph of more than "
            f"{SPILL_ROWS} rows"
        )

    def energy(mode: str) -> tuple[float, ...]:
        rows = [s for s in by[mode] if s.mj is not None and s not in OUTLIERS]
        return _relative([[s.ms, 1] for s in rows], [s.mj for s in rows])

    serial = Rates(*_relative(design, [s.ms for s in by["serial"]]), *energy("serial"))
    small = [s for s in by["parallel"] if s.G * s.C <= SPILL_ROWS]
    if not small:
        return {"serial": serial}
    overlap = _relative([_overlap_features(s.G, s.C) for s in small], [s.ms for s in small])
    return {"serial": serial, "parallel": Parallel(serial, overlap, *energy("parallel"))}


def relative_errors(rates: dict[str, Any], samples: Sequence[Sample], quantity: str) -> list[float]:
    """Of a fit, for the "latency" or the "energy" of samples, outliers of energy left out."""
    if quantity == "latency":
        return [rates[s.mode].graph_ms(s.G, s.C) / (s.G * s.C) / s.ms - 1 for s in samples]
    known = [s for s in samples if s.mj is not None and s not in OUTLIERS]
    return [rates[s.mode].graph_mj(s.G, s.C) / (s.G * s.C) / s.mj - 1 for s in known]


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
    """Least squares of (design·x − y)/y; nothing of nothing."""
    if not len(y):
        return (0.0, 0.0)
    scaled = np.asarray(design, dtype=float) / np.asarray(y, dtype=float)[:, None]
    return tuple(np.linalg.lstsq(scaled, np.ones(len(scaled)), rcond=None)[0].tolist())


def fit_cpu(rates: Rates, attention: float = ATTENTION_CPU) -> CPURates:
    """The CPU's parameters of the M2 Ultra, given the rates of its ANE.

    attention : of the CPU over the ANE; §5.3 does not say which of the two is the slower.
    """
    cpu_ffn, naive_ffn, _, _ = TABLE_4["expert FFN"]
    row = rates.row_ms * (FIGURE_7[0] * FIGURE_7[1]) ** 0.5
    watts = {
        name: [j / TABLE_6[name][0] for j in joules] for name, joules in TABLE_7.items()
    }  # all, CPU, ANE, comm.
    return CPURates(
        expert_ms=(cpu_ffn - ROUTED * row) / VISITS,
        row_ms=row,
        # what is gathered is written back: as many rows once more
        choice_ms=(TABLE_4["router"][3] + 2 * TABLE_4["gather"][3] + TABLE_4["padding"][3])
        / ROUTED,
        dispatch_ms=naive_ffn / VISITS - rates.graph_ms(1, WORST_CASE),
        attention_ratio=attention,
        busy_w=watts["cpu"][1],
        wait_w=watts["npumoe"][1],
        comm_w=sum(of_system[3] for of_system in watts.values()) / len(watts),
    )


def slowed(rates: Any, time: float) -> Any:
    """Rates of a chip that takes `time` times as long and draws so much less power; a launch takes
    what it takes, and a row's work stays."""
    factor = {"ms": time, "w": 1 / time}
    return type(rates)(
        **{
            name: value * (1 if name == "launch_ms" else factor.get(name.rpartition("_")[2], 1))
            for name, value in asdict(rates).items()
        }
    )


def figures(rates: Rates, cpu: CPURates) -> dict[str, float]:
    """Figures of a device card, by the names that `DeviceModel.of` reads."""
    both = (("ane", rates), ("cpu", cpu))
    return {f"{unit}_{name}": value for unit, of in both for name, value in asdict(of).items()}


def write_card(
    path: Path, name: str, found: dict[str, float], kind: str, source: str, keep: str = ""
) -> Path:
    """A device card with these figures; `keep` is text of a card that stays before them."""
    text = keep or f'name = "{name}"\n'
    for figure, value in found.items():
        unit = UNITS[figure.rpartition("_")[2]]
        text += f'\n[figures.{figure}]\nvalue = {value:.6g}\nunit = "{unit}"\nkind = "{kind}"\n'
        text += f'source = "{source}"\n'
    return write_text(path, text)


def main() -> None:
    """Put what is fitted to NPUMoE's tables into the cards of its two machines."""
    rates = fit()["serial"]
    both = rates, fit_cpu(rates)
    slower = load_device("m2-ultra")["npu_tops"] / load_device("m2-max")["npu_tops"]
    told = "notebooks/studies/ane_rates.py, from NPUMoE Tables 4 to 7, Fig. 7, §5.3"
    half = f"{told}; not fitted: half the rates and powers of m2-ultra, one of its two dies"
    for card, time, source in (("m2-ultra", 1.0, told), ("m2-max", slower, half)):
        path = Path(__file__).parents[2] / f"moelab/cards/devices/{card}.toml"
        keep = re.split(r"\n\[figures\.(?:ane|cpu)_", path.read_text(encoding="utf-8"))[0]
        found = figures(*(slowed(of, time) for of in both))
        print(write_card(path, card, found, "fitted", source, keep.rstrip() + "\n"))


if __name__ == "__main__":
    main()
