"""How many threads compute: fewer of torch's, where others need the cores, and each of those by
itself.

A thread of an OpenMP team that has nothing to do spins for milliseconds before it sleeps. Where
computing is left to one thread so that experts can be loaded beside it, the rest of the team would
spin on the cores that it was to leave, and so would a team of the decoding thread's own."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress

import torch

from moelab.kernels.compile import c_library

#: addresses of functions of torch's OpenMP: to end a team's idle threads (5.0), to say how large
#: the teams of the calling thread are; 0 where there is none
PAUSE = c_library("omp_pause_resource_all")
SET = c_library("omp_set_num_threads")
SOFT = 1  # omp_pause_soft: what the program has set stays as it is
NICE = 5  # of threads that step back


def narrow(n: int) -> None:
    """Let torch compute with `n` threads. Beside one, none is left to spin: the next team begins
    with new threads, which takes tens of microseconds; but ten milliseconds where the caller has
    slept for two before (Linux 6.18): they begin on its core, where it spins until they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    if n == 1 < before and PAUSE:
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(PAUSE)(SOFT)


def alone(n: int = 1) -> None:
    """Let the calling thread, which is one of several, compute without a team, or with one of `n`;
    how many threads torch has stays."""
    torch.get_num_threads()  # which gives a new thread torch's number, once
    if SET:
        ctypes.CFUNCTYPE(None, ctypes.c_int)(SET)(n)


def step_back() -> None:
    """Let the calling thread decode beside a computing one: by itself, and with a lower priority,
    as an OpenMP team that lost a core to it would make all its threads wait."""
    alone()
    with suppress(AttributeError, OSError):  # only on Linux has a thread a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
