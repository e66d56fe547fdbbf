"""Weights packed for the CPU: each expert's matrices once in the blocked layout that oneDNN's kernels read.

Source: oneDNN's reordered weights, as torch.compile uses them on CPUs (`torch.ops.mkldnn._reorder_linear_weight` and
`_linear_pointwise`, private to torch: where they are missing, `Sorted` runs). An ordinary product packs the weights
each time it is called, which for the few dozen rows of an expert costs as much as the product; here it is done once.
With many tokens the experts are shared out among threads, the busiest first, each computed by one.

A packed copy is as large as the weights, and is kept beside them: twice the memory, for experts that the module itself
holds. Experts from a source may lie in memory that is used again, so they are computed by `Sorted`, unless the caller
says that they never change (`immutable`). A parameter changed in place is packed anew. Falls back to `Sorted` as well
for experts that are not plain, other devices, mixed types and gradients, and for bf16 and fp16 where the processor
has no instructions for them, for which oneDNN has no packed layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from moelab.experts.executor import dispatch, scatter, zeros
from moelab.experts.layout import activate, banks, names, on_cpu, plain, wants_grad
from moelab.experts.sorting import Sorted

_OPS = torch.ops.mkldnn
AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(_OPS, name) for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported",
                                     "_is_mkldnn_fp16_supported"))
#: dtype → whether the processor has instructions for it
SUPPORTED = {torch.float32: lambda: True, torch.bfloat16: lambda: _OPS._is_mkldnn_bf16_supported(),
             torch.float16: lambda: _OPS._is_mkldnn_fp16_supported()}

#: tokens an expert from which on two experts by a thread each are quicker than one by two, which wait for each other
ROWS = 8


def side_by_side(work: Callable[[Any], None], left: Any) -> None:
    """Call `work(left)` in as many threads as torch has, each with one for its operations; `left` is shared."""
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


class Packed(Sorted):
    """oneDNN products with packed weights.

    Parameters
    ----------
    immutable : experts from a source are packed and kept too, by layer and number: the source must always give the
        same values for the same expert.
    """

    def __init__(self, immutable: bool = False) -> None:
        super().__init__()
        self.immutable = immutable
        # (expert, name) → version and owner of what was packed, and the packed weight
        self._packed: WeakKeyDictionary[Any, dict[tuple[int, str], tuple]] = WeakKeyDictionary()

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if not AVAILABLE or not plain(experts) or not (experts.source is None or self.immutable):
            return super().run(x, ids, weights, experts)
        order = dispatch(ids, experts.num_experts)
        hit = order.hit()
        first = experts.weights(hit[0][0]) if hit else {}
        if not hit or not on_cpu(x, *first.values()) or not SUPPORTED[x.dtype]() \
                or wants_grad(x, weights, *first.values()):
            return super().run(x, ids, weights, experts)
        n = len(order)
        self.count(n, n, n)
        w = weights[order.tokens, order.choices]
        y = zeros(x, weights, experts).new_empty(n, x.shape[1])

        def compute(left: Iterator[tuple[int, slice]]) -> None:
            for e, of in left:
                torch.mul(self._ffn(x[order.tokens[of]], experts, e), w[of, None], out=y[of])
        if experts.source is None and n >= len(hit) * ROWS and len(hit) > 1 < torch.get_num_threads():
            side_by_side(compute, iter(sorted(hit, key=lambda found: found[1].start - found[1].stop)))
        else:
            compute(iter(hit))
        return scatter(x, weights, order.tokens, y, experts)

    def _ffn(self, x: Tensor, experts: Any, e: int) -> Tensor:
        up, down = names(experts)
        return self._linear(activate(experts, self._linear(x, experts, e, up)), experts, e, down)

    def _linear(self, x: Tensor, experts: Any, e: int, name: str) -> Tensor:
        kept, bank = self._packed.setdefault(experts, {}), banks(experts, name)
        # what it was packed from: a bank replaced or changed since is packed anew; tensors of inference mode don't tell
        version = None if bank is None else (id(bank), 0 if bank.is_inference() else bank._version)
        found = kept.get((e, name))
        if found is None or found[0] != version or (bank is not None and found[1]() is None):
            weight = experts.weights(e)[name].detach()
            weight = weight.mT.contiguous() if experts.is_transposed else weight
            owner = None if bank is None else ref(bank)         # while it lives, no other object has its id
            found = kept[e, name] = version, owner, _OPS._reorder_linear_weight(weight)
        bias = experts.weights(e)[name + "_bias"] if experts.has_bias else None
        return _OPS._linear_pointwise(x, found[2], bias, "none", [], "")

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights kept."""
        return sum(packed.numel() * packed.element_size()
                   for kept in self._packed.values() for *_, packed in kept.values())
