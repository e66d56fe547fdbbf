"""Small random models, one of each architecture and dtype, opened once for all tests here."""

from __future__ import annotations

import pytest
import torch

from moelab import registry
from moelab.checkpoint.opening import open_checkpoint
from moelab.models.stream import stacks
from moelab.speculate import takes
from moelab.trace import HIDDEN
from tests.models import tiny

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71], [3, 90, 17, 25, 31]]


def make(name, model, *, ahead=1, **bag):
    """A predictor, of a bag from which it takes what it needs."""
    taken = {part: value for part, value in bag.items() if part in takes(name)}
    return registry.make("predictor", name, model, ahead=ahead, **taken)


def neighbours(model):
    """(MoE layer, the next one) of each stack."""
    return [pair for _, layers in stacks(model) for pair in zip(layers, layers[1:])]


def passed(trace, layer):
    """s, r, ids, weights of the tokens that passed a layer."""
    rows = trace.router_inputs[:, layer].any(-1)
    s, r = (getattr(trace, name)[rows, layer] for name in HIDDEN)
    return s, r, trace.ids[rows, layer].long(), trace.weights[rows, layer]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """(architecture, dtype) → the model; tests leave it as they found it."""
    made = {}

    def get(name: str, dtype: torch.dtype = torch.float32):
        if (name, dtype) not in made:
            folder = tiny.save(name, tmp_path_factory.mktemp(name), dtype)
            made[name, dtype] = open_checkpoint(folder)
        return made[name, dtype]

    return get


@pytest.fixture(params=tiny.ARCHITECTURES)
def model(request, tiny_model):
    return tiny_model(request.param)
