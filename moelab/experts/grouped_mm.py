"""Grouped matrix products: all experts of a layer in one call of torch, up and then down.

Source: `torch.nn.functional.grouped_mm`, as transformers uses it (`grouped_mm_experts_forward`). The rows, sorted by
expert, are multiplied with the stacked weights [E, …]; offsets say where each expert's rows end. It needs the whole
bank, so it falls back to `Sorted` where weights come one by one from a source, as where an expert is not plain
(`moelab.experts.layout.plain`) or this torch has no kernel for the device, type or alignment (16 bytes).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import Dispatch, dispatch, scatter
from moelab.experts.layout import activate, banks, names, plain
from moelab.experts.sorting import Sorted

_GROUPED_MM = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class GroupedMM(Sorted):
    """torch's grouped product on stacked weights; `Sorted` where that cannot be."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if not plain(experts) or not all(_usable(x, banks(experts, name)) for name in names(experts)):
            return super().run(x, ids, weights, experts)
        order = dispatch(ids, experts.num_experts)
        n = len(order)
        if n == 0:
            return super().run(x, ids, weights, experts)
        self.count(n, n, n)
        up, down = names(experts)
        h = activate(experts, _linear(x[order.tokens], experts, up, order))
        y = _linear(h, experts, down, order) * weights[order.tokens, order.choices][:, None]
        return scatter(x, weights, order.tokens, y, experts)


def _usable(x: Tensor, bank: Tensor | None) -> bool:
    if _GROUPED_MM is None or bank is None or bank.device != x.device or bank.dtype != x.dtype:
        return False
    aligned = all(size * bank.element_size() % 16 == 0 for size in bank.shape[1:]) and bank.data_ptr() % 16 == 0
    return aligned and (x.device.type == "cpu" or x.dtype == torch.bfloat16)


def _linear(rows: Tensor, experts: Any, name: str, order: Dispatch) -> Tensor:
    bank = getattr(experts, name)
    y = _GROUPED_MM(rows.contiguous(), bank if experts.is_transposed else bank.mT, offs=order.offsets[1:].int())
    if not experts.has_bias:
        return y
    return y + getattr(experts, name + "_bias").repeat_interleave(order.counts, dim=0)
