"""The prefetch theatre: its predictions, steps and stalls against naive loops."""

from statistics import fmean as mean

import pytest
import torch

pytest.importorskip("plotly")
pytest.importorskip("anywidget")
from moelab import open_model, record
from moelab.base.registry import make
from moelab.simulation.costs import Delays, Machine
from moelab.speculate.routers import route
from moelab.viz import views
from moelab.viz.views import stage as theatre
from moelab.viz.views.recorded import seconds_of
from tests.models import tiny
from tests.viz.conftest import a_run


def took(run):
    return mean(seconds_of(run))


STEPS = [
    [(layer, {(3 * n + layer + e) % 6: 1 for e in range(2)}) for layer in range(3)]
    for n in range(6)
]


def stage(predictions):
    found = a_run(STEPS, 6, 2, kept=4)
    machine = Machine(Delays(4e-3, 0, 0, 0, 1e-3, 0, e_bytes=1000), other=(3e-3, 0.0))
    losses = {("mine", 1): 5.0}
    return theatre.Stage(found, {("mine", 1): (predictions, 0.0)}, losses, machine)


TRUE = [{}] + [{layer: list(experts) for layer, experts in step if layer} for step in STEPS[1:]]
WRONG = [{}] + [
    {layer: [(e + 3) % 6 for e in experts] for layer, experts in step.items()} for step in TRUE[1:]
]


def test_right_predictions_hide_reads_and_wrong_ones_change_what_is_executed():
    right, wrong = stage(TRUE), stage(WRONG)
    assert right.steps("speculative", "mine", 1) == STEPS == wrong.steps("hint", "mine", 1)
    changed = wrong.steps("speculative", "mine", 1)
    for step, new, true in zip(STEPS[1:], changed[1:], WRONG[1:]):
        assert new[0] == step[0] and [(layer, list(experts)) for layer, experts in new[1:]] == list(
            true.items()
        )
    hint = right.scene("hint", "mine", 1, 0.25, 2)
    assert took(hint.simulation) < took(hint.none)
    seen = right.scene("speculative", "mine", 1, 0.25, 2)
    assert "the loss changes by +5.00 %" in theatre.words(seen)[0]
    assert right.bandwidth == pytest.approx(250e3)
    slow = right.scene("none", "mine", 1, 0.125, 2)
    assert took(slow.simulation) == took(slow.none) > took(hint.none)


def test_stalls_and_events_are_those_of_each_step():
    seen = stage(TRUE).scene("hint", "mine", 1, 0.25, 4)
    times = seconds_of(seen.simulation)
    assert len(seen.stalls) == len(times) == 5
    forwards = [forward for forward in seen.simulation.forwards if forward.phase == "decode"]
    for forward, stall, time in zip(forwards, seen.stalls, times):
        naive = 0.0
        for event in seen.simulation.events:
            if event.kind == "wait" and forward.start <= event.start and event.end <= forward.end:
                naive += event.end - event.start
        assert (
            stall == pytest.approx(naive) and time == forward.end - forward.start and stall <= time
        )
    for _title, events in seen.runs.items():
        assert events and min(e.start for e in events) <= min(e.end for e in events)
    assert "prefetch" in {event.kind for event in seen.runs["hint: mine, 1 ahead"]}
    assert "prefetch" not in {event.kind for event in seen.runs["none"]}
    assert len(theatre.rows(seen)) == 5 and len([*theatre.draw(seen)]) == 2


def test_predictions_are_what_the_next_router_says_token_by_token(tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "model", torch.bfloat16)
    with open_model(folder, memory="60%") as lm:
        trace = record(lm, [[5, 6, 7, 8]], 5, hidden=True, min_new_tokens=5)
        predictor = make("predictor", "router", lm)
        found, seconds = theatre.predict(trace, predictor, len(lm.moelab.forwards))
        assert len(found) == 5 and found[0] == {} and seconds > 0
        for step, told in enumerate(found[1:]):
            for layer, target in predictor.targets.items():
                ids, _ = route(target, trace.router_inputs[4 + step, layer][None])
                assert told[target.index] == ids[0].tolist()
        view = views.theatre(lm, prompt=[5, 6, 7, 8], tokens=5)
    assert view.data.stage.losses == {}  # no tokenizer, so no text to measure the loss on
    view.widget
    strip = view.pictures[1]
    view.set(way="speculative", bandwidth=view.values["bandwidth"] / 2)
    assert view.data.way == "speculative" and view.pictures[1] is strip
    with pytest.raises(ValueError, match="'none', 'hint', 'speculative'"):
        view.set(way="magic")
    path = view.data.simulation.to_perfetto(tmp_path / "trace.json")
    assert path.stat().st_size > 1000 and view.errors.outputs == ()
    assert "moelab view theatre" in view.command(
        **view.values
    ) and "way=speculative" in view.command(**view.values)


def test_a_click_selects_the_token():
    staged = stage(TRUE)
    view = theatre.view_of(staged)
    view.widget
    strip = view.pictures[1]
    strip._handle_custom_msg({"curve": 0, "point": 3, "data": "3: ' a'"}, [])
    assert view.values["token"] == 3 == view.data.token and view.errors.outputs == ()
