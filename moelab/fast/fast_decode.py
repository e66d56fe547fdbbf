"""The fused decode kernels on a model: norms, routers, attention, layers of a single token; on a
GPU, graphs of layers.

Each is used only where a probe shows that it gives what the module gives. Prompts, batches, masks
and other devices take the modules' own forwards. Results are transformers' within the dtype's
tolerance, not bit for bit."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moelab.fast.attention import decode_attention
from moelab.fast.dense import Matrices
from moelab.fast.graphs import graph_layer
from moelab.fast.layers import decode_layer, stretches
from moelab.fast.modules import FastLinears, fast_norm, fast_router
from moelab.kernels.products import PACKED
from moelab.models.patches import Patches, bare
from moelab.store import bf12, fewbit
from moelab.store.layout import CHECKSUMS
from moelab.store.reader import aligned_buffer

KERNELS = {
    "norms": fast_norm,
    "routers": fast_router,
    "attentions": decode_attention,
    "layers": decode_layer,
    "graphs": graph_layer,
}
#: what linear layers can be multiplied in; the last three round
DENSE = "bf12", "int8", "int4", "mxfp4"
ROUTERS = "gate", "router"  # linear layers of these names choose experts
HUGE, COLLAPSE = 1 << 21, 25  # bytes of a page; Linux's MADV_COLLAPSE


class FastDecode(Patches):
    """A model that uses the fused decode kernels; undone by `close`, or at the end of a `with`
    block.

    rows : up to how many rows linear layers use them; None measures it.
    dense : one of `DENSE`: linear layers, attention's and the head too, but no routers, multiply by
        copies of their bf16 weights in that format, made now. bf12 is lossless: results differ in
        the order of sums only. The others round, prompts included; embeddings stay. Inputs must be
        a multiple of 64; ValueError if no layer's are. A weight that is replaced is used as it then
        is; of one that was edited in place the next prompt is a ValueError.
    norms, routers, attentions, layers, graphs, linears : count the modules with another forward;
        one that had another is left alone; a router within a graph counts with it. stretches :
        counts those of layers that are one call for a token (`moelab.fast.layers`).
    """

    def __init__(
        self, model: nn.Module, rows: float | None = None, dense: str | None = None
    ) -> None:
        super().__init__()
        self.norms = self.routers = self.attentions = self.layers = self.graphs = self.linears = 0
        pack = None if dense is None else as_bf12 if dense == "bf12" else Rounding(dense)
        find_linear, unchanged = FastLinears(rows), []
        self.model, self.dense, self.copied = (
            model,
            dense,
            {},
        )  # copied: weight → (address, checksum)

        def noted(weight: Tensor, parts: int) -> Matrices | None:
            if found := pack(weight, parts):
                self.copied[weight] = weight.data_ptr(), _checksum(weight)
            return found

        self.rows = find_linear.rows
        try:
            for weight in [
                weight for weight in model.parameters() if weight.requires_grad
            ]:  # kernels record nothing
                self.callback(weight.requires_grad_, True)
                weight.requires_grad_(False)
            for what, find in (KERNELS | {"linears": find_linear}).items():
                for (
                    name,
                    module,
                ) in model.named_modules():  # probes of what is made of others use theirs
                    how = (
                        {"pack": noted}
                        if pack and what in ("attentions", "linears") and not name.endswith(ROUTERS)
                        else {}
                    )
                    if bare(module) and (fast := find(module, **how)) is not None:
                        self.put(module, "forward", fast)
                        setattr(self, what, getattr(self, what) + 1)
                        unchanged.append(getattr(fast, "parts", None))
                        if (router := getattr(fast, "router", None)) is not None and bare(
                            router.module
                        ):
                            self.put(router.module, "forward", router)
                            unchanged.append(router.parts)
                for parts in filter(None, unchanged):  # they have other forwards now
                    parts.seal()
            for weight in model.parameters():
                on_huge_pages(weight.data_ptr(), weight.nbytes if weight.is_cpu else 0)
            self.stretches = sum(len(stretches(module)) for module in model.modules())
            if dense and not self.copied:
                raise ValueError(
                    f"dense is {dense!r}, and no linear layer of this model can be: their weights must be "
                    f"bf16 on the CPU, their inputs a multiple of 64"
                )
            if dense:
                base = getattr(model, "base_model", model)
                self.hook(base.register_forward_pre_hook, self._check_copies, with_kwargs=True)
        except BaseException:
            self.close()
            raise

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
    return CHECKSUMS["xxh3"](weight.detach().contiguous().view(torch.uint8).numpy())


def as_bf12(weight: Tensor, parts: int = 1) -> Matrices | None:
    """A weight as bf12 in memory (`Pack`)."""
    memory, rows = [], []
    for part in weight.chunk(parts):
        blob = bf12.CODEC.compress(part) if bf12.CODEC.kernel("BF16", part.shape) else None
        if blob is None:
            return None
        memory.append(_aligned(blob))
        rows.append(bf12.CODEC.row(memory[-1].ctypes.data, len(blob), part.shape))
    return Matrices(PACKED["bf12"], np.array(rows), memory)


class Rounding:
    """Rounds weights to a few-bit format in groups of 32, each weight once (`Pack`)."""

    def __init__(self, name: str) -> None:
        self.form, self.blobs = fewbit.find_format(name), {}  # address → blob

    def __call__(self, weight: Tensor, parts: int = 1) -> Matrices | None:
        shape, address = tuple(weight.shape), weight.data_ptr()
        if shape[1] % 64 or shape[0] % parts:
            return None
        if address not in self.blobs:
            blob = self.form.compress(weight)
            self.blobs[address] = None if blob is None else _aligned(blob)
        if (blob := self.blobs[address]) is None:
            return None
        codes, scales, *rest = self.form.row(blob.ctypes.data, len(blob), shape)
        end = blob.ctypes.data + len(blob)
        rows = [
            [codes + i * ((scales - codes) // parts), scales + i * ((end - scales) // parts), *rest]
            for i in range(parts)
        ]

        def rounded() -> Tensor:
            self.form.decompress(blob, out := torch.empty(shape, dtype=torch.bfloat16))
            return out

        return Matrices(PACKED[self.form.name], np.array(rows), blob, rounded)


def _aligned(blob: np.ndarray) -> np.ndarray:
    memory = aligned_buffer(len(blob), 64)
    memory[:] = blob
    on_huge_pages(memory.ctypes.data, len(blob))
    return memory


def on_huge_pages(address: int, nbytes: int) -> None:
    """Have memory moved, as it is, to pages of 2 MB where Linux can (6.1 and later): at each end of
    a page the hardware stops reading ahead and looks the next one up. What is far smaller than such
    a page stays."""
    if sys.platform == "linux" and nbytes >= HUGE // 4:
        begin, end = address // HUGE * HUGE, -(-(address + nbytes) // HUGE) * HUGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), COLLAPSE)
