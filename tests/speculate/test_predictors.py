"""Predictors against routers run in the model, counting loops and the definition of each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import registry
from moelab.models import discover
from moelab.models.stream import streams
from moelab.recording import record
from moelab.speculate import PREDICTORS, default_vectors, takes
from moelab.speculate.predictors import ask, popular, route
from tests.models import tiny
from tests.speculate.conftest import make

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71], [3, 90, 17, 25, 31]]


def logits_of(layer, output):
    """The true logits [T, E] in what a router returned."""
    place = {"Llama4Router": 1, "SwitchTransformersTop1Router": 2}.get(
        type(layer.router).__name__, 0
    )
    return output[place].reshape(-1, output[place].shape[-1])


@torch.no_grad()
def check_given_logits(model):
    """A router given its own logits for another input returns what it returned for the one they
    came from."""
    torch.manual_seed(0)
    for layer in discover(model):
        x, other = torch.randn(2, 5, model.spec.H, dtype=model.dtype).unbind(0)
        output = ask(layer, x)
        ids, weights = layer.routing(output)
        given_ids, given_weights = route(layer, other, logits_of(layer, output))
        assert torch.equal(ids, given_ids) and torch.equal(weights, given_weights)
        assert weights.dtype == given_weights.dtype
        assert not torch.equal(route(layer, other)[0], ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_weights_from_logits_are_the_routers_own(name, dtype, tiny_model):
    check_given_logits(tiny_model(name, dtype))


@pytest.mark.parametrize(
    "name", ["dots1", "glm4_moe", "minimax", "flex_olmo", "hunyuan_v1_moe", "ernie4_5_moe"]
)
def test_weights_from_logits_of_architectures_nobody_wrote_a_line_for(name):
    cfg = transformers.AutoConfig.for_model(
        name,
        **tiny.COMMON,
        num_experts=4,
        num_local_experts=4,
        n_routed_experts=4,
        moe_num_experts=4,
        num_experts_per_tok=2,
        moe_k=2,
        moe_topk=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        moe_num_shared_experts=1,
        moe_intermediate_size=16,
        intermediate_size=24,
        head_dim=8,
        first_k_dense_replace=1,
    )
    model = transformers.AutoModelForCausalLM.from_config(cfg).eval()
    for layer in discover(model):
        for parameter in layer.router.parameters():
            torch.nn.init.normal_(
                parameter, std=1 if parameter.dim() > 1 else 0.01
            )  # a bias must not decide alone
    model.spec = type("Spec", (), {"H": 32})
    check_given_logits(model)


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
def test_asking_a_router_is_what_the_model_would_route(model):
    """Fed with the recorded router inputs, `route` gives the recorded ids; hooks on the router stay
    silent."""
    trace = record(model, PROMPTS, hidden=True, batch_size=1)
    for layer in discover(model):
        rows = trace.router_inputs[:, layer.index].ne(0).any(-1)
        fired = []
        handle = layer.router.register_forward_hook(lambda *_: fired.append(1))
        ids, weights = route(layer, trace.router_inputs[rows, layer.index])
        handle.remove()
        true = trace.ids[rows, layer.index].long()
        room = true != model.spec.E  # a prediction drops no token
        assert not fired and torch.equal(ids.sort(-1).values[room], true.sort(-1).values[room])
        assert (ids < model.spec.E).all()


@torch.no_grad()
def test_router_and_quasi_are_the_next_router_on_s_and_q(model):
    vectors = default_vectors(model, PROMPTS)
    trace = record(model, PROMPTS, hidden=True, batch_size=1)
    layers = discover(model)
    by_router, by_quasi = (make(name, model, vectors=vectors) for name in ("router", "quasi"))
    for layer in layers[:-1]:
        rows = trace.router_inputs[:, layer.index].ne(0).any(-1).nonzero().flatten()
        s, r, ids, weights = (
            column[rows, layer.index]
            for column in (trace.router_inputs, trace.residuals, trace.ids, trace.weights)
        )
        following = layers[layer.index + 1]
        if ("encoder" in layer.name) != ("encoder" in following.name):
            assert layer.index not in by_router.targets and layer.index not in by_quasi.targets
            continue
        said = tuple(
            p.predict(layer.index, s, r, ids.long(), weights) for p in (by_router, by_quasi)
        )
        q = streams(model)[following.index].norm(
            r + vectors.layer_default(layer.index, ids.long(), weights).to(r.dtype)
        )
        for (got, got_weights), x in zip(said, (s, q)):
            for t in range(len(rows)):  # each token for itself
                one = x[t][None, None] if model.config.is_encoder_decoder else x[t][None]
                want, want_weights = following.routing(following.router(one))
                assert sorted(got[t].tolist()) == sorted(want[0].tolist())
                torch.testing.assert_close(
                    got_weights[t].sort().values, want_weights[0].sort().values
                )
    assert len(layers) - 1 not in by_router.targets


def test_the_hybrid_is_one_or_the_other(tiny_model):
    model = tiny_model("mixtral")
    trace = record(model, PROMPTS, hidden=True, batch_size=1)
    matrix = torch.randn(4, 32)
    bag = {
        "vectors": default_vectors(model, PROMPTS),
        "estimator": lambda q, layer: q @ matrix.T * (layer + 1),
        "choice": [True, False, False],
    }
    estimator, quasi, hybrid = (
        make(name, model, **bag) for name in ("estimator", "quasi", "hybrid")
    )
    for layer, expected, other in ((0, estimator, quasi), (1, quasi, estimator)):
        asked = (
            trace.router_inputs[:, layer],
            trace.residuals[:, layer],
            trace.ids[:, layer].long(),
            trace.weights[:, layer],
        )
        with torch.no_grad():
            got, want, not_this = (p.predict(layer, *asked) for p in (hybrid, expected, other))
        assert all(map(torch.equal, got, want)) and not torch.equal(got[0], not_this[0])
    with pytest.raises(ValueError, match="one for each of the 3 MoE layers"):
        make("hybrid", model, **{**bag, "choice": [True]})


@settings(max_examples=40)
@given(B=st.integers(1, 3), n=st.integers(1, 12), E=st.integers(2, 6), seed=st.integers(0, 10**6))
def test_popular_counts_like_a_loop(B, n, E, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, E + 1, (B, n), generator=generator)
    weights = torch.rand(B, n, generator=generator)
    K = min(2, E)
    chosen, mean = popular(ids, weights, E, K)
    for b in range(B):
        counts = Counter(e for e in ids[b].tolist() if e != E)
        by_count = sorted((counts[e] for e in range(E)), reverse=True)[:K]
        assert [counts[e] for e in chosen[b].tolist()] == by_count and len(
            set(chosen[b].tolist())
        ) == K
        for e, m in zip(chosen[b].tolist(), mean[b].tolist()):
            mine = [w for i, w in zip(ids[b].tolist(), weights[b].tolist()) if i == e]
            assert m == pytest.approx(sum(mine) / len(mine) if mine else 0, abs=1e-6)


def steps(E, K, B, S, n, seed=0):
    """Made-up routing of a prefill [B·S, K] and n decode steps [B, K]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)]),
            torch.rand(T, K, generator=generator),
        )
        for T in [B * S] + [B] * n
    ]


