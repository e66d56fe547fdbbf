"""Copies of dense weights in fewer bits, that kernels multiply as they are: bf12, lossless, and
few-bit formats, which round."""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.fast.dense import Pack
from moelab.kernels.products import PACKED, Matrices
from moelab.store import bf12, fewbit
from moelab.store.reader import aligned_buffer

#: what linear layers can be multiplied in; the last three round
DENSE = "bf12", "int8", "int4", "mxfp4"
HUGE, COLLAPSE = 1 << 21, 25  # bytes of a page; Linux's MADV_COLLAPSE


def packer(name: str) -> Pack:
    """What packs weights as one of `DENSE`."""
    return as_bf12 if name == "bf12" else Rounding(name)


def as_bf12(weight: Tensor, parts: int = 1) -> Matrices | None:
    """A weight as bf12 in memory (`Pack`)."""
    memory, rows = [], []
    for part in weight.chunk(parts):
        blob = bf12.CODEC.compress(part) if bf12.CODEC.kernel("BF16", part.shape) else None
        if blob is None:
            return None
        memory.append(_aligned(blob))
        rows.append(bf12.CODEC.row(memory[-1].ctypes.data, len(blob), part.shape))
    return Matrices(PACKED["bf12"], np.array(rows), len(weight) // parts, owner=memory)


class Rounding:
    """Rounds weights to a few-bit format in groups of 32, each weight once (`Pack`)."""

    def __init__(self, name: str) -> None:
        self.form, self.blobs = fewbit.find_format(name), {}  # address → blob

    def __call__(self, weight: Tensor, parts: int = 1) -> Matrices | None:
        shape, address = tuple(weight.shape), weight.data_ptr()
        if not self.form.kernel("BF16", shape) or shape[0] % parts:
            return None
        if address not in self.blobs:
            blob = self.form.compress(weight)
            self.blobs[address] = None if blob is None else _aligned(blob)
        if (blob := self.blobs[address]) is None:
            return None
        first = np.array(self.form.row(begin := blob.ctypes.data, len(blob), shape))
        apart = np.array([first[1] - begin, begin + len(blob) - first[1], 0, 0]) // parts
        rows = first + np.arange(parts)[:, None] * apart
        owner = Rounded(self.form, blob, shape)
        return Matrices(PACKED[self.form.name], rows, shape[0] // parts, owner=owner)


class Rounded(NamedTuple):
    """A weight that was rounded to a few-bit format."""

    form: fewbit.Format
    blob: np.ndarray
    shape: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The weight that this stands for."""
        self.form.decompress(self.blob, out := torch.empty(self.shape, dtype=torch.bfloat16))
        return out


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
