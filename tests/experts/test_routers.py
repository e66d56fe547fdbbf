"""Routers against transformers' own on tiny models, and against naive loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from moelab.experts.routers import (ARCHITECTURES, REFUSED, ROUTERS, Architecture, Groups, LinearRouter, Sparsemixer, Top1,
                                    TopK, router_for)
from moelab import open_model
from moelab.models import discover, eager, plugged, spec_of
from moelab.parallel.volumes import gather_volume
from moelab.specs import MoESpec

from tests.depth import depth, in_turn
from tests.models import tiny, wild

QUICK = settings(max_examples=60, deadline=None)


def outside_groups(rule, logits, correction=None):
    """bool [T], which tokens chose an expert that is in none of their best groups; see `Groups.mask`."""
    affinities = rule.affinities(logits.reshape(-1, logits.shape[-1]))
    allowed = rule.groups.chosen(affinities if correction is None else affinities + correction)
    return ~allowed.gather(1, rule(logits, correction).ids).all(-1)


def random_logits(T: int, E: int, seed: int, spread: float = 2.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(T, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread).to(dtype)


# ----------------------------------------------------------------------------------------- transformers' own routers

@pytest.mark.stress
@pytest.mark.parametrize("name, dtype", in_turn(tiny.ARCHITECTURES, [torch.float32, torch.bfloat16]))
def test_equals_the_models_own_router_bit_for_bit(name, dtype, tmp_path):
    model = open_model(tiny.save(name, tmp_path, dtype))
    generator = torch.Generator().manual_seed(1)
    for layer in discover(model):
        if hasattr(layer.router, "e_score_correction_bias"):
            bias = layer.router.e_score_correction_bias
            bias.copy_(torch.randn(bias.shape, generator=generator))
        x = torch.randn(3, 40, model.spec.H, generator=generator).to(dtype)
        x = x if name == "switch_transformers" else x.view(-1, model.spec.H)
        with torch.no_grad():
            ids, weights = layer.routing(layer.router(x))
            mine = LinearRouter.of(layer, model.config)(x)
        assert mine.weights.dtype == weights.dtype
        assert torch.equal(mine.ids, ids) and torch.equal(mine.weights, weights)
        if name == "switch_transformers":
            assert (ids == model.spec.E).any() and (ids != model.spec.E).any()


@pytest.mark.stress
@pytest.mark.parametrize("name, dtype", in_turn(
    depth(["afmoe", "axk2", "beam", "ernie4_5_moe", "granitemoe", "hy_v3", "kolibri1", "laguna", "lfm2_moe",
           "inkling_text", "zaya"], wild.names()), [torch.float32, torch.bfloat16]))
def test_every_architecture_has_its_rule_or_is_refused_by_name(name, dtype):
    """Ids and bits of the weights, in the order of the executed call; correction biases are random."""
    model = wild.model_of(name, dtype)
    config = model.config.get_text_config()
    if config.model_type in REFUSED:
        with pytest.raises(ValueError, match=config.model_type):
            LinearRouter.of(discover(model)[0], model.config)
        return
    try:
        spec_of(model)
    except Exception as error:
        pytest.skip(f"{name} has no spec: {error}")
    if config.model_type == "switch_transformers":
        pytest.skip("counts capacity along sequences: the test above")
    executed, seen = {}, {}
    hooks = [layer.router.register_forward_pre_hook(
        lambda _m, args, i=layer.index: seen.update({i: args[0].reshape(-1, args[0].shape[-1])}))
        for layer in discover(model)]

    def noting(x, ids, weights, experts):
        executed[experts.layer] = ids, weights
        return eager(x, ids, weights, experts)
    with torch.no_grad(), plugged(model, noting):
        model(input_ids=torch.randint(3, 96, (2, 30), generator=torch.Generator().manual_seed(2)), use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer in discover(model):
        ids, weights = executed[layer.index]
        mine = LinearRouter.of(layer, model.config)(seen[layer.index])
        assert torch.equal(mine.ids, ids)
        assert mine.weights.dtype == weights.dtype and torch.equal(mine.weights, weights)


def test_a_rule_that_is_not_the_models_is_refused(tmp_path, monkeypatch):
    """The class of fault: whatever a table says, it is compared with the live router."""
    model = open_model(tiny.save("qwen3_moe", tmp_path))
    layer = discover(model)[0]
    for wrong in (TopK(3), TopK(3, "sigmoid", normalise=True), TopK(2, normalise=True), TopK(3, normalise=True, scale=1.1),
                  TopK(3, normalise=True, groups=Groups(4, 2)), TopK(3, normalise=True, dtype=torch.float64, narrow=False)):
        monkeypatch.setitem(ARCHITECTURES, "qwen3_moe", Architecture(lambda c, K: wrong))
        with pytest.raises(ValueError, match=f"{layer.name}.*does not reproduce Qwen3MoeTopKRouter"):
            LinearRouter.of(layer, model.config)
    monkeypatch.delitem(ARCHITECTURES, "qwen3_moe")
    with pytest.raises(ValueError, match="router of qwen3_moe: it has not been compared"):
        LinearRouter.of(layer, model.config)


def test_every_kind_of_spec_has_a_rule_or_says_what_it_lacks():
    spec = MoESpec("m", "m", 1, (0,), E=8, K=2, H=4, I=4)
    facts = {"softmax": {"normalise": True}, "sigmoid": {"normalise": True}, "softmax-group": {"groups": Groups(4, 2)},
             "sigmoid-group": {"groups": Groups(4, 2), "normalise": False}, "top1": {"capacity": 3, "K": 1},
             "topk-softmax": {}, "sparsemixer": {}}
    assert set(facts) == set(ROUTERS)
    for kind, known in facts.items():
        of_kind = MoESpec(**{**spec.to_dict(), "router": kind})
        ids, weights = router_for(of_kind, **known)(random_logits(5, 8, 0))
        assert ids.shape == weights.shape == (5, known.get("K", 2))
        for lacking in set(known) - {"K"}:
            with pytest.raises(ValueError, match=lacking):
                router_for(of_kind, **{fact: value for fact, value in known.items() if fact != lacking})
    with pytest.raises(ValueError, match="'hash'.*softmax"):
        router_for(MoESpec(**{**spec.to_dict(), "router": "hash"}))


# ------------------------------------------------------------------------------------------------------ naive oracles

def naive_top_k(logits, K, activation, before, normalise, scale, groups, correction):
    """{expert: weight} of every token, in Python's floats."""
    result = []
    for row in logits.double().tolist():
        sums = sum(math.exp(v) for v in row)
        affinity = [math.exp(v) / sums if activation == "softmax" else 1 / (1 + math.exp(-v)) for v in row]
        score = [a + b for a, b in zip(affinity, correction)] if before else row
        allowed = set(range(len(row)))
        if groups is not None:
            size = len(row) // groups.n
            members = [range(g * size, (g + 1) * size) for g in range(groups.n)]
            worth = [max(score[e] for e in m) if groups.score == "max" else sum(sorted(score[e] for e in m)[-2:])
                     for m in members]
            best = sorted(range(groups.n), key=worth.__getitem__)[-groups.best:]
            allowed = {e for g in best for e in members[g]}
        masked = [score[e] if e in allowed else groups.mask for e in range(len(row))]
        chosen = sorted(range(len(row)), key=masked.__getitem__)[-K:]
        if before:
            weights = [affinity[e] for e in chosen]
        elif activation == "softmax":
            total = sum(math.exp(row[e]) for e in chosen)
            weights = [math.exp(row[e]) / total for e in chosen]
        else:
            weights = [1 / (1 + math.exp(-row[e])) for e in chosen]
        total = sum(weights) if normalise else 1.0
        result.append({e: scale * w / total for e, w in zip(chosen, weights)})
    return result


