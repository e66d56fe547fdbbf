"""Processes that run together: under torchrun, or started here from a notebook or a script.

    torchrun --nproc-per-node 2 script.py       with connect(): …           every rank runs the script
    launch(function, 2, arguments…)             → [result of rank 0, result of rank 1]

Ranks communicate through gloo, or through NCCL where each has a GPU. A rank that is killed closes
its connections, so the others' next exchange fails at once with `PeerLost`, and torchrun or
`launch` ends them. Left out: elastic restarts."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
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
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

#: what takes seconds to import: ranks are forked from a process that has imported those of them
#: that this one has
HEAVY = (
    "torch.distributed",
    "numba",
    "transformers.modeling_utils",
    "transformers.generation.utils",
)


class PeerLost(RuntimeError):
    """Another rank of the run is gone or no longer answers."""


@contextmanager
def connect(timeout: float = 600, init_method: str = "env://") -> Iterator[torch.device]:
    """Join the processes that torchrun or `launch` started; yields this rank's device.

    timeout : seconds that an exchange may wait for a rank that is alive but silent; a dead one is
    noticed at once."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise RuntimeError(
            "this process is alone: start it with `torchrun --nproc-per-node N …`, or call "
            "moelab.parallel.launch(function, N)"
        )
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    gpu = torch.cuda.device_count() >= here and dist.is_nccl_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    # transformers imports this one while it opens a model, and the defaults of its functions would
    # then be the group.
    importlib.import_module("torch.distributed.nn")
    try:
        dist.init_process_group(
            "nccl" if gpu else "gloo", init_method, timedelta(seconds=timeout), size, rank
        )
    except RuntimeError as error:  # another rank may have joined and failed at once
        raise PeerLost(f"rank {rank} cannot connect to the other ranks: {error}") from error
    try:
        yield device
        try:
            dist.barrier()  # no rank closes its connections while others still use them
        except RuntimeError as error:
            raise PeerLost(f"rank {rank} was done, but another rank is gone") from error
    except BaseException as error:
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        raise
    finally:
        # The group's threads must end before the interpreter does, or they abort the process; they
        # end when nothing refers to the group: no cycle and no traceback.
        dist.destroy_process_group()
        gc.collect()


def launch(
    function: Callable[..., Any], n: int, *arguments: Any, threads: int | None = None
) -> list[Any]:
    """Run `function(*arguments)`, of an importable module, in n connected processes here; returns
    each rank's result.

    threads : torch's in each rank; None shares the cores out. RuntimeError : a rank raised or was
    killed."""
    # elsewhere than on Linux a process that was forked may not use the system's libraries
    method = "forkserver" if sys.platform == "linux" else "spawn"
    if method == "forkserver":
        get_context(method).set_forkserver_preload([name for name in HEAVY if name in sys.modules])
    with tempfile.TemporaryDirectory(prefix="moelab-", ignore_cleanup_errors=True) as folder:
        threads = threads or max(1, (os.cpu_count() or 1) // n)
        given = function, arguments, n, Path(folder), threads, dict(os.environ)
        ranks = start_processes(_rank, given, n, join=False, daemon=True, start_method=method)
        try:
            while not ranks.join():
                pass
            return [pickle.loads(_result(Path(folder), rank).read_bytes()) for rank in range(n)]
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RuntimeError(
                f"rank {error.error_index} of {n} failed, and the other ranks were ended: "
                f"{str(error).strip().splitlines()[-1]}"
            ) from error
        finally:
            for process in ranks.processes:
                process.kill()


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pickle"


def _rank(
    rank: int,
    function: Callable[..., Any],
    arguments: tuple,
    n: int,
    folder: Path,
    threads: int,
    environment: dict[str, str],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(
        environment,
        RANK=str(rank),
        WORLD_SIZE=str(n),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(n),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(threads)
    try:
        with connect(init_method=(folder / "rendezvous").as_uri()):
            result = function(*arguments)
    except PeerLost:
        time.sleep(30)  # the rank that is the cause is the first to end, and `launch` ends this one
        raise
    _result(folder, rank).write_bytes(pickle.dumps(result))


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)
