"""Layers of random experts, to be computed in turn: what benches and studies of one layer share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.fast.packing import packed_as
from moelab.models import compat
from moelab.models.experts import SeamExperts

from .timing import Samples, seconds, turns

Arms = dict[str, Callable[[int], Any]]  # name → computes the step of a number


class Layers:
    """Layers of random experts, enough of them for `cold` bytes, as transformers has them and
    behind the seam."""

    def __init__(self, E: int, K: int, H: int, I: int, dtype: torch.dtype, cold: float) -> None:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        self.K = K
        self.expert_bytes = 3 * H * I * dtype.itemsize
        self.dtype = dtype
        self.config = Qwen3MoeConfig(
            hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K
        )
        compat.dispatch(self.config, "eager")
        self.stock = []
        for seed in range(max(2, -(-int(cold) // (E * self.expert_bytes)))):
            rng = torch.Generator().manual_seed(seed)
            stock = Qwen3MoeExperts(self.config).to(dtype).requires_grad_(False).eval()
            for bank in stock.parameters():
                bank.normal_(0, bank.shape[-1] ** -0.5, generator=rng)
            self.stock.append(stock)
        self.seam = self.from_sources([None] * len(self.stock))

    def from_sources(self, sources: Iterable[Any]) -> list[Any]:
        """The layers behind the seam, with the same parameters, each with its source; None: the
        parameters."""
        found = []
        for stock, source in zip(self.stock, sources):
            seam = SeamExperts(stock, len(found))
            seam.source = source
            found.append(seam)
        return found

    def steps(self, T: int, rounds: int) -> list[tuple[int, Tensor, Tensor, Tensor]]:
        """(layer, x [T, H], ids [T, K], weights [T, K]) of each round; routing is uniform."""
        rng = torch.Generator().manual_seed(T)
        found = []
        E = self.config.num_experts
        H = self.config.hidden_size
        for i in range(rounds):
            ids = torch.rand(T, E, generator=rng).topk(self.K).indices
            weights = torch.rand(T, self.K, generator=rng) + 0.1
            found.append(
                (
                    i % len(self.stock),
                    torch.randn(T, H, generator=rng).to(self.dtype),
                    ids,
                    (weights / weights.sum(-1, keepdim=True)).to(self.dtype),
                )
            )
        return found


class PackedExperts:
    """A layer's experts as bf12 or in few bits, one blob after another: a source of the seam for
    `GEMV`."""

    def __init__(self, experts: Any, form: str) -> None:
        self.form, self.rows = form, {name: [] for name in experts.own(0)}
        self.blobs = []  # whose memory the rows are
        for e in range(experts.num_experts):
            for name, w in experts.own(e).items():
                packed = packed_as(form, w)
                self.blobs.append(packed.blob)
                self.rows[name] += [*packed.matrices().rows]
        self.nbytes = sum(map(len, self.blobs))

    def matrices(
        self, layer: int, experts: list[int], dtype: torch.dtype
    ) -> dict[str, tuple[str, np.ndarray]]:
        """Matrix → (form, its packed rows of some experts, stacked)."""
        return {
            name: (self.form, np.array([rows[e] for e in experts]))
            for name, rows in self.rows.items()
        }


def rounds_of(arms: Arms, rounds: int, title: str) -> Samples:
    """Seconds of each arm in each round but round 0, which warms up. Neighbouring arms compute
    different steps, so that none finds its weights in a cache; each has run another step just
    before, which pre-faults its memory."""
    samples = {name: [] for name in arms}
    steps = range(1, rounds)
    for i, (place, name) in turns(list(enumerate(arms)), rounds, title):
        if not i:
            arms[name](0)
            continue
        arms[name](steps[(i + place + len(steps) // 2) % len(steps)])
        samples[name].append(seconds(arms[name], steps[(i + place) % len(steps)]))
    return samples
