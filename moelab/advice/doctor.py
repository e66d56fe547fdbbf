"""`doctor`: what this machine can do, what will run here and what not, and why."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moelab.advice.machine import disk_rates, memory_rate
from moelab.base.arguments import described
from moelab.base.files import beside, cache_root, folder_bytes, nearest
from moelab.base.table import size
from moelab.offloading.budget import available

#: package → what does not run without it; path of a decoded token → what runs it
PACKAGES, GRAPHS, _ = beside(__file__).values()


def findings(folder: str | Path = ".") -> Iterator[tuple[str, str]]:
    """(what, what was found) of this machine; `folder` is on the disk that is measured."""
    for what, find in {
        "system": lambda: (
            f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
        ),
        "cores": lambda: str(os.cpu_count()),
        "memory": _memory,
        "disk": lambda: _disk(Path(folder).absolute()),
        "CUDA": _cuda,
        "Neural Engine": lambda: (
            "Core ML can run models here"
            if sys.platform == "darwin"
            else "none: this is no Mac; models can be converted and checked, not run"
        ),
        "cache": _cache,
    }.items():
        try:
            yield what, find()
        except OSError as error:
            yield what, f"unknown: {error.strerror or error} ({error.filename or folder})"
    yield from _fast_paths()
    for package, purpose in PACKAGES.items():
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, f"not installed: without it, {purpose} will not run"


def _memory() -> str:
    import psutil

    total = psutil.virtual_memory().total
    return f"{size(total)}, {size(available())} available; read at {size(memory_rate())}/s"


def _disk(folder: Path) -> str:
    rate, busy, how = disk_rates(folder)
    ahead = f"; read-ahead {kb} KB" if (kb := read_ahead(folder)) else ""
    return f"{size(rate)}/s, {size(busy)}/s when busy ({how}); {size(shutil.disk_usage(folder).free)} free{ahead}"


def read_ahead(path: Path) -> int | None:
    """KB that the system reads ahead on the device that `path` lies on; None where it doesn't
    tell."""
    if not hasattr(os, "major"):
        return None
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    for queue in (device / "queue", device.parent / "queue"):  # a partition has its disk's
        if (queue / "read_ahead_kb").exists():
            return int((queue / "read_ahead_kb").read_text())
    return None


def _cache() -> str:
    there = nearest(root := cache_root())
    if there.is_dir() and os.access(there, os.W_OK):
        return f"{root}, {size(folder_bytes(root))}; {size(shutil.disk_usage(there).free)} free"
    return f"{root} cannot be written: choose another place by $MOELAB_CACHE"


def _cuda() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return "unknown without torch"
    if not torch.cuda.is_available():
        return "none: models run on the CPU"
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{one.name}, {size(one.total_memory)}" for one in found)


def _fast_paths() -> Iterator[tuple[str, str]]:
    """What `executor="fast"` makes of the small model that is shipped."""
    try:
        import torch

        from moelab.api import open_model
        from moelab.fast.paths import described
    except ModuleNotFoundError as error:
        yield "fast paths", f"none without {error.name}"
        return
    with open_model(executor="fast") as model:
        for what, found in described(model):
            yield f"fast: {what}", found
    if torch.cuda.is_available():
        yield "tokens on the GPU", decoded_by("cuda")


def decoded_by(device: str) -> str:
    """Which path tokens take on a GPU (`Metrics.paths`): of the shipped model, with half of its experts
    in the GPU's memory; and what was warned of meanwhile."""
    import torch

    from moelab.api import open_model

    how = {"executor": "fast", "prefetch": "none"}
    with warnings.catch_warnings(record=True) as said:
        with open_model(memory=0.5, device=device, **how) as model:
            model.generate(torch.ones(1, 4, dtype=torch.long, device=device), max_new_tokens=8)
            paths = model.moelab.metrics().paths or {}
    found = [f"{n} by {GRAPHS[path]}" for path, n in paths.items()]
    return "; ".join([*found, *(str(of.message) for of in said)])


add_arguments = described(__file__, "arguments")


def main(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    folder = folder.absolute().parent if folder.is_file() else folder
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder at {folder}, on whose disk reads could be measured"
        )
    for what, found in findings(folder):
        print(f"{what:<25}{found}", flush=True)
    return 0
