"""Predictors against routers run in the model, counting loops and the definition of each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from moelab.base import registry
from moelab.checkpoint.opening import spec_of
from moelab.models import discover
from moelab.models.stream import streams
from moelab.recording import record
from moelab.speculate import default_vectors, takes
from moelab.speculate.routers import LOGITS, ask, route
from tests.checkpoint import wild
from tests.models import tiny
from tests.speculate.conftest import PROMPTS, make, neighbours, passed

WILD = ["glm4_moe", "minimax", "flex_olmo", "ernie4_5_moe"]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [*tiny.SOME, *WILD])
def test_weights_from_logits_are_the_routers_own(name, dtype, tiny_model):
    """A router given its own logits for another input returns what it returned for the one they
    came from."""
    model = wild.model_of(name, dtype) if name in WILD else tiny_model(name, dtype)
    torch.manual_seed(0)
    for layer in discover(model):
        x, other = torch.randn(2, 5, spec_of(model).H, dtype=dtype).unbind(0)
        output = ask(layer, x)
        logits = output[LOGITS.get(type(layer.router).__name__, 0)]
        ids, weights = layer.routing(output)
        given_ids, given_weights = route(layer, other, logits.reshape(-1, logits.shape[-1]))
        assert torch.equal(ids, given_ids) and torch.equal(weights, given_weights)
        assert weights.dtype == given_weights.dtype


def test_a_router_without_a_linear_layer_says_so(tiny_model):
    layer = discover(tiny_model("mixtral"))[0]

    class Odd(type(layer.router)):
        def forward(self, x):
            logits = x @ self.weight.T
            weights, ids = logits.topk(self.top_k)
            return logits, weights, ids

    layer.router.__class__, stock = Odd, type(layer.router)
    try:
        x = torch.randn(2, 32)
        assert route(layer, x)[0].shape == (2, 2)
        with pytest.raises(ValueError, match="Odd calls F.linear 0 times"):
            route(layer, x, torch.zeros(2, 4))
    finally:
        layer.router.__class__ = stock


@torch.no_grad()
def test_router_and_quasi_are_the_next_router_on_s_and_q(model):
    """As the model's own modules route each token by itself; hooks on routers stay silent."""
    vectors = default_vectors(model, PROMPTS)
    trace = record(model, PROMPTS, hidden=True, batch_size=1)
    by_router, by_quasi = (make(name, model, vectors=vectors) for name in ("router", "quasi"))
    assert {(here, there.index) for here, there in by_router.targets.items()} == {
        (here.index, there.index) for here, there in neighbours(model)
    }
    for layer, following in neighbours(model):
        s, r, ids, weights = passed(trace, layer.index)
        default = vectors.layer_default(layer.index, ids, weights)
        q, fired = streams(model)[following.index].norm(r + default.to(r.dtype)), []
        handle = following.router.register_forward_hook(lambda *_, fired=fired: fired.append(1))
        said = [p.predict(layer.index, s, r, ids, weights) for p in (by_router, by_quasi)]
        handle.remove()
        assert not fired
        for (got, got_weights), x in zip(said, (s, q)):
            for t, one in enumerate(x):
                one = one[None, None] if model.config.is_encoder_decoder else one[None]
                want, want_weights = (
                    of[0].sort() for of in following.routing(following.router(one))
                )
                assert torch.equal(got[t].sort().values, want.values)
                torch.testing.assert_close(got_weights[t].sort().values, want_weights.values)


@torch.no_grad()
def test_the_hybrid_is_one_or_the_other(tiny_model):
    model = tiny_model("mixtral")
    trace = record(model, PROMPTS, hidden=True, batch_size=1)
    matrix = torch.randn(4, 32)
    bag = {
        "vectors": default_vectors(model, PROMPTS),
        "estimator": lambda q, layer: q @ matrix.T * (layer + 1),
        "choice": [True, False, False],
    }
    by = {name: make(name, model, **bag) for name in ("estimator", "quasi", "hybrid")}
    for layer, same, other in ((0, "estimator", "quasi"), (1, "quasi", "estimator")):
        said = {name: of.predict(layer, *passed(trace, layer)) for name, of in by.items()}
        assert all(map(torch.equal, said["hybrid"], said[same]))
        assert not torch.equal(said["hybrid"][0], said[other][0])
    with pytest.raises(ValueError, match="one for each of the 3 MoE layers"):
        make("hybrid", model, **{**bag, "choice": [True]})


