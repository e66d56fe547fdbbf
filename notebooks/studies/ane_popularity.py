"""How many tokens each expert gets where no calibration exists: a synthetic popularity.

It is drawn per layer from a log-normal, and the loads of single chunks vary around it by a
Dirichlet distribution. With "typical", 16 experts and top-2 the most popular expert gets about
twice the mean load (NPUMoE §4.1); the variation between chunks is fitted so that pruning at the
default tiers drops and pads as much as its Table 3. Whatever is computed from these numbers must
say "assumed"."""

from __future__ import annotations

import numpy as np

from moelab.base.registry import require
from moelab.base.specs import MoESpec

#: name → (width of the log-normal, Dirichlet concentration an expert)
SKEWS = {"even": (0.0, 1e6), "typical": (0.4, 2.0), "strong": (0.9, 2.0)}


def assumed_loads(
    spec: MoESpec, chunk: int, chunks: int = 64, skew: str = "typical", seed: int = 0
) -> np.ndarray:
    """Tokens that each expert gets in each chunk, assumed: int64 [n, L, E], at most `chunk`,
    chunk·K a layer."""
    require("skew", skew, SKEWS)
    width, concentration = SKEWS[skew]
    rng = np.random.default_rng(seed)
    popularity = np.exp(width * rng.standard_normal((spec.L, spec.E)))
    popularity /= popularity.sum(1, keepdims=True)
    shares = rng.gamma(concentration * spec.E * popularity + 1e-9, size=(chunks, spec.L, spec.E))
    shares /= shares.sum(2, keepdims=True)
    loads = rng.multinomial(chunk * spec.K, shares)
    for _ in range(spec.E):  # what an expert has above the chunk goes to the others
        above = np.maximum(loads - chunk, 0)
        if not above.any():
            break
        room = np.where(loads < chunk, shares + 1e-12, 0.0)
        total = room.sum(2, keepdims=True)  # 0 where every expert has the whole chunk
        loads = np.minimum(loads, chunk) + rng.multinomial(
            above.sum(2), room / np.where(total > 0, total, 1.0)
        )
    return loads


def assumed_counts(
    spec: MoESpec, chunk: int = 256, chunks: int = 64, skew: str = "typical", seed: int = 0
) -> tuple[np.ndarray, int]:
    """(counts [L, E], tokens): what a calibration on `assumed_loads` would have counted."""
    return assumed_loads(spec, chunk, chunks, skew, seed).sum(0), chunk * chunks
