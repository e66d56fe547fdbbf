"""Every lossless executor of the registry against naive oracles: any sizes, skews, layouts, types;
and real models."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import open_model
from moelab.experts import EXECUTORS
from moelab.experts.executor import Tally
from moelab.models import eager, plug
from moelab.registry import make
from tests.depth import in_turn
from tests.experts.toy import LAYOUTS, make_experts, make_routing, naive
from tests.models import tiny

#: largest difference from an exact result, relative to its largest entry
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def lossless() -> list[str]:
    """The names of those that execute every choice with the options they have by default."""
    found = []
    for name in EXECUTORS:
        with suppress(
            ValueError
        ):  # it cannot be made without a plan, which decides what is dropped
            found += [name] if make("executor", name).lossless else []
    return found


every_executor = pytest.mark.parametrize("name", lossless())


@st.composite
def cases(draw):
    """(x, ids, weights, experts): sizes, skew, layout and type; some choices are "no expert", or
    all the same one."""
    E = draw(st.sampled_from([1, 2, 3, 8, 31, 64, 256]))
    K = draw(st.integers(1, min(8, E)))
    T = draw(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 13, 40, 150, 600]))
    H, I = draw(st.sampled_from([(8, 4), (16, 24), (33, 17), (64, 32), (40, 72)]))
    dtype = draw(st.sampled_from(sorted(TOLERANCE, key=str)))
    seed = draw(st.integers(0, 1000))
    experts = make_experts(E, H, I, draw(st.sampled_from(sorted(LAYOUTS))), dtype, seed)
    ids, weights = make_routing(T, E, K, draw(st.sampled_from([0.0, 0.6, 1.5, 4.0])), seed, dtype)
    if draw(st.booleans()):
        ids = torch.where(
            torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.3, E, ids
        )
    if T and draw(st.integers(0, 5)) == 0:
        ids = torch.full_like(ids, draw(st.integers(0, E)))  # all on one expert, or on none
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x, ids, weights, experts


def close(y: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert y.dtype == dtype and y.shape == exact.shape
    if exact.numel():
        assert (y.double() - exact).abs().max() <= TOLERANCE[dtype] * max(
            1.0, float(exact.abs().max())
        )


def exact(x, ids, weights, experts):
    """`toy.naive`, but the tokens of an expert together, so that 600 tokens take no minutes; see
    the test below."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(experts.num_experts):
        tokens, choice = (ids == e).nonzero(as_tuple=True)
        if len(tokens):
            wide = {name: p[e].double() for name, p in experts.named_parameters(recurse=False)}
            h = x[tokens].double()
            for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
                h = h @ (wide[name] if experts.is_transposed else wide[name].T)
                h = h + wide[name + "_bias"] if experts.has_bias else h
                h = (
                    experts._apply_gate(h)
                    if name == "gate_up_proj"
                    else experts.act_fn(h)
                    if name == "up_proj"
                    else h
                )
            out.index_add_(0, tokens, h * weights[tokens, choice, None].double())
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_oracle_is_the_naive_loop(layout):
    experts, (ids, weights) = make_experts(5, 12, 7, layout), make_routing(9, 5, 3)
    ids[3, 1], x = 5, torch.randn(9, 12)
    assert torch.allclose(
        exact(x, ids, weights, experts), naive(x, ids, weights, experts), atol=1e-12
    )


@every_executor
@settings(max_examples=25)
@given(case=cases())
def test_equals_the_exact_result_and_executes_every_choice(name, case):
    x, ids, weights, experts = case
    executor = make("executor", name)
    close(executor(x, ids, weights, experts), exact(*case), x.dtype)
    tally = executor.tally
    assert (
        tally.routed == tally.executed == int((ids < experts.num_experts).sum())
        and tally.slots >= tally.executed
    )


@pytest.mark.stress
@pytest.mark.parametrize(
    "name, architecture",
    in_turn(lossless(), ["qwen3_moe", "gpt_oss", "llama4_text", "switch_transformers"]),
)
def test_real_models_give_eagers_logits(name, architecture, tmp_path):
    model = open_model(tiny.save(architecture, tmp_path / "m"))
    ids = {"input_ids": torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(0))}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = ids["input_ids"][:, :1]
    plug(model, executor=eager)
    with torch.inference_mode():
        logits = model(**ids).logits
        plug(model, executor=make("executor", name))
        assert torch.allclose(model(**ids).logits, logits, atol=1e-4, rtol=1e-4)


@every_executor
def test_weights_from_a_source_are_those_used(name):
    """The module's own weights are not looked at, and the source may change its mind."""
    experts, other = make_experts(4, 16, 8, seed=1), make_experts(4, 16, 8, seed=2)
    asked = []
    experts.layer, executor = 3, make("executor", name)
    x, (ids, weights) = torch.randn(6, 16), make_routing(6, 4, 2)
    for where in (other, experts):
        experts.source = lambda layer, e: asked.append((layer, e)) or where.own(e)
        close(executor(x, ids, weights, experts), exact(x, ids, weights, where), torch.float32)
    assert {layer for layer, _ in asked} == {3} and {e for _, e in asked} >= set(
        ids.flatten().tolist()
    )


def test_the_registry_is_covered():
    assert set(EXECUTORS) - set(lossless()) == {"capacity", "tiered", "grouped"}


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("tiered", {}, "'capacities'.*capacities, overflow='prune'"),
        ("grouped", {"overflow": "pad"}, "'groups'"),
        ("gemv", {"colour": 2}, "'colour'; it takes no options"),
        ("quick", {}, "there is no executor 'quick'. There are: exact"),
    ],
)
def test_what_cannot_be_made_is_explained(name, options, said):
    with pytest.raises(ValueError, match=said):
        make("executor", name, **options)


def test_shares_of_a_tally():
    """Of 10 choices 8 were executed in 16 rows: a fifth is dropped, and half of the rows are
    padding."""
    tally = Tally(10, 8, 16)
    assert (tally.dropped, tally.drop_rate, tally.padded_fraction) == (2, 0.2, 0.5)
    tally.add(10, 10, 12)
    assert (tally.routed, tally.executed, tally.slots) == (20, 18, 28)
    assert Tally().drop_rate == Tally().padded_fraction == 0
