"""Small random models, one of each architecture and dtype, opened once for all tests here."""

from __future__ import annotations

import pytest
import torch

from moelab import registry
from moelab.checkpoint.opening import open_checkpoint
from moelab.speculate import takes
from tests.models import tiny


def make(name, model, *, ahead=1, **bag):
    """A predictor, of a bag from which it takes what it needs."""
    return registry.make(
        "predictor",
        name,
        model,
        ahead=ahead,
        **{part: value for part, value in bag.items() if part in takes(name)},
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """(architecture, dtype) → the model; tests leave it as they found it."""
    made = {}

    def get(name: str, dtype: torch.dtype = torch.float32):
        if (name, dtype) not in made:
            made[name, dtype] = open_checkpoint(
                tiny.save(name, tmp_path_factory.mktemp(name), dtype)
            )
        return made[name, dtype]

    return get


@pytest.fixture(params=tiny.ARCHITECTURES)
def model(request, tiny_model):
    return tiny_model(request.param)
