"""What was measured of a model on this machine: it is kept, and corrects later predictions.

A measurement is kept under this machine and the model's identity, with what had been predicted for
it. The ratios of the two correct the next predictions, by their geometric mean; how far they are
apart is the range that is left. Where fewer than two ways tell it, the range is that of the
simulator elsewhere."""

from __future__ import annotations

import json
import time
from contextlib import closing, suppress
from dataclasses import replace
from statistics import geometric_mean, median

from moelab.advice.machine import machine
from moelab.advice.ways import TIMED, Way
from moelab.base.files import cache_folder
from moelab.base.journal import Journal
from moelab.base.records import Record
from moelab.evaluation.intervals import typical

#: the least uncertainty of a corrected prediction, as this much differs between two runs of one way
LEAST = 0.05
#: measured over simulated TPOT where nothing corrects it, of nine tenths of the settings of `moelab
#: bench advise` (results/bench/advise.json)
SIMULATED = 0.92, 1.22


class Kept:
    """What was measured of a model on this machine, in a journal that all models share.

    records : of this model, as dictionaries: "settings" of the `Way`, "batch", "predicted" (by
        simulation, before any correction) and "tpot" (s), "loss" (relative, [mean, error]; None if it was not asked), "when".
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity.partition("-")[0]
        self.path = cache_folder("advice") / "measured.journal"
        mine = machine(), self.identity
        self.records = [of for of in self._write([]) if (of["machine"], of["model"]) == mine]

    def add(self, way: Way, batch: int, ran: Record, loss: list[float] | None = None) -> None:
        """Keep what `verify.run` reports of a simulated way, on the disk at once."""
        record = {
            "machine": machine(),
            "model": self.identity,
            "when": time.strftime("%Y-%m-%d %H:%M"),
            "settings": way.settings,
            "batch": batch,
            "predicted": way.tpot,
            "tpot": typical(ran["tpot"][-TIMED:]),
            "loss": loss,
        }
        self._write([record])
        self.records.append(record)

    def _write(self, records: list[Record]) -> list[Record]:
        """Append to the journal, which another process may hold for a moment; returns what was in
        it."""
        for _ in range(50):
            with suppress(FileExistsError), closing(Journal(self.path)) as journal:
                journal.append(records)
                return journal.lines
            time.sleep(0.1)
        raise FileExistsError(f"another process holds {self.path}; wait for it")

    def loss(self, form: str) -> float | None:
        """Relative language loss of a form of few bits, last measured: the mean and one standard
        error."""
        found = [of["loss"] for of in self.records if of["settings"]["form"] == form and of["loss"]]
        return max(sum(found[-1]), 0.0) if found else None

    def ratios(self) -> list[float]:
        """Measured over predicted TPOT, of the last measurement of each way."""
        latest = {json.dumps([of["settings"], of["batch"]]): of for of in self.records}
        return [of["tpot"] / of["predicted"] for of in latest.values() if of["predicted"]]

    def correction(self) -> tuple[float, tuple[float, float]]:
        """(factor on a predicted TPOT, the least and the most of measured over so corrected)."""
        if not (ratios := self.ratios()):
            return 1.0, SIMULATED
        factor = geometric_mean(ratios)
        apart = max(max(abs(ratio / factor - 1) for ratio in ratios), LEAST)
        return factor, (1 / (1 + apart), 1 + apart) if len(ratios) > 1 else SIMULATED

    def corrected(self, way: Way, batch: int) -> Way:
        """A simulated way as it was measured, if it was, or else corrected by what was."""
        asked = way.settings, batch
        tpot = [of["tpot"] for of in self.records if (of["settings"], of["batch"]) == asked]
        if tpot:
            middle = median(tpot)
            ends = min(*tpot, middle / (1 + LEAST)), max(*tpot, middle * (1 + LEAST))
            return replace(way, tpot=middle, kind="measured", predicted=way.tpot, between=ends)
        factor, ends = self.correction()
        least, most = way.between or (way.tpot, way.tpot)
        between = least * factor * ends[0], most * factor * ends[1]
        return replace(way, tpot=way.tpot * factor, between=between)
