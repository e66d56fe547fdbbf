"""The prefetch theatre: a token's timeline without prefetching and with it, stalls by token, and
what it costs.

Source: Speculating Experts §5.1 (Fig. 2) and §8 (several layers ahead). One generation is recorded
with its hidden states; each predictor says from them what a later layer will choose, and the
simulator plays every way on these steps with the engine's own cache, queue and prefetch gate.
*Hint* runs the true experts, so its loss is the baseline's; *speculative* executes what was
predicted, and its loss is measured by running the model so, on other text. Left out: what executing
a prediction does to the routing of later layers, which is in the loss, but not in the timeline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from moelab.offloading.metrics import Forward
from moelab.progress import progress
from moelab.records import Rows
from moelab.simulation.costs import Machine
from moelab.simulation.simulator import (
    Prefetching,
    Simulation,
    flat,
    machine_of,
    ordered,
    simulate,
)
from moelab.specs import Event
from moelab.table import ms
from moelab.viz import theme
from moelab.viz.charts import EDGE, add_points, finish, gantt, hover, panels, pattern
from moelab.viz.figures import kind_of
from moelab.viz.plotly_json import Figure
from moelab.viz.views.base import View, menu, slider
from moelab.viz.views.command import command
from moelab.viz.views.recorded import Recorded, prompt_ids

WAYS = ("none", "hint", "speculative")
#: of the text on which the loss is measured
WINDOWS = 4
WINDOW = 96


@dataclass
class Stage:
    """One recorded generation and its predictions: plays every way of prefetching, once.

    ahead : experts that may be read ahead; with as much memory beside the cache.
    predictions : (predictor, distance) → for each forward pass, layer → experts, the likeliest
        first.
    seconds : (predictor, distance) → what one prediction takes here.
    losses : (predictor, distance) → nats a token when it is executed, and None → as the model is;
        {} without a tokenizer.
    """

    found: Recorded
    device: str | None
    ahead: int
    predictions: dict[tuple[str, int], list[dict[int, list[int]]]]
    seconds: dict[tuple[str, int], float]
    losses: dict[tuple[str, int] | None, float] = field(default_factory=dict)
    machine: Machine | None = None

    def __post_init__(self) -> None:
        self.settings = self.found.run.settings
        self.machine = self.machine or machine_of(self.found.run, self.device)
        self.delays = self.machine.delays
        self.forwards = [tuple(forward[2:]) for forward in self.found.run.forwards]
        self.warm = next(n for n, forward in enumerate(self.forwards) if forward[1] == "decode")
        self.played: dict[tuple[Any, ...], Simulation] = {}

    def play(
        self, way: str, predictor: str, distance: int, bandwidth: float, begin: bool = True
    ) -> Simulation | None:
        """The simulation of a setting, bandwidth in bytes/s, once; None if it was not seen and
        shall not `begin`."""
        setting = (way, bandwidth) if way == "none" else (way, predictor, distance, bandwidth)
        if begin and setting not in self.played:
            self.played[setting] = self._play(way, predictor, distance, bandwidth)
        return self.played.get(setting)

    @property
    def bandwidth(self) -> float:
        """Bytes/s at which the disk was measured to deliver experts, or a card says it does."""
        return (self.delays.e_bytes + self.delays.sm_bytes) / max(self.delays.miss_read, 1e-12)

    def steps(
        self, way: str, predictor: str, distance: int
    ) -> list[list[tuple[int, dict[int, int]]]]:
        """What is executed: the true experts or, speculating, those predicted where there is a
        prediction."""
        if way != "speculative":
            return self.found.run.steps
        return [
            [
                (layer, dict.fromkeys(predicted[layer], 1) if layer in predicted else experts)
                for layer, experts in step
            ]
            for step, predicted in zip(self.found.run.steps, self.predictions[predictor, distance])
        ]

    def recall(self, predictor: str, distance: int) -> float:
        """Share of the experts that are truly needed which had been predicted, where there is a
        prediction."""
        pairs = [
            (set(experts), set(predicted[layer]))
            for step, predicted in zip(self.found.run.steps, self.predictions[predictor, distance])
            for layer, experts in step
            if layer in predicted
        ]
        return sum(len(true & guessed) for true, guessed in pairs) / max(
            1, sum(len(true) for true, _ in pairs)
        )

    def _play(self, way: str, predictor: str, distance: int, bandwidth: float) -> Simulation:
        """The decode steps in simulated time; the prompt only fills the cache. Bandwidth in
        bytes/s."""
        reads = {"e_read": self.delays.e_bytes, "sm_read": self.delays.sm_bytes}
        delays = replace(self.delays, **{part: n / bandwidth for part, n in reads.items()})
        machine = replace(self.machine, delays=delays, workers=self.settings.workers)
        prefetching = None
        ahead = 0
        if way != "none":
            ahead = self.ahead
            machine = replace(machine, predict=self.seconds[predictor, distance])
            guessed = self.predictions[predictor, distance][self.warm :]
            prefetching = Prefetching([list(of.items()) for of in guessed], ahead, distance)
        steps = self.steps(way, predictor, distance)
        residency = deepcopy(self.found.before)
        for step in flat(steps[: self.warm]):
            residency.begin(*step)
        return simulate(
            steps[self.warm :],
            self.forwards[self.warm :],
            residency,
            machine,
            staging=self.settings.staging + ahead,
            order=ordered(self.settings.scheduler, machine),
            prefetching=prefetching,
        )

    def loss(self, way: str, predictor: str, distance: int) -> float | None:
        """Nats a token; None if nobody knows."""
        return self.losses.get((predictor, distance) if way == "speculative" else None)


@dataclass(frozen=True)
class Scene:
    """What is seen: one way of prefetching, and one decode step of it.

    runs : {title: events of this step}, without prefetching and so.
    stalls, took : [n], seconds of each decode step.
    beside : {way: (mean seconds of a decode step, change of the loss in per cent or None)}, of the
    ways that were seen."""

    way: str
    title: str
    token: int
    bandwidth: float
    runs: dict[str, list[Event]]
    stalls: list[float]
    took: list[float]
    beside: dict[str, tuple[float, float | None]]
    recall: float
    loss: float | None
    words: list[str]
    simulation: Simulation = field(repr=False)


def scene(
    stage: Stage, way: str, predictor: str, distance: int, bandwidth: float, token: int
) -> Scene:
    """The theatre's data: `bandwidth` in bytes/s, `token` counts decode steps from 0."""
    titles = {
        name: name if name == "none" else f"{name}: {predictor}, {distance} ahead" for name in WAYS
    }
    played = {
        name: run
        for name in WAYS
        if (run := stage.play(name, predictor, distance, bandwidth, begin=name in ("none", way)))
        is not None
    }
    base = stage.loss("none", predictor, distance)
    beside = {}
    for name, run in played.items():
        loss = stage.loss(name, predictor, distance)
        beside[name] = (
            fmean(map(_length, decode_steps(run))),
            loss and base and 100 * (loss / base - 1),
        )
    forwards = decode_steps(played[way])
    token = min(token, len(forwards) - 1)
    shown = {
        titles[name]: step_events(played[name].events, decode_steps(played[name])[token])
        for name in dict.fromkeys(["none", way])
    }
    waits = [event for event in played[way].events if event.kind == "wait"]
    stalls = [
        sum(event.end - event.start for event in waits if of.start <= event.start < of.end)
        for of in forwards
    ]
    return Scene(
        way,
        titles[way],
        token,
        bandwidth,
        shown,
        stalls,
        list(map(_length, forwards)),
        beside,
        stage.recall(predictor, distance),
        stage.loss(way, predictor, distance),
        stage.found.words(stage.found.new),
        played[way],
    )


