"""Calibration against naive loops over random traces, with dropped tokens, several sequences and
uneven lengths."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.calibration import (
    Calibration,
    calibrate,
    capacity_needed,
    chunk_loads,
    inclusion_probabilities,
    overflow,
    overlap_at_k,
    ranking,
)
from moelab.specs import MoESpec
from moelab.trace import DECODE, PREFILL, RoutingTrace


def make_trace(
    lengths, L=2, E=6, K=2, seed=0, dropped=0.0, model_id="m1", name="toy"
) -> RoutingTrace:
    """`lengths` = [(prompt tokens, decoded tokens)] a sequence; decode tokens come step by step, as
    batches do."""
    order = [(s, p, PREFILL) for s, (n, _) in enumerate(lengths) for p in range(n)]
    order += [
        (s, n + i, DECODE)
        for i in range(max(d for _, d in lengths))
        for s, (n, d) in enumerate(lengths)
        if i < d
    ]
    random = torch.Generator().manual_seed(seed)
    T = len(order)
    bias = torch.linspace(2, 0, E)  # skew, so ranks mean something
    ids = (
        (torch.rand(T, L, E, generator=random) + bias)
        .argsort(-1, descending=True)[..., :K]
        .to(torch.int16)
    )
    ids[torch.rand(T, L, K, generator=random) < dropped] = E
    sequence, position, phase = (torch.tensor([o[i] for o in order]) for i in range(3))
    return RoutingTrace(
        ids,
        torch.rand(T, L, K, generator=random),
        phase.to(torch.uint8),
        sequence.int(),
        position.int(),
        torch.zeros(T, dtype=torch.int32),
        MoESpec(name, "toy", L, tuple(range(L)), E, K, 8, 4),
        model_id,
    )


@st.composite
def traces(draw):
    E = draw(st.integers(1, 12))
    lengths = draw(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5)
    )
    return make_trace(
        lengths,
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


@settings(deadline=None, max_examples=60)
@given(traces())
def test_counts_popularity_and_imbalance_equal_a_loop(trace):
    calibration = calibrate(trace)
    for phase in (PREFILL, DECODE, None):
        tokens = [t for t in range(len(trace)) if phase is None or trace.phase[t] == phase]
        counts = naive_counts(trace, tokens)
        assert torch.equal(calibration.counts(phase), counts)
        if phase is not None:
            assert calibration.tokens[phase] == len(tokens)
        for layer, row in enumerate(counts.tolist()):
            by_rank = sorted(range(trace.spec.E), key=lambda e: (-row[e], e))
            assert ranking(calibration.counts(phase))[layer].tolist() == by_rank
            if not sum(row):
                assert calibration.imbalance(phase)[layer].isnan()
                continue
            assert calibration.imbalance(phase)[layer].item() == pytest.approx(
                max(row) / (sum(row) / len(row))
            )


@settings(deadline=None, max_examples=60)
@given(traces(), st.integers(1, 7), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), st.integers(0, 5))
def test_chunk_loads_capacity_and_overflow_equal_a_loop(trace, B, quantile, capacity):
    prefill = [t for t in range(len(trace)) if trace.phase[t] == PREFILL]
    chunks = [prefill[i : i + B] for i in range(0, len(prefill) - B + 1, B)]
    if not chunks:
        with pytest.raises(ValueError, match=f"B={B} tokens"):
            chunk_loads(trace, B)
        return
    loads = chunk_loads(trace, B)
    expected = [naive_counts(trace, chunk) for chunk in chunks]
    assert torch.equal(loads, torch.stack(expected))
    needed = capacity_needed(loads, quantile)
    for layer in range(trace.spec.L):
        lost = total = 0
        for expert in range(trace.spec.E):
            seen = [int(counts[layer, expert]) for counts in expected]
            holds = [c for c in seen if sum(n <= c for n in seen) >= quantile * len(seen)]
            assert needed[layer, expert] == min(holds)
            lost, total = lost + sum(max(0, n - capacity) for n in seen), total + sum(seen)
        share = overflow(loads, capacity)[layer]
        assert share.isnan() if not total else share.item() == pytest.approx(lost / total)


def test_overflow_takes_a_capacity_per_layer_and_per_expert():
    loads = torch.tensor([[[4, 0], [1, 3]]])  # [1, 2, 2]
    assert overflow(loads, torch.tensor([[3], [1]])).tolist() == [0.25, 0.5]
    assert overflow(loads, loads[0]).tolist() == [0, 0]


@settings(deadline=None, max_examples=60)
@given(traces(), st.integers(1, 3))
def test_inclusion_equals_a_loop_and_sums_to_the_distinct_experts_a_step(trace, batch):
    L, E = trace.spec.L, trace.spec.E
    decoded = {
        s: sorted(
            (int(trace.position[t]), t)
            for t in range(len(trace))
            if trace.sequence[t] == s and trace.phase[t] == DECODE
        )
        for s in range(trace.sequences)
    }
    steps = []
    for first in range(0, trace.sequences - batch + 1, batch):
        steps += [
            [t for _, t in step] for step in zip(*(decoded[s] for s in range(first, first + batch)))
        ]
    if not steps:
        with pytest.raises(ValueError, match=f"no {batch} sequences decode together"):
            inclusion_probabilities(trace, batch)
        return
    f = inclusion_probabilities(trace, batch)
    for layer in range(L):
        active = [
            {e for t in step for e in trace.ids[t, layer].tolist() if e < E} for step in steps
        ]
        needed = Counter(e for step in active for e in step)
        expected = sorted((needed[e] / len(steps) for e in range(E)), reverse=True)
        assert f[layer].tolist() == pytest.approx(expected)
        assert f[layer].sum().item() == pytest.approx(sum(map(len, active)) / len(steps))


def test_inclusion_of_one_sequence_sums_to_k():
    trace = make_trace([(3, 20), (5, 11)], E=9, K=4)
    torch.testing.assert_close(
        inclusion_probabilities(trace).sum(1), torch.full((2,), 4.0, dtype=torch.float64)
    )
    assert (inclusion_probabilities(trace, 2).sum(1) > 4).all()


def test_inclusion_refuses_a_batch_below_one():
    with pytest.raises(ValueError, match="at least 1"):
        inclusion_probabilities(make_trace([(3, 4)]), 0)


def test_busiest_load_is_the_papers_example_and_counts_k_on_request():
    counts = torch.zeros(2, 1, 8, dtype=torch.int64)
    counts[PREFILL] = torch.tensor([20, 10, 10, 8, 8, 8, 8, 8])  # mean 10, r = 2
    spec = MoESpec("toy", "toy", 1, (0,), 8, 2, 8, 4)
    calibration = Calibration(counts, (40, 0), spec, "m1")
    assert calibration.busiest_load(256).tolist() == [64]  # NPUMoE §4.1
    assert calibration.busiest_load(256, top_k=True).tolist() == [128]


@settings(deadline=None, max_examples=30)
@given(traces())
def test_the_corrected_estimate_is_exact_for_the_whole_calibration(trace):
    trace.ids[:] = torch.arange(trace.spec.K, dtype=torch.int16)  # nothing dropped
    calibration = calibrate(trace)
    assert calibration.busiest_load(
        calibration.tokens[PREFILL], top_k=True
    ).tolist() == pytest.approx(calibration.counts(PREFILL).amax(1).tolist())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 9), st.data())
def test_overlap_equals_sets_of_the_most_popular(L, E, data):
    rows = st.lists(st.lists(st.integers(0, 4), min_size=E, max_size=E), min_size=L, max_size=L)
    offline, runtime = data.draw(rows), data.draw(rows)
    k = data.draw(st.integers(1, E))
    overlap = overlap_at_k(torch.tensor(offline), torch.tensor(runtime), k)
    for layer in range(L):
        tops = [
            set(sorted(range(E), key=lambda e: (-counts[layer][e], e))[:k])
            for counts in (offline, runtime)
        ]
        if any(offline[layer]) and any(runtime[layer]):
            assert overlap[layer].item() == pytest.approx(len(tops[0] & tops[1]) / k)
        else:
            assert overlap[layer].isnan()


def test_overlap_refuses_other_shapes_and_impossible_k():
    with pytest.raises(ValueError, match="different models"):
        overlap_at_k(torch.ones(2, 4), torch.ones(2, 8), 2)
    for k in (0, 5):
        with pytest.raises(ValueError, match="1 to 4"):
            overlap_at_k(torch.ones(2, 4), torch.ones(2, 4), k)


def test_ties_are_ranked_by_id():
    assert ranking(torch.tensor([[1, 3, 3, 1, 0]])).tolist() == [[1, 2, 0, 3, 4]]


@settings(deadline=None, max_examples=20)
@given(traces())
def test_merging_is_calibrating_the_concatenation(trace):
    cut = torch.arange(len(trace)) < len(trace) // 2
    if not cut.any():
        return
    merged = calibrate(trace.select(cut), "first half") + calibrate(
        trace.select(~cut), "second half"
    )
    whole = calibrate(trace)
    assert (
        torch.equal(merged.counts_by_phase, whole.counts_by_phase) and merged.tokens == whole.tokens
    )
    assert merged.source == "first half + second half"


def test_save_and_load_give_the_same_calibration(tmp_path):
    calibration = calibrate(make_trace([(7, 3), (4, 5)]), "needle, 2 prompts")
    loaded = Calibration.load(calibration.save(tmp_path / "deep" / "c.safetensors"))
    assert torch.equal(loaded.counts_by_phase, calibration.counts_by_phase)
    for name in ("tokens", "spec", "model_id", "source"):
        assert getattr(loaded, name) == getattr(calibration, name)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == [
        "c.safetensors"
    ]  # no .part left behind


def test_files_that_are_no_calibration_are_refused(tmp_path):
    trace = make_trace([(7, 3)])
    with pytest.raises(FileNotFoundError, match="calibrate"):
        Calibration.load(tmp_path / "missing.safetensors")
    with pytest.raises(ValueError, match="no calibration"):
        Calibration.load(trace.save(tmp_path / "trace.safetensors"))
    path = calibrate(trace).save(tmp_path / "c.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="no readable"):
        Calibration.load(path)


def test_a_calibration_refuses_another_model():
    calibration = calibrate(make_trace([(7, 3)], name="this one"))
    assert calibration.require("m1", calibration.spec) is calibration
    assert calibration.require("m1", calibration.spec.with_dtype("float32")) is calibration
    same_shape, other_shape = (
        make_trace([(7, 3)], model_id="m2", name="that one"),
        make_trace([(7, 3)], E=7),
    )
    for other in (same_shape, other_shape):
        with pytest.raises(ValueError, match="this one.*record and calibrate"):
            calibration.require(other.model_id, other.spec)
        with pytest.raises(ValueError, match="this one|toy"):
            calibration + calibrate(other)


def test_a_trace_without_tokens_is_refused():
    trace = make_trace([(7, 3)])
    with pytest.raises(ValueError, match="no tokens"):
        calibrate(trace.select(torch.zeros(len(trace), dtype=torch.bool)))


def test_capacity_quantiles_outside_0_to_1_are_refused():
    with pytest.raises(ValueError, match="between 0 and 1"):
        capacity_needed(torch.ones(1, 1, 1, dtype=torch.int64), 1.5)


def test_it_shows_itself():
    calibration = calibrate(make_trace([(7, 0)], name="toy-moe"), "needle <&> prose")
    assert (
        "toy-moe" in repr(calibration)
        and "7 tokens" in repr(calibration)
        and "\n" not in repr(calibration)
    )
    assert (
        "needle &lt;&amp;&gt; prose" in calibration._repr_html_()
        and "<table>" in calibration._repr_html_()
    )
