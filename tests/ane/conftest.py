"""What several tests of the Neural Engine's parts run on."""

import pytest

import moelab
from tests.models import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Qwen3-MoE of two layers, the first one dense."""
    return tiny.save(
        "qwen3_moe",
        tmp_path_factory.mktemp("model") / "tiny",
        num_hidden_layers=2,
        mlp_only_layers=[0],
    )


@pytest.fixture(scope="module")
def model(checkpoint):
    return moelab.open_model(checkpoint)
