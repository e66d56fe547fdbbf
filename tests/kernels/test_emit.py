"""e^x of the kernels against numpy's in double precision."""

import numpy as np
import pytest

pytest.importorskip("numba")
from moelab.kernels.compile import kernel
from moelab.kernels.emit import exponential


@kernel
def _all(x, y):
    for i in range(len(x)):
        y[i] = exponential(x[i])


def test_exponentials_are_within_a_unit_in_the_last_place():
    x = np.concatenate(
        [np.linspace(-87, 88.3, 200_001), [0, 1e-30, -1e-30, -1e9, -np.inf, 1e9, np.inf, np.nan]]
    )
    x = x.astype(np.float32)
    y, wanted = np.empty_like(x), np.exp(np.clip(x.astype(float), -700, 700))
    _all(x, y)
    assert (np.abs(y[:-5] - wanted[:-5]) <= 2.0**-23 * wanted[:-5]).all()
    assert y[-5:-1].tolist() == [0, 0, np.inf, np.inf] and np.isnan(y[-1])
