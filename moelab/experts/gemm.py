"""GEMMs for many tokens: torch's grouped product over all experts, and oneDNN's products with weights packed once.

An ordinary product packs its weights into oneDNN's blocked layout each time, which for the few dozen rows of an expert
costs as much as the product. `Packed` does it once, as torch.compile does on CPUs (`torch.ops.mkldnn`, private to
torch): the copy takes as much memory again as the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from moelab.experts.executor import Dispatch, Sorted, activate, banks, dispatch, names, plain, scatter, zeros

_GROUPED_MM = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_OPS = torch.ops.mkldnn
AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(_OPS, name) for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported",
                                     "_is_mkldnn_fp16_supported"))
#: dtype → whether the processor has instructions for it
SUPPORTED = {torch.float32: lambda: True, torch.bfloat16: lambda: _OPS._is_mkldnn_bf16_supported(),
             torch.float16: lambda: _OPS._is_mkldnn_fp16_supported()}
#: tokens an expert from which on two experts by a thread each are faster than one by two, which wait for each other
ROWS = 8


class GroupedMM(Sorted):
    """`torch.nn.functional.grouped_mm` of rows sorted by expert and stacked weights [E, …]; `Sorted` with a source, for
    experts that are not plain, and where torch has no kernel for the device, type or alignment (16 bytes)."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if not plain(experts) or not all(_usable(x, banks(experts, name)) for name in names(experts)):
            return super().run(x, ids, weights, experts)
        order = dispatch(ids, experts.num_experts)
        if not len(order):
            return super().run(x, ids, weights, experts)
        self.count(len(order), len(order), len(order))
        up, down = names(experts)
        h = activate(experts, _grouped_linear(x[order.tokens], experts, up, order))
        y = _grouped_linear(h, experts, down, order) * weights[order.tokens, order.choices][:, None]
        return scatter(x, weights, order.tokens, y, experts)


def _usable(x: Tensor, bank: Tensor | None) -> bool:
    if _GROUPED_MM is None or bank is None or bank.device != x.device or bank.dtype != x.dtype:
        return False
    aligned = all(size * bank.element_size() % 16 == 0 for size in bank.shape[1:]) and bank.data_ptr() % 16 == 0
    return aligned and (x.device.type == "cpu" or x.dtype == torch.bfloat16)


def _grouped_linear(rows: Tensor, experts: Any, name: str, order: Dispatch) -> Tensor:
    bank = getattr(experts, name)
    y = _GROUPED_MM(rows.contiguous(), bank if experts.is_transposed else bank.mT, offs=order.offsets[1:].int())
    return y + getattr(experts, name + "_bias").repeat_interleave(order.counts, dim=0) if experts.has_bias else y


class Packed(Sorted):
    """oneDNN products with packed weights; a parameter that was changed is packed again.

    With many tokens the experts are shared out among workers, those with most tokens first, each computed by one.
    `Sorted` where torch's private operations are missing, for experts that are not plain, other devices, mixed types,
    gradients, bf16 and fp16 without the processor's instructions for them, and experts from a source, whose memory may
    be used again.
    """

    def __init__(self) -> None:
        super().__init__()
        # (expert, name) → version and owner of what was packed, and the packed weight
        self._packed: WeakKeyDictionary[Any, dict[tuple[int, str], tuple]] = WeakKeyDictionary()

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if not AVAILABLE or not plain(experts) or any(banks(experts, name) is None for name in names(experts)):
            return super().run(x, ids, weights, experts)
        order = dispatch(ids, experts.num_experts)
        hit = order.hit()
        first = experts.weights(hit[0][0]) if hit else {}
        if not hit or not _on_cpu(x, *first.values()) or not SUPPORTED[x.dtype]():
            return super().run(x, ids, weights, experts)
        n = len(order)
        self.count(n, n, n)
        w, (up, down) = weights[order.tokens, order.choices], names(experts)
        y = zeros(x, weights, experts).new_empty(n, x.shape[1])

        def compute(left: Iterator[tuple[int, slice]]) -> None:
            for e, of in left:
                h = activate(experts, self._linear(x[order.tokens[of]], experts, e, up))
                torch.mul(self._linear(h, experts, e, down), w[of, None], out=y[of])
        if n >= len(hit) * ROWS and len(hit) > 1 < torch.get_num_threads():
            _in_workers(compute, iter(sorted(hit, key=lambda found: found[1].start - found[1].stop)))
        else:
            compute(iter(hit))
        return scatter(x, weights, order.tokens, y, experts)

    def _linear(self, x: Tensor, experts: Any, e: int, name: str) -> Tensor:
        kept, bank = self._packed.setdefault(experts, {}), banks(experts, name)
        # a bank that was replaced or changed since has another version; tensors of inference mode do not tell
        version = id(bank), 0 if bank.is_inference() else bank._version
        found = kept.get((e, name))
        if found is None or found[0] != version or found[1]() is None:     # while the bank lives, no other has its id
            weight = experts.weights(e)[name].detach()
            weight = weight.mT.contiguous() if experts.is_transposed else weight
            found = kept[e, name] = version, ref(bank), _OPS._reorder_linear_weight(weight)
        bias = experts.weights(e)[name + "_bias"] if experts.has_bias else None
        return _OPS._linear_pointwise(x, found[2], bias, "none", [], "")

    @property
    def nbytes(self) -> int:
        return sum(packed.numel() * packed.element_size()
                   for kept in self._packed.values() for *_, packed in kept.values())


def _on_cpu(x: Tensor, *weights: Tensor) -> bool:
    """Whether all are CPU tensors of one floating type."""
    return x.device.type == "cpu" and x.dtype in SUPPORTED \
        and all(w.device == x.device and w.dtype == x.dtype for w in weights)


def _in_workers(work: Callable[[Any], None], left: Any) -> None:
    """Call `work(left)` in as many workers as torch has threads, each computing on one; `left` is shared."""
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def alone() -> None:
        torch.set_num_threads(1)                            # of this thread; but new ones would begin with it, too
        with torch.inference_mode(inference), torch.no_grad():
            work(left)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(alone) for _ in range(threads)]:
                done.result()
    finally:
        torch.set_num_threads(threads)
