"""The simulator against the parts it drives, a clock kept by hand, closed forms, and the engine."""

import random
from collections import Counter
from contextlib import closing
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import cards, convert, open_model
from moelab.base import registry
from moelab.base.specs import DeviceSpec, Figure, MoESpec, State
from moelab.cache.policies import POLICIES, Belady
from moelab.cache.residency import Pools, Residency
from moelab.offloading.offload import offload
from moelab.simulation.costs import Delays, Machine, MachineRates, delays_of
from moelab.simulation.fit import fitted
from moelab.simulation.simulator import (
    Prefetching,
    flat,
    replay,
    simulate,
)
from moelab.store.layout import run as stored
from moelab.zipmoe.affinity import naive_order
from tests.models import tiny
from tests.timelines import check

L, E, K = 3, 8, 2
SPEC = MoESpec("tiny", "tiny", L, tuple(range(L)), E, K, H=16, I=8)
DELAYS = Delays(
    e_read=3e-4,
    sm_read=5e-4,
    decompress=4e-4,
    recover=1e-4,
    expert_base=2e-4,
    expert_token=1e-5,
    e_bytes=300,
    sm_bytes=500,
)
MACHINE = Machine(DELAYS)


def run(n=30, seed=0):
    """A prompt of 20 tokens and n − 1 decoded ones."""
    draw, steps = random.Random(seed), []
    for forward in range(n):
        tokens = 20 if forward == 0 else 1
        steps.append([])
        for layer in range(L):
            counts = {}
            for _ in range(tokens):
                for expert in draw.sample(range(E), K):
                    counts[expert] = counts.get(expert, 0) + 1
            steps[-1].append((layer, counts))
    return steps, [(20, "prefill")] + [(1, "decode")] * (n - 1)


def needed(decisions, delays):
    """Bytes that steps must read."""
    return sum(
        (r.state not in "EC") * delays.e_bytes + (r.state not in "SC") * delays.sm_bytes
        for step in decisions
        for r in step.loads
    )


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("pools", [Pools(F=5), Pools(F=2, C=2, S=1, E=2), Pools()])
def test_decisions_are_those_of_the_residency(policy, pools, scope):
    steps, forwards = run()

    def cache():
        return Residency(L, E, pools, Belady(flat(steps)) if policy == "belady" else policy, scope)

    alone, inside = cache(), cache()
    decisions = []
    for step, (_, phase) in zip(steps, forwards, strict=True):
        decisions += [*alone.begin_forward(phase), *(alone.begin(*of) for of in step)]
    machine = Machine(DELAYS, 2, other=(1e-4, 1e-6), head=(3e-4, 0.0))
    found = simulate(steps, forwards, inside, machine, staging=3)
    assert found.counters == alone.counters
    assert all(
        inside.state(r.key) is alone.state(r.key) for step in decisions for r in step.requests
    )
    assert found.metrics().read_bytes == needed(decisions, DELAYS)
    assert not check(found.events) and found.kind == "simulated"
    computed = [(event.layer, event.expert) for event in found.events if event.kind == "expert"]
    assert sorted(computed) == sorted(
        (layer, expert) for layer, experts in flat(steps) for expert in experts
    )


def test_of_a_resident_model_times_add_up():
    steps, forwards = run()
    residency = Residency(L, E, Pools(F=L * E))
    residency.fill()
    machine = Machine(DELAYS, other=(1e-3, 1e-4), head=(2e-3, 1e-5))
    found = simulate(steps, forwards, residency, machine)
    assert {event.kind for event in found.events} == {"other", "expert"}
    clock = 0.0
    for forward, step, (tokens, phase) in zip(found.forwards, steps, forwards, strict=True):
        took = 2e-3 + 1e-5 * tokens
        for _, experts in step:
            took += 1e-3 + 1e-4 * tokens + sum(2e-4 + 1e-5 * n for n in experts.values())
        assert forward[:4] == (pytest.approx(clock), pytest.approx(clock + took), tokens, phase)
        clock += took


def test_one_miss_by_hand():
    """1 ms before the layer, 0.2 to decide; then E and SM in one request, decoding, the expert."""
    machine = Machine(DELAYS, other=(1e-3, 0.0), decide=(1e-4, 1e-4))
    found = simulate([[(0, {3: 1})]], [(1, "decode")], Residency(L, E, Pools(F=1)), machine)
    assert found.tpot == pytest.approx(1e-3 + 2e-4 + 8e-4 + 5e-4 + 2.1e-4)


