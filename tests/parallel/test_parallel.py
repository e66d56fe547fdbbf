"""Experts on 2 and 4 gloo processes against one process, and their bytes against a loop."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import open_model
from moelab.base.registry import make
from moelab.experts import EXECUTORS
from moelab.experts.sharding import part_of, share
from moelab.models import eager, plug
from moelab.parallel import VARIANTS, degree, launch
from moelab.parallel.dense import cut_dense
from moelab.parallel.exchange import FEW, pack, unpack
from moelab.parallel.sharding import ShardedExperts, owners
from tests.depth import depth, in_turn
from tests.experts import toy
from tests.models import tiny
from tests.parallel import ranks

FP32, BF16 = torch.float32, torch.bfloat16


def close(made, logits, tolerance=1e-6):
    return (made - logits).abs().max() <= tolerance * max(1.0, float(logits.abs().max()))


# ---------------------------------------------------------------------------------------------
# whole models


def test_a_whole_generation_is_that_of_one_process(tmp_path):
    cases = [(name, "ep-a2a", FP32) for name in tiny.SOME]
    cases += [(name, "ep-a2a", BF16) for name in ("qwen3_moe", "gpt_oss", "llama4_text")]
    cases += [(n, "tp", FP32) for n in ("qwen3_moe", "gpt_oss", "llama4_text", "small")]
    cases += [
        (n, "tp", FP32) for n in depth(("deepseek_v3",), ("deepseek_v3", "qwen2_moe", "olmoe"))
    ]
    cases += [(n, v, FP32) for n in ("qwen3_moe", "llama4_text") for v in ("ep", "ep-dedup")]
    paths = {name: tiny.save(name, tmp_path / name) for name in tiny.SOME}
    made = launch(ranks.generate_all, 2, [(paths.get(n), v, d, None) for n, v, d in cases])
    alone = {}
    for i, (name, variant, dtype) in enumerate(cases):
        if (name, dtype) not in alone:
            model = open_model(paths.get(name), dtype=dtype)
            held = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
            others = sum(p.nbytes for p in model.parameters()) - held
            alone[name, dtype] = *ranks.tokens_and_logits(model), held, others
        tokens, logits, held, others = alone[name, dtype]
        for made_tokens, made_logits, made_held, _, made_others in (rank[i] for rank in made):
            assert torch.equal(made_tokens, tokens), (name, variant)
            assert close(made_logits, logits), (name, variant)
            # Llama 4's blocks multiply all rows, and fp32 products round by the number of rows
            if variant == "ep-a2a" and (name, dtype) != ("llama4_text", FP32):
                assert torch.equal(made_logits, logits), (name, variant, dtype)
            # a bias that cannot be cut is on every rank, zero on all but one
            rel = 0.03 if (name, variant) == ("gpt_oss", "tp") else 1e-9
            assert made_held == pytest.approx(held / 2, rel=rel), (name, variant)
            # OLMoE has norms across all heads
            cut = variant == "tp" and name != "olmoe"
            assert made_others < 0.8 * others if cut else made_others == others, (name, variant)


def test_every_variant_and_executor(tmp_path):
    """On four ranks: results and counts are those of one process."""
    folder = tiny.save("qwen3_moe", tmp_path / "model")
    model = open_model(folder, dtype=FP32)
    inner = [name for name in EXECUTORS if name not in ("tiered", "grouped", "int8")]
    cases = [(variant, None) for variant in (*VARIANTS, "auto")]
    cases += [(v, name) for name, v in in_turn(inner, ("ep", "tp", "ep-a2a"))]
    cases = [("ep", "capacity"), *(of for of in cases if of != ("ep-a2a", "capacity"))]
    made = launch(ranks.generate_all, 4, [(folder, v, FP32, name) for v, name in cases])
    alone = {}
    for i, (variant, name) in enumerate(cases):
        if name not in alone:
            plug(model, executor := make("executor", name or "exact"))
            alone[name] = *ranks.tokens_and_logits(model), executor.tally
        tokens, logits, tally = alone[name]
        for rank in made:
            assert torch.equal(rank[i][0], tokens), (variant, name)
            assert close(rank[i][1], logits, 2e-6), (variant, name)
        # ranks that share an expert each count it; auto spreads such narrow experts
        times = {"tp": 4, "tp-ep": 2}.get(variant, 1)
        for count in ("routed", "executed"):
            total = sum(getattr(rank[i][3], count) for rank in made)
            assert total == times * getattr(tally, count), (variant, name)
    assert alone["capacity"][2].dropped  # it had something to drop


def test_routers_in_sequence_parallel_choose_as_replicated_ones(tmp_path):
    """And gather K weights in fp32 and ids of four bytes of each token of a prompt: half of the
    tokens from either rank; a dialect's routers gather nothing."""
    names = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")
    folders = [tiny.save(name, tmp_path / name) for name in names]
    made = launch(ranks.route_both_ways, 2, folders)
    for i, folder in enumerate(folders):
        model = open_model(folder, dtype=FP32)
        tokens, logits = ranks.tokens_and_logits(model)
        for (made_tokens, made_logits), (prompt, step) in (rank[i] for rank in made):
            assert torch.equal(made_tokens, tokens) and close(made_logits, logits)
            expected = 10 * model.spec.K * 8 * model.spec.L
            assert (prompt, step) == (0 if names[i] == "llama4_text" else expected, 0)


