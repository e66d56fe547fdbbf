"""The study of fitted routing, on a trace that the test draws."""

from functools import partial

import numpy as np
import pytest

from moelab.base.specs import MoESpec
from moelab.cards import load_card
from moelab.simulation.routing import Routing
from notebooks.studies import routing_fit

LIKE = Routing(0.2, 0.1, 0.1, 20.0, 0.4, 1.0, 6.0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    spec = MoESpec("toy", "toy", 6, tuple(range(6)), 16, 2, 0, 0)
    trace = LIKE.trace(spec, [60] * 12, seed=3)
    tasks = np.array(["a", "b", "b"] * 4)
    np.savez(
        tmp_path / "toy.npz",
        ids=trace.ids.numpy(),
        sequence=trace.sequence.numpy(),
        position=trace.position.numpy(),
        sequence_task=tasks,
        experts=16,
    )
    traces = {
        "toy": routing_fit.Trace("toy.npz", "drawn by a test", card="OLMoE-1B-7B"),
        "toy b": routing_fit.Trace("toy.npz", "drawn by a test", "b"),
    }
    monkeypatch.setattr(routing_fit, "TRACES", traces)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*not read")
def test_a_trace_is_fitted_and_judged_on_what_was_held_out(folder, monkeypatch):
    monkeypatch.setattr(routing_fit, "fit", partial(routing_fit.fit, rounds=1))
    found = routing_fit.run(str(folder), ("toy", "toy b"))
    held = found["held out"]
    assert held["toy"]["divided by"] == "texts" and held["toy"]["tokens"] == 360
    assert held["toy b"]["divided by"] == "layers" and held["toy b"]["tokens"] == 480
    for name, row in held.items():
        there, drawn = found["trace (exact)"][name], found["drawn (simulated)"][name]
        worst = max(there, key=lambda what: abs(drawn[what] - there[what]))
        assert row["worst"] == worst
        assert row["off %"] == pytest.approx(drawn[worst] - there[worst])
        assert abs(row["off %"]) < 20  # one round, and few tokens


def test_a_fit_is_written_to_its_card_once(folder):
    from moelab.cards import files

    card = folder / "OLMoE-1B-7B.toml"
    text = (files("moelab.cards") / "models/OLMoE-1B-7B.toml").read_text()
    card.write_text(text)
    for share in (0.1, 0.3):
        routing = Routing(share, 0.0, 0.1, 20.0, 0.4, 1.0, 6.0)
        routing_fit.write_card(card, routing, routing_fit.TRACES["toy"], 720, "texts", 2.5)
    import tomllib

    found = tomllib.loads(card.read_text())
    assert found["routing"]["popularity"] == 0.3 and "720 tokens" in found["routing"]["source"]
    own = load_card("OLMoE-1B-7B")
    assert {k: v for k, v in found.items() if k != "routing"} == {
        k: v for k, v in own.items() if k != "routing"
    }
