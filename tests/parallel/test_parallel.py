"""Experts on 2 and 4 gloo processes against one process, and their bytes against loops and
formulas."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import open_model
from moelab.calibration import Calibration
from moelab.experts import EXECUTORS
from moelab.experts.executor import Executor
from moelab.experts.sharding import on_hidden, on_intermediate, share
from moelab.models import discover, eager, plug
from moelab.models.identity import identity
from moelab.parallel import VARIANTS, Placement, ShardedExperts, degree, launch, volumes
from moelab.parallel.eplb import balance
from moelab.parallel.exchange import FEW, pack, unpack
from moelab.registry import make
from tests.experts import toy
from tests.models import tiny
from tests.parallel import ranks

NO_FORMULA = ("hidden", "blocks")


# ---------------------------------------------------------------------------------------------
# whole models, 2 ranks


@pytest.fixture(scope="module")
def generations(tmp_path_factory):
    """(name, variant, dtype) → what both ranks generated, and one process."""
    folder = tmp_path_factory.mktemp("models")
    cases = [(name, "ep-a2a", torch.float32) for name in tiny.ARCHITECTURES]
    cases += [
        (name, "tp", torch.float32)
        for name in ("qwen3_moe", "gpt_oss", "llama4_text", "switch_transformers")
    ]
    cases += [
        (name, v, torch.float32)
        for name in ("qwen3_moe", "llama4_text")
        for v in ("ep", "ep-dedup")
    ]
    cases += [(name, "ep-a2a", torch.bfloat16) for name in ("qwen3_moe", "gpt_oss", "llama4_text")]
    cases += [
        ("small", v, torch.float32) for v in ("ep", "ep-a2a", "ep-dedup", "tp", "hidden", "blocks")
    ]
    cases += [("gpt_oss", "hidden", torch.float32), ("llama4_text", "blocks", torch.float32)]
    paths = {name: tiny.save(name, folder / name) for name in tiny.ARCHITECTURES} | {"small": None}
    made = launch(
        ranks.generate_all, 2, [(paths[name], variant, dtype) for name, variant, dtype in cases]
    )
    alone = {}
    for name, _, dtype in cases:
        if (name, dtype) not in alone:
            model = open_model(paths[name], dtype=dtype)
            held = sum(
                p.numel() * p.element_size()
                for layer in discover(model)
                for p in layer.experts.parameters()
            )
            alone[name, dtype] = *ranks.tokens_and_logits(model), held
    return {
        case: ([rank[i] for rank in made], alone[case[0], case[2]]) for i, case in enumerate(cases)
    }


def test_a_whole_generation_is_that_of_one_process(generations):
    for (name, variant, dtype), (both, (tokens, logits, _)) in generations.items():
        for made_tokens, made_logits, _ in both:
            assert torch.equal(made_tokens, tokens), (name, variant)
            # Llama 4's blocks multiply all rows, and how fp32 products round depends on their
            # number
            if variant == "ep-a2a" and (name, dtype) != ("llama4_text", torch.float32):
                assert torch.equal(made_logits, logits), (name, variant, dtype)
            else:
                assert (made_logits - logits).abs().max() <= 1e-6 * max(
                    1.0, float(logits.abs().max())
                ), (name, variant)


def test_a_whole_generation_on_four_ranks(tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "model")
    tokens, logits = ranks.tokens_and_logits(open_model(folder, dtype=torch.float32))
    for rank in launch(
        ranks.generate_all, 4, [(folder, variant, torch.float32) for variant in VARIANTS]
    ):
        for variant, (made_tokens, made_logits, _) in zip(VARIANTS, rank):
            assert torch.equal(made_tokens, tokens), variant
            if variant == "ep-a2a":
                assert torch.equal(made_logits, logits)
            assert (made_logits - logits).abs().max() <= 1e-6 * max(
                1.0, float(logits.abs().max())
            ), variant


def test_ranks_share_the_experts_bytes(generations):
    for (name, variant, _), (both, (_, _, whole)) in generations.items():
        # a bias that cannot be cut is on every rank, zero on all but one
        biases = name == "gpt_oss" and variant in ("tp", "hidden")
        for _, _, held in both:
            assert held == pytest.approx(
                whole if variant == "blocks" else whole / 2, rel=0.03 if biases else 1e-9
            ), (name, variant)


def alone(folder, name):
    """What `ranks.generate_with` gives, in one process."""
    model = open_model(folder, dtype=torch.float32)
    plug(model, executor := make("executor", name))
    return (
        *ranks.tokens_and_logits(model),
        executor.tally.routed,
        executor.tally.executed,
        executor.tally.slots,
    )


def test_every_executor_runs_on_ranks(tmp_path):
    """Whatever `generate` offers: its result and its counts are those of one process."""
    folder = tiny.save("qwen3_moe", tmp_path / "model")
    names = [
        name for name in EXECUTORS if name not in ("tiered", "grouped", "int8")
    ]  # need something
    ways = [
        (variant, name, {})
        for variant in ("ep", "ep-a2a", "tp")
        for name in names
        if name != "capacity" or variant != "ep-a2a"
    ]
    made = launch(ranks.generate_with, 2, folder, ways)
    for i, (variant, name, _) in enumerate(ways):
        tokens, logits, routed, executed, slots = alone(folder, name)
        for rank in made:
            assert torch.equal(rank[i][0], tokens), (variant, name)
            assert (rank[i][1] - logits).abs().max() <= 2e-6 * max(
                1.0, float(logits.abs().max())
            ), (variant, name)
        assert executed < routed or name != "capacity"  # it has something to drop
        times = 2 if variant == "tp" else 1  # ranks that share an expert each count it
        assert sum(rank[i][2] for rank in made) == times * routed, (variant, name)
        assert sum(rank[i][3] for rank in made) == times * executed, (variant, name)
        if name in ("all_experts", "capacity") and variant != "ep-a2a":
            assert sum(rank[i][4] for rank in made) == times * slots, (variant, name)


def test_a_whole_model_placed_by_a_calibration(tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "model")
    model = open_model(folder)
    counts = torch.randint(
        1, 99, (2, model.spec.L, model.spec.E), generator=torch.Generator().manual_seed(0)
    )
    calibration = Calibration(counts, (99, 99), model.spec, identity(model))
    ways = [
        (variant, None, {"calibration": calibration, "spare": spare})
        for spare in (0, 2)
        for variant in ("ep", "ep-a2a", "ep-dedup", "auto")
    ]
    made = launch(ranks.generate_with, 2, folder, ways)
    tokens, logits, routed, *_ = alone(folder, "exact")
    for i, (variant, _, options) in enumerate(ways):
        for rank in made:
            assert torch.equal(rank[i][0], tokens), variant
            assert (rank[i][1] - logits).abs().max() <= 1e-6 * max(
                1.0, float(logits.abs().max())
            ), variant
            assert torch.equal(rank[i][1], logits) or (variant, options["spare"]) != ("ep-a2a", 0)
        if variant != "auto":  # which cuts so few experts
            assert sum(rank[i][2] for rank in made) == routed and all(rank[i][2] for rank in made)


def test_spare_places_need_counts_and_ranks_that_hold_whole_experts(tmp_path):
    for options in (
        {"parallel": "ep", "spare": 2},
        {"parallel": "tp", "spare": 2},
        {"parallel": "auto", "tp": 2},
    ):
        with pytest.raises(RuntimeError, match="--calibration|leave it out"):
            launch(ranks.open_with, 2, tiny.save("qwen3_moe", tmp_path / "model"), options)


def test_routers_are_asked_about_each_ranks_share(tmp_path):
    """Each rank routes its share of a prompt, all tokens of a decode step, and every token gets
    what it got alone."""
    asked = launch(ranks.route_alone_and_in_sequence, 2, tiny.save("qwen3_moe", tmp_path / "model"))
    for (ids, weights), (shared_ids, shared_weights), rows in asked:
        assert torch.equal(ids, shared_ids) and torch.allclose(weights, shared_weights, atol=1e-6)
        assert rows == [9, 2]  # of 18 and of 2 tokens


def test_dropping_needs_all_tokens_of_a_step():
    for way in ("ep-a2a", "ep-dedup", "tp-ep", "blocks"):
        with pytest.raises(ValueError, match="drops tokens.*ep or tp"):
            VARIANTS[way](None, (), make("executor", "capacity"))
    with pytest.raises(ValueError, match="GEMV cannot do"):
        VARIANTS["hidden"](None, (), make("executor", "gemv"))


def test_cut_along_h_needs_plain_experts(tmp_path):
    layer = plug(open_model(tiny.save("llama4_text", tmp_path / "model")))[0]
    with pytest.raises(ValueError, match="use tp or ep"):
        VARIANTS["hidden"](None).run(
            torch.zeros(1, 8), torch.zeros(1, 1).long(), torch.ones(1, 1), layer.seam
        )


# ---------------------------------------------------------------------------------------------
# single layers, 4 ranks


def cases():
    """(experts' options, routing's options, way, its options)."""
    even = dict(E=8, H=16, I=8)
    for layout in toy.LAYOUTS:
        for way in VARIANTS:
            yield dict(E=10, H=18, I=13, layout=layout), dict(T=37, E=10, K=3, skew=1.0), way, {}
    for T in (0, 1, 3, 16):
        for way in VARIANTS:
            yield even, dict(T=T, E=8, K=2), way, {"block": 2} if way == "blocks" else {}
    yield dict(E=2, H=16, I=3), dict(T=9, E=2, K=2), "ep-dedup", {}  # more ranks than experts
    yield dict(E=2, H=16, I=3), dict(T=9, E=2, K=2), "tp", {}  # more ranks than I
    for way in ("ep", "ep-a2a", "ep-dedup"):
        load = [1 / (e + 1) for e in range(10)]
        redundant = balance(load, 4, spare=6).placement
        yield dict(E=10, H=18, I=13), dict(T=37, E=10, K=3, skew=1.0), way, {"placement": redundant}


@pytest.fixture(scope="module")
def layers():
    todo = list(cases())
    made = launch(ranks.run_all, 4, todo)
    return [(case, [rank[i] for rank in made]) for i, case in enumerate(todo)]


def test_every_way_computes_what_one_process_does(layers):
    assert len(layers) > 70
    for (experts_options, routing_options, way, options), made in layers:
        experts, (ids, weights), x = ranks.toy_layer(toy, experts_options, routing_options)
        oracle = toy.naive(x, ids, weights, experts)
        exact = eager(x, ids, weights, experts)
        what = experts_options, routing_options, way
        for y, _, _, _ in made:
            assert y.dtype == x.dtype and y.shape == x.shape, what
            assert (y.double() - oracle).abs().max() < 2e-5 if len(x) else True, what
            if way == "ep-a2a" and not options:
                assert torch.equal(y, exact), what
        if way != "hidden":  # tokens that are spread give the same as tokens that all ranks have
            own = torch.cat([own for _, own, _, _ in made])
            same = not options and (len(x) > FEW or way == "ep-a2a")
            assert (
                torch.equal(own, made[0][0]) if same else torch.allclose(own, made[0][0], atol=1e-5)
            ), what


def test_every_choice_is_computed_once(layers):
    for (experts_options, routing_options, way, _), made in layers:
        _, (ids, _), _ = ranks.toy_layer(toy, experts_options, routing_options)
        n = int((ids < experts_options["E"]).sum())
        computed = sum(rank[3] for rank in made)
        times = {"tp": 4, "hidden": 4, "tp-ep": 2}.get(
            way, 1
        )  # each of the ranks that share an expert
        assert computed == times * n, (experts_options, routing_options, way)


def test_measured_bytes_equal_the_formulas(layers):
    checked = 0
    for (experts_options, routing_options, way, options), made in layers:
        if way in NO_FORMULA or options:
            continue
        experts, (ids, weights), x = ranks.toy_layer(toy, experts_options, routing_options)
        tp = degree(way, 4)
        to = Placement.consecutive(experts.num_experts, 4 // tp).assign(ids)
        predicted = volumes.exact(way, to, 4, x.shape[1], x.dtype, weights.dtype, tp)
        for rank, (_, _, sent, _) in enumerate(made):
            assert sent == {
                label: row[rank] for label, row in predicted.items() if label in sent
            }, (way, rank)
            assert set(predicted) - set(sent) == {"result"}  # gathered by `run` only
        assert rows_by_hand(way, to.tolist(), 4, tp) == rows_of(predicted, way, x, ids, weights)
        checked += 1
    assert checked > 40


def rows_by_hand(way, to, W, tp):
    """(dispatched, combined) rows of all ranks, token by token."""
    dispatched = combined = 0
    for t, chosen in enumerate(to):
        owner = next(r for r in range(W) if t < (r + 1) * len(to) // W)
        if way in ("ep", "tp"):
            others = W - 1
        else:
            away = [r for r in chosen if r < W // tp and r != owner // tp]
            others = tp - 1 + tp * (len(away) if way == "ep-a2a" else len(set(away)))
        dispatched, combined = dispatched + others, combined + others
    return dispatched, combined


def rows_of(predicted, way, x, ids, weights):
    hidden, K = x.shape[1] * x.element_size(), ids.shape[1]
    routed = hidden + (8 + 4 if way == "ep-a2a" else K * (4 + 4))
    return sum(predicted["dispatch"]) / routed, sum(predicted["combine"]) / hidden


# ------------------------------------------------------------------------------------------------------
# what can fail


def test_a_killed_rank_ends_the_run(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 3 was killed by SIGKILL.*the other ranks were ended"
    ):
        launch(ranks.die_in_the_middle, 3, tmp_path / "note")
    assert time.time() - float((tmp_path / "note").read_text()) < 300  # rank 2 would go on for 600


def test_an_error_of_one_rank_is_told(capfd):
    with pytest.raises(RuntimeError, match="rank 1 of 2 raised ValueError: no such luck"):
        launch(ranks.fail, 2, 1)


def test_what_cannot_be_launched():
    with pytest.raises(ValueError, match=".py file"):
        launch(lambda: None, 2)
    with pytest.raises(ValueError, match="at least one"):
        launch(time.time, 0)


# ---------------------------------------------------------------------------------------------------
# parts of experts


@given(
    st.sampled_from(sorted(toy.LAYOUTS)), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)
)
def test_parts_on_the_intermediate_dimension_add_up(layout, parts, H, I):
    experts = toy.make_experts(1, H, I, layout)
    x = torch.randn(4, H)
    whole = experts.ffn(x, experts.own(0))
    pieces = [on_intermediate(experts.own(0), part, parts, experts) for part in range(parts)]
    torch.testing.assert_close(
        sum(experts.ffn(x, piece) for piece in pieces), whole, atol=1e-5, rtol=1e-5
    )
    assert sum(piece["down_proj"].numel() for piece in pieces) == H * I


@given(st.sampled_from(sorted(toy.LAYOUTS)), st.integers(1, 5), st.integers(1, 9))
def test_parts_on_the_hidden_dimension_hold_everything_once(layout, parts, H):
    experts = toy.make_experts(1, H, 4, layout)
    pieces = [on_hidden(experts.own(0), part, parts, experts) for part in range(parts)]
    for name, tensor in experts.own(0).items():
        if name.endswith("_bias") and "down" not in name:
            assert torch.equal(sum(piece[name] for piece in pieces), tensor)
        else:
            assert sum(piece[name].numel() for piece in pieces) == tensor.numel()


def test_what_cannot_be_cut_is_refused():
    experts = toy.make_experts(2, 4, 4)
    with pytest.raises(ValueError, match="no rule"):
        on_intermediate({"extra": torch.zeros(2, 2)}, 0, 2, experts)
    experts.has_post_expert_norm = True
    for cut in (on_intermediate, on_hidden):
        with pytest.raises(ValueError, match="normalises"):
            cut(experts.own(0), 0, 2, experts)


def test_an_expert_of_another_rank_is_not_here():
    experts = toy.make_experts(4, 4, 4)
    source = ShardedExperts(
        [experts], lambda _, e: experts.own(e), Placement.consecutive(4, 2), device=1
    )
    assert torch.equal(source(0, 3)["down_proj"], experts.module.down_proj[3]) and source.held(
        0
    ) == [2, 3]
    with pytest.raises(KeyError, match="another rank"):
        source(0, 0)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_as_equal_as_can_be(T, W):
    made = share(T, W)
    assert sum(made) == T and len(made) == W and max(made) - min(made) <= 1


@given(st.integers(0, 5), st.integers(1, 7), st.integers(1, 3))
def test_packed_rows_come_back(n, H, K):
    parts = torch.randn(n, H).bfloat16(), torch.randint(0, 9, (n, K)).int(), torch.randn(n, K)
    assert all(torch.equal(a, b) for a, b in zip(unpack(pack(*parts), parts), parts, strict=True))


def test_how_many_ranks_share_an_expert():
    assert [degree(v, 4) for v in VARIANTS] == [1, 1, 1, 4, 2, 4, 1] and degree("tp-ep", 8, 4) == 4
    for wrong in (
        ("ep", 4, 2),
        ("tp", 4, 2),
        ("sideways", 4),
        ("tp-ep", 4, 0),
        ("tp-ep", 4, -2),
        ("tp-ep", 4, 3),
    ):
        with pytest.raises(ValueError):
            degree(*wrong)


def test_every_variant_is_an_executor():
    assert all(issubclass(kind, Executor) for kind in VARIANTS.values())