def decode_steps(run: Simulation) -> list[Forward]:
    return [forward for forward in run.forwards if forward.phase == "decode"]


def _length(forward: Forward) -> float:
    return forward.end - forward.start


def step_events(events: Sequence[Event], forward: Forward) -> list[Event]:
    """What happens within a forward pass; a read that began before is cut, one that is read ahead
    is a "prefetch"."""
    inside = [event for event in events if event.start < forward.end and event.end > forward.start]
    return [
        event._replace(
            start=max(event.start, forward.start),
            end=min(event.end, forward.end),
            kind=kind_of(event, inside),
        )
        for event in inside
    ]


def draw(found: Scene) -> Iterator[Figure]:
    """The timelines of the chosen token; stalls by token, and the loss beside the time."""
    yield gantt(found.runs, "experts", "simulated")
    yield strip(found)


def strip(found: Scene) -> Figure:
    """Every token's time, its stall and the rest; and each way's change of the loss beside its
    TPOT."""
    figure, (left, right) = panels(["", ""], column_widths=[0.62, 0.38], horizontal_spacing=0.2)
    n = list(range(len(found.took)))
    labels = [f"{i}: {word!r}" for i, word in zip(n, found.words)]
    for name, values, colour, shape in (
        ("works", [a - b for a, b in zip(found.took, found.stalls)], theme.SKY, ""),
        ("waits", found.stalls, theme.VERMILLION, "x"),
    ):
        figure.add_bar(
            x=n,
            y=[1e3 * value for value in values],
            name=name,
            text=None,
            customdata=labels,
            marker={
                "color": colour,
                "pattern": pattern(shape, size=6),
                "line": {
                    "color": theme.BLACK,
                    "width": [3.0 if i == found.token else 0.5 for i in n],
                },
            },
            hovertemplate=hover("%{customdata}: %{y:.2f} ms", name),
            **left,
        )
    for i, name in enumerate(WAYS):
        seconds, loss = found.beside.get(name, (0.0, None))
        points = [] if loss is None else [(1e3 * seconds, loss)]
        add_points(figure, points, name, i, "%{x:.2f} ms, %{y:+.2f} %", **right)
    figure.update_xaxes(title="decode step (click one)", **left).update_yaxes(
        title="time (ms)", **left
    )
    figure.update_xaxes(title="TPOT (ms), simulated", rangemode="tozero", **right)
    figure.update_yaxes(title="loss (%), measured", rangemode="normal", **right)
    figure.add_hline(y=0, line=EDGE, **right)
    return finish(figure, legend="", barmode="stack", height=330)


