"""Packed weights against their decoded values in torch."""

import copy
import pickle
from itertools import product as product_of

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("numba")
from moelab.kernels.linear import product, widened
from moelab.kernels.products import KINDS, PACKED, Matrices
from moelab.store import bf12, fewbit
from moelab.store.packed import Packed
from tests.depth import depth, in_turn

CODECS = {"bf12": bf12.CODEC, **{name: fewbit.find_format(name) for name in fewbit.FORMATS}}
any_codec = pytest.mark.parametrize("name", CODECS)


def packed(name, R=70, n=128, dtype=torch.bfloat16, seed=0):
    """A weight, packed, and what it decodes to."""
    w = torch.randn(R, n, generator=torch.Generator().manual_seed(seed)).bfloat16()
    w[::7, ::5] *= 2.0**-40  # escapes of bf12
    blob = torch.from_numpy(np.array(CODECS[name].compress(w) if name != "bf12" else bf12.pack(w)))
    CODECS[name].decompress(blob.numpy(), values := torch.empty(R, n, dtype=dtype))
    return Packed(CODECS[name], blob, (R, n), dtype), values


def near(got, wanted, dtype):
    within = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-4}[dtype]
    assert got.dtype == dtype and got.shape == wanted.shape
    assert (got - wanted).abs().max() <= within * wanted.abs().max()


@pytest.mark.parametrize(
    "name, how", in_turn(list(CODECS), [*product_of([1, 3, 200], [False, True])])
)
def test_linear_layers(name, how):
    rows, bias = how
    for dtype in [torch.bfloat16] if name == "bf12" else depth([torch.bfloat16], KINDS):
        w, values = packed(name, dtype=dtype)
        x = torch.randn(2, rows, 128).to(dtype)
        b = torch.randn(70).to(dtype) if bias else None
        wanted = F.linear(x.double(), values.double(), b if b is None else b.double())
        near(F.linear(x, w, b), wanted, dtype)


@any_codec
@given(
    ids=st.lists(st.integers(0, 69), max_size=9),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    lie=st.sampled_from(
        [lambda ids: ids, lambda ids: ids.T, lambda ids: ids.T[:, 0], lambda ids: ids[0, ::2]]
    ),
)
def test_embeddings(name, ids, dtype, lie):
    w, values = packed(name)
    ids = lie(torch.tensor([ids, ids[::-1]], dtype=dtype))
    assert torch.equal(F.embedding(ids, w), F.embedding(ids, values))
    for outside in (-1, 70):
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([outside], dtype=dtype), w)


@any_codec
def test_all_else_is_that_of_the_decoded_weight(name):
    w, values = packed(name)
    x = torch.randn(3, 128).bfloat16()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(w + 1, values + 1) and torch.equal(x @ w.T, x @ values.T)
            assert torch.equal(w[3:, 4], values[3:, 4]) and torch.equal(w.clone(), values)
            assert torch.equal(w.float(), values.float()) and torch.equal(w.sum(0), values.sum(0))
    assert (w.shape, w.dtype, w.numel()) == (values.shape, values.dtype, values.numel())
    assert not w.requires_grad and w.is_contiguous() and name in repr(w)


def test_gradients_pass_through():
    w, values = packed("int4")
    mine, theirs = (torch.ones(3, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    F.linear(mine, w).square().sum().backward()
    F.linear(theirs, values).square().sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_modules_keep_copy_cast_and_save_them(tmp_path):
    """A model whose head is its embedding: one parameter, of as many bytes as its blob."""
    w, values = packed("int4")
    model = nn.Sequential(nn.Embedding(70, 128), nn.Linear(128, 70, bias=False))
    model[0].weight = model[1].weight = nn.Parameter(w, requires_grad=False)
    assert [p.nbytes for p in model.parameters()] == [70 * 128 // 2 + 70 * 4 * 2]
    other = copy.deepcopy(model)
    assert other[0].weight is other[1].weight and isinstance(other[0].weight, nn.Parameter)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    kept = torch.load(tmp_path / "state.pt", weights_only=False)["0.weight"]
    for one in (
        other[1].weight,
        pickle.loads(pickle.dumps(w)),
        kept,
        model.state_dict()["1.weight"],
    ):
        assert type(one) is type(w) and torch.equal(one.clone(), values)
    wide = other.float()[0].weight
    assert type(wide) is nn.Parameter and torch.equal(wide, values.float())
    assert torch.equal(model(torch.tensor([3])), model(torch.tensor([3, 4]))[:1])


def test_edits_are_refused():
    w, values = packed("int4")
    edits = (
        w.zero_,
        lambda: w.copy_(values),
        lambda: w[3].fill_(1),
        lambda: setattr(w, "data", values),
    )
    for edit in edits[:2] + edits[3:]:
        with pytest.raises(ValueError, match="int4 cannot be edited"):
            edit()
    assert torch.equal(w.clone(), values)


@pytest.mark.parametrize("dtype", KINDS)
@given(
    R=st.integers(1, 90),
    n=st.integers(1, 150),
    T=st.integers(1, 9),
    transposed=st.booleans(),
    biased=st.booleans(),
    panel=st.sampled_from([1, 256, 1 << 22]),
    seed=st.integers(0, 99),
)
def test_products_of_many_rows(dtype, R, n, T, transposed, biased, panel, seed):
    torch.manual_seed(seed)
    w, x, b = (torch.randn(*of).to(dtype) for of in ((R, n), (T, n), (R,)))
    lying = w.T.contiguous() if transposed else w
    row = [lying.data_ptr(), 0, b.data_ptr() if biased else 0, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moelab.kernels.linear.PANEL", panel)
        y = product(Matrices(KINDS[dtype], np.array([row]), R, transposed), 0, x)
    wanted = F.linear(x.double(), w.double(), b.double() if biased else None)
    assert (y - wanted).abs().max() <= max(1e-5, 2**-7 * (y.dtype != torch.float32)) * n


@any_codec
@given(begin=st.integers(0, 69), end=st.integers(1, 70), seed=st.integers(0, 9))
def test_rows_are_widened(name, begin, end, seed):
    end = max(begin + 1, end)
    w, values = packed(name, seed=seed)
    row = w.codec.row(w.blob.data_ptr(), w.nbytes, tuple(w.shape))
    of = Matrices(PACKED[name], np.array([row]), len(w))
    got = widened(of, 0, begin, torch.empty(end - begin, w.shape[1]))
    assert torch.equal(got.bfloat16(), values[begin:end])
