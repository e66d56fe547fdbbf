"""Joining bf16 on a CUDA device: ZipMoE's memory-coalesced recovery kernel (§3.1) in Triton.

A program handles `BLOCK` consecutive weights; neighbouring threads take neighbouring runs of 16 of
them, so bytes are loaded and weights stored 16 bytes at a time. `moelab.store.bits` calls this for
tensors on a GPU; its rate there is measured by `bench gpu`. The tests run the kernel in Triton's
interpreter, on the CPU."""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "joining weights on a GPU needs the package `triton`, which comes with torch for CUDA; install "
        "it, or move the tensors to the CPU first"
    ) from error

BLOCK = 4096  # weights a program: 256 threads of 16


@triton.jit
def _join_kernel(exponents, sign_mantissa, words, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(exponents + i, mask=i < n, other=0).to(tl.uint32)
    s = tl.load(sign_mantissa + i, mask=i < n, other=0).to(tl.uint32)
    tl.store(words + i, ((e << 7) | (s >> 1) | ((s & 1) << 15)).to(tl.uint16), mask=i < n)


def join(exponents: torch.Tensor, sign_mantissa: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`moelab.store.bits.join` for contiguous tensors on one GPU."""
    n, given = out.numel(), (exponents, sign_mantissa, out)
    if (
        any(t.numel() != n or t.device != out.device or not t.is_contiguous() for t in given)
        or out.element_size() != 2
    ):
        raise ValueError(
            f"exponents, sign-mantissa bytes and weights of two bytes must be {n} contiguous entries each "
            f"on {out.device}; these are {[(t.dtype, t.shape, t.device) for t in given]}"
        )
    if n:
        flat = (
            exponents.reshape(-1),
            sign_mantissa.reshape(-1),
            out.reshape(-1).view(torch.uint16),
        )
        _join_kernel[(triton.cdiv(n, BLOCK),)](*flat, n, BLOCK=BLOCK, num_warps=8)
    return out
