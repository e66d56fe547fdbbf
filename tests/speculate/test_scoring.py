"""Scores against loops over saved hidden states, and the two controls."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moelab.intervals import ratio
from moelab.models import discover
from moelab.models.stream import streams
from moelab.recording import record
from moelab.speculate import default_vectors
from moelab.speculate.predictors import route
from moelab.speculate.scoring import Score, choose, score, similarity, walk
from moelab.trace import DECODE, PREFILL
from tests.speculate.conftest import make

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71], [3, 90, 17, 25, 31]]


def recorded(model, **options):
    return record(model, PROMPTS, max_new_tokens=5, min_new_tokens=5, hidden=True, **options)


def following(layers, layer):
    """The layer after this one in the same stack, or None."""
    after = layers[layer.index + 1] if layer.index + 1 < len(layers) else None
    return after if after and ("encoder" in after.name) == ("encoder" in layer.name) else None


@torch.no_grad()
@pytest.mark.parametrize("phase", [PREFILL, DECODE, None])
@pytest.mark.parametrize(
    "name", ["qwen2_moe", "phimoe", "llama4_text", "deepseek_v3", "switch_transformers"]
)
def test_recall_and_alignment_are_what_loops_count(name, phase, tiny_model):
    model = tiny_model(name)
    trace, layers, E = recorded(model), discover(model), model.spec.E
    got = score(trace, make("router", model), phase)
    for layer in layers[:-1]:
        target, hits, requests = following(layers, layer), 0, 0
        aligned, tokens = [0] * trace.spec.K, [0] * trace.spec.K
        for t in range(len(trace)):
            if target is None or not trace.router_inputs[t, layer.index].any():
                continue
            if phase is not None and trace.phase[t] != phase:
                continue
            ids, weights = route(target, trace.router_inputs[t, layer.index][None])
            said = sorted(
                zip(weights[0].tolist(), ids[0].tolist()), key=lambda pair: -pair[0]
            )  # ties as chosen
            true = sorted(
                (
                    (w, e)
                    for w, e in zip(
                        trace.weights[t, target.index].tolist(), trace.ids[t, target.index].tolist()
                    )
                    if e != E
                ),
                key=lambda pair: -pair[0],
            )
            for rank, (_, expert) in enumerate(true):
                requests += 1
                hits += expert in [e for _, e in said]
                tokens[rank] += 1
                aligned[rank] += said[rank][1] == expert
        assert got.requests.sum(0)[layer.index] == requests and got.hits.sum(0)[layer.index] == hits
        assert (
            got.tokens[layer.index].tolist() == tokens
            and got.aligned[layer.index].tolist() == aligned
        )
        recall = got.recall[layer.index].item()
        assert recall == hits / requests if requests else math.isnan(recall)


@torch.no_grad()
def test_similarity_is_the_mean_cosine(model):
    vectors, trace, layers = default_vectors(model, PROMPTS), recorded(model), discover(model)
    got = similarity(trace, model, vectors)
    for layer in layers[:-1]:
        target, of_s, of_q = following(layers, layer), [], []
        for t in range(len(trace)):
            if target is None or not trace.router_inputs[t, layer.index].any():
                continue
            true, s = trace.router_inputs[t, target.index], trace.router_inputs[t, layer.index]
            d = vectors.layer_default(
                layer.index,
                trace.ids[t : t + 1, layer.index].long(),
                trace.weights[t : t + 1, layer.index],
            )
            q = streams(model)[target.index].norm(
                (trace.residuals[t : t + 1, layer.index] + d).to(s.dtype)
            )[0]
            for values, x in ((of_s, s), (of_q, q)):
                values.append(float(x @ true / (x.norm() * true.norm())))
        if not of_s:
            assert got["s"][layer.index].isnan() and got["q"][layer.index].isnan()
            continue
        assert got["s"][layer.index].item() == pytest.approx(sum(of_s) / len(of_s), abs=1e-5)
        assert got["q"][layer.index].item() == pytest.approx(sum(of_q) / len(of_q), abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_oracle_scores_everything(model, batch_size):
    trace = recorded(model, batch_size=batch_size)
    got = score(trace, make("oracle", model, trace=trace))
    there = got.requests.sum(0) > 0
    assert there.any() and torch.equal(got.recall[there], torch.ones_like(got.recall[there]))
    assert torch.equal(got.rank_alignment[there], torch.ones_like(got.rank_alignment[there]))


def test_the_random_control_scores_k_over_e(tiny_model):
    model = tiny_model("qwen2_moe")
    prompts = torch.randint(3, 96, (12, 60), generator=torch.Generator().manual_seed(0)).tolist()
    trace = record(model, prompts, hidden=True)
    got = score(trace, make("random", model, seed=1))
    p, n = model.spec.K / model.spec.E, 12 * 60 * model.spec.K
    assert torch.equal(got.requests.sum(0), torch.full((2,), n))
    assert ((got.recall - p).abs() < 4 * (p * (1 - p) / n) ** 0.5).all()
    assert (got.standard_error < 3 * (p * (1 - p) / n) ** 0.5).all()


def test_several_layers_ahead(tiny_model):
    model = tiny_model("mixtral")
    trace = recorded(model, batch_size=1)
    got = score(trace, make("oracle", model, trace=trace, ahead=2))
    assert got.recall.tolist() == [1.0]
    assert score(trace, make("router", model, ahead=2)).requests.sum() == len(trace) * model.spec.K


def test_those_that_remember_see_one_token_at_a_time(tiny_model):
    """`previous` at decode step i knows the choices of step i − 1, the prefill's last token
    first."""
    model = tiny_model("olmoe")
    trace = recorded(model)
    got = score(trace, make("previous", model), DECODE)
    for layer in (0, 1):
        hits = 0
        for i in range(3):
            mine = trace.select(trace.sequence == i)
            for t in range(len(PROMPTS[i]), len(mine)):
                hits += len(
                    set(mine.ids[t, layer + 1].tolist()) & set(mine.ids[t - 1, layer + 1].tolist())
                )
        assert got.hits.sum(0)[layer] == hits
    assert torch.equal(got.requests.sum(0), torch.full((2,), 3 * 4 * model.spec.K))
    assert score(trace, make("previous", model), PREFILL).recall.isnan().all()


def test_a_text_as_if_generated(tiny_model):
    model = tiny_model("olmoe")
    trace = record(model, PROMPTS, hidden=True)
    trace = replace(trace, phase=torch.where(trace.position < 3, PREFILL, DECODE).to(torch.uint8))
    assert score(trace, make("frequency", model)).requests[:, 0].tolist() == [4 * 2, 0, 2 * 2]


def test_walking_gives_every_token_once_in_order(model):
    trace = recorded(model)
    for token_by_token in (False, True):
        rows = []
        for prompt, forwards in walk(trace, token_by_token):
            for forward in forwards:
                assert (trace.sequence[forward.rows] == prompt).all()
                assert (trace.phase[forward.rows] == forward.phase).all()
                assert not token_by_token or forward.phase == PREFILL or len(forward.rows) == 1
                rows += forward.rows.tolist()
        assert sorted(rows) == list(range(len(trace)))


def test_the_hybrids_choice_is_the_better_recall(tiny_model):
    """An estimator that knows the next router of one layer and nothing of the other."""
    model = tiny_model("mixtral")
    vectors, trace = default_vectors(model, PROMPTS), recorded(model)
    worst = [float(r) for r in score(trace, make("quasi", model, vectors=vectors)).recall]
    assert max(worst) < 1

    def estimator(q, layer):
        # The truth for layer 1, found by the residual's place in the trace; rubbish for layer 0.
        logits = torch.zeros(len(q), model.spec.E)
        if layer == 1:
            for i, x in enumerate(q):
                row = int((known - x).abs().sum(-1).argmin())
                logits[i, trace.ids[row, 2].long()] = 5.0
        return logits

    d = vectors.layer_default(1, trace.ids[:, 1].long(), trace.weights[:, 1])
    known = streams(model)[2].norm(trace.residuals[:, 1] + d).detach()
    assert choose(trace, model, vectors, estimator) == (False, True, False)


def test_the_choice_is_made_at_the_distance_of_the_estimator(tiny_model):
    """One that knows the truth two layers on is chosen at the only layer that has one there."""
    model = tiny_model("mixtral")
    vectors, trace = default_vectors(model, PROMPTS), recorded(model, batch_size=1)
    d = vectors.layer_default(0, trace.ids[:, 0].long(), trace.weights[:, 0])
    known = streams(model)[2].norm(trace.residuals[:, 0] + d).detach()

    class Knows:
        ahead = 2

        def __call__(self, q, layer):
            rows = torch.cdist(q, known).argmin(1)
            return torch.zeros(len(q), model.spec.E).scatter(
                1, trace.ids[rows, layer + 2].long(), 5.0
            )

    assert float(score(trace, make("quasi", model, vectors=vectors, ahead=2)).recall[0]) < 1
    assert choose(trace, model, vectors, Knows()) == (True, False, False)


def test_a_trace_without_hidden_states_is_refused(tiny_model):
    model = tiny_model("mixtral")
    with pytest.raises(ValueError, match="hidden=True"):
        score(record(model, PROMPTS), make("router", model))


def test_the_margin_is_the_interval_of_the_ratio_over_prompts():
    """`intervals.ratio`, layer by layer, whose coverage is drawn in tests of its own; a single
    prompt has none."""
    rng = torch.Generator().manual_seed(0)
    requests = torch.randint(20, 60, (7, 3), generator=rng)
    hits = (requests * torch.rand(7, 3, generator=rng)).long()
    found = Score(requests, hits, torch.zeros(3, 2), torch.ones(3, 2))
    for layer in range(3):
        value, low, high = ratio(hits[:, layer], requests[:, layer])
        assert float(found.recall[layer]) == pytest.approx(value)
        assert float(found.margin[layer]) == pytest.approx((high - low) / 2)
    assert Score(requests[:1], hits[:1], torch.zeros(3, 2), torch.ones(3, 2)).margin.isnan().all()