def rows(found: Scene) -> Rows:
    """Every decode step of the way that is seen."""
    return [
        {
            "way": found.title,
            "bandwidth_bytes_per_s": found.bandwidth,
            "step": i,
            "seconds": took,
            "stall_s": stall,
            "kind": "simulated",
        }
        for i, (took, stall) in enumerate(zip(found.took, found.stalls))
    ]


def words(found: Scene) -> tuple[str, str]:
    none = found.beside["none"][0]
    here = found.beside[found.way]
    change = (
        ""
        if here[1] is None
        else f"; the loss changes by {here[1]:+.2f} % (measured)"
        if found.way == "speculative"
        else "; no bit of the output changes"
    )
    recall = "" if found.way == "none" else f", recall {found.recall:.0%}"
    return (
        f"{found.title}{recall}, the disk at {found.bandwidth / 1e6:.4g} MB/s: {ms(here[0])} "
        f"ms a token, of which {ms(fmean(found.stalls))} ms waiting; {ms(none)} ms without "
        f"prefetching (simulated){change}. Step {found.token} above; numbers in bars are "
        "experts.",
        "Two timelines, one below the other: disk, workers and compute as rows; with "
        "prefetching, reads of the next layer lie under the computing of this one and the "
        "waiting shrinks. Below, a bar a token, its waiting hatched; beside it, the change "
        "of the loss against the time.",
    )


def theatre(
    lm: Any,
    *,
    prompt: Any = None,
    tokens: int = 16,
    way: str = "hint",
    predictors: Sequence[str] = ("router", "previous"),
    distances: Sequence[int] = (1, 2),
    ingredients: Mapping[str, Any] | None = None,
    device: str | None = None,
    bandwidth: float | None = None,
) -> View:
    """The prefetch theatre.

        with moelab.open_model(memory="25%") as lm:
            view = views.theatre(lm)
        view                                            # needs the model no longer
        view.data.simulation.to_perfetto("hint.json")

    lm : a model that `moelab.open_model` has opened; where all its experts are in memory, give a
        device.
    prompt, tokens : what it generates.    way : "none", "hint" or "speculative", at first.
    predictors, distances : names of `moelab.names("predictor")`, and how many layers ahead they
        look.
    ingredients : what predictors need beside the model, such as vectors= or estimator=.
    device : a card on which it is played.
    bandwidth : of the disk at first, bytes/s; as measured if not given.

    Raises ValueError: a model without delays and no device; a predictor that lacks something.
    """
    return _view(
        stage(lm, prompt, tokens, predictors, distances, ingredients, device),
        way,
        predictors,
        distances,
        bandwidth,
    )


