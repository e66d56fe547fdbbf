"""Experts multiplied from a store's planes are those of the joined weights, to the bit."""

import pytest
import torch

import moelab
from moelab.registry import make
from moelab.models import plug
from moelab.store.planes import StorePlanes
from moelab.store import bits
from tests.models import tiny


def logits(model):
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize("codec", ["zstd-huffman", "huffman"])
def test_a_model_runs_from_planes(codec, tmp_path):
    store = moelab.convert(None, tmp_path / "small.store", codec=codec)
    model = moelab.open_model(experts="external")
    plug(model, executor=make("executor", "gemv"), source=moelab.StoreExperts(store))
    expected = logits(model)
    fresh = moelab.open_model(experts="external")
    executor = make("executor", "gemv_planes", planes=StorePlanes(store))
    plug(fresh, executor=executor, source=lambda layer, expert: pytest.fail("the weights were joined"))
    assert torch.equal(logits(fresh), expected) and executor.tally.executed == executor.tally.routed > 0
    joined = moelab.StoreExperts(store)(0, 1)
    for name, (exponents, rest) in StorePlanes(store)(0, 1).items():
        out = torch.empty_like(joined[name])
        bits.join(exponents, rest, out)
        assert torch.equal(out, joined[name])


def test_what_has_no_planes_is_refused(tmp_path):
    raw = moelab.convert(None, tmp_path / "raw.store", codec="raw")
    with pytest.raises(ValueError, match="in 1 plane.*another codec"):
        StorePlanes(raw)(0, 0)
    fp32 = moelab.convert(tiny.save("qwen3_moe", tmp_path / "model"), tmp_path / "fp32.store")
    with pytest.raises(ValueError, match="F32.*StoreExperts"):
        StorePlanes(fp32)(0, 0)
