"""INT8 weights that are never dequantised: torch's product of bf16 or float rows with INT8 weights.

The experts must come from `Quantized(layers, "int8")`. Its codes go to `torch._weight_int8pack_mm` (private to torch)
as they are: a matrix is read at one byte a weight, widened in registers, multiplied in float32, scaled by its channel's
scale and rounded to the dtype of the rows. Against dequantising on use this saves writing and reading a copy of every
expert that is hit; the results agree to the rounding of that dtype, to which the scales are rounded too.

The kernel reads past the end of matrices whose inputs are no multiple of 16, which gives wrong results or a crash, so
others than multiples of 32 never reach it. They are computed by `Sorted`, which dequantises, and so are transposed
layouts, experts that are not plain, and other devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import dispatch, scatter
from moelab.experts.layout import activate, names, plain
from moelab.experts.quantization import Quantized
from moelab.experts.sorting import Sorted

AVAILABLE = hasattr(torch, "_weight_int8pack_mm")
MULTIPLE = 32               # of H and I


class Int8(Sorted):
    """Sorted by expert, with weights that stay INT8.

    Raises
    ------
    ValueError : when run, experts that come from anywhere else.
    """

    lossless = False            # every choice is executed, but weights are rounded

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        source = experts.source
        if not isinstance(source, Quantized) or source.format != "int8":
            raise ValueError("these experts' weights are not INT8: quantise them with moelab.models.plug(model, source="
                             "Quantized(plug(model), 'int8')) of moelab.experts.quantization, or use another executor")
        if not AVAILABLE or x.device.type != "cpu" or not plain(experts) or experts.is_transposed:
            return super().run(x, ids, weights, experts)
        up, down = names(experts)
        if any(kept.codes.shape[1] % MULTIPLE for kept in map(source.kept[experts.layer, 0].get, (up, down))):
            return super().run(x, ids, weights, experts)
        order = dispatch(ids, experts.num_experts)
        n = len(order)
        self.count(n, n, n)
        rows, w = x[order.tokens], weights[order.tokens, order.choices]
        parts = [x[:0]]
        for e, of in order.hit():
            kept = source.kept[experts.layer, e]
            h = activate(experts, _linear(rows[of], kept, up))
            parts.append(_linear(h, kept, down) * w[of, None])
        return scatter(x, weights, order.tokens, torch.cat(parts), experts)


def _linear(x: Tensor, kept: dict[str, Any], name: str) -> Tensor:
    """x [n, in] → [n, out]."""
    y = torch._weight_int8pack_mm(x.contiguous(), kept[name].codes, kept[name].scale.to(x.dtype).view(-1))
    return y + kept[name + "_bias"].tensor if name + "_bias" in kept else y
