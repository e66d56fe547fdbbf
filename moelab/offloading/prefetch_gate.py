"""Prefetch throttling: predicted experts are read only where that gains more than it costs.

Source: Speculating Experts §5.1, eq. (1), for what there is to gain. Between two layers' reads the disk is idle for as
long as everything but experts takes; what is prefetched then and wanted is gained. What is not wanted costs only the
one read that is under way when the layer comes, for which the layer's own first read waits. So with precision p, idle
seconds a, n predictions and t seconds a read, prefetching pays if

    n·t ≤ a    or    p · a  ≥  (1 − p) · t/2

p, a and t are running means. Left out: processor time and memory bandwidth that needless reads take from computing.
"""

from __future__ import annotations

from collections.abc import Iterable

from moelab.cache.residency import Request, Residency
from moelab.specs import ExpertKey, State

KEEP = 0.9                  # of a running mean, when a new value comes
FIRST = 0.5                 # the precision assumed of a layer's predictions before any was seen


class PrefetchGate:
    """How good predictions were so far; one for an engine. `announced`: layer → experts that were predicted and are not
    resident, whether they were prefetched or not."""

    def __init__(self) -> None:
        self.announced: dict[int, set[int]] = {}
        self.precision: dict[int, float] = {}
        self.idle: float | None = None

    def pause(self, seconds: float) -> None:
        """The model spent so long on something else than experts."""
        self.idle = seconds if self.idle is None else KEEP * self.idle + (1 - KEEP) * seconds

    def worth(self, layer: int, experts: Iterable[int], read_s: float) -> bool:
        """Note that these are predicted for a layer, and say whether to prefetch them: always while the seconds that
        reading an expert takes, `read_s`, are not known and so 0."""
        self.announced[layer] = set(experts)
        p, idle = self.precision.get(layer, FIRST), read_s if self.idle is None else self.idle
        return len(self.announced[layer]) * read_s <= idle or p * idle >= (1 - p) * read_s / 2

    def requests(self, residency: Residency, layer: int, experts: Iterable[int], read_s: float) -> list[Request]:
        """What to prefetch of the experts announced for a layer: those that are not FULL, if it is worth it."""
        if not 0 <= layer < residency.L:
            return []
        keys = [ExpertKey(layer, expert) for expert in dict.fromkeys(experts) if 0 <= expert < residency.E]
        found = [Request(key, 1, state, State.MISSED) for key in keys
                 if (state := residency.state(key)) is not State.FULL]
        return found if found and self.worth(layer, [request.key.expert for request in found], read_s) else []

    def came(self, layer: int, experts: Iterable[int]) -> None:
        """A layer wants these experts: learn from what was predicted."""
        if guessed := self.announced.pop(layer, None):
            right = len(guessed.intersection(experts)) / len(guessed)
            self.precision[layer] = KEEP * self.precision.get(layer, FIRST) + (1 - KEEP) * right
