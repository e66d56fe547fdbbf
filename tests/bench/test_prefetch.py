"""The prefetching bench: its bound against simulated schedules and closed forms, and that all of it
runs, small."""

from statistics import fmean
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.bench import prefetch
from moelab.bench.prefetch import Spent, Taken, by_layer, eq1, hideable, least
from moelab.cache.residency import Residency
from moelab.offloading.metrics import Forward
from moelab.simulation.simulator import Prefetching, simulate
from moelab.specs import Event, MoESpec
from tests.simulation.test_simulator import machines, runs

seconds = st.floats(0, 10)
serial = st.lists(
    st.builds(
        lambda copy, expert, other: Spent(copy, copy, expert, other), seconds, seconds, seconds
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=200)
@given(runs(), machines, st.integers(1, 9))
def test_no_simulated_schedule_beats_the_bound(run, machine, ahead):
    """Whatever is predicted, cached, delayed and decoded: no token takes less than the least of its
    layers."""
    L, E, steps, predictions, pools = run
    forwards = [(1, "decode")] * len(steps)
    alone = simulate(steps, forwards, Residency(L, E, pools), machine)
    for guesses in (predictions, steps):
        played = simulate(
            steps,
            forwards,
            Residency(L, E, pools),
            machine,
            prefetching=Prefetching(guesses, ahead),
        )
        for before, after in zip(alone.forwards, played.forwards):
            events = [e for e in alone.events if before.start <= e.start and e.end <= before.end]
            layers = [
                Spent(
                    *(
                        sum(
                            e.end - e.start
                            for e in events
                            if e.layer == layer and kind in (e.resource, e.kind)
                        )
                        for kind in ("disk", "wait", "expert", "other")
                    )
                )
                for layer in range(L)
            ]
            assert after.end - after.start >= least(layers) + machine.head[0] - 1e-6


@given(serial)
def test_algorithm_1_gains_what_its_equation_says_and_no_more_than_the_bound(layers):
    """Its schedule played: when a layer's copies are all there, its experts and the next layer's
    copies begin."""
    start = layers[0].other + layers[0].copy
    for before, here in zip(layers, layers[1:]):
        start = max(start + before.expert + here.other, start + here.copy)
    gain = sum(copy + expert + other for copy, _, expert, other in layers) - (
        start + layers[-1].expert
    )
    assert eq1(layers) == pytest.approx(gain, abs=1e-9)
    assert gain <= hideable(layers) + 1e-9
    paper = sum(min(copy, expert + other) for copy, _, expert, other in layers)
    if (
        len({(copy, expert, other) for copy, _, expert, other in layers}) == 1
    ):  # as the paper assumes
        assert eq1(layers) == pytest.approx(paper * (1 - 1 / len(layers)), abs=1e-9)


def token(*layers: Spent, idle: float = 0.0, tail: float = 0.0) -> Taken:
    events, now = [], 1.0
    for layer, (copy, _, expert, other) in enumerate(layers):
        now += idle
        events += [
            Event("compute", "other", layer, -1, now, now + other),
            Event("disk", "read", layer, 3, now + other, now + other + copy),
            Event("compute", "wait", layer, 3, now + other, now + other + copy),
            Event("compute", "expert", layer, 3, now + other + copy, now + other + copy + expert),
        ]
        now += other + copy + expert
    events.append(Event("compute", "other", -1, -1, now, now + tail))
    return Taken(events, Forward(1.0, now + tail, 1, "decode"), None)


def test_idle_time_counts_as_computing():
    found = by_layer(token(Spent(2, 2, 1.5, 1), Spent(1, 1, 0.5, 3), idle=0.25, tail=7))
    assert found == [Spent(2, 2, 1.5, 1.25), Spent(1, 1, 0.5, 3.25)]


@given(serial, st.floats(0, 2), st.floats(0, 2))
def test_a_gain_and_its_bound_are_of_the_same_tokens(layers, idle, tail):
    slow = token(*layers, idle=idle, tail=tail)
    fast = Taken([], Forward(0.0, slow.seconds / 2, 1, "decode"), None)
    (found,) = prefetch.gains([{"copy, then compute": [slow] * 2, "hint": [fast]}], "hint")
    assert found.seconds == pytest.approx(slow.seconds / 2, abs=1e-6)
    spent = [layer._replace(other=layer.other + idle) for layer in layers]
    assert found.bound == pytest.approx(slow.seconds - tail - least(spent), abs=1e-6)


def test_nine_samples_of_three_prompts():
    begun, bench = [], SimpleNamespace(ids=SimpleNamespace(shape=(1, 30)))
    bench.begin = lambda *at: begun.append(at)
    bench.turns = lambda arms, tokens, name: {arm: [len(begun)] * tokens for arm in arms}
    found = prefetch.PrefetchBenchmark.samples(bench, ("a", "b"), 2, "name", 5)
    assert begun == [(5, 0), (5, 10), (5, 20)] * 3
    assert fmean(prefetch.pooled(found)["b"]) == 5 and len(prefetch.pooled(found)["b"]) == 18


def test_a_prompt_is_read_once_and_without_a_limit():
    reader, read = SimpleNamespace(bandwidth=7.0), []
    bench = object.__new__(prefetch.PrefetchBenchmark)
    bench.model, bench.prompts = (
        SimpleNamespace(
            moelab=SimpleNamespace(engine=SimpleNamespace(loader=SimpleNamespace(reader=reader)))
        ),
        {},
    )

    def forward(n):
        read.append((n, bench.at, reader.bandwidth))
        bench.past = [n, bench.at]

    bench._forward = forward
    for length, first in ((5, 0), (5, 10), (5, 0)):
        bench.begin(length, first)
        assert (bench.past, bench.at, reader.bandwidth) == ([length, first], first + length, 7.0)
        bench.past.append("a token")  # what is decoded is not in the next sample's prompt
    assert read == [(5, 0, None), (5, 10, None)]


@given(
    st.lists(st.tuples(st.floats(1, 2), st.floats(1, 2)), min_size=4, max_size=8), st.integers(1, 3)
)
def test_a_verdict_is_of_the_first_tokens_of_all_generations(pairs, times):
    demand, hint = map(list, zip(*pairs))
    found = prefetch.verdict({"on demand": [demand] * times, "hint": [hint] * times}, [2, 3])
    for n in (2, 3):
        assert found[f"{n} tokens"] == pytest.approx(sum(hint[:n]) / sum(demand[:n]))
        low, high = found[f"{n} tokens_from"], found[f"{n} tokens_to"]
        assert found[f"{n} tokens: ≤ 1.01"] == (
            "shown" if high <= 1.01 else "refuted" if low > 1.01 else "undecided"
        )
    for hint, times, word in (
        (2.0, 2, "shown"),
        (3.0, 2, "refuted"),
        (2.0, 1, "undecided"),
        (3.0, 1, "undecided"),
    ):
        found = prefetch.verdict(
            {"on demand": [[2.0] * 4] * times, "hint": [[hint] * 4] * times}, [4]
        )
        assert found["4 tokens: ≤ 1.01"] == word  # nothing is known of one pair's spread


def test_a_pair_of_generations_is_one_sample_however_many_tokens_it_has():
    slow, fast = [1.1] * 64, [0.9] * 64  # a disturbed generation is disturbed all the time
    found = {"on demand": [fast, slow, fast], "hint": [slow, fast, slow]}
    assert prefetch.verdict(found, [64])["64 tokens: ≤ 1.01"] == "undecided"


def test_generations_take_turns_and_one_before_does_not_count():
    ran, bench = (
        [],
        SimpleNamespace(generation=lambda arm, tokens: ran.append(arm) or [len(ran)] * tokens),
    )
    assert prefetch.PrefetchBenchmark.pairs(bench, 2, 2, "name") == {
        "on demand": [[2, 2], [5, 5]],
        "hint": [[3, 3], [4, 4]],
    }


def test_the_bench_runs(tmp_path):
    spec = MoESpec(
        "synthetic-mini",
        "qwen3_moe",
        3,
        (0, 1, 2),
        16,
        2,
        64,
        64,
        vocab=256,
        heads=4,
        kv_heads=2,
        head_dim=16,
    )
    found = prefetch.run(
        tmp_path,
        tokens=2,
        budgets=[0.5],
        ratios=[1.0],
        executors=["fast"],
        lengths=[2, 3],
        times=2,
        spec=spec,
    )
    rows = found["budget 50%, fast, copying 1 × computing"]
    assert list(rows) == list(prefetch.ARMS)
    assert rows["speculative"]["MB wasted"] == 0 == rows["copy, then compute"]["hidden reads"]
    against = found["against the bounds"]["budget 50%, fast, copying 1 × computing"]
    never = found["never slower (hint ÷ on demand)"]
    assert len(never) == 2 and all(
        row["2 tokens_from"] <= row["2 tokens"] <= row["2 tokens_to"] for row in never.values()
    )
    assert against["bound s"] >= against["eq. (1) s"] > 0 and against["copy ÷ compute, found"] > 0
