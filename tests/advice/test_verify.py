"""Ways for real: on tiny models in this process, beside what the simulator counts; and what is kept
of them."""

import math
from dataclasses import replace
from statistics import geometric_mean
from types import SimpleNamespace

import pytest

from moelab import advise, open_model
from moelab.advice import sample, space, verify
from moelab.advice.kept import SIMULATED, Kept
from moelab.advice.model import AS_IS, Model, find_model
from moelab.advice.question import Question
from moelab.advice.verify import run
from moelab.advice.ways import Way
from moelab.base.specs import MoESpec
from moelab.simulation.costs import Delays, Machine
from tests.models import tiny

SPEC = MoESpec("m", "m", 2, (0, 1), 8, 2, H=64, I=32)
MODEL = Model("m", SPEC, 0, "given", folder="m")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "cache"))


def way(form=AS_IS, tpot=1.0, loss=0.0, budget=50, **how):
    return Way(form, loss, 10_000, budget, 20_000, 0.5, tpot, 2.0, kind="simulated", **how)


def record(kept, one, tpot, loss=None):
    kept.add(one, 1, {"tpot": [tpot]}, loss)


def test_what_was_measured_corrects_the_rest_and_says_so():
    kept = Kept("abc")
    assert kept.correction() == (1.0, SIMULATED)
    least, most = kept.corrected(way(), 1).between
    assert (least, most) == SIMULATED and kept.corrected(way(), 1).tpot == way().tpot
    record(kept, way(), 1.5)
    other = kept.corrected(way("bf12", 2.0), 1)
    assert other.tpot == pytest.approx(3.0) and other.kind == "simulated"
    assert kept.correction() == (
        pytest.approx(1.5),
        SIMULATED,
    )  # one tells not how far others are off
    record(kept, way("bf12", 2.0), 2.4)
    again = Kept("abc-int4")  # a rounded copy is the same model
    mean = geometric_mean([1.5, 1.2])
    factor, (least, most) = again.correction()
    assert (factor, most) == pytest.approx((mean, 1.5 / mean)) and least == 1 / most
    assert again.records == kept.records
    known = again.corrected(way(), 1)
    assert (known.tpot, known.kind, known.predicted) == (1.5, "measured", 1.0)
    assert again.corrected(way(), 2).kind == "simulated"  # a batch of two is another thing
    assert Kept("def").correction() == (1.0, SIMULATED)


def test_the_loss_of_a_form_is_the_last_that_was_measured():
    kept = Kept("abc")
    record(kept, way("int4"), 1.0, loss=[0.05, 0.01])
    record(kept, way("int4", budget=60), 1.0, loss=[0.02, 0.005])
    record(kept, way("int8"), 1.0, loss=[-0.01, 0.005])
    losses = [kept.loss(form) for form in ("int4", "int8", "fp8")]
    assert losses == [pytest.approx(0.025), 0.0, None]


@pytest.fixture
def told(monkeypatch):
    """What `fresh` was asked for; its third answer takes all time, its fourth is Ctrl-C."""
    asked, clock = [], [0.0]

    def fake(source, options, memory, **how):
        asked.append(int(options["memory"].removesuffix("kB")))
        clock[0] += 1.1 * verify.SECONDS * (len(asked) == 3 and source == "slow")
        if len(asked) == 4:
            raise KeyboardInterrupt
        if asked[-1] == 7:
            raise RuntimeError("no room")
        return {"loss": None, "tpot": [9.0]}

    monkeypatch.setattr(verify, "fresh", fake)
    monkeypatch.setattr(verify, "stored", lambda model, form, seconds: form)
    monkeypatch.setattr(verify.time, "monotonic", lambda: clock[0])
    return asked


@pytest.mark.parametrize(
    "form, runs, end", [(AS_IS, [5, 7, 6, 5], "stopped"), ("slow", [5, 7, 6], "goes on")]
)
def test_ways_take_turns_and_what_there_is_stays(told, form, runs, end):
    """No run begins after the time; Ctrl-C ends all."""
    kept = Kept("abc")
    ways = [way(form, budget=5_000), way(form, budget=7_000, cache="lru"), way(form, budget=6_000)]
    asked = Question(MODEL, None, 1, 16, 1, 0.0, False)
    said = verify.verify(asked, ways, kept)
    kept = [record["settings"]["budget"] for record in Kept("abc").records]
    assert told == runs and kept == [5_000, 6_000]
    assert any("no room" in one for one in said) and any(end in one for one in said)


def test_a_loss_is_relative_to_the_model_as_it_is():
    assert verify.relative([1.0, 2.0, 3.0], [1.1, 2.2, 3.3]) == pytest.approx([0.1, 0])


