"""Eqs. 1 to 3: solutions balance, they are the smallest, and E_g' is what the paper's sentence
says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.ndp.balance import balance, residual

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


@settings(max_examples=60, deadline=None)
@given(**setting)
def test_the_solution_balances_or_lies_at_an_end(T_w, T_g, T_n, T_a, K, N, S):
    E_g = balance(T_w, T_g, T_n, T_a, K, N, S)
    gap = residual(E_g, T_w, T_g, T_n, T_a, K, N, S)
    scale = K * (T_w + T_n) + T_g + S * T_a * N
    if E_g == 0:
        assert gap >= -1e-9 * scale  # the GPU's side is the longer one already
    elif E_g == K:
        assert residual(K - 1e-9, T_w, T_g, T_n, T_a, K, N, S) <= 1e-6 * scale
    else:
        assert 0 < E_g < K and abs(gap) <= 1e-9 * scale


@settings(max_examples=60, deadline=None)
@given(**setting)
def test_no_smaller_number_of_experts_balances(T_w, T_g, T_n, T_a, K, N, S):
    """Below the solution the GPU's side is the shorter one, wherever one looks."""
    E_g = balance(T_w, T_g, T_n, T_a, K, N, S)
    below = [
        residual(e, T_w, T_g, T_n, T_a, K, N, S) for e in np.linspace(0, E_g * (1 - 1e-9), 51)[1:]
    ]
    whole = [residual(e, T_w, T_g, T_n, T_a, K, N, S) for e in range(1, int(np.ceil(E_g)))]
    assert E_g == 0 or max(below + whole) <= 1e-9 * (K * (T_w + T_n) + T_g + S * T_a * N)


def test_equation_1_by_hand():
    # 8 experts, two units; E_g = 1 + f: 4·(1 + f) + f/2 = 8·1 + 3·0.1, so f = 4.3 / 4.5
    assert balance(3.0, 1.0, 1.0, 0.1, 8, 2) == pytest.approx(1 + 4.3 / 4.5)
    assert residual(2 + 0.3 / 4.5, 3.0, 1.0, 1.0, 0.1, 8, 2) == pytest.approx(
        0
    )  # just above 2 balances, too


@pytest.mark.parametrize("arguments", [{"N": 0}, {"K": 0}, {"S": 0}, {"T_w": 0.0}, {"T_a": -1.0}])
def test_what_is_no_layer(arguments):
    with pytest.raises(ValueError, match="N = 0|K = 0|S = 0|must be above 0"):
        balance(
            **({"T_w": 1.0, "T_g": 1.0, "T_n": 1.0, "T_a": 0.0, "K": 2, "N": 2, "S": 1} | arguments)
        )
