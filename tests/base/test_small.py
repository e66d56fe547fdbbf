"""The small model: its recipe (batches, losses, resuming) and the shipped weights against the
issue's bars."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import moelab
from moelab.base.files import small_model
from moelab.evaluation import accuracy, questions, scores

_spec = importlib.util.spec_from_file_location(
    "train_small", small_model().parent / "train_small.py"
)
small = sys.modules["train_small"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small)
Phase, Recipe, Stage = small.Phase, small.Recipe, small.Stage


@pytest.fixture(scope="module")
def model():
    return moelab.open_model()


# ---- the shipped weights


def test_it_is_what_the_workbench_needs(model):
    spec = model.spec
    assert spec.L >= 4 and spec.E >= 16
    assert sum(f.stat().st_size for f in small_model().glob("*.safetensors")) <= 16e6
    plain = transformers.AutoModelForCausalLM.from_pretrained(small_model())
    assert plain.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "task, bar", [("needle", 0.95), ("needle_multikey", 0.85), ("lookup", 0.90), ("yesno", 0.90)]
)
def test_it_answers_what_its_card_says(model, task, bar):
    """Another seed than the card's. Three standard errors below the bar would be a real fall."""
    n = 32
    right = np.mean(scores.right_answers(model, questions.prompts(task, n, tokens=256, seed=77)))
    assert right >= bar - 3 * (bar * (1 - bar) / n) ** 0.5


def test_greedy_generation_gives_the_same_answers(model):
    """`right_answers` reads one forward pass; this asks transformers' own generate."""
    prompts = questions.prompts("needle_multikey", 8, tokens=128, seed=5)
    expected = []
    for p in prompts:
        ids = model.tokenizer(p.text, return_tensors="pt")
        answer = model.tokenizer(p.answer)["input_ids"]
        out = model.generate(**ids, max_new_tokens=len(answer), do_sample=False)
        expected.append(out[0, ids["input_ids"].shape[1] :].tolist() == answer)
    assert scores.right_answers(model, prompts, batch_size=5) == expected


@pytest.mark.parametrize("task", ["couples", "spelling", "sums"])
def test_what_weights_hold_is_lost_without_the_right_experts(model, task):
    """The bars of a model that can judge: 30 points for random experts, 5 for half of the
    routings."""
    modes = small.damage(model)
    row = accuracy.compare(model, modes, [task], n=14, tokens=96, seed=5, batch_size=1)["scores"][
        task
    ]
    whole, *costs = modes
    assert row[whole]["score"] >= 0.9
    assert [row[mode]["difference"] <= -bar for mode, bar in zip(costs, (0.30, 0.05))] == [
        True,
        True,
    ]


def test_language_loss_is_clearly_below_ngrams(model):
    card = json.loads((small_model() / "card.json").read_text())["scores"]["language loss"]
    loss = scores.language_loss(
        model, scores.text_windows(model.tokenizer, "test", 12, 256, seed=9)
    ).mean()
    assert loss < card["bigram"] - 0.4 < card["unigram"]
    assert abs(loss - card["model"]) < 0.5  # other windows, other Python version


def test_load_is_skewed_but_no_expert_is_dead(model):
    texts = [
        p.text
        for source in ("needle", "code", "prose")
        for p in questions.prompts(source, 8, seed=31)
    ]
    counts = moelab.record(model, texts).counts().double()
    ratio = counts.amax(1) / counts.mean(1)
    assert (counts > 0).all()
    assert ratio.min() >= 1.2 and ratio.max() <= 3.0


# ---- the recipe


@given(
    seed=st.integers(0, 10**6),
    tokens=st.sampled_from([32, 64, 128, 256]),
    yesno=st.sampled_from([0.0, 0.5]),
)
def test_pieces_tokenise_apart_as_they_do_together(model, seed, tokens, yesno):
    """An answer must be a copy of its fact's tokens, wherever it stands: retrieval cannot be
    learned otherwise."""

    def ids(text):
        return model.tokenizer(text)["input_ids"]

    for pieces in (
        small.retrieval_pieces(random.Random(seed), tokens, yesno, lambda t: len(ids(t))),
        small.memory_pieces(random.Random(seed), tokens, lambda t: len(ids(t))),
        small.echo_pieces(random.Random(seed), tokens),
    ):
        assert ids("".join(text for text, _ in pieces)) == [
            i for text, _ in pieces for i in ids(text)
        ]
        assert sum(len(ids(text)) for text, _ in pieces) <= tokens


