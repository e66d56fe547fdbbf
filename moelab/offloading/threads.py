"""How many threads compute: one of torch's for a while, where others need the cores, and each of
those by itself.

A thread of an OpenMP team that has nothing to do spins for milliseconds before it sleeps. Where
computing is left to one thread so that experts can be loaded beside it, the rest of the team would
spin on the cores that it was to leave, and so would a team of the decoding thread's own."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from moelab.kernels.compile import c_library
from moelab.models.experts import seam_of
from moelab.models.seam import discover
from moelab.store.layout import ExpertStore
from moelab.store.reader import StoreExperts

#: addresses of functions of torch's OpenMP: to end a team's idle threads (5.0), to say how large
#: the teams of the calling thread are; 0 where there is none
PAUSE, SET = c_library("omp_pause_resource_all"), c_library("omp_set_num_threads")
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


def alone() -> None:
    """Let the calling thread, which is one of several, compute without a team; how many threads
    torch has stays."""
    torch.get_num_threads()  # which gives a new thread torch's number, once
    if SET:
        ctypes.CFUNCTYPE(None, ctypes.c_int)(SET)(1)


def step_back() -> None:
    """Let the calling thread decode beside a computing one: by itself, and with a lower priority,
    as an OpenMP team that lost a core to it would make all its threads wait."""
    alone()
    with suppress(AttributeError, OSError):  # only on Linux has a thread a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Torch computes with so many threads."""
    before = torch.get_num_threads()
    try:
        narrow(n)
        yield
    finally:
        torch.set_num_threads(before)


def one_thread_pays(store: ExpertStore, model: Any) -> bool:
    """Whether a token's experts may be computed by one thread while others are decoded, which needs
    a core: whether that gives the same bits, tried on 8 tokens, as no library promises it."""
    if model.device.type != "cpu" or torch.get_num_threads() == 1:
        return False
    experts, results = seam_of(discover(model)[0].experts), []
    x = torch.randn(8, 1, store.spec.H, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    with StoreExperts(store, model.dtype) as source, torch.inference_mode():
        weights = source(0, 0)
        for n in (1, torch.get_num_threads()):
            with threads(n):
                results.append(torch.stack([experts.ffn(row, weights) for row in x]))
    return torch.equal(*results)
