"""The fused decode kernels on a model: norms, routers, attention, layers of a single token; on a
GPU, graphs of layers.

Each is used only where a probe shows that it gives what the module gives. Prompts, batches, masks
and other devices take the modules' own forwards. Results are transformers' within the dtype's
tolerance, not bit for bit."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moelab.fast.attention import DecodeAttention
from moelab.fast.graphs import GraphLayer
from moelab.fast.layers import DecodeLayer
from moelab.fast.modules import Linear, Norm, Router
from moelab.fast.packing import on_huge_pages, packed_as
from moelab.fast.token import DecodeModel
from moelab.models.patches import Patches
from moelab.models.unchanged import FusedModule, forward

#: what `FastDecode` puts in place of forwards, in this order: probes of what is made of others use
#: theirs
KERNELS = Norm, Router, DecodeAttention, DecodeLayer, GraphLayer, Linear, DecodeModel
ROUTERS = "gate", "router"  # linear layers of these names choose experts


class FastDecode(Patches):
    """A model that uses the fused decode kernels; undone by `close`, or at the end of a `with`
    block.

    dense : one of `DENSE`: linear layers, attention's and the head too, but no routers, have bf16
        weights packed so (`moelab.store.packed`), which cannot be edited; what they were stays beside
        them. bf12 is lossless: results differ in the order of sums only. The others round, prompts
        included; embeddings stay. Inputs must be a multiple of 64; ValueError if no layer's are.
    fused : the forwards of `KERNELS` that were put on modules; one that had another is left alone.
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
            if dense:
                self._pack(dense)
            for kind in KERNELS:
                self._fuse(kind)
            for weight in model.parameters():
                lying = getattr(weight, "blob", weight)
                on_huge_pages(lying.data_ptr(), lying.nbytes if lying.is_cpu else 0)
        except BaseException:
            self.close()
            raise

    def _fuse(self, kind: Any) -> None:
        """Replace the forwards of all modules that a kernel is for."""
        for module in self.model.modules():
            if forward(module) is None and (fused := kind.of(module)) is not None:
                for one in (fused, *fused.inner):
                    if forward(one.module) is None:
                        self.put(one.module, "forward", one)
                    self.fused.append(one)
        for one in self.fused:  # their parts have other forwards now
            one.parts.seal()

    def _pack(self, dense: str) -> None:
        """Put packed weights into all linear layers that are no routers."""
        made: dict[int, Any] = {}
        for name, module in self.model.named_modules():
            if type(module) is not nn.Linear or name.endswith(ROUTERS):
                continue
            weight = module.weight
            if id(weight) not in made:
                found = packed_as(dense, weight)
                made[id(weight)] = found if found is None else nn.Parameter(found, False)
            if (ours := made[id(weight)]) is not None:
                module.weight = ours
                self.callback(_put_back, module, ours, weight)
        if not any(ours is not None for ours in made.values()):
            raise ValueError(
                f"dense is {dense!r}, and no linear layer of this model can be: their weights must be "
                f"bf16 on the CPU, their inputs a multiple of 64"
            )


def _put_back(module: nn.Module, ours: Tensor, weight: Tensor) -> None:
    if module.weight is ours:
        module.weight = weight
