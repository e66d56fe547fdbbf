"""What is chosen by simulation, against each choice simulated by itself, a clock by hand and counts
of what is drawn."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import calibrate, convert, open_model, record
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.offloading.slots import Sizes
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.simulator import flat, simulate
from moelab.zipmoe.planner import best_pools, drawn, shares_of
from tests.models import tiny

L, E, K = 2, 8, 2
SHARES = np.array(
    [[0.9, 0.5, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05], [0.1, 0.1, 0.05, 0.05, 0.1, 0.2, 0.5, 0.9]]
)
STEPS = drawn(SHARES, 14)
DELAYS = Delays(3e-4, 6e-4, 2e-4, 2e-4, 1e-4, 0.0)


def test_tokens_are_drawn_as_often_as_the_shares_say():
    steps = drawn(SHARES, 2000)
    counts = np.zeros((L, E))
    for layer, experts in flat(steps):
        assert (
            len(experts) == K and set(experts.values()) == {1} and list(experts) == sorted(experts)
        )
        counts[layer, list(experts)] += 1
    assert np.abs(counts / 2000 - SHARES).max() < 4 * 0.5 / np.sqrt(
        2000
    )  # four standard deviations, at most
    assert drawn(SHARES, 3, seed=1) == drawn(SHARES, 3, seed=1) != drawn(SHARES, 3, seed=2)


def played(pools, delays, scope, policy, warm):
    residency = Residency(L, E, pools, policy, scope)
    for step in flat(STEPS[:warm]):
        residency.begin(*step)
    machine, timed = Machine(delays), STEPS[warm:]
    forwards = [(1, "decode")] * len(timed)
    run = simulate(timed, forwards, residency, machine, staging=2, scheduler="default")
    return fmean(forward.end - forward.start for forward in run.forwards)


@settings(max_examples=5)
@given(
    st.integers(0, 200),
    st.sampled_from(["model", "layer"]),
    st.sampled_from(["lru", "zipmoe"]),
    st.builds(Delays, *[st.floats(1e-5, 1e-3)] * 6),
)
def test_never_slower_than_the_best_single_state(room, scope, policy, delays):
    found = best_pools(
        SHARES,
        STEPS,
        room,
        Sizes(12, 2, 6),
        Machine(delays),
        staging=2,
        policy=policy,
        scope=scope,
        warm=8,
    )
    copies, most = (L, E) if scope == "layer" else (1, L * E)
    alone = {
        name: played(Pools(**{name: min(most, room // copies // size)}), delays, scope, policy, 8)
        for name, size in {"F": 12, "C": 8, "S": 6, "E": 2}.items()
    }
    assert found[0].seconds <= min(alone.values()) * (1 + 1e-9)
    for one in found:
        assert copies * one.pools.nbytes(12, 6, 2) <= room and found[0].seconds <= one.seconds
    assert found[0].seconds == pytest.approx(played(found[0].pools, delays, scope, policy, 8))


def test_what_lies_as_it_is_computed_is_simply_kept_whole():
    (only,) = best_pools(
        SHARES, STEPS, 40, Sizes(12, 0, 0, True), Machine(DELAYS), staging=1, warm=8
    )
    assert only.pools == Pools(F=3)


def test_few_bits_are_kept_as_they_lie_or_decoded():
    """The best of plans, no slower in simulation than either alone; nothing is kept in parts."""
    for delays in (DELAYS, replace(DELAYS, e_read=9.0), replace(DELAYS, decompress=9.0)):
        best, *others = best_pools(
            SHARES, STEPS, 40, Sizes(12, 8, 0), Machine(delays), staging=1, warm=8
        )
        assert {Pools(F=3), Pools(C=5)} <= {of.pools for of in (best, *others)}
        assert not any(of.pools.S or of.pools.E for of in (best, *others))
        assert best.seconds <= min(of.seconds for of in others)


def test_an_automatic_plan_is_the_fastest_in_simulation_and_changes_no_bit(tmp_path):
    checkpoint = tiny.save(
        "qwen3_moe", tmp_path / "model", torch.bfloat16, hidden_size=128, moe_intermediate_size=128
    )
    store, raw = (
        convert(checkpoint, tmp_path / codec, codec=codec) for codec in ("huffman", "raw")
    )
    reference = open_model(checkpoint)
    ids = torch.randint(3, 96, (4, 6), generator=torch.Generator().manual_seed(0))
    trace = record(reference, ids.tolist(), max_new_tokens=8, min_new_tokens=8)
    calibration = calibrate(trace)
    delays = Delays(3e-4, 7e-4, 1e-5, 1e-5, 1e-5, 0.0)
    with pytest.raises(ValueError, match="moelab calibrate"):
        open_model(store, memory=0.5, plan="auto", delays=delays)
    with pytest.raises(ValueError, match="the plan is 'best'"):
        open_model(store, memory=0.5, plan="best", delays=delays)
    for known in (calibration, trace):
        with open_model(store, memory=0.5, plan="auto", calibration=known, delays=delays) as lm:
            pools = lm.moelab.run.settings.pools
            assert pools.C + pools.S + pools.E > 0  # a slow disk: compressed experts pay
            wanted = reference.generate(ids[:1], max_new_tokens=6, do_sample=False)
            assert torch.equal(lm.generate(ids[:1], max_new_tokens=6, do_sample=False), wanted)
            assert shares_of(calibration).sum(1) == pytest.approx([lm.spec.K] * lm.spec.L)
    with open_model(raw, memory=0.5, plan="auto") as lm:
        pools = lm.moelab.run.settings.pools
        assert pools.F == pools.capacity > 0
