"""RoutingTrace: its counts, its files, and what it says when they are damaged."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.specs import MoESpec
from moelab.trace import GrowingTensor, RoutingTrace, hidden_path


def random_trace(T: int, L: int, E: int, K: int, seed: int = 0, hidden: int = 0) -> RoutingTrace:
    """A trace with random routing, some of it "no expert"."""
    g = torch.Generator().manual_seed(seed)
    spec = MoESpec("random", "random", L, tuple(range(L)), E, K, H=max(hidden, 4), I=4)
    scores = torch.rand(T, L, E + 1, generator=g)
    extra = (
        {name: torch.randn(T, L, hidden, generator=g) for name in ("router_inputs", "residuals")}
        if hidden
        else {}
    )
    return RoutingTrace(
        ids=scores.topk(K, -1).indices.to(torch.int16),
        weights=torch.rand(T, L, K, generator=g),
        phase=(torch.rand(T, generator=g) < 0.5).to(torch.uint8),
        sequence=torch.randint(0, 3, (T,), generator=g, dtype=torch.int32),
        position=torch.arange(T, dtype=torch.int32),
        tokens=torch.randint(0, 99, (T,), generator=g, dtype=torch.int32),
        spec=spec,
        model_id="0123456789abcdef",
        **extra,
    )


def same(a: RoutingTrace, b: RoutingTrace) -> bool:
    names = (
        "ids",
        "weights",
        "phase",
        "sequence",
        "position",
        "tokens",
        "router_inputs",
        "residuals",
    )
    return (
        a.spec == b.spec
        and a.model_id == b.model_id
        and all(
            (x is None and y is None)
            or (x is not None and x.dtype == y.dtype and torch.equal(x, y))
            for x, y in ((getattr(a, n), getattr(b, n)) for n in names)
        )
    )


shapes = {
    "T": st.integers(0, 40),
    "L": st.integers(1, 4),
    "E": st.integers(1, 9),
    "seed": st.integers(0, 99),
}


@settings(max_examples=50, deadline=None)
@given(**shapes, data=st.data())
def test_counts_equal_a_naive_loop(T, L, E, seed, data):
    trace = random_trace(T, L, E, data.draw(st.integers(1, E)), seed)
    expected = torch.zeros(L, E, dtype=torch.long)
    for token in trace.ids.tolist():
        for layer, chosen in enumerate(token):
            for expert in chosen:
                if expert != E:
                    expected[layer, expert] += 1
    assert torch.equal(trace.counts(), expected)


@settings(max_examples=25, deadline=None)
@given(
    **shapes, hidden=st.sampled_from([0, 4]), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_save_and_load_give_back_the_same(tmp_path_factory, T, L, E, seed, hidden, dtype):
    trace = random_trace(T, L, E, 1, seed, hidden)
    trace.weights = trace.weights.to(dtype)
    path = trace.save(tmp_path_factory.mktemp("trace") / "t.safetensors")
    assert same(RoutingTrace.load(path), trace)
    assert not list(path.parent.glob("*.part"))


def test_phases_partition_a_trace():
    trace = random_trace(50, 2, 8, 2)
    assert len(trace.prefill) + len(trace.decode) == 50
    assert torch.equal(trace.prefill.counts() + trace.decode.counts(), trace.counts())


def test_hidden_files_are_plain_safetensors(tmp_path):
    from safetensors.torch import load_file

    trace = random_trace(7, 2, 8, 2, hidden=4)
    path = trace.save(tmp_path / "t.safetensors")
    assert torch.equal(load_file(hidden_path(path, "residuals"))["residuals"], trace.residuals)


def test_growing_tensor_is_invisible_until_it_is_whole(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(RuntimeError), GrowingTensor(path, "x") as file:
        file.append(torch.ones(3, 2))
        assert not path.exists()
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def damaged(path, how: str) -> None:
    raw = path.read_bytes()
    if how == "cut off":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "no header":
        path.write_bytes(b"\xff" * 64)
    elif how == "empty":
        path.write_bytes(b"")
    else:  # a safetensors file, but of something else
        header = json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")


@pytest.mark.parametrize("how", ["cut off", "no header", "empty", "something else"])
def test_a_damaged_trace_says_so(tmp_path, how):
    path = random_trace(20, 2, 8, 2).save(tmp_path / "t.safetensors")
    damaged(path, how)
    with pytest.raises(ValueError, match="t.safetensors"):
        RoutingTrace.load(path)


def test_a_missing_trace_or_hidden_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="moelab.record"):
        RoutingTrace.load(tmp_path / "none.safetensors")
    path = random_trace(5, 2, 8, 2, hidden=4).save(tmp_path / "t.safetensors")
    hidden_path(path, "residuals").unlink()
    with pytest.raises(ValueError, match="keep the files of a trace together"):
        RoutingTrace.load(path)


def test_shapes_that_do_not_fit_are_refused():
    trace = random_trace(5, 2, 8, 2)
    with pytest.raises(ValueError, match=r"\[T, 2, 2\]"):
        RoutingTrace(
            trace.ids[:, :1],
            trace.weights[:, :1],
            trace.phase,
            trace.sequence,
            trace.position,
            trace.tokens,
            trace.spec,
            "x",
        )
    with pytest.raises(ValueError, match="phase"):
        RoutingTrace(
            trace.ids,
            trace.weights,
            trace.phase[:2],
            trace.sequence,
            trace.position,
            trace.tokens,
            trace.spec,
            "x",
        )


def test_it_shows_itself():
    trace = random_trace(5, 2, 8, 2)
    assert "5 of" in repr(trace) and "top-2" in repr(trace)
    assert trace._repr_html_().startswith("<table>")
    assert "0 of 0" in repr(random_trace(0, 2, 8, 2)).replace(",", "")
