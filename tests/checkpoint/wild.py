"""Random models of every text architecture, in memory, in which no weight is neutral: for tests
across architectures."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers.models.auto import modeling_auto

from moelab.models import compat, discover
from tests.models import tiny

TEXT = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "switch_transformers", "deepseek"}
#: what would be one, or zero, in a small random model, and hide that it is not used
CHANGES = {
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoeshared", "granitemoehybrid"),
        {"residual_multiplier": 0.37, "shared_intermediate_size": 40},
    ),
    **dict.fromkeys(("deepseek_v3", "minimax_m3_vl_text"), {"routed_scaling_factor": 2.5}),
    "laguna": {"moe_routed_scaling_factor": 2.5},
    "afmoe": {"num_dense_layers": 1, "route_scale": 1.7},
    "phimoe": {"num_experts_per_tok": 2},
    "minimax": {"full_attn_alpha_factor": 3.5, "mlp_alpha_factor": 2.0},
}
#: in which discover finds no block of routed experts
ELSEWHERE = ("doge", "jetmoe", "nllb_moe")


@cache
def built(name: str, dtype: torch.dtype = torch.float32):
    """A random model in which no weight is neutral: norms and correction biases are not what they
    are initialised to."""
    config = tiny.config(name, **CHANGES.get(name, {}))
    torch.manual_seed(0)
    model = compat.model_class(config)._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in key:
                continue
            if tensor.dim() > 1:
                tensor.normal_(0, 0.5 if "router" in key or ".gate." in key else 0.15)
            elif "bias" in key:
                tensor.normal_(0, 0.2)
            elif "norm" in key:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model


def names() -> list[str]:
    return sorted(name for name in tiny.every() if name in TEXT and name not in ELSEWHERE)


def model_of(name: str, dtype: torch.dtype = torch.float32):
    try:
        model = built(name, dtype)
        discover(model)
    except Exception as error:
        pytest.skip(f"{name} is not built small: {type(error).__name__} {error}")
    return model
