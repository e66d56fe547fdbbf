"""Fast paths are counted: one that is lost, as a class has another name, only makes a model slower."""

import pytest

pytest.importorskip("numba")
from moelab import open_model
from moelab.fast.paths import fast_paths, machine_paths


def test_no_fast_path_of_the_model_that_is_shipped_is_lost():
    with open_model(executor="fast") as lm:
        found, L = fast_paths(lm), lm.config.num_hidden_layers
    assert found.pop("linear layers")[0] > 0  # those that are large enough
    assert found["layers in one call"] == found["routers"] == found["attention"] == (L, L)
    assert all(n == of > 0 for n, of in found.values())


def test_a_model_that_is_not_fast_has_none():
    with open_model() as lm:
        assert not any(n for n, _ in fast_paths(lm).values())
    assert {"vectors", "products", "threads"} <= machine_paths().keys()
