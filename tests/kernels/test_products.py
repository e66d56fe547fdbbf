"""Products of every kind of weights against double precision, and what surrounds them."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("numba")
from moelab.fast.dense import matrices_of
from moelab.kernels import feed_forward, threads
from moelab.kernels.compile import kernel
from moelab.kernels.emit import exponential
from moelab.kernels.instructions import Bytes, Integers, instruction
from moelab.kernels.linear import linear
from moelab.kernels.products import KINDS, PACKED, Matrices, multiply
from moelab.store import bf12, fewbit

DTYPES = list(KINDS)
FEW = list(fewbit.FORMATS)


def wild(shape, random, share=0.01):
    """bf16 weights, a share of them with any 16 bits at all, but finite."""
    w = torch.randn(shape, generator=random).bfloat16()
    bits = torch.randint(-1 << 15, 1 << 15, shape, generator=random, dtype=torch.int16)
    bits = bits.view(torch.bfloat16)
    bits = torch.where(bits.isfinite() & (bits.abs() < 1e4), bits, torch.zeros(()).bfloat16())
    return torch.where(torch.rand(shape, generator=random) < share, bits, w)


def stored(kind, shape, random):
    """(what must live, row of `Matrices`, the weights in double precision) of one random matrix."""
    if kind == "bf12":
        w = wild(shape, random, 0.01 if random.initial_seed() % 2 else 0.5)
        blob = bf12.pack(w)
        return blob, bf12.CODEC.row(blob.ctypes.data, len(blob), shape), w.double()
    if kind in FEW:
        n = shape[1]
        spread = torch.exp(torch.randn(shape[0], n // 32, generator=random))
        w = (torch.randn(shape, generator=random) * spread.repeat_interleave(32, 1)).bfloat16()
        form = fewbit.find_format(kind)
        blob = form.compress(w)
        form.decompress(blob, wide := torch.empty(shape))
        return blob, form.row(blob.ctypes.data, len(blob), shape), wide.double()
    w = torch.randn(shape, generator=random).to(kind)
    return w, [w.data_ptr(), 0, 0, 0], w.double()


@pytest.mark.parametrize("kind", [*DTYPES, "bf12", *FEW])
@given(
    T=st.integers(1, 5),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    blocks=st.integers(1, 5),
    rows=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_of_any_size(kind, T, counts, blocks, rows, dtype, transposed, biased, seed):
    random, packed = torch.Generator().manual_seed(seed), isinstance(kind, str)
    transposed, dtype = transposed and kind not in FEW, dtype if packed else kind
    shape = (rows, 64 * blocks if packed else 60 * blocks - seed % 7)
    R, n = shape[::-1] if transposed else shape
    x, matrices = torch.randn(T, n, generator=random).to(dtype), []
    biases = [
        torch.randn(R, generator=random).to(torch.bfloat16 if packed else kind) for _ in counts
    ]
    for bias in biases:
        matrices.append(stored(kind, shape, random))
        matrices[-1][1][2] = bias.data_ptr() if biased else 0
    table, bounds = np.array([row for _, row, _ in matrices]), np.cumsum([0, *counts])
    who = np.random.default_rng(seed).integers(0, T, bounds[-1])
    of = Matrices(PACKED[kind] if packed else KINDS[kind], table, R, transposed)
    y = multiply(of, bounds, x, who)
    assert y.dtype == torch.float32 and y.shape == (bounds[-1], R)
    for i, ((_, _, wide), bias) in enumerate(zip(matrices, biases)):
        mine, wide = slice(bounds[i], bounds[i + 1]), wide if transposed else wide.T
        found = x[who[mine]].double() @ wide + (bias.double() if biased else 0)
        size = x[who[mine]].double().abs()
        if isinstance(
            instruction(of.kind), Bytes | Integers
        ):  # half a quantum of each group of inputs
            size += 3 * size.view(-1, n // 32, 32).amax(2).repeat_interleave(32, 1)
        assert ((y[mine].double() - found).abs() <= 1e-5 * (size @ wide.abs() + 1)).all()


@pytest.mark.parametrize("team", [threads.TEAM, threads.PYTHON_TEAM], ids=["OpenMP", "Python"])
@pytest.mark.parametrize("M, R", [(1, 2050), (5, 2300), (9, 1030)])
def test_pieces_of_any_length_on_several_threads(M, R, team, monkeypatch, request):
    """From 64 rows, a row beyond whole ones, to 512, as many as leave each thread a share."""
    monkeypatch.setattr(threads, "TEAM", team)
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(3)
    x, w = torch.randn(40 * M, 96), torch.randn(M, R, 96)
    wanted = torch.einsum("mrn,mtn->mtr", w, x.view(M, 40, 96)).flatten(0, 1)
    for transposed in (False, True):
        lying = w.mT.contiguous() if transposed else w
        table = np.array([[one.data_ptr(), 0, 0, 0] for one in lying])
        of = Matrices(KINDS[torch.float32], table, R, transposed)
        assert torch.allclose(multiply(of, 40 * np.arange(M + 1), x), wanted, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_every_bf16_number_is_read_right(transposed):
    words = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    words = torch.where(words.isfinite(), words, torch.zeros_like(words))  # 0 · ∞ is no number
    for w in words.view(32, 32, 64):  # of few high bytes each, so that none is an escape
        blob, T = bf12.pack(w), len(w) if transposed else w.shape[1]
        row = bf12.CODEC.row(blob.ctypes.data, len(blob), w.shape)
        of = Matrices(PACKED["bf12"], np.array([row]), w.numel() // T, transposed)
        y, wide = multiply(of, np.array([0, T]), torch.eye(T)), w.float()
        if not transposed:  # an instruction for pairs of bf16 takes subnormals for 0
            y = y.T
            wide = torch.where(wide.abs() < 2.0**-126, y * (y == wide), wide)
        assert torch.equal(y, wide)


@pytest.mark.parametrize("name", FEW)
def test_every_code_is_read_right(name):
    """In every place of a group, under scales of many sizes; NaN's two codes of fp8 aside."""
    codes, rows = torch.arange(256, dtype=torch.uint8), 64
    if name == "fp8":
        codes[[127, 255]] = 0
        scales = torch.tensor([1.5, 3e-9])
    elif name == "mxfp4":
        scales = (torch.arange(rows * 8) % 250 + 3).to(torch.uint8)
    else:
        scales = torch.linspace(-3, 1e-3, rows * 8).bfloat16()
    codes = codes.repeat(rows // 2 if name in ("mxfp4", "int4") else rows)
    blob = fewbit.joined(codes, scales)
    form = fewbit.find_format(name)
    form.decompress(blob, wide := torch.empty(rows, 256))
    row = form.row(blob.ctypes.data, len(blob), wide.shape)
    of = Matrices(PACKED[name], np.array([row]), rows)
    assert torch.equal(multiply(of, np.array([0, 256]), torch.eye(256)).T, wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_equals_torchs(dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    layer = nn.Linear(96, 75).to(dtype).requires_grad_(False)
    for shape in ((96,), (1, 1, 96), (2, 7, 96), (0, 96)):
        x = torch.randn(shape).to(dtype)
        y, wanted = linear(x, matrices_of(layer.weight, layer.bias)), layer(x)
        assert y.shape == wanted.shape and y.dtype == dtype
        assert torch.allclose(y.float(), wanted.float(), atol=3 * tolerance, rtol=tolerance)


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=70))
def test_results_are_rounded_as_torch_rounds(values):
    y, one = torch.tensor([values]), torch.ones(1, 1)
    for dtype in DTYPES:
        found = feed_forward.combine(y, np.zeros((1, 1), np.int64), one, dtype)
        assert torch.equal(found.isnan(), y.isnan())
        assert torch.equal(found.nan_to_num(), y.to(dtype).nan_to_num())


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_choices_are_arranged_by_expert(T, K, E, seed):
    ids = np.random.default_rng(seed).integers(0, E + 1, (T, K))
    hit, bounds, tokens, rows = feed_forward.arrange(ids, E)
    assert hit.tolist() == sorted(set(ids.ravel().tolist()) - {E})
    assert sorted(rows[rows >= 0].tolist()) == list(range(len(tokens))) == list(range(bounds[-1]))
    for e, begin, end in zip(hit, bounds, bounds[1:]):
        assert tokens[begin:end].tolist() == np.nonzero(ids == e)[0].tolist()
    assert all((ids[t, k] == E) == (row == -1) for (t, k), row in np.ndenumerate(rows))
    assert all(row == -1 or tokens[row] == t for (t, _), row in np.ndenumerate(rows))


@kernel
def _exponentials(x, y):
    for i in range(len(x)):
        y[i] = exponential(x[i])


def test_exponentials_are_within_a_unit_in_the_last_place():
    far = [0, 1e-30, -1e-30, -1e9, -np.inf, 1e9, np.inf, np.nan]
    x = np.concatenate([np.linspace(-87, 88.3, 200_001), far]).astype(np.float32)
    y, wanted = np.empty_like(x), np.exp(np.clip(x.astype(float), -700, 700))
    _exponentials(x, y)
    assert (np.abs(y[:-5] - wanted[:-5]) <= 2.0**-23 * wanted[:-5]).all()
    assert y[-5:-1].tolist() == [0, 0, np.inf, np.inf] and np.isnan(y[-1])
