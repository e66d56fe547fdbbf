"""The fused decode kernels on a model: norms, routers, attention and linear layers of a single token on the CPU.

Each is used only where a probe shows that it gives what the module gives. Prompts, batches, masks and other devices
take the modules' own forwards. Results are transformers' within the dtype's tolerance, not bit for bit.
"""

from __future__ import annotations

from torch import nn

from moelab.kernels.linear import FastLinears
from moelab.models.patches import Patches, bare

try:
    from moelab.kernels.attention import decode_attention
    from moelab.kernels.norms import fast_norm, fast_router
    KERNELS = {"norms": fast_norm, "routers": fast_router, "attentions": decode_attention}
except ModuleNotFoundError as error:
    if error.name != "numba":
        raise
    KERNELS = {}                        # nothing is replaced then


class FastDecode(Patches):
    """A model that uses the fused decode kernels; undone by `close`, or at the end of a `with` block.

    rows : up to how many rows linear layers use them; None measures it.
    norms, routers, attentions, linears : count the modules with another forward. One that had another is left alone.
    """

    def __init__(self, model: nn.Module, rows: float | None = None) -> None:
        super().__init__()
        self.norms = self.routers = self.attentions = self.linears = 0
        find_linear = FastLinears(rows)
        self.rows = find_linear.rows
        try:
            for what, find in (KERNELS | {"linears": find_linear}).items():
                for module in model.modules():                  # attention's probe is of the norms in it, too
                    if bare(module) and (fast := find(module)) is not None:
                        self.wrap(module, "forward", lambda _, fast=fast: fast)
                        setattr(self, what, getattr(self, what) + 1)
        except BaseException:
            self.close()
            raise
