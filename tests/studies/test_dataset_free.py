"""Dataset-free prefetching in the engine: what is resident, what is counted, against sets and a
recording."""

import numpy as np
import pytest
import torch

import moelab
from moelab.trace import DECODE, PREFILL
from notebooks.studies import dataset_free as study

X, STEPS = 3, 5


@pytest.fixture(scope="module")
def small():
    return moelab.open_model()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return moelab.convert(None, tmp_path_factory.mktemp("dataset_free") / "store", codec="raw")


@pytest.fixture(scope="module")
def found(small, store):
    """(prompt, answers by three ways, one after the other in the same engine)."""
    rng = np.random.default_rng(0)
    fixed = study.most_used(rng.random((small.spec.L, small.spec.E)), X)
    ids = small.tokenizer("def add(a, b):\n    return a + b\n")["input_ids"]
    choose = {
        "free": lambda counts: study.most_used(counts, X),
        "fixed": lambda counts: fixed,
        "again": lambda counts: study.most_used(counts, X),
    }
    with study.Prefetcher(store, X) as prefetcher:
        return ids, prefetcher.answers(ids, STEPS, choose)


def test_the_answer_is_that_of_transformers_whatever_is_resident(small, found):
    ids, answers = found
    with torch.inference_mode():
        whole = small.generate(
            torch.tensor([ids]), max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1, do_sample=False
        )
    for answer in answers.values():
        assert answer.tokens.tolist() == whole[0, len(ids) :].tolist()


def test_counts_and_wanted_experts_are_those_of_a_recording(small, found):
    ids, answers = found
    trace = moelab.record(small, [ids], max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1)
    prefill, decode = (trace.ids[trace.phase == phase].tolist() for phase in (PREFILL, DECODE))
    for answer in answers.values():
        for layer in range(small.spec.L):
            for expert in range(small.spec.E):
                assert answer.counts[layer, expert] == sum(
                    token[layer].count(expert) for token in prefill
                )
                assert answer.wanted[:, layer, expert].tolist() == [
                    expert in token[layer] for token in decode
                ]


def test_the_engine_finds_the_chosen_experts_and_no_others(small, found):
    """Its counters against sets: nothing but the chosen stays in memory, from the first decode step
    to the last."""
    spec = small.spec
    for answer in found[1].values():
        assert answer.resident.sum(1).tolist() == [X] * spec.L
        hits = sum(
            len(set(np.flatnonzero(step[layer])) & set(np.flatnonzero(answer.resident[layer])))
            for step in answer.wanted
            for layer in range(spec.L)
        )
        assert answer.hits == hits and answer.requests == STEPS * spec.L * spec.K
        assert answer.utilisation == pytest.approx(hits / (X * spec.L * STEPS))
        assert answer.hit_rate * spec.K == pytest.approx(answer.utilisation * X)
    answers = found[1]
    assert answers["free"].hits == answers["again"].hits != answers["fixed"].hits
    fewer, more = sorted((answers["free"], answers["fixed"]), key=lambda answer: answer.hits)
    assert fewer.read_bytes > more.read_bytes


def test_the_prompts_own_popularity_is_the_cache_of_that_name(small, store, found):
    """x experts a layer, chosen by the engine alone: the same hits."""
    ids, answers = found
    with study.Prefetcher(store, X) as prefetcher, torch.inference_mode():
        session = prefetcher.model.moelab
        given = torch.tensor([ids])
        how = {"max_new_tokens": STEPS + 1, "min_new_tokens": STEPS + 1, "do_sample": False}
        prefetcher.model.generate(given, **how)
        full = [session.residency.full(layer) for layer in range(small.spec.L)]
    assert full == [np.flatnonzero(row).tolist() for row in answers["free"].resident]


def test_the_hit_curve_is_a_naive_loops(small):
    rng, spec = np.random.default_rng(0), small.spec
    answers = [
        study.Answer(
            None,
            rng.integers(0, 9, (spec.L, spec.E)),
            None,
            rng.random((3, spec.L, spec.E)) < 0.2,
            0,
            1,
            0,
        )
        for _ in range(2)
    ]
    curve = study.hit_curve(answers, spec)
    for x, percent in curve["dataset-free"]:
        shares = []
        for answer in answers:
            hits = sum(
                sum(
                    answer.wanted[:, l, e].sum()
                    for e in sorted(range(spec.E), key=lambda e: (-answer.counts[l, e], e))[:x]
                )
                for l in range(spec.L)
            )
            shares.append(hits / answer.wanted.sum())
        assert percent == pytest.approx(100 * np.mean(shares))
    assert all(free <= ceiling for (_, free), (_, ceiling) in zip(*list(curve.values())[:2]))
    assert (
        dict(curve["chance"])[spec.K] == pytest.approx(100 * spec.K / spec.E)
        and dict(curve["chance"])[spec.E] == 100
    )
