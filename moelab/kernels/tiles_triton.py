"""Weights of any kind in a GPU's registers, in Triton: one way of unpacking, for GEMV, GEMM and
`moelab.store.unpack_triton`.

A matrix in memory is M rows of N weights (of the transposed layout, inputs are rows), found by the
addresses of `moelab.kernels.products.Matrices.rows`. A tile has some rows, and of each G groups of V
weights, where V is what 16 bytes of codes hold: the widest load that a lane has, and what a lane
then multiplies by itself.

    kind              V    16 bytes are                     beside them
    fp32              4    weights
    bf16, fp16        8    weights
    bf12             16    low bytes                        16 bytes of codes, which two groups share
    int8, fp8        16    codes                            a scale
    int4, mxfp4      32    codes, two a byte                a scale, of just these 32

Neighbouring lanes take neighbouring groups of a row, so that a warp reads 512 bytes in whole lines:
as many of int4 as of bf16, for four times the weights. The halves of a byte stay in their lane
(`interleave`), and the scale multiplies the sum of a lane's products instead of each weight. Few
bits become fp32 without a table: int4 in the mantissa of 2²³, e2m1 and e4m3 as the fp16 numbers that
have the same exponents but for a factor, which denormals need no branch for."""

from __future__ import annotations

import triton
import triton.language as tl

from moelab.kernels.ggml import GGML
from moelab.kernels.products import KINDS, PACKED
from moelab.kernels.vectors import BLOCK, Kind

