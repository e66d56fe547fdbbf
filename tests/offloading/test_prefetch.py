"""Fetching ahead: it may change when things are read, and nothing else; and what becomes of wrong
guesses and errors."""

import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import open_model
from moelab.base.registry import make
from moelab.cache.pools import Pools
from moelab.models import plug
from moelab.offloading.offload import offload
from moelab.speculate import Speculation
from tests.offloading.test_offload import assert_equal, jitter
from tests.timelines import check


def nothing_is_lost(model):
    """Every slot is either free or held by an expert that residency keeps."""
    slots, queue = model.moelab.engine.loader.slots, model.moelab.engine.loader.queue
    deadline = time.monotonic() + 60  # what nobody wants any more is still read to its end
    while queue._ahead and time.monotonic() < deadline:
        time.sleep(1e-3)
    for kind in ("full", "e", "sm"):
        taken = [one[kind] for one in queue.held.values() if kind in one]
        assert sorted([*queue.free[kind], *taken]) == list(range(slots.count[kind]))


@settings(max_examples=6)
@given(
    st.integers(0, 1 << 30).map(random.Random),
    st.sampled_from([None, Pools(2, 3, 2, 4), Pools(0, 0, 5, 0)]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 2),
    st.sampled_from(["router", "random", "previous"]),
)
def test_guesses_decide_nothing(qwen, chance, plan, workers, staging, ahead, distance, guess):
    """Under random delays: equal output, equal hits and evictions, whether and whatever is
    guessed."""
    model, store = qwen
    reference, decisions = open_model(model), []
    options = {"plan": plan or Pools(F=5), "cache": "zipmoe", "workers": workers}
    for room in (0, ahead):
        offloaded = offload(store, "10MB", **options, staging=staging, ahead=room)
        jitter(offloaded, chance)
        with Speculation(offloaded, make("predictor", guess, offloaded, ahead=distance), "hint"):
            for seed in range(2):
                assert_equal(offloaded, reference, seed=seed, batch=1 + seed, new=3)
        decisions.append(offloaded.moelab.residency.counters)
        assert check(offloaded.moelab.timeline) == []
        nothing_is_lost(offloaded)
        offloaded.moelab.close()
    assert decisions[0] == decisions[1]


def test_speculating_executes_what_a_resident_model_would_and_reads_nothing_twice(qwen):
    model, store = qwen
    resident = open_model(model)
    offloaded = offload(store, "10MB", plan=Pools(F=2), ahead=8)
    with (
        Speculation(resident, make("predictor", "router", resident), "speculative"),
        Speculation(offloaded, make("predictor", "router", offloaded), "speculative"),
    ):
        for seed in range(4):
            offloaded.moelab.reset()
            assert_equal(offloaded, resident, seed=seed, batch=1, new=6)
            found = offloaded.moelab.metrics().prefetched
            for forward in offloaded.moelab.forwards[1:]:
                reads = [
                    (e.layer, e.expert)
                    for e in offloaded.moelab.timeline
                    if e.resource == "disk" and forward.start <= e.start < forward.end
                ]
                assert len(reads) == len(set(reads))
            assert found["used"] and found["begun"] >= found["used"]
    offloaded.moelab.close()


@pytest.mark.parametrize("needed", [True, False])
def test_an_error_while_fetching_ahead_reaches_only_who_needs_the_expert(qwen, needed):
    """One that comes again, as of a damaged store: a read that fails once is repeated."""
    model, store = qwen
    prompt = torch.tensor([[7, 8]])
    with offload(store, "10MB", plan=Pools(), ahead=8) as offloaded:
        engine, reader, failed = offloaded.moelab.engine, offloaded.moelab.engine.loader.reader, []
        with torch.inference_mode():
            offloaded(prompt)
        wanted = set(dict(offloaded.moelab.steps[0])[1])
        chosen = min(wanted if needed else set(range(8)) - wanted)
        read = reader.read_parts

        def failing(layer, expert, *args):
            if (layer, expert) == (1, chosen) and len(failed) < 2:
                failed.append(chosen)
                raise OSError(5, "reading experts-00001.safetensors failed")
            return read(layer, expert, *args)

        def announcing(x, ids, weights, experts):
            if experts.layer == 0:
                engine.prefetch(1, torch.tensor([[chosen]]))
            result = engine(x, ids, weights, experts)
            while experts.layer == 0 and not failed:
                time.sleep(1e-3)
            return result

        reader.read_parts = failing
        plug(offloaded, engine=announcing)
        with torch.inference_mode():
            if needed:
                with pytest.raises(OSError, match="experts-00001"):
                    offloaded(prompt)
            else:
                offloaded(prompt)
        plug(offloaded, engine=engine)
        reader.read_parts = read  # the store is whole again
        assert_equal(offloaded, open_model(model))
        nothing_is_lost(offloaded)


def test_a_prefill_needs_no_guesses(qwen):
    """Where a layer's tokens want all experts anyway, the next layer's are fetched without anybody
    announcing them."""
    model, store = qwen
    offloaded, reference = (
        offload(store, "10MB", plan=Pools(F=1), ahead=4),
        open_model(model),
    )
    assert_equal(offloaded, reference, prompt=60, new=2)
    prefill, *decode = offloaded.moelab.predictions
    assert [(layer, sorted(experts)) for layer, experts in prefill] == [
        (1, list(range(8)))
    ] and not any(decode)
    assert offloaded.moelab.metrics().prefetched["used"]
    nothing_is_lost(offloaded)
    offloaded.moelab.close()