@QUICK
@given(st.data())
def test_top_k_equals_a_naive_loop(data):
    n = data.draw(st.sampled_from([1, 2, 4]))
    E = n * data.draw(st.integers(2, 6))
    before = data.draw(st.booleans())
    score = data.draw(st.sampled_from(["max", "two best"]))
    groups = None
    if before and data.draw(st.booleans()):
        mask = 0.0 if score == "two best" and data.draw(st.booleans()) else -math.inf
        groups = Groups(n, data.draw(st.integers(1, n)), score, mask)
    K = data.draw(st.integers(1, E if groups is None else groups.best * E // n))
    seed, T = data.draw(st.integers(0, 10_000)), data.draw(st.integers(0, 9))
    rule = TopK(K, data.draw(st.sampled_from(["softmax", "sigmoid"])), before, data.draw(st.booleans()),
                data.draw(st.sampled_from([1.0, 2.5])), groups, torch.float64, ordered=data.draw(st.booleans()))
    logits = random_logits(T, E, seed, dtype=torch.float64)
    corrected = before and score == "two best" and data.draw(st.booleans())
    correction = random_logits(1, E, seed + 1, dtype=torch.float64)[0] if corrected else torch.zeros(E).double()
    ids, weights = rule(logits, correction if corrected else None)
    assert ids.shape == weights.shape == (T, K)
    expected = naive_top_k(logits, K, rule.activation, before, rule.normalise, rule.scale, groups, correction.tolist())
    if groups is not None and groups.mask == 0.0:       # barred experts tie at 0: any of them may be chosen
        barred = outside_groups(rule, logits, correction if corrected else None).tolist()
        keep = [t for t in range(T) if not barred[t]]
        ids, weights, expected = ids[keep], weights[keep], [expected[t] for t in keep]
    for t, by_expert in enumerate(expected):
        assert dict(zip(ids[t].tolist(), weights[t].tolist())) == pytest.approx(by_expert, rel=1e-12)
    if rule.ordered and before and not corrected and rule.scale > 0:
        assert (weights.diff(dim=-1) <= 0).all()


@QUICK
@given(T=st.integers(0, 9), E=st.integers(2, 9), seed=st.integers(0, 10_000), jitter=st.sampled_from([0.01, 0.1, 0.4]))
def test_sparsemixer_equals_a_naive_loop(T, E, seed, jitter):
    logits = random_logits(T, E, seed, dtype=torch.float64)
    ids, weights = Sparsemixer(jitter)(logits)
    for row, chosen, found in zip(logits.tolist(), ids.tolist(), weights.tolist()):
        left = set(range(E))
        for expert, weight in zip(chosen, found):
            best = max(left, key=row.__getitem__)
            near = [e for e in left if (row[best] - row[e]) / max(abs(row[e]), row[best]) <= 2 * jitter]
            assert expert == best
            assert weight == pytest.approx(math.exp(row[best]) / sum(math.exp(row[e]) for e in near), rel=1e-12)
            left.remove(best)


@QUICK
@given(B=st.integers(1, 3), S=st.integers(1, 12), E=st.integers(1, 5), capacity=st.integers(1, 6),
       seed=st.integers(0, 10_000))
def test_top_1_drops_the_latest_of_each_sequence(B, S, E, capacity, seed):
    logits = random_logits(B * S, E, seed).view(B, S, E)
    ids, weights = Top1(capacity)(logits)
    ids, weights = ids.view(B, S).tolist(), weights.view(B, S).tolist()
    for b in range(B):
        room = [capacity] * E
        for s, row in enumerate(logits[b].double().tolist()):
            best = max(range(E), key=row.__getitem__)
            assert ids[b][s] == (best if room[best] else E)
            room[best] -= room[best] > 0
            assert weights[b][s] == pytest.approx(math.exp(row[best]) / sum(map(math.exp, row)), rel=1e-5)


# --------------------------------------------------------------------------------------------------- groups and ties

def test_a_zero_mask_lets_tokens_leave_their_groups_at_negative_biases():
    logits = random_logits(500, 32, 3)
    def share(mask, bias):
        rule = TopK(4, "sigmoid", groups=Groups(8, 2, mask=mask))
        return outside_groups(rule, logits, torch.full((32,), bias)).double().mean().item()
    assert share(0.0, 0.0) == 0.0                       # scores are positive: both conventions agree
    assert share(0.0, -1.0) == 1.0                      # all scores are negative: every token leaves
    assert 0.0 < share(0.0, -0.5) < 1.0
    for bias in (0.0, -0.5, -1.0, -3.0):
        assert share(-math.inf, bias) == 0.0


@QUICK
@given(T=st.integers(1, 6), E=st.integers(2, 12), seed=st.integers(0, 10_000), data=st.data())
def test_ties_choose_among_the_best_and_leave_the_weights_alone(T, E, seed, data):
    K = data.draw(st.integers(1, E))
    logits = random_logits(T, E, seed).round()          # many equal
    ids, weights = TopK(K)(logits)
    affinities = logits.softmax(-1)
    assert torch.equal(weights, affinities.sort(-1, descending=True).values[:, :K])
    assert all(len(set(row)) == K for row in ids.tolist())
    alone = [TopK(K)(row[None]) for row in logits]      # a token's neighbours have no say
    assert torch.equal(torch.cat([r.ids for r in alone]), ids)


def test_ties_go_to_the_lowest_id_where_argmax_decides():
    tied = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    assert Top1(8)(tied).ids.tolist() == [[1]]
    assert Sparsemixer()(tied).ids.tolist() == [[1, 2]]


@pytest.mark.parametrize("make, message", [
    (lambda: TopK(2, "relu"), "softmax"), (lambda: Groups(4, 5), "5 of 4"), (lambda: Groups(4, 2, "mean"), "two best"),
    (lambda: TopK(2, before=False, groups=Groups(2, 1)), "groups"), (lambda: Sparsemixer(K=3), "two experts"),
    (lambda: TopK(9)(torch.zeros(1, 8)), "9 experts"), (lambda: TopK(3, groups=Groups(4, 1))(torch.zeros(1, 8)), "3"),
    (lambda: TopK(1, groups=Groups(3, 1))(torch.zeros(1, 8)), "equal groups"),
    (lambda: Top1(1)(torch.zeros(1, 8), torch.zeros(8)), "correction")])
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --------------------------------------------------------------------------------------------------- sequence parallel

@QUICK
@given(rows=st.lists(st.integers(0, 20), min_size=1, max_size=5), E=st.integers(1, 64), data=st.data(),
       dtype=st.sampled_from([torch.bfloat16, torch.float32]), ids=st.sampled_from([torch.int64, torch.uint8]))
def test_gather_volume_counts_what_every_rank_receives(rows, E, data, dtype, ids):
    K = data.draw(st.integers(1, E))
    parts = [torch.zeros(T, E, dtype=dtype) for T in rows]
    received = {name: sum(part[:, :width].to(kind).numpy(force=True).nbytes if kind != torch.bfloat16
                          else 2 * part[:, :width].numel()
                          for me in range(len(rows)) for n, part in enumerate(parts) if n != me)
                for name, width, kind in (("logits", E, dtype), ("weights", K, dtype), ("ids", K, ids))}
    volume = gather_volume(sum(rows), E, K, len(rows), dtype, ids)
    assert {name: getattr(volume, name) for name in received} == received


def test_the_guides_sixteenfold_counts_weights_alone():
    for ids, ratio in ((torch.int64, 3.2), (torch.int32, 16 / 3), (torch.uint8, 32 / 3)):
        volume = gather_volume(4096, 128, 8, ranks=4, ids=ids)
        assert volume.logits / volume.weights == 16
        assert volume.ratio == pytest.approx(ratio)
    assert math.isnan(gather_volume(4096, 128, 8, ranks=1).ratio)
