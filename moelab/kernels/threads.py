"""The threads that kernels run on: those of torch's OpenMP, as two pools of threads would compete for
cores.

A team is (`TEAM`, how many threads): the address of a function with the parameters of OpenMP's
GOMP_parallel, and its number of threads."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch

from moelab.base.forks import in_children
from moelab.kernels.compile import c_library, kernel
from moelab.kernels.emit import together

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_pool = cache(ThreadPoolExecutor)
in_children(_pool.cache_clear)


@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint32)
def _parallel(function: int, job: int, threads: int, _: int) -> None:
    """GOMP_parallel by Python's threads, where no OpenMP is loaded."""
    running = [_pool().submit(_WORK(function), job) for _ in range(threads)]
    try:
        wait(running)
    finally:  # or a thread would use the job's memory after an interruption
        wait(running)


PYTHON_TEAM = ctypes.cast(_parallel, ctypes.c_void_p).value
TEAM = c_library("GOMP_parallel") or PYTHON_TEAM


def team() -> tuple[int, int]:
    """That of a call now."""
    return TEAM, torch.get_num_threads()


@kernel
def in_threads(team, work, threads, job):
    """`together`, for callers that are no kernels."""
    together(team, work, threads, job)
