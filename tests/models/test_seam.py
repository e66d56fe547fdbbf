"""The seam against transformers' own eager forward: bit for bit, on every architecture."""

from __future__ import annotations

import pytest
import torch

from moelab.models import discover, identity, open_model, plug, unplug
from moelab.models.seam import SeamExperts

from . import tiny


def generate(model, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy generation with a cache from two left-padded prompts: (tokens, logits of every step)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 96, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    if not model.config.is_encoder_decoder:
        ids[0, :4], mask[0, :4] = 0, 0
    else:
        ids[0, -4:], mask[0, -4:] = 0, 0
    out = model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False,
                         output_logits=True, return_dict_in_generate=True)
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_external_experts_equal_eager_bit_for_bit(name, dtype, tmp_path):
    folder = tiny.save(name, tmp_path / name, dtype)
    reference = open_model(folder)
    external = open_model(folder, experts="external")
    for layer in discover(external):
        assert isinstance(layer.experts, SeamExperts) and not layer.experts.resident
    for seed in range(2):
        tokens, logits = generate(reference, seed)
        tokens_external, logits_external = generate(external, seed)
        assert torch.equal(tokens, tokens_external)
        assert torch.equal(logits, logits_external)
