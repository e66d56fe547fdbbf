"""Balance conditions: where the two sides meet, by scanning them, and whole numbers below."""

import numpy as np
import pytest

from moelab.cards import load_model
from moelab.ndp import conditions
from moelab.ndp.sweep import MODELS, Assumptions


@pytest.mark.parametrize("model, N, S, tokens", [(MODELS[1], 2, 1, 1.0), (MODELS[0], 3, 1, 1.0),
                                                 (MODELS[3], 3, 64, 20.0)])
def test_a_solution_is_where_the_sides_cross(model, N, S, tokens):
    t = conditions.times(model, N, tokens=tokens)
    (x, gpu), (_, stay) = conditions.sides(t, S, points=1000).values()
    solved = conditions.solutions(t, S)
    crossed = x[np.nonzero(~np.isnan(gpu) & (gpu >= stay))[0]]
    assert solved[conditions.LITERAL][0] == pytest.approx(crossed[0] if len(crossed) else t["K"], abs=2e-3)
    whole, seconds = solved[conditions.WHOLE]
    assert whole == int(solved[conditions.LITERAL][0])
    assert seconds == (N + 1) * t["T_a"] + t["T_n"] * (t["K"] - whole)


def test_prefetched_experts_end_together():
    t = conditions.times(MODELS[1], 6)
    (sides, solved) = conditions.prefetched(t)
    most, seconds = solved[conditions.LITERAL]
    assert seconds == pytest.approx(t["T_g"] * most) and 0 < most < t["K"]
    x, gpu = sides[conditions.GPU]
    assert gpu == pytest.approx(t["T_g"] * x)


def test_answers_are_for_what_fits_and_solve_the_equation():
    found = conditions.answers(units=(1, 2, 3))
    assert {model for model, N in found if N == 1} == {MODELS[0]}               # 32 GB hold one of the four
    assert conditions.largest_residual(found) < 1e-9
    assert all(0 <= E_g <= load_model(model).K for (model, _), E_g in found.items())


def test_the_prompt_length_where_link_and_modules_are_equal():
    machine, spec = Assumptions().hardware(6), load_model(MODELS[1])
    S = conditions.crossing(MODELS[1], machine)
    weights = spec.expert_bytes / 2
    assert spec.expert_bytes / machine.link == pytest.approx(
        weights * S * spec.K / spec.E / (machine.units * machine.unit_macs))
