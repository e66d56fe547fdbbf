"""Ctrl-C and `cancel()` end a generation between two layers: what is in memory stays, and the next
generation works and is exact."""

import faulthandler
import os
import random
import signal
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch

from moelab import convert, open_model
from moelab.base.registry import make
from moelab.cache.pools import Pools
from moelab.models import plug
from moelab.offloading.engine import Cancelled
from moelab.offloading.offload import offload
from moelab.speculate import Speculation
from tests.depth import depth
from tests.models import tiny
from tests.offloading.test_offload import assert_equal, generate, jitter, threads

#: how a model is set up: (codec, mode of speculation, options of `offload`)
SETUPS = [
    ("raw", None, {}),
    ("huffman", None, {"plan": Pools(2, 2, 1, 1), "cache": "zipmoe", "workers": 2}),
    ("zstd-huffman", "hint", {"plan": Pools(F=3), "ahead": 4, "cache": "marking"}),
    ("huffman", "speculative", {"plan": Pools(2, 1, 1, 0), "ahead": 8, "cache": "lfu"}),
]


@pytest.fixture(autouse=True)
def pythons_own_handler():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@contextmanager
def set_up(folder, codec, mode, options):
    """(an offloaded model, one that must give the same)."""
    reference = open_model(folder / "model")
    with ExitStack() as stack:
        model = offload(folder / codec, "10MB", **({"plan": Pools(F=4)} | options))
        stack.callback(model.moelab.close)
        if mode:
            stack.enter_context(Speculation(model, make("predictor", "router", model), mode))
        if mode == "speculative":
            stack.enter_context(
                Speculation(reference, make("predictor", "router", reference), mode)
            )
        yield model, reference
    assert not threads()


@contextmanager
def interrupted_by_a_timer(seconds):
    """SIGINT comes once, so many seconds after the block has begun, perhaps after its end."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        with suppress(KeyboardInterrupt):
            timer.join()
            time.sleep(1e-4)


@pytest.mark.parametrize("codec, mode, options", SETUPS)
def test_ctrl_c_at_any_time(folder, codec, mode, options):
    chance, hits = random.Random(0), 0
    with set_up(folder, codec, mode, options) as (model, reference):
        jitter(model, chance)
        assert_equal(model, reference, new=3)
        start = time.perf_counter()
        generate(model, new=3)
        longest, before = time.perf_counter() - start, torch.get_num_threads()
        for seed in range(depth(4, 500)):
            queue = model.moelab.engine.loader.queue
            with watched():
                with suppress(KeyboardInterrupt), interrupted_by_a_timer(chance.random() * longest):
                    try:
                        generate(model, seed=seed, batch=1 + seed % 2, new=3)
                    except KeyboardInterrupt:
                        hits += 1
                assert torch.get_num_threads() == before
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
                assert_equal(model, reference, seed=seed % 4, new=3)
            assert model.moelab.engine.loader.queue is queue  # and so what it holds
            assert not model.moelab.cancel()
    assert hits


def ending(model, how, at=3):
    """Calls `how` while the model runs its layer number `at`; the numbers of the layers that ran."""
    engine, ran = model.moelab.engine, []

    def executor(x, ids, weights, experts):
        ran.append(len(ran))
        if len(ran) == at:
            how()
        return engine(x, ids, weights, experts)

    plug(model, engine=executor)
    return ran


def test_ctrl_c_comes_between_two_layers_and_keeps_what_is_in_memory(folder):
    with set_up(folder, "raw", None, {"plan": Pools(F=16)}) as (model, reference):
        for seed in range(4):
            assert_equal(model, reference, seed=seed, new=3)
        before = dict(model.moelab.engine.loader.queue.held)

        def twice():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1e-3)

        ran = ending(model, twice)
        with pytest.raises(KeyboardInterrupt):
            generate(model, seed=1)
        assert len(ran) == 3 and len(before) >= 12
        assert model.moelab.engine.loader.queue.held.keys() >= before.keys()
        plug(model, engine=model.moelab.engine)
        assert_equal(model, reference, seed=9, new=3)


def test_another_handler_and_other_threads_are_left_alone(folder):
    got = []
    before = signal.signal(signal.SIGINT, lambda *_: got.append("mine"))
    try:
        with set_up(folder, "raw", None, {}) as (model, reference):
            ending(model, lambda: os.kill(os.getpid(), signal.SIGINT))
            generate(model, new=3)
            assert got == ["mine"]
            signal.signal(signal.SIGINT, signal.default_int_handler)
            plug(model, engine=model.moelab.engine)
            thread = threading.Thread(target=generate, args=(model,))
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
            thread.join()
            assert_equal(model, reference, new=3)
    finally:
        signal.signal(signal.SIGINT, before)


def test_cancel_ends_the_generations_that_run_and_nothing_else(folder):
    with set_up(folder, "raw", None, {}) as (model, reference):
        assert not model.moelab.cancel()  # nothing runs
        ran, ended = ending(model, lambda: None), []

        def run():
            try:
                generate(model, new=400)
            except Cancelled as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while len(ran) < 6:
            time.sleep(1e-3)
        assert model.moelab.cancel()
        thread.join(60)
        assert ended and not model.moelab.cancel()
        assert_equal(model, reference, seed=1, new=2)