def test_a_run_goes_on_from_a_warm_cache_and_another_scheduler_reads_the_same():
    steps, forwards = run()
    residency = Residency(L, E, Pools(F=L * E))
    cold, warm = (simulate(steps, forwards, residency, MACHINE) for _ in range(2))
    assert cold.counters.misses > 0 == warm.counters.misses
    for name in registry.names("scheduler"):
        one, other = (
            simulate(steps, forwards, Residency(L, E, Pools(F=4)), MACHINE, **how)
            for how in ({}, {"scheduler": name})
        )
        assert one.counters == other.counters
        assert one.metrics().read_bytes == other.metrics().read_bytes


def test_errors():
    steps, forwards = [[(0, {0: 1})]], [(1, "decode")]

    def play(steps=steps, forwards=forwards, **more):
        return simulate(steps, forwards, Residency(1, 2, Pools()), MACHINE, **more)

    with pytest.raises(ValueError, match="zip.. argument 2 is longer"):
        play(forwards=forwards * 2)
    with pytest.raises(ValueError, match="zip.. argument 3 is longer"):
        play(prefetching=Prefetching([[], []], 1))


# --------------------------------------------------------------------------------- reading ahead

seconds = st.integers(0, 4).map(float) | st.floats(0.01, 4)
machines = st.builds(
    Machine,
    st.builds(Delays, *[seconds] * 6, e_bytes=st.just(3), sm_bytes=st.just(5)),
    st.integers(1, 3),
    other=st.tuples(seconds, st.just(0.0)),
    head=st.tuples(seconds, st.just(0.0)),
    predict=seconds,
)


@st.composite
def runs(draw):
    """(L, E, steps, predictions, pools); predictions are right, wrong, both, repeated, of no such
    expert."""
    L, E, chance = draw(st.integers(1, 4)), draw(st.integers(2, 9)), draw(st.randoms())

    def some(most):
        return chance.sample(range(E), chance.randint(0, min(E, most)))

    steps = [
        [(layer, {e: chance.randint(1, 3) for e in some(4)}) for layer in range(L)]
        for _ in range(draw(st.integers(1, 5)))
    ]
    predictions = [
        [
            (layer, [chance.randint(0, E)] + some(4) + list(experts)[: chance.randint(0, 4)])
            for layer, experts in forward
        ]
        for forward in steps
    ]
    pools = draw(
        st.sampled_from([Pools(F=5), Pools(F=2, C=2, S=1, E=2), Pools(C=3, S=3, E=3), Pools()])
    )
    return L, E, steps, predictions, pools


@given(runs(), machines, st.integers(1, 5), st.integers(1, 3), st.none() | st.integers(1, 3))
def test_predictions_decide_nothing_and_every_byte_is_accounted_for(
    run, machine, ahead, distance, staging
):
    L, E, steps, predictions, pools = run
    alone, inside = Residency(L, E, pools), Residency(L, E, pools)
    decisions = [alone.begin(*step) for step in flat(steps)]
    played = simulate(
        steps,
        [(1, "decode")] * len(steps),
        inside,
        machine,
        staging=staging,
        prefetching=Prefetching(predictions, ahead, distance),
    )
    assert played.counters == alone.counters
    assert all(inside.resident(state) == alone.resident(state) for state in State)
    assert check(played.events) == []
    computed = Counter((e.layer, e.expert) for e in played.events if e.kind == "expert")
    assert computed == Counter(
        (layer, expert) for layer, experts in flat(steps) for expert in experts
    )
    fetched, found = played.fetched, played.metrics()
    assert found.prefetched == asdict(fetched)
    assert found.read_bytes == needed(decisions, machine.delays) + fetched.wasted
    assert 0 <= fetched.wasted <= found.read_bytes and 0 <= fetched.used <= fetched.begun
    clock = 0.0  # compute never rests: it is at something, or says that it waits
    for event in sorted(
        (e for e in played.events if e.resource == "compute"), key=lambda e: e[4:6]
    ):
        assert event.start == pytest.approx(clock)
        clock = event.end
    assert clock == pytest.approx(played.forwards[-1].end)


