"""Training rows against a loop over tokens, streaming against a limit on memory, resuming against
never stopping."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.models.stream import streams
from moelab.recording import record
from moelab.speculate import DefaultVectors, default_vectors, rows, training
from moelab.speculate.estimator import ESTIMATORS
from moelab.speculate.predictors import route
from moelab.speculate.rows import Rows, teacher
from moelab.speculate.scoring import score
from moelab.speculate.training import divergence, evaluate, train
from moelab.trace import RoutingTrace
from tests.speculate.conftest import make

PROMPTS = torch.randint(3, 96, (24, 11), generator=torch.Generator().manual_seed(1)).tolist()


def recorded(model, prompts=PROMPTS[:4]):
    return record(model, prompts, max_new_tokens=3, hidden=True), default_vectors(model, prompts)


@pytest.fixture(scope="module")
def small(tiny_model, tmp_path_factory):
    """(model, path of a trace, validation trace, default vectors) of one architecture."""
    model = tiny_model("mixtral")
    path = tmp_path_factory.mktemp("trace") / "train.safetensors"
    record(model, PROMPTS[:20], hidden=path)
    return (
        model,
        path,
        record(model, PROMPTS[20:], hidden=True),
        default_vectors(model, PROMPTS[:4]),
    )


def quick(small, **changes):
    model, path, validation, vectors = small
    return train(
        path,
        model,
        vectors,
        **{
            "validation": validation,
            "parameters": 4000,
            "tokens": 1100,
            "batch": 64,
            "every": 150,
            **changes,
        },
    )


# -------------------------------------------------------------------------------------------------
# rows and teacher


def test_rows_are_what_a_loop_over_tokens_and_layers_finds(model):
    trace, vectors = recorded(model)
    found = Rows(trace, model, vectors, 1)
    expected = []
    for l, target in sorted(found.quasi.targets.items()):
        for t in range(len(trace)):
            if all(int(trace.ids[t, i, 0]) != trace.spec.E for i in (l, target.index)):
                weights = (
                    torch.ones(trace.spec.K) if vectors.weighted else trace.weights[t, l].float()
                )
                d = sum(
                    (w * vectors.d[l, e] for w, e in zip(weights, trace.ids[t, l].tolist())),
                    vectors.shared[l],
                )
                with torch.no_grad():
                    q = streams(model)[target.index].norm((d + trace.residuals[t, l])[None])[0]
                expected.append((q, l, trace.ids[t, target.index].long()))
    q, layer, start, logits, true = found.read([(0, 5), (5, len(trace))])
    assert len(q) == len(logits) == len(expected) > 0
    torch.testing.assert_close(q, torch.stack([e[0] for e in expected]))
    assert layer.tolist() == [e[1] for e in expected]
    for l, target in found.quasi.targets.items():
        assert torch.equal(start[layer == l], teacher(target, q[layer == l]))
    assert torch.equal(true, torch.stack([e[2] for e in expected]))


def test_the_teachers_logits_lead_its_router_to_what_was_recorded(model):
    trace, vectors = recorded(model)
    for _l, target in make("quasi", model, vectors=vectors).targets.items():
        passed = trace.ids[:, target.index, 0] != trace.spec.E
        s, true = trace.router_inputs[passed, target.index], trace.ids[passed, target.index].long()
        with torch.no_grad():
            ids, weights = route(target, torch.zeros_like(s), teacher(target, s))
        order, recorded_order = ids.argsort(-1), true.argsort(-1)
        assert torch.equal(ids.gather(-1, order), true.gather(-1, recorded_order))
        torch.testing.assert_close(
            weights.gather(-1, order),
            trace.weights[passed, target.index].gather(-1, recorded_order),
        )


def test_rows_from_files_and_from_memory_are_the_same(small):
    model, path, _, vectors = small
    files, mapped = (Rows(t, model, vectors, 1) for t in (path, RoutingTrace.load(path)))
    loaded = RoutingTrace.load(path)
    memory = Rows(loaded.select(torch.ones(len(loaded), dtype=torch.bool)), model, vectors, 1)
    spans = [(100, 130), (3, 4)]
    for a, b, c in zip(files.read(spans), mapped.read(spans), memory.read(spans)):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert files.fingerprint() == memory.fingerprint()


@given(
    st.integers(1, 200), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2)
)
def test_each_epoch_visits_every_token_once(T, stretch, stretches, seed, epoch):
    some = object.__new__(Rows)
    some.T, some.stretch, some.stretches = T, stretch, stretches
    a_epoch = math.ceil(math.ceil(T / stretch) / stretches)
    buffers = [some.spans(epoch * a_epoch + i, seed, 10**9) for i in range(a_epoch)]
    assert sorted(t for spans in buffers for a, b in spans for t in range(a, b)) == list(range(T))
    assert all(sum(b - a for a, b in spans) <= stretch * stretches for spans in buffers)
    assert [t for spans in some.in_order() for a, b in spans for t in range(a, b)] == list(range(T))
    assert sum(b - a for a, b in some.spans(0, seed, 3)) == min(
        3, T, sum(b - a for a, b in some.spans(0, seed, 10**9))
    )


def test_the_loss_is_the_divergence_of_the_estimator_from_the_router():
    logits, predicted = torch.randn(2, 7, 5).unbind(0)
    naive = [
        sum(p * math.log(p / q) for p, q in zip(a.softmax(0).tolist(), b.softmax(0).tolist()))
        for a, b in zip(logits, predicted)
    ]
    torch.testing.assert_close(divergence(logits, predicted), torch.tensor(naive))


def test_a_sigmoid_routers_loss_adds_up_the_divergence_of_each_expert():
    logits, predicted = torch.randn(2, 7, 5).unbind(0)
    naive = torch.zeros(7)
    for t in range(7):
        for e in range(5):
            p, q = (1 / (1 + math.exp(-float(x[t, e]))) for x in (logits, predicted))
            naive[t] += p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    torch.testing.assert_close(divergence(logits, predicted, "sigmoid-group"), naive)
    assert (divergence(logits, logits + 1, "sigmoid") > 0.1).all()  # a constant makes other weights


# -----------------------------------------------------------------------------------------------------------
# training


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_hit_rate_is_that_of_the_predictor(small, kind):
    model, _, validation, vectors = small
    trained = quick(small, tokens=300, kind=kind)
    recall = score(
        validation, make("estimator", model, vectors=vectors, estimator=trained.estimator)
    ).recall
    assert trained.best.hit_rate == pytest.approx(recall.tolist(), abs=1e-9)


@pytest.mark.parametrize("rates", [{}, {"learning_rate": 3.0, "muon_rate": 3.0}])
def test_no_training_makes_the_residual_kind_worse_than_the_router(small, rates):
    """Its start is the next router on q; where training only hurts, that is what comes back."""
    model, path, validation, vectors = small
    trained = quick(small, **rates)
    by_router = score(validation, make("quasi", model, vectors=vectors)).recall
    assert trained.history[0].hit_rate == pytest.approx(by_router.tolist(), abs=1e-9)
    assert trained.best.loss <= trained.history[0].loss
    if rates:
        assert trained.best == trained.history[0] and not trained.estimator.head.weight.any()


def test_training_learns_and_returns_its_best(small):
    model, _, validation, vectors = small
    trained = quick(small, kind="appendix-a")
    assert (
        trained.best.loss
        == min(point.loss for point in trained.history)
        < 0.8 * trained.history[0].loss
    )
    assert trained.best.mean_hit_rate > trained.history[0].mean_hit_rate
    assert (trained.history[0].tokens, trained.history[-1].tokens) == (0, 1100)
    again = evaluate(trained.estimator, Rows(validation, model, vectors, 1))
    assert again == (trained.best.loss, trained.best.hit_rate)


def test_the_seed_decides(small):
    one, same, other = (
        quick(small, tokens=300, seed=seed).estimator.state_dict() for seed in (3, 3, 4)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("after", [1, 3, 6])
def test_an_interrupted_training_ends_with_the_weights_of_one_that_was_not(
    small, tmp_path, monkeypatch, after
):
    monkeypatch.setattr(rows, "STRETCH", 2**14)  # several buffers an epoch, several epochs
    monkeypatch.setattr(rows, "BUFFER", 2**15)
    calls = []

    def dying(*args):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(args)
        return evaluate(*args)

    whole, path = quick(small), tmp_path / "training.pt"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "evaluate", dying)
        quick(small, checkpoint=path)
    resumed = quick(small, checkpoint=path)
    assert resumed.history == whole.history and resumed.best == whole.best
    weights = whole.estimator.state_dict()
    assert all(
        torch.equal(weights[name], tensor)
        for name, tensor in resumed.estimator.state_dict().items()
    )
    assert (
        quick(small, checkpoint=path).history == whole.history
    )  # it is finished: nothing is left to do
    assert [p.name for p in tmp_path.iterdir()] == ["training.pt"]


def test_early_stopping_keeps_the_weights_of_the_best_validation(small, monkeypatch):
    losses, seen = iter([9.0, 5.0, 3.0, 4.0, 3.5, 1.0]), []

    def scripted(estimator, _):
        seen.append({name: tensor.clone() for name, tensor in estimator.state_dict().items()})
        return next(losses), (0.5, 0.5)

    monkeypatch.setattr(training, "evaluate", scripted)
    trained = quick(small, tokens=10**6, every=50, patience=2)
    assert trained.stopped_early and [p.loss for p in trained.history] == [9.0, 5.0, 3.0, 4.0, 3.5]
    assert trained.best == trained.history[2]
    assert all(
        torch.equal(seen[2][name], tensor)
        for name, tensor in trained.estimator.state_dict().items()
    )


# ----------------------------------------------------------------------------------------------------------
# refusals


def test_a_checkpoint_of_another_training_is_refused(small, tmp_path, tiny_model):
    model, path, validation, vectors = small
    file = tmp_path / "training.pt"
    quick(small, tokens=200, checkpoint=file)
    other_vectors = DefaultVectors(
        vectors.d + 1, vectors.shared, vectors.counts, vectors.weighted, vectors.model_id
    )
    other_trace = record(model, PROMPTS[5:], hidden=True)
    with pytest.raises(ValueError, match="differs in kind"):
        quick(small, tokens=200, checkpoint=file, kind="appendix-a")
    for name, what, seed in (
        ("seed", small, 9),
        ("vectors", (model, path, validation, other_vectors), 0),
        ("trace", (model, other_trace, validation, vectors), 0),
        ("validation", (model, path, other_trace, vectors), 0),
    ):
        with pytest.raises(ValueError, match=f"differs in {name}"):
            quick(what, tokens=200, checkpoint=file, seed=seed)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="no readable checkpoint"):
        quick(small, tokens=200, checkpoint=file)


def test_unusable_arguments_are_named(small, tiny_model):
    model, path, validation, vectors = small
    with pytest.raises(ValueError, match="no hidden states"):
        quick((model, record(model, PROMPTS[:2]), validation, vectors))
    with pytest.raises(ValueError, match="another model"):
        quick((tiny_model("olmoe"), path, validation, vectors))
    with pytest.raises(ValueError, match="no MoE layer has another one so far ahead"):
        quick(small, ahead=3)
    with pytest.raises(ValueError, match="at least 1"):
        quick(small, tokens=0)


# -------------------------------------------------------------------------------------------------------------
# memory

STREAM = """
import json, sys, torch
from moelab import open_model
from moelab.offloading.metrics import process
from moelab.speculate import DefaultVectors
from moelab.speculate.training import train
torch.set_num_threads(1)
model = open_model(sys.argv[1])
vectors = DefaultVectors.load(sys.argv[2], model)
options = dict(validation=sys.argv[3], parameters=20_000)
train(sys.argv[3], model, vectors, tokens=64, every=64, **options)      # all that is imported and allocated once
before, tokens = process()["peak_rss_bytes"], int(sys.argv[4])
done = train(sys.argv[3], model, vectors, tokens=tokens, every=tokens, **options)
print(json.dumps([before, process()["peak_rss_bytes"], done.history[-1].tokens]))
"""


def test_memory_does_not_grow_with_the_trace(tmp_path):
    from moelab import open_model
    from moelab.models.identity import identity
    from moelab.trace import GrowingTensor, hidden_path
    from tests.models import tiny

    model = open_model(
        tiny.save("mixtral", tmp_path / "model", hidden_size=1024, num_hidden_layers=2)
    )
    trace = record(model, PROMPTS, hidden=True)
    default_vectors(model, PROMPTS[:2]).save(tmp_path / "vectors.safetensors")
    copies = 400 * 2**20 // (2 * trace.residuals.nbytes)
    columns = {
        name: torch.cat([getattr(trace, name)] * copies)
        for name in ("ids", "weights", "phase", "sequence", "position", "tokens")
    }
    path = tmp_path / "long.safetensors"
    for name in ("router_inputs", "residuals"):
        with GrowingTensor(hidden_path(path, name), name) as file:
            for _ in range(copies):
                file.append(getattr(trace, name))
    size = sum(hidden_path(path, name).stat().st_size for name in ("router_inputs", "residuals"))
    hidden = {name: torch.empty(len(columns["ids"]), 0) for name in ("router_inputs", "residuals")}
    RoutingTrace(
        **columns, **hidden, spec=trace.spec, model_id=identity(model), _hidden_home=path
    ).save(path)
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            STREAM,
            tmp_path / "model",
            tmp_path / "vectors.safetensors",
            path,
            str(len(columns["ids"])),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert out.returncode == 0, out.stderr
    before, after, tokens = json.loads(out.stdout)
    allowed = 220 * 2**20
    assert tokens == len(columns["ids"]) and size > 1.5 * allowed
    assert after - before < allowed
    assert after < 1e9
