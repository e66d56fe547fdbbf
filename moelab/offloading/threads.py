"""How many threads torch computes with: one for a while, where other threads need the cores.

A thread of an OpenMP team that has nothing to do spins for milliseconds before it sleeps. Where computing is left to
one thread so that experts can be decoded beside it, the rest of the team would spin on the cores that it was to leave.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moelab.kernels.compile import c_library

#: address of the function of torch's OpenMP (5.0) that ends a team's idle threads; 0 where there is none
PAUSE = c_library("omp_pause_resource_all")
SOFT = 1                                        # omp_pause_soft: what the program has set stays as it is


def narrow(n: int) -> None:
    """Let torch compute with `n` threads. Beside one, none is left to spin: the next team begins with new threads,
    which takes tens of microseconds. Callers keep the number that it had before: Ctrl-C may come at any line."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    if n == 1 < before and PAUSE:
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(PAUSE)(SOFT)


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Torch computes with so many threads."""
    before = torch.get_num_threads()
    try:
        narrow(n)
        yield
    finally:
        torch.set_num_threads(before)
