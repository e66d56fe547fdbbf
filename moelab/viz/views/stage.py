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
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean, median
from typing import Any, NamedTuple

from plotly.graph_objects import Figure

from moelab.advice.machine import here
from moelab.base.progress import progress
from moelab.base.records import Rows
from moelab.base.specs import Event
from moelab.base.table import ms
from moelab.simulation.costs import Machine
from moelab.simulation.simulator import Prefetching, Simulation, machine_of
from moelab.simulation.traced import GUESSES, guesses
from moelab.trace import PREFILL, RoutingTrace
from moelab.viz import theme
from moelab.viz.charts import finish, gantt, hover, pattern
from moelab.viz.figures import kind_of
from moelab.viz.views.base import View, menu, slider
from moelab.viz.views.command import command
from moelab.viz.views.recorded import (
    TOKENS,
    Recorded,
    decode_steps,
    recorded,
    replay,
    seconds_of,
)

WAYS = ("none", "hint", "speculative")
#: what predicts from a model, and how many layers ahead
PREDICTORS, DISTANCES = ("router", "previous"), (1, 2)
#: of the text on which the loss is measured
WINDOWS = 4
WINDOW = 96
Predicted = list[dict[int, list[int]]]


@dataclass(eq=False)
class Stage:
    """One recorded generation and its predictions: plays every way of prefetching, once.

    predictions : (predictor, distance) → (for each forward pass, layer → experts, the likeliest
        first; seconds of a prediction).
    losses : (predictor, distance) → by how many per cent the loss changes when it is executed; {}
        without a tokenizer.
    """

    found: Recorded
    predictions: Mapping[tuple[str, int], tuple[Predicted, float]]
    losses: Mapping[tuple[str, int], float]
    machine: Machine

    def __post_init__(self) -> None:
        self.run, self.settings = self.found.run, self.found.run.settings
        phases = [forward.phase for forward in self.run.forwards]
        self.warm = phases.index("decode")
        self.last = phases.count("decode") - 1
        self.play = cache(self._play)

    @property
    def bandwidth(self) -> float:
        """Bytes/s at which the disk was measured to deliver experts."""
        delays = self.machine.delays
        return (delays.e_bytes + delays.sm_bytes) / max(delays.miss_read, 1e-12)

    def steps(self, way: str, predictor: str, distance: int) -> Any:
        """What is executed: the true experts or, speculating, those predicted where there is a
        prediction."""
        if way != "speculative":
            return self.run.steps
        return [
            [
                (layer, dict.fromkeys(predicted[layer], 1) if layer in predicted else experts)
                for layer, experts in step
            ]
            for step, predicted in zip(self.run.steps, self.predictions[predictor, distance][0])
        ]

    def _play(self, way: str, predictor: str, distance: int, bandwidth: float) -> Simulation:
        """The decode steps in simulated time, bandwidth in bytes/s; the prompt only fills the
        cache. As much memory as may be read ahead lies beside the cache."""
        delays = self.machine.delays
        reads = {"e_read": delays.e_bytes, "sm_read": delays.sm_bytes}
        delays = replace(delays, **{part: n / bandwidth for part, n in reads.items()})
        machine = replace(self.machine, delays=delays)
        prefetching, ahead = None, 0
        if way != "none":
            ahead = self.settings.ahead or self.settings.spec.K
            guessed, seconds = self.predictions[predictor, distance]
            machine = replace(machine, predict=seconds)
            guessed = [[*of.items()] for of in guessed[self.warm :]]
            prefetching = Prefetching(guessed, ahead, distance)
        return replay(
            self.found,
            deepcopy(self.found.before),
            self.warm,
            machine,
            steps=self.steps(way, predictor, distance),
            staging=self.settings.staging + ahead,
            prefetching=prefetching,
        )

    def scene(self, way: str, predictor: str, distance: int, bandwidth: float, token: int) -> Scene:
        """The theatre's data: `bandwidth` in MB/s, `token` counts decode steps from 0."""
        of = predictor, distance
        run, none = (self.play(name, *of, 1e6 * bandwidth) for name in (way, "none"))
        return Scene(self, way, of, 1e6 * bandwidth, token, run, none)


