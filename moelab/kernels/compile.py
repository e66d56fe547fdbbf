"""Functions compiled by numba: without the GIL, cached on disk where a cache folder can be written.

What has to be compiled takes seconds a kernel, so a process says so, once.

numba takes a kernel from its cache as long as its own file has not changed, but a kernel contains
those that it calls, from other files too. So here the key is the content of this folder's files and
of those beside its own: a kernel calls none of a third folder. A cache that is damaged, full or not
to be written costs the time of compiling, and no more."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import caching
from numba.core.ccallback import CFunc

_ALIVE: list[Any] = []  # compiled functions, which would take their code with them


def kernel(function: Callable | None = None, **options: Any) -> Callable:
    """`function`, compiled when it is called with types that are new; a decorator, with or without
    numba's options."""
    if function is None:
        return partial(kernel, **options)
    dispatcher = numba.njit(nogil=True, **options)(function)
    dispatcher._cache = _cache_of(function)
    return dispatcher


@cache
def c_function(function: Callable) -> int:
    """The address of a function of one int64, compiled as one of C."""
    signature = (types.int64,), types.void
    compiled = CFunc(function, signature, locals={}, options={})  # as numba.cfunc makes it
    compiled._cache = _cache_of(function)
    compiled.compile()
    _ALIVE.append(compiled)
    return compiled.address


def c_library(name: str) -> int:
    """The address of a C function of a library that this process has loaded; 0 if there is none."""
    own = None if sys.platform == "win32" else ctypes.CDLL(None)
    return ctypes.cast(getattr(own, name, None), ctypes.c_void_p).value or 0


class _Cache(caching.FunctionCache):
    """numba's cache of one function as its sources are now; it never raises."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        self._cache_file = caching.IndexDataCacheFile(
            self._cache_path, self._impl.filename_base, _sources(function)
        )

    def load_overload(self, *args: Any) -> Any:
        found = None
        try:
            found = super().load_overload(*args)
        except Exception:  # whatever unpickling makes of damage
            with suppress(OSError):
                self.flush()
        if found is None:
            _announce()
        return found

    def save_overload(self, *args: Any) -> None:
        try:
            super().save_overload(*args)
        except Exception as error:  # of the disk, or of pickling
            _not_kept(self._cache_path, getattr(error, "strerror", type(error).__name__))


def _cache_of(function: Callable) -> Any:
    try:
        return _Cache(function)
    except (RuntimeError, OSError):
        _not_kept(
            str(Path(function.__code__.co_filename).parent),
            "there is no folder that can be written",
        )
        _announce()
        return caching.NullCache()


def _sources(function: Callable) -> str:
    """A digest of the files that have the kernels that a function may call."""
    folders = Path(__file__).parent, Path(function.__code__.co_filename).parent
    return "".join(map(_folder_digest, folders))


@cache
def _folder_digest(folder: Path) -> str:
    return sha256(
        b"".join(sha256(file.read_bytes()).digest() for file in sorted(folder.glob("*.py")))
    ).hexdigest()


@cache  # so it is said once
def _announce() -> None:
    print("compiling kernels (the first time only) …", file=sys.stderr, flush=True)


@cache
def _not_kept(folder: str, why: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({why}), so each process compiles its own; set "
        f"NUMBA_CACHE_DIR to a folder that can be written",
        stacklevel=1,
    )
