"""The fused decode kernels on a model: norms, routers, attention, layers of a single token; on a
GPU, graphs of layers.

Each is used only where a probe shows that it gives what the module gives. Prompts, batches, masks
and other devices take the modules' own forwards. Results are transformers' within the dtype's
tolerance, not bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moelab.fast.attention import DecodeAttention
from moelab.fast.dense import Pack
from moelab.fast.graphs import GraphLayer, GraphStretch
from moelab.fast.layers import DecodeLayer, DecodeStretch, stretches
from moelab.fast.modules import Linear, Norm, Router
from moelab.fast.packing import on_huge_pages, packer
from moelab.models.patches import Patches
from moelab.models.unchanged import FusedModule, forward
from moelab.store.layout import checksum

#: what `FastDecode` puts in place of forwards, in this order: probes of what is made of others use
#: theirs
KERNELS = Norm, Router, DecodeAttention, DecodeLayer, GraphLayer, Linear
STRETCHES = {DecodeLayer: DecodeStretch, GraphLayer: GraphStretch}
ROUTERS = "gate", "router"  # linear layers of these names choose experts


class FastDecode(Patches):
    """A model that uses the fused decode kernels; undone by `close`, or at the end of a `with`
    block.

    dense : one of `DENSE`: linear layers, attention's and the head too, but no routers, multiply by
        copies of their bf16 weights in that format, made now. bf12 is lossless: results differ in
        the order of sums only. The others round, prompts included; embeddings stay. Inputs must be
        a multiple of 64; ValueError if no layer's are. A weight that is replaced is used as it then
        is; of one that was edited in place the next prompt is a ValueError.
    fused : the forwards of `KERNELS` that were put on modules; one that had another is left alone.
        stretches : of layers that are one call for a token
        (`moelab.fast.layers`).
    """

    def __init__(self, model: nn.Module, dense: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.dense = dense
        self.fused: list[FusedModule] = []
        try:
            for weight in model.parameters():
                if weight.requires_grad:  # kernels record nothing
                    self.callback(weight.requires_grad_, True)
                    weight.requires_grad_(False)
            pack = packer(dense) if dense else None
            for kind in KERNELS:
                self._fuse(kind, pack)
            for weight in model.parameters():
                on_huge_pages(weight.data_ptr(), weight.nbytes if weight.is_cpu else 0)
            self.stretches = [one for part in model.modules() for one in stretches(part, STRETCHES)]
            if dense:
                self._guard_copies()
        except BaseException:
            self.close()
            raise

    def _fuse(self, kind: Any, pack: Pack | None) -> None:
        """Replace the forwards of all modules that a kernel is for."""
        for name, module in self.model.named_modules():
            packs = kind in (DecodeAttention, Linear) and not name.endswith(ROUTERS)
            options = [pack] if packs else []
            if forward(module) is None and (fused := kind.of(module, *options)) is not None:
                for one in (fused, *fused.inner):
                    if forward(one.module) is None:
                        self.put(one.module, "forward", one)
                    self.fused.append(one)
        for one in self.fused:  # their parts have other forwards now
            one.parts.seal()

    def _guard_copies(self) -> None:
        linears = [one for one in self.fused if isinstance(one, Linear) and one.packed]
        if not linears:
            raise ValueError(
                f"dense is {self.dense!r}, and no linear layer of this model can be: their weights must be "
                f"bf16 on the CPU, their inputs a multiple of 64"
            )
        weights = [one.module.weight for one in linears]
        self.copied = {weight: (weight.data_ptr(), _checksum(weight)) for weight in weights}
        base = getattr(self.model, "base_model", self.model)
        self.hook(base.register_forward_pre_hook, self._check_copies, with_kwargs=True)

    def _check_copies(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before a prompt: whether the copied weights are what they were. Edits of `.data` leave no
        other trace."""
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            return
        for name, weight in self.model.named_parameters():
            address, checksum = self.copied.get(weight, (None, None))
            if weight.data_ptr() == address and _checksum(weight) != checksum:
                raise ValueError(
                    f"{name} was edited after copies of it in {self.dense} had been made, with which "
                    f"tokens would still be computed: open the model without dense={self.dense!r}, then "
                    f"edit it"
                )


def _checksum(weight: Tensor) -> str:
    return checksum(weight.detach().contiguous().view(torch.uint8).numpy())