@pytest.mark.parametrize("B", [1, 3])
def test_frequency_is_each_prompts_prefill_and_previous_the_token_before(tiny_model, B):
    model = tiny_model("olmoe")
    E, K, S = model.spec.E, model.spec.K, 7
    frequency, previous = make("frequency", model), make("previous", model)
    for seed in (0, 1):  # a second prompt forgets the first
        (prefill, _), *decode = routed = steps(E, K, B, S, 4, seed)
        for p in (frequency, previous):
            p.begin()
        for step, (ids, weights) in enumerate(routed):
            said = {}
            for p in (frequency, previous):
                said[p] = p.predict(0, torch.zeros(len(ids), 32), None, ids, weights)
                p.observe(0, *steps(E, K, B, S, 0, 99)[0])  # another layer: no matter
                p.observe(1, ids, weights)
            if step == 0:
                assert said[frequency] is None and said[previous] is None
                continue
            before, before_weights = routed[step - 1]
            for b in range(B):
                mine = prefill[b * S : (b + 1) * S]
                counts = Counter(mine.flatten().tolist())
                assert sorted(counts[e] for e in said[frequency][0][b].tolist()) == sorted(
                    counts[e] for e, _ in counts.most_common(K)
                )
                last = (b + 1) * S - 1 if step == 1 else b
                assert torch.equal(said[previous][0][b], before[last])
                assert torch.equal(said[previous][1][b], before_weights[last])


