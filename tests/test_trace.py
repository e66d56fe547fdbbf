"""RoutingTrace: its counts, its files, and what it says when they are damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from moelab.base.specs import MoESpec
from moelab.trace import FIELDS, HIDDEN, RoutingTrace, growing_tensor, hidden_path


def random_trace(T: int, L: int, E: int, K: int, seed: int = 0, hidden: int = 0) -> RoutingTrace:
    """A trace with random routing, some of it "no expert"."""
    g = torch.Generator().manual_seed(seed)
    spec = MoESpec("random", "random", L, tuple(range(L)), E, K, H=max(hidden, 4), I=4)
    scores = torch.rand(T, L, E + 1, generator=g)
    return RoutingTrace(
        ids=scores.topk(K, -1).indices.to(torch.int16),
        weights=torch.rand(T, L, K, generator=g),
        phase=(torch.rand(T, generator=g) < 0.5).to(torch.uint8),
        sequence=torch.randint(0, 3, (T,), generator=g, dtype=torch.int32),
        position=torch.arange(T, dtype=torch.int32),
        tokens=torch.randint(0, 99, (T,), generator=g, dtype=torch.int32),
        spec=spec,
        model_id="0123456789abcdef",
        **{name: torch.randn(T, L, hidden, generator=g) for name in HIDDEN if hidden},
    )


@given(
    *(st.integers(low, high) for low, high in ((0, 40), (1, 4), (1, 9), (0, 99))),
    st.sampled_from([0, 4]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_counts_and_files(tmp_path_factory, T, L, E, seed, hidden, dtype):
    """Counts are those of a loop; what is saved and loaded is the same."""
    trace = random_trace(T, L, E, 1 + seed % E, seed, hidden)
    trace = replace(trace, weights=trace.weights.to(dtype))
    expected = torch.zeros(L, E, dtype=torch.long)
    for token in trace.ids.tolist():
        for layer, chosen in enumerate(token):
            for expert in set(chosen) - {E}:
                expected[layer, expert] += chosen.count(expert)
    assert torch.equal(trace.counts(), expected)
    path = trace.save(tmp_path_factory.mktemp("trace") / "t.safetensors")
    loaded = RoutingTrace.load(path)
    assert (loaded.spec, loaded.model_id) == (trace.spec, trace.model_id)
    for name in (*FIELDS, *HIDDEN[: 2 * bool(hidden)]):
        ours, theirs = getattr(trace, name), getattr(loaded, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert len(list(path.parent.iterdir())) == 1 + 2 * bool(hidden)


def test_hidden_files_are_plain_safetensors_and_invisible_until_they_are_whole(tmp_path):
    trace = random_trace(7, 2, 8, 2, hidden=4)
    path = trace.save(tmp_path / "t.safetensors")
    assert torch.equal(load_file(hidden_path(path, "residuals"))["residuals"], trace.residuals)
    with pytest.raises(RuntimeError), growing_tensor(tmp_path / "x.safetensors", "x") as append:
        append(torch.ones(3, 2))
        assert not (tmp_path / "x.safetensors").exists()
        raise RuntimeError
    assert len(list(tmp_path.iterdir())) == 3


def test_what_is_missing_or_does_not_fit_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="moelab.record"):
        RoutingTrace.load(tmp_path / "none.safetensors")
    trace = random_trace(5, 2, 8, 2, hidden=4)
    path = trace.save(tmp_path / "t.safetensors")
    hidden_path(path, "residuals").unlink()
    with pytest.raises(ValueError, match="keep the files of a trace together"):
        RoutingTrace.load(path)
    for wrong, message in (
        ({"ids": trace.ids[:, :1]}, "2, 2"),
        ({"phase": trace.phase[:2]}, "phase"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(trace, **wrong)
