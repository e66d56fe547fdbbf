"""The fast executor: GEMV for few tokens an expert, a GEMM for many; where one takes over is
measured on this machine. On a GPU it is `GEMV`.

The first time in a process that a kind of experts has several tokens an expert, both compute one expert with 8,
32 and 128 tokens, a few milliseconds each; GEMV is used up to about where it starts to lose. Both
are lossless, so the choice changes no result beyond rounding."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.experts import gemv
from moelab.experts.executor import Sorted
from moelab.experts.gemv import GEMV
from moelab.experts.located import locate
from moelab.kernels.products import crossover

PAIR = 2  # tokens that GEMV multiplies as fast as one


class Fast(GEMV):
    """`GEMV` up to so many tokens an expert that is hit, on average, then `Sorted`."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        always = len(ids) == 1 or x.device.type in gemv.GPUS
        tokens = 1 if always else ids.numel() / max(len(set(ids.flatten().tolist())), 1)
        way = GEMV if tokens <= PAIR or tokens <= self._few(x, ids, experts) else Sorted
        return way.run(self, x, ids, weights, experts)

    @torch.no_grad()
    def _few(self, x: Tensor, ids: Tensor, experts: Any) -> float:
        expert = int(ids.min())
        if expert >= experts.num_experts or not self.multiplies(x, experts):
            return 0
        before = vars(self.tally).copy()

        def run(way: type[Sorted], size: int) -> Tensor:
            rows = x[torch.arange(size) % len(x)]
            alone = torch.full((size, 1), expert)
            ones = x.new_ones(size, 1)
            return way.run(self, rows, alone, ones, experts)

        found = locate(experts, np.array([expert]), x.dtype)
        kinds = found and tuple((of.kind, of.transposed) for of in found)
        what = "experts", kinds, *experts.shapes.values(), x.dtype, torch.get_num_threads()
        few = crossover(what, partial(run, GEMV), partial(run, Sorted))
        vars(self.tally).update(before)  # what was computed for measuring is not counted
        return few
