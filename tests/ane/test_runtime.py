"""Prefill through a plan: against loops over tokens, the model as it is, and the executors of
static shapes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moelab
from moelab.ane.backends import TorchBackend
from moelab.ane.plan import Account, ANEPlan, LayerPlan, PlannedGroup, make_plan
from moelab.ane.runtime import PlannedExperts, prefill_through
from moelab.base.specs import MoESpec
from moelab.models import SeamExperts, discover
from moelab.static.tiers import Tiers
from notebooks.studies.ane_counts import by_layer as counts_of
from tests.experts.toy import make_experts, make_routing
from tests.models import tiny

E, H, K = 8, 12, 3
GROUPS = (
    PlannedGroup((2, 0, 5), 16, "ane", 1),
    PlannedGroup((7,), 32, "ane", 1),
    PlannedGroup((1, 3, 4, 6), 16, "cpu", 1),
)


def plan_of(spec, chunk=16, groups=GROUPS):
    capacity = [0] * spec.E
    for group in groups:
        for e in group.experts:
            capacity[e] = group.capacity
    layer = LayerPlan(
        Tiers(tuple(sorted(set(capacity), reverse=True)), tuple(capacity)), groups, "ane"
    )
    return ANEPlan(spec, chunk, "npumoe", (layer,) * spec.L)


TOY = MoESpec("toy", "toy", 1, (0,), E, K, H, 8)


def oracle(x, ids, weights, experts, importance, capacity):
    """Token by token in double precision: each expert keeps its `capacity` [E] most important
    choices."""
    out, executed = torch.zeros(x.shape, dtype=torch.float64), 0
    double = {name: p.double() for name, p in experts.module.named_parameters(recurse=False)}
    for e in range(E):
        mine = [(t, k) for t in range(len(x)) for k in range(ids.shape[1]) if ids[t, k] == e]
        mine.sort(key=lambda c: -float(importance[c[0], c[1]]))  # stable: ties in token order
        for t, k in mine[: capacity[e]]:
            gate, up = (double["gate_up_proj"][e] @ x[t].double()).chunk(2)
            out[t] += float(weights[t, k]) * (
                double["down_proj"][e] @ (torch.nn.functional.silu(gate) * up)
            )
            executed += 1
    return out, executed


@given(
    T=st.integers(2, 64),
    seed=st.integers(0, 99),
    skew=st.sampled_from((0.0, 1.5)),
    order=st.sampled_from(("saliency", "router", "token", "strongest")),
    none=st.booleans(),
)
def test_each_expert_keeps_its_most_important_tokens(T, seed, skew, order, none):
    experts, (ids, weights) = make_experts(E, H, 8, seed=seed), make_routing(T, E, K, skew, seed)
    if none:
        ids[::3, 1] = E
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(seed))
    norms = torch.randn(T, generator=torch.Generator().manual_seed(seed + 1)).abs()
    importance = {
        "saliency": norms[:, None].expand(T, K),
        "router": weights,
        "strongest": -norms[:, None].expand(T, K),
        "token": -torch.arange(T)[:, None].expand(T, K),
    }[order]
    plan = plan_of(TOY, 64)
    capacity = [
        T if g.unit == "cpu" else g.capacity for e in range(E) for g in GROUPS if e in g.experts
    ]
    expected, executed = oracle(x, ids, weights, experts, importance, capacity)
    executor = PlannedExperts(TorchBackend(plan), order=order, saliency={0: norms})
    assert torch.allclose(executor(x, ids, weights, experts).double(), expected, atol=1e-4)
    found, on_cpu = executor.total, sum(int((ids == e).sum()) for e in (1, 3, 4, 6))
    launched = [g for g in GROUPS if g.unit == "ane" and any((ids == e).any() for e in g.experts)]
    assert found == Account(
        int((ids != E).sum()),
        executed,
        sum(g.slots for g in launched) + on_cpu,
        1,
        len(launched),
    )
    assert (executor.tally.routed, executor.tally.executed, executor.tally.slots) == (
        found.routed,
        found.executed,
        found.slots,
    )


@given(
    T=st.integers(2, 64),
    seed=st.integers(0, 99),
    layout=st.sampled_from(
        ("gated", "bias", "ungated", "interleaved", "transposed", "ungated bias")
    ),
)
def test_padding_loses_nothing_and_launches_until_all_are_served(T, seed, layout):
    experts, (ids, weights) = (
        make_experts(E, H, 8, layout, seed=seed),
        make_routing(T, E, K, 2.0, seed),
    )
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(seed))
    plan = plan_of(TOY, 64)
    executor = PlannedExperts(TorchBackend(plan), overflow="pad")
    expected = sum(
        weights[:, k, None]
        * torch.stack(
            [experts.ffn(x[t : t + 1], experts.weights(int(ids[t, k])))[0] for t in range(T)]
        )
        for k in range(K)
    )
    assert torch.allclose(executor(x, ids, weights, experts), expected, atol=1e-4)
    launches = [max(-(-int((ids == e).sum()) // g.capacity) for e in g.experts) for g in GROUPS[:2]]
    found = executor.total
    assert executor.lossless and found.drop_rate == 0 and found.launches == sum(launches)
    on_cpu = sum(int((ids == e).sum()) for e in (1, 3, 4, 6))
    assert found.slots == sum(n * g.slots for n, g in zip(launches, GROUPS)) + on_cpu


def test_more_tokens_than_a_chunk_and_unknown_options_are_refused():
    experts, plan = make_experts(E, H, 8), plan_of(TOY, 16)
    backend = TorchBackend(plan)
    with pytest.raises(ValueError, match="prefill_through"):
        PlannedExperts(backend, order="router")(
            torch.randn(17, H), *make_routing(17, E, K), experts
        )
    for options in ({"order": "best"}, {"overflow": "spill"}):
        with pytest.raises(ValueError, match=next(iter(options.values()))):
            PlannedExperts(backend, **options)


# ---- a whole model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Three layers, the second one dense."""
    return moelab.open_model(tiny.save("qwen3_moe", tmp_path_factory.mktemp("model") / "tiny"))


