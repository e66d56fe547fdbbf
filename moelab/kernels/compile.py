"""Functions compiled by numba: without the GIL, cached on disk where a cache folder can be written.

What has to be compiled takes seconds a kernel, so a process says so, once.

numba takes a kernel from its cache as long as its own file has not changed, but a kernel contains those that it calls,
from other files too. So what is older than any of the files that a kernel may call is dropped.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import event

from moelab.progress import Notice

#: files that a kernel may call into → when they were changed: this folder's, where `tiles` has parts of kernels but
#: none of its own, then others in the order of their imports, each as its first kernel is seen
_FILES = {path: path.stat().st_mtime for path in Path(__file__).parent.glob("*.py")}
_ALIVE: list[Any] = []                  # compiled functions, which would take their code with them


class _Told(event.Listener):
    """Says that kernels are being compiled while one is that numba has not in its cache."""

    depth, notice = 0, Notice("compiling kernels (the first time only) …")      # one is compiled within another

    def on_start(self, begun: event.Event) -> None:
        self.depth += 1
        if Path(begun.data["dispatcher"].py_func.__code__.co_filename) in _FILES:
            self.notice.begin()

    def on_end(self, ended: event.Event) -> None:
        self.depth -= 1
        if not self.depth:
            self.notice.end()


event.register("numba:compile", _Told())


def kernel(function: Callable | None = None, **options: Any) -> Callable:
    """`function`, compiled when it is called with types that are new; a decorator, with or without numba's options."""
    if function is None:
        return lambda function: kernel(function, **options)
    return _cached(numba.njit, function, nogil=True, **options)


@lru_cache(maxsize=None)
def c_function(function: Callable) -> int:
    """The address of a function of one int64, compiled as one of C."""
    _ALIVE.append(_cached(numba.cfunc, function, types.void(types.int64)))
    return _ALIVE[-1].address


def c_library(name: str) -> int:
    """The address of a C function of a library that this process has loaded; 0 if there is none."""
    own = None if sys.platform == "win32" else ctypes.CDLL(None)
    return ctypes.cast(getattr(own, name, None), ctypes.c_void_p).value or 0


def _cached(compiler: Callable, function: Callable, *args: Any, **options: Any) -> Any:
    _drop_stale(Path(function.__code__.co_filename))
    try:
        return compiler(*args, cache=True, **options)(function)
    except RuntimeError:                # numba found no folder that it can write to: compile in every process
        return compiler(*args, **options)(function)


@lru_cache(maxsize=None)
def _drop_stale(file: Path) -> None:
    """Forget what is cached of a file's kernels if a file of kernels that was imported before has changed since."""
    if not file.exists():
        return
    _FILES[file] = file.stat().st_mtime
    newest = max(_FILES.values())
    for index in Path(numba.config.CACHE_DIR or file.parent / "__pycache__").rglob(f"{file.stem}.*.nbi"):
        with suppress(OSError):         # another process has dropped it already, or it is not ours to drop
            if index.stat().st_mtime < newest:
                index.unlink()
