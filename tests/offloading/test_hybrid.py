"""Transfer or compute where the weights lie: against brute force, the paper's equations, and the same
decisions by the engine's threads and the simulator's clock."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moelab import convert, open_model
from moelab.base.specs import Event
from moelab.cache.residency import Pools, Residency
from moelab.ndp.balance import balance as of_paper
from moelab.ndp.balance import most_on_gpu
from moelab.offloading.hybrid import (
    ANEW,
    Balance,
    Rates,
    Wanted,
    at,
    far_seconds,
    near_seconds,
    split,
)
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.simulator import replay, simulate
from tests.models import tiny
from tests.offloading.test_offload import generate
from tests.timelines import check

time = st.floats(0.01, 10)
BYTES = 100


def rates(link, near, far, trip=0.0):
    return Rates((0.0, link / BYTES), near, far, trip)


def took(near, far, of):
    return max(near_seconds(near, of), far_seconds(far, of))


def best(wanted, of):
    """The least time of all 2^n ways."""
    ways = [{*way} for n in range(len(wanted) + 1) for way in combinations(range(len(wanted)), n)]
    return min(
        took(
            [one for i, one in enumerate(wanted) if i in way],
            [one for i, one in enumerate(wanted) if i not in way],
            of,
        )
        for way in ways
    )


wanted = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=8).map(
    lambda of: [Wanted(e, n, BYTES * missing) for e, (n, missing) in enumerate(of)]
)


@given(wanted, time, st.tuples(time, time), st.tuples(time, time), st.floats(0, 3))
def test_no_way_is_faster_by_more_than_an_expert(wanted, link, near, far, trip):
    of = rates(link, near, far, trip)
    here, there = split(wanted, of)
    assert sorted(here + there) == sorted(wanted)
    most = max(link + at(of.near, one.tokens) + at(of.far, one.tokens) for one in wanted)
    assert took(here, there, of) <= best(wanted, of) + most + 1e-9


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 40), time, time, time)
def test_in_decoding_no_way_is_faster(missing, tokens, link, near, far):
    """As many tokens each, whatever is there: the optimum."""
    of = rates(link, (near, 0.0), (far, 0.0))
    wanted = [Wanted(e, tokens, BYTES * lacks) for e, lacks in enumerate(missing)]
    assert took(*split(wanted, of), of) == pytest.approx(best(wanted, of))


@given(time, time, time, st.floats(0, 1), st.integers(1, 8))
def test_eq_1_and_3_within_an_expert(T_w, T_g, T_n, T_a, K):
    """E_g of Eq. 1 where all are missing and transfers hide computing (N = 1), and E_max of Eq. 3 where
    none is."""
    assume(T_g < T_w)
    of = rates(T_w, (T_g, 0.0), (T_n, 0.0), 2 * T_a)
    here, _ = split([Wanted(e, 1, BYTES) for e in range(K)], of)
    assert abs(len(here) - of_paper(T_w, T_g, T_n, T_a, K, N=1)) <= 1
    here, _ = split([Wanted(e, 1, 0) for e in range(K)], of)
    assert abs(len(here) - most_on_gpu(T_g, T_n, T_a, K, N=1)) <= 1


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    *[st.integers(0, 9)] * 6,
    st.integers(1, 6),
)
def test_shares_end_first_of_all_numbers(sizes, base, each, near, far, per_token, trip, K):
    """Whole numbers, so that ties are ties: all are fetched, then all is computed (Eq. 1)."""
    of = Rates((base, each), (near, 0), (far, per_token), trip)
    balance = Balance([[(n, n)] * 2 for n in sizes], iter([of]), K)
    balance.begin_forward(token=True)
    shares = balance.shares()
    assert shares.shape == (len(sizes), K + 1) and shares.dtype == np.int64
    for layer, n in enumerate(sizes):
        link = base + each * 2 * n
        for m in range(K + 1):

            def seconds(fetched, m=m, link=link):
                away = m - fetched
                here = fetched * link + (K - away) * near
                return max(here, bool(away) * trip + away * (far + per_token))

            share = int(shares[layer, m])
            assert share == min(range(m + 1), key=seconds)
            hits, misses = range(m, K), range(m)
            if not near:  # nothing to hide behind transfers: the split of any step
                of_all = [Wanted(e, 1, 2 * n * (e < m)) for e in range(K)]
                assert seconds(share) == took(*split(of_all, of), of)
            far_ones = balance_away(balance, layer, [*misses], [*hits])
            assert far_ones == {*range(share, m)}


def balance_away(balance, layer, misses, hits):
    balance.sizes = [[of[0]] * (len(misses) + len(hits) + 1) for of in balance.sizes]
    return balance.away(layer, dict.fromkeys([*misses, *hits][::-1], 1), {*hits})


def test_of_several_at_once_each_counts():
    """What a GPU tells of a layer: one event of all that was fetched, one of all computed."""
    balance = Balance([[(BYTES, 0)] * 6], [Rates((3, 0), (1, 0), (5, 0))], K=4)
    balance.begin_forward(token=True)
    assert balance.away(0, dict.fromkeys([5, 3, 1, 0], 1), {0}) == {5}
    balance.end_forward(
        [
            Event("link", "read", 0, -1, 0, 8, 2 * BYTES),
            Event("compute", "expert", 0, -1, 8, 14),
            Event("host", "expert", 0, 5, 0, 7),
            Event("link", "read", -1, -1, 0, 99, BYTES),  # of no layer
            Event("compute", "wait", 0, -1, 14, 20),
        ]
    )
    assert balance.rates == Rates((4, 0), (2, 0), (7, 0))


def test_what_was_measured_decides_and_is_forgotten():
    balance = Balance([[(BYTES, 0)] * 4])
    assert balance.begin_forward() == Rates()
    assert balance.away(0, {0: 1, 2: 3}, there={0}) == {0, 2}  # unknown: it is tried
    balance.end_forward([Event("host", "expert", 0, e, 0, 1 + e) for e in (0, 2)])
    assert balance.rates == rates(0, (0, 0), (pytest.approx(0), pytest.approx(1)))
    balance.begin_forward()
    assert balance.away(0, {0: 1, 2: 3}, there={0}) == set()
    events = [Event("link", "read", 0, 2, 0, 5, BYTES), Event("compute", "expert", 0, -1, 0, 4)]
    balance.end_forward([*events, Event("compute", "wait", 0, 2, 4, 9)])
    assert balance.rates[:2] == ((5, 0), (2, 0))
    for _ in range(ANEW - 1):
        balance.begin_forward()
        balance.end_forward(())
    assert balance.rates == Rates()


L, E = 3, 8
DELAYS = Delays(0.5, 0.0, 0.0, 0.0, 0.1, 0.01, e_bytes=BYTES)


def play(steps, forwards, machine, told, pools, cache="lrfu"):
    balance = Balance([[(BYTES, 0)] * E] * L, None if told is None else [told] * len(steps))
    return simulate(steps, forwards, Residency(L, E, pools, cache), machine, balance=balance)


@given(
    st.lists(
        st.lists(st.sets(st.integers(0, E - 1), max_size=4), min_size=L, max_size=L), max_size=9
    ),
    st.floats(0.01, 2),
    st.sampled_from(["lrfu", "prompt", "next-use"]),
)
def test_both_places_together_are_as_fast_as_the_faster_one(tokens, far, cache):
    """By rates that are those of the machine, against all near and all far, from the same memory: what
    is resident never changes, as nothing is kept."""
    steps = [[(layer, dict.fromkeys(of, 1)) for layer, of in enumerate(t)] for t in tokens]
    forwards = [(1, "decode")] * len(steps)
    machine = Machine(DELAYS, far=(far, 0.0))
    known = rates(0.5, (0.11, 0), (far, 0))
    never = 1e9
    ways = [
        known,
        rates(0, (0, 0), (never, 0)),
        rates(never, (never, 0), (0, 0)),
    ]
    ours, near, away = (play(steps, forwards, machine, told, Pools(), cache) for told in ways)
    for found in (ours, near, away):
        assert check(found.events) == []
        computed = Counter((e.layer, e.expert) for e in found.events if e.kind == "expert")
        assert computed == Counter((i, e) for t in tokens for i, of in enumerate(t) for e in of)
    assert "host" not in {e.resource for e in near.events}
    assert "link" not in {e.resource for e in away.events}
    for one, other, third in zip(ours.forwards, near.forwards, away.forwards, strict=True):
        assert one.end - one.start <= min(other.end - other.start, third.end - third.start) + 1e-9


def test_a_simulation_learns_the_rates_of_its_machine():
    steps = [[(layer, {layer: 1, layer + 1: 1, layer + 2: 1}) for layer in range(L)]] * 9
    machine = Machine(DELAYS, far=(0.3, 0.0))
    found = play(steps, [(1, "decode")] * 9, machine, None, Pools())
    told = play(
        steps,
        [(1, "decode")] * 9,
        machine,
        rates(0.5, (0.11, 0), (0.3, 0)),
        Pools(),
    )
    assert found.forwards[-1].end - found.forwards[-1].start == pytest.approx(
        told.forwards[-1].end - told.forwards[-1].start
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    tiny.save("qwen3_moe", folder / "model", torch.float32)
    convert(folder / "model", folder / "raw", codec="raw")
    return open_model(folder / "model"), folder / "raw"


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("bf16"), torch.bfloat16)


@pytest.mark.parametrize("codec", ["bf12", None])
def test_experts_are_computed_as_they_are_stored(bf16, codec, tmp_path):
    """A codec that is read in place, and a checkpoint's own files."""
    stored = convert(bf16, tmp_path / "store", codec) if codec else bf16
    with (
        open_model(stored, memory=0.5, hybrid=1, executor="fast") as model,
        open_model(bf16) as eager,
    ):
        with torch.inference_mode():
            ids = torch.arange(3, 20)[None]
            torch.testing.assert_close(model(ids).logits, eager(ids).logits, rtol=0.05, atol=0.05)
        assert model.moelab.metrics().busy["host"] > 0


