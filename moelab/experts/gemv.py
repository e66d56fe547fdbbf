"""Decode by GEMV: all experts of the step in two calls, each weight read once, as bf16, from where it lies.

Source: AWS Neuron's MoE guide, "Memory-bound characteristics of token generation"; NPUMoE, "Limitation", before §6, on
its decode. One call multiplies up for all experts, the architecture's own gate runs on [n, 2I], one call multiplies
down, and the weighted sum follows; where the gate is SiLU, all of it is one call. Nothing is gathered, packed or
cached, so weights may lie anywhere. Sums are in fp32; unlike in eager, what is between up and down is not rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.experts.executor import Sorted, activate, banks, names, plain, silu_gated, wants_grad

try:
    from moelab.kernels import feed_forward as around, products
except ModuleNotFoundError as error:
    if error.name != "numba":
        raise
    products = None


class GEMV(Sorted):
    """numba products with weights as they lie; `Sorted` where numba is missing, for experts that are not plain, weights
    that are not contiguous, mixed types, other devices and gradients."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if not _computable(x, weights, experts):
            return super().run(x, ids, weights, experts)
        hit, bounds, tokens, rows = around.arrange(ids.numpy(), experts.num_experts)
        matrices = self._matrices(experts, hit, x.dtype) if len(hit) else None
        if matrices is None:
            return super().run(x, ids, weights, experts)
        kind, (up, down), alive = matrices
        self.count(len(tokens), len(tokens), len(tokens))
        transposed = experts.is_transposed
        if silu_gated(experts) and (around.TEAM or torch.get_num_threads() == 1):
            return around.feed_forward(kind, up, down, bounds, x, tokens, rows, weights, transposed)
        h = products.multiply(kind, up[0], bounds, x, tokens, up[1], transposed)
        y = products.multiply(kind, down[0], bounds, activate(experts, h), None, down[1], transposed)
        del alive                                       # the weights' owners may go only now
        return around.combine(y, rows, weights, x.dtype)

    def _matrices(self, experts: Any, hit: np.ndarray, dtype: torch.dtype) -> Any:
        """(kind, of up and down (addresses [M, 4], R), what must live), or None if these weights are not for us.

        A source may have `addresses(layer, experts, dtype)`: where its contiguous tensors lie.
        """
        find = getattr(experts.source, "addresses", None)
        if find is not None and (places := find(experts.layer, hit.tolist(), dtype)) is not None:
            return products.KINDS[dtype], [_table(experts, name, places) for name in names(experts)], places
        given = None if banks(experts, "down_proj") is not None else [experts.weights(e) for e in hit.tolist()]
        tables, alive = [], [given]
        for name in names(experts):
            table = np.zeros((len(hit), 4), np.int64)
            for column, part in ((0, name), (2, name + "_bias")) if experts.has_bias else ((0, name),):
                tensors = [banks(experts, part)] if given is None else [tensors[part] for tensors in given]
                for w in tensors:
                    if w.dtype != dtype or not w.is_cpu or not w.is_contiguous() or wants_grad(w):
                        return None
                if given is None:
                    table[:, column] = hit * (w.stride(0) * w.element_size()) + w.data_ptr()
                else:
                    table[:, column] = [w.data_ptr() for w in tensors]
                alive.append(tensors)
                if column == 0:
                    R = w.shape[-1 if experts.is_transposed else -2]
            tables.append((table, R))
        return products.KINDS[dtype], tables, alive


def _computable(x: Tensor, weights: Tensor, experts: Any) -> bool:
    return products is not None and x.device.type == "cpu" and x.dtype in products.KINDS and plain(experts) \
        and not wants_grad(x, weights)


def _table(experts: Any, name: str, places: dict[str, np.ndarray]) -> tuple[np.ndarray, int]:
    table = np.zeros((len(places[name]), 4), np.int64)
    table[:, 0] = places[name]
    if experts.has_bias:
        table[:, 2] = places[name + "_bias"]
    return table, experts.shapes[name][-1 if experts.is_transposed else -2]


class PlanesGEMV(GEMV):
    """`GEMV` on bf16 weights that stay split in their two bytes; experts it cannot do raise ValueError.

    planes : (layer, expert) → parameter name → (exponents, sign-mantissa), uint8 arrays or CPU tensors, contiguous;
        `moelab.store.planes.StorePlanes(store)` is one.
    """

    def __init__(self, planes: Callable[[int, int], dict[str, tuple[Any, Any]]]) -> None:
        super().__init__()
        self.planes = planes
        self.identity, self.name = getattr(planes, "identity", None), getattr(planes, "name", None)   # whose weights

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if not _computable(x, weights, experts):
            raise ValueError("split weights are multiplied on the CPU, with numba, without gradients, and only for "
                             "plain experts (up, gate, down); join them (moelab.store.bits.join) for a source and use "
                             "another executor")
        return super().run(x, ids, weights, experts)

    def _matrices(self, experts: Any, hit: list[int], dtype: torch.dtype) -> Any:
        tables, given = [], [self.planes(experts.layer, e) for e in hit.tolist()]
        for name in names(experts):
            table = np.zeros((len(hit), 4), np.int64)
            for column, part in ((0, name), (2, name + "_bias")) if experts.has_bias else ((0, name),):
                for i, expert in enumerate(given):
                    table[i, column:column + 2] = [_address(plane) for plane in expert[part]]
            shape = experts.shapes[name] if hasattr(experts, "shapes") else getattr(experts, name).shape[1:]
            tables.append((table, shape[-1 if experts.is_transposed else 0]))
        return np.uint8, tables, given


def _address(plane: Any) -> int:
    tensor = isinstance(plane, Tensor)
    contiguous = plane.is_contiguous() and plane.device.type == "cpu" if tensor else plane.flags.c_contiguous
    if not contiguous or plane.dtype not in (torch.uint8, np.uint8):
        raise ValueError(f"a plane must be contiguous uint8 in the CPU's memory, not {plane.dtype}")
    return plane.data_ptr() if tensor else plane.ctypes.data
