"""Scores against loops over saved hidden states, and the two controls."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moelab.recording import record
from moelab.speculate import default_vectors
from moelab.speculate.routers import route
from moelab.speculate.rows import Rows
from moelab.speculate.training import choose
from moelab.trace import DECODE, PREFILL
from notebooks.studies.passes import walk
from notebooks.studies.predictor_scores import Score, score
from notebooks.studies.ratios import ratio
from tests.speculate.conftest import PROMPTS, make, neighbours


def recorded(model, **options):
    return record(model, PROMPTS, max_new_tokens=5, min_new_tokens=5, hidden=True, **options)


def by_weight(ids, weights, E):
    """The experts of a token by falling weight, ties as chosen."""
    order = sorted(range(len(ids)), key=lambda k: -float(weights[k]))
    return [int(ids[k]) for k in order if ids[k] != E]


@torch.no_grad()
@pytest.mark.parametrize("phase", [PREFILL, DECODE, None])
@pytest.mark.parametrize("name", ["qwen2_moe", "llama4_text", "switch_transformers"])
def test_recall_and_alignment_are_what_loops_count(name, phase, tiny_model):
    model = tiny_model(name)
    trace, E, K = recorded(model), model.spec.E, model.spec.K
    got = score(trace, make("router", model), phase)
    for layer, target in neighbours(model):
        l, hits, aligned, tokens = layer.index, 0, [0] * K, [0] * K
        for t in range(len(trace)):
            s = trace.router_inputs[t, l]
            if not s.any() or phase not in (None, int(trace.phase[t])):
                continue
            ids, weights = route(target, s[None])
            said = by_weight(ids[0], weights[0], E)
            true = by_weight(trace.ids[t, target.index], trace.weights[t, target.index], E)
            hits += len(set(said) & set(true))
            for rank, expert in enumerate(true):
                tokens[rank] += 1
                aligned[rank] += said[rank] == expert
        assert got.requests.sum(0)[l] == sum(tokens) and got.hits.sum(0)[l] == hits
        assert got.tokens[l].tolist() == tokens and got.aligned[l].tolist() == aligned
        if tokens[0]:
            assert got.recall[l] == hits / sum(tokens)
        else:
            assert math.isnan(got.recall[l])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_oracle_scores_everything_and_every_token_is_walked_once(model, batch_size):
    trace = recorded(model, batch_size=batch_size)
    got = score(trace, make("oracle", model, trace=trace))
    there = got.requests.sum(0) > 0
    assert there.any() and (got.recall[there] == 1).all() and (got.rank_alignment[there] == 1).all()
    for token_by_token in (False, True):
        rows = []
        for prompt, forwards in walk(trace, token_by_token):
            for forward in forwards:
                assert (trace.sequence[forward.rows] == prompt).all()
                assert (trace.phase[forward.rows] == forward.phase).all()
                assert not token_by_token or forward.phase == PREFILL or len(forward.rows) == 1
                rows += forward.rows.tolist()
        assert sorted(rows) == list(range(len(trace)))


def test_those_that_remember_see_one_token_at_a_time(tiny_model):
    """`previous` at decode step i knows the choices of step i − 1, the prefill's last token
    first."""
    model = tiny_model("olmoe")
    trace = recorded(model)
    got = score(trace, make("previous", model), DECODE)
    for layer in (0, 1):
        hits = 0
        for i, prompt in enumerate(PROMPTS):
            ids = trace.ids[trace.sequence == i, layer + 1].tolist()
            hits += sum(len({*ids[t]} & {*ids[t - 1]}) for t in range(len(prompt), len(ids)))
        assert got.hits.sum(0)[layer] == hits
    assert torch.equal(got.requests.sum(0), torch.full((2,), 3 * 4 * model.spec.K))
    assert score(trace, make("previous", model), PREFILL).recall.isnan().all()
    as_if = torch.where(trace.position < 3, PREFILL, DECODE).to(torch.uint8)
    prefill = trace.select(trace.phase == PREFILL)
    prefill = replace(prefill, phase=as_if[trace.phase == PREFILL])
    assert score(prefill, make("frequency", model)).requests[:, 0].tolist() == [4 * 2, 0, 2 * 2]


def test_the_hybrids_choice_is_the_better_recall(tiny_model):
    """An estimator that knows the truth for the last layer that predicts, by the place of q in the
    trace, and nothing elsewhere."""
    model = tiny_model("mixtral")
    vectors, trace = default_vectors(model, PROMPTS), recorded(model, batch_size=1)
    rows = Rows(trace, model, vectors)
    (*_, (_, _, known, _, true)) = rows.layers(torch.arange(len(trace)))

    def knows(q, layer):
        logits = torch.zeros(len(q), model.spec.E)
        nearest = torch.cdist(q, known).argmin(1)
        return logits.scatter(1, true[nearest], 5.0) if layer == 1 else logits

    parts = {"vectors": vectors, "estimator": knows}
    assert score(trace, make("estimator", model, **parts)).recall[1] == 1
    assert score(trace, make("quasi", model, vectors=vectors)).recall[1] < 1
    assert choose(rows, make("estimator", model, **parts)) == (False, True, False)


def test_refused_without_hidden_states_and_the_margin_is_the_interval_over_prompts(tiny_model):
    model = tiny_model("mixtral")
    with pytest.raises(ValueError, match="hidden=True"):
        score(record(model, PROMPTS), make("router", model))
    rng = torch.Generator().manual_seed(0)
    requests = torch.randint(20, 60, (7, 3), generator=rng)
    hits = (requests * torch.rand(7, 3, generator=rng)).long()
    found = Score(requests, hits, torch.zeros(3, 2), torch.ones(3, 2))
    for layer in range(3):
        value, low, high = ratio(hits[:, layer], requests[:, layer])
        assert float(found.recall[layer]) == pytest.approx(value)
        assert float(found.margin[layer]) == pytest.approx((high - low) / 2)
    assert Score(requests[:1], hits[:1], torch.zeros(3, 2), torch.ones(3, 2)).margin.isnan().all()
