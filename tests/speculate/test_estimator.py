"""The estimator against appendix A written out, its sizes against the paper's, and what loading
refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from moelab import open_model
from moelab.cards import load_model
from moelab.models.identity import identity
from moelab.recording import record
from moelab.registry import make, names
from moelab.speculate import default_vectors
from moelab.speculate.estimator import FORMAT, Estimator, ResidualEstimator
from tests.models import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(tiny.save("mixtral", tmp_path_factory.mktemp("mixtral")))


@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(2, 5),
    st.integers(1, 10),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_forward_is_appendix_a_row_by_row(H, E, L, width, expansion, T):
    estimator = Estimator(H, E, L, width, expansion)
    q, layer = torch.randn(T, H), torch.randint(L - 1, (T,))
    w = {name: tensor.detach().double() for name, tensor in estimator.state_dict().items()}
    logits = estimator(q, layer)
    assert logits.shape == (T, E)
    for t in range(T):
        x = w["A.weight"] @ q[t].double() + w["A.bias"] + w["layer.weight"][layer[t]]
        h = w["B.weight"] @ x + w["B.bias"]
        x = x + w["C.weight"] @ (h / (1 + (-h).exp())) + w["C.bias"]
        x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * w["norm.weight"] + w["norm.bias"]
        torch.testing.assert_close(
            logits[t].double(), w["head.weight"] @ x + w["head.bias"], rtol=1e-3, atol=1e-3
        )
        # the norm makes rounding up to 1 / √1e-5 = 316 times larger, where a row hardly varies
        torch.testing.assert_close(
            estimator(q[t : t + 1], int(layer[t]))[0], logits[t], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize(
    "card, parameters",
    [("GPT-OSS-20B", 4_000_000), ("Qwen3-30B-A3B", 17_000_000), ("GPT-OSS-120B", 45_000_000)],
)
def test_the_papers_budgets_are_met_and_the_latent_is_narrower_than_the_model(card, parameters):
    spec = load_model(card)
    with torch.device("meta"):
        estimator = Estimator.sized(spec.H, spec.E, spec.L, parameters)
    assert estimator.parameter_count == pytest.approx(parameters, rel=0.02)
    assert estimator.config["width"] < spec.H


@given(
    st.integers(1, 300),
    st.integers(1, 130),
    st.integers(3, 50),
    st.integers(20_000, 400_000),
    st.integers(1, 2),
)
def test_no_other_width_comes_nearer_to_a_budget(H, E, L, parameters, ahead):
    with torch.device("meta"):
        sized = Estimator.sized(H, E, L, parameters, ahead=ahead)
        width = sized.config["width"]
        for other in {max(width - 16, 8), max(width - 8, 8), width + 8}:
            neighbour = Estimator(H, E, L, other, ahead=ahead)
            # the width is rounded, not the count, which grows faster than the width: allow for the
            # difference
            assert (
                abs(sized.parameter_count - parameters)
                <= abs(neighbour.parameter_count - parameters) + 64 * 8
            )


def test_a_budget_that_is_too_small_and_a_layer_that_is_too_far():
    with pytest.raises(ValueError, match="too few"):
        Estimator.sized(2880, 128, 36, 1000)
    with pytest.raises(ValueError, match="ahead is 3"):
        Estimator(8, 4, 3, 8, ahead=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_an_untrained_residual_estimator_is_the_next_router_bit_for_bit(name, dtype, tmp_path):
    model = open_model(tiny.save(name, tmp_path, dtype))
    trace, vectors = (
        record(model, [[5, 9, 33, 12, 60]], hidden=True),
        default_vectors(model, [[5, 9, 33]]),
    )
    spec, q = model.spec, torch.randn(5, trace.residuals.shape[-1])
    estimator = ResidualEstimator(q.shape[-1], spec.E, spec.L, 16)
    assert not estimator(q, 0).any()
    by_router = make("predictor", "quasi", model, vectors=vectors)
    by_estimator = make("predictor", "estimator", model, vectors=vectors, estimator=estimator)
    with torch.no_grad():
        for layer in by_router.targets:
            seen = (
                trace.router_inputs[:, layer],
                trace.residuals[:, layer],
                trace.ids[:, layer].long(),
                trace.weights[:, layer],
            )
            for one, other in zip(
                by_router.predict(layer, *seen), by_estimator.predict(layer, *seen)
            ):
                assert torch.equal(one, other)


@pytest.mark.parametrize("kind", names("estimator"))
def test_saved_and_loaded_it_is_the_same(model, tmp_path, kind):
    estimator = make(
        "estimator", kind, 32, 4, 3, 16, expansion=2, ahead=2, model_id=identity(model)
    )
    torch.nn.init.normal_(estimator.head.weight)
    loaded = Estimator.load(estimator.save(tmp_path / "new" / "e.safetensors"), model)
    q = torch.randn(5, 32)
    assert type(loaded) is type(estimator)
    assert loaded.config == estimator.config and not loaded.training
    assert torch.equal(loaded(q, 0), estimator(q, 0))
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["e.safetensors"]


def test_loading_refuses_what_is_not_this_models_estimator(model, tmp_path):
    path = Estimator(32, 4, 3, 16, model_id="0123456789abcdef").save(tmp_path / "e.safetensors")
    with pytest.raises(ValueError, match="another model"):
        Estimator.load(path, model)
    with pytest.raises(FileNotFoundError, match="no estimator"):
        Estimator.load(tmp_path / "none.safetensors", model)
    for about in (
        {"format": "moelab.estimator/1"},
        {},
    ):  # the first did not say of which kind it is
        save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors", about)
        with pytest.raises(ValueError, match="no estimator"):
            Estimator.load(tmp_path / "x.safetensors", model)
    save_file(
        {"x": torch.zeros(1)},
        tmp_path / "x.safetensors",
        {"format": FORMAT, "kind": "mine", "model_id": identity(model), "config": "{}"},
    )
    with pytest.raises(ValueError, match="there is no estimator 'mine'"):
        Estimator.load(tmp_path / "x.safetensors", model)
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="no estimator"):
        Estimator.load(tmp_path / "x.safetensors", model)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="no readable"):
        Estimator.load(path, model)