def test_a_model_is_run_on_the_tokens_that_are_asked_for(tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "model")
    found = run(str(folder), {"memory": "50%"}, batch=2)
    spec = find_model(folder).spec
    decoded = [[2, "decode"]] * (verify.WARM + verify.TIMED)
    assert found["forwards"] == [[2 * verify.PROMPT, "prefill"], *decoded]
    assert len(found["tpot"]) == len(decoded) and all(seconds > 0 for seconds in found["tpot"])
    for (tokens, _), step in zip(found["forwards"], found["steps"]):
        assert [layer for layer, _ in step] == list(range(spec.L))
        assert all(sum(n for _, n in experts) == tokens * spec.K for _, experts in step)
    assert way(budget=10_000).options(None) == {"executor": "fast"}
    assert way(budget=10_000).options("bf12") == {"executor": "fast", "memory": "100%"}
    assert way(prefetch="router").options(None)["prefetch"] == "router"


def test_a_prompt_asks_for_each_expert_once(tmp_path):
    """However long it is, and however few of them fit: so the first token waits for each once."""
    import torch

    folder = tiny.save("qwen3_moe", tmp_path / "model")
    with open_model(folder, memory="40%") as lm, torch.inference_mode():
        assert not lm.moelab.residency.holds_all
        lm(input_ids=torch.arange(400)[None] % lm.config.vocab_size)
        read = [event[2:4] for event in lm.moelab.run.timeline if event.bytes]
        (step,) = lm.moelab.steps
        assert len(read) == len({*read})
        assert {*read} == {(layer, expert) for layer, experts in step for expert in experts}


def test_a_model_that_is_here_is_advised_verified_and_remembered(
    in_this_process, tmp_path, monkeypatch
):
    import torch

    folder = tiny.save(
        "qwen3_moe", tmp_path / "model", torch.bfloat16, hidden_size=128, moe_intermediate_size=128
    )
    monkeypatch.setattr(Model, "forms", lambda model: [AS_IS, "bf12"])
    model = find_model(folder)
    memory = model.others + 600_000_000
    first = advise(folder, memory, context=32)
    assert len(first.ways) > 1 and all(one.memory <= memory for one in first.ways)
    assert "as in what ran here" in " ".join(str(first).split())
    verified = advise(folder, memory, context=32, verify=True)
    measured = [one for one in verified.ways if one.kind == "measured"]
    assert {one.form for one in measured} == {AS_IS, "bf12"} and all(
        one.predicted for one in measured
    )
    monkeypatch.setattr(verify, "fresh", lambda *_, **__: pytest.fail("everything is kept"))
    again = advise(folder, memory, context=32)
    assert {one.name: one.tpot for one in again.ways if one.kind == "measured"} == {
        one.name: one.tpot for one in measured
    }
    assert "measured on this machine" in str(again) and "expected" in str(again)
    assert not math.isnan(again.best.tpot)


def test_what_is_not_of_an_expert_is_what_it_was_in_the_models_own_run(monkeypatch):
    own = Machine(Delays(1, 0, 0, 0, 6.0, 0), 1, (3.0, 1.0), (3.0, 0.0), predict=2.0)
    parts = Machine(Delays(1, 0, 0, 0, 2.0, 0), 1, (7.0, 7.0), (7.0, 7.0))
    itself, sampled = (SimpleNamespace(machine=of, full=2) for of in (own, parts))
    monkeypatch.setattr(sample, "without_experts", lambda *_: 40.0)
    monkeypatch.setattr(sample, "measured", lambda _, forms: dict.fromkeys(forms, sampled))
    monkeypatch.setattr(Model, "forms", lambda model: [AS_IS, "bf12"])
    costs = sample.sample_costs(MODEL, space.Look(None, itself, {}))
    assert costs[AS_IS] == space.Costs(own, 2, 40.0)
    machine = replace(own, delays=parts.delays)
    assert costs["bf12"] == space.Costs(machine, 2, 40.0) and len(costs) == 2


def test_what_comes_before_experts_in_memory_is_what_their_simulated_times_leave(monkeypatch):
    """2 layers of 2 experts at 1 s each, a head of 3 s: of a token of 11 s, 2 s are left for each
    layer."""
    machine = Machine(Delays(0, 0, 0, 0, 1.0, 0), head=(3.0, 0.0))
    found = SimpleNamespace(resident=11.0, machine=machine)
    spec = replace(SPEC, num_layers=2, moe_layers=(0, 1), K=2)
    assert sample.before_experts(found, spec) == pytest.approx(2.0)


def test_a_disturbed_profile_is_measured_again_and_the_quieter_one_stays(
    small_samples, monkeypatch
):
    busy = iter([2.0, 3.0, 0.0])
    monkeypatch.setattr("moelab.advice.machine.why_busy", lambda: None)
    monkeypatch.setattr("moelab.advice.machine.watched", lambda work: (work(), next(busy)))
    first = sample.measured(MODEL, ["raw"])["raw"]
    assert first.others == 2
    assert sample.measured(MODEL, ["raw"])["raw"] == first  # it was worse the second time
    quiet = sample.measured(MODEL, ["raw"])["raw"]
    assert quiet.others == 0
    assert sample.measured(MODEL, ["raw"])["raw"] == quiet
