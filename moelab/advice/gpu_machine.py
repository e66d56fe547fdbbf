"""What this machine's GPU delivers: its memory, the link both ways, arithmetic, a graph's launch, and the
CPU's memory beside it, measured in some seconds and kept as `moelab.advice.machine` does.

Weights are read as a token reads them, by a product with one vector; copies are of pinned memory. What
only a model tells, launches of its layers, is assumed as on the card of another GPU, and says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from moelab.advice.machine import figure, free, kept_card, memory_rate, seconds
from moelab.base.specs import DeviceSpec, Figure
from moelab.cards import load_device
from moelab.offloading.budget import available, available_on

FORMAT = "moelab.gpu/1"
#: the card of which launches are taken
ASSUMED = "h200-141gb"
#: bytes that are read or copied, which no cache holds; side of a square product
SIZE, SIDE = 256 << 20, 4096


def there() -> bool:
    """Whether this machine seems to have a GPU for CUDA; without torch, which takes seconds to load."""
    return shutil.which("nvidia-smi") is not None


def here() -> DeviceSpec:
    """A card of this machine's GPU, with what is free now of its memory and of the CPU's. ValueError:
    torch finds none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', and torch finds no GPU here (`moelab doctor`); give a card's name, "
            'moelab.names("device")'
        )
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    found = kept_card(f"{name}, {FORMAT}", "gpu", lambda: measured(device, name))
    torch.cuda.empty_cache()  # what measuring took is free again
    found.figures["memory_gb"] = free(available_on(device))
    found.figures["host_memory_gb"] = free(available())
    return found


def measured(device: Any, name: str) -> DeviceSpec:
    """A `torch.device` as it is now."""
    import torch

    gpu = device.type == "cuda"
    weights = torch.ones(SIZE // 8192, 4096, dtype=torch.bfloat16, device=device)
    square = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    far = torch.ones(SIZE, dtype=torch.uint8, pin_memory=gpu)
    near = torch.ones(SIZE, dtype=torch.uint8, device=device)

    def least(act: Callable[[], Any]) -> float:
        return min(seconds(lambda: (act(), gpu and torch.cuda.synchronize(device))))

    def rate(act: Callable[[], Any], how: str) -> Figure:
        return figure(SIZE / least(act) / 1e9, "GB/s", f"the best of {how} of {SIZE >> 20} MB")

    flops = 2 * SIDE**3 / least(lambda: square @ square)
    launch = least(replayed(device)) if gpu else 0.0
    figures = {
        "memory_bandwidth_gbs": rate(lambda: weights @ weights[0], "products with one vector"),
        "link_bandwidth_gbs": rate(lambda: near.copy_(far, non_blocking=True), "copies to the GPU"),
        "link_back_gbs": rate(lambda: far.copy_(near, non_blocking=True), "copies from the GPU"),
        "bf16_tflops": figure(flops / 1e12, "TFLOPS", f"the best of products of {SIDE}² numbers"),
        "host_memory_bandwidth_gbs": figure(
            memory_rate() / 1e9, "GB/s", "the best of all cores' reads"
        ),
        "graph_launch_ms": figure(1e3 * launch, "ms", "a graph of one kernel, until it is done"),
    }
    card = load_device(ASSUMED)
    for of in ("layer_ms", "step_ms", "host_trip_ms"):
        one = card.figures[of]
        figures[of] = Figure(one.value, one.unit, "assumed", f"as on an {card.name}: {one.source}")
    return DeviceSpec(name, figures)


def replayed(device: Any) -> Callable[[], Any]:
    """What replays a graph of one kernel."""
    import torch

    x = torch.zeros(1, dtype=torch.float32, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    return lambda: graph.replay() or x  # which would be another's memory without it
