"""Fetching ahead: it may change when things are read, and nothing else; and what becomes of wrong
guesses and errors."""

import random
import threading
import time
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import convert, open_model
from moelab.cache.pools import Pools
from moelab.models import plug
from moelab.offloading.load_queue import PIECE
from moelab.offloading.offload import offload
from moelab.offloading.pipeline import DEPTH, Pipeline
from moelab.offloading.slots import Sizes
from moelab.registry import make
from moelab.speculate import Speculation
from moelab.store.layout import ExpertStore
from tests.depth import in_turn
from tests.models import tiny
from tests.offloading.test_offload import DELAYS, assert_equal, generate_interrupted, jitter
from tests.timelines import check


def nothing_is_lost(model):
    """Every slot is either free or held by an expert that residency keeps."""
    slots, queue = model.moelab.engine.pipeline.slots, model.moelab.engine.pipeline.queue
    deadline = time.monotonic() + 60  # what nobody wants any more is still read to its end

    def ahead():  # what is prefetched for the next token
        return [load for batch in queue.prefetched.values() for load in batch.admitted()]

    while queue._ahead > len(ahead()) and time.monotonic() < deadline:
        time.sleep(1e-3)
    for kind in ("full", "e", "sm"):
        taken = [one[kind] for one in queue.held.values() if kind in one]
        taken += [load.slots[kind] for load in ahead() if kind in load.lacks]
        assert sorted([*queue.free[kind], *taken]) == list(range(slots.count[kind]))


@pytest.mark.stress
@pytest.mark.parametrize("name, codec", in_turn(tiny.ARCHITECTURES, ["huffman", "raw"]))
def test_hints_change_no_bit_on_any_architecture(name, codec, tmp_path):
    reference = open_model(tiny.save(name, tmp_path / "model", torch.bfloat16))
    store = ExpertStore(convert(tmp_path / "model", tmp_path / "store", codec=codec).folder)
    for budget, ahead, guess in ((4 * Sizes.of(store).in_flight, 3, "random"), (0.75, 2, "router")):
        offloaded = offload(store, budget, ahead=ahead, delays=DELAYS)
        jitter(offloaded, random.Random(0))
        with (
            offloaded.moelab as offloading,
            Speculation(offloaded, make("predictor", guess, offloaded), "hint"),
        ):
            assert_equal(offloaded, reference)
            assert check(offloading.timeline) == []
            assert offloading.metrics().prefetched["begun"]
            nothing_is_lost(offloaded)


@settings(max_examples=10)
@given(
    st.integers(0, 1 << 30).map(random.Random),
    st.sampled_from([None, Pools(2, 3, 2, 4), Pools(0, 0, 5, 0)]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 2),
    st.sampled_from(["router", "random", "previous"]),
    st.sampled_from([4096, PIECE]),
)
def test_guesses_decide_nothing(
    qwen, chance, plan, workers, staging, ahead, distance, guess, piece
):
    """Under random delays: equal output, equal hits and evictions, whether and whatever is
    guessed."""
    model, store = qwen
    reference, decisions = open_model(model), []
    for room in (0, ahead):
        offloaded = offload(
            store,
            "10MB",
            plan=plan or Pools(F=5),
            cache="zipmoe",
            workers=workers,
            staging=staging,
            ahead=room,
            delays=DELAYS,
        )
        jitter(offloaded, chance)
        with (
            Speculation(offloaded, make("predictor", guess, offloaded, ahead=distance), "hint"),
            mock.patch("moelab.offloading.load_queue.PIECE", piece),
        ):
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
    offloaded = offload(store, "10MB", plan=Pools(F=2), ahead=8, delays=DELAYS)
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
                    for e in offloaded.moelab.timeline  # layer 0's may be for the next pass
                    if e.resource == "disk" and forward.start <= e.start < forward.end and e.layer
                ]
                assert len(reads) == len(set(reads))
            assert found["used"] and found["begun"] >= found["used"]
    offloaded.moelab.close()


