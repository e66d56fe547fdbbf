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


def balance(T_w: float, T_g: float, T_n: float, T_a: float, K: int, N: int, S: int = 1) -> float:
    """E_g of Eq. 2, which is Eq. 1 at S = 1: experts to send to the GPU, a real number in [0, K].

    The numbers are at least 1, the times above 0. 0 where the GPU's side is the longer one without any expert, K where it is the shorter one with
    all of them."""
    right = (N + 1) * T_a + T_n * K - (S - 1) * T_a * N  # with all of E_g on the left
    if right <= 0:
        return 0.0
    for whole in range(K):  # a tooth begins below the end of the one before it
        fraction = (right - whole * (T_w + T_n)) / (T_w + T_n + T_g / N)
        if fraction < 1:
            return whole + fraction
    return float(K)


def most_on_gpu(T_g: float, T_n: float, T_a: float, K: int, N: int) -> float:
    """E_max of Eq. 3: how many of K experts that are in GPU memory should run there, a real number
    in [0, K]."""
    return min(K, (K * T_n + (1 + N) * T_a) / (T_g + T_n))
