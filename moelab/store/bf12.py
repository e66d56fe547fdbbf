"""bf12: bf16 weights in twelve bits, lossless, multiplied as they lie.

The high byte of a bf16 weight, its sign and most of its exponent, takes few values in a trained
tensor: the 16 most frequent ones cover more than 99.9 %. So the low bytes stay, the high bytes
become 4 bits each by a table of 16, and the few others, *escapes*, are listed. The length of a code
is fixed, so a weight is found at once, and a processor looks 64 of them up in one instruction
(`moelab.kernels.vectors`): nothing is decoded before it is multiplied. ZipServ (ASPLOS
2026) gives exponents 3 bits in bitmaps, for tensor cores.

    blob of N weights, N a multiple of 64: 48 zeros, table [16] | low bytes [N] | codes [N/2] |
                                           indices of m escapes uint32 [m], their weights [m]

Of each 64 weights, the byte i of the codes has those of the weights i (low nibble) and i + 32. An
escape's low byte and code are 0."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from moelab.kernels.compile import kernel
from moelab.kernels.linear import widened
from moelab.kernels.products import Matrices
from moelab.kernels.vectors import BF12 as KIND
from moelab.kernels.vectors import BLOCK
from moelab.store.bits import as_bytes, count
from moelab.store.codec import WORTH, Codec, in_blocks, rows_in_blocks
from moelab.store.headers import Shape

HEAD = 64  # bytes before the low bytes, which so begin on a cache line
_ROW = 4096  # weights that are unpacked as one row of a matrix
_NEVER = (0x7F, 0xFF)  # high bytes of infinities and NaN, by which escapes' codes must not multiply


class BF12(Codec):
    """Matrices of bf16 weights (or arrays uint16, their bits) in whole blocks of 64."""

    in_place = True

    def compress(self, data: Any) -> np.ndarray | None:
        """The blob, uint8; None for what does not fit or would become less than 2 % smaller."""
        if data.dtype not in (torch.bfloat16, np.uint16) or not in_blocks(data.shape):
            return None
        blob = pack(data)
        return blob if len(blob) <= WORTH * as_bytes(data).nbytes else None

    def decompress(self, blob: Any, out: Any) -> None:
        words = torch.from_numpy(as_bytes(out, writable=True)).view(torch.bfloat16)
        source = as_bytes(blob)
        n = len(words)
        *_, indices, _ = _parts(source, n)
        in_order = np.all(indices[1:] > indices[:-1])
        if len(indices) and not (in_order and indices[-1] < n):
            raise ValueError("the escapes of a bf12 blob are not in order")
        rows = words.view(-1, math.gcd(n, _ROW))
        row = self.row(source.ctypes.data, len(source), (n,))
        widened(Matrices(KIND, np.array([row]), len(rows)), 0, 0, rows)

    def admits(self, dtype: str, shape: Shape, planes: int, lengths: list[int]) -> bool:
        return (
            (dtype, planes, len(lengths)) == ("BF16", 1, 1)
            and in_blocks(shape)
            and escapes(lengths[0], math.prod(shape)) >= 0
        )

    def kernel(self, dtype: str, shape: Shape) -> str:
        return self.name if rows_in_blocks(shape) else ""

    def row(self, address: int, length: int, shape: Shape) -> list[int]:
        n = math.prod(shape)
        return [address + HEAD, address + HEAD + n, 0, escapes(length, n)]


CODEC = BF12("bf12")


def pack(weights: Any) -> np.ndarray:
    """The blob, uint8, of whole blocks of bf16 weights, whatever its size."""
    words = as_bytes(weights).view(np.uint16)
    counts = count(words, 8, np.zeros(256, np.int64))
    counts[list(_NEVER)] = -1
    table = np.argsort(-counts, kind="stable")[:16].astype(np.uint8)
    codes = np.full(256, 255, np.uint8)
    codes[table] = np.arange(16)
    n_escapes = len(words) - int(counts[table].sum())
    blob = np.zeros(HEAD + len(words) // 2 * 3 + 6 * n_escapes, np.uint8)
    blob[HEAD - 16 : HEAD] = table
    _pack(words, codes, *_parts(blob, len(words)))
    return blob


def escapes(length: int, n: int) -> int:
    """How many escapes a blob of `length` bytes has, of n weights. ValueError for an impossible
    length."""
    count, rest = divmod(length - HEAD - n // 2 * 3, 6)
    if n % BLOCK or rest or not 0 <= count <= n:
        raise ValueError(f"no bf12 blob of {n:,} weights has {length:,} bytes")
    return count


def _parts(blob: np.ndarray, n: int) -> tuple[np.ndarray, ...]:
    """Low bytes, codes, indices of escapes, their weights."""
    m = escapes(len(blob), n)
    ends = np.cumsum([n, n // 2, 4 * m])
    low, codes, indices, values = np.split(blob[HEAD:], ends)
    return low, codes, indices.view(np.uint32), values.view(np.uint16)


@kernel
def _pack(words, codes, low, packed, indices, values):
    m = 0
    for i in range(len(words)):
        code = codes[words[i] >> 8]
        if code == 255:
            indices[m], values[m], code = i, words[i], 0
            m += 1
        else:
            low[i] = words[i] & 255
        at = i % 64
        packed[i // 64 * 32 + at % 32] |= code << 4 if at >= 32 else code
