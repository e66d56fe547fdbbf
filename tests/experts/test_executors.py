"""Executors of the registry against naive oracles: any sizes, skews, layouts, types; and real
models."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from math import inf

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from moelab import open_model
from moelab.base.registry import make
from moelab.experts import AS_THEY_LIE, EXECUTORS
from moelab.experts.executor import Tally, gate_of, plain
from moelab.experts.fast import Fast
from moelab.experts.gemv import GEMV
from moelab.kernels.gates import SILU
from moelab.models import eager, plug
from moelab.store import bf12, fewbit
from tests.depth import in_turn
from tests.experts.toy import LAYOUTS, make_experts, make_routing, naive
from tests.models import tiny

#: largest difference from an exact result, relative to its largest entry
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def lossless() -> list[str]:
    """The names of those that execute every choice with the options they have by default."""
    found = []
    for name in EXECUTORS:
        with suppress(ValueError):  # made of a plan, which decides what is dropped
            found += [name] if make("executor", name).lossless else []
    return found


every_executor = pytest.mark.parametrize("name", lossless())


@st.composite
def cases(draw):
    """(x, ids, weights, experts): sizes, skew, layout and type; some choices are "no expert", all
    the same one, or one twice."""
    E = draw(st.sampled_from([1, 2, 3, 8, 31, 64]))
    K = draw(st.integers(1, min(8, E)))
    T = draw(st.sampled_from([0, 1, 1, 2, 3, 5, 13, 40, 150]))
    H, I = draw(st.sampled_from([(8, 4), (16, 24), (33, 17), (64, 32), (40, 72)]))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    seed = draw(st.integers(0, 1000))
    experts = make_experts(E, H, I, draw(st.sampled_from(sorted(LAYOUTS))), dtype, seed)
    ids, weights = make_routing(T, E, K, draw(st.sampled_from([0.0, 0.6, 4.0])), seed, dtype)
    random = torch.Generator().manual_seed(seed)
    how = draw(st.sampled_from(["as it is", "some of nobody", "all alike", "twice"]))
    if how == "some of nobody":
        ids = torch.where(torch.rand(ids.shape, generator=random) < 0.3, E, ids)
    elif how == "all alike":
        ids = torch.full_like(ids, draw(st.integers(0, E)))
    elif how == "twice":
        ids[:, K - 1] = ids[:, 0]
    weights = weights.double() if draw(st.booleans()) else weights
    return torch.randn(T, H, generator=random).to(dtype), ids, weights, experts


def case(T=9, E=6, K=3, H=48, I=40, layout="gated", dtype=torch.float32, seed=0):
    ids, weights = make_routing(T, E, K, 1.0, seed, dtype)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x, ids, weights, make_experts(E, H, I, layout, dtype, seed)


def close(y: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert y.dtype == dtype and y.shape == wanted.shape
    if wanted.numel():
        largest = max(1.0, float(wanted.abs().max()))
        assert (y.double() - wanted).abs().max() <= TOLERANCE[dtype] * largest


@every_executor
@given(given=cases())
def test_equals_the_exact_result_and_executes_every_choice(name, given):
    executor, experts = make("executor", name), given[-1]
    close(executor(*given), naive(*given), given[0].dtype)
    tally, routed = executor.tally, int((given[1] < experts.num_experts).sum())
    assert tally.routed == tally.executed == routed and tally.slots >= routed


def test_gemv_on_several_threads(request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    for layout in LAYOUTS:
        given = case(40, H=70, I=36, layout=layout)
        close(GEMV()(*given), naive(*given), torch.float32)


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
    asked, executor = [], make("executor", name)
    experts.layer, (x, (ids, weights)) = 3, (torch.randn(6, 16), make_routing(6, 4, 2))
    for where in (other, experts):
        experts.source = lambda layer, e: asked.append((layer, e)) or where.own(e)
        wanted = naive(x, ids, weights, where)
        close(executor(x, ids, weights, experts), wanted, torch.float32)
    assert {layer for layer, _ in asked} == {3} and {e for _, e in asked} >= {
        *ids.flatten().tolist()
    }


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_bf12_are_those_of_bf16(layout, few):
    """`few`: a source of which some experts are packed and some are not."""
    x, ids, weights, experts = given = case(H=64, I=128, layout=layout, dtype=torch.bfloat16)
    wanted = naive(*given)
    kept = [{name: w.clone() for name, w in experts.own(e).items()} for e in range(6)]
    blobs = [{n: bf12.pack(w) for n, w in of.items() if w.dim() == 2} for of in kept]

    class Source:
        def __call__(self, layer, expert):
            return kept[expert]

        def matrices(self, layer, experts, dtype):
            return None if few else {name: self.rows(name, experts) for name in kept[0]}

        def rows(self, name, experts):
            if name not in blobs[0]:
                return "raw", np.array([[kept[e][name].data_ptr(), 0, 0, 0] for e in experts])
            shape, all_of_it = kept[0][name].shape, [blobs[e][name] for e in experts]
            rows = [bf12.CODEC.row(of.ctypes.data, len(of), shape) for of in all_of_it]
            return "bf12", np.array(rows)

    experts.source = Source()
    assert (GEMV()(x, ids, weights, experts).double() - wanted).abs().max() <= 4e-2


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize(
    "name, layout",
    in_turn(AS_THEY_LIE[1:6], ["gated", "bias", "transposed", "interleaved", "bias fp16"]),
)
def test_few_bits_are_multiplied_as_they_lie(name, layout, tokens):
    """By the executors that say so, and widened only for many rows of an expert."""
    layout, *other = layout.split()
    dtype = torch.float16 if other else torch.bfloat16
    x, ids, weights, experts = given = case(tokens, H=64, I=128, layout=layout, dtype=dtype)
    form = fewbit.find_format("mxfp4.T" if experts.is_transposed else "mxfp4")
    kept = [{n: w.clone() for n, w in experts.own(e).items()} for e in range(6)]
    blobs = [{n: form.compress(w) for n, w in of.items() if w.dim() == 2} for of in kept]
    for e, of in enumerate(blobs):
        for name_, blob in of.items():
            form.decompress(blob, kept[e][name_])
            getattr(experts.module, name_).data[e] = kept[e][name_]
    widened = []

    class Source:
        def __call__(self, layer, expert):
            widened.append(expert)
            return kept[expert]

        def matrices(self, layer, experts, dtype):
            return {name: self.rows(name, experts) for name in kept[0]}

        def rows(self, name, experts):
            if name not in blobs[0]:
                return "raw", np.array([[kept[e][name].data_ptr(), 0, 0, 0] for e in experts])
            shape = kept[0][name].shape
            found = [
                form.row(blobs[e][name].ctypes.data, len(blobs[e][name]), shape) for e in experts
            ]
            return form.name, np.array(found)

    wanted = naive(*given)
    experts.source = Source()
    executor = make("executor", name, **({"factor": 6.0} if name == "capacity" else {}))
    assert (executor(*given).double() - wanted).abs().max() <= 4e-2 * wanted.abs().max()
    assert (len(widened) > 0) == (tokens == 300 and name != "gemv")


@pytest.mark.parametrize(
    "layout, gate",
    [
        ("gated", (False, 1, inf, 0)),
        ("clamped", (False, 1, 10, 0)),
        ("interleaved", (True, 1.702, 7, 1)),
        ("ungated", None),
    ],
)
def test_gates_are_found_by_their_values(layout, gate):
    assert gate_of(case(layout=layout)[-1]) == gate


def test_clamped_gates_are_not_taken_for_silu():
    for limit in (0.5, 7.0, 30.0, 1000.0):
        for low, high in ((None, limit), (-limit, None)):
            for part in (0, 1) if high else (1,):
                experts = case()[-1]

                def gate(h, low=low, high=high, part=part):
                    parts = [*h.chunk(2, -1)]
                    parts[part] = parts[part].clamp(low, high)
                    return F.silu(parts[0]) * parts[1]

                experts.module._apply_gate = gate
                assert gate_of(experts) != SILU


@pytest.mark.parametrize("name", ["sorted", "gemv", "fast", "selective", "blockwise", "capacity"])
@pytest.mark.parametrize("wrong", [-1, 7, 10**12])
def test_ids_of_no_expert_are_refused(name, wrong):
    x, ids, weights, experts = case()
    ids[2, 1] = wrong
    with pytest.raises(ValueError, match="expert"):
        make("executor", name)(x, ids, weights, experts)


def test_what_gemv_cannot_do_is_sorted():
    x, ids, weights, experts = case()
    y = make("executor", "sorted")(x, ids, weights, experts)
    experts.source = lambda layer, e: {
        name: w.mT.contiguous().mT for name, w in experts.own(e).items()
    }
    assert torch.allclose(GEMV()(x, ids, weights, experts), y, atol=1e-5)  # of strided weights
    experts.source, experts.has_post_expert_norm = None, True
    experts.module.post_expert_norm = torch.nn.LayerNorm(48)
    assert not plain(experts)
    y = make("executor", "sorted")(x, ids, weights, experts)
    assert torch.equal(GEMV()(x, ids, weights, experts), y)


def test_what_fast_measures_is_not_counted():
    x, ids, weights, experts = given = case(40)
    fast = Fast()
    close(fast(*given), naive(*given), torch.float32)
    assert fast.tally.routed == fast.tally.slots == ids.numel()


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
    assert set(EXECUTORS) - set(lossless()) == {"capacity", "tiered", "grouped"}
    with pytest.raises(ValueError, match=said):
        make("executor", name, **options)


def test_shares_of_a_tally():
    """Of 10 choices 8 were executed in 16 rows: a fifth is dropped, and half of the rows are
    padding."""
    tally = Tally(10, 8, 16)
    assert (tally.dropped, tally.drop_rate, tally.padded_fraction) == (2, 0.2, 0.5)
    assert Tally().drop_rate == Tally().padded_fraction == 0
