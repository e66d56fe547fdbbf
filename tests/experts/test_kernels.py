"""The kernels under the executors: products against float64 numpy, bf12 against the weights
themselves, caches."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import from_dtype

from moelab.experts.executor import plain, silu_gated
from moelab.experts.fast import Fast
from moelab.experts.gemv import GEMV
from moelab.kernels import feed_forward as around
from moelab.kernels import products, vectors
from moelab.models import eager
from moelab.registry import make
from moelab.store import bf12, fewbit
from tests.experts.toy import LAYOUTS, make_experts, make_routing, naive

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def step(T=9, E=6, K=3, H=48, I=40, layout="gated", dtype=torch.float32, seed=0):
    experts, (ids, weights) = (
        make_experts(E, H, I, layout, dtype, seed),
        make_routing(T, E, K, 1.0, seed, dtype),
    )
    return (
        torch.randn(T, H, generator=torch.Generator().manual_seed(seed)).to(dtype),
        ids,
        weights,
        experts,
    )


@settings(max_examples=150)
@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(1, 150),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_products_of_any_size(T, counts, n, R, dtype, transposed, biased, seed):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(T, n, generator=rng).to(dtype)
    shape = (n, R) if transposed else (R, n)
    matrices = [torch.randn(shape, generator=rng).to(dtype) for _ in counts]
    biases = [torch.randn(R, generator=rng).to(dtype) for _ in counts]
    bounds, kind = np.cumsum([0, *counts]), products.KINDS[dtype]
    who = np.random.default_rng(seed).integers(0, T, bounds[-1])
    table = np.array(
        [[w.data_ptr(), 0, b.data_ptr() if biased else 0, 0] for w, b in zip(matrices, biases)]
    )
    y = products.multiply(kind, table, bounds, x, who, R, transposed)
    assert y.dtype == torch.float32 and y.shape == (bounds[-1], R)
    for i, (w, b) in enumerate(zip(matrices, biases)):
        mine = slice(bounds[i], bounds[i + 1])
        found = x[who[mine]].double() @ (w if transposed else w.T).double() + (
            b.double() if biased else 0
        )
        assert torch.allclose(y[mine].double(), found, atol=1e-4 * n**0.5)


def test_many_tokens_and_rows_on_several_threads(threads):
    x, w = torch.randn(230, 96), torch.randn(1100, 96)
    for transposed in (False, True):
        matrix = w.T.contiguous() if transposed else w
        y = products.multiply(
            np.float32,
            np.array([[matrix.data_ptr(), 0, 0, 0]]),
            np.array([0, 230]),
            x,
            None,
            1100,
            transposed,
        )
        assert torch.allclose(y, x @ w.T, atol=1e-4)


@pytest.mark.parametrize("M, R", [(1, 2050), (1, 4500), (5, 2300), (9, 1030)])
def test_pieces_of_any_length_are_the_whole(M, R, threads):
    """From 64 rows, a row beyond whole ones, to 512, as many as leave each thread a share."""
    w, x = torch.randn(M, R, 64).bfloat16(), torch.randn(M, 64).bfloat16()
    table = np.array([[one.data_ptr(), 0, 0, 0] for one in w])
    y = products.multiply(products.KINDS[w.dtype], table, np.arange(M + 1), x, None, R, False)
    assert torch.allclose(y, torch.einsum("mrn,mn->mr", w.float(), x.float()), atol=1e-4)


def test_without_openmp_pythons_threads_do_it(monkeypatch, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    monkeypatch.setattr(products, "TEAM", 0)
    monkeypatch.setattr(around, "TEAM", 0)
    torch.set_num_threads(3)
    for layout in ("gated", "transposed"):
        case = step(layout=layout)
        assert torch.allclose(GEMV()(*case).double(), naive(*case), atol=1e-4)
    assert torch.get_num_threads() == 3


def test_an_interruption_waits_for_the_threads(monkeypatch, request):
    """Ctrl-C while a kernel runs is raised when nobody uses its memory any more."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    monkeypatch.setattr(products, "TEAM", 0)
    waited, real = [], products.wait

    def interrupted(running):
        waited.append(running)
        if len(waited) == 1:
            raise KeyboardInterrupt
        return real(running)

    monkeypatch.setattr(products, "wait", interrupted)
    torch.set_num_threads(2)
    x, w = torch.randn(3, 64), torch.randn(32, 64)
    with pytest.raises(KeyboardInterrupt):
        products.multiply(
            np.float32, np.array([[w.data_ptr(), 0, 0, 0]]), np.array([0, 3]), x, None, 32, False
        )
    assert len(waited) == 2 and len(waited[0]) == 2 and all(one.done() for one in waited[0])


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=70))
def test_results_are_rounded_as_torch_rounds(values):
    y, one = torch.tensor([values]), torch.ones(1, 1)
    for dtype in DTYPES:
        found = around.combine(y, np.zeros((1, 1), np.int64), one, dtype)
        assert torch.equal(found.isnan(), y.isnan()) and torch.equal(
            found.nan_to_num(), y.to(dtype).nan_to_num()
        )


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_arranged_choices(T, K, E, seed):
    ids = np.random.default_rng(seed).integers(0, E + 1, (T, K))
    hit, bounds, tokens, rows = around.arrange(ids, E)
    assert (
        hit.tolist() == sorted(set(ids.ravel().tolist()) - {E})
        and bounds[0] == 0
        and bounds[-1] == len(tokens)
    )
    for e, begin, end in zip(hit, bounds, bounds[1:]):
        assert tokens[begin:end].tolist() == [
            t for t in range(T) for k in range(K) if ids[t, k] == e
        ]
    assert all(
        rows[t, k] == -1 if ids[t, k] == E else tokens[rows[t, k]] == t
        for t in range(T)
        for k in range(K)
    )
    assert sorted(rows[rows >= 0].tolist()) == list(range(len(tokens)))


