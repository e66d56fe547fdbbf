"""Calibration against naive loops over random traces, with dropped tokens, several sequences and
uneven lengths."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import MoESpec
from moelab.calibration import Calibration, calibrate
from moelab.trace import DECODE, PREFILL, RoutingTrace
from notebooks.studies.chunks import chunk_loads
from notebooks.studies.popularity import (
    capacity_needed,
    inclusion_probabilities,
    overflow,
    overlap_at_k,
)


def make_trace(
    lengths, L=2, E=6, K=2, seed=0, dropped=0.0, model_id="m1", name="toy"
) -> RoutingTrace:
    """`lengths` = [(prompt tokens, decoded tokens)] a sequence; decode tokens come step by step, as
    batches do."""
    order = [(s, p, PREFILL) for s, (n, _) in enumerate(lengths) for p in range(n)]
    for i in range(max(d for _, d in lengths)):
        order += [(s, n + i, DECODE) for s, (n, d) in enumerate(lengths) if i < d]
    random, T = torch.Generator().manual_seed(seed), len(order)
    scores = torch.rand(T, L, E, generator=random) + torch.linspace(2, 0, E)  # ranks mean something
    ids = scores.argsort(-1, descending=True)[..., :K].to(torch.int16)
    ids[torch.rand(T, L, K, generator=random) < dropped] = E
    sequence, position, phase = torch.tensor(order, dtype=torch.int32).T
    columns = phase.to(torch.uint8), sequence, position, torch.zeros_like(sequence)
    spec = MoESpec(name, "toy", L, tuple(range(L)), E, K, 8, 4)
    return RoutingTrace(ids, torch.rand(T, L, K, generator=random), *columns, spec, model_id)


@st.composite
def traces(draw):
    E, length = draw(st.integers(1, 12)), st.tuples(st.integers(1, 6), st.integers(0, 5))
    return make_trace(
        draw(st.lists(length, min_size=1, max_size=5)),
        draw(st.integers(1, 3)),
        E,
        draw(st.integers(1, min(E, 8))),
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


def naive_counts(trace, tokens) -> torch.Tensor:
    counts = torch.zeros(trace.spec.L, trace.spec.E, dtype=torch.int64)
    for t in tokens:
        for layer in range(trace.spec.L):
            for expert in trace.ids[t, layer].tolist():
                if expert < trace.spec.E:
                    counts[layer, expert] += 1
    return counts


@given(traces())
def test_counts_popularity_and_imbalance_equal_a_loop(trace):
    calibration = calibrate(trace)
    for phase in (PREFILL, DECODE, None):
        tokens = [t for t in range(len(trace)) if phase is None or trace.phase[t] == phase]
        counts, imbalance = naive_counts(trace, tokens), calibration.imbalance(phase)
        assert torch.equal(calibration.counts(phase), counts)
        assert phase is None or calibration.tokens[phase] == len(tokens)
        for layer, row in enumerate(counts.tolist()):
            if sum(row):
                r = max(row) / (sum(row) / len(row))
                assert imbalance[layer].item() == pytest.approx(r)
            else:
                assert imbalance[layer].isnan()


@given(traces(), st.integers(1, 7), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), st.integers(0, 5))
def test_chunk_loads_capacity_and_overflow_equal_a_loop(trace, B, quantile, capacity):
    prefill = [t for t in range(len(trace)) if trace.phase[t] == PREFILL]
    chunks = [prefill[i : i + B] for i in range(0, len(prefill) - B + 1, B)]
    if not chunks:
        with pytest.raises(ValueError, match=f"B={B} tokens"):
            chunk_loads(trace, B)
        return
    loads = chunk_loads(trace, B)
    assert torch.equal(loads, torch.stack([naive_counts(trace, chunk) for chunk in chunks]))
    needed = capacity_needed(loads, quantile)
    for layer in range(trace.spec.L):
        lost = total = 0
        for expert in range(trace.spec.E):
            seen = loads[:, layer, expert].tolist()
            holds = [c for c in seen if sum(n <= c for n in seen) >= quantile * len(seen)]
            assert needed[layer, expert] == min(holds)
            lost, total = lost + sum(max(0, n - capacity) for n in seen), total + sum(seen)
        share = overflow(loads, capacity)[layer]
        assert share.isnan() if not total else share.item() == pytest.approx(lost / total)


@given(traces(), st.integers(1, 3))
def test_inclusion_equals_a_loop_and_sums_to_the_distinct_experts_a_step(trace, batch):
    E, steps = trace.spec.E, []
    decoded = [((trace.sequence == s) & (trace.phase == DECODE)) for s in range(trace.sequences)]
    decoded = [mask.nonzero().flatten().tolist() for mask in decoded]
    for first in range(0, trace.sequences - batch + 1, batch):
        steps += zip(*decoded[first : first + batch])
    if not steps:
        with pytest.raises(ValueError, match=f"no {batch} sequences decode together"):
            inclusion_probabilities(trace, batch)
        return
    f = inclusion_probabilities(trace, batch)
    for layer in range(trace.spec.L):
        active = [{*trace.ids[list(step), layer].flatten().tolist()} - {E} for step in steps]
        needed = Counter(e for step in active for e in step)
        expected = sorted((needed[e] / len(steps) for e in range(E)), reverse=True)
        assert f[layer].tolist() == pytest.approx(expected)
        assert f[layer].sum().item() == pytest.approx(sum(map(len, active)) / len(steps))


@given(st.integers(1, 3), st.integers(1, 9), st.data())
def test_overlap_equals_sets_of_the_most_popular(L, E, data):
    rows = st.lists(st.lists(st.integers(0, 4), min_size=E, max_size=E), min_size=L, max_size=L)
    both, k = (data.draw(rows), data.draw(rows)), data.draw(st.integers(1, E))
    overlap = overlap_at_k(*map(torch.tensor, both), k)
    for layer in range(L):
        offline, runtime = (counts[layer] for counts in both)
        if any(offline) and any(runtime):
            by_rank = (sorted(range(E), key=lambda e, c=c: (-c[e], e)) for c in (offline, runtime))
            top, other = (set(ranked[:k]) for ranked in by_rank)
            assert overlap[layer].item() == pytest.approx(len(top & other) / k)
        else:
            assert overlap[layer].isnan()


def test_what_does_not_fit_is_refused():
    trace, loads = make_trace([(7, 3)], name="this one"), torch.tensor([[[4, 0], [1, 3]]])
    assert overflow(loads, torch.tensor([[3], [1]])).tolist() == [0.25, 0.5]
    for wrong, message in (
        (lambda: inclusion_probabilities(trace, 0), "at least 1"),
        (lambda: overlap_at_k(torch.ones(2, 4), torch.ones(2, 4), 5), "1 to 4"),
        (lambda: calibrate(trace.select(trace.phase > 9)), "no tokens"),
        (lambda: capacity_needed(loads, 1.5), "between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    calibration = calibrate(trace)
    assert calibration.require("m1", calibration.spec.with_dtype("float32")) is calibration
    for other in (make_trace([(7, 3)], model_id="m2"), make_trace([(7, 3)], E=7)):
        with pytest.raises(ValueError, match="this one.*record and calibrate"):
            calibration.require(other.model_id, other.spec)


def test_it_is_saved_and_shows_itself(tmp_path):
    calibration = calibrate(make_trace([(7, 3), (4, 5)], name="toy-moe"), "needle <&> prose")
    loaded = Calibration.load(calibration.save(tmp_path / "deep" / "c.safetensors"))
    assert torch.equal(loaded.counts_by_phase, calibration.counts_by_phase)
    for name in ("tokens", "spec", "model_id", "source"):
        assert getattr(loaded, name) == getattr(calibration, name)
    said = repr(calibration)
    assert "toy-moe" in said and "11 tokens" in said and "\n" not in said
