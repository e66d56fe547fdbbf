"""What a worker does to a tensor: on the CPU in one or two stages, or on a GPU with ZipMoE's
recovery kernel.

Source: ZipMoE §3.3 and §4 (E-chunks are decompressed by the CPU, recovery is a kernel of the GPU;
SM-chunks are read into pinned memory). A decoder belongs to one worker and returns when the tensor
is in its place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moelab.offloading.link import Link, host_memory
from moelab.offloading.slots import Slots
from moelab.store import bits
from moelab.store.codecs import plane_bytes
from moelab.store.reader import Chunks, decode_tensor
from moelab.store.stages import decompress, exponents_of, recover


def on_cpu(kind: str, chunks: dict[str, Chunks], name: str, out: torch.Tensor, slot: int) -> None:
    """Both stages, or one of them, into memory of the CPU.

    kind : "decompress", "recover" or "decode", which is both. Raises StoreError for a damaged
        chunk."""
    if kind == "decompress":
        decompress(chunks["e"], name, out)
    elif kind == "recover":
        recover(chunks["sm"], name, out)
    else:
        decode_tensor(chunks["e"], chunks["sm"], name, out)


class OnCuda:
    """Exponents are decompressed into pinned memory; both planes are copied, and joined on the
    GPU."""

    def __init__(self, link: Link) -> None:
        self._link, self._host, self._there = link, None, None

    def __call__(
        self, kind: str, chunks: dict[str, Chunks], name: str, out: torch.Tensor, slot: int
    ) -> None:
        e, sm, size = chunks["e"], chunks["sm"], out.nbytes
        if self._host is None or self._host.numel() < size:
            self._host = torch.from_numpy(host_memory(size, out.device, self))
            self._there = torch.empty(size, dtype=torch.uint8, device=out.device)
        with self._link.into(slot):
            if len(e.entries[name].planes) == 2:
                n = size // 2
                exponents_of(e, name, self._host[:n].numpy())
                exponents = self._there[:n].copy_(self._host[:n], non_blocking=True)
                rest = torch.from_numpy(plane_bytes(sm.plane(name, 1), n))
                bits.join(exponents, self._there[n:size].copy_(rest, non_blocking=True), out)
            else:
                whole = self._host[:size].view(out.dtype).view(out.shape)
                decode_tensor(e, sm, name, whole)
                out.copy_(whole, non_blocking=True)


def decoder(slots: Slots) -> Callable[[str, dict[str, Chunks], str, torch.Tensor, int], None]:
    """What one worker decodes with, into a slot's tensor."""
    return on_cpu if slots.link is None else OnCuda(slots.link)