def test_the_bytes_of_wrong_guesses_are_counted(qwen):
    """All eight experts of layer 1 are announced; those that the layer didn't need have been read
    for nothing."""
    model, store = qwen
    offloaded = offload(store, "10MB", plan=Pools(), ahead=8, delays=DELAYS)
    engine, reader = offloaded.moelab.engine, offloaded.moelab.engine.pipeline.reader
    inner, size = engine.__class__.__call__, {}

    def announcing(x, ids, weights, experts):
        if experts.layer == 0:
            engine.prefetch(1, torch.arange(8)[None])
        result = inner(engine, x, ids, weights, experts)
        deadline = time.monotonic() + 60
        while experts.layer == 0 and engine.pipeline.queue.busy and time.monotonic() < deadline:
            time.sleep(1e-3)
        return result

    plug(offloaded, executor=announcing)
    with torch.inference_mode():
        offloaded(torch.tensor([[5]]))
    found = offloaded.moelab.metrics().prefetched
    needed = {
        request for layer, experts in offloaded.moelab.steps[0] if layer == 1 for request in experts
    }
    for event in offloaded.moelab.timeline:
        if event.resource == "disk":
            size[event.layer, event.expert] = event.bytes
    assert found["begun"] == 8 and found["used"] == found["early"] == len(needed)
    assert found["nbytes"] == sum(size[1, expert] for expert in range(8))
    assert (
        found["wasted"] == sum(size[1, expert] for expert in range(8) if expert not in needed) > 0
    )
    assert reader.counters.bytes == sum(size.values())
    nothing_is_lost(offloaded)
    offloaded.moelab.close()


@pytest.mark.parametrize("needed", [True, False])
def test_an_error_while_fetching_ahead_reaches_only_who_needs_the_expert(qwen, needed):
    model, store = qwen
    offloaded, reference = (
        offload(store, "10MB", plan=Pools(F=2), ahead=8, delays=DELAYS),
        open_model(model),
    )
    engine = offloaded.moelab.engine
    inner, reader = engine.__class__.__call__, engine.pipeline.reader
    read, failed = reader.fill, []
    wanted = {}
    original = engine.residency.begin
    engine.residency.begin = lambda layer, tokens: (
        wanted.__setitem__(layer, set(tokens)),
        original(layer, tokens),
    )[1]
    with torch.inference_mode():
        offloaded(torch.tensor([[7, 8]]))
    chosen = sorted(wanted[1] if needed else set(range(8)) - wanted[1])[0]
    offloaded.moelab.residency.clear()
    engine._sound = False  # so the next layer holds what residency does

    def failing(piece):
        if (piece.of.layer, piece.of.expert) == (1, chosen) and not failed:
            failed.append(chosen)
            raise OSError(5, "reading experts-00001.safetensors failed")
        return read(piece)

    reader.fill = failing

    def announcing(x, ids, weights, experts):
        if experts.layer == 0:
            engine.prefetch(1, torch.tensor([[chosen]]))
        result = inner(engine, x, ids, weights, experts)
        while experts.layer == 0 and not failed:
            time.sleep(1e-3)
        return result

    plug(offloaded, executor=announcing)
    with torch.inference_mode():
        if needed:
            with pytest.raises(OSError, match="experts-00001"):
                offloaded(torch.tensor([[7, 8]]))
        else:
            offloaded(torch.tensor([[7, 8]]))
    assert failed
    plug(offloaded, executor=engine)
    assert_equal(offloaded, reference)
    nothing_is_lost(offloaded)
    offloaded.moelab.close()


