"""Inference only: kernels, and experts that come and go, keep nothing of which a gradient could be
made.

So who asks for one that would pass them (by a `backward()`, through an adapter that is trained or
through embeddings as inputs) is told so, and not given another. Parameters that the executor
"exact" computes with stay as transformers has them: torch multiplies by one that requires no
gradient in another order, which shows in the last bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Refused(torch.autograd.Function):
    """Tensors as they are, whose gradient is an error."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *_: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "moelab opens models for inference only, and no gradient passes their experts. Compute "
            "under torch.no_grad(), or train with transformers; a model opened without memory= and with "
            'executor="exact" can be trained'
        )


def refuse(y: Tensor, *of: Tensor) -> Tensor:
    """y, which was computed without recording; its gradient is an error if any of these tensors
    wants one."""
    return _Refused.apply(y, *of) if any(t.requires_grad for t in of) else y
