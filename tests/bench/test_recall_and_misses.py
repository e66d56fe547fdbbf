"""The two findings about prediction: recall, its leads and misses against loops, and that all of it
runs."""

import pytest
import torch

from moelab.bench import recall_and_misses as bench
from moelab.evaluation.predictors import Score
from moelab.files import small_model
from moelab.specs import MoESpec
from moelab.trace import DECODE, RoutingTrace
from tests.depth import depth


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


def share(of, prompt=slice(None)):
    return int(of.hits[prompt].sum()) / int(of.requests[prompt].sum())


def test_recall_is_the_mean_of_trainings_over_all_prompts():
    rows = bench.recalls(FOUND)
    for name, of in FOUND.items():
        assert rows[name]["recall"] == pytest.approx(sum(map(share, of)) / len(of))
        assert rows[name]["least"] == pytest.approx(min(map(share, of))) and rows[name][
            "trainings"
        ] == len(of)
        assert rows[name]["from"] < rows[name]["recall"] < rows[name]["to"]


def test_leads_are_differences_of_recall_paired_by_prompt():
    rows = bench.leads(FOUND, [50])
    better = max(("next router on s", "next router on q"), key=lambda name: share(FOUND[name][0]))
    assert list(rows) == [f"50 tokens, above {better}", "50 tokens, above appendix-a"]
    recall = {name: sum(map(share, of)) / len(of) for name, of in FOUND.items()}
    for other, row in zip((better, "appendix-a, 50 tokens"), rows.values()):
        assert row["points"] == pytest.approx(100 * (recall["residual, 50 tokens"] - recall[other]))
        by_prompt = [
            100
            * sum(
                share(a, p) - share(b, p)
                for a in FOUND["residual, 50 tokens"]
                for b in FOUND[other]
            )
            / 2
            / len(FOUND[other])
            for p in range(5)
        ]  # all prompts have as many requests
        error = torch.tensor(by_prompt, dtype=torch.double).std() / 5**0.5
        assert (row["to"] - row["from"]) / 2 == pytest.approx(2.776 * float(error), rel=1e-3)


SPEC = MoESpec("made", "qwen3_moe", 2, (0, 1), 6, 2, 8, 8, vocab=9, heads=1, kv_heads=1, head_dim=8)


def test_misses_are_what_a_list_counts():
    ids = (
        torch.rand(30, 2, 6, generator=torch.Generator().manual_seed(0))
        .topk(2)
        .indices.to(torch.int16)
    )
    row = torch.arange(30)
    trace = RoutingTrace(
        ids, torch.ones(ids.shape), torch.full((30,), DECODE), row % 3, row // 3, row, SPEC, ""
    )
    recent, missed = [], [0, 0, 0]  # the last used comes last
    for t in sorted(range(30), key=lambda t: t % 3):  # prompt after prompt
        for layer in range(2):
            wanted = [(layer, e) for e in sorted(ids[t, layer].tolist())]
            missed[t % 3] += sum(key not in recent for key in wanted)
            recent = ([key for key in recent if key not in wanted] + wanted)[-6:]
    assert bench.misses(trace, "lru", "model", 0.5).tolist() == missed


@pytest.mark.stress
def test_the_bench_runs_on_every_model_that_is_given(tmp_path, monkeypatch):
    """With three of the policies, as most of the time is theirs; `compare` plays all of them in the
    test above."""
    names = depth(["small"], ["small", "same"])
    monkeypatch.setattr(bench, "POLICIES", few := ("lru", "next-token", "belady"))
    monkeypatch.setattr(bench, "BY_LAYER", ("lru",))
    (tmp_path / "same").symlink_to(small_model())
    folders = [str(small_model()), str(tmp_path / "same")][: len(names)]
    sections = bench.run(
        model=folders,
        tokens=[100],
        seeds=2,
        train_prompts=2,
        test_prompts=2,
        prompt_tokens=64,
        new_tokens=2,
        budgets=[0.5],
        windows=2,
        untrained=True,
    )
    one, *others = (list(sections.values())[4 * i : 4 * i + 4] for i in range(len(names)))
    assert all(other == one for other in others) and {
        title.partition(" (")[0] for title in sections
    } == {*names, *(f"{name}, untrained" for name in names)}
    losses = [
        rows["language loss, nats a token"]
        for title, rows in sections.items()
        if "its router" in title
    ]
    assert max(losses[: len(names)]) < min(losses[len(names) :])  # random weights know less
    router, recalls, leads, evictions = one
    assert router["experts never used"] >= 0 and 0 < router["language loss, nats a token"] < 7
    assert recalls["residual, 100 tokens"]["trainings"] == 2 and len(leads) == 2
    assert len(evictions) == len(few) + 1 and next(iter(evictions)) == "belady"
    assert (
        evictions["lru"]["misses ÷ lru"] == 1 == evictions["next-token"]["next-token ÷ its misses"]
    )
