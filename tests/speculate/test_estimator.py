"""The estimator against appendix A written out, and its sizes against the paper's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.api import make_predictor
from moelab.base.registry import make, names
from moelab.cards import load_model
from moelab.models.identity import identity
from moelab.recording import record
from moelab.speculate import DefaultVectors, default_vectors
from moelab.speculate.estimator import Estimator, ResidualEstimator
from tests.speculate.conftest import make as predictor
from tests.speculate.conftest import passed

SMALL = st.integers(1, 9)


@given(SMALL, SMALL, st.integers(2, 5), SMALL, st.integers(1, 5), SMALL)
def test_forward_is_appendix_a_row_by_row(H, E, L, width, expansion, T):
    estimator = Estimator(H, E, L, width, expansion)
    q, layer = torch.randn(T, H), torch.randint(L - 1, (T,))
    w = {name: tensor.detach().double() for name, tensor in estimator.state_dict().items()}
    logits = estimator(q, layer)
    for t in range(T):
        x = w["A.weight"] @ q[t].double() + w["A.bias"] + w["layer.weight"][layer[t]]
        h = w["B.weight"] @ x + w["B.bias"]
        x = x + w["C.weight"] @ (h / (1 + (-h).exp())) + w["C.bias"]
        x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * w["norm.weight"] + w["norm.bias"]
        # the norm makes rounding up to 1 / √1e-5 = 316 times larger, where a row hardly varies
        expected = w["head.weight"] @ x + w["head.bias"]
        torch.testing.assert_close(logits[t].double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "card, parameters",
    [("GPT-OSS-20B", 4_000_000), ("Qwen3-30B-A3B", 17_000_000), ("GPT-OSS-120B", 45_000_000)],
)
def test_the_papers_budgets_are_met_and_the_latent_is_narrower_than_the_model(card, parameters):
    spec = load_model(card)
    with torch.device("meta"):
        estimator = Estimator.sized(spec.H, spec.E, spec.L, parameters)
    found = sum(p.numel() for p in estimator.parameters())
    assert found == pytest.approx(parameters, rel=0.02)
    assert estimator.config["width"] < spec.H


def test_a_budget_that_is_too_small():
    with pytest.raises(ValueError, match="too few"):
        Estimator.sized(2880, 128, 36, 1000)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_an_untrained_residual_estimator_is_the_next_router_bit_for_bit(name, dtype, tiny_model):
    model = tiny_model(name, dtype)
    trace = record(model, [[5, 9, 33, 12, 60]], hidden=True)
    estimator = ResidualEstimator(trace.residuals.shape[-1], model.spec.E, model.spec.L, 16)
    bag = {"vectors": default_vectors(model, [[5, 9, 33]]), "estimator": estimator}
    by_router, by_estimator = (predictor(name, model, **bag) for name in ("quasi", "estimator"))
    for layer in by_router.targets:
        seen = passed(trace, layer)
        said = zip(by_router.predict(layer, *seen), by_estimator.predict(layer, *seen))
        assert all(torch.equal(one, other) for one, other in said)


@pytest.mark.parametrize("kind", names("estimator"))
def test_saved_and_loaded_it_is_the_same(tiny_model, tmp_path, kind):
    model = tiny_model("mixtral")
    estimator = make("estimator", kind, 32, 4, 3, 16, expansion=2, model_id=identity(model))
    torch.nn.init.normal_(estimator.head.weight)
    estimator.vectors = vectors = default_vectors(model, [[5, 9, 33]])
    estimator.choice = (True, False, False)
    path, q = estimator.save(tmp_path / "new" / "e.safetensors"), torch.randn(5, 32)
    loaded = Estimator.load(path)
    assert type(loaded) is type(estimator) and not loaded.training
    assert loaded.config == estimator.config and torch.equal(loaded(q, 0), estimator(q, 0))
    assert loaded.choice == estimator.choice
    alone = DefaultVectors.load(vectors.save(tmp_path / "v.safetensors"))
    for again in (loaded.vectors, alone):
        assert (again.weighted, again.model_id) == (vectors.weighted, vectors.model_id)
        assert all(map(torch.equal, again.tensors.values(), vectors.tensors.values()))
    other, parts = tiny_model("olmoe"), {"estimator": loaded, "vectors": loaded.vectors}
    assert make_predictor(model, "estimator", **parts)
    with pytest.raises(ValueError, match="another model.*`moelab train"):
        make_predictor(other, "estimator", **parts)
    with pytest.raises(ValueError, match="estimator is of another model"):
        make_predictor(other, "estimator", **parts | {"vectors": default_vectors(other, [[5]])})
    lying = Estimator(32, 8, 3, 16, model_id=identity(model))
    with pytest.raises(ValueError, match="damaged"):
        make_predictor(model, "estimator", **parts | {"estimator": lying})
