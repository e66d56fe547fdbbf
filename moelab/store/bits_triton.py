"""Joining bf16 on a CUDA device: ZipMoE's memory-coalesced recovery kernel (§3.1) in Triton.

A program handles `BLOCK` consecutive weights; neighbouring threads take neighbouring runs of 16 of
them, so bytes are loaded and weights stored 16 bytes at a time. Its rate there is
measured by `bench gpu`. The tests run the kernel in Triton's
interpreter, on the CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # weights a program: 256 threads of 16


@triton.jit
def _join_kernel(exponents, sign_mantissa, words, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(exponents + i, mask=i < n, other=0).to(tl.uint32)
    s = tl.load(sign_mantissa + i, mask=i < n, other=0).to(tl.uint32)
    tl.store(words + i, ((e << 7) | (s >> 1) | ((s & 1) << 15)).to(tl.uint16), mask=i < n)


def join(exponents: torch.Tensor, sign_mantissa: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`moelab.store.bits.join` for contiguous tensors of N entries on one GPU."""
    n = out.numel()
    flat = out.view(-1).view(torch.uint16)
    if n:
        grid = (triton.cdiv(n, BLOCK),)
        _join_kernel[grid](exponents, sign_mantissa, flat, n, BLOCK=BLOCK, num_warps=8)
    return out
