"""Splitting and joining bf16 on a CUDA device: ZipMoE's memory-coalesced recovery kernel (§3.1) in Triton.

A program handles `BLOCK` consecutive weights; neighbouring threads take neighbouring runs of 16 of them, so bytes are
loaded and weights stored 16 bytes at a time. `moelab.store.bits` calls this for tensors on a GPU. The tests run the
kernels in Triton's interpreter on the CPU; their speed has not been measured.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("splitting and joining weights on a GPU needs the package `triton`, which comes with torch for "
                      "CUDA; install it, or move the tensors to the CPU first") from error

BLOCK = 4096            # weights a program: 256 threads of 16


@triton.jit
def _split_kernel(words, exponents, sign_mantissa, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(words + i, mask=i < n, other=0).to(tl.uint32)
    tl.store(exponents + i, (x >> 7).to(tl.uint8), mask=i < n)
    tl.store(sign_mantissa + i, ((x << 1) | (x >> 15)).to(tl.uint8), mask=i < n)


@triton.jit
def _join_kernel(exponents, sign_mantissa, words, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(exponents + i, mask=i < n, other=0).to(tl.uint32)
    s = tl.load(sign_mantissa + i, mask=i < n, other=0).to(tl.uint32)
    tl.store(words + i, ((e << 7) | (s >> 1) | ((s & 1) << 15)).to(tl.uint16), mask=i < n)


def split(weights: torch.Tensor, exponents: torch.Tensor | None = None,
          sign_mantissa: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`moelab.store.bits.split` for a tensor on a GPU; the buffers must be uint8 tensors on the same device."""
    words = _flat(weights, 2).view(torch.uint16)
    exponents = words.new_empty(len(words), dtype=torch.uint8) if exponents is None else exponents
    sign_mantissa = words.new_empty(len(words), dtype=torch.uint8) if sign_mantissa is None else sign_mantissa
    _launch(_split_kernel, words, (words, _flat(exponents, 1), _flat(sign_mantissa, 1)))
    return exponents, sign_mantissa


def join(exponents: torch.Tensor, sign_mantissa: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`moelab.store.bits.join` for tensors on a GPU; `out` must be on the same device."""
    flat = _flat(exponents, 1)
    out = flat.new_empty(len(flat), dtype=torch.bfloat16) if out is None else out
    words = _flat(out, 2).view(torch.uint16)
    _launch(_join_kernel, words, (flat, _flat(sign_mantissa, 1), words))
    return out


def _flat(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """`tensor` [N] without a copy, after a check of its element size."""
    if not isinstance(tensor, torch.Tensor) or tensor.element_size() != width or not tensor.is_contiguous():
        what = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"expected a contiguous tensor of {width}-byte entries on the GPU, got {what}")
    return tensor.reshape(-1)


def _launch(kernel, words: torch.Tensor, arguments: tuple[torch.Tensor, ...]) -> None:
    if any(len(a) != len(words) or a.device != words.device for a in arguments):
        raise ValueError("weights, exponents and sign-mantissa bytes must have the same number of entries, "
                         f"{len(words)}, and be on one device, {words.device}; these are "
                         + ", ".join(f"{len(a)} on {a.device}" for a in arguments))
    if len(words):
        kernel[(triton.cdiv(len(words), BLOCK),)](*arguments, len(words), BLOCK=BLOCK, num_warps=8)
