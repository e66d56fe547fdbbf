"""Recovery on a GPU, in Triton: exponents and sign-mantissa bytes that lie apart become the weights.

Source: ZipMoE §3.3 (a kernel whose loads and stores are vectors, next to each other). Each thread
takes neighbours of both planes, joins them in registers (`moelab.store.bits.join`) and writes words.
Not in place, as `moelab.store.bits.recover` is: programs run in no order. The tests run the kernel in
Triton's interpreter, on the CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # weights that a program joins


@triton.jit
def _join_kernel(exponents, sign_mantissa, words, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < n
    high = tl.load(exponents + i, mask=there, other=0).to(tl.uint32)
    low = tl.load(sign_mantissa + i, mask=there, other=0).to(tl.uint32)
    x = (high << 8) | low
    tl.store(words + i, ((x >> 1) | (x << 15)).to(tl.uint16), mask=there)


def join(exponents: torch.Tensor, sign_mantissa: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Weights of 16 bits in `out`, which is returned: contiguous, of N weights, as the planes, uint8
    [N], are; on the GPU whose stream is current. ValueError for other sizes."""
    n = out.numel()
    if not exponents.numel() == sign_mantissa.numel() == n or out.itemsize != 2:
        raise ValueError(
            f"{exponents.numel():,} exponents and {sign_mantissa.numel():,} sign-mantissa bytes are not "
            f"those of {n:,} weights of {out.itemsize} bytes"
        )
    if n:
        words = out.view(-1).view(torch.uint16)
        grid = (triton.cdiv(n, BLOCK),)
        _join_kernel[grid](exponents, sign_mantissa, words, n, BLOCK, num_warps=8)
    return out
