"""Ctrl-C at any line of the engine: the next generation works and is exact, and nothing hangs.

Lines are found in two ways: a signal that comes after a random time, as a person's does, and a
trace function that raises at every line in turn, which finds each window without luck."""

import faulthandler
import gc
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache
from itertools import count, takewhile
from pathlib import Path

import pytest
import torch

import moelab
from moelab import convert, open_model
from moelab.cache.pools import Pools
from moelab.offloading.engine import Cancelled
from moelab.offloading.load_queue import LoadQueue
from moelab.offloading.offload import offload
from moelab.registry import make
from moelab.speculate import Speculation
from tests.depth import depth
from tests.models import tiny
from tests.offloading.test_offload import DELAYS, assert_equal, generate, jitter, threads

PACKAGE = Path(moelab.__file__).parent
TRACED = tuple(
    str(PACKAGE / part)
    for part in ("offloading", "schedule", "cache", "speculate", "models/seam.py")
)
#: how a model is set up: (codec, mode of speculation, options of `offload`)
SETUPS = [
    ("raw", None, {}),
    ("huffman", None, {"plan": Pools(2, 2, 1, 1), "cache": "zipmoe", "workers": 2}),
    ("zstd-huffman", "hint", {"plan": Pools(F=3), "ahead": 4, "cache": "marking"}),
    (
        "huffman",
        "speculative",
        {"plan": Pools(2, 1, 1, 0), "ahead": 8, "workers": 2, "cache": "lfu"},
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model's checkpoint, and its store with each codec."""
    folder = tmp_path_factory.mktemp("interrupted")
    tiny.save("qwen3_moe", folder / "model", torch.bfloat16)
    for codec in {codec for codec, _, _ in SETUPS}:
        convert(folder / "model", folder / codec, codec=codec)
    return folder


@contextmanager
def watched(seconds=300):
    """Ends the process with the stacks of all threads if this hangs."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@lru_cache(maxsize=2)
def resident(folder, mode):  # one for each mode: what it generated is remembered, see `of_eager`
    return open_model(folder / "model")


@contextmanager
def set_up(folder, codec, mode, options):
    """(an offloaded model, one that must give the same)."""
    reference = resident(folder, mode)
    with ExitStack() as stack:
        model = offload(folder / codec, "10MB", delays=DELAYS, **({"plan": Pools(F=4)} | options))
        stack.callback(model.moelab.close)
        if mode:
            stack.enter_context(Speculation(model, make("predictor", "router", model), mode))
        if mode == "speculative":
            stack.enter_context(
                Speculation(reference, make("predictor", "router", reference), mode)
            )
        yield model, reference
    assert not threads()


def in_order(model):
    """What must be true after a generation that was not interrupted."""
    offloading = model.moelab
    pipeline, queue = offloading.engine.pipeline, offloading.engine.pipeline.queue
    for kind in queue.free:
        taken = [one[kind] for one in queue.held.values() if kind in one]
        for load in (load for batch in queue.prefetched.values() for load in batch.loads.values()):
            taken += [slot for key, slot in load.slots.items() if key == kind and slot not in taken]
        assert not Counter(queue.free[kind] + taken) - Counter(range(pipeline.slots.count[kind])), (
            "given twice"
        )
    assert {key for key, one in queue.held.items() if "full" in one} >= set(
        key for key in queue.held if offloading.residency.state(key).value == "F"
    )
    assert len(offloading.forwards) == len(offloading.steps) == len(offloading.predictions)
    assert not offloading.cancel()
    assert len(threads()) == len(pipeline.threads)


@pytest.mark.stress
@pytest.mark.parametrize(
    "codec, mode, options", SETUPS, ids=lambda value: str(value) if value is None else None
)
def test_a_signal_at_any_time(folder, codec, mode, options):
    chance = random.Random(0)
    with set_up(folder, codec, mode, options) as (model, reference):
        jitter(model, chance)
        assert_equal(model, reference, new=3)
        longest, hit, before = 10.0, 0, torch.get_num_threads()
        for seed in takewhile(
            lambda seed: seed < depth(3, 250) or not hit, count()
        ):  # until one hits
            with watched():
                try:
                    if seed:
                        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, longest))
                    start = time.perf_counter()
                    generate(model, seed=seed, batch=1 + seed % 2, new=3)
                    longest = min(longest, time.perf_counter() - start)
                except KeyboardInterrupt:
                    hit += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert torch.get_num_threads() == before
                assert_equal(model, reference, seed=seed % 4, new=3)
                in_order(model)


@pytest.fixture(autouse=True)
def alarm_is_an_interrupt():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


class Lines:
    """Raises KeyboardInterrupt at the `point`-th line of the engine that this thread comes to; None
    only counts."""

    def __init__(self, point=None):
        self.point, self.count = point, 0

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.point:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        sys.settrace(self)

    def __exit__(self, *_):
        sys.settrace(None)


@pytest.mark.stress
@pytest.mark.parametrize(
    "codec, mode, options", SETUPS, ids=lambda value: str(value) if value is None else None
)
def test_an_interruption_at_any_line_of_a_generation(folder, codec, mode, options, monkeypatch):
    chance, count = random.Random(1), [2]  # torch's threads, of which there is one all the same
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: count.__setitem__(0, n))
    with set_up(folder, codec, mode, options) as (model, reference):
        model.moelab.engine.one_thread = True
        lines = Lines()
        with lines:
            generate(model, batch=1, new=3)
        points = range(1, lines.count)
        for point in sorted(chance.sample(points, min(depth(4, 4000), len(points)))):
            with watched():
                try:
                    with Lines(point):
                        generate(model, seed=point, batch=1, new=3)
                except KeyboardInterrupt:
                    assert count == [2], point
                assert_equal(model, reference, seed=point % 4, new=3)
                in_order(model)


@pytest.mark.parametrize("line", [1, 2, 3])
def test_an_interruption_while_torch_gets_its_threads_back(folder, line, monkeypatch):
    count = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: count.__setitem__(0, n))
    with set_up(folder, *SETUPS[0]) as (model, reference):
        engine, found = model.moelab.engine, []

        def widen():
            first = engine._threads is not None and not found
            found.extend([line] * first)
            with Lines(line) if first else nullcontext():
                type(engine).widen(engine)

        engine.one_thread, engine.widen = True, widen
        for seed in range(20):  # until a decode step finds the workers busy
            with watched(), suppress(KeyboardInterrupt):
                generate(model, seed=seed, batch=1, new=3)
            if found:
                break
        assert found and count == [2]
        assert_equal(model, reference, new=3)


@pytest.mark.stress
def test_an_interruption_at_any_line_of_recovering(folder):
    """Ctrl-C twice: in a generation, and again in whatever the next one does first."""
    chance = random.Random(2)
    with set_up(folder, *SETUPS[2]) as (model, reference):
        for _ in range(depth(6, 1000)):
            with watched():
                for longest in (1500, 120):
                    try:
                        with Lines(chance.randint(1, longest)):
                            generate(model, batch=1, new=3)
                    except KeyboardInterrupt:
                        pass
                assert_equal(model, reference, seed=chance.randint(0, 3), new=3)
                in_order(model)


@pytest.mark.stress
def test_an_interruption_while_a_model_is_opened_or_closed_leaves_no_thread(folder):
    chance = random.Random(3)
    lines = Lines()
    with lines:
        offload(folder / "huffman", 0.5, delays=DELAYS).moelab.close()
    for point in chance.sample(range(1, lines.count), min(depth(4, 400), lines.count - 1)):
        with watched():
            try:
                with Lines(point):
                    offload(folder / "huffman", 0.5, delays=DELAYS).moelab.close()
            except KeyboardInterrupt:
                pass
    for _ in range(depth(4, 100)):
        with watched():
            model = offload(folder / "huffman", 0.5, delays=DELAYS)
            generate(model, batch=1, new=2)
            try:
                with Lines(chance.randint(1, 40)):
                    model.moelab.close()
            except KeyboardInterrupt:
                pass
            model.moelab.close()
            assert not threads()
    del model
    gc.collect()
    assert not threads()


def test_what_was_cached_before_an_interruption_is_still_there(folder):
    """All but what the layer that was interrupted had under way: Ctrl-C in a notebook does not
    empty the cache."""
    with set_up(folder, "raw", None, {"plan": Pools(F=16)}) as (model, reference):
        for seed in range(4):
            assert_equal(model, reference, seed=seed, new=3)
        residency = model.moelab.residency
        before = {key for key in residency._state}
        for point in (400, 700, 1000):
            with pytest.raises(KeyboardInterrupt), Lines(point):
                generate(model, batch=1, new=3)
        model.moelab.engine._recover()
        assert len(before) >= 12 and before == {key for key in residency._state}
        assert_equal(model, reference, seed=9, new=3)


def test_a_thread_that_dies_ends_the_generation_with_its_error(folder, monkeypatch):
    """Whoever waits for it must not wait for ever."""
    with set_up(folder, "huffman", None, {"workers": 2}) as (model, reference):
        generate(model)
        done, calls = LoadQueue._done, iter(range(10**6))

        def broken(self, load, error):
            if next(calls) == 3:
                raise MemoryError("no memory for a dictionary")
            return done(self, load, error)

        monkeypatch.setattr(LoadQueue, "_done", broken)
        model.moelab.residency.clear()
        model.moelab.engine._sound = False
        with watched(), pytest.raises(MemoryError, match="a dictionary"):
            generate(model)
        monkeypatch.undo()
        assert_equal(model, reference)
        in_order(model)


def test_a_model_that_is_dropped_within_one_of_its_own_threads_is_closed(folder):
    """The garbage collector runs in any thread: there, it must not wait for the thread that it runs
    in."""
    model = offload(folder / "huffman", 0.5, delays=DELAYS)
    generate(model, batch=1, new=2)
    engine = model.moelab.engine
    reader, read, done = engine.pipeline.reader, engine.pipeline.reader.fill, threading.Event()

    def closing(*args, **kwargs):
        engine.closed = True
        engine.pipeline.end()
        done.set()
        return read(*args, **kwargs)

    reader.fill = closing
    engine.residency.clear()
    engine._sound = False
    with watched(), pytest.raises(RuntimeError, match="closed"):
        generate(model, batch=1, new=2)
    assert done.wait(30)
    deadline = time.monotonic() + 30
    while threads() and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert not threads() and engine.pipeline.slots is None


def test_cancelling_after_an_interruption(folder):
    """An interruption leaves nothing that a later `cancel` would take for a generation that
    runs."""
    with set_up(folder, "raw", None, {}) as (model, reference):
        for point in range(1, 60, depth(15, 1)):
            with pytest.raises(KeyboardInterrupt), Lines(point):
                generate(model, batch=1, new=2)
            model.moelab.cancel()  # nothing runs
            assert_equal(model, reference, seed=1, new=2)
        jitter(model, random.Random(0))
        ended = []

        def run():
            try:
                generate(model, new=100)
            except Cancelled as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        model.moelab.reset()
        thread.start()
        while not model.moelab.forwards:
            time.sleep(1e-3)
        assert model.moelab.cancel()
        thread.join(60)
        assert ended
        assert_equal(model, reference, seed=1, new=2)
