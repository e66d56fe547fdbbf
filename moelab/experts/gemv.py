"""Decode by GEMV: all experts of the step in two calls, each weight read once, as it lies: bf16,
bf12, int4 …

Source: AWS Neuron's MoE guide, "Memory-bound characteristics of token generation"; NPUMoE,
"Limitation", before §6, on its decode. One call multiplies up for all experts, the architecture's
own gate runs on [n, 2I], one call multiplies down, and the weighted sum follows; where the gate is
SiLU, all of it is one call. Nothing is gathered, packed or cached, so weights may lie anywhere.
Sums are in fp32; unlike in eager, what is between up and down is not rounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from moelab.experts.executor import Sorted, activate, banks, names, plain, silu_gated
from moelab.kernels import feed_forward as around
from moelab.kernels import products


class GEMV(Sorted):
    """numba products with weights as they lie, or Triton's for a single token on a GPU
    (`gemv_triton`); `Sorted` for experts that are not plain, weights that are not contiguous, mixed
    types and other devices."""

    def __init__(self) -> None:
        super().__init__()
        #: of `token`, by first experts module: what they are of, and they
        self._banks: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if not _computable(x, weights, experts):
            found = self._on_gpu(x, ids, weights, experts) if x.is_cuda and len(x) == 1 else None
            return super().run(x, ids, weights, experts) if found is None else found
        hit, bounds, tokens, rows = around.arrange(ids.numpy(), experts.num_experts)
        matrices = self._matrices(experts, hit, x.dtype) if len(hit) else None
        if matrices is None:
            return super().run(x, ids, weights, experts)
        (up, down), alive, transposed = matrices
        self.count(len(tokens), len(tokens), len(tokens))
        if silu_gated(experts) and (around.TEAM or torch.get_num_threads() == 1):
            return around.feed_forward(up, down, bounds, x, tokens, rows, weights, transposed)
        h = products.multiply(up[0], up[1], bounds, x, tokens, up[2], transposed)
        y = products.multiply(
            down[0], down[1], bounds, activate(experts, h), None, down[2], transposed
        )
        del alive  # the weights' owners may go only now
        return around.combine(y, rows, weights, x.dtype)

    def _on_gpu(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor | None:
        """A token's experts in a few launches; None where the kernels are not for them."""
        if (
            x.dtype != torch.bfloat16
            or not (plain(experts) and silu_gated(experts))
            or experts.has_bias
            or experts.is_transposed
        ):
            return None
        try:
            from moelab.experts import gemv_triton
        except ImportError:  # no Triton: torch's own products do
            return None
        chosen = ids[0].tolist()
        hit = [(expert, k) for k, expert in enumerate(chosen) if expert < experts.num_experts]
        found = (
            self._matrices(experts, np.array([e for e, _ in hit], np.int64), x.dtype, "cuda")
            if hit
            else None
        )
        if found is None or found[2] or not all(map(gemv_triton.multiplies, found[0])):
            return None
        tables = torch.from_numpy(np.stack([table for _, table, _ in found[0]])).to(
            x.device, non_blocking=True
        )
        up, down = map(gemv_triton.bank, found[0], tables)
        self.count(len(hit), len(hit), len(hit))
        w = weights[0] if len(hit) == len(chosen) else weights[0, [k for _, k in hit]]
        return gemv_triton.feed_forward(up, down, x, _first(len(hit), x.device), w)

    def token(self, modules: list[Any], dtype: torch.dtype, compute: Callable[..., Any]) -> Any:
        """A token's layers in one call (`moelab.fast.layers`), of experts modules that
        hold their weights."""
        state = (
            dtype,
            [
                (id(of), id(of.source), w.data_ptr(), w.dtype)
                for of in modules
                for w in of.module._parameters.values()
            ],
        )
        if (known := self._banks.get(modules[0], (None, None)))[0] != state:
            self._banks[modules[0]] = known = state, self.banks(modules, dtype)
        if known[1] is None:
            return None
        self.took(found := compute(*known[1]))
        return found

    def took(self, found: Any) -> None:
        """Count what a call for a token's layers has computed."""
        n = found.layers * found.ids.shape[1]
        self.count(n, n, n)

    def banks(
        self, modules: list[Any], dtype: torch.dtype, resident: list[list[int]] | None = None
    ) -> Any:
        """(up, down, transposed) of `moelab.fast.layers` for one experts module a layer,
        with the experts that are resident, or that these modules hold; None if one is not for that.
        On a GPU, up and down are banks of each layer, and the third is what multiplies by them."""
        if not all(
            plain(of) and silu_gated(of) and (of.source is None) == (resident is None)
            for of in modules
        ):
            return None
        place = (
            torch.device("cpu")
            if resident is not None
            else next(modules[0].module.parameters()).device
        )
        on, gpu = place.type, place.type in GPUS
        if not (gpu or around.TEAM or torch.get_num_threads() == 1):
            return None
        E, kinds = modules[0].num_experts, set()
        tables = np.zeros((2, len(modules), E, 4), np.int64)
        for i, of in enumerate(modules):
            chosen = np.arange(E) if resident is None else np.array(resident[i], np.int64)
            if len(chosen):
                if (found := self._matrices(of, chosen, dtype, on)) is None:
                    return None
                for at, (_kind, rows, _R) in zip(tables, found[0]):
                    at[i, chosen] = rows
                kinds.add((*[(kind, R) for kind, _, R in found[0]], found[2]))
        if len(kinds) != 1:
            return None
        *both, transposed = kinds.pop()
        found = [(kind, table, R) for (kind, R), table in zip(both, tables)]
        return _gpu_banks(found, transposed, place) if gpu else (*found, transposed)

    def _matrices(self, experts: Any, hit: np.ndarray, dtype: torch.dtype, on: str = "cpu") -> Any:
        """((kind, matrices [M, 4], R) of up and of down, what must live, whether they are
        transposed), or None if these weights are not for us, or not `on` this type of device.

        A source may have `matrices(layer, experts, dtype)`: where its tensors lie, see
        `moelab.offloading.slots`; and a `device`, if that is not the CPU."""
        find = getattr(experts.source, "matrices", None)
        if (
            getattr(getattr(experts.source, "device", None), "type", "cpu") != on
            and find is not None
        ):
            return None
        if find is not None and (found := find(experts.layer, hit.tolist(), dtype)) is not None:
            tables = []
            for name in names(experts):
                codec, table = found[name]
                if experts.has_bias:
                    table[:, 2] = found[name + "_bias"][1][:, 0]
                R = experts.shapes[name][-1 if experts.is_transposed else -2]
                tables.append(
                    (products.PACKED.get(codec.removesuffix(".T"), products.KINDS[dtype]), table, R)
                )
            turned = {
                found[name][0].endswith(".T") for name in names(experts)
            }  # few bits lie in the rows layout
            return (
                (tables, found, experts.is_transposed and turned == {False})
                if len(turned) == 1
                else None
            )
        held = {
            part: banks(experts, part)
            for name in names(experts)
            for part in (name, name + "_bias")
            if part == name or experts.has_bias
        }
        if any(bank is None for bank in held.values()):
            return _tables(experts, [experts.weights(e) for e in hit.tolist()], dtype, on)
        state = [(w.data_ptr(), w.stride(), w.dtype) for w in held.values()]
        before, found = _BANKS.get(experts, (None, None))
        if before != state:
            each = [
                dict(zip(held, tensors)) for tensors in zip(*[w.unbind() for w in held.values()])
            ]
            found = _tables(experts, each, held["down_proj"].dtype, held["down_proj"].device.type)
            found = found and (found[0], None, found[2])  # the module keeps what they are of
            _BANKS[experts] = state, found
        if found is None or held["down_proj"].dtype != dtype or held["down_proj"].device.type != on:
            return None
        return [(kind, table.take(hit, 0), R) for kind, table, R in found[0]], *found[1:]


