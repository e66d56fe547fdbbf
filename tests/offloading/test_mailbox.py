"""The mailbox between a GPU and the CPU: the GPU's kernels (in Triton's interpreter where there is
no GPU) and the thread that answers, against a naive loop and against each other's slow doubles."""

import contextlib
import os
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")
pytest.importorskip("triton")
from moelab.kernels.gates import SILU
from moelab.kernels.products import KINDS, Matrices
from moelab.offloading.host import Lying, Worker
from moelab.offloading.mailbox import Mailbox
from moelab.offloading.mailbox_triton import post, take
from tests.gpus import compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
L, E, K, H, I = 3, 5, 2, 48, 16
FP32 = KINDS[torch.float32]


class Experts:
    """Random ones, in one memory."""

    def __init__(self, missing=()):
        self.memory = torch.randn(L, E, 3 * I * H) / 8
        rows = np.zeros((2, L, E, 4), np.int64)
        rows[1, ..., 0] = 4 * 2 * I * H
        places = np.arange(L * E).reshape(L, E)
        home = self.memory.data_ptr() + 4 * 3 * I * H * places
        for key in missing:
            home[key] = 0
        up, down = (Matrices((FP32,) * L, *of) for of in ((rows[0], 2 * I), (rows[1], H)))
        self.lying = Lying(up, down, SILU, rows, np.array([[1, 0, 0, 0]] * 2), home)

    def naive(self, layer, x, away, w):
        y = torch.zeros(H, dtype=torch.float64)
        for e, scale in zip(away, w.tolist()):
            if e >= 0:
                up, down = self.memory[layer, e].double().split([2 * I * H, H * I])
                g, u = (up.view(2 * I, H) @ x[0].double()).chunk(2)
                y += scale * (down.view(H, I) @ (torch.nn.functional.silu(g) * u))
        return y


class GPU:
    """Tokens of the kernels' side; pauses are seconds between its steps."""

    def __init__(self, box, pauses=()):
        self.box, self.pauses = box, list(pauses)

    def rest(self):
        if self.pauses:
            time.sleep(self.pauses.pop())

    def layer(self, number, layer, away):
        """(what it has given to the CPU, what it has got for it)."""
        x, w = torch.randn(1, H), torch.rand(K)
        out = torch.zeros(1, H, device=DEVICE)
        there = torch.tensor(away, device=DEVICE)
        count = torch.tensor([number], device=DEVICE)
        self.rest()
        post(self.box, count, layer, x.to(DEVICE), there, w.to(DEVICE))
        self.rest()
        take(self.box, count, layer, there, out)
        return (layer, x, away, w), out.cpu()[0]


@pytest.fixture
def worker():
    worker = Worker(1)
    yield worker
    worker.close()


def mailbox():
    return Mailbox(L, K, H, torch.float32, DEVICE)


pauses = st.lists(st.sampled_from([0, 0, 1e-4, 3e-3]), max_size=30)
choices = st.lists(st.integers(-1, E - 1), min_size=K, max_size=K, unique_by=lambda e: e + (e < 0))
tokens = st.lists(st.lists(choices, min_size=L, max_size=L), min_size=1, max_size=4)


@given(tokens, pauses, pauses, st.integers(1, 5))
def test_each_layer_gets_the_sum_of_its_own_experts(tokens, between, before, step):
    """Whichever side is late; the thread, as it is still at something else when a token begins."""
    experts, box, worker = Experts(), mailbox(), Worker(1)
    gpu = GPU(box, between)
    for number, layers in enumerate(tokens, 1):
        worker.submit(time.sleep, before.pop() if before else 0)
        with worker.token(box, experts.lying, number * step) as events:
            got = [gpu.layer(number * step, layer, away) for layer, away in enumerate(layers)]
        for asked, found in got:
            torch.testing.assert_close(found.double(), experts.naive(*asked), rtol=1e-4, atol=1e-4)
        computed = [(event.layer, event.expert) for event in events]
        assert computed == [(i, e) for i, of in enumerate(layers) for e in of if e >= 0]
        assert all(a.end <= b.start + 1e-9 for a, b in zip(events, events[1:]))
    worker.close()


