"""The token scrubber: a text with a player, and what every expert of every layer is doing at each
of its tokens.

All states are found once, from the steps, the residency's decisions and the timeline of a run; the
player moves through them in the browser, so it needs no kernel, and a saved page plays as well."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from plotly.graph_objects import Figure

from moelab.base.files import beside
from moelab.base.records import Rows
from moelab.base.specs import Event, State
from moelab.offloading.metrics import Forward
from moelab.viz.charts import EDGE, add_points, finish, whole_steps
from moelab.viz.views import page
from moelab.viz.views.base import View, slider
from moelab.viz.views.command import command
from moelab.viz.views.recorded import Recorded, recorded

#: what an expert does in a forward pass: state → (what it is, colour, symbol); a number in
#: `Scrub.states` is its place. The player knows the symbols by plotly's names.
STATES = beside(__file__)
ABSENT, RESIDENT, HIT, AHEAD, UNUSED, MISSED = range(6)


class Scrub(NamedTuple):
    """states : uint8 [F, L, E], places in `STATES`, of F forward passes. words : the text of each
        pass, its prompt or
    one token.    seconds : [F], measured; [] of a trace."""

    name: str
    states: np.ndarray
    words: list[str]
    seconds: list[float]

    def counts(self) -> np.ndarray:
        """How many experts are in each state, int64 [F, 6]."""
        return (self.states[..., None] == np.arange(len(STATES))).sum((1, 2))


def scrub(found: Recorded) -> Scrub:
    """The states of a recorded run: resident and missed by the residency's decisions, read ahead by
    the timeline."""
    run = found.run
    residency = deepcopy(found.before)
    spec = run.settings.spec
    events = list(run.timeline)
    states = np.zeros((len(run.forwards), spec.L, spec.E), np.uint8)
    ahead = read_ahead(events, run.forwards)
    if not run.settings.experts_bytes:  # a model in memory: everything is there
        for layer in range(spec.L):
            residency.begin(layer, dict.fromkeys(range(spec.E), 1))
    for forward, (here, steps) in enumerate(zip(states, run.steps)):
        at = ahead[forward]
        residency.begin_forward(run.forwards[forward].phase)
        for state in (State.FULL, State.COMPRESSED, State.SM, State.E):
            for key in residency.resident(state):
                here[tuple(key)] = RESIDENT
        for key in at:
            here[key] = UNUSED
        for step in steps:
            for request in residency.begin(*step).requests:
                missed = AHEAD if request.key in at else MISSED
                here[request.key] = HIT if request.state is State.FULL else missed
    words = [f"pass {i} " for i in range(len(run.forwards))]
    if found.ids:
        words = ["".join(found.words(found.ids)), *found.words(found.new)][: len(words)]
    seconds = [] if found.trace else [one.seconds for one in run.forwards]
    return Scrub(found.name, states, words, seconds)


def read_ahead(
    events: Sequence[Event], forwards: Sequence[Forward]
) -> dict[int, set[tuple[int, int]]]:
    """Forward pass → (layer, expert) of the reads for it that began before that layer had been
    routed in it.

    A layer is routed when its "other" ends. What is read after its experts have run is for the next
    pass."""
    begins = [forward.start for forward in forwards]
    routed: dict[int, list[tuple[float, int]]] = defaultdict(list)  # layer → when, in which pass
    computed: dict[tuple[int, int], float] = {}  # pass, layer → when its experts had run
    for event in sorted(events, key=lambda event: event.start):
        forward = bisect_right(begins, event.start) - 1
        if event.kind == "other" and event.layer >= 0 <= forward:
            routed[event.layer].append((event.end, forward))
        elif event.kind == "expert":
            computed[forward, event.layer] = event.end
    found: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for event in events:
        if not event.kind.startswith("read"):
            continue
        passes = routed[event.layer]
        after = bisect_right(passes, (event.start, len(forwards)))
        demanded = after and event.start < computed.get((passes[after - 1][1], event.layer), 0.0)
        if not demanded and after < len(passes):
            found[passes[after][1]].add((event.layer, event.expert))
    return found


def draw(found: Scrub, token: int) -> Figure:
    """The grid at one pass: what readers see where nothing can be played."""
    states = found.states[token]
    figure = Figure()
    for place, (what, colour, symbol) in enumerate(STATES.values()):
        layers, experts = np.nonzero(states == place)
        size = 8 if place > RESIDENT else 5
        look = {"symbol": symbol, "size": size, "color": colour, "line": EDGE | {"width": 0.5}}
        if symbol:
            points = [*zip(experts, layers)]
            add_points(figure, points, what, 0, "layer %{y}, expert %{x}", marker=look)
    figure.update_yaxes(range=[len(states) - 0.4, -0.6], dtick=whole_steps(len(states)))
    height = 120 + 26 * len(states)
    return finish(figure, "expert", "MoE layer", legend=f"step {token}", height=height)


def rows(found: Scrub) -> Rows:
    """A row a forward pass: the experts in each state."""
    return [
        {"pass": i, "text": text, "seconds": seconds} | dict(zip(STATES, counts))
        for i, (text, seconds, counts) in enumerate(
            zip_longest(found.words, found.seconds, found.counts().tolist())
        )
    ]


def words(found: Scrub) -> tuple[str, str]:
    total = found.counts()[1:].sum(0)
    routed = max(1, int(total[[HIT, AHEAD, MISSED]].sum()))
    return (
        f"{found.name}, {len(found.words)} forward passes: of the experts routed after the "
        f"prompt, {total[HIT] / routed:.0%} were in memory, {total[AHEAD] / routed:.0%} "
        f"prefetched in time and {total[MISSED] / routed:.0%} missed; {total[UNUSED]} "
        f"prefetches were not used (exact{'; times measured' * bool(found.seconds)}). Space plays, the "
        "arrow keys step.",
        "A grid, a row a layer and a column an expert: grey squares are in memory, green "
        "circles routed and there, blue diamonds prefetched in time, orange triangles "
        "prefetched and not used, red crosses missed.",
    )


class Scrubber(View):
    """A `View` whose picture plays by itself."""

    controls_shown = False

    def _pictures(self) -> list[Any]:
        from moelab.viz.views.widgets import Player

        player = Player(data=content(self.data[0]), token=self.values["token"])
        player.observe(lambda change: self.values.update(token=change["new"]), "token")
        return [player]

    def _show(self, i: int, figure: Figure) -> None:
        self.pictures[0].token = self.values["token"]

    def html(self) -> str:
        return page.whole(self, {"data": content(self.data[0]), "token": self.values["token"]})


def content(found: Scrub) -> dict[str, Any]:
    """What the player is given: plain JSON. A pass is told by what differs from what the one before
    leaves in memory."""
    left = np.zeros_like(found.states)
    left[1:] = np.minimum(found.states[:-1], RESIDENT)
    places = np.flatnonzero(found.states != left)
    return {
        "shape": found.states.shape,
        "gaps": np.diff(places, prepend=-1).tolist(),
        "changes": "".join(map(str, found.states.flat[places])),
        "words": found.words,
        "ms": [1e3 * seconds for seconds in found.seconds],
        "looks": [*STATES.values()],
    }


def scrubber(source: Any, prompt: Any = None, tokens: int | None = None, **kept: Any) -> Scrubber:
    """The token scrubber.

        with moelab.open_model(memory="50%", prefetch="router") as lm:
            view = views.scrubber(lm)
        view                                            # needs the model no longer

    source, prompt, tokens, kept : see `moelab.viz.views.recorded.recorded`; a run must have begun
        with the cache as it is opened.

    Raises ValueError: a run of fewer than two decode steps.
    """
    found = recorded(source, prompt, tokens, **kept)
    scrubbed = scrub(found)
    return Scrubber(
        "scrubber",
        {"token": slider("forward pass", 1, 0, len(scrubbed.words) - 1)},
        lambda token: (scrubbed, token),
        lambda data: [draw(*data)],
        lambda data: rows(data[0]),
        command("scrubber", found),
        lambda data: words(data[0]),
    )
