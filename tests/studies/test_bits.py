import numpy as np
import pytest

pytest.importorskip("plotly")

from moelab.zipmoe.entropy import joint_counts
from notebooks.studies.bits import microscope

BITS = np.array([0x3F80, 0x3F80, 0xBF80, 0x4040], np.uint16)  # 1, 1, -1 and 3 in bf16


def test_the_microscope_counts_signs_exponents_and_mantissas():
    sign, exponent, mantissa = microscope(joint_counts(BITS)).data
    np.testing.assert_allclose(sign.y, [75, 25])
    assert dict(zip(exponent.x.tolist(), exponent.y)) == {0: 75, 1: 25}
    assert {i: y for i, y in enumerate(mantissa.y) if y} == {0: 75, 64: 25}  # 3 is 1.1000000 · 2^1
