"""What a worker does to a compressed tensor, in one stage or, on the CPU, in two.

Source: ZipMoE §3.3 and §4. There recovery is a kernel of the GPU; here, what goes to a GPU is
joined before it is sent, as many bytes. A decoder belongs to one worker and returns when the tensor
is in its place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moelab.offloading.link import Link, host_memory
from moelab.offloading.load_queue import USES, Piece
from moelab.offloading.slots import Slots
from moelab.store.reader import Chunks, decode_tensor
from moelab.store.stages import decompress, recover

#: an operation of `load_queue.USES` → what does it, with the chunks that it uses
OPERATIONS = {"decompress": decompress, "recover": recover, "decode": decode_tensor}


def on_cpu(
    kind: str, chunks: dict[str, Chunks], piece: Piece, out: torch.Tensor, slot: int
) -> None:
    """Both stages, or one of them, into memory of the CPU.

    kind : "decompress", "recover" or "decode", which is both. Raises StoreError for a damaged
        chunk."""
    name, shard = piece
    if shard is not None:
        begin, end = chunks[USES[kind][0]].entries[name].bounds(shard)
        out = out.view(-1)[begin:end]
    OPERATIONS[kind](*chunks.values(), name, out, shard)


class OnCuda:
    """Both stages into pinned memory of the CPU, which is then copied to the GPU."""

    def __init__(self, link: Link) -> None:
        self._link, self._host = link, torch.empty(0, dtype=torch.uint8)

    def __call__(
        self, kind: str, chunks: dict[str, Chunks], piece: Piece, out: torch.Tensor, slot: int
    ) -> None:
        if self._host.numel() < out.nbytes:
            self._host = torch.from_numpy(host_memory(out.nbytes, out.device, self))
        decoded = self._host[: out.nbytes].view(out.dtype).view(out.shape)
        decode_tensor(chunks["e"], chunks["sm"], piece.tensor, decoded)
        with self._link.into(slot):
            out.copy_(decoded, non_blocking=True)


def decoder(slots: Slots) -> Callable[[str, dict[str, Chunks], Piece, torch.Tensor, int], None]:
    """What one worker decodes with, into a slot's tensor."""
    return on_cpu if slots.link is None else OnCuda(slots.link)