@given(
    st.integers(2, 5),
    st.integers(1, 4),
    st.floats(0.1, 5),
    st.floats(0.1, 5),
    st.floats(0, 9),
    st.integers(1, 3),
)
def test_right_predictions_by_a_closed_form(L, K, read, compute, other, tokens):
    """Nothing to decode and nothing kept: the first layer's experts come one after another, and
    every further layer takes the longer of reading and computing (Speculating Experts, eq. 1)."""
    delays = Delays(read / 3, read * 2 / 3, 0, 0, compute, 0, e_bytes=1, sm_bytes=2)
    steps = [[(layer, dict.fromkeys(range(K), 1)) for layer in range(L)]] * tokens

    def tpot(prefetching=None):
        return simulate(
            steps,
            [(1, "decode")] * tokens,
            Residency(L, K, Pools()),
            Machine(delays, other=(other, 0.0)),
            prefetching=prefetching,
        ).tpot

    first = other + max(K * read + compute, read + K * compute)
    assert tpot() == pytest.approx(L * first)
    assert tpot(Prefetching(steps, K)) == pytest.approx(
        first + (L - 1) * max(K * read, other + K * compute)
    )


@pytest.mark.parametrize(
    "other, reads, end",
    [
        (3.0, [(0, 0, 3, 5), (1, 5, 5, 7), (1, 6, 7, 9), (1, 0, 9, 11)], 12),
        (2.0, [(0, 0, 2, 4), (1, 5, 4, 6), (1, 6, 6, 8), (1, 0, 8, 10)], 11),
    ],
)
def test_wrong_predictions_by_hand(other, reads, end):
    """A read takes 2 s, an expert 1 s. While layer 0 computes and layer 1 begins, experts 5 and 6
    are read ahead, and no third: there is no room for it. A read under way is not interrupted."""
    played = simulate(
        [[(0, {0: 1}), (1, {0: 1})]],
        [(1, "decode")],
        Residency(2, 8, Pools()),
        Machine(Delays(2, 0, 0, 0, 1, 0, e_bytes=1), other=(other, 0.0)),
        prefetching=Prefetching([[(1, [5, 6, 7])]], 2),
    )
    assert [tuple(e[2:6]) for e in played.events if e.resource == "disk"] == reads
    assert asdict(played.fetched) == {"begun": 2, "used": 0, "wasted": 2}
    assert played.forwards[0].end == end


# ------------------------------------------------------------------------------ traces and cards


def card(**figures):
    return DeviceSpec(
        "a board",
        {name: Figure(value, "?", "published", "a test") for name, value in figures.items()},
    )


def test_delays_of_a_card_by_hand():
    """An expert of 384 weights, 768 bytes, on a disk of 1 GB/s, memory of 10 GB/s and 0.001
    TFLOPS."""
    board = card(storage_read_gbs=1, memory_bandwidth_gbs=10, fp32_tflops=0.001)
    delays, other = delays_of(board, SPEC, rho=0.5, dense_bytes=3000, decompress_gbs=2)
    assert (delays.e_bytes, delays.sm_bytes, delays.N) == (192, 384, 3)
    found = (
        delays.e_read,
        delays.sm_read,
        delays.decompress,
        delays.recover,
        delays.expert_base,
        delays.expert_token,
    )
    assert found == pytest.approx((192e-9, 384e-9, 192e-9, 153.6e-9, 76.8e-9, 768e-9))
    assert other == pytest.approx((1000 / 10e9, 1000 / 1e9))


def test_cards_of_the_package_and_what_they_lack():
    gh200 = cards.load_device("gh200-96gb")
    published = MachineRates.of(gh200, reached=0)
    assert (published.read, published.memory, published.flops) == (450e9, 4e12, 990e12)
    for reached, rates in enumerate((published, MachineRates.of(gh200), MachineRates.of(gh200, 2))):
        assert rates.read == pytest.approx(450e9 * gh200["link_reached_ratio"] ** reached)
        assert rates.host == pytest.approx(384e9 * gh200["host_reached_ratio"] ** reached)
        assert rates.layer == pytest.approx(1e-3 * gh200["layer_ms"])
    with pytest.raises(ValueError, match="no host link and no disk .*storage_read_gbs"):
        MachineRates.of(cards.load_device("m2-ultra"))
    orin = cards.load_device("jetson-agx-orin-64gb")
    delays, _ = delays_of(
        orin, cards.load_model("Qwen3-30B-A3B"), 0.32, dense_bytes=2e9, decompress_gbs=1.5
    )
    assert delays.e_bytes / delays.e_read == pytest.approx(3.5e9)
    with pytest.raises(ValueError, match="doesn't say how fast a thread decompresses"):
        delays_of(card(storage_read_gbs=1, memory_bandwidth_gbs=1, fp32_tflops=1), SPEC, 0.5, 0)
    with pytest.raises(ValueError, match=r"with_dtype\('bfloat16'\)"):
        delays_of(orin, SPEC.with_dtype("mxfp4"), 0.5, 0, 1)
    assert delays_of(
        card(storage_read_gbs=1, memory_bandwidth_gbs=1, fp32_tflops=1, decompress_gbs=4),
        SPEC,
        1,
        0,
    )[0].decompress == pytest.approx(384 / 4e9)


