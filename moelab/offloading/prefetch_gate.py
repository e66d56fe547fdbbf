"""When a guess is worth a read: fetching ahead holds back where it would cost more than it gains.

Source: Speculating Experts §5.1, eq. (1), for what there is to gain; beyond it, what there is to lose. Between two
layers' reads the disk is idle for as long as everything but experts takes. What is fetched then and wanted is gained.
What is fetched then and not wanted costs nothing, but for the one read that is under way when the layer comes, if
there are more guesses than can be read: the layer's own first read waits for it. So with precision p, idle seconds a,
n guesses and t seconds a read, it pays if

    n·t ≤ a    or    p · a  ≥  (1 − p) · t/2

On a saturated disk a is small beside t, and only good guesses pass. p, a and t are running means of what happened here.
Left out: the processor time and memory bandwidth that needless reads take from computing.
"""

from __future__ import annotations

from collections.abc import Iterable

from moelab.cache.residency import Request, Residency
from moelab.specs import ExpertKey, State

KEEP = 0.9                  # of a running mean, when a new value comes
FIRST = 0.5                 # the precision that a layer's guesses are trusted to have before any was seen


class PrefetchGate:
    """Remembers how good guesses were; one for an engine. `announced`: layer → experts that were guessed and are not
    resident, whether they were fetched or not."""

    def __init__(self) -> None:
        self.announced: dict[int, set[int]] = {}
        self.precision: dict[int, float] = {}
        self.idle: float | None = None

    def pause(self, seconds: float) -> None:
        """So long the model was busy with something else than experts."""
        self.idle = seconds if self.idle is None else KEEP * self.idle + (1 - KEEP) * seconds

    def worth(self, layer: int, experts: Iterable[int], read_s: float) -> bool:
        """Note that these are guessed for a layer, and say whether to fetch them.

        read_s : seconds that reading an expert takes; 0 if that is not known yet, and then everything is worth it.
        """
        self.announced[layer] = set(experts)
        p, idle = self.precision.get(layer, FIRST), read_s if self.idle is None else self.idle
        return len(self.announced[layer]) * read_s <= idle or p * idle >= (1 - p) * read_s / 2

    def requests(self, residency: Residency, layer: int, experts: Iterable[int], read_s: float) -> list[Request]:
        """What to fetch of the experts that are announced for a layer: those not whole in memory, if it is worth it."""
        if not 0 <= layer < residency.L:
            return []
        keys = [ExpertKey(layer, expert) for expert in dict.fromkeys(experts) if 0 <= expert < residency.E]
        found = [Request(key, 1, state, State.MISSED) for key in keys
                 if (state := residency.state(key)) is not State.FULL]
        return found if found and self.worth(layer, [request.key.expert for request in found], read_s) else []

    def came(self, layer: int, experts: Iterable[int]) -> None:
        """A layer wants these experts: learn from what was guessed."""
        guessed = self.announced.pop(layer, None)
        if guessed:
            right = len(guessed.intersection(experts)) / len(guessed)
            self.precision[layer] = KEEP * self.precision.get(layer, FIRST) + (1 - KEEP) * right