@given(tokens, pauses, pauses)
def test_nothing_is_read_before_it_is_whole(tokens, slow_gpu, slow_thread):
    """Each side against a double that writes in pieces, and the word that stands for them last."""
    experts, box, worker = Experts(), mailbox(), Worker(1)
    halves = [slice(0, H // 2), slice(H // 2, H)]

    def rest(pauses):
        time.sleep(pauses.pop() if pauses else 0)

    def double(number):
        """The thread's: twice x."""
        for layer, away in enumerate(tokens[number - 1]):
            if max(away) >= 0:
                while int(box.view("posted")) != number * L + layer:
                    time.sleep(1e-5)
                y, x = box.view("y", torch.float32, H), box.view("x", torch.float32, H)
                for half in halves:
                    y[half] = 2 * x[half]
                    rest(slow_thread)
                box.view("done")[0] = number * L + layer

    for number, layers in enumerate(tokens, 1):
        thread = threading.Thread(target=double, args=[number])
        thread.start()
        for layer, away in enumerate(layers):
            (_, x, *_), found = GPU(box).layer(number, layer, away)
            assert torch.equal(found, 2 * x[0] if max(away) >= 0 else torch.zeros(H))
        thread.join()
        box.end(number)
    box = mailbox()
    for number, layers in enumerate(tokens, 1):
        with worker.token(box, experts.lying, number):
            for layer, away in enumerate(layers):
                if max(away) >= 0:
                    x, w = torch.randn(1, H), torch.rand(K)
                    for half in halves:
                        box.view("x", torch.float32, H)[half] = x[0, half]
                        rest(slow_gpu)
                    box.view("away", n=K)[:] = torch.tensor(away)
                    box.view("w", torch.float32, K)[:] = w
                    box.view("posted")[0] = number * L + layer
                    while int(box.view("done")) != number * L + layer:
                        time.sleep(1e-5)
                    y = box.view("y", torch.float32, H).double()
                    wanted = experts.naive(layer, x, away, w)
                    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    worker.close()


def test_a_dead_thread_is_an_error_and_nobody_waits_for_it_again():
    box = mailbox()
    for layer, patience in enumerate((10**9, 50, 10**9)):
        box.patience = patience
        _, out = GPU(box).layer(1, layer, [2, -1] if layer else [-1, -1])
        assert not out.any()
    with pytest.raises(RuntimeError, match="layer 1 of token 1"):
        box.end(1)


def test_an_error_of_the_thread_is_raised_and_ends_the_waiting(worker):
    experts, box = Experts(missing=[(1, 4)]), mailbox()
    gpu = GPU(box)
    with (
        pytest.raises(RuntimeError, match=r"layer 1 of token 7 .*\[4, 0\]"),
        worker.token(box, experts.lying, 7),
    ):
        assert gpu.layer(7, 0, [4, 0])[1].any()
        assert not gpu.layer(7, 1, [4, 0])[1].any()
        assert not gpu.layer(7, 2, [4, 0])[1].any()

    class Broken:
        def given(self, dtype):
            if threading.current_thread() is threading.main_thread():
                return Experts().lying.given(dtype)
            raise MemoryError("none is left")

    for lying, wanted in (
        (experts.lying, "stopped"),  # for good
        (Broken(), "none is left"),
    ):
        with pytest.raises((RuntimeError, MemoryError), match=wanted):  # noqa: SIM117
            with worker.token(box, lying, 8):
                gpu.layer(8, 0, [1, 2])
        box = gpu.box = mailbox()
    with worker.token(box, Experts().lying, 1):  # with a new one it goes on
        assert gpu.layer(1, 0, [1, 2])[1].any()


def test_ids_of_no_expert_and_letters_of_another_token_are_refused(worker):
    for number, away in ((2, [E, 0]), (2, [10**15, 0]), (3, [0, 1])):
        box = mailbox()
        with pytest.raises(RuntimeError, match="layer 1 of token 2"):  # noqa: SIM117
            with worker.token(box, Experts().lying, 2):
                GPU(box).layer(number, 1, away)
    box = mailbox()
    with worker.token(box, Experts().lying, 2):
        pass


@pytest.mark.parametrize("state", ["before", "waiting", "busy", "between"])
@pytest.mark.parametrize("how", ["stop", "close", "error"])
def test_what_ends_a_token_ends_it_in_any_state(how, state):
    """Before something is posted, while the GPU waits for a thread that is at something else, while
    that begins, and between two layers."""
    worker, box, free = Worker(1), mailbox(), threading.Event()

    def end():
        free.set()
        if how == "error":
            raise ZeroDivisionError
        {"stop": box.stop, "close": worker.close}[how]()

    def later():
        free.set() if state == "busy" else time.sleep(0.02)
        with contextlib.suppress(ZeroDivisionError):
            end()
        box.stop() if how == "error" else None

    if state in ("waiting", "busy"):
        worker.submit(free.wait)
    with pytest.raises((ZeroDivisionError, RuntimeError)):  # noqa: SIM117
        with worker.token(box, Experts().lying, 1):
            if state == "before":
                end()
            timer = threading.Timer(0.02, later)
            if state in ("waiting", "busy"):
                timer.start()
            GPU(box).layer(1, 0, [1, 2])
            if state == "between":
                end()
            GPU(box).layer(1, 1, [1, 2])
            if state in ("waiting", "busy"):
                timer.join()
                box.check()
    worker.close()


def test_the_thread_sleeps_between_tokens_and_when_a_gpu_is_slow(worker):
    def used():
        return worker.submit(time.thread_time).result()

    before = used()
    time.sleep(0.2)
    assert used() - before < 0.05
    with worker.token(mailbox(), Experts().lying, 1):
        time.sleep(0.3)
    assert used() - before < 0.2


@pytest.mark.skipif(DEVICE == "cuda" or not hasattr(os, "fork"), reason="no process can be forked")
def test_a_forked_process_has_a_thread_of_its_own(worker):
    experts, box = Experts(), mailbox()
    with worker.token(box, experts.lying, 1):
        GPU(box).layer(1, 0, [1, 2])
        if not (child := os.fork()):
            status = 1
            try:
                mine = mailbox()
                with worker.token(mine, experts.lying, 2):
                    asked, got = GPU(mine).layer(2, 0, [1, 2])
                status = int(not torch.allclose(got.double(), experts.naive(*asked), atol=1e-4))
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert GPU(box).layer(1, 1, [1, 2])[1].any()


COMPILED = """
from moelab.offloading.mailbox import Mailbox
from moelab.offloading.mailbox_triton import post, take

box, count, x = Mailbox(36, 4, 2880, torch.bfloat16), torch.tensor([1]), torch.zeros(1, 2880).bfloat16()
away, w = torch.zeros(4, dtype=torch.int64), torch.zeros(4).bfloat16()
post(box, count, 3, x, away, w)
take(box, count, 3, away, x)
"""


def test_words_are_loaded_and_stored_as_the_protocol_wants_it(tmp_path):
    made = compiled(COMPILED, tmp_path)
    post, take = made["_post_kernel"], made["_take_kernel"]
    assert post.count("st.release.sys") == 1 and "ld.acquire" not in post
    letter, _, word = post.partition("st.release.sys")
    assert "st.global" in letter and "bar." in letter and "st.global" not in word
    *_, looks, answer = take.split("ld.acquire.sys")
    assert "ld.global.v4" in answer and "ld.global.v4" not in looks
    assert "atom." not in post + take
