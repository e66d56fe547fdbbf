"""GGML's quantised types: the blocks of weights of GGUF files, as they lie there.

A row of n weights is n / block blocks, each with its codes and scales inside; a blob is rows one
after another, so blobs of matrices with equally long rows, one after another, are the blob of the
matrices one below the other. What the bytes of a block mean is in gguf-py's `quants`, which decodes
the types that no kernel knows, and rounds weights to those that it can write.

Source: ggml, `ggml-common.h` and `ggml-quants.c`; gguf-py, `gguf.quants`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.kernels.products import KINDS, PACKED
from moelab.store.fewbit import FewBits, widen
from moelab.store.gptq import fit
from moelab.store.headers import Shape

#: types that rounding by data knows, and whose codes theirs are
FITTED = {"Q8_0": "int8", "Q4_0": "int4"}


@dataclass(frozen=True)
class GGMLFormat(FewBits):
    """One of GGML's types: `size` bytes for each `block` weights of a row."""

    block: int
    size: int

    def parts(self, shape: Shape) -> dict[str, tuple[torch.dtype, Shape, int]]:
        """Of the "blocks", all there is."""
        shape = self.stored(shape)
        if not shape or shape[-1] % self.block:
            raise ValueError(
                f"a tensor {list(shape)} cannot be {self.name}: its rows are no multiple of "
                f"{self.block}"
            )
        return {"blocks": (torch.uint8, (*shape[:-1], shape[-1] // self.block * self.size), 1)}

    def compress(self, data: Tensor, moments: Tensor | None = None) -> np.ndarray | None:
        """The blob of a tensor, uint8, as gguf-py rounds; None for one that stays as it is, and of
        types that gguf-py does not write.

        moments : of its inputs, at which rounding to one of `FITTED` looks (`moelab.store.gptq`)."""
        from gguf import GGMLQuantizationType, quants

        w = data.mT if self.transposed and data.dim() > 1 else data
        fits = w.dim() > 1 and w.numel() and w.shape[-1] % self.block == 0
        if not fits or not w.is_floating_point() or not w.abs().max().isfinite():
            return None
        rows = w.detach().float().contiguous()
        try:
            blocks = quants.quantize(rows.numpy(), GGMLQuantizationType[self.kind])
        except NotImplementedError:
            return None
        if moments is not None and self.kind in FITTED:
            blocks = self._fitted(rows, blocks, moments)
        return blocks.reshape(-1)

    def _fitted(self, w: Tensor, blocks: np.ndarray, moments: Tensor) -> np.ndarray:
        """Blocks of weights [R, n], whose naive ones are given: an fp16 scale, then the codes, of
        Q4_0 plus 8, those of the block's second half in the high bits."""
        naive = torch.from_numpy(blocks.reshape(len(w), -1, self.size)[..., :2].copy())
        naive = naive.view(torch.float16)[..., 0].float()
        values, scales = fit(FITTED[self.kind], w, naive, moments, torch.float16)
        codes = values.to(torch.int8).unflatten(1, (-1, self.block))
        if self.kind == "Q4_0":
            low, high = (codes + 8).chunk(2, -1)
            codes = low | high << 4
        scales = scales.half()[..., None].view(torch.int8)
        return torch.cat([scales, codes], -1).view(torch.uint8).numpy()

    def decompress(self, blob: Any, out: Tensor) -> None:
        """Write a blob's weights into a tensor of their shape and any floating-point dtype."""
        target = out.mT if self.transposed else out
        if self.kernel("", out.shape) and target.is_contiguous() and out.dtype in KINDS:
            blocks = self.split(blob, tuple(out.shape))["blocks"]
            widen(PACKED[self.kind], blocks, blocks, target)
        else:
            out.copy_(self.dequantize(blob, tuple(out.shape)))

    def dequantize(self, blob: Any, shape: Shape) -> Tensor:
        """The weights of a blob in fp32, bit for bit as gguf-py has them."""
        if self.transposed:
            return GGML[self.kind].dequantize(blob, self.stored(shape)).mT
        blocks = self.split(blob, shape)["blocks"]
        if self.kernel("", shape):
            return widen(PACKED[self.name], blocks, blocks, torch.empty(shape))
        from gguf import GGMLQuantizationType, quants

        with np.errstate(all="ignore"):  # a scale may be any number of fp16
            found = quants.dequantize(blocks.numpy(), GGMLQuantizationType[self.name])
        return torch.from_numpy(found).view(shape)

    def kernel(self, dtype: str, shape: Shape) -> str:
        known = self.kind in PACKED and len(shape) > 1 and prod(shape) > 0
        n = self.stored(shape)[-1]
        return self.name if known and n % PACKED[self.kind].step == 0 else ""


#: GGML's name of a type → its format
GGML: dict[str, GGMLFormat] = {
    name: GGMLFormat(name, block, size)
    for name, block, size in (
        ("Q8_0", 32, 34),
        ("Q4_0", 32, 18),
        ("Q4_1", 32, 20),
        ("Q5_0", 32, 22),
        ("Q5_1", 32, 24),
        ("MXFP4", 32, 17),
        ("IQ4_NL", 32, 18),
        ("Q2_K", 256, 84),
        ("Q3_K", 256, 110),
        ("Q4_K", 256, 144),
        ("Q5_K", 256, 176),
        ("Q6_K", 256, 210),
        ("IQ4_XS", 256, 136),
    )
}