def prompt(n, seed=0):
    return torch.randint(3, 96, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_lossless_prefill_in_chunks_is_the_models_own(model):
    plan, ids = plan_of(model.spec), prompt(41)
    expected = model(ids)
    with prefill_through(model, plan, overflow="pad") as ane:
        found = model(ids)
        assert torch.allclose(found.logits, expected.logits, atol=1e-5)
        assert found.past_key_values.get_seq_length() == 41
        assert (ane.total.chunks, ane.total.routed) == (2 * 3, 2 * 41 * K)
        assert model(ids, use_cache=False).past_key_values is None
        assert torch.allclose(
            model(ids, logits_to_keep=1).logits, expected.logits[:, -1:], atol=1e-5
        )
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False).logits
        assert torch.allclose(embedded, expected.logits, atol=1e-5)
    assert "forward" not in vars(model.base_model)
    assert not isinstance(discover(model)[0].experts, SeamExperts)
    assert torch.equal(model(ids).logits, expected.logits)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "gpt_oss", "deepseek_v2"])
@torch.no_grad()
def test_other_architectures(name, tmp_path):
    model = moelab.open_model(tiny.save(name, tmp_path / "m"))
    members = tuple(range(model.spec.E))
    plan = plan_of(
        model.spec,
        16,
        (PlannedGroup(members[:2], 16, "ane", 1), PlannedGroup(members[2:], 16, "cpu", 1)),
    )
    expected = model(prompt(37)).logits
    with prefill_through(model, plan, overflow="pad"):
        assert torch.allclose(model(prompt(37)).logits, expected, atol=2e-5)


