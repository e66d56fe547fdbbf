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
from moelab.store.codec import Codec
from moelab.store.reader import aligned_buffer

#: what linear layers can be multiplied in; the last three round
DENSE = "bf12", "int8", "int4", "mxfp4"
HUGE = 1 << 21  # bytes of a page
COLLAPSE = 25  # Linux's MADV_COLLAPSE


def packer(name: str) -> Pack:
    """What packs weights as one of `DENSE`, each once."""
    codec = bf12.CODEC if name == "bf12" else fewbit.find_format(name)
    packed: dict[int, Matrices | None] = {}  # by address

    def pack(weight: Tensor) -> Matrices | None:
        address = weight.data_ptr()
        if address not in packed:
            packed[address] = packed_as(codec, weight)
        return packed[address]

    return pack


def packed_as(codec: Codec, weight: Tensor) -> Matrices | None:
    """A bf16 weight [R, n] as a codec's blob in memory; None if kernels do not multiply it so."""
    shape = tuple(weight.shape)
    kind = codec.kernel("BF16", shape)
    if not kind or (blob := codec.compress(weight)) is None:
        return None
    memory = aligned_buffer(len(blob), 64)
    memory[:] = blob
    on_huge_pages(memory.ctypes.data, len(blob))
    row = codec.row(memory.ctypes.data, len(memory), shape)
    return Matrices(PACKED[kind], np.array([row]), shape[0], owner=Copy(codec, memory, shape))


class Copy(NamedTuple):
    """A weight that is packed."""

    codec: Codec
    blob: np.ndarray
    shape: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The weight that this stands for."""
        self.codec.decompress(self.blob, out := torch.empty(self.shape, dtype=torch.bfloat16))
        return out


def on_huge_pages(address: int, nbytes: int) -> None:
    """Have memory moved, as it is, to pages of 2 MB where Linux can (6.1 and later): at each end of
    a page the hardware stops reading ahead and looks the next one up. What is far smaller than such
    a page stays."""
    if sys.platform == "linux" and nbytes >= HUGE // 4:
        begin = address // HUGE * HUGE
        end = -(-(address + nbytes) // HUGE) * HUGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), COLLAPSE)