def generate(model):
    """Eight greedy tokens after six."""
    ids = torch.randint(3, 96, (1, 6), generator=torch.Generator().manual_seed(0))
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
    )


@pytest.mark.parametrize(
    "codec, pools",
    [("huffman", Pools(F=4)), ("huffman", Pools(F=1, C=3, S=2, E=2)), ("raw", Pools(F=4))],
    ids=["whole", "parts", "in place"],
)
def test_reads_and_bytes_are_each_experts_own(tmp_path, codec, pools):
    """Experts that compress differently: engine and simulator do the same reads, whole or of a
    chunk, of the same bytes, expert by expert."""
    checkpoint = tiny.save_uneven(
        tmp_path / "model",
        hidden_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        mlp_only_layers=[],
    )
    store = convert(checkpoint, tmp_path / "store", codec=codec)
    model = offload(store, "100MB", plan=pools, cache="lfu", staging=3)
    with closing(model.moelab) as engine:
        generate(model)
        found = simulate(
            engine.steps,
            [forward[2:] for forward in engine.forwards],
            Residency(2, 8, pools, "lfu"),
            fitted(engine.run),
            staging=3,
        )
        read = [Counter(), Counter()]
        for total, events in zip(read, (found.events, engine.timeline)):
            for event in events:
                if event.resource == "disk":
                    total[event.layer, event.expert, event.kind, event.bytes] += 1
        assert codec == "raw" or len({stored(store.entries(0, e), "E")[1] for e in range(8)}) > 2, (
            "compress alike"
        )
        assert read[0] == read[1] and found.counters == engine.residency.counters
        assert found.metrics().read_bytes == engine.metrics().read_bytes
    took = {round((e.end - e.start) / e.bytes, 15) for e in found.events if e.kind == "read E"}
    assert len(took) <= 1, "a read takes as long as its bytes, relative to the mean expert's"


def test_a_run_is_replayed_as_it_was_and_otherwise(qwen):
    """The engine's decisions on its own run; the optimum hits at least as often; a card's clock is
    another clock."""
    model = offload(qwen[1], "10MB", plan=Pools(2, 3, 2, 1), cache="lfu", staging=3)
    with closing(model.moelab) as offloading:
        generate(model)
        run, found = offloading.run, offloading.metrics()
    played = replay(run)
    assert played.counters == run.counters and played.hit_rate == found.hit_rate
    assert played.metrics().read_bytes == found.read_bytes
    assert (played.tpot, played.ttft) == (played.metrics().tpot, played.metrics().ttft)
    whole = {name: replay(run, cache=name, pools=Pools(F=6)) for name in ("lru", "belady")}
    assert whole["belady"].hit_rate >= whole["lru"].hit_rate
    there = replay(run, device="jetson-agx-orin-32gb")
    assert there.counters == run.counters and 0 < there.tpot < played.tpot
    calls = []

    def mine(requests, delays, workers):
        calls.append(workers)
        return naive_order(requests, delays, workers)

    ordered = replay(run, scheduler=mine)
    assert calls and ordered.counters == run.counters
    assert ordered.metrics() == replay(run, scheduler="naive").metrics()
    with pytest.raises(ValueError, match="there is no scheduler 'niave'. Did you mean 'naive'"):
        replay(run, scheduler="niave")
    with pytest.raises(
        TypeError, match="ForCausalLM; what is simulated is a run, such as lm.moelab.run"
    ):
        replay(model)


def test_a_run_of_an_executor_is_replayed_with_its_calls(qwen):
    """All experts of a layer that are in memory are one call, in the run and in its replay."""
    with open_model(qwen[1], memory="10MB", plan=Pools(F=7), executor="fast") as model:
        generate(model)
        run = model.moelab.run
        calls, played = (
            Counter((event.layer, event.expert) for event in events if event.kind == "expert")
            for events in (run.timeline, replay(run).events)
        )
        assert (
            calls == played
            and any(expert < 0 for _, expert in calls)
            and any(expert >= 0 for _, expert in calls)
        )
