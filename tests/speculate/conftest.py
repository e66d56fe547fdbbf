"""Small random models, one of each architecture and dtype, opened once for all tests here."""

from __future__ import annotations

import pytest
import torch

from moelab.base import registry
from moelab.checkpoint.opening import open_checkpoint
from moelab.models.stream import stacks
from moelab.speculate import Predictor, takes
from moelab.trace import HIDDEN
from tests.models import tiny

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71], [3, 90, 17, 25, 31]]


class Oracle(Predictor):
    """The truth, from a trace of the very same prompts, run one by one in the same order."""

    takes = ("trace",)

    def prepare(self, model):
        rows = range(self.trace.sequences)
        self.prompts = [torch.nonzero(self.trace.sequence == i).flatten() for i in rows]
        self.firsts = {layers[0].index for _, layers in stacks(model)}
        self.prompt = self.row = self.end = 0

    def begin(self):
        if self.end:  # the current prompt has been run
            self.prompt = (self.prompt + 1) % len(self.prompts)
        self.row = self.end = 0  # of this prompt: the rows of the current forward pass

    def observe(self, layer, ids, weights):
        if layer in self.firsts:  # a forward pass begins
            self.row, self.end = self.end, self.end + len(ids)
        assert torch.equal(self._truth(layer)[0], ids)

    def _truth(self, layer):
        rows = self.prompts[self.prompt][self.row : self.end]
        return self.trace.ids[rows, layer].long(), self.trace.weights[rows, layer]

    def predict(self, layer, s, r, ids, weights):
        return self._truth(self.targets[layer].index)


def make(name, model, *, ahead=1, **bag):
    """A predictor, of a bag from which it takes what it needs."""
    if name == "oracle":
        return Oracle(model, ahead=ahead, trace=bag["trace"])
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


@pytest.fixture(params=tiny.SOME)
def model(request, tiny_model):
    return tiny_model(request.param)