class Scene(NamedTuple):
    """What is seen: one way of prefetching, by a predictor at a distance, and one decode step of
    it; the simulation, and that without prefetching. bandwidth : of the disk, bytes/s."""

    stage: Stage
    way: str
    of: tuple[str, int]
    bandwidth: float
    token: int
    simulation: Simulation
    none: Simulation

    @property
    def title(self) -> str:
        predictor, distance = self.of
        return "none" if self.way == "none" else f"{self.way}: {predictor}, {distance} ahead"

    @property
    def runs(self) -> dict[str, list[Event]]:
        """The events of this step, without prefetching and so; a read that began before is cut, one
        that is read ahead is a "prefetch"."""
        found = {}
        for name, done in {"none": self.none, self.title: self.simulation}.items():
            of = decode_steps(done)[self.token]
            inside = [e for e in done.events if e.start < of.end and e.end > of.start]
            found[name] = [
                e._replace(
                    start=max(e.start, of.start), end=min(e.end, of.end), kind=kind_of(e, inside)
                )
                for e in inside
            ]
        return found

    @property
    def stalls(self) -> list[float]:
        """Seconds that each decode step waits."""
        waits = [event for event in self.simulation.events if event.kind == "wait"]
        return [
            sum(event.seconds for event in waits if of.start <= event.start < of.end)
            for of in decode_steps(self.simulation)
        ]


def draw(found: Scene) -> Iterator[Figure]:
    """The timelines of the chosen token; stalls by token."""
    yield gantt(found.runs, "experts", "simulated")
    yield strip(found)


def strip(found: Scene) -> Figure:
    """Every token's time: its stall and the rest."""
    took, stalls = seconds_of(found.simulation), found.stalls
    texts = found.stage.found.words(found.stage.found.new or range(len(took)))[: len(took)]
    width = [3.0 if i == found.token else 0.5 for i in range(len(took))]
    works = [a - b for a, b in zip(took, stalls)]
    figure = Figure()
    for name, values, colour, shape in (
        ("works", works, theme.SKY, ""),
        ("waits", stalls, theme.VERMILLION, "x"),
    ):
        figure.add_bar(
            x=[*range(len(values))],
            y=[1e3 * value for value in values],
            name=name,
            customdata=[f"{i}: {text!r}" for i, text in enumerate(texts)],
            marker={
                "color": colour,
                "pattern": pattern(shape, size=6),
                "line": {"color": theme.BLACK, "width": width},
            },
            hovertemplate=hover("%{customdata}: %{y:.2f} ms", name),
        )
    legend = {"legend": "simulated", "barmode": "stack", "height": 280}
    return finish(figure, "decode step", "time (ms)", **legend)


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
        for i, (took, stall) in enumerate(zip(seconds_of(found.simulation), found.stalls))
    ]


def words(found: Scene) -> tuple[str, str]:
    change = "" if found.way == "none" else "; no bit of the output changes"
    if found.way == "speculative":
        loss = found.stage.losses.get(found.of)
        change = "" if loss is None else f"; the loss changes by {loss:+.2f} % (measured)"
    took, none = (fmean(seconds_of(run)) for run in (found.simulation, found.none))
    return (
        f"{found.stage.found.name}, {found.title}{change}. Disk: {found.bandwidth / 1e6:.4g} MB/s. {ms(took)} ms a token, of "
        f"which {ms(fmean(found.stalls))} ms waiting; {ms(none)} ms without "
        f"prefetching (simulated). Step {found.token} is shown; a click on a bar shows another. "
        "Numbers in the timelines are experts.",
        "Two timelines, one below the other: disk, workers and compute as rows; with "
        "prefetching, reads of the next layer lie under the computing of this one and the "
        "waiting shrinks. Below, a bar a token, its waiting hatched.",
    )


def theatre(
    source: Any,
    prompt: Any = None,
    tokens: int | None = None,
    **kept: Any,
) -> View:
    """The prefetch theatre.

        with moelab.open_model(memory="25%") as lm:
            view = views.theatre(lm)
        view                                            # needs the model no longer
        view.data.simulation.to_perfetto("hint.json")

    source : a model that `moelab.open_model` has opened within some memory; or a trace, whose times
        are then those of this machine.
    prompt, tokens, kept : see `moelab.viz.views.recorded.recorded`.

    Raises ValueError: a model without delays.
    """
    if isinstance(source, RoutingTrace):
        found = recorded(source, prompt, tokens, **kept)
        every = product(GUESSES, DISTANCES)  # they predict in no time
        guessed = {of: (guesses(found.trace, *of), 0.0) for of in every}
        return view_of(Stage(found, guessed, {}, machine_of(found.run, here())))
    return view_of(stage(source, prompt, tokens or TOKENS))


