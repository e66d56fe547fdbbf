"""RMSNorms of a few rows, x [rows, H] → [rows, H], in one call."""

from __future__ import annotations

import numpy as np

from moelab.kernels.compile import kernel
from moelab.kernels.emit import address
from moelab.kernels.products import F32, widen
from moelab.kernels.tiles import span, write


@kernel(fastmath={"reassoc", "contract"})  # sums in any order, so that they are vectors
def rms_norm(kind, x, w_kind, w, rows, H, eps, out):
    """Norms of rows [H] at x, times the weight at w; `out` may be x."""
    row = np.empty(H, np.float32)
    scale = np.empty(H, np.float32)
    widen(w_kind, F32, w, H, address(scale))
    for r in range(rows):
        at = x + span(kind, r * H)
        to = out + span(kind, r * H)
        widen(kind, F32, at, H, address(row))
        total = np.float32(0)
        for i in range(H):
            total += row[i] * row[i]
        inverse = np.float32(1 / np.sqrt(total / H + eps))
        for i in range(H):
            # Rounded before the weight, as transformers does it.
            write(kind, to, i, row[i] * inverse)
        widen(kind, F32, to, H, address(row))
        for i in range(H):
            write(kind, to, i, row[i] * scale[i])
