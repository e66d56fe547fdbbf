"""Cache-aware routing: choices and weights against a loop over the logits, nothing at margin 0, and
what it refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import open_model, using
from moelab.__main__ import main
from moelab.evaluation import evaluate
from moelab.models import discover
from moelab.offloading.cache_aware import CacheAwareRouting, Router
from moelab.specs import State
from tests.models import tiny

PROMPT = torch.tensor([[5, 9, 33, 12, 60, 7, 8]])


def weighed(logits, chosen, activation, normalise):
    """The weights of chosen experts, by a loop."""
    every = (
        [1 / (1 + math.exp(-z)) for z in logits]
        if activation == "sigmoid"
        else [math.exp(z) / sum(map(math.exp, logits)) for z in logits]
    )
    total = sum(every[e] for e in chosen) if normalise else 1.0
    return torch.tensor([every[e] / total for e in chosen])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 9999),
    st.integers(2, 12),
    st.floats(0, 3),
    st.booleans(),
    st.sampled_from(("softmax", "sigmoid")),
    st.sampled_from((1.0, 2.5)),
)
def test_one_on_disk_gives_way_to_one_in_memory_that_trails_by_less(
    seed, E, margin, normalise, activation, factor
):
    rng = torch.Generator().manual_seed(seed)
    logits, held = torch.randn(4, E, generator=rng), torch.rand(E, generator=rng) < 0.5
    K = int(torch.randint(1, E + 1, (1,), generator=rng))

    def route(x):
        ids = x.topk(K).indices
        rows = zip(x.tolist(), ids.tolist())
        return ids, factor * torch.stack([weighed(*row, activation, normalise) for row in rows])

    layer = SimpleNamespace(
        name="layer",
        E=E,
        router=torch.nn.Linear(E, E, bias=False),
        block=None,
        ask=lambda x, own=False: (x,),
        routing=lambda output: route(output[0]),
    )
    layer.router.weight.data.copy_(torch.eye(E))
    with torch.no_grad():
        router = Router(layer, torch.float32)
        ids, weights = router(logits, *route(logits), margin * held.float())
        same, as_before = router(logits, *route(logits), torch.zeros(E))
        assert torch.equal(same, route(logits)[0])
        torch.testing.assert_close(as_before, route(logits)[1])
    for row, chosen, got in zip(logits.tolist(), ids.tolist(), weights):
        left = [e for e in range(E) if e not in chosen]
        for e in chosen:  # nobody was left out who should have come before
            for other in left:
                assert (
                    row[e] + margin * bool(held[e])
                    >= row[other] + margin * bool(held[other]) - 1e-5
                )
        torch.testing.assert_close(got, factor * weighed(row, chosen, activation, normalise))


def generate(model):
    return model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "minimax_m2", "llama4_text"])
def test_it_chooses_what_is_in_memory_and_counts(name, tmp_path):
    """What experts are given, beside the router's own rule on its own input, and what residency has
    just then."""
    with open_model(
        tiny.save(name, tmp_path, torch.float32), memory="50%", executor="sorted"
    ) as model:
        plain, residency = generate(model), model.moelab.residency
        routers = [Router(layer, model.dtype) for layer in discover(model)]
        for margin in (0.0, 5.0):
            asked = held = changed = 0
            layers, inputs, handles = discover(model), {}, []

            def before(layer, _, args, kwargs):
                nonlocal asked, held, changed
                _, ids, weights = *args, *kwargs.values()
                if len(ids) > 1:
                    return
                there = [residency.state((layer.index, e)) is State.FULL for e in range(layer.E)]
                router = routers[layer.index]
                x = inputs[layer.index].reshape(1, -1)
                own, weigh = layer.routing(layer.ask(x))
                wanted, weigh = router(x, own, weigh, margin * torch.tensor(there).float())
                assert set(wanted[0].tolist()) == set(ids[0].tolist())
                if set(own[0].tolist()) != set(ids[0].tolist()):
                    torch.testing.assert_close(weights, weigh.to(weights.dtype))
                asked, held = asked + ids.numel(), held + sum(there[e] for e in ids[0].tolist())
                changed += len(set(ids[0].tolist()) - set(own[0].tolist()))

            with using(model, cache_aware=margin):
                routing = model.moelab.routing
                assert f"lossy: cache-aware routing, margin {margin:g}" in repr(model.moelab)
                for layer in layers:
                    handles.append(
                        layer.router.register_forward_pre_hook(
                            lambda _m, args, i=layer.index: inputs.__setitem__(i, args[0])
                        )
                    )
                    handles.append(
                        layer.experts.register_forward_pre_hook(
                            lambda m, args, kwargs, layer=layer: before(layer, m, args, kwargs),
                            with_kwargs=True,
                        )
                    )
                generate(model)
            for handle in handles:
                handle.remove()
            assert (routing.requests, routing.hits, routing.changed) == (
                asked,
                held,
                changed,
            ) and asked > 0
            assert (changed > 0) == (margin > 0)
        after = generate(model)
        assert torch.equal(after.sequences, plain.sequences) and model.moelab.routing is None


@pytest.mark.parametrize("K", [1, 5])
def test_as_many_experts_a_token_as_the_live_model_has(K, tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path, torch.float32)
    with open_model(folder, memory="50%", executor="sorted", cache_aware=5.0) as model:
        for layer in discover(model):
            layer.router.top_k = K
        generate(model)
        assert (
            model.moelab.routing.requests == 5 * len(discover(model)) * K
            and model.moelab.routing.changed
        )


def test_nothing_changes_at_margin_0_nor_in_prefill(tmp_path):
    with open_model(tiny.save("qwen3_moe", tmp_path, torch.bfloat16), memory="50%") as model:
        plain = model(PROMPT).logits
        with using(model, cache_aware=0):  # "exact" may have it
            assert torch.equal(model(PROMPT).logits, plain)
            assert math.isnan(model.moelab.routing.hit_rate)
            generated = generate(model)
        assert all(map(torch.equal, generated.logits, generate(model).logits))
        with using(model, executor="sorted"), using(model, cache_aware=9.0):
            again = model(PROMPT).logits
            assert model.moelab.routing.changed == 0
        with using(model, executor="sorted"):
            assert torch.equal(model(PROMPT).logits, again)


def test_what_promises_every_bit_refuses_it(tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path, torch.float32)
    for how in ({}, {"executor": "exact"}):
        with pytest.raises(ValueError, match='"exact" promises every bit'):
            open_model(folder, memory="50%", cache_aware=0.5, **how)
    with (
        open_model(folder, memory="50%") as model,
        pytest.raises(ValueError, match="promises every bit"),
        using(model, cache_aware=0.5),
    ):
        pass
    with pytest.raises(ValueError, match="cache_aware: for experts that are loaded"):
        open_model(folder, executor="fast", cache_aware=0.5)
    with (
        open_model(folder) as model,
        pytest.raises(ValueError, match="open the model with memory="),
    ):
        CacheAwareRouting(model, 0.0)


@pytest.mark.parametrize("margin", [-1, math.nan, math.inf, "much"])
def test_what_is_no_margin(margin):
    with pytest.raises(ValueError, match="a number of logits, 0 or more"):
        open_model(memory="50%", executor="fast", cache_aware=margin)


@pytest.mark.parametrize("name", ["phimoe", "deepseek_v3"])
def test_routers_that_choose_otherwise_are_refused(name, tmp_path):
    with (
        open_model(
            tiny.save(name, tmp_path, torch.float32), memory="50%", executor="sorted"
        ) as model,
        pytest.raises(ValueError, match="routers that take the K best of all logits"),
    ):
        CacheAwareRouting(model, 0.5)


def test_evaluate_has_it_as_a_mode(results, capsys):
    assert evaluate.parse_mode("cache-aware:0.5") == ("cache-aware", "0.5")
    for wrong in ("cache-aware", "cache-aware:-1", "cache-aware:much"):
        with pytest.raises(ValueError, match="write cache-aware:0.5"):
            evaluate.parse_mode(wrong)
    how = [
        "evaluate",
        "--limit",
        "2",
        "--tokens",
        "64",
        "--tasks",
        "lookup",
        "--modes",
        "cache-aware:4",
        "--memory",
        "30%",
    ]
    assert main(how) == 2 and "--decode-only" in capsys.readouterr().err
    assert main([*how, "--decode-only"]) == 0
    assert "cache-aware:4.0" in capsys.readouterr().out