# --------------------------------------------------------------------------------------------------------------
# bf12


def packed_row(w, blob, bias=None):
    """The row of `products.multiply`'s matrices of a blob; [R, n] or, transposed, [n, R]."""
    low = np.frombuffer(blob, np.uint8).ctypes.data + bf12.HEAD
    return [
        low,
        low + w.numel(),
        0 if bias is None else bias.data_ptr(),
        bf12.escapes(len(blob), w.numel()),
    ]


def wild(shape, rng, share):
    """bf16 weights, a share of them with any 16 bits at all, but finite."""
    w = torch.randn(shape, generator=rng).bfloat16()
    bits = torch.randint(-1 << 15, 1 << 15, shape, generator=rng, dtype=torch.int16).view(
        torch.bfloat16
    )
    bits = torch.where(bits.isfinite() & (bits.abs() < 1e4), bits, torch.zeros(()).bfloat16())
    return torch.where(torch.rand(shape, generator=rng) < share, bits, w)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 150),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.sampled_from((0, 0.01, 0.5)),
    st.integers(0, 99),
)
def test_packed_products_of_any_size(
    T, counts, blocks, rows, dtype, transposed, biased, share, seed
):
    rng = torch.Generator().manual_seed(seed)
    n, R = (rows, 64 * blocks) if transposed else (64 * blocks, rows)
    x = torch.randn(T, n, generator=rng).to(dtype)
    matrices = [wild((n, R) if transposed else (R, n), rng, share) for _ in counts]
    biases = [torch.randn(R, generator=rng).bfloat16() if biased else None for _ in counts]
    blobs = [bf12.pack(w) for w in matrices]
    table, bounds = (
        np.array(list(map(packed_row, matrices, blobs, biases))),
        np.cumsum([0, *counts]),
    )
    who = np.random.default_rng(seed).integers(0, T, bounds[-1])
    y = products.multiply(products.PACKED["bf12"], table, bounds, x, who, R, transposed)
    for i, (w, b) in enumerate(zip(matrices, biases)):
        mine, wide = slice(bounds[i], bounds[i + 1]), (w if transposed else w.T).double()
        found = x[who[mine]].double() @ wide + (b.double() if biased else 0)
        size = x[who[mine]].double().abs() @ wide.abs() + 1
        assert ((y[mine].double() - found).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_every_bf16_number_is_read_right(transposed):
    words = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    words = torch.where(words.isfinite(), words, torch.zeros_like(words))  # 0 · ∞ is no number
    for w in words.view(32, 32, 64):  # of few high bytes each, so that none is an escape
        blob, T = bf12.pack(w), len(w) if transposed else w.shape[1]
        y = products.multiply(
            products.PACKED["bf12"],
            np.array([packed_row(w, blob)]),
            np.array([0, T]),
            torch.eye(T),
            None,
            w.numel() // T,
            transposed,
        )
        y, wide = y if transposed else y.T, w.float()
        if not transposed:  # an instruction for pairs of bf16 takes subnormals for 0
            wide = torch.where(wide.abs() < 2.0**-126, y * (y == wide), wide)
        assert torch.equal(y, wide)


# -----------------------------------------------------------------------------------------------------
# few-bit formats


def few_row(name, blob, w, bias=None):
    """The row of `products.multiply`'s matrices of a few-bit blob of weights [R, n]."""
    codes, scales, *rest = fewbit.find_format(name).row(blob.ctypes.data, len(blob), w.shape)
    return [codes, scales, 0 if bias is None else bias.data_ptr(), *rest[1:]]


@pytest.mark.parametrize("name", fewbit.FORMATS)
@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 99),
)
def test_few_bit_products_of_any_size(name, T, counts, blocks, R, dtype, biased, seed):
    """Against doubles of what the blobs unpack to; groups and blocks have scales of their own."""
    rng, n = torch.Generator().manual_seed(seed), 64 * blocks
    x = torch.randn(T, n, generator=rng).to(dtype)
    spread = torch.exp(torch.randn(R, n // 32, generator=rng)).repeat_interleave(32, 1)
    matrices = [(torch.randn(R, n, generator=rng) * spread).bfloat16() for _ in counts]
    biases = [torch.randn(R, generator=rng).bfloat16() if biased else None for _ in counts]
    blobs = [fewbit.find_format(name).compress(w) for w in matrices]
    table = np.array([few_row(name, *of) for of in zip(blobs, matrices, biases)])
    bounds = np.cumsum([0, *counts])
    who = np.random.default_rng(seed).integers(0, T, bounds[-1])
    y = products.multiply(products.PACKED[name], table, bounds, x, who, R, False)
    for i, (blob, b) in enumerate(zip(blobs, biases)):
        fewbit.find_format(name).decompress(blob, wide := torch.empty(R, n))
        mine, wide = slice(bounds[i], bounds[i + 1]), wide.T.double()
        found = x[who[mine]].double() @ wide + (b.double() if biased else 0)
        size = x[who[mine]].double().abs()
        if (
            from_dtype(np.dtype(products.PACKED[name])) in vectors.FIXED
        ):  # half a quantum of each group of inputs
            size += 3 * size.view(-1, n // 32, 32).amax(2).repeat_interleave(32, 1)
        assert ((y[mine].double() - found).abs() <= 1e-5 * (size @ wide.abs() + 1)).all()


@pytest.mark.parametrize("name", fewbit.FORMATS)
def test_every_code_is_read_right(name):
    """In every place of a group, under scales of many sizes; NaN's two codes of fp8 aside."""
    codes, rows = torch.arange(256, dtype=torch.uint8), 64
    if name == "fp8":
        codes[[127, 255]] = 0
    half = name in ("mxfp4", "int4")
    blob = np.concatenate(
        [
            codes.repeat(rows * 256 // (2 if half else 1) // 256).numpy(),
            {
                "mxfp4": lambda: torch.arange(rows * 8) % 250 + 3,
                "fp8": lambda: torch.tensor([1.5, 3e-9]),
            }.get(name, lambda: torch.linspace(-3, 1e-3, rows * 8))()
            .to(fewbit.find_format(name).scale)
            .view(torch.uint8)
            .numpy(),
        ]
    )
    fewbit.find_format(name).decompress(blob, wide := torch.empty(rows, 256))
    y = products.multiply(
        products.PACKED[name],
        np.array([few_row(name, blob, wide)]),
        np.array([0, 256]),
        torch.eye(256),
        None,
        rows,
        False,
    )
    assert torch.equal(y.T, wide)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("few", [False, True])
def test_experts_of_bf12_are_those_of_bf16(layout, few, threads):
    x, ids, weights, experts = step(H=64, I=128, layout=layout, dtype=torch.bfloat16)
    expected = naive(x, ids, weights, experts)
    kept = {
        e: {name: (w, bf12.pack(w) if w.dim() == 2 else None) for name, w in experts.own(e).items()}
        for e in range(6)
    }

    class Source:
        def __call__(self, layer, expert):
            return {name: w for name, (w, _) in kept[expert].items()}

        def matrices(self, layer, experts, dtype):
            if few and len(experts) > 1:
                return None  # some packed and some not: `weights` are asked for
            rows = {
                name: [
                    [w.data_ptr(), 0, 0, 0] if blob is None else packed_row(w, blob)
                    for w, blob in (kept[e][name] for e in experts)
                ]
                for name in kept[0]
            }
            return {
                name: ("raw" if kept[0][name][1] is None else "bf12", np.array(row))
                for name, row in rows.items()
            }

    experts.shapes = {name: w.shape for name, w in experts.own(0).items()}
    experts.source = Source()
    assert (GEMV()(x, ids, weights, experts).double() - expected).abs().max() <= 4e-2


# --------------------------------------------------------------------------------------------------------
# executors


def loop(x, ids, weights, experts):
    """Eager as a plain loop over all experts: first choices before second ones, experts in
    ascending order."""
    contributions = []
    for e in range(experts.num_experts):
        choice, tokens = (e == ids.T).nonzero(as_tuple=True)
        if len(tokens):
            contributions.append(
                (
                    e,
                    tokens,
                    experts.contribution(x, tokens, weights[tokens, choice], experts.weights(e)),
                )
            )
    return experts.accumulate(x, contributions)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_is_eager_and_a_plain_loop_bit_for_bit(layout, dtype):
    for seed in range(10):
        x, ids, weights, experts = step(1 + 3 * seed, layout=layout, dtype=dtype, seed=seed)
        ids[0, 0] = 6
        y = loop(x, ids, weights, experts)
        assert torch.equal(make("executor", "exact")(x, ids, weights, experts), y)
        assert torch.equal(eager(x, ids, weights, experts), y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv_on_several_threads(dtype, layout, threads):
    for T in (1, 4, 40):
        case = step(T, H=70, I=36, layout=layout, dtype=dtype)
        y = GEMV()(*case).double()
        exact = naive(*case)
        assert (y - exact).abs().max() <= {
            torch.float32: 2e-5,
            torch.bfloat16: 1e-2,
            torch.float16: 2e-3,
        }[dtype] * 4


@pytest.mark.parametrize("name", ["gemv", "fast", "sorted"])
def test_gates_that_clamp_are_not_taken_for_silu(name):
    for layout in ("gated", "clamped"):
        x, ids, weights, experts = step(layout=layout)
        x = 40 * x  # gates and ups far beyond the clamps
        exact = naive(x, ids, weights, experts)
        assert (
            make("executor", name)(x, ids, weights, experts) - exact
        ).abs().max() <= 1e-5 * exact.abs().max()
    assert silu_gated(step(layout="gated")[-1]) and not silu_gated(step(layout="clamped")[-1])


@pytest.mark.parametrize("limit", [0.5, 7.0, 10.0, 30.0, 1000.0])
@pytest.mark.parametrize("which", ["gate above", "up above", "up below"])
def test_any_clamp_is_seen(limit, which):
    experts = step()[-1]

    def gate(h):
        gate, up = h.chunk(2, -1)
        return torch.nn.functional.silu(
            gate.clamp(max=limit) if which == "gate above" else gate
        ) * (
            up.clamp(max=limit)
            if which == "up above"
            else up.clamp(min=-limit)
            if which == "up below"
            else up
        )

    experts._apply_gate = gate
    assert not silu_gated(experts)


@pytest.mark.parametrize("name", ["sorted", "gemv", "fast", "selective", "blockwise", "capacity"])
@pytest.mark.parametrize("wrong", [-1, 7, 1000, 10**12, -(10**12)])
def test_ids_of_no_expert_are_refused(name, wrong):
    x, ids, weights, experts = step()
    ids[2, 1] = wrong
    with pytest.raises(ValueError, match="expert"):
        make("executor", name)(x, ids, weights, experts)


@pytest.mark.parametrize(
    "name", ["exact", "all_experts", "blockwise", "selective", "sorted", "gemv", "fast"]
)
@pytest.mark.parametrize("layout", ["gated", "interleaved"])
def test_routing_weights_of_double_precision(name, layout):
    for dtype in DTYPES[:2]:
        x, ids, weights, experts = step(layout=layout, dtype=dtype)
        y = make("executor", name)(x, ids, weights.double(), experts)
        assert y.dtype == dtype and torch.allclose(
            y.double(),
            naive(x, ids, weights, experts),
            atol=1e-4 if dtype == torch.float32 else 0.05,
        )


def test_one_expert_twice_for_one_token():
    x, ids, weights, experts = step()
    ids[:, 1] = ids[:, 0]
    for name in ("sorted", "gemv"):
        y = make("executor", name)(x, ids, weights, experts).double()
        assert torch.allclose(y, naive(x, ids, weights, experts), atol=1e-4)


def test_what_gemv_cannot_do_falls_back():
    x, ids, weights, experts = step()
    y = make("executor", "sorted")(x, ids, weights, experts)
    experts.source = lambda layer, e: {
        name: w.mT.contiguous().mT if w.dim() == 2 else w  # strided
        for name, w in experts.own(e).items()
    }
    assert torch.allclose(GEMV()(x, ids, weights, experts), y, atol=1e-5)
    experts.source, experts.has_post_expert_norm, experts.post_expert_norm = (
        None,
        True,
        torch.nn.LayerNorm(48),
    )
    assert not plain(experts)
    assert torch.equal(
        GEMV()(x, ids, weights, experts), make("executor", "sorted")(x, ids, weights, experts)
    )


def test_fast_measures_once_and_can_be_told():
    x, ids, weights, experts = step(40)
    fast = Fast()
    y = fast(x, ids, weights, experts)
    assert len(fast.measured) == 1 and fast.tally.routed == fast.tally.slots == ids.numel()
    fast(x, ids, weights, experts), fast(x[:1], ids[:1], weights[:1], experts)
    assert len(fast.measured) == 1 and torch.allclose(
        y.double(), naive(x, ids, weights, experts), atol=1e-4
    )
    for few, way in ((0, "many"), (1e9, "gemv")):
        told, ran = Fast(few=few), []
        for name in ("many", "gemv"):
            inner = getattr(told, name)
            inner.run = lambda *case, name=name, run=inner.run: ran.append(name) or run(*case)
        told(x, ids, weights, experts), told(x[:1], ids[:1], weights[:1], experts)
        assert ran == [way, "gemv"] and told.measured == {}
