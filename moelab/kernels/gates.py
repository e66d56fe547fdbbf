"""What is between an expert's up and down projections, as kernels compute it."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple


class Gate(NamedTuple):
    """Of a gate g and an up u, both at most `limit` and u at least minus that:
    g · sigmoid(alpha · g) · (u + plus).

    interleaved : whether gates and ups lie in turn, not all gates first.
    """

    interleaved: bool = False
    alpha: float = 1.0
    limit: float = inf
    plus: float = 0.0

    def __call__(self, g: Any, u: Any) -> Any:
        """Of torch's tensors."""
        g = g.clamp(max=self.limit)
        return g * (self.alpha * g).sigmoid() * (u.clamp(-self.limit, self.limit) + self.plus)

    def of(self, h: Any) -> Any:
        """[n, 2I] → [n, I]."""
        halves = h.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else h.chunk(2, -1)
        return self(*halves)


#: silu(gate) · up
SILU = Gate()
