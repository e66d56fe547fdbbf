"""The fused decode kernels on a model: norms, routers, attention, layers of a single token on the CPU.

Each is used only where a probe shows that it gives what the module gives. Prompts, batches, masks and other devices
take the modules' own forwards. Results are transformers' within the dtype's tolerance, not bit for bit.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor, nn

from moelab.kernels.linear import FastLinears
from moelab.models.patches import Patches, bare
from moelab.store import bf12
from moelab.store.reader import aligned_buffer

try:
    from moelab.kernels.attention import decode_attention
    from moelab.kernels.layer import decode_layer
    from moelab.kernels.norms import fast_norm, fast_router
    KERNELS = {"norms": fast_norm, "routers": fast_router, "attentions": decode_attention, "layers": decode_layer}
except ModuleNotFoundError as error:
    if error.name != "numba":
        raise
    KERNELS = {}                        # nothing is replaced then


class FastDecode(Patches):
    """A model that uses the fused decode kernels; undone by `close`, or at the end of a `with` block.

    rows : up to how many rows linear layers use them; None measures it.
    packed : whether linear layers, attention's and the head too, multiply by bf12 copies of their weights, made now:
        75 % more memory for these, 25 % fewer bytes a token. Lossless: results differ in the order of sums only.
    norms, routers, attentions, layers, linears : count the modules with another forward; one that had another is left
        alone.
    """

    def __init__(self, model: nn.Module, rows: float | None = None, packed: bool = False) -> None:
        super().__init__()
        self.norms = self.routers = self.attentions = self.layers = self.linears = 0
        pack = as_bf12 if packed else None
        find_linear = FastLinears(rows, pack)
        self.rows = find_linear.rows
        try:
            for what, find in (KERNELS | {"linears": find_linear}).items():
                find = partial(find, pack=pack) if what == "attentions" else find
                for module in model.modules():                  # probes of what is made of others use theirs
                    if bare(module) and (fast := find(module)) is not None:
                        self.wrap(module, "forward", lambda _, fast=fast: fast)
                        setattr(self, what, getattr(self, what) + 1)
        except BaseException:
            self.close()
            raise


def as_bf12(weight: Tensor) -> tuple[np.ndarray, list[int]] | None:
    """A weight as bf12 in memory, and its row for the kernels (`moelab.kernels.products.Pack`)."""
    if not bf12.fits(weight.shape) or (blob := bf12.pack_tensor(weight)) is None:
        return None
    memory = aligned_buffer(len(blob), 64)
    memory[:] = np.frombuffer(blob, np.uint8)
    return memory, bf12.row(memory.ctypes.data, len(blob), weight.numel())
