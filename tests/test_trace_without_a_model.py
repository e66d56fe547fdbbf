"""A trace of another engine, whose model is not here, wherever routing alone matters."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import moelab
from moelab.bench import arena as contests
from moelab.bench.arena import steps
from moelab.cache.policies import LRU
from moelab.ndp.assumptions import Assumptions
from moelab.ndp.routing import PromptRouting
from moelab.ndp.simulation import simulate
from moelab.offloading.slots import Sizes
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.routing import routing_of
from moelab.trace import DECODE, PREFILL, load
from moelab.viz import views
from moelab.viz.views import budgets, command
from moelab.zipmoe.planner import best_pools, own_steps, shares_of
from notebooks.studies import dataset_free, eplb, popularity, traces
from notebooks.studies.most_hits import belady_hits, request_count

CARD = "OLMoE-1B-7B"
LENGTHS = (12, 9)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Two texts of six tokens each in prefill, as arrays of another program."""
    spec = replace(moelab.cards.load_model(CARD), num_layers=3, moe_layers=(0, 1, 2))
    ids = routing_of(spec)[0].draw(spec.L, spec.E, spec.K, LENGTHS, 1)
    phase = [p for n in LENGTHS for p in [PREFILL] * 6 + [DECODE] * (n - 6)]
    sequence = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    path = tmp_path_factory.mktemp("foreign") / "engine.npz"
    columns = {"phase": np.uint8(phase), "sequence": sequence, "layers": np.arange(3)}
    np.savez(path, routed_experts=ids, experts=spec.E, **columns)
    return path


@pytest.fixture(scope="module")
def trace(path):
    """Of a card's sizes."""
    return load(path, CARD)


@pytest.fixture(scope="module")
def bare(path):
    """Of nothing but its ids."""
    return load(path)


def test_it_calibrates(bare, trace):
    for of in (bare, trace):
        counted = moelab.calibrate(of)
        assert counted.tokens == (12, 9) and counted.counts().sum() == 21 * 3 * 8
        assert len(eplb.balance(counted.counts()[0].tolist(), 4, spare=4)) == 4


def test_a_policy_is_ranked_on_it_by_shares_alone(bare):
    class Mine(LRU):
        pass

    contest = contests.arena(Mine, bare, share=0.25)
    asked = [step[1:] for step in steps(bare)]
    capacity = round(0.25 * bare.spec.L * bare.spec.E)
    (ceiling,) = contest.ceiling.values()
    most = 100 * belady_hits(asked, capacity) / request_count(asked)
    assert 0.95 * most < ceiling <= most  # a step's experts are pinned
    assert all(contest.share(one, bare.spec.name) <= 1 for one in contest.standings)
    assert contest.own.scores == next(s.scores for s in contest.standings if s.name == "lru")
    two = contests.arena(Mine, {"a": bare, "b": bare}, share=0.25)
    assert two.own.scores["a"] == two.own.scores["b"] == contest.own.scores[bare.spec.name]
    assert views.arena(Mine, bare, share=0.25).data.place == contest.place


def test_three_views_are_of_it(bare, trace, monkeypatch):
    monkeypatch.setattr(budgets, "SHARES", (25, 100))
    monkeypatch.setattr(budgets, "DEVICES", ("raspberry-pi-5",))
    player = views.scrubber(bare, memory="50%", cache="lru")
    assert player.data[0].states.shape == (2 + 9, 3, 64) and not player.data[0].seconds
    assert "times measured" not in player.words[0] and "scrubber" in player.html()
    assert player.command(**player.values).startswith(
        "moelab view scrubber TRACE --memory 50% --cache lru"
    )
    explorer = views.budget(trace, tokens=4)
    assert explorer.data.at["belady"].hit_rate >= explorer.data.at["lru"].hit_rate
    assert {*explorer.controls} >= {"share", "machine"} and "--tokens 4" in explorer.command(
        **explorer.values
    )
    stage = views.theatre(trace, memory="25%")
    assert "followers" in stage.words[0] and "loss" not in stage.words[0]
    assert len(stage.rows()) == 9
    with pytest.raises(ValueError, match="model="):
        views.budget(bare)
    with pytest.raises(ValueError, match="prompt"):
        views.scrubber(bare, "a text")
    read = trace.select(trace.phase == PREFILL)
    assert views.scrubber(read).data[0].states.shape == (12, 3, 64)
    assert "prompts taken token by token" in views.budget(read, tokens=4).words[0]