def steps(E, K, B, S, n, seed=0):
    """Made-up routing of a prefill [B·S, K] and n decode steps [B, K]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(T, E, generator=generator).topk(K).indices, torch.rand(T, K))
        for T in [B * S] + [B] * n
    ]


@pytest.mark.parametrize("B", [1, 3])
def test_frequency_is_each_prompts_prefill_and_previous_the_token_before(tiny_model, B):
    model, S = tiny_model("olmoe"), 7
    E, K = model.spec.E, model.spec.K
    by = {name: make(name, model) for name in ("frequency", "previous")}
    for seed in (0, 1):  # a second prompt forgets the first
        routed = steps(E, K, B, S, 4, seed)
        for p in by.values():
            p.begin()
        for step, (ids, weights) in enumerate(routed):
            said = {}
            for name, p in by.items():
                said[name] = p.predict(0, torch.zeros(len(ids), 32), None, ids, weights)
                p.observe(0, *steps(E, K, B, S, 0, 99)[0])  # another layer: no matter
                p.observe(1, ids, weights)
            if step == 0:
                assert said == {"frequency": None, "previous": None}
                continue
            for b in range(B):
                counts = Counter(routed[0][0][b * S : (b + 1) * S].flatten().tolist())
                found = sorted(counts[e] for e in said["frequency"][0][b].tolist())
                assert found == sorted(n for _, n in counts.most_common(K))
                last = (b + 1) * S - 1 if step == 1 else b
                for of, before in zip(said["previous"], routed[step - 1]):
                    assert torch.equal(of[b], before[last])


def test_static_and_random(tiny_model):
    model, T = tiny_model("olmoe"), 4000
    trace = record(model, PROMPTS)
    asked = torch.zeros(T, 32), None, torch.zeros(T, 2, dtype=torch.long), torch.zeros(T, 2)
    ids, weights = make("static", model, trace=trace).predict(0, *asked)
    counts = trace.counts()[1]
    assert ids.shape == weights.shape == (T, 2) and (ids == ids[0]).all()
    assert counts[ids[0]].tolist() == counts.sort(descending=True).values[:2].tolist()
    (ids, weights), (again, _) = (make("random", model, seed=3).predict(0, *asked) for _ in "ab")
    assert torch.equal(ids, again) and (weights == 0.5).all() and (ids[:, 0] != ids[:, 1]).all()
    p = 2 / 8
    assert abs((ids == 5).any(-1).double().mean() - p) < 4 * (p * (1 - p) / T) ** 0.5


def test_what_is_missing_or_anothers_is_said(tiny_model):
    model, other = tiny_model("mixtral"), tiny_model("olmoe")
    vectors = default_vectors(model, PROMPTS[:1])
    for name, ingredients, message in (
        ("psychic", {}, "no predictor 'psychic'.*There are: router, quasi"),
        ("router", {"crystal": "ball"}, "takes no crystal; it takes ahead"),
        ("quasi", {}, "Quasi needs vectors=.*`moelab train vectors MODEL FILE`"),
        (
            "hybrid",
            {"vectors": vectors},
            "Hybrid needs estimator=.*`moelab train estimator MODEL FILE`",
        ),
        ("static", {}, "Static needs calibration=.*`moelab calibrate MODEL FILE`.*trace="),
        ("router", {"ahead": 0}, "ahead is 0"),
        ("quasi", {"vectors": default_vectors(other, PROMPTS)}, "of another model"),
        ("static", {"trace": record(other, PROMPTS)}, "another model"),
    ):
        with pytest.raises(ValueError, match=message):
            registry.make("predictor", name, model, **ingredients)


def test_targets_are_moe_layers_ahead_in_the_same_stack(tiny_model):
    for ahead in (1, 2, 3):
        targets = make("router", tiny_model("mixtral"), ahead=ahead).targets
        assert {l: to.index for l, to in targets.items()} == {
            l: l + ahead for l in range(3 - ahead)
        }
    # qwen3_moe's second decoder layer is dense
    targets = make("router", tiny_model("qwen3_moe")).targets
    assert [there.name for there in targets.values()] == ["model.layers.2.mlp"]
    assert takes("hybrid") == ["vectors", "estimator", "choice"] and takes("random") == ["seed"]
