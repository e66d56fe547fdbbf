"""Cache-aware routing: choices and weights against a loop over the logits, nothing at margin 0, and
what it refuses."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import open_model, using
from moelab.__main__ import main
from moelab.base.specs import State
from moelab.models import discover
from moelab.models.patches import Patches
from moelab.offloading.cache_aware import CacheAwareRouting, Router
from tests.models import tiny

PROMPT = torch.tensor([[5, 9, 33, 12, 60, 7, 8]])


def weighed(logits, chosen, activation, normalise):
    """The weights of chosen experts [K], of one token's logits [E]."""
    every = logits.sigmoid() if activation == "sigmoid" else logits.softmax(-1)
    return every[chosen] / (every[chosen].sum() if normalise else 1.0)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 9999),
    st.integers(2, 12),
    st.floats(0, 3),
    st.booleans(),
    st.sampled_from(("softmax", "sigmoid")),
    st.sampled_from((1.0, 2.5)),
)
@torch.no_grad()
def test_one_on_disk_gives_way_to_one_in_memory_that_trails_by_less(
    seed, E, margin, normalise, activation, factor
):
    rng = torch.Generator().manual_seed(seed)
    logits, held = torch.randn(4, E, generator=rng), torch.rand(E, generator=rng) < 0.5
    K = int(torch.randint(1, E + 1, (1,), generator=rng))

    def route(x):
        ids = x.topk(K).indices
        return ids, factor * torch.stack(
            [weighed(*row, activation, normalise) for row in zip(x, ids)]
        )

    layer = SimpleNamespace(name="layer", router=torch.nn.Linear(E, E, bias=False))
    layer.ask = lambda x, own=False: (F.linear(x, torch.eye(E)),)
    layer.routing = lambda output: route(output[0])
    router = Router(layer, torch.float32)
    ids, weights = router(logits, *route(logits), margin * held.float())
    same, as_before = router(logits, *route(logits), torch.zeros(E))
    assert torch.equal(same, route(logits)[0])
    torch.testing.assert_close(as_before, route(logits)[1])
    for row, chosen, got in zip(logits, ids, weights):
        favoured = row + margin * held.float()  # nobody was left out who should have come before
        left = favoured[[e for e in range(E) if e not in chosen]]
        assert not len(left) or favoured[chosen].min() >= left.max() - 1e-5
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


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", "minimax_m2", "llama4_text", "deepseek_v3"]
)
def test_it_chooses_what_is_in_memory_and_counts(name, tmp_path):
    """What experts are given, and what residency has just then."""
    folder = tiny.save(name, tmp_path, torch.float32)
    with open_model(folder, memory="50%", executor="sorted") as model:
        plain, state, layers = generate(model), model.moelab.residency.state, discover(model)
        for margin in (0.0, 5.0):
            counts = Counter()

            def before(layer, _, args, kwargs):
                _, ids, _ = *args, *kwargs.values()
                if len(ids) == 1:
                    there = [state((layer.index, e)) is State.FULL for e in ids[0].tolist()]
                    counts.update(asked=len(there), held=sum(there))

            with using(model, cache_aware=margin), Patches() as patches:
                routing = model.moelab.routing
                assert f"lossy: cache-aware routing, margin {margin:g}" in repr(model.moelab)
                for layer in layers:
                    register = layer.experts.register_forward_pre_hook
                    patches.hook(register, partial(before, layer), with_kwargs=True)
                generate(model)
            assert (routing.requests, routing.hits) == (counts["asked"], counts["held"])
            assert (routing.changed > 0) == (margin > 0) and routing.requests
            assert routing.hit_rate == routing.hits / routing.requests
        assert torch.equal(generate(model).sequences, plain.sequences)
        assert model.moelab.routing is None


def test_nothing_changes_at_margin_0_nor_in_prefill(tmp_path):
    with open_model(tiny.save("qwen3_moe", tmp_path, torch.bfloat16), memory="50%") as model:
        plain = model(PROMPT).logits
        with using(model, cache_aware=0):  # "exact" may have it
            assert torch.equal(model(PROMPT).logits, plain)
            assert math.isnan(model.moelab.routing.hit_rate)
            generated = generate(model)
        assert all(map(torch.equal, generated.logits, generate(model).logits))
        with using(model, executor="sorted"):
            plain = model(PROMPT).logits
            with using(model, cache_aware=9.0):
                assert torch.equal(model(PROMPT).logits, plain)
                assert model.moelab.routing.changed == 0


def test_what_cannot_have_it_refuses_it(tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "q", torch.float32)
    for how in ({}, {"executor": "exact"}):
        with pytest.raises(ValueError, match='"exact" promises every bit'):
            open_model(folder, memory="50%", cache_aware=0.5, **how)
    for margin in (-1, math.nan, math.inf, "much"):
        with pytest.raises(ValueError, match="a number of logits, 0 or more"):
            open_model(folder, memory="50%", executor="fast", cache_aware=margin)
    with pytest.raises(ValueError, match="cache_aware: for experts that are loaded"):
        open_model(folder, executor="fast", cache_aware=0.5)
    with open_model(folder) as model, pytest.raises(ValueError, match="model with memory="):
        CacheAwareRouting(model, 0.0)
    folder = tiny.save("phimoe", tmp_path / "p", torch.float32)
    with (
        open_model(folder, memory="50%", executor="sorted") as model,
        pytest.raises(ValueError, match="chooses or weighs experts in another way"),
    ):
        CacheAwareRouting(model, 0.5)


def test_evaluate_has_it_as_a_mode(results, capsys):
    options = "evaluate --limit 2 --tokens 64 --tasks lookup --modes cache-aware:4 --memory 30%"
    how = [*options.split()]
    for wrong in (how, ["evaluate", "--decode-only", "--modes", "cache-aware:-1"]):
        assert main(wrong) == 2 and "write cache-aware:0.5" in capsys.readouterr().err
    assert main([*how, "--decode-only"]) == 0
    assert "cache-aware:4" in capsys.readouterr().out