TINY = Recipe(
    stages=(
        Stage((Phase(3, 32, 0.3, 0.3, 0.0),)),
        Stage(
            (Phase(1, 64, 0.3, 0.0, 0.5, balance=0.1), Phase(2, 64, 0.2, 0.0, 0.5, memory=0.5)), 0.5
        ),
    ),
    hidden=16,
    intermediate=8,
    layers=2,
    experts=4,
    experts_per_token=2,
    warmup=2,
)


@pytest.fixture
def tiny_corpus(monkeypatch, model):
    """The shipped tokenizer and a random stream: no three-second training of a tokenizer in every
    test."""
    stream = np.random.default_rng(0).integers(1, 1000, 5000).astype(np.uint16)
    monkeypatch.setattr(small, "train_tokenizer", lambda vocabulary: model.tokenizer)
    monkeypatch.setattr(small, "corpus_ids", lambda tokenizer: stream)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(next(folder.glob("*.safetensors")))


def test_an_interrupted_training_gives_the_same_weights(tmp_path, tiny_corpus):
    whole = small.train_small(tmp_path / "whole", TINY)
    for stop in (1, 2):
        small.train_small(tmp_path / "parts", TINY, stop_after=stop)
        assert not (tmp_path / "parts").exists()
    parts = small.train_small(tmp_path / "parts", TINY)
    a, b = weights(whole), weights(parts)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts", "whole"]
    assert moelab.open_model(parts).tokenizer("x")["input_ids"]


def test_training_never_overwrites(tmp_path, tiny_corpus):
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="not overwritten"):
        small.train_small(tmp_path / "there", TINY)
    small.train_small(tmp_path / "begun", TINY, stop_after=1)
    with pytest.raises(FileExistsError, match="another recipe"):
        small.train_small(tmp_path / "begun", replace(TINY, seed=5))


@given(T=st.integers(1, 12), E=st.integers(2, 6), seed=st.integers(0, 99), data=st.data())
def test_balance_loss_equals_a_naive_loop(T, E, seed, data):
    K = data.draw(st.integers(1, E))
    layers = [
        torch.randn(T, E, generator=torch.Generator().manual_seed(seed + i)) for i in range(2)
    ]
    expected = 0.0
    for logits in layers:
        f, P = [0.0] * E, [0.0] * E
        for row in logits.tolist():
            total = sum(np.exp(v) for v in row)
            for e in range(E):
                P[e] += np.exp(row[e]) / total / T
            for e in sorted(range(E), key=lambda e: -row[e])[:K]:
                f[e] += 1 / T / K
        expected += E * sum(a * b for a, b in zip(f, P)) / len(layers)
    assert float(small.balance_loss(tuple(layers), K)) == pytest.approx(expected, rel=1e-5)


def test_weighted_loss_equals_a_naive_loop():
    g = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(3, 7, 11, generator=g), torch.randint(0, 11, (3, 7), generator=g)
    w = torch.rand(3, 7, generator=g)
    total = norm = 0.0
    for b in range(3):
        for s in range(1, 7):
            total += float(w[b, s] * -logits[b, s - 1].log_softmax(-1)[ids[b, s]])
            norm += float(w[b, s])
    assert float(small.weighted_loss(logits, ids, w)) == pytest.approx(total / norm, rel=1e-5)


def test_ngram_losses_equal_naive_counting():
    rng = np.random.default_rng(0)
    train, windows, V = rng.integers(0, 5, 200), rng.integers(0, 5, (3, 9)), 6
    ones, pairs = Counter(train.tolist()), Counter(zip(train[:-1].tolist(), train[1:].tolist()))
    first = Counter(train[:-1].tolist())
    p1 = {v: (ones[v] + 1) / (len(train) + V) for v in range(V)}
    steps = [(int(a), int(b)) for row in windows for a, b in zip(row[:-1], row[1:])]
    unigram = -np.mean([np.log(p1[b]) for _, b in steps])
    bigram = -np.mean([np.log((pairs[a, b] + 10 * p1[b]) / (first[a] + 10)) for a, b in steps])
    assert small.ngram_losses(train, windows, V) == pytest.approx((unigram, bigram))
