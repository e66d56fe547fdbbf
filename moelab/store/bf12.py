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

from moelab.kernels.compile import c_function, kernel
from moelab.kernels.emit import emitted, read, take
from moelab.kernels.threads import TEAM, in_threads
from moelab.kernels.vectors import BF12, BLOCK
from moelab.store.bits import as_bytes
from moelab.store.headers import Shape

HEAD = 64  # bytes before the low bytes, which so begin on a cache line
_PIECE = 1 << 16  # weights that a thread unpacks at a time
_NEVER = (0x7F, 0xFF)  # high bytes of infinities and NaN, by which escapes' codes must not multiply


def packs(shape: Shape) -> bool:
    """Whether bf16 weights of a shape are packed: matrices of whole blocks, biases not."""
    return len(shape) > 1 and math.prod(shape) % BLOCK == 0 and 0 < math.prod(shape) < 1 << 32


def fits(shape: Shape) -> bool:
    """Whether packed weights can also be multiplied as they lie: their rows are whole blocks."""
    return packs(shape) and shape[-1] % BLOCK == 0


def escapes(length: int, nbytes: int) -> int:
    """How many escapes a blob of `length` bytes has, of weights of `nbytes`. ValueError for an
    impossible length."""
    blocks, tail = divmod(nbytes, 2 * BLOCK)
    count, rest = divmod(length - HEAD - blocks * BLOCK * 3 // 2 - tail, 6)
    if rest or not 0 <= count <= blocks * BLOCK:
        raise ValueError(f"no bf12 blob of {nbytes} bytes of weights has {length} bytes")
    return count


def pack(data: Any) -> bytes:
    """The blob of a bytes-like object; what is beyond its whole blocks of weights follows
    unchanged."""
    source = as_bytes(data)
    words, tail = _whole(source)
    counts = _high_bytes(words)
    counts[list(_NEVER)] = -1
    table = np.argsort(-counts, kind="stable")[:16].astype(np.uint8)
    codes = np.full(256, 255, np.uint8)
    codes[table] = np.arange(16)
    blob = np.zeros(
        HEAD + len(words) // 2 * 3 + 6 * int(len(words) - counts[table].sum()) + len(tail), np.uint8
    )
    blob[HEAD - 16 : HEAD] = table
    *parts, rest = _parts(blob, len(source))
    _pack(words, codes, *parts)
    rest[:] = tail
    return blob.tobytes()


def pack_tensor(weights: Any) -> bytes | None:
    """The blob of a bf16 tensor (or uint16 array, its bits); None where it does not fit or saves
    less than 2 %."""
    if weights.dtype not in (torch.bfloat16, np.uint16) or not packs(weights.shape):
        return None
    blob = pack(weights)
    return blob if len(blob) <= 0.98 * 2 * math.prod(weights.shape) else None


def row(address: int, length: int, n: int) -> list[int]:
    """Of `moelab.kernels.products.multiply`'s matrices: a blob of n weights in memory, without a
    bias."""
    return [address + HEAD, address + HEAD + n, 0, escapes(length, 2 * n)]


def unpack(blob: Any, out: Any) -> None:
    """Write the weights of a blob into a writable buffer of exactly their size; ValueError if it is
    damaged."""
    source, target = as_bytes(blob), as_bytes(out, writable=True)
    low, codes, indices, values, rest = _parts(source, len(target))
    words, tail = _whole(target)
    if len(indices) and not (np.all(indices[1:] > indices[:-1]) and indices[-1] < len(words)):
        raise ValueError("the escapes of a bf12 blob are not in order")
    pieces = -(-len(words) // _PIECE)
    in_threads(
        TEAM,
        c_function(_join_pieces),
        min(pieces, torch.get_num_threads()),
        np.array([0, low.ctypes.data, codes.ctypes.data, len(words), words.ctypes.data]),
    )
    words[indices] = values
    tail[:] = rest


def _whole(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weights of whole blocks, and the bytes behind them."""
    end = len(data) - len(data) % (2 * BLOCK)
    return data[:end].view(np.uint16), data[end:]


def _parts(blob: np.ndarray, nbytes: int) -> tuple[np.ndarray, ...]:
    """Low bytes, codes, indices of escapes, their weights, the bytes behind."""
    n, m = nbytes // (2 * BLOCK) * BLOCK, escapes(len(blob), nbytes)
    low, codes, indices, values, rest = np.split(blob[HEAD:], np.cumsum([n, n // 2, 4 * m, 2 * m]))
    return low, codes, indices.view(np.uint32), values.view(np.uint16), rest


def _join_pieces(job):
    """What a thread does: pieces of a blob until none is left."""
    low, codes, n, out = read(job, 1), read(job, 2), read(job, 3), read(job, 4)
    while True:
        begin = take(job) * _PIECE
        if begin >= n:
            return
        _join(low + begin, codes + begin // 2, low - 16, min(_PIECE, n - begin), out + 2 * begin)


@emitted()
def _join(w, other, table, n, out):
    """Write n weights of bf12, a multiple of `BLOCK`, as bf16 at `out`."""
    table = BF12.table(table)
    with n.steps(BLOCK) as i:
        at = out + i * 2
        for low, high in BF12.halves(w + BF12.span(i), other + BF12.beside(i), table):
            count = low.type.count
            at.store(
                low.shuffled(
                    [number + count * byte for number in range(count) for byte in (0, 1)], high
                )
            )
            at = at + 2 * count


@kernel
def _high_bytes(words):
    counts = np.zeros(256, np.int64)
    for word in words:
        counts[word >> 8] += 1
    return counts


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
