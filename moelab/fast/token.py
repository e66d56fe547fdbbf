"""A decoder model of a single token: embedding, layers and norm without what transformers does
between them.

For a token that attends to all before it there is no mask to make, and layers of a stretch are no
modules to call. Prompts, batches, masks, other caches and outputs that are asked for take the
model's own forward.

    ids [1, 1] or x [1, 1, H], and a cache of S tokens    →    the norm of x after the last layer, and S + 1 tokens
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moelab.fast.graphs import GraphLayer, GraphStretch
from moelab.fast.layers import DecodeLayer, DecodeStretch, OneTokenLayer, stretches
from moelab.models import compat
from moelab.models.unchanged import FusedModule, Unchanged, forward

#: transformers' families whose models do nothing between their layers, and whose blocks give experts
#: the router's choice
FAMILIES = "MixtralModel", "OlmoeModel", "Qwen2MoeModel", "Qwen3MoeModel"
STRETCHES = {DecodeLayer: DecodeStretch, GraphLayer: GraphStretch}
OUTPUTS = "output_hidden_states", "output_attentions", "output_router_logits"


class DecodeModel(FusedModule):
    """The forward of a decoder model whose layers all have one of ours."""

    def __init__(self, module: nn.Module, layers: list[OneTokenLayer]) -> None:
        super().__init__(module, Unchanged(called=[module, module.layers]))
        self.layers = layers
        self.stretches = stretches(layers, STRETCHES)

    @classmethod
    def of(cls, module: nn.Module) -> DecodeModel | None:
        """For this model if it is of one of the `FAMILIES`."""
        if type(module).__name__ not in FAMILIES:
            return None
        layers = [forward(layer) for layer in module.layers]
        return cls(module, layers) if all(isinstance(of, OneTokenLayer) for of in layers) else None

    def fused(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> Any:
        model, cache = self.module, past_key_values
        given = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
        if cache is None or given is None or given.numel() != 1:
            return None
        if any(value is not None and value is not False for value in others.values()):
            return None
        if attention_mask is not None and not (
            isinstance(attention_mask, Tensor)
            and attention_mask.dim() == 2
            and attention_mask.all()
        ):
            return None
        config = model.config
        if any(getattr(config, name, False) for name in OUTPUTS) or not config.return_dict:
            return None
        if config.num_hidden_layers != len(self.layers) or not self.free():
            return None
        memories = [layer.attention.memory(cache) for layer in self.layers]
        if None in memories:
            return None
        x = model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.full((1, 1), cache.get_seq_length(), device=x.device)
        angles = model.rotary_emb(x, position_ids)
        token = {"position_embeddings": angles, "past_key_values": cache}
        i = 0
        while i < len(self.layers):
            done = 0
            if (stretch := self.stretches.get(i)) and (call := stretch.call(x, **token)):
                x, done = stretch(*call[:2], memories[i:])
            if not done:
                x = model.layers[i](
                    x, attention_mask=None, position_ids=position_ids, use_cache=use_cache, **token
                )
            i += done or 1
        return compat.model_output(model.norm(x), cache)
