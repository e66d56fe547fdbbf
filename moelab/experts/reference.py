"""The reference: a loop over the experts that are hit, in the order and arithmetic of transformers' eager experts.

Every lossless executor is compared with this one. For each expert the tokens that chose it are gathered, those that
made it their first choice before those of the second, its weights are asked for once, and its weighted contributions
are summed in ascending order of experts: bit for bit what the architecture's own code gives.
Left out: all that would make it fast.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moelab.experts.executor import Executor


class Reference(Executor):
    """Eager's arithmetic, one expert at a time."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        contributions, done = [], 0
        for e in range(experts.num_experts):
            choice, tokens = (ids.T == e).nonzero(as_tuple=True)
            if len(tokens):
                y = experts.contribution(x, tokens, weights[tokens, choice], experts.weights(e))
                contributions.append((e, tokens, y))
                done += len(tokens)
        self.count(done, done, done)
        return experts.accumulate(x, contributions)
