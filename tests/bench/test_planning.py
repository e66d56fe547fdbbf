"""The bench of planning says what it should, on few instances."""

import numpy as np

from moelab.bench import planning


def test_its_figures():
    found = planning.run(instances=40, repeats=5)
    study = found["Algorithm 1 ÷ optimum (simulated)"]
    assert 1 <= study["mean"] <= study["worst"] and study["above the bound"] == 0
    assert all(value > 0 for value in found["ordering a layer (measured)"].values())
    assert float(found["planning (measured)"]["error of the fitted inclusion"]) < 1e-8


def test_the_popularity_is_one_of_k_experts():
    f = planning.inclusion_of_ranks()
    assert np.isclose(f.sum(), planning.K) and f.max() <= 1 and (np.diff(f) <= 0).all()
