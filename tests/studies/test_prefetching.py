"""What prefetching gains: the bound against simulated schedules and closed forms; all ways run."""

from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.registry import make
from moelab.bench.synthesize import synthesize
from moelab.cache.residency import Residency
from moelab.checkpoint.convert import convert
from moelab.simulation.simulator import Prefetching, simulate
from notebooks.studies import prefetching
from notebooks.studies.grid import synthetic
from notebooks.studies.prefetching import Spent, eq1, hideable, least
from tests.simulation.test_simulator import machines, runs

seconds = st.floats(0, 10)
serial = st.lists(
    st.builds(lambda copy, *rest: Spent(copy, copy, *rest), seconds, seconds, seconds),
    min_size=1,
    max_size=5,
)


@given(runs(), machines, st.integers(1, 9))
def test_no_simulated_schedule_beats_the_bound(run, machine, ahead):
    """Whatever is predicted, cached, delayed and decoded: no token takes less than the least of its
    layers."""
    L, E, steps, predictions, pools = run
    forwards = [(1, "decode")] * len(steps)

    def play(**how):
        return simulate(steps, forwards, Residency(L, E, pools), machine, **how)

    alone = play()
    for guesses in (predictions, steps):
        played = play(prefetching=Prefetching(guesses, ahead))
        for before, after in zip(alone.forwards, played.forwards):
            events = [e for e in alone.events if before.start <= e.start and e.end <= before.end]
            layers = [_spent([e for e in events if e.layer == layer]) for layer in range(L)]
            assert after.end - after.start >= least(layers) + machine.head[0] - 1e-6


def _spent(events):
    """What events of one layer take."""
    kinds = ("disk", "wait", "expert", "other")
    return Spent(
        *(sum(e.end - e.start for e in events if kind in (e.resource, e.kind)) for kind in kinds)
    )


@given(serial)
def test_algorithm_1_gains_what_its_equation_says_and_no_more_than_the_bound(layers):
    """Its schedule played: when a layer's copies are all there, its experts and the next layer's
    copies begin."""
    start = layers[0].other + layers[0].copy
    for before, here in zip(layers, layers[1:]):
        start = max(start + before.expert + here.other, start + here.copy)
    gain = sum(of.copy + of.expert + of.other for of in layers) - start - layers[-1].expert
    assert eq1(layers) == pytest.approx(gain, abs=1e-9)
    assert gain <= hideable(layers) + 1e-9
    if len(set(layers)) == 1:  # as the paper assumes
        paper = sum(min(copy, expert + other) for copy, _, expert, other in layers)
        assert eq1(layers) == pytest.approx(paper * (1 - 1 / len(layers)), abs=1e-9)


def test_a_study_of_all_ways(tmp_path):
    model = synthesize(tmp_path / "model", synthetic("mini", 3, 16, 2, 64, 64))
    off = prefetching.offloaded(convert(model, tmp_path / "raw", "raw"))
    with closing(off.moelab):
        ids = torch.randint(3, 256, (1, 300))
        made = prefetching.PrefetchBenchmark(off, ids, lambda: make("predictor", "router", off))
        (ran,), (against,) = (found.values() for found in made.study([1.0], 1, 8, 1))
    assert list(ran) == list(prefetching.ARMS)
    assert not any(taken.metrics.prefetched["used"] for taken in ran["copy, then compute"])
    assert not any(taken.metrics.prefetched["wasted"] for taken in ran["speculative"])
    assert against["bound s"] >= against["eq. (1) s"] > 0 and against["copy ÷ compute, found"] > 0
