"""The guide's choice of parallelism."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import MoESpec
from moelab.static.parallelism import choose


def toy(E, I):
    return MoESpec("toy", "toy", 1, (0,), E=E, K=1, H=64, I=I)


def test_the_guides_examples():
    assert choose(toy(8, 14336), 8).kind == "TP"
    assert choose(toy(128, 768), 16).kind == "EP"
    few = choose(toy(16, 512), 16)
    assert (few.tp, few.ep, few.kind) == (4, 4, "hybrid") and "128" in str(few)
    assert choose(toy(48, 1024), 8).kind == "hybrid"
    assert choose(toy(64, 1024), 128).tp == 8
    assert choose(toy(64, 1024), 1).kind == "one device"


@given(
    st.sampled_from([8, 32, 33, 48, 60, 63, 64, 256]),
    st.sampled_from([96, 128, 512, 1408, 4096]),
    st.integers(1, 130),
)
def test_advice_fits_and_its_reasons_are_true(E, I, devices):
    try:
        made = choose(toy(E, I), devices)
    except ValueError as error:
        tps = range(1, min(devices, I) + 1)
        assert "too many" in str(error)
        assert not any(devices % tp == 0 and devices // tp <= E for tp in tps)
        return
    assert made.tp * made.ep == devices and made.ep <= E and made.reasons
    said = str(made)
    assert ("they are cut" in said) == (made.ep == 1 < made.tp and "this way" not in said)
    assert "spread over" not in said or (made.tp > 1 and made.ep > 1)
    moderate = [tp for tp in range(1, 9) if devices % tp == 0 and I / tp >= 128]
    moderate = [tp for tp in moderate if devices // tp <= E]
    if 32 < E < 64:
        assert made.tp > 1 or moderate in ([], [1])
    if E >= 64:  # no more groups than the guide shows, where a part is wide enough
        assert made.ep <= 16 or all(devices // tp > 16 for tp in moderate)
    assert "at least 128" not in said or I / made.tp >= 128
    assert "less than 128" not in said or I / made.tp < 128
