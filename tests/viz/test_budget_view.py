"""The budget explorer: its bounds against brute force and every policy, its pieces against naive
sums, the real run."""

import time
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("plotly")
pytest.importorskip("anywidget")
from moelab import open_model
from moelab.cache.pools import Pools
from moelab.offloading.metrics import Forward
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.simulation.costs import Delays, Machine
from moelab.specs import MoESpec
from moelab.viz import views
from moelab.viz.views import budgets as budget
from moelab.viz.views import real
from moelab.viz.views import recorded as recorded_module
from moelab.viz.views.recorded import Recorded, _as_opened, recorded
from tests.models import tiny


def a_run(steps, E, tokens=1, H=16):
    spec = MoESpec("tiny", "tiny", 2, (0, 1), E, 1, H=H, I=8)
    settings = EngineSettings(spec, Pools(), "lru", "model", None, 1, 1, 0, (), 1000)
    run = EngineRun(settings, _as_opened(settings))
    run.steps = steps
    run.forwards = [
        Forward(i, i + 1, tokens, "decode" if i else "prefill") for i in range(len(steps))
    ]
    return Recorded("tiny", run, _as_opened(settings))


@st.composite
def explorers(draw):
    E, chance = draw(st.integers(2, 4)), draw(st.randoms())
    steps = [
        [
            (layer, dict.fromkeys(chance.sample(range(E), chance.randint(1, min(2, E))), 1))
            for layer in range(2)
        ]
        for _ in range(draw(st.integers(3, 7)))
    ]
    seconds = st.sampled_from([0.0, 1e-3, 3e-3])
    delays = Delays(
        draw(seconds) + 1e-4,
        draw(seconds),
        draw(seconds),
        draw(seconds),
        draw(seconds),
        1e-4,
        e_bytes=300,
        sm_bytes=draw(st.sampled_from([0, 500])),
    )
    return budget.Explorer(a_run(steps, E), machine=Machine(delays))


@settings(max_examples=12)
@given(explorers())
def test_no_policy_beats_the_limits(explorer):
    for memory in explorer.grid()[::2]:
        for policy in ("lru", "zipmoe", "belady"):
            point = explorer.play(policy, memory)
            assert point.hit_rate <= explorer.ceiling(memory) + 1e-12
            assert point.tpot >= explorer.limit(memory) * (1 - 1e-9)


@settings(max_examples=25)
@given(explorers(), st.integers(0, 3))
def test_the_ceiling_is_the_best_of_all_caches(explorer, capacity):
    """Every content that a cache may begin with, and every choice after each step."""
    timed = [
        {(layer, e) for e in experts}
        for step in explorer.steps[explorer.warm :]
        for layer, experts in step
    ]
    keys = [(layer, e) for layer in range(2) for e in range(explorer.spec.E)]
    best = {frozenset(of): 0 for n in range(capacity + 1) for of in combinations(keys, n)}
    for wanted in timed:
        after = {}
        for held, hits in best.items():
            got = hits + len(held & wanted)
            for n in range(capacity + 1):
                for kept in combinations(sorted(held | wanted), n):
                    after[frozenset(kept)] = max(after.get(frozenset(kept), 0), got)
        best = after
    explorer.divide = lambda memory: (Pools(F=capacity), 1)
    assert explorer.ceiling(0) * sum(map(len, timed)) == pytest.approx(max(best.values()))


def test_what_is_seen_adds_up():
    steps = [[(layer, {(i * (layer + 2)) % 5: 1}) for layer in range(2)] for i in range(12)]
    explorer = budget.Explorer(
        a_run(steps, 5), machine=Machine(Delays(1e-3, 0, 0, 0, 1e-4, 0, e_bytes=768))
    )
    found = budget.budgets(explorer, 60.0, ("lru", "zipmoe"), 500.0)
    experts = 10 * explorer.sizes.full
    assert found.parts["experts kept"] + found.parts["experts on disk"] == experts
    assert (
        found.parts["experts kept"] + found.parts["in flight"] <= found.memory < explorer.everything
    )
    for policy, points in (found.curves | {"belady": found.optimum}).items():
        assert points == sorted(points) and len(points) >= budget.GRID - 2
        assert found.needs[policy] == min(
            (p.memory for p in points if 1 / p.tpot >= 500), default=None
        )
    assert found.at["lru"] in found.curves["lru"]
    table = budget.rows(found)
    assert {row["policy"] for row in table} == {"lru", "zipmoe", "belady", "limit"}
    assert len([*budget.draw(found)]) == 2 and "500 tokens/s" in budget.words(found)[0]
    with pytest.raises(ValueError, match="no cache 'lrru'"):
        budget.budgets(explorer, 60.0, ("lrru",), 1.0)


