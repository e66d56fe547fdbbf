"""Balance conditions: where the two sides meet, by scanning them, and whole numbers below."""

import numpy as np
import pytest

from moelab.cards import load_model
from moelab.ndp import conditions
from moelab.ndp.balance import residual
from moelab.ndp.sweep import MODELS, Assumptions


@pytest.mark.parametrize(
    "model, N, S, tokens",
    [(MODELS[1], 2, 1, 1.0), (MODELS[0], 3, 1, 1.0), (MODELS[3], 3, 64, 20.0)],
)
def test_a_solution_is_where_the_sides_cross(model, N, S, tokens):
    """Eq. 2 as the paper prints it, scanned from 0 in steps of a thousandth of an expert."""
    t = conditions.times(model, N, tokens=tokens)
    T_w, T_g, T_n, T_a, K = (t[name] for name in ("T_w", "T_g", "T_n", "T_a", "K"))

    def gpu_takes(E):
        return T_w * E + T_g * (E % 1) / N + (S - 1) * T_a * N

    def units_take(E):
        return (N + 1) * T_a + T_n * (K - E)

    E = next(
        (
            i / 1000
            for i in range(1, 1000 * K)
            if i % 1000 and gpu_takes(i / 1000) >= units_take(i / 1000)
        ),
        K,
    )
    solved = conditions.solutions(t, S)
    assert solved[conditions.BALANCED][0] == pytest.approx(E, abs=2e-3)
    assert solved[conditions.WHOLE] == (int(E), pytest.approx(units_take(int(E))))
    (x, gpu), (_, stay) = conditions.sides(t, S, points=10).values()
    assert gpu[13] == pytest.approx(gpu_takes(1.3)) and np.isnan(gpu[10])
    assert x[13] == 1.3 and stay[13] == pytest.approx(units_take(1.3))


def test_prefetched_experts_end_together():
    """Eq. 3: one more thousandth of an expert on the GPU would make it the later one."""
    t = conditions.times(MODELS[1], 6)
    _, solved = conditions.prefetched(t)
    most, seconds = solved[conditions.BALANCED]
    late = [
        i / 1000
        for i in range(1000 * t["K"])
        if t["T_g"] * i / 1000 > (t["K"] - i / 1000) * t["T_n"] + 7 * t["T_a"]
    ]
    assert most == pytest.approx(late[0], abs=1e-3) and seconds == pytest.approx(t["T_g"] * most)


def test_answers_are_for_what_fits_and_solve_the_equation():
    found = conditions.answers(units=(1, 2, 3))
    assert {model for model, N in found if N == 1} == {MODELS[0]}  # 32 GB hold one of the four
    for key, E_g in found.items():
        if E_g % 1:
            terms = conditions.times(*key)
            assert abs(residual(E_g, **terms)) < 1e-9 * conditions.stay(E_g, terms)
    assert all(0 <= E_g <= load_model(model).K for (model, _), E_g in found.items())


def test_the_prompt_length_where_link_and_modules_are_equal():
    machine, spec = Assumptions().hardware(6), load_model(MODELS[1])
    S = conditions.crossing(MODELS[1], machine)
    weights = spec.expert_bytes / 2
    assert spec.expert_bytes / machine.link == pytest.approx(
        weights * S * spec.K / spec.E / (machine.units * machine.unit_macs)
    )
