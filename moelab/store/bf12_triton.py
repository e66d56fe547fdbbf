"""bf12 on a GPU, in Triton: a blob in its memory becomes bf16 there, so the link carries twelve
bits a weight.

The table of 16 high bytes is four registers. The tests run the kernels in Triton's interpreter, on
the CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moelab.kernels.vectors import BLOCK
from moelab.store.bf12 import HEAD, escapes

ROWS, LANES = 64, BLOCK // 2  # blocks of 64 weights that a program unpacks; weights in half a block
ESCAPES = 256  # that a program writes


@triton.jit
def quarters(table):
    """The table of 16 bytes at an address, in four registers."""
    words = table.to(tl.pointer_type(tl.uint32))
    return tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)


@triton.jit
def high_bytes(codes, a, b, c, d):
    """The high bytes that codes, the lowest four bits of uint32, stand for."""
    quarter = tl.where(
        (codes & 8) != 0, tl.where((codes & 4) != 0, d, c), tl.where((codes & 4) != 0, b, a)
    )
    return (quarter >> ((codes & 3) * 8)) & 0xFF


@triton.jit
def _unpack_kernel(blob, words, n, HEAD: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    there = block < n // (2 * LANES)
    a, b, c, d = quarters(blob + HEAD - 16)
    codes = tl.load(blob + HEAD + n + block * LANES + lane, mask=there, other=0).to(tl.uint32)
    for half in tl.static_range(2):
        at = block * (2 * LANES) + half * LANES + lane
        low = tl.load(blob + HEAD + at, mask=there, other=0).to(tl.uint32)
        high = high_bytes(codes >> (4 * half), a, b, c, d)
        tl.store(words + at, ((high << 8) | low).to(tl.uint16), mask=there)


@triton.jit
def _escapes_kernel(indices, words, n, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(indices + i, mask=i < count, other=0).to(tl.int64)
    values = (indices + count).to(tl.pointer_type(tl.uint16))
    tl.store(words + at, tl.load(values + i, mask=i < count, other=0), mask=(i < count) & (at < n))


def unpack(blob: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The weights of a blob, uint8 [length], in `out`, which is returned: contiguous, of two bytes,
    on the same GPU. ValueError if the sizes do not fit; whether the blob is damaged, its checksum
    says."""
    n = out.numel()
    words = out.view(-1).view(torch.uint16)
    count = escapes(blob.numel(), n)
    _unpack_kernel[(triton.cdiv(n // BLOCK, ROWS),)](blob, words, n, HEAD, ROWS, LANES, num_warps=4)
    if count:
        # below 2³¹, as weights of a matrix are
        indices = blob[HEAD + n // 2 * 3 :][: 4 * count].view(torch.int32)
        _escapes_kernel[(triton.cdiv(count, ESCAPES),)](indices, words, n, count, BLOCK=ESCAPES)
    return out