def test_a_demand_overtakes_a_prefetch_between_two_pieces(qwen, monkeypatch):
    """What layer 1 does not want is announced, and its first piece takes until the layer has
    demanded its own experts: they go first, and nothing more of the other is read."""
    monkeypatch.setattr("moelab.offloading.load_queue.PIECE", 4096)
    offloaded, reference = (
        offload(qwen[1], "10MB", plan=Pools(), ahead=8, delays=DELAYS),
        open_model(qwen[0]),
    )
    offloading, wanted, begun, demanded = offloaded.moelab, {}, threading.Event(), threading.Event()
    engine = offloading.engine
    inner, begin = type(engine).__call__, engine.residency.begin
    engine.residency.begin = lambda layer, tokens: (
        wanted.__setitem__(layer, set(tokens)),
        begin(layer, tokens),
    )[1]
    with torch.inference_mode():
        offloaded(torch.tensor([[7]]))
        offloading.reset()
        others, pipeline = sorted(set(range(8)) - wanted[1]), engine.pipeline
        demand, fill = pipeline.queue.demand, pipeline.reader.fill

        def reading(piece):
            nbytes = fill(piece)
            if piece.of.expert in others and piece.of.layer == 1:
                begun.set()
                assert demanded.wait(60)
            return nbytes

        def demanding(*args):
            demand(*args)
            demanded.set()

        def announcing(x, ids, weights, experts):
            if experts.layer == 0:  # prefetched when all that it demands itself has been read
                engine.prefetch(1, torch.tensor([others]))
            else:
                assert begun.wait(60)
                pipeline.queue.demand = demanding
            return inner(engine, x, ids, weights, experts)

        pipeline.reader.fill = reading
        plug(offloaded, executor=announcing)
        offloaded(torch.tensor([[7]]))
        plug(offloaded, executor=engine)
    assert check(offloading.timeline) == []
    reads = [
        event for event in offloading.timeline if event.resource == "disk" and event.layer == 1
    ]
    assert [(event.expert, event.bytes) for event in reads if event.expert in others] == [
        (others[0], 4096)
    ]
    assert {event.expert for event in reads if event.expert not in others} == wanted[1]
    found = offloading.metrics().prefetched
    assert found["wasted"] == found["nbytes"] == 4096
    assert_equal(offloaded, reference)
    nothing_is_lost(offloaded)
    offloading.close()


def test_demanded_reads_are_done_in_the_order_in_which_they_began(qwen, monkeypatch):
    """The first piece of all ends after the second, which is another expert's: its expert comes
    first nevertheless."""
    offloaded, reference = (
        offload(qwen[1], "10MB", plan=Pools(), delays=DELAYS),
        open_model(qwen[0]),
    )
    reader, next_ready = offloaded.moelab.engine.pipeline.reader, Pipeline.next_ready
    fill, begun, come, under_way, most = reader.fill, [], [], set(), []
    second, lock = threading.Event(), threading.Lock()

    def reading(piece):
        with lock:
            begun.append((piece.of.layer, piece.of.expert))
            under_way.add(begun[-1])
            most.append(len(under_way))
            n = len(begun)
        assert n != 1 or second.wait(60)
        nbytes = fill(piece)
        with lock:
            under_way.discard((piece.of.layer, piece.of.expert))
        if n == 2:
            second.set()
        return nbytes

    def ready(*args):
        come.append(next_ready(*args))
        return come[-1]

    reader.fill = reading
    monkeypatch.setattr(Pipeline, "next_ready", ready)
    with torch.inference_mode():
        logits = offloaded(torch.tensor([[5, 9, 33, 12]])).logits
        assert torch.equal(logits, reference(torch.tensor([[5, 9, 33, 12]])).logits)
    assert list(dict.fromkeys(begun)) == come and max(most) == DEPTH and len(come) > 4
    assert check(offloaded.moelab.timeline) == []
    offloaded.moelab.close()


def test_interruptions_with_guesses_under_way(qwen):
    model, store = qwen
    before = set(threading.enumerate())
    offloaded, reference = (
        offload(store, "10MB", plan=Pools(2, 2, 1, 1), ahead=6, delays=DELAYS),
        open_model(model),
    )
    jitter(offloaded, random.Random(1))
    with Speculation(offloaded, make("predictor", "random", offloaded), "hint"):
        for point in range(0, 12, 3):
            generate_interrupted(offloaded, point)
            assert_equal(offloaded, reference, seed=point)
            nothing_is_lost(offloaded)
    offloaded.moelab.close()
    assert set(threading.enumerate()) <= before


def test_the_memory_for_it_is_part_of_the_budget(qwen):
    store = ExpertStore(qwen[1])
    sizes = Sizes.of(store)
    with pytest.raises(ValueError, match="ahead is -1"):
        offload(store, ahead=-1)
    with pytest.raises(ValueError, match="the least that works"):
        offload(store, 3 * sizes.in_flight, ahead=3, delays=DELAYS)
    offloaded = offload(store, 9 * sizes.in_flight, ahead=3, staging=1, delays=DELAYS)
    assert offloaded.moelab.engine.pipeline.slots.nbytes <= 9 * sizes.in_flight
    offloaded.moelab.close()


def test_a_prefill_needs_no_guesses(qwen):
    """Where a layer's tokens want all experts anyway, the next layer's are fetched without anybody
    announcing them."""
    model, store = qwen
    offloaded, reference = (
        offload(store, "10MB", plan=Pools(F=1), ahead=4, delays=DELAYS),
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
