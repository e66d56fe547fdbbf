"""Fast paths are counted: one that is lost, as a class has another name, only makes a model slower."""

import pytest

pytest.importorskip("numba")
from moelab import open_model
from moelab.fast.paths import described, fast_paths


def test_no_fast_path_of_the_model_that_is_shipped_is_lost():
    with open_model(executor="fast") as lm:
        found, L = fast_paths(lm), lm.config.num_hidden_layers
        said = dict(described(lm))
    assert found.pop("linear layers") > 0  # those that are large enough
    assert found.pop("models") == 1 and found.pop("norms") >= 2 * L + 1
    assert set(found.values()) == {L} and len(found) == 4
    assert {"vectors", "threads"} < said.keys() and said["routers"] == f"{L} modules"


def test_a_model_that_is_not_fast_has_none():
    with open_model() as lm:
        assert not any(fast_paths(lm).values())
