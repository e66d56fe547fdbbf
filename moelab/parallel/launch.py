"""Processes that run together: under torchrun, or started here from a notebook or a script.

    torchrun --nproc-per-node 2 script.py       with connect(): …           every rank runs the script
    launch(function, 2, arguments…)             → [result of rank 0, result of rank 1]

Ranks communicate through gloo, or through NCCL where each has a GPU. A rank that is killed closes its connections, so
the others' next exchange fails at once with `PeerLost`, and torchrun or `launch` ends them. Left out: elastic restarts.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: what takes seconds to import: ranks are forked from a process that has imported those of them that this one has
HEAVY = ("torch.distributed", "numba", "transformers.modeling_utils", "transformers.generation.utils")


class PeerLost(RuntimeError):
    """Another rank of the run is gone or no longer answers."""


@contextmanager
def connect(timeout: float = 600, init_method: str = "env://") -> Iterator[torch.device]:
    """Join the processes that torchrun or `launch` started; yields this rank's device.

    timeout : seconds that an exchange may wait for a rank that is alive but silent; a dead one is noticed at once.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise RuntimeError("this process is alone: start it with `torchrun --nproc-per-node N …`, or call "
                           "moelab.parallel.launch(function, N)")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, here = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= here and dist.is_nccl_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    # transformers imports this one while it opens a model, and the defaults of its functions would then be the group.
    importlib.import_module("torch.distributed.nn")
    dist.init_process_group("nccl" if gpu else "gloo", init_method, timedelta(seconds=timeout), size, rank)
    try:
        yield device
        try:
            dist.barrier()          # no rank closes its connections while others still use them
        except RuntimeError as error:
            raise PeerLost(f"rank {rank} was done, but another rank is gone") from error
    except BaseException as error:
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        raise
    finally:
        # The group's threads must end before the interpreter does, or they abort the process; they end when nothing
        # refers to the group: no cycle and no traceback.
        dist.destroy_process_group()
        gc.collect()


def launch(function: Callable[..., Any], n: int, *arguments: Any, threads: int | None = None) -> list[Any]:
    """Run `function(*arguments)`, of an importable module, in n connected processes here; returns each rank's result.

    threads : torch's in each rank; None shares the cores out. RuntimeError : a rank raised or was killed.
    """
    if n < 1:
        raise ValueError(f"n is {n}; at least one process must run")
    try:
        pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{function!r} and its arguments cannot be sent to other processes ({error}); put the "
                         f"function into a .py file") from error
    # elsewhere than on Linux a process that was forked may not use the system's libraries
    context = get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload([name for name in HEAVY if name in sys.modules])
    with tempfile.TemporaryDirectory(prefix="moelab-", ignore_cleanup_errors=True) as folder:
        ranks, pipes = [], []
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            ranks.append(context.Process(
                target=_rank, args=(function, arguments, rank, n, Path(folder) / "rendezvous",
                                    threads or max(1, (os.cpu_count() or 1) // n), dict(os.environ), theirs),
                daemon=True))
            pipes.append(ours)
            ranks[-1].start()
            theirs.close()              # so that the pipe ends when the rank does
        try:
            return _collect(ranks, pipes)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()


def _collect(ranks: list[Any], pipes: list[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, tuple[int, str]] = {}     # rank → (how sure it is the cause, what happened)
    waiting, until = dict(enumerate(pipes)), None
    while waiting and (until is None or time.monotonic() < until):
        ready = connection.wait(waiting.values(), None if until is None else max(0.0, until - time.monotonic()))
        for rank in [r for r, pipe in waiting.items() if pipe in ready]:
            try:
                ok, value = pickle.loads(waiting[rank].recv_bytes())
            except EOFError:
                ranks[rank].join()
                ok, value = False, (2, _death(ranks[rank].exitcode))
            (results if ok else errors)[rank] = value
            del waiting[rank]
        if errors and until is None:
            until = time.monotonic() + 1.0      # others that fail now may name the cause
    if errors:
        rank, (_, what) = max(errors.items(), key=lambda item: item[1][0])
        raise RuntimeError(f"rank {rank} of {len(ranks)} {what}; the other ranks were ended")
    return [results[rank] for rank in range(len(ranks))]


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code} before it had a result"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + ("; the system does that when memory runs out" if name == "SIGKILL" else "")


def _rank(function: Callable[..., Any], arguments: tuple, rank: int, n: int, rendezvous: Path, threads: int,
          environment: dict[str, str], pipe: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(threads)
    try:
        with connect(init_method=rendezvous.as_uri()):
            result = True, function(*arguments)
        message = pickle.dumps(result)
    except BaseException as error:
        lost = isinstance(error, PeerLost)
        message = pickle.dumps((False, (0 if lost else 1, f"raised {type(error).__name__}: {error}")))
        if not lost:
            traceback.print_exc()
    pipe.send_bytes(message)
    pipe.close()


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)
