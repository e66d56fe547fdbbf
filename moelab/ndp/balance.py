"""The balance conditions of GPU-NDP §III-C and §III-D, Eqs. 1, 2 and 3, solved as they are written.

E_g experts go over the link to the GPU so that transfer and GPU work take as long as the units take
for the other K − E_g; E_max experts that are on the GPU already should run there. E_g' is the GPU
work that the transfer does not hide: "one N-th of the fractional part of E_g", or 1/N where E_g is
an integer multiple of N.

    (1)  T_w·E_g + T_g·E_g'                 = (N+1)·T_a + T_n·(K − E_g)
    (2)  T_w·E_g + T_g·E_g' + (S−1)·T_a·N   = (N+1)·T_a + T_n·(K − E_g)
    (3)  T_g·E_max                          = (K − E_max)·T_n + (1+N)·T_a

    T_w, T_g, T_n, T_a   seconds: an expert over the link, on the GPU, on N units together, a token
                         over the link
    K, N, S              experts a token, units, tokens of the forward

The left side is a saw whose teeth overlap, so two E_g can balance, just below and just above a
whole number; the smaller is taken. At whole numbers E_g' as printed is wrong, so no solution is
looked for there."""

from __future__ import annotations

import math

import numpy as np


def unhidden(E_g: float, N: int) -> float:
    """E_g', the expert times on the GPU that the transfer does not hide (§III-C); 0 where nothing
    is sent."""
    fraction = E_g - math.floor(E_g)
    if fraction > 0:
        return fraction / N
    return 1 / N if E_g > 0 and E_g % N == 0 else 0.0


def balance(T_w: float, T_g: float, T_n: float, T_a: float, K: int, N: int, S: int = 1) -> float:
    """E_g of Eq. 2, which is Eq. 1 at S = 1: experts to send to the GPU, a real number in [0, K].

    0 where the GPU's side is the longer one without any expert, K where it is the shorter one with
    all of them. Each argument may be an array; the answer then is one."""
    if min(np.min(K), np.min(N), np.min(S)) < 1:
        raise ValueError(
            f"K = {K}, N = {N} and S = {S}, but experts, units and tokens are at least 1"
        )
    if min(np.min(T_w), np.min(T_g), np.min(T_n)) <= 0 or np.min(T_a) < 0:
        raise ValueError(
            f"T_w = {T_w}, T_g = {T_g}, T_n = {T_n} s must be above 0, and T_a = {T_a} s not "
            "below it"
        )
    right = np.asarray(
        (N + 1) * T_a + T_n * K - (S - 1) * T_a * N
    )  # the equation with all of E_g on the left
    found = np.where(right <= 0, 0.0, K)
    tooth = np.asarray(T_w + T_n + T_g / N)
    for whole in reversed(
        range(int(np.max(K)))
    ):  # a tooth begins below the end of the one before it
        fraction = (right - whole * (T_w + T_n)) / tooth
        found = np.where((right > 0) & (whole < K) & (fraction < 1), whole + fraction, found)
    return found[()]


def residual(
    E_g: float, T_w: float, T_g: float, T_n: float, T_a: float, K: int, N: int, S: int = 1
) -> float:
    """Left minus right side of Eq. 2 (Eq. 1 at S = 1) in seconds; 0 at a solution."""
    left = T_w * E_g + T_g * unhidden(E_g, N) + (S - 1) * T_a * N
    return left - (N + 1) * T_a - T_n * (K - E_g)


def most_on_gpu(T_g: float, T_n: float, T_a: float, K: int, N: int) -> float:
    """E_max of Eq. 3: how many of K experts that are in GPU memory should run there, a real number
    in [0, K]."""
    return np.minimum(K, (K * T_n + (1 + N) * T_a) / (T_g + T_n))
