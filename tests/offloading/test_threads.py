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
linux = pytest.mark.skipif(
    sys.platform != "linux" or not (threads.PAUSE and threads.SET), reason="no threads to count"
)


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


@linux
def test_beside_one_thread_none_is_left_to_spin(three):
    total, team = spread(), len(list(TASKS.iterdir()))
    narrow(1)
    deadline = time.monotonic() + 5  # ended threads are there for a moment
    while len(list(TASKS.iterdir())) >= team - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(TASKS.iterdir())) == team - 2 and spread() == total


@linux
@pytest.mark.parametrize("prepare", [threads.alone, threads.step_back])
def test_a_thread_alone_computes_without_a_team(prepare, three):
    def work():
        prepare()
        return torch.get_num_threads(), spread(), len(list(TASKS.iterdir()))

    total, team = spread(), len(list(TASKS.iterdir()))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == (1, total, team + 1)
    assert torch.get_num_threads() == 3