def test_cards_and_other_machines(monkeypatch):
    monkeypatch.setattr(recorded_module, "ASSUMED", 3)
    monkeypatch.setattr(budget, "GRID", 3)
    view = views.budget(
        "Phi-tiny-MoE", policies=("lru",), devices=("jetson-agx-orin-32gb", "rtx-a6000"), share=30.0
    )
    assert view.data.how.startswith("assumed") and view.data.device == "jetson-agx-orin-32gb"
    assert view.commands[0].startswith(
        "moelab view budget Phi-tiny-MoE -p share=30.0 -p policies=lru"
    )
    with pytest.raises(ValueError, match="nothing to explore"):
        views.budget()
    with pytest.raises(TypeError, match="a view is of a model"):
        views.budget(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("views") / "model", torch.bfloat16)


@pytest.fixture(scope="module")
def explorer(folder):
    with open_model(folder, memory="60%") as lm:
        return budget.Explorer(recorded(lm, [5, 6, 7, 8, 9], 10))


def test_a_real_run_finds_what_the_simulation_finds(explorer):
    memory, found, ticks = explorer.grid()[5], [], []
    real.RealRun(explorer, "lru", memory, ticks.append, found.append).start().thread.join(60)
    seconds, hit_rate = found[0]
    assert seconds > 0 and hit_rate == explorer.play("lru", memory).hit_rate
    assert ticks == list(range(1, 11))


def test_a_stop_frees_the_engine_at_once_and_the_next_run_works(explorer):
    found, ticks = [], []
    slow = real.RealRun(
        explorer, "lru", explorer.grid()[1], ticks.append, found.append, {"bandwidth": 20e3}
    ).start()
    while not ticks and slow.thread.is_alive():
        time.sleep(0.01)
    engine = slow.lm.moelab.engine
    at_stop = len(ticks)
    slow.stop()
    slow.thread.join(60)
    assert found == [None] and engine.closed and len(ticks) <= at_stop + 1 < 10
    assert not any(thread.is_alive() for thread in engine.loader.threads)
    real.RealRun(
        explorer, "lru", explorer.grid()[1], ticks.append, found.append
    ).start().thread.join(60)
    assert found[1][0] > 0


def test_the_buttons_add_the_measured_point(folder):
    with open_model(folder, memory="60%") as lm:
        view = views.budget(lm, prompt=[5, 6, 7], tokens=6, policies=("lru",), devices=())
    start, stop, bar, told = view.widget.children[-1].children
    start.click()
    view.real[0].thread.join(60)
    ((policy, point),) = view.data.measured
    assert (policy, point.kind, point.memory) == (
        "lru",
        "measured",
        view.data.memory,
    ) and "measured" in told.value
    assert (
        "measured" in [trace["name"] for trace in view.picture.figure["data"]]
        and not start.disabled
        and stop.disabled
    )
    assert view.errors.outputs == ()


def test_the_copied_command_gives_the_same_numbers(tmp_path):
    import shlex

    from moelab.__main__ import main

    with open_model(memory="40%", cache="lru", prefetch="previous") as lm:
        view = views.budget(
            lm,
            prompt="the fox's 'den'",
            tokens=6,
            device="jetson-agx-orin-32gb",
            policies=("lru", "lfu"),
        )
    told = shlex.split(view.commands[0])
    assert told[told.index("--cache") :][:4] == ["--cache", "lru", "--prefetch", "previous"]
    assert main([*told[1:], "--output", str(tmp_path / "budget.csv")]) == 0
    assert (tmp_path / "budget.csv").read_text() == view.csv().replace("\r\n", "\n")
