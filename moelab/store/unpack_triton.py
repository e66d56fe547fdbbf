"""Blobs, or planes, on a GPU become weights there, in Triton: the link carries what is stored. The tests
run the kernels in Triton's interpreter, on the CPU.

Source: ZipMoE §3.3 (a kernel of recovery whose loads and stores are vectors, next to each other). Each
thread takes neighbours of both planes, joins them in registers (`moelab.store.bits.join`) and writes
words. Not in place, as `moelab.store.bits.recover` is: programs run in no order."""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

from moelab.kernels.tiles_triton import NAMES, WIDTHS, escapes, weights
from moelab.kernels.vectors import BLOCK
from moelab.store.codec import Codec
from moelab.store.headers import NAMES as DTYPES

WEIGHTS, ESCAPES = 4096, 256  # that a program writes


@triton.jit
def _unpack_kernel(
    first,
    second,
    out,
    M,
    N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    KIND: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(1) * G + tl.arange(0, G)
    c = tl.program_id(1) * G * V + tl.arange(0, G * V)
    there = (i < M)[:, None] & (c < N)[None, :]
    w = weights(first, second, i, g, i < M, N, KIND, V)  # of bf12, NaN are escapes
    if TRANSPOSED:
        at = out + c[None, :].to(tl.int64) * M + i[:, None]
    else:
        at = out + i[:, None] * N + c[None, :]
    tl.store(at, w.to(out.dtype.element_ty), mask=there)


@triton.jit
def _escapes_kernel(first, second, count, out, ESCAPES: tl.constexpr):
    i = tl.program_id(0) * ESCAPES + tl.arange(0, ESCAPES)
    at, value, there = escapes(first, second, count, i)
    tl.store(out + at, tl.load(value, mask=there, other=0.0), mask=there)


@triton.jit
def _join_kernel(exponents, sign_mantissa, words, n, WEIGHTS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WEIGHTS + tl.arange(0, WEIGHTS)
    there = i < n
    high = tl.load(exponents + i, mask=there, other=0).to(tl.uint32)
    low = tl.load(sign_mantissa + i, mask=there, other=0).to(tl.uint32)
    x = (high << 8) | low
    tl.store(words + i, ((x >> 1) | (x << 15)).to(tl.uint16), mask=there)


def join(exponents: torch.Tensor, sign_mantissa: torch.Tensor, out: torch.Tensor) -> None:
    """Weights of 16 bits [N] of the planes, uint8 [N], in `out`, on the GPU whose stream is
    current."""
    words = out.view(torch.uint16)
    grid = (triton.cdiv(len(out), WEIGHTS),)
    _join_kernel[grid](exponents, sign_mantissa, words, len(out), WEIGHTS, num_warps=8)


def unpack(codec: Codec, blob: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The weights of a blob, uint8 [length], in `out`, which is returned: contiguous, on the same
    GPU, of a floating-point type; of bf12, bf16. Its length was checked when its store was opened;
    whether it is damaged, its checksum says."""
    shape = tuple(out.shape)
    transposed = codec.name.endswith(".T")
    name = codec.kernel(DTYPES[out.dtype], shape).removesuffix(".T")
    M = prod(shape[:-1])
    N = shape[-1]
    if codec.name == "bf12":  # of any shape: whole blocks, one after another
        name = "bf12"
        M = out.numel() // BLOCK
        N = BLOCK
    elif name not in NAMES.values():
        codec.decompress(blob, out)  # by torch, there
        return out
    elif transposed:
        M, N = N, M
    first, second, _, count = codec.row(blob.data_ptr(), len(blob), shape)
    V = WIDTHS[name]
    G = min(triton.next_power_of_2(triton.cdiv(N, V)), 256 // V)
    rows = max(WEIGHTS // (G * V), 1)
    grid = triton.cdiv(M, rows), triton.cdiv(N, G * V)
    _unpack_kernel[grid](first, second, out, M, N, transposed, name, V, rows, G, num_warps=4)
    if count:
        _escapes_kernel[(triton.cdiv(count, ESCAPES),)](first, second, count, out, ESCAPES)
    return out
