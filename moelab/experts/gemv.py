"""Decode by GEMV: all experts of the step in two calls, each weight read once, as it lies: bf16,
bf12, int4 …

Source: AWS Neuron's MoE guide, "Memory-bound characteristics of token generation"; NPUMoE,
"Limitation", before §6, on its decode. One call multiplies up for all experts, the architecture's
own gate runs on [n, 2I], one call multiplies down, and the weighted sum follows; where the gate is
SiLU, all of it is one call. Nothing is gathered, packed or cached, so weights may lie anywhere.
Sums are in fp32; unlike in eager, what is between up and down is not rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from moelab.experts import grouped_gemm
from moelab.experts.executor import Sorted, gate_of, plain
from moelab.experts.located import locate
from moelab.kernels.feed_forward import arrange, combine, feed_forward
from moelab.kernels.gates import SILU
from moelab.kernels.products import KINDS, Matrices, layers, multiply
from moelab.models import compat
from moelab.models.experts import SeamExperts

GPUS = ("cuda",)


class GEMV(Sorted):
    """numba products with weights as they lie; on a GPU Triton's, for a token (`gemv_triton`) or
    several (`gemm_triton`), or torch's where it has such (`grouped_gemm`); `Sorted` for experts that are
    not plain, weights that are not contiguous, mixed types and other devices."""

    def __init__(self) -> None:
        super().__init__()
        #: by first experts module, then whether for `token`: what they are of, and banks
        self._banks: WeakKeyDictionary[Any, dict] = WeakKeyDictionary()

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        y = None
        if x.device.type in GPUS and plain(experts):
            y = self._on_gpu(x, ids, weights, experts)
        elif self.multiplies(x, experts):
            y = self._on_cpu(x, ids, weights, experts)
        return super().run(x, ids, weights, experts) if y is None else y

    def multiplies(self, x: Tensor, experts: Any) -> bool:
        """Whether numba's products can be what these experts compute."""
        return x.is_cpu and x.dtype in KINDS and plain(experts)

    def _on_cpu(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor | None:
        hit, bounds, tokens, rows = arrange(ids.numpy(), experts.num_experts)
        if not len(hit) or (found := locate(experts, hit, x.dtype)) is None:
            return None
        y = self.compute(*found, bounds, x, tokens, experts)
        return combine(y, rows, weights, x.dtype)

    def parts(self, x: Tensor, chosen: Sequence[int], experts: Any) -> Tensor | None:
        """Outputs of experts in memory for one token x [1, H], not yet weighted: fp32 [len(chosen), H].
        None where numba's products cannot compute them."""
        found = None
        if self.multiplies(x, experts):
            found = locate(experts, np.array(chosen), x.dtype)
        one = np.arange(len(chosen) + 1), x, np.zeros(len(chosen), np.int64)
        return found and self.compute(*found, *one, experts)

    def compute(
        self,
        up: Matrices,
        down: Matrices,
        bounds: np.ndarray,
        x: Tensor,
        tokens: np.ndarray,
        of: Any,
    ) -> Tensor:
        """Outputs of the experts `of` for a step's n choices, not yet weighted: fp32 [n, H], by expert.

        bounds : [M + 1], where each expert's choices begin. tokens : [n], the token of each."""
        self.count(len(tokens), len(tokens), len(tokens))
        if gate := gate_of(of):
            return feed_forward(up, down, bounds, x, tokens, gate)
        return multiply(down, bounds, of.activate(multiply(up, bounds, x, tokens)))

    def _on_gpu(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor | None:
        """A few launches; None where weights do not lie as kernels read them. Where the module holds
        them nothing waits for the GPU, not even to refuse ids: what a token with such ids gives is
        NaN, and the next call tells why."""
        E, n, source = experts.num_experts, ids.numel(), experts.source
        y = None
        if source is None:
            if type(experts) is not SeamExperts:  # whose block may route to no expert
                n = int((ids < E).sum())
            if len(x) > 1:
                y = grouped_gemm.feed_forward(x, ids, weights, experts)
            found = self._kept([experts], x.dtype) if y is None else None
        elif len(x) > 1 and hasattr(source, "computing"):  # of an engine, which copies meanwhile
            found = self.banks([experts], x.dtype, [source.computing], x.device)
        else:
            chosen = ids.cpu().numpy()  # an engine has waited for them already
            there = chosen[(chosen >= 0) & (chosen < E)]
            n = len(there)
            found = self.banks([experts], x.dtype, [np.unique(there)], x.device)
        if found is not None:
            y = found[0](x, ids, weights)
            _triton()[0].check(x.device)
        if y is not None:
            self.count(n, n, n)
        return y

    # layers of a single token in one call, see `moelab.fast.layers`

    @contextmanager
    def token(self, experts: list[Any], dtype: torch.dtype) -> Iterator[tuple]:
        """While layers are computed whose modules hold their weights: (their `banks`, what is to be
        called with the `moelab.fast.layers.Computed`); the banks are None where the layers are to be
        run one by one."""
        yield self._kept(experts, dtype), self.count_layers

    def _kept(self, experts: list[Any], dtype: torch.dtype) -> Any:
        """Their `banks`, kept as long as the modules' weights stay the same."""
        parameters = [(of, w) for of in experts for w in compat.parameters_of(of.module).values()]
        state = dtype, [(id(of), id(of.source), w.data_ptr(), w.dtype) for of, w in parameters]
        known = self._banks.setdefault(experts[0], {})
        if known.get(len(experts), (None,))[0] != state:
            known[len(experts)] = state, self.banks(experts, dtype)
        return known[len(experts)][1]

    def count_layers(self, first: int, found: Any) -> None:
        """Count what was `Computed` of layers in one call, from the `first` on."""
        n = found.ids.shape[0] * found.ids.shape[1]
        self.count(n, n, n)

    def banks(
        self,
        experts: list[Any],
        dtype: torch.dtype,
        resident: list[Any] | None = None,
        device: torch.device | None = None,
    ) -> Any:
        """`Matrices` of up and of down of SiLU-gated experts of each layer, kinds [L] and rows [L, E, 4],
        0 for experts that are not resident; all are, by default. On a GPU a list, of each layer what
        `on_gpu` gives, of any activation. None if there are no such kernels for these."""
        if any((of.source is None) != (resident is None) or not plain(of) for of in experts):
            return None
        held = (w.device for w in experts[0].module.parameters())
        device = device or next(held, torch.device("cpu"))
        on_gpu = device.type in GPUS
        if not on_gpu and not (device.type == "cpu" and all(gate_of(of) == SILU for of in experts)):
            return None
        E = experts[0].num_experts
        tables = np.zeros((2, len(experts), E, 4), np.int64)
        found = []
        for layer, of in enumerate(experts):
            chosen = np.array(range(E) if resident is None else resident[layer], np.int64)
            if not len(chosen) or (both := locate(of, chosen, dtype, device.type)) is None:
                return None
            tables[:, layer, chosen] = [one.rows for one in both]
            found.append(both)
        if len({tuple((one.R, one.transposed) for one in both) for both in found}) > 1:
            return None
        if not on_gpu:
            return tuple(map(layers, zip(*found), tables))
        # From pageable memory the copy might wait for what the GPU computes.
        rows = torch.from_numpy(np.stack(tables, 1))
        rows = rows.pin_memory() if device.type == "cuda" else rows
        there = rows.to(device, non_blocking=True)
        calls = []
        for layer, of in enumerate(experts):
            mine = [one._replace(rows=rows[layer]) for one, rows in zip(found[layer], tables)]
            calls.append(self.on_gpu(of, mine, there[layer]))
        return None if None in calls else calls

    def update(
        self, banks: Any, experts: list[Any], moved: Mapping[Any, bool], dtype: torch.dtype
    ) -> None:
        """Update the `banks` of these layers, on a CPU.

        moved : (layer, expert) → True for one that has come into memory, False for one that has left."""
        for i, of in enumerate(experts):
            mine = {expert: stays for (layer, expert), stays in moved.items() if layer == of.layer}
            come = [expert for expert, stays in mine.items() if stays]
            for bank in banks if mine else ():
                bank.rows[i, [*mine]] = 0
            for bank, one in zip(banks, locate(of, np.array(come), dtype) if come else ()):
                bank.rows[i, come] = one.rows

    def on_gpu(
        self, experts: Any, found: Iterable[Matrices], tables: Tensor
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """What computes plain experts on a GPU, (x [T, H], ids [T, K], weights [T, K]) → [T, H], which
        may be captured for a token, with matrices whose rows of up and down `tables` [2, n, 4] has there.
        None if there are no such kernels."""
        kernels = _triton() if tables.device.type in GPUS else None
        if kernels is None or not all(map(kernels[0].multiplies, found)):
            return None
        gate = gate_of(experts)
        up, down = (kernels[0].bank(*of, gate) for of in zip(found, tables))
        there = ref(experts)  # as banks are kept as long as it lives
        activate = None if gate else lambda h: there().activate(h)

        def compute(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
            feed_forward = kernels[len(x) > 1].feed_forward
            with torch.cuda.device_of(x):  # Triton launches on the thread's GPU
                return feed_forward(up, down, x, ids, w, activate)

        return compute


def _triton() -> Any:
    """The kernels of a GPU, for a token and for several; None without Triton, where torch's own
    products do."""
    try:
        from moelab.experts import gemm_triton, gemv_triton
    except ImportError:
        return None
    return gemv_triton, gemm_triton
