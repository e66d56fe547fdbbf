"""Experts of any layout behind the seam, and routings of any skew, for tests."""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from moelab.models import SeamExperts

#: name → (gated, biases, transposed, concatenated)
LAYOUTS = {
    "gated": (True, False, False, True),
    "clamped": (True, False, False, True),
    "transposed": (True, False, True, True),
    "interleaved": (True, True, True, False),
    "bias": (True, True, False, True),
    "ungated": (False, False, False, True),
    "ungated bias": (False, True, True, True),
}


def make_experts(
    E: int, H: int, I: int, layout: str = "gated", dtype: torch.dtype = torch.float32, seed: int = 0
):
    """An experts module of E experts as transformers defines them, behind the seam, with random
    weights."""
    gated, biased, transposed, concatenated = LAYOUTS[layout]
    rng = torch.Generator().manual_seed(seed)

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = E, ACT2FN["silu"]
            up, wide = ("gate_up_proj", 2 * I) if gated else ("up_proj", I)
            for name, out, inner in ((up, wide, H), ("down_proj", H, I)):
                shape = (E, inner, out) if transposed else (E, out, inner)
                setattr(
                    self,
                    name,
                    nn.Parameter((torch.randn(shape, generator=rng) / inner**0.5).to(dtype)),
                )
                if biased:
                    bias = torch.randn(E, out, generator=rng) / 4
                    setattr(self, name + "_bias", nn.Parameter(bias.to(dtype)))

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise RuntimeError("only through the seam")

        if layout == "clamped":  # as DeepSeek-V4 does
            limit = 10

            def _apply_gate(self, gate_up):
                gate, up = gate_up.chunk(2, -1)
                return self.act_fn(gate.clamp(max=10)) * up.clamp(-10, 10)

        if not concatenated:  # as GPT-OSS does
            limit = 7

            def _apply_gate(self, gate_up):
                gate, up = gate_up[..., ::2], gate_up[..., 1::2]
                return (
                    (up.clamp(-7, 7) + 1)
                    * gate.clamp(max=7)
                    * torch.sigmoid(1.702 * gate.clamp(max=7))
                )

    cls = use_experts_implementation(
        is_concatenated=concatenated, is_transposed=transposed, has_bias=biased, has_gate=gated
    )(Experts)
    experts = (
        cls(type("Config", (), {"_experts_implementation": "eager"})()).requires_grad_(False).eval()
    )
    return SeamExperts(experts)


def make_routing(
    T: int, E: int, K: int, skew: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float32
):
    """(ids [T, K] without repetition, weights [T, K] that sum to one) with Zipf popularity of the
    given exponent."""
    rng = torch.Generator().manual_seed(seed)
    score = -skew * torch.log(torch.arange(1, E + 1).double())
    gumbel = -torch.log(
        -torch.log(torch.rand(T, E, generator=rng, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    )
    ids = (score + gumbel).topk(K, dim=-1).indices
    weights = torch.rand(T, K, generator=rng) + 0.05
    return ids, (weights / weights.sum(-1, keepdim=True)).to(dtype)


def naive(x, ids, weights, experts):
    """A loop over experts with plain matrix products, in double precision: the oracle."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(experts.num_experts):
        tokens, choice = (ids == e).nonzero(as_tuple=True)
        if len(tokens):
            y = _expert(x[tokens], e, experts) * weights[tokens, choice, None].double()
            out.index_add_(0, tokens, y)
    return out


def _expert(x, e, experts):
    w, h = {name: p.double() for name, p in experts.own(e).items()}, x.double()
    for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
        h = h @ (w[name] if experts.is_transposed else w[name].T)
        h = h + w[name + "_bias"] if experts.has_bias else h
        h = h if name == "down_proj" else experts.activate(h)
    return h