def _view(
    staged: Stage,
    way: str,
    predictors: Sequence[str],
    distances: Sequence[int],
    bandwidth: float | None,
) -> View:
    rate = bandwidth or staged.bandwidth

    def compute(way: str, predictor: str, distance: int, bandwidth: float, token: int) -> Scene:
        return scene(staged, way, predictor, distance, 1e6 * bandwidth, token)

    steps = sum(forward[1] == "decode" for forward in staged.forwards)
    controls = {
        "way": menu("prefetching", way, WAYS),
        "predictor": menu("predictor", predictors[0], list(predictors)),
        "distance": menu("distance (layers)", distances[0], list(distances)),
        "bandwidth": slider(
            "disk (MB/s)",
            rate / 1e6,
            min(rate, staged.bandwidth) / 2e7,
            max(rate, staged.bandwidth) / 1e5,
            log=True,
            beyond=1e9,
        ),
        "token": slider("decode step", min(1, steps - 1), 0, steps - 1, 1),
    }
    return View(
        "theatre", controls, compute, draw, rows, command("theatre", staged.found), words, _clicks
    )


def _clicks(view: View) -> list[Any]:
    """A click on a bar of the strip selects its token."""

    def clicked(what: Mapping[str, Any]) -> None:
        if what["curve"] < 2:
            view.guarded(lambda: view.set(token=what["point"]))

    view.pictures[1].on_click(clicked)
    return []


def stage(
    lm: Any,
    prompt: Any,
    tokens: int,
    predictors: Sequence[str],
    distances: Sequence[int],
    ingredients: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> Stage:
    """Record a generation, predict from it, and measure the loss of executing each prediction."""
    import torch

    from moelab.api import make_predictor
    from moelab.evaluation.scores import language_loss, text_windows
    from moelab.recording import record
    from moelab.speculate import Speculation

    session = lm.moelab
    ids = prompt_ids(lm, prompt)
    before = deepcopy(session.residency)
    first = len(session.forwards)
    trace = record(lm, [ids], tokens, hidden=True, batch_size=1, min_new_tokens=tokens)
    run = session.run.since(first)
    found = Recorded.of(lm, run, before, ids, trace.tokens[len(ids) :].tolist(), prompt, tokens)
    predictions = {}
    seconds = {}
    losses = {}
    windows = (
        text_windows(lm.tokenizer, "test", WINDOWS, WINDOW) if lm.tokenizer is not None else None
    )
    with torch.inference_mode():
        if windows is not None:
            losses[None] = float(language_loss(lm, windows).mean())
        for name in progress(list(predictors), "predicting", unit="predictor"):
            for distance in distances:
                made = make_predictor(lm, name, ahead=distance, **(ingredients or {}))
                predictions[name, distance], seconds[name, distance] = predict(trace, made)
                if windows is not None:
                    with Speculation(lm, made, "speculative", prefill=True):
                        losses[name, distance] = float(language_loss(lm, windows).mean())
    return Stage(
        found, device, run.settings.ahead or run.settings.spec.K, predictions, seconds, losses
    )


def predict(trace: Any, predictor: Any) -> tuple[list[dict[int, list[int]]], float]:
    """What a predictor says in each forward pass of a recorded prompt, and the median seconds of a
    prediction for one token: [{layer: experts}], nothing in prefill."""
    from moelab.evaluation.predictors import walk
    from moelab.trace import PREFILL

    found = []
    took = []
    for _, passes in walk(trace, token_by_token=True):
        predictor.begin()
        for one in passes:
            told: dict[int, list[int]] = {}
            for layer in one.layers:
                s, r, ids, weights = one.at(layer, predictor.device)
                predictor.observe(layer, ids, weights)
                if layer in predictor.targets and one.phase != PREFILL:
                    start = time.perf_counter()
                    prediction = predictor.predict(layer, s, r, ids, weights)
                    took.append(time.perf_counter() - start)
                    if prediction is not None:
                        experts = dict.fromkeys(prediction[0].T.reshape(-1).tolist())
                        told[predictor.targets[layer].index] = [
                            e for e in experts if e < predictor.spec.E
                        ]
            found.append(told)
    return found, median(took) if took else 0.0
