"""Predictors and what a cache keeps: recall, its leads and misses against loops, and that all of it
runs on the small model."""

import pytest
import torch

from moelab import open_model
from moelab.base.specs import MoESpec
from moelab.trace import DECODE, RoutingTrace
from notebooks.studies import recall_and_misses as bench
from notebooks.studies.predictor_scores import Score


def scored(seed, P=5, L=3):
    g = torch.Generator().manual_seed(seed)
    found = torch.randint(1, 40, (P, L), generator=g)
    return Score(torch.full((P, L), 40), found, torch.zeros(L, 2), torch.ones(L, 2))


FOUND = {
    "next router on s": [scored(0)],
    "next router on q": [scored(1)],
    "residual, 50 tokens": [scored(2), scored(3)],
    "appendix-a, 50 tokens": [scored(4), scored(5)],
}


def share(name, prompt=slice(None)):
    """Recall, mean of the trainings."""
    rates = [int(of.hits[prompt].sum()) / int(of.requests[prompt].sum()) for of in FOUND[name]]
    return sum(rates) / len(rates)


def test_recall_and_leads_are_of_all_prompts_and_paired():
    for name, row in bench.recalls(FOUND).items():
        assert row["recall"] == pytest.approx(share(name))
        assert row["from"] < row["recall"] < row["to"] and row["least"] <= row["recall"]
        assert row["trainings"] == len(FOUND[name])
    rows = bench.leads(FOUND, [50])
    better = max(("next router on s", "next router on q"), key=share)
    assert list(rows) == [f"50 tokens, above {better}", "50 tokens, above appendix-a"]
    ours = "residual, 50 tokens"
    for other, row in zip((better, "appendix-a, 50 tokens"), rows.values()):
        by_prompt = [100 * (share(ours, p) - share(other, p)) for p in range(5)]
        assert row["points"] == pytest.approx(sum(by_prompt) / 5)  # as many requests in each
        error = torch.tensor(by_prompt, dtype=torch.double).std() / 5**0.5
        assert (row["to"] - row["from"]) / 2 == pytest.approx(2.776 * float(error), rel=1e-3)


SPEC = MoESpec("made", "qwen3_moe", 2, (0, 1), 6, 2, 8, 8, vocab=9, heads=1, kv_heads=1, head_dim=8)


def test_misses_are_what_a_list_counts():
    rng = torch.Generator().manual_seed(0)
    ids = torch.rand(30, 2, 6, generator=rng).topk(2).indices.to(torch.int16)
    row = torch.arange(30)
    decode = torch.full((30,), DECODE)
    trace = RoutingTrace(ids, torch.ones(ids.shape), decode, row % 3, row // 3, row, SPEC, "")
    recent, missed = [], [0, 0, 0]  # the last used comes last
    for t in sorted(range(30), key=lambda t: t % 3):  # prompt after prompt
        for layer in range(2):
            wanted = [(layer, e) for e in sorted(ids[t, layer].tolist())]
            missed[t % 3] += sum(key not in recent for key in wanted)
            recent = ([key for key in recent if key not in wanted] + wanted)[-6:]
    assert bench.misses(trace, "lru", "model", 0.5).tolist() == missed


def test_estimators_are_taught_scored_and_executed():
    torch.set_num_threads(1)
    contest = bench.Contest.of(open_model(), 3, 2, 64, 3, seed=0)
    control = bench.Contest.control(contest.model, 2, 64, seed=0)
    assert control.model is not contest.model and control.test.spec.E == contest.test.spec.E
    learned, seconds = contest.teach(320, 2, seed=0)
    assert seconds > 0
    assert all([len(of) for of in found.values()] == [2, 2, 1] for found in learned.values())
    names = ("quasi", "residual", "residual_hybrid")
    router, ours, hybrid = (of.recall for of in contest.scores(names).values())
    choice = torch.tensor(contest.choices["residual"][: len(hybrid)])
    assert torch.equal(hybrid, torch.where(choice, ours, router))  # in each layer what it chose
    assert learned["residual"][320] == [float(ours.mean())]
    costs = contest.executed(("quasi", "random"), 2, 2, 48, seed=0)
    assert list(costs) == list(bench.TASKS)
    assert costs["loss"]["quasi"][0] < costs["loss"]["random"][0]
    assert contest.identical([5, 6, 7, 8], 3) == {"hint": True, "router-free": True}


def test_the_bench_runs_on_a_model_and_its_control(monkeypatch):
    """With three of the policies, as most of the time is theirs."""
    monkeypatch.setattr(bench, "POLICIES", few := ("lru", "next-use", "belady"))
    monkeypatch.setattr(bench, "BY_LAYER", ("lru",))
    sizes = {"train_prompts": 2, "test_prompts": 2, "prompt_tokens": 64, "new_tokens": 2}
    sections = bench.run(tokens=[100], budgets=[0.5], untrained=True, **sizes)
    recalls, leads, evictions, *control = sections.values()
    assert recalls["residual, 100 tokens"]["trainings"] == 2 and len(leads) == 2
    assert len(evictions) == len(few) + 1 and next(iter(evictions)) == "belady"
    assert evictions["lru"]["misses ÷ lru"] == 1 and len(control) == 2
    with pytest.raises(ValueError, match="two have the same name"):
        bench.run(model=["a/small", "b/small"])
