"""The budget explorer: its pieces against naive sums, other machines, cards."""

import pytest

pytest.importorskip("plotly")
pytest.importorskip("anywidget")
from moelab import open_model
from moelab.cards import load_model
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.routing import routing_of
from moelab.viz import views
from moelab.viz.views import budgets as budget
from tests.viz.conftest import a_run

STEPS = [[(layer, {(i * (layer + 2)) % 5: 1}) for layer in range(2)] for i in range(12)]
DELAYS = Delays(1e-3, 0, 0, 0, 1e-4, 0, e_bytes=768)


def test_what_is_seen_adds_up():
    explorer = budget.Explorer(a_run(STEPS, 5), Machine(DELAYS))
    found = budget.budgets(explorer, "here", 60.0, ("lru", "zipmoe"))
    parts = explorer.parts(found.memory)
    experts = 10 * explorer.sizes.full
    assert parts["experts kept"] + parts["experts on disk"] == experts
    assert parts["experts kept"] + parts["in flight"] <= found.memory < explorer.everything
    for policy, points in found.curves.items():
        assert points == sorted(points) and found.at[policy] in points
        assert all(p.hit_rate <= best.hit_rate for p, best in zip(points, found.curves["belady"]))
    assert {row["policy"] for row in budget.rows(found)} == {"lru", "zipmoe", "belady"}
    assert len([*budget.draw(found)]) == 2
    assert "with belady" in budget.words(budget.budgets(explorer, "here", 60.0, ()))[0]


def test_another_machine_runs_the_same_software():
    own = Machine(DELAYS, other=(5e-3, 1e-6), head=(1e-3, 0.0))
    card = Machine(DELAYS, other=(1e-4, 2e-6))
    made = budget._with_overhead(card, own)
    assert (made.other, made.head, made.delays) == ((5e-3, 2e-6), (1e-3, 0.0), card.delays)


def test_a_trace_is_simulated_and_its_bar_has_all_that_takes_memory(monkeypatch):
    monkeypatch.setattr(budget, "SHARES", (1, 100))
    monkeypatch.setattr(budget, "DEVICES", ("raspberry-pi-5",))
    spec = load_model("Phi-tiny-MoE")
    view = views.budget(routing_of(spec)[0].trace(spec, [14]))
    assert view.data.device == "this machine" and "recorded" in view.words[0]
    parts = view.data.explorer.parts(view.data.memory)
    assert min(parts.values()) > 0 and any("14 tokens" in name for name in parts)
    start = "moelab view budget TRACE -p share=37 -p policies=lru -p machine="
    view.set(share=37, policies=("lru",))
    assert view.command(**view.values).startswith(start)
    for bad in ({"share": 500}, {"machine": "moon"}, {"policies": ("lrru",)}):
        with pytest.raises(ValueError, match="it must be"):
            view.set(**bad)
    with pytest.raises(TypeError, match="a view is of a model"):
        views.budget(3)


def test_a_card_is_drawn_as_it_was_fitted(monkeypatch):
    monkeypatch.setattr(budget, "SHARES", (1, 100))
    monkeypatch.setattr(budget, "DEVICES", ("raspberry-pi-5",))
    view = views.budget("Phi-tiny-MoE")
    assert "fitted to a trace" in view.words[0]
    assert view.command(**view.values).startswith("moelab view budget Phi-tiny-MoE -p share=")


def test_the_copied_command_gives_the_same_run(tmp_path):
    import csv
    import shlex

    from moelab.__main__ import main

    with open_model(memory="40%", cache="lru", prefetch="previous") as lm:
        view = views.budget(lm, prompt="the fox's 'den'", tokens=6)
    view.set(policies=("lru", "lfu"), machine="jetson-agx-orin-32gb")
    told = shlex.split(view.command(**view.values))
    assert told[told.index("--cache") :][:4] == ["--cache", "lru", "--prefetch", "previous"]
    assert main([*told[1:], "--output", str(tmp_path / "budget.csv")]) == 0
    with open(tmp_path / "budget.csv", newline="") as file:
        again = [*csv.DictReader(file)]
    ours = [*csv.DictReader(view.csv().splitlines())]
    columns = ("policy", "memory_bytes", "hit_rate", "machine")  # times are as measured
    assert [[row[c] for c in columns] for row in again] == [
        [row[c] for c in columns] for row in ours
    ]
