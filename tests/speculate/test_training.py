"""Training rows against a loop over tokens, the loss against its definition, and what training
gives back."""

from __future__ import annotations

import pytest
import torch

from moelab.models.stream import streams
from moelab.recording import record
from moelab.speculate import default_vectors, training
from moelab.speculate.estimator import ESTIMATORS
from moelab.speculate.routers import route, router_logits
from moelab.speculate.rows import Rows
from moelab.speculate.training import divergence, evaluate, train
from notebooks.studies.predictor_scores import score
from tests.speculate.conftest import make

PROMPTS = torch.randint(3, 96, (24, 11), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def small(tiny_model):
    """(model, trace, validation trace, default vectors) of one architecture."""
    model = tiny_model("mixtral")
    trace, validation = (record(model, of, hidden=True) for of in (PROMPTS[:20], PROMPTS[20:]))
    return model, trace, validation, default_vectors(model, PROMPTS[:4])


def quick(small, **changes):
    model, trace, validation, vectors = small
    options = {"validation": validation, "parameters": 4000, "tokens": 1100, "batch": 64}
    return train(trace, model, vectors, **options | {"every": 150} | changes)


@torch.no_grad()
def test_rows_are_what_a_loop_over_tokens_and_layers_finds(model):
    trace = record(model, PROMPTS[:4], max_new_tokens=3, hidden=True)
    vectors = default_vectors(model, PROMPTS[:4])
    rows = Rows(trace, model, vectors)
    expected = []
    for l, target in sorted(rows.quasi.targets.items()):
        for t in range(len(trace)):
            if all(int(trace.ids[t, i, 0]) != trace.spec.E for i in (l, target.index)):
                one = slice(t, t + 1)
                d = vectors.layer_default(l, trace.ids[one, l].long(), trace.weights[one, l])
                q = streams(model)[target.index].norm(d + trace.residuals[one, l])[0]
                expected.append((q, l, trace.ids[t, target.index].long()))
    found = rows.read(torch.arange(len(trace)))
    assert len(found.logits) == len(expected) > 0
    torch.testing.assert_close(found.q, torch.stack([q for q, _, _ in expected]))
    assert found.layer.tolist() == [l for _, l, _ in expected]
    true = torch.stack([ids for _, _, ids in expected])
    for l, target in rows.quasi.targets.items():
        q, _, start, logits = (of[found.layer == l] for of in found)
        assert torch.equal(start, router_logits(target, q))
        # the true logits lead the router to what was recorded
        ids, _ = route(target, torch.zeros_like(q), logits)
        assert torch.equal(ids.sort(-1).values, true[found.layer == l].sort(-1).values)


def test_each_epoch_visits_every_token_once():
    some = list(training.drawn(10, 4, 25, torch.Generator().manual_seed(1)))
    assert [len(tokens) for tokens in some] == [4, 4, 2, 4, 4, 2, 4, 1]
    for epoch in (some[:3], some[3:6]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(10))


def test_the_loss_is_the_divergence_of_the_estimator_from_the_router():
    """Of one distribution; of a sigmoid router, the sum over each expert's."""
    logits, predicted = torch.randn(2, 7, 5).unbind(0)
    p, q = logits.softmax(-1), predicted.softmax(-1)
    torch.testing.assert_close(divergence(logits, predicted), (p * (p / q).log()).sum(-1))
    p, q = logits.sigmoid(), predicted.sigmoid()
    each = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(divergence(logits, predicted, "sigmoid-group"), each.sum(-1))
    assert (divergence(logits, logits + 1, "sigmoid") > 0.1).all()  # a constant makes other weights


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_training_learns_and_returns_its_best(small, kind):
    model, _, validation, vectors = small
    state = torch.get_rng_state()
    trained = quick(small, kind=kind, parameters=8000)
    assert torch.equal(torch.get_rng_state(), state)  # all draws are its own
    start, best = trained.history[0], min(point.loss for point in trained.history)
    assert (start.tokens, trained.history[-1].tokens) == (0, 1100)
    assert evaluate(trained.estimator, Rows(validation, model, vectors)) == best
    bag = {"vectors": vectors, "estimator": trained.estimator}
    assert score(validation, make("estimator", model, **bag)).recall.min() > 0
    assert kind != "appendix-a" or best < 0.8 * start.loss


def test_the_seed_decides(small):
    one, same, other = (
        quick(small, tokens=300, seed=seed).estimator.state_dict() for seed in (3, 3, 4)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_the_weights_of_the_best_validation_are_kept(small, monkeypatch):
    losses, seen = iter([9.0, 5.0, 3.0, 4.0, 3.5]), []

    def scripted(estimator, _):
        seen.append({name: tensor.clone() for name, tensor in estimator.state_dict().items()})
        return next(losses)

    monkeypatch.setattr(training, "evaluate", scripted)
    trained = quick(small, tokens=800, every=200)
    assert [point.loss for point in trained.history] == [9.0, 5.0, 3.0, 4.0, 3.5]
    kept = trained.estimator.state_dict()
    assert all(torch.equal(seen[2][name], kept[name]) for name in kept)


def test_unusable_arguments_are_named(small, tiny_model):
    model, trace, validation, vectors = small
    for what, changes, message in (
        ((model, record(model, PROMPTS[:2]), validation, vectors), {}, "no hidden states"),
        ((tiny_model("olmoe"), trace, validation, vectors), {}, "another model"),
        (small, {"tokens": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            quick(what, **changes)