def test_heads_that_ranks_cannot_share_evenly_are_refused_by_name(tmp_path):
    for W, name in ((3, "qwen3_moe"), (8, "gpt_oss"), (3, "deepseek_v3")):
        model = open_model(tiny.save(name, tmp_path / f"{name}{W}"))
        with pytest.raises(ValueError, match=r"layers.0.self_attn has 4 heads.*--parallel ep-a2a"):
            cut_dense(model, SimpleNamespace(rank=0, size=W))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_parts_of_attention_add_up(name, tmp_path):
    """For ranks in turn, as one process has them: the parts' outputs before they are exchanged."""
    folder, x, whole = tiny.save(name, tmp_path), torch.randn(2, 5, 32), None
    for W in (1, 2, 4):
        summed = 0
        for rank in range(W):
            model = open_model(folder, dtype=FP32)
            cut_dense(model, SimpleNamespace(rank=rank, size=W, all_reduce=lambda y, _: y))
            at = torch.arange(5)[None]
            turned = model.model.rotary_emb(x, at)
            attention = model.model.layers[1].self_attn
            summed = summed + attention(x, position_embeddings=turned, attention_mask=None)[0]
        whole = summed if whole is None else whole
        torch.testing.assert_close(summed, whole, atol=1e-5, rtol=1e-5)


def test_options_that_do_not_fit():
    with pytest.raises(RuntimeError, match="leave it out"):
        launch(ranks.open_with, 2, None, {"parallel": "auto", "tp": 2})
    for way in ("ep-a2a", "ep-dedup", "tp-ep"):
        with pytest.raises(ValueError, match="drops tokens.*ep or tp"):
            VARIANTS[way](None, make("executor", "capacity"))


# ---------------------------------------------------------------------------------------------
# single layers, 4 ranks


def cases():
    """(experts' options, routing's options, way)."""
    for way in VARIANTS:
        for layout in toy.LAYOUTS:
            yield dict(E=10, H=18, I=13, layout=layout), dict(T=37, E=10, K=3, skew=1.0), way
        for T in (0, 1, 3, 16):
            yield dict(E=8, H=16, I=8), dict(T=T, E=8, K=2), way
    for way in ("ep-dedup", "tp"):  # more ranks than experts, and than I
        yield dict(E=2, H=16, I=3), dict(T=9, E=2, K=2), way