@cache
def _first(n: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(n).to(device)  # which waits: it may be used on any stream


GPUS = ("cuda",)

#: experts modules that hold their weights → (where these lie, `_tables` of all experts)
_BANKS: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()


def _gpu_banks(
    matrices: list[tuple[type, np.ndarray, int]], transposed: bool, device: torch.device
) -> Any:
    """`GEMV.banks` of matrices [L, E, 4] there; None if there are no kernels for them."""
    try:
        from moelab.experts import gemv_triton
    except ImportError:
        return None
    if transposed or not all(map(gemv_triton.multiplies, matrices)):
        return None
    banks = [
        [
            gemv_triton.bank((kind, rows, R), to)
            for rows, to in zip(table, torch.from_numpy(table).to(device))
        ]
        for kind, table, R in matrices
    ]
    return *banks, gemv_triton.feed_forward


def _tables(experts: Any, given: list[dict[str, Tensor]], dtype: torch.dtype, on: str) -> Any:
    """`GEMV._matrices` of these experts' tensors."""
    tables = []
    for name in names(experts):
        table = np.zeros((len(given), 4), np.int64)
        for column, part in ((0, name), (2, name + "_bias")) if experts.has_bias else ((0, name),):
            tensors = [tensors[part] for tensors in given]
            if any(
                w.dtype != dtype or w.device.type != on or not w.is_contiguous() for w in tensors
            ):
                return None
            table[:, column] = [w.data_ptr() for w in tensors]
        R = given[0][name].shape[-1 if experts.is_transposed else -2]
        tables.append((products.KINDS[dtype], table, R))
    return tables, given, experts.is_transposed


def _computable(x: Tensor, weights: Tensor, experts: Any) -> bool:
    return x.device.type == "cpu" and x.dtype in products.KINDS and plain(experts)
