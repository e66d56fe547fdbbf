"""The balance conditions of GPU-NDP §III-C and §III-D, Eqs. 1, 2 and 3, solved as they are written.

Eqs. 1 and 2 say how many experts E_g go over the link to the GPU so that transfer and GPU work take as long as the
units take for the other K − E_g; Eq. 3 says how many experts that are on the GPU already should run there. E_g stands
on both sides: the GPU work that the transfer does not hide is E_g' expert times, "one N-th of the fractional part of
E_g", or 1/N where E_g is an integer multiple of N.

    (1)  T_w·E_g + T_g·E_g'                 = (N+1)·T_a + T_n·(K − E_g)
    (2)  T_w·E_g + T_g·E_g' + (S−1)·T_a·N   = (N+1)·T_a + T_n·(K − E_g)
    (3)  T_g·E_max                          = (K − E_max)·T_n + (1+N)·T_a

Taken literally E_g' leaves a hole: an integer that N does not divide has no tail at all, though its last N-th is
computed after it arrives; `improved` gives every whole number that tail. With either rule two E_g can balance, just
below and just above an integer; the smaller is taken, which keeps more work where the weights are.
"""

from __future__ import annotations

import math


def unhidden(E_g: float, N: int, version: str = "literal") -> float:
    """E_g', the expert times on the GPU that the transfer does not hide (§III-C).

    `literal` is the paper's sentence; `improved` gives every whole number the tail of one N-th of an expert.
    """
    fraction = E_g - math.floor(E_g)
    if fraction > 0:
        return fraction / N
    multiple = E_g % N == 0 if version == "literal" else E_g > 0
    return 1 / N if multiple else 0.0


def balance(T_w: float, T_g: float, T_n: float, T_a: float, K: int, N: int, S: int = 1,
            version: str = "literal") -> float:
    """E_g of Eq. 2, which is Eq. 1 at S = 1: experts to send to the GPU, a real number in [0, K].

    Parameters
    ----------
    T_w, T_g, T_n, T_a : seconds: an expert over the link, on the GPU, on N units together, a token over the link.
    K, N, S : experts a token, units, tokens of the forward.

    Returns 0 where the GPU's side is the longer one without any expert, K where the units' side is.
    """
    right = (N + 1) * T_a + T_n * K - (S - 1) * T_a * N         # the equation with all of E_g on the left
    slope = T_w + T_n
    for whole in range(K + 1):
        if whole == K:
            return float(K)
        if whole * slope + T_g * unhidden(whole, N, version) >= right:      # a whole number is enough or too much
            return float(whole)
        fraction = (right - whole * slope) / (slope + T_g / N)
        if fraction < 1:
            return whole + fraction
    raise AssertionError("unreachable: E_g = K ends the search")


def residual(E_g: float, T_w: float, T_g: float, T_n: float, T_a: float, K: int, N: int, S: int = 1,
             version: str = "literal") -> float:
    """Left minus right side of Eq. 2 (Eq. 1 at S = 1) in seconds; 0 at a solution."""
    left = T_w * E_g + T_g * unhidden(E_g, N, version) + (S - 1) * T_a * N
    return left - (N + 1) * T_a - T_n * (K - E_g)


def most_on_gpu(T_g: float, T_n: float, T_a: float, K: int, N: int) -> float:
    """E_max of Eq. 3: how many of K experts that are in GPU memory should run there, a real number in [0, K]."""
    return min(K, (K * T_n + (1 + N) * T_a) / (T_g + T_n))