def test_a_layer_of_every_kind():
    """Computes what one process does, every choice once, and sends as many rows as a loop says."""
    todo = list(cases())
    made = launch(ranks.run_all, 4, todo)
    for i, what in enumerate(todo):
        experts_options, routing_options, way = what
        experts, (ids, weights), x = ranks.toy_layer(experts_options, routing_options)
        oracle = toy.naive(x, ids, weights, experts)
        layer = [rank[i] for rank in made]
        for y, *_ in layer:
            assert y.dtype == x.dtype and y.shape == x.shape, what
            assert torch.allclose(y.double(), oracle, rtol=0, atol=2e-5), what
            if way == "ep-a2a":
                assert torch.equal(y, eager(x, ids, weights, experts)), what
        own = torch.cat([own for _, own, _, _ in layer])
        assert torch.allclose(own, layer[0][0], atol=1e-5), what
        if len(x) > FEW or way == "ep-a2a":
            assert torch.equal(own, layer[0][0]), what
        tp = degree(way, 4)
        computed = sum(computed for *_, computed in layer)
        assert computed == tp * int((ids < experts.num_experts).sum()), what
        to = owners(experts.num_experts, 4 // tp)[ids].tolist()
        assert rows_sent(layer, x) == 2 * [rows_by_loop(way, to, 4, tp)], what


def rows_by_loop(variant, to, W, tp):
    """Rows that all ranks send, one way, from the ep rank of each token's choices (W/tp: none)."""
    total = 0
    for t, chosen in enumerate(to):
        owner = next(r for r in range(W) if t < (r + 1) * len(to) // W)
        away = [r for r in chosen if r < W // tp and r != owner // tp]
        if variant in ("ep", "tp"):
            total += W - 1
        else:
            total += tp - 1 + tp * (len(away) if variant == "ep-a2a" else len(set(away)))
    return total


def rows_sent(layer, x):
    """Rows dispatched and combined by all ranks; bytes of the latter are those of hidden states."""
    sent = [sent for _, _, sent, _ in layer]
    rows = [sum(of[way].rows for of in sent if way in of) for way in ("dispatch", "combine")]
    bytes = sum(of["combine"].bytes for of in sent if "combine" in of)
    assert bytes == rows[1] * x.shape[1] * x.element_size()
    return rows


# ---------------------------------------------------------------------------------------------
# what can fail, and parts


def test_a_rank_that_fails_ends_the_run(tmp_path):
    with pytest.raises(
        RuntimeError, match="rank 1 of 3 failed, and the other ranks were ended.*SIGKILL"
    ):
        launch(ranks.die_in_the_middle, 3, tmp_path / "note")
    assert time.time() - float((tmp_path / "note").read_text()) < 300  # rank 2 would go on for 600
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed.*ValueError: no such luck"):
        launch(ranks.fail, 2, 1)


@given(
    st.sampled_from(sorted(toy.LAYOUTS)), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)
)
def test_parts_of_an_expert_add_up(layout, parts, H, I):
    experts = toy.make_experts(1, H, I, layout)
    x = torch.randn(4, H)
    whole = experts.ffn(x, experts.own(0))
    pieces = [part_of(experts.own(0), part, parts, experts) for part in range(parts)]
    summed = sum(experts.ffn(x, piece) for piece in pieces)
    torch.testing.assert_close(summed, whole, atol=1e-5, rtol=1e-5)
    assert sum(piece["down_proj"].numel() for piece in pieces) == H * I


def test_what_cannot_be_cut_or_is_elsewhere_is_refused():
    experts = toy.make_experts(4, 4, 4)
    source = ShardedExperts([experts], lambda _, e: experts.own(e), rank=1, W=2)
    assert torch.equal(source(0, 3)["down_proj"], experts.module.down_proj[3])
    with pytest.raises(KeyError, match="another rank"):
        source(0, 0)
    with pytest.raises(ValueError, match="no rule"):
        part_of({"extra": torch.zeros(2, 2)}, 0, 2, experts)
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="normalises"):
        part_of(experts.own(0), 0, 2, experts)


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 3))
def test_shares_are_equal_and_packed_rows_come_back(n, W, K):
    sizes = share(n, W)
    assert sum(sizes) == n and len(sizes) == W and max(sizes) - min(sizes) <= 1
    parts = torch.randn(n, W).bfloat16(), torch.randint(0, 9, (n, K)).int(), torch.randn(n, K)
    assert all(torch.equal(a, b) for a, b in zip(unpack(pack(*parts), parts), parts, strict=True))


def test_how_many_ranks_share_an_expert():
    assert [degree(v, 4) for v in VARIANTS] == [1, 1, 1, 4, 2] and degree("tp-ep", 8, 4) == 4
    for wrong in (("ep", 4, 2), ("tp", 4, 2), ("sideways", 4), ("tp-ep", 4, 0), ("tp-ep", 4, 3)):
        with pytest.raises(ValueError):
            degree(*wrong)