@torch.no_grad()
def test_generate_decodes_on_the_models_own_cache(model):
    plan, ids = plan_of(model.spec), prompt(35, 1)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    with prefill_through(model, plan, overflow="pad") as ane:
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
        chunked = model.generate(ids, max_new_tokens=5, do_sample=False, prefill_chunk_size=8)
        assert torch.equal(chunked, expected)
        assert ane.total.routed == 2 * 2 * 35 * K  # decode steps are not counted


@torch.no_grad()
def test_a_prompts_chunks_have_capacities_of_their_own(model):
    """Pruning chunk by chunk: the executor sees each chunk once, with the norms of its own
    tokens."""
    groups = (PlannedGroup(tuple(range(8)), 3, "ane", 1),)
    plan, ids, seen = plan_of(model.spec, 16, groups), prompt(40), []
    norms = {}
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda _m, _a, out, i=i: norms.setdefault(i, []).append(out[0].norm(dim=-1)[0])
        )
        for i, layer in enumerate(model.base_model.layers)
    ]
    with prefill_through(model, plan) as ane:
        layers = discover(model)
        for layer in layers:
            seen.append([])
            hooks.append(
                layer.experts.register_forward_pre_hook(
                    lambda _m, args, rows=seen[-1], i=layer.index: rows.append(
                        (args[1], ane.saliency[i])
                    )
                )
            )
        model(ids)
        total = ane.total
    for hook in hooks:
        hook.remove()
    executed = 0
    for index, rows in enumerate(seen):
        assert [len(ids) for ids, _ in rows] == [16, 16, 8]
        for (chosen, used), expected in zip(rows, norms[(0, 2)[index]]):
            assert torch.allclose(used, expected)
            executed += sum(min(int((chosen == e).sum()), 3) for e in range(8))
    assert total.executed == executed < total.routed == 2 * 40 * K
    assert total.chunks == total.launches == 6 and total.slots == 6 * 24


def test_what_cannot_run_is_refused(model):
    plan = plan_of(model.spec)
    with pytest.raises(ValueError, match="geometry"):
        prefill_through(model, plan_of(TOY)).__enter__()
    with prefill_through(model, plan):
        with pytest.raises(ValueError, match="batch_size=1"):
            model(prompt(20).expand(2, -1))
        with pytest.raises(ValueError, match="padded"):
            model(prompt(20), attention_mask=torch.tensor([[0] * 4 + [1] * 16]))
        with pytest.raises(ValueError, match="router_logits"):
            model(prompt(20), output_router_logits=True)
    assert "forward" not in vars(model.base_model)


@pytest.mark.parametrize("S", [5, 33, 48])  # 33 tokens in chunks of 16 leave one alone
def test_the_account_is_what_the_runtime_does(S):
    model = moelab.open_model(None, dtype=torch.float32)
    spec, chunk, called = model.spec, 16, [[] for _ in range(model.spec.L)]
    even = np.full((spec.L, spec.E), 10)
    plan = make_plan(
        spec, even, 10 * spec.E // spec.K, chunk, group_size=2, cold_share=0.1, min_rows=0
    )
    with torch.no_grad(), prefill_through(model, plan, order="token") as ane:
        run = ane.run

        def listening(x, ids, weights, experts):
            called[experts.layer].append(torch.bincount(ids.flatten(), minlength=spec.E).numpy())
            return run(x, ids, weights, experts)

        ane.run = listening
        model(torch.arange(5, 5 + S)[None])
        total, tally = ane.total, ane.tally
    account = counts_of(plan, np.stack(called, 1))  # [n, L, E]
    counted = sum(account, Account())
    assert (counted.routed, counted.executed, counted.slots) == (
        tally.routed,
        tally.executed,
        tally.slots,
    )
    assert counted.launches == total.launches
    chunks = -(-S // chunk)
    assert 0 < total.launches < chunks * plan.launches, (
        "no group was without tokens: the test says nothing"
    )
