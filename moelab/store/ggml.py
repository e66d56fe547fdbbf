"""GGML's quantised types: the blocks of weights of GGUF files, as they lie there.

A row of n weights is n / block blocks, each with its codes and scales inside; a blob is rows one
after another, so blobs of matrices with equally long rows, one after another, are the blob of the
matrices one below the other. What the bytes of a block mean is in gguf-py's `quants`, which decodes
the types that no kernel knows, and rounds weights to those that it can write.

Source: ggml, `ggml-common.h` and `ggml-quants.c`; gguf-py, `gguf.quants`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.base.files import beside
from moelab.kernels.products import PACKED
from moelab.store.fewbit import FewBits, widen
from moelab.store.gptq import fit, naive_scales
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

        if (rows := self.rows(data, self.block)) is None:
            return None
        if moments is None or self.kind not in FITTED:
            with suppress(NotImplementedError):
                return quants.quantize(rows.numpy(), GGMLQuantizationType[self.kind]).reshape(-1)
            return None
        # of each block an fp16 scale, then the codes, of Q4_0 plus 8, those of its second half in the
        # high bits
        kind = FITTED[self.kind]
        half = torch.float16
        values, scales = fit(kind, rows, naive_scales(kind, rows, half), moments, half)
        codes = values.to(torch.int8).unflatten(1, (-1, self.block))
        if kind == "int4":
            low, high = (codes + 8).chunk(2, -1)
            codes = low | high << 4
        scales = scales.to(half)[..., None].view(torch.int8)
        return torch.cat([scales, codes], -1).view(torch.uint8).view(-1).numpy()

    def decompress(self, blob: Any, out: Tensor) -> None:
        """Write a blob's weights into a tensor of their shape and any floating-point dtype, in fp32
        bit for bit as gguf-py has them."""
        target = out.mT if self.transposed else out
        blocks = self.split(blob, tuple(out.shape))["blocks"]
        if self.kernel("", out.shape):
            widen(PACKED[self.kind], blocks, blocks, target)
            return
        from gguf import GGMLQuantizationType, quants

        with np.errstate(all="ignore"):  # a scale may be any number of fp16
            found = quants.dequantize(blocks.numpy(), GGMLQuantizationType[self.kind])
        target.copy_(torch.from_numpy(found).view(target.shape))

    def dequantize(self, blob: Any, shape: Shape) -> Tensor:
        """The weights of a blob in fp32."""
        self.decompress(blob, out := torch.empty(shape, dtype=torch.float32))
        return out

    def kernel(self, dtype: str, shape: Shape) -> str:
        known = self.kind in PACKED and len(shape) > 1 and prod(shape) > 0
        n = self.stored(shape)[-1]
        return self.name if known and n % PACKED[self.kind].step == 0 else ""


#: GGML's name of a type → its format
GGML = {name: GGMLFormat(name, *of) for name, of in beside(__file__).items()}