def view_of(staged: Stage) -> View:
    """The view of a recorded stage."""
    rate = staged.bandwidth / 1e6
    predictors, distances = map(list, map(dict.fromkeys, zip(*staged.predictions)))

    controls = {
        "way": menu("prefetching", "hint", WAYS),
        "predictor": menu("predictor", predictors[0], predictors),
        "distance": menu("distance (layers)", distances[0], distances),
        "bandwidth": slider("disk (MB/s)", rate, rate / 20, rate * 10, log=True),
        "token": slider("decode step", min(1, staged.last), 0, staged.last),
    }
    said = command("theatre", staged.found)
    return Theatre("theatre", controls, staged.scene, draw, rows, said, words, ("way", "token"))


class Theatre(View):
    """A view in which a click on a bar of the strip selects its token."""

    def _pictures(self) -> list[Any]:
        pictures = super()._pictures()
        pictures[1].on_click(lambda what: self.guarded(lambda: self.set(token=what["point"])))
        return pictures


def stage(lm: Any, prompt: Any, tokens: int) -> Stage:
    """Record a generation, predict from it, and measure the loss of executing each prediction."""
    import torch

    from moelab.api import make_predictor
    from moelab.evaluation.scores import language_loss, text_windows
    from moelab.recording import record
    from moelab.speculate import Speculation

    traces = []

    def generate(ids: list[int]) -> list[int]:
        how = {"hidden": True, "batch_size": 1, "min_new_tokens": tokens}
        traces.append(record(lm, [ids], tokens, **how))
        return traces[0].tokens[len(ids) :].tolist()

    found = Recorded.of(lm, prompt, tokens, generate)
    predictions = {}
    losses = {}
    text = lm.tokenizer and text_windows(lm.tokenizer, "test", WINDOWS, WINDOW)
    with torch.inference_mode():
        base = None if text is None else language_loss(lm, text).mean()
        for name in progress(PREDICTORS, "predicting", unit="predictor"):
            for distance in DISTANCES:
                made = make_predictor(lm, name, ahead=distance)
                predictions[name, distance] = predict(traces[0], made, len(found.run.forwards))
                if text is not None:
                    with Speculation(lm, made, "speculative", prefill=True):
                        changed = language_loss(lm, text).mean()
                    losses[name, distance] = 100 * float(changed / base - 1)
    return Stage(found, predictions, losses, machine_of(found.run))


def predict(trace: Any, predictor: Any, forwards: int) -> tuple[Predicted, float]:
    """What a predictor says in each forward pass of a recorded prompt, and the median seconds of a
    prediction for one token: [{layer: experts}], nothing in prefill."""
    columns = trace.router_inputs, trace.residuals, trace.ids.long(), trace.weights
    passed = (trace.ids != predictor.spec.E).any(-1)  # [T, L], as encoders' tokens pass no decoder
    prompt = trace.phase == PREFILL
    found: Predicted = []
    took = []
    predictor.begin()
    for rows in (prompt.nonzero()[:, 0], *(~prompt).nonzero()):
        told: dict[int, list[int]] = {}
        for layer in passed[rows].any(0).nonzero().flatten().tolist():
            mine = rows[passed[rows, layer]]
            s, r, ids, weights = (column[mine, layer].to(predictor.device) for column in columns)
            predictor.observe(layer, ids, weights)
            if layer in predictor.targets and found:
                start = time.perf_counter()
                prediction = predictor.predict(layer, s, r, ids, weights)
                took.append(time.perf_counter() - start)
                if prediction is not None:
                    experts = dict.fromkeys(prediction[0].flatten().tolist())
                    there = predictor.targets[layer].index
                    told[there] = [e for e in experts if e < predictor.spec.E]
        found.append(told)
    return [{}] * (forwards - len(found)) + found, median(took) if took else 0.0