def test_static_is_the_traces_most_popular(tiny_model):
    model = tiny_model("olmoe")
    trace = record(model, PROMPTS)
    static = make("static", model, trace=trace)
    ids, weights = static.predict(
        0, torch.zeros(6, 32), None, torch.zeros(6, 2, dtype=torch.long), torch.zeros(6, 2)
    )
    counts = trace.counts()[1]
    assert ids.shape == weights.shape == (6, 2) and (ids == ids[0]).all()
    assert counts[ids[0]].tolist() == counts.sort(descending=True).values[:2].tolist()


def test_random_is_k_different_experts_at_rate_k_over_e(tiny_model):
    model = tiny_model("olmoe")
    random, T = make("random", model, seed=3), 4000
    ids, weights = random.predict(
        0, torch.zeros(T, 32), None, torch.zeros(T, 2, dtype=torch.long), torch.zeros(T, 2)
    )
    assert all(len(set(row)) == 2 for row in ids.tolist()) and torch.equal(
        weights, torch.full((T, 2), 0.5)
    )
    p = 2 / 8
    assert abs((ids == 5).any(-1).double().mean() - p) < 4 * (p * (1 - p) / T) ** 0.5
    again = make("random", model, seed=3)
    assert torch.equal(again.predict(0, torch.zeros(T, 32), None, ids, weights)[0], ids)


def test_the_oracle_notices_another_prompt(tiny_model):
    model = tiny_model("mixtral")
    trace = record(model, PROMPTS, batch_size=1)
    oracle = make("oracle", model, trace=trace)
    oracle.begin()
    other = trace.select(trace.sequence == 1)
    with pytest.raises(ValueError, match="prompt 0, layer 0: .* one by one in the same order"):
        oracle.observe(0, other.ids[:, 0].long(), other.weights[:, 0])


def test_what_is_missing_or_anothers_is_said(tiny_model):
    model = tiny_model("mixtral")
    with pytest.raises(ValueError, match="no predictor 'psychic'.*There are: router, quasi"):
        make("psychic", model)
    with pytest.raises(
        ValueError, match="crystal.*it takes model, \\*, ahead|crystal.*it takes model, ahead"
    ):
        registry.make("predictor", "router", model, crystal="ball")
    with pytest.raises(ValueError, match=r"Quasi needs vectors=moelab.speculate.default_vectors"):
        make("quasi", model)
    with pytest.raises(ValueError, match=r"Hybrid needs estimator=a trained"):
        make("hybrid", model, vectors=default_vectors(model, PROMPTS[:1]))
    with pytest.raises(ValueError, match="Oracle needs trace=moelab.record"):
        make("oracle", model)
    with pytest.raises(ValueError, match="ahead is 0"):
        make("router", model, ahead=0)
    other = tiny_model("olmoe")
    with pytest.raises(ValueError, match="measured on another model"):
        make("quasi", model, vectors=default_vectors(other, PROMPTS))
    with pytest.raises(ValueError, match="recorded from another model"):
        make("static", model, trace=record(other, PROMPTS))


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_targets_stop_at_the_last_layer(tiny_model, ahead):
    model = tiny_model("mixtral")
    targets = make("router", model, ahead=ahead).targets
    assert {here: there.index for here, there in targets.items()} == {
        l: l + ahead for l in range(3 - ahead)
    }


def test_the_registry_is_complete():
    described = registry.describe("predictor")
    assert (
        list(PREDICTORS)
        == list(described)
        == [
            "router",
            "quasi",
            "estimator",
            "hybrid",
            "frequency",
            "static",
            "previous",
            "oracle",
            "random",
        ]
    )
    assert all(purpose for purpose, _ in described.values())
    assert [name for name, (_, kind) in described.items() if kind == "teaching"] == [
        "oracle",
        "random",
    ]
    assert takes("hybrid") == ["vectors", "estimator", "choice"] and takes("random") == ["seed"]


def test_layers_that_are_not_adjacent_are_neighbours_among_moe_layers(tiny_model):
    """qwen3_moe's second decoder layer is dense: MoE layer 0 predicts MoE layer 1, two decoder
    layers on."""
    targets = make("router", tiny_model("qwen3_moe")).targets
    assert [there.name for there in targets.values()] == ["model.layers.2.mlp"]