#: kind → its name in kernels
NAMES: dict[Kind, str] = {kind: name for name, kind in PACKED.items() if name not in GGML}
NAMES |= {kind: str(dtype).removeprefix("torch.") for dtype, kind in KINDS.items()}
#: name → weights that a lane loads at a time, 16 bytes
WIDTHS = {name: 16 * BLOCK // kind.size for kind, name in NAMES.items()}
#: torch's types of weights → Triton's
TYPES = {dtype: getattr(tl, NAMES[kind]) for dtype, kind in KINDS.items()}


@triton.jit
def _bytes(address, at, there, V: tl.constexpr):
    """V bytes of each group, uint8 [I, G, V], from `at` [I, G] on; 0 where there is no group."""
    here = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    mask = tl.broadcast_to(there[:, :, None], [there.shape[0], there.shape[1], V])
    return tl.load(here + at[:, :, None] + tl.arange(0, V)[None, None, :], mask=mask, other=0)


@triton.jit
def _plain(address, i, g, there, N: tl.constexpr, V: tl.constexpr, TYPE: tl.constexpr):
    """fp32 [I, G, V] of weights that are numbers of a type, rows of any N."""
    here = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
    v = tl.arange(0, V)[None, None, :]
    if N % V == 0:  # whole groups, so that the compiler sees wide loads
        mask = tl.broadcast_to(there[:, :, None], [there.shape[0], there.shape[1], V])
    else:
        mask = there[:, :, None] & (g[None, :, None] * V + v < N)
    at = i[:, None, None] * N + g[None, :, None] * V + v
    return tl.load(here + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def words(first, second, i, g, there, N: tl.constexpr):
    """Of bf12 the bits of bf16, uint32 [I, G, 16]; of a block of 64, a byte of codes has those of weights 32 apart."""
    table = (first - 16).to(tl.pointer_type(tl.uint32))  # of 16 high bytes
    group = g[None, :]
    word = _bytes(first, i[:, None] * N + group * 16, there, 16).to(tl.uint32)
    codes = i[:, None] * (N // 2) + ((group >> 2) << 5) + ((group & 1) << 4)
    shift = ((g[None, :, None] >> 1 & 1) << 2).to(tl.uint32)
    code = _bytes(second, codes, there, 16).to(tl.uint32) >> shift
    low = tl.where((code & 4) != 0, tl.load(table + 1), tl.load(table))
    high = tl.where((code & 4) != 0, tl.load(table + 3), tl.load(table + 2))
    four = tl.where((code & 8) != 0, high, low)
    return word | ((four >> ((code & 3) * 8)) & 0xFF) << 8


@triton.jit
def _bf16_scales(second, i, g, there, N: tl.constexpr, V: tl.constexpr):
    """fp32 [I, G], of 32 weights each."""
    here = second.to(tl.pointer_type(tl.bfloat16))
    at = i[:, None] * (N // 32) + g[None, :] * V // 32
    return tl.load(here + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _fp8(first, second, i, g, there, N: tl.constexpr):
    """Codes e4m3 [I, G, 16] and scales of 128 rows × 128 inputs."""
    code = _bytes(first, i[:, None] * N + g[None, :] * 16, there, 16).to(tl.uint16)
    half = (code & 0x7F) << 7 | (code & 0x80) << 8
    half = tl.where((code & 0x7F) == 0x7F, 0x7E00, half).to(tl.uint16)  # NaN
    here = second.to(tl.pointer_type(tl.float32))
    at = i[:, None] // 128 * ((N + 127) // 128) + g[None, :] // 8
    scales = tl.load(here + at, mask=there, other=0.0)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0, scales


@triton.jit
def _mxfp4(codes, second, i, g, there, N: tl.constexpr):
    """Of codes e2m1 uint32 [I, G, 32], twice their values; of scales e8m0 s, 2^(s − 128), which is
    finite and not 0 for all of them."""
    half = ((codes & 7) << 9 | (codes & 8) << 12).to(tl.uint16).to(tl.float16, bitcast=True)
    here = second.to(tl.pointer_type(tl.uint8))
    at = i[:, None] * (N // 32) + g[None, :]
    s = tl.load(here + at, mask=there, other=2).to(tl.uint32)
    bits = tl.where(s < 2, 0x00200000 << (s & 1), (s - 1) << 23).to(tl.uint32)
    return half.to(tl.float32) * 32768.0, bits.to(tl.float32, bitcast=True)


@triton.jit
def tile(first, second, i, g, there, N: tl.constexpr, KIND: tl.constexpr, V: tl.constexpr):
    """(values fp32 [I, G, V], scales fp32 [I, G] or [1, 1]) whose products are the weights of the
    groups g [G] of rows i int64 [I]; any numbers beyond the matrix, where rows are not `there` [I],
    and for escapes of bf12, which have the table's first high byte.

    first, second : int64 scalars, a matrix's first two numbers. N : of packed kinds a multiple of 64.
    V : `WIDTHS[KIND]`."""
    inside = there[:, None] & (g[None, :] * V < N)
    scales = tl.full([1, 1], 1.0, tl.float32)
    if KIND == "float32":
        values = _plain(first, i, g, inside, N, V, tl.float32)
    elif KIND == "bfloat16":
        values = _plain(first, i, g, inside, N, V, tl.bfloat16)
    elif KIND == "float16":
        values = _plain(first, i, g, inside, N, V, tl.float16)
    elif KIND == "bf12":
        bits = words(first, second, i, g, inside, N) << 16
        values = bits.to(tl.float32, bitcast=True)
    elif KIND == "fp8":
        values, scales = _fp8(first, second, i, g, inside, N)
    elif KIND == "int8":
        codes = _bytes(first, i[:, None] * N + g[None, :] * V, inside, V)
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
        scales = _bf16_scales(second, i, g, inside, N, V)
    else:
        pairs = _bytes(first, i[:, None] * (N // 2) + g[None, :] * (V // 2), inside, V // 2)
        codes = tl.interleave(pairs & 15, pairs >> 4).to(tl.uint32)
        if KIND == "int4":
            values = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0  # 2²³ + 8
            scales = _bf16_scales(second, i, g, inside, N, V)
        else:
            values, scales = _mxfp4(codes, second, i, g, inside, N)
    return values, scales


@triton.jit
def weights(first, second, i, g, there, N: tl.constexpr, KIND: tl.constexpr, V: tl.constexpr):
    """fp32 [I, G · V]: a `tile`'s weights."""
    values, scales = tile(first, second, i, g, there, N, KIND, V)
    return tl.reshape(values * scales[:, :, None], [values.shape[0], values.shape[1] * V])


@triton.jit
def escapes(first, second, count, i):
    """(index, where its weight of bf16 is, whether there is one) of the escapes i [n] of a matrix of
    bf12 that has `count`."""
    indices = (second + (second - first) // 2).to(tl.pointer_type(tl.uint32))
    values = (indices + count).to(tl.pointer_type(tl.bfloat16))
    at = tl.load(indices + i, mask=i < count, other=0).to(tl.int64)
    return at, values + i, (i < count) & (at < second - first)


@triton.jit
def instead(first):
    """fp32, what stands in the place of escapes."""
    high = tl.load((first - 16).to(tl.pointer_type(tl.uint8))).to(tl.uint32)
    return (high << 24).to(tl.float32, bitcast=True)
