"""Copies of dense weights in fewer bits, that kernels multiply as they are: bf12, lossless, and
few-bit formats, which round."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from moelab.store import bf12, fewbit
from moelab.store.packed import Packed
from moelab.store.reader import aligned_buffer

#: what linear layers can be multiplied in; the last three round
DENSE = "bf12", "int8", "int4", "mxfp4"
HUGE = 1 << 21  # bytes of a page
COLLAPSE = 25  # Linux's MADV_COLLAPSE


def packed_as(name: str, weight: Tensor) -> Packed | None:
    """A bf16 weight [R, n] as one of `DENSE`; None if kernels do not multiply it so."""
    codec = bf12.CODEC if name == "bf12" else fewbit.find_format(name)
    usual = weight.dtype == torch.bfloat16 and weight.is_cpu and type(weight) is not Packed
    if not usual or not codec.kernel("BF16", tuple(weight.shape)):
        return None
    if (blob := codec.compress(weight.detach())) is None:
        return None
    memory = aligned_buffer(len(blob), 64)
    memory[:] = blob
    return Packed(codec, torch.from_numpy(memory), tuple(weight.shape), weight.dtype, weight)


def on_huge_pages(address: int, nbytes: int) -> None:
    """Have memory moved, as it is, to pages of 2 MB where Linux can (6.1 and later): at each end of
    a page the hardware stops reading ahead and looks the next one up. What is far smaller than such
    a page stays."""
    if sys.platform == "linux" and nbytes >= HUGE // 4:
        begin = address // HUGE * HUGE
        end = -(-(address + nbytes) // HUGE) * HUGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), COLLAPSE)