def test_the_command_line_views_it(path, tmp_path, capsys):
    parser = moelab.__main__.build_parser(["view"])
    told = ["view", "scrubber", str(path), "--memory", "25%", "--output", str(tmp_path / "s.csv")]
    command.main(parser.parse_args(told))
    assert "11 forward passes" in capsys.readouterr().out
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 1 + 11
    with pytest.raises(ValueError, match="--prefetch"):
        command.main(parser.parse_args([*told, "--prefetch", "router"]))


def test_a_plan_is_made_on_its_own_steps(trace):
    own = own_steps(trace)
    assert own == [
        s for s, f in zip(*moelab.simulation.traced.forwards_of(trace)) if f[3] == "decode"
    ]
    delays = Delays(5e-4, 1e-3, 2e-4, 1e-4, 1e-4, 0.0)
    shares = shares_of(moelab.calibrate(trace))
    found = best_pools(shares, own, 400, Sizes(4, 1, 2), Machine(delays), staging=2, warm=6)
    assert len(found) > 1 and 0 < found[0].seconds <= found[-1].seconds
    with pytest.raises(ValueError, match="decode"):
        own_steps(trace.select(trace.phase == PREFILL))


def test_near_data_processing_computes_it(trace):
    routing = PromptRouting.of(trace, 1)
    assert len(routing.prefill) == 6 and len(routing.decode) == 3
    found = simulate(Assumptions().hardware(4), Assumptions().system("NDP+TP+LB+PRE"), routing)
    assert found.moe_decode > 0


def test_dataset_free_prefetching_is_counted_on_it(bare):
    found = dataset_free.of_traces({"a": bare})
    assert [*found["a"][0]] == list(dataset_free.WAYS[:2])
    for number, answer in enumerate(one[dataset_free.WAYS[0]] for one in found["a"]):
        mine = bare.select(bare.sequence == number)
        prompt, decoded = (mine.select(mine.phase == p) for p in (PREFILL, DECODE))
        kept = dataset_free.most_used(prompt.counts().numpy(), bare.spec.K)
        wanted = [
            (layer, e) for row in decoded.ids.tolist() for layer, of in enumerate(row) for e in of
        ]
        assert answer.hits == sum(kept[one] for one in wanted) and answer.requests == len(wanted)
    one_phase = bare.in_phase(DECODE, 99)
    halves = traces.prompted(one_phase)
    assert traces.prompted(bare) is bare
    assert [int((halves.phase[bare.sequence == n] == PREFILL).sum()) for n in (0, 1)] == [6, 4]
    assert len(dataset_free.of_traces({"a": halves})["a"]) == 2
    with pytest.raises(ValueError, match="prompt and its answer"):
        dataset_free.of_traces({"a": bare.select(bare.phase == DECODE)})


def test_popularity_on_unseen_texts_of_it(path, tmp_path, bare):
    given = traces.given(f"{path}, ", CARD)
    assert [*given] == ["engine"] and traces.given("") == {}
    found = popularity.Popularity.of_traces(given)
    assert found.main == "prefill" and [*found.phases] == ["prefill", "decode"]
    first, second = popularity.halved(given["engine"])
    assert torch.equal(first.ids, bare.ids[:12]) and second.sequence.max() == 0
    assert len(found.loads("test", 9)) == 1  # more tokens than its prefill has
    alone = popularity.halved(bare.select(bare.sequence == 0))
    assert [len(of) for of in alone] == [6, 6] and all((of.phase == 0).sum() == 3 for of in alone)
    load(path).save(tmp_path / "engine.safetensors")
    with pytest.raises(ValueError, match="two traces"):
        traces.given(f"{path},{tmp_path / 'engine.safetensors'}")
    (tmp_path / "engine.safetensors").rename(tmp_path / "other.safetensors")
    assert len(traces.given(f"{path},{tmp_path / 'other.safetensors'}")) == 2
