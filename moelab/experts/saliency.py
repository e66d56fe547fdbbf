"""Saliency: how strong a token is where it enters an MoE layer (NPUMoE §3.2).

A token that must be dropped from an overflowing expert should be one that matters little. NPUMoE ranks tokens by the
L2 norm of the attention output of the same decoder layer, which costs a norm and is there before the experts run.
Forward hooks on the attention modules keep these norms, one vector a layer, for `moelab.experts.overflow`.

    attention output [batch, S, H], before the residual is added → norms [T] with T = batch·S in order

Each forward pass overwrites what the last left, so it works in chunked prefill and in decode. Left out: decoder
layers whose MoE block has no attention beside it (Switch).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: names under which architectures keep a decoder layer's attention
NAMES = ("self_attn", "attention", "attn", "self_attention", "linear_attn")


class Saliency:
    """Context manager: while it is open, `saliency[layer]` are the norms [T] of that layer's latest pass.

    Parameters
    ----------
    model : the model that the layers are of.
    layers : its MoE layers, as `moelab.models.discover` or `plug` return them: objects with `index` and `name`.

    Raises
    ------
    ValueError : a layer without an attention module beside its MoE block.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Any]) -> None:
        self._attention = {layer.index: _attention_beside(model, layer.name) for layer in layers}
        self._norms: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Saliency:
        for index, attention in self._attention.items():
            self._hooks.append(attention.register_forward_hook(self._keep(index)))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._norms.clear()

    def __getitem__(self, layer: int) -> Tensor:
        """Norms [T], float32, of the layer's tokens in this forward pass.

        Raises
        ------
        KeyError : none were recorded.
        """
        if layer not in self._norms:
            raise KeyError(f"no saliency was recorded for layer {layer}: run the model inside `with saliency:`")
        return self._norms[layer]

    def _keep(self, index: int):
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            output = output if isinstance(output, Tensor) else output[0]
            self._norms[index] = torch.linalg.vector_norm(output.detach().float(), dim=-1).flatten()
        return hook


def _attention_beside(model: nn.Module, name: str) -> nn.Module:
    parent = model.get_submodule(name.rpartition(".")[0])
    found = next((getattr(parent, n) for n in NAMES if isinstance(getattr(parent, n, None), nn.Module)), None)
    if found is None:
        have = ", ".join(child for child, _ in parent.named_children())
        raise ValueError(f"beside the MoE block {name} there is no attention module named {', '.join(NAMES)} (there "
                         f"are: {have}), so this model has no saliency; choose another order, such as 'router'")
    return found
