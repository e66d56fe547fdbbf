"""Everything that puts something on a model at once: in any order, exact meanwhile, and nothing
left behind."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import open_model
from moelab.base.registry import make
from moelab.fast.fast_decode import FastDecode
from moelab.models import plugged
from moelab.models.stream import streams
from moelab.offloading.offload import offload
from moelab.recording import record
from moelab.speculate import Speculation, default_vectors
from tests.depth import depth
from tests.models.test_seam import snapshot
from tests.offloading.test_offload import generate

PROMPT = [5, 9, 33, 12, 60, 7, 8]


def speculation(model, mode="hint"):
    if mode == "hint":
        return Speculation(model, make("predictor", "router", model))
    of, generator = model.spec, torch.Generator().manual_seed(0)
    matrices = torch.randn(of.L, of.E, of.H, generator=generator)
    given = {
        "vectors": default_vectors(model, [PROMPT]),  # which puts on and takes off, too
        "estimator": lambda q, layer: q.float() @ matrices[layer].T,
    }
    return Speculation(model, make("predictor", "estimator", model, **given), mode)


PUT_ON = {
    "first": speculation,
    "second": speculation,
    "free": lambda model: speculation(model, "router-free"),
    "fast": FastDecode,
    "plugged": plugged,
}
INEXACT = {"free", "fast"}


@pytest.fixture(scope="module")
def models(qwen):
    offloaded = offload(qwen[1], "10MB", ahead=2)
    yield {"resident": open_model(qwen[0]), "offloaded": offloaded}
    offloaded.moelab.close()  # other modules look for threads that were left behind


@pytest.mark.parametrize("which", ["resident", "offloaded"])
def test_whatever_is_on_a_model_it_is_exact_and_leaves_nothing_behind(which, models):
    model = models[which]
    exact, trace = generate(model), record(model, [PROMPT]).ids
    streams(model)  # what is measured once stays
    before = snapshot(model)

    def check(on):
        found = generate(model)
        if not INEXACT & {*on}:
            assert all(map(torch.equal, found, exact))
            assert torch.equal(record(model, [PROMPT]).ids, trace)

    def put_on(operations, on=()):
        if operations:
            with PUT_ON[operations[0]](model):
                put_on(operations[1:], (*on, operations[0]))
        check(on)

    @given(st.lists(st.sampled_from([*PUT_ON]), min_size=1, max_size=4, unique=True))
    @settings(max_examples=depth(4, 100))
    def in_order(operations):
        put_on(operations)
        assert snapshot(model) == before

    in_order()


def test_a_copy_of_a_cache_grows_by_itself(qwen):
    """A shallow copy of a layer shares its tensors, and must not share the room behind them."""
    model = open_model(qwen[0], dtype=torch.float32)
    tokens = torch.arange(3, 20)[None]

    def walk():
        def feed(cache, token):
            return model(torch.tensor([[token]]), past_key_values=cache).logits

        with torch.inference_mode():
            cache = model(tokens, use_cache=True).past_key_values
            feed(cache, 5)
            other = copy.copy(cache)
            other.layers = [copy.copy(layer) for layer in cache.layers]
            return [feed(cache, 7), feed(other, 9), feed(cache, 8), feed(other, 8)]

    wanted = walk()
    with FastDecode(model) as fast:
        assert fast.fused
        for got, plain in zip(walk(), wanted, strict=True):
            torch.testing.assert_close(got, plain, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_session_that_another_thread_closes_as_a_pass_begins_sees_nothing(qwen):
    """torch then calls its hook once more, without keywords."""
    with open_model(qwen[0]) as model:
        expected, passes = model(torch.tensor([PROMPT])).logits, len(model.moelab.forwards)
        session = model.moelab
        model.register_forward_pre_hook(lambda *_: session.close(), prepend=True)
        assert torch.equal(model(torch.tensor([PROMPT])).logits, expected)
        assert len(session.forwards) == passes
