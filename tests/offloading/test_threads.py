"""Fewer threads for torch: as many as are said, none that idles beside one, and all of them
back."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moelab.offloading import threads
from moelab.offloading.threads import narrow

TASKS = Path("/proc/self/task")
MATRIX = torch.arange(256.0 * 256).reshape(256, 256).remainder(7)


@pytest.fixture
def three():
    """A team of three, which has computed."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    spread()
    yield
    torch.set_num_threads(before)


def spread():
    """A sum that torch gives to all of its threads."""
    return (MATRIX[None] * torch.arange(16.0)[:, None, None]).sum()


def running(fewer_than):
    """How many threads this process has, as soon as they are so few; ended ones are there for a
    moment."""
    deadline = time.monotonic() + 5
    while (found := len(list(TASKS.iterdir()))) >= fewer_than and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.skipif(
    sys.platform != "linux" or not threads.PAUSE,
    reason="no threads to count, or no way to end them",
)
def test_beside_one_thread_none_is_left_to_spin(three):
    total, team = spread(), len(list(TASKS.iterdir()))
    narrow(2)
    assert len(list(TASKS.iterdir())) == team  # of two, both are wanted soon
    torch.set_num_threads(3)
    narrow(1)
    assert running(fewer_than=team - 1) == team - 2
    assert spread() == total
    torch.set_num_threads(3)
    assert spread() == total and len(list(TASKS.iterdir())) == team  # a new team


@pytest.mark.skipif(
    sys.platform != "linux" or not threads.SET, reason="no threads to count, or none that are fewer"
)
@pytest.mark.parametrize("prepare", [threads.alone, threads.step_back])
def test_a_thread_alone_computes_without_a_team(prepare, three):
    def work():
        prepare()
        return torch.get_num_threads(), spread(), len(list(TASKS.iterdir()))

    total, team = spread(), len(list(TASKS.iterdir()))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == (1, total, team + 1)
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as pool:  # nor is it so for threads that come later
        assert pool.submit(torch.get_num_threads).result() == 3


def test_where_openmp_cannot_be_told_a_thread_computes_as_before(three, monkeypatch):
    monkeypatch.setattr(threads, "SET", 0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (threads.alone(), torch.get_num_threads())[1]).result() == 3


def test_where_openmp_cannot_pause_threads_are_only_fewer(three, monkeypatch):
    monkeypatch.setattr(threads, "PAUSE", 0)
    narrow(1)
    assert torch.get_num_threads() == 1
    narrow(3)
    assert torch.get_num_threads() == 3


def test_an_error_inside_gives_the_threads_back(three):
    with pytest.raises(KeyError), threads.threads(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 3


def test_an_interrupt_while_they_become_fewer_gives_the_threads_back(three, monkeypatch):
    def interrupted(n):
        torch.set_num_threads(n)
        raise KeyboardInterrupt

    monkeypatch.setattr(threads, "narrow", interrupted)
    with pytest.raises(KeyboardInterrupt), threads.threads(1):
        pass
    assert torch.get_num_threads() == 3
