"""The measurement of the store: what it returns, that its ratios are right, that it refuses a lossy
codec."""

import json
import sys

import pytest
import torch

from moelab.store.codecs import CODECS
from notebooks.studies import store
from notebooks.studies.reading import synthetic_expert

SMALL = 1 << 16
WEIGHTS = synthetic_expert(SMALL)


def test_arms_take_turns_of_several_runs_of_which_the_first_does_not_count():
    order, now = [], iter(range(100))
    arms = {name: lambda name=name: order.append(name) for name in "ab"}
    samples = store.interleaved(arms, repeats=3, clock=lambda: next(now), loops=2)
    assert order == ["a", "a", "a", "b", "b", "b"] * 3
    assert samples == {"a": [0.5] * 3, "b": [0.5] * 3}


@pytest.mark.parametrize("name", CODECS)
def test_coders_write_the_weights_each_into_a_buffer_of_its_own(name):
    coder = store.coders(WEIGHTS, [name])[name]
    assert 0 < coder.nbytes <= SMALL and coder.compress().nbytes == coder.nbytes
    outputs = []
    for decode in (coder.another(), coder.another()):
        (out,) = (c.cell_contents for c in decode.__closure__ if hasattr(c.cell_contents, "numel"))
        assert not torch.equal(out, WEIGHTS)
        decode()
        outputs.append(out)
    assert all(torch.equal(out, WEIGHTS) for out in outputs)


def test_a_codec_that_loses_something_is_refused(monkeypatch):
    monkeypatch.setattr(store, "decompress_tensor", lambda packed, out: out.zero_())
    with pytest.raises(ValueError, match="raw does not give the same bytes back"):
        store.coders(WEIGHTS, ["raw"])


def test_zipnn_is_a_peer_where_it_is_installed():
    pytest.importorskip("zipnn")
    coder = store.coders(WEIGHTS, [])["zipnn"]
    assert 0.6 < coder.nbytes / SMALL < 0.8
    assert bytes(coder.decode()) == WEIGHTS.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("peer", [True, False])
def test_the_document(peer, monkeypatch):
    if not peer:
        monkeypatch.setitem(sys.modules, "zipnn", None)
    found = store.run(nbytes=SMALL, repeats=5)
    assert all(len(values) == 5 and min(values) > 0 for values in found["samples"].values())
    for name in CODECS:
        row = found[f"{name}, one thread"]
        assert row["fraction %"] - row["bound %"] == pytest.approx(row["points above the bound"])
        assert min(row[of] for of in ("compress GB/s", "decode GB/s", "decode ÷ memcpy")) > 0
        assert name == "raw" or found["threads together, by the clock"][f"{name} × 2 ÷ × 1"] > 0
    if not peer:
        assert found["huffman, one thread"]["decode ÷ zipnn"] == "not installed"
        assert "zipnn, one thread" not in found
    assert json.loads(json.dumps(found)) == found


def test_a_sample_of_the_small_model():
    sample = store.Sample.of(None, 1 << 20)
    assert 1 << 18 < sample.weights * 2 <= 2 << 20 and sample.counts.sum() == sample.weights
    joined = torch.cat([tensor.flatten() for tensor in sample.tensors])
    assert sample.fractions()["huffman"] == pytest.approx(
        store.compress_tensor(joined[None], "huffman").nbytes / (2 * len(joined))
    )
    assert sample.round_trips()
    counts, said = sample.microscope(0, 0, next(iter(sample.source(0, 0))), "bf12")
    assert counts.sum() and "bit-identical" in said


def test_ways_of_keeping_a_tokens_experts_are_timed_and_compute_the_same():
    samples, stored, bound = store.stored_ways("huffman", K=2, H=128, I=64, rounds=2, cold=0)
    assert list(samples) == list(stored) == ["bf16", "bf12", "huffman, decoded first"]
    assert all(len(found) == 2 and min(found) > 0 for found in samples.values())
    assert (
        stored["bf16"] == 1
        and 0.75 < stored["bf12"] < 0.8
        and 0.6 < bound < stored["huffman, decoded first"] < 0.75
    )