def aside(events):
    return [
        (e.layer, e.expert) for e in sorted(events, key=lambda e: e.start) if e.resource == "host"
    ]


@pytest.mark.parametrize("bandwidth", [None, 2e6])
@pytest.mark.parametrize("cache", ["lrfu", "prompt"])
def test_threads_and_the_simulator_decide_alike_and_the_output_is_the_models(
    models, cache, bandwidth
):
    """Of whatever the engine has measured meanwhile, on texts of several lengths."""
    eager, store = models
    how = {"cache": cache, "bandwidth": bandwidth, "executor": "fast", "hybrid": 1}
    with open_model(store, memory=0.5, **how) as model:
        session = model.moelab
        for batch, prompt in ((2, 9), (1, 30), (1, 1)):
            given = {"batch": batch, "prompt": prompt, "new": 8}
            for got, expected in zip(generate(model, **given), generate(eager, **given)):
                torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
        played = replay(session.run)
        assert len(session.run.rates) == len(session.forwards)
        assert played.counters == session.residency.counters
        assert aside(played.events) == aside(session.timeline) != []
        sent = [
            sorted((e.layer, e.expert) for e in of if e.bytes)
            for of in (played.events, session.timeline)
        ]
        assert sent[0] == sent[1] != []
        assert check(session.timeline) == check(played.events) == []
        assert {*session.metrics().busy} == {"compute", "host", "link"}
        there = replay(session.run, device="rtx-5080")  # at the card's rates, which never change
        assert check(there.events) == [] and there.tpot > 0
        assert there.counters.requests == played.counters.requests
        with pytest.raises(ValueError, match="no memory beside it"):
            replay(session.run, device="m2-max")


def test_what_cannot_be_hybrid_says_so(models, bf16, tmp_path):
    _, store = models
    for how in (
        {"executor": "exact"},
        {"executor": "fast", "prefetch": "router"},
        {"executor": "fast", "ahead": 1},
    ):
        with pytest.raises(ValueError, match="hybrid"):
            open_model(store, memory=0.5, hybrid=1, **how)
    packed = convert(bf16, tmp_path / "s", "huffman")
    with pytest.raises(ValueError, match="hybrid"):
        open_model(packed, memory=0.5, hybrid=1, executor="fast")
    with open_model(store, memory=1.0, hybrid=1, executor="fast") as model:  # all are near
        generate(model)
        assert {*model.moelab.metrics().busy} == {"compute"}
