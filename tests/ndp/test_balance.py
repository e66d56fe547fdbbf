"""Eqs. 1 to 3: solutions balance, they are the smallest, and E_g' is what the paper's sentence
says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.ndp.balance import balance

times = st.floats(1e-6, 1e-2)
setting = {
    "T_w": times,
    "T_g": times,
    "T_n": times,
    "T_a": st.floats(0, 1e-6),
    "K": st.integers(1, 8),
    "N": st.integers(1, 16),
    "S": st.integers(1, 600),
}


def residual(E_g, T_w, T_g, T_n, T_a, K, N, S=1):
    """Left minus right side of Eq. 2 (Eq. 1 at S = 1); E_g' is what the transfer does not hide."""
    fraction = E_g - math.floor(E_g)
    unhidden = fraction / N if fraction else (E_g > 0 and E_g % N == 0) / N
    left = T_w * E_g + T_g * unhidden + (S - 1) * T_a * N
    return left - (N + 1) * T_a - T_n * (K - E_g)


@given(**setting)
def test_the_solution_balances_and_is_the_smallest(T_w, T_g, T_n, T_a, K, N, S):
    E_g = balance(T_w, T_g, T_n, T_a, K, N, S)
    scale = K * (T_w + T_n) + T_g + S * T_a * N

    def gap(e):
        return residual(e, T_w, T_g, T_n, T_a, K, N, S) / scale

    if E_g == 0:
        assert gap(0) >= -1e-9  # the GPU's side is the longer one already
    elif E_g == K:
        assert gap(K - 1e-9) <= 1e-6
    else:
        assert 0 < E_g < K and abs(gap(E_g)) <= 1e-9
    below = [*np.linspace(0, E_g * (1 - 1e-9), 51)[1:], *range(1, math.ceil(E_g))]
    assert E_g == 0 or max(map(gap, below)) <= 1e-9


def test_equation_1_by_hand():
    # 8 experts, two units; E_g = 1 + f: 4·(1 + f) + f/2 = 8·1 + 3·0.1, so f = 4.3 / 4.5
    assert balance(3.0, 1.0, 1.0, 0.1, 8, 2) == pytest.approx(1 + 4.3 / 4.5)
    assert residual(2 + 0.3 / 4.5, 3.0, 1.0, 1.0, 0.1, 8, 2) == pytest.approx(
        0
    )  # just above 2 balances, too
