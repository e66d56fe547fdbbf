"""Collectives that count their bytes, each made of one primitive, all-to-all-v; and the TP × EP
grid of ranks.

So there is one place that counts bytes, parts may be unequal (gloo's and NCCL's own all-gather want
them equal), and sums are made in rank order, the same on every backend. Counted is the payload that
leaves a rank for others: (W−1)·T rows in all for an all-gather or a reduce-scatter of T rows, as by
the ring algorithms.

    rows [n, H]     W ranks     sizes: rows of each rank, W numbers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.experts.sharding import share
from moelab.parallel.launch import PeerLost

#: up to so many tokens a step waits for the exchanges themselves, not for bytes or computation
FEW = 8


@dataclass
class Traffic:
    """What one rank has sent to others."""

    rows: int = 0
    bytes: int = 0


class Exchange:
    """The collectives of one process group; `alone`, of this rank only, it exchanges nothing.

    traffic : label → what this rank has sent; exchanges of one grid share it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        traffic: defaultdict[str, Traffic] | None = None,
        alone: bool = False,
    ) -> None:
        self.group = group
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        self.traffic = defaultdict(Traffic) if traffic is None else traffic

    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ) -> Tensor:
        """`send[r]` of the rows, in order, go to rank r; returns what arrives, `receive[r]` rows of
        rank r in order.

        PeerLost : another rank died or did not answer in time.
        """
        if self.size == 1:
            return rows
        away = len(rows) - send[self.rank]
        self.traffic[label].rows += away
        self.traffic[label].bytes += away * rows.shape[1:].numel() * rows.element_size()
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        try:
            dist.all_to_all_single(
                arrived, rows.contiguous(), list(receive), list(send), group=self.group
            )
            if arrived.is_cuda:  # let an error show here and not somewhere later
                torch.cuda.synchronize(arrived.device)
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise PeerLost(
                f"rank {self.rank} got no answer from another rank: it was killed, ran out of memory, "
                f"stopped with an error of its own, or took too long ({reason})"
            ) from error
        return arrived

    def counts(self, send: Tensor) -> Tensor:
        """`send[r]` (int64) goes to rank r; returns one number of each rank."""
        return self.all_to_all(send, [1] * self.size, [1] * self.size, "counts")

    def sizes(self, n: int, device: torch.device) -> list[int]:
        """The n of every rank."""
        return self.counts(torch.full((self.size,), n, dtype=torch.int64, device=device)).tolist()

    def all_gather(self, rows: Tensor, sizes: Sequence[int], label: str) -> Tensor:
        """The rows of all ranks, in rank order."""
        if self.size == 1:
            return rows
        copies = rows.repeat(self.size, *[1] * (rows.dim() - 1))
        return self.all_to_all(copies, [len(rows)] * self.size, sizes, label)

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int], label: str) -> Tensor:
        """The sum over ranks of this rank's part of the rows, added in rank order in at least
        fp32."""
        if self.size == 1:
            return rows
        parts = self.all_to_all(rows, sizes, [sizes[self.rank]] * self.size, label)
        return added(parts.view(self.size, -1, *rows.shape[1:]))

    def all_reduce(self, x: Tensor, label: str) -> Tensor:
        """The sum over ranks of x [..., H], of which all have as many rows, bit-equal on all."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= FEW:  # one exchange
            parts = self.all_gather(rows, [len(rows)] * self.size, label)
            return added(parts.view(self.size, *x.shape))
        sizes = share(len(rows), self.size)
        return self.all_gather(self.reduce_scatter(rows, sizes, label), sizes, label).view(x.shape)


class Grid:
    """W = ep × tp ranks: rank = ep index · tp + tp index. The ranks of one row (tp) each hold a
    part of its experts. tp : as of `moelab.parallel.degree`.

    traffic : label → what this rank has sent.
    """

    def __init__(self, tp: int = 1) -> None:
        self.world = Exchange()
        self.traffic = self.world.traffic
        W = self.world.size
        if tp in (1, W):  # no groups to make
            alone = Exchange(alone=True)
            self.ep, self.tp = (self.world, alone) if tp == 1 else (alone, self.world)
            return
        from torch.distributed.device_mesh import init_device_mesh

        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mesh = init_device_mesh(device, (W // tp, tp), mesh_dim_names=("ep", "tp"))
        self.ep = Exchange(mesh.get_group("ep"), self.traffic)
        self.tp = Exchange(mesh.get_group("tp"), self.traffic)


def added(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in at least fp32, in the dtype of the parts."""
    return parts.to(torch.promote_types(parts.dtype, torch.float32)).sum(0).to(parts.dtype)


def pack(*parts: Tensor) -> Tensor:
    """Rows of several tensors [n, width] of any dtype side by side as bytes: one exchange instead
    of several."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def unpack(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of packed rows, with the widths and dtypes of `like`."""
    widths = [part.shape[1] * part.element_size() for part in like]
    pieces = rows.split(widths, dim=1)
    return [
        piece.clone(memory_format=torch.contiguous_format).view(part.dtype)
        for piece, part in zip(pieces, like)
    ]
