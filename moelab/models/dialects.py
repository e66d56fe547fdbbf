"""Blocks with another interface than `experts(hidden_states, top_k_index, top_k_weights)`,
translated for the seam; and experts that transformers does not dispatch by name.

Llama 4's router returns dense scores, which scale the experts' *input*; Switch's a one-hot tensor
without the tokens that were dropped; LongCat's ids go on beyond its experts, to some that give back
their input; DBRX's router returns logits alone. Shapes: ids [T, K], E means "no expert"; weights [T, K].

What is unusual, and the table that says it:

    what the router's forward returns          `ROUTING`, also asked by recording and predicting
    the router's forward takes [B, S, H]       `SEQUENCES`
    how the block calls its experts            `BLOCKS`
    how an expert computes, or is summed       `moelab.models.experts.KINDS`
    what the block calls its router            `moelab.models.seam.ROUTERS`
    where the config says E, K, H, …           `moelab/base/configs.toml`
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from moelab.models import compat, experts


def _llama4_routing(block: nn.Module, output: Any) -> tuple[Tensor, Tensor]:
    scores, logits = output  # [T, E] each
    ids = logits.topk(block.router.top_k, dim=1).indices
    return ids, scores.gather(1, ids)


def _switch_routing(block: nn.Module, output: Any) -> tuple[Tensor, Tensor]:
    chosen, probability, _ = output  # one-hot [B, S, E], [B, S, 1]
    chosen = chosen.reshape(-1, chosen.shape[-1])
    ids = torch.where(chosen.any(-1), chosen.argmax(-1), block.router.num_experts)
    return ids[:, None], probability.reshape(-1, 1)


def _longcat_routing(block: nn.Module, output: Any) -> tuple[Tensor, Tensor]:
    _, weights, ids = output
    return ids.clamp(max=block.router.num_experts), weights


def _dbrx_routing(block: nn.Module, output: Any) -> tuple[Tensor, Tensor]:
    weights, ids = block.route_tokens_to_experts(output)  # of logits
    return ids, weights


#: router class → how to read its output, of its block and that; all others return (logits, weights, ids)
ROUTING = {
    "Llama4Router": _llama4_routing,
    "SwitchTransformersTop1Router": _switch_routing,
    "LongcatFlashTopkRouter": _longcat_routing,
    "DbrxRouter": _dbrx_routing,
}

#: router classes whose forward takes [B, S, H]; all others take [T, H]
SEQUENCES = ("SwitchTransformersTop1Router", "AfmoeTokenChoiceRouter", "ZayaRouter")


def _llama4_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    h = hidden_states.reshape(-1, self.hidden_dim)
    output = self.router(h)
    ids, weights = _llama4_routing(self, output)
    return self.shared_expert(h).add_(self.experts(h, ids, weights)), output[1]


def _routed_forward(self: Any, hidden_states: Tensor) -> Tensor:
    ids, weights = ROUTING[type(self.router).__name__](self, self.router(hidden_states))
    h = hidden_states.reshape(-1, hidden_states.shape[-1])
    return self.experts(h, ids, weights).reshape(hidden_states.shape)


def _longcat_forward(self: Any, hidden_states: Tensor) -> Tensor:
    _, _, all_ids = output = self.router(hidden_states)
    ids, weights = _longcat_routing(self, output)
    x = hidden_states.view(-1, hidden_states.shape[-1])
    out = self.experts(x, ids, weights)
    for expert in range(
        self.experts.num_routed_experts, self.experts.total_experts
    ):  # they give x itself
        choice, token = (expert == all_ids.T).nonzero(as_tuple=True)
        out.index_add_(0, token, (x[token] * weights[token, choice, None]).to(out.dtype))
    return out.view(hidden_states.shape)


#: block class → its forward in the seam's terms
BLOCKS = {
    "Llama4TextMoe": _llama4_forward,
    "SwitchTransformersSparseMLP": _routed_forward,
    "LongcatFlashMoE": _longcat_forward,
    "DbrxFFN": _routed_forward,
}


def block_class(cls: type) -> type:
    """The class of a block that calls its experts with (x, ids, weights)."""
    translation = BLOCKS.get(cls.__name__)
    return cls if translation is None else _subclass(cls, translation)


def experts_class(cls: type) -> type:
    """The class of experts whose forward is the seam's, or which transformers dispatches to it."""
    by_name = compat.dispatches_by_name(cls) or cls.forward is experts.run
    return cls if by_name else _subclass(cls, experts.run)


@cache
def _subclass(cls: type, forward: Any) -> type:
    """A class with another forward than its `stock` class."""
    return type("Seam" + cls.__name__, (cls,), {"forward": forward, "stock": cls})
