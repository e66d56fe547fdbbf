"""Default vectors and quasi-hidden states against loops over single tokens."""

from __future__ import annotations

import pytest
import torch

import moelab
from moelab.models import discover, eager, plugged
from moelab.models.stream import streams
from moelab.recording import record
from moelab.speculate.signals import default_vectors, quasi_hidden
from tests.models import tiny
from tests.speculate.conftest import PROMPTS, neighbours, passed


def outputs_one_by_one(model, trace):
    """(layer, expert) → its outputs [H] for every token it was chosen for, from the recorded router
    inputs: one token and one expert at a time with weight 1, or, where a weight scales the input,
    with that weight."""
    found = {}
    with plugged(model):
        for layer in discover(model):
            scales_input = "Llama4" in type(layer.experts).__name__
            s, _, ids, weights = passed(trace, layer.index)
            for x, chosen, given in zip(s, ids, weights):
                for expert, weight in zip(chosen.tolist(), given):
                    if expert != trace.spec.E:
                        w = (
                            weight.reshape(1, 1)
                            if scales_input
                            else torch.ones(1, 1, dtype=x.dtype)
                        )
                        y = eager(x[None], torch.tensor([[expert]]), w, layer.seam)
                        found.setdefault((layer.index, expert), []).append(y[0].double())
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.SOME)
def test_vectors_defaults_and_q_are_their_definitions(name, tiny_model):
    """Means over tokens; what the block adds beside them; sums over one token's experts; a norm."""
    model = tiny_model(name)
    vectors = default_vectors(model, PROMPTS)
    trace = record(model, PROMPTS, hidden=True, batch_size=1)
    found = outputs_one_by_one(model, trace)
    for layer in discover(model):
        everything = [y for (l, _), ys in found.items() if l == layer.index for y in ys]
        for expert in range(model.spec.E):
            ys = found.get((layer.index, expert), everything)  # never chosen: the layer's mean
            mean = torch.stack(ys).mean(0)
            d = vectors.d[layer.index, expert].double()
            torch.testing.assert_close(d, mean, rtol=1e-4, atol=1e-6)
            n = len(found.get((layer.index, expert), []))
            assert vectors.counts[layer.index, expert] == n
        shared = shared_experts(layer.block, passed(trace, layer.index)[0])
        torch.testing.assert_close(vectors.shared[layer.index], shared, rtol=1e-4, atol=1e-6)
    for layer, following in neighbours(model):
        _, r, ids, weights = passed(trace, layer.index)
        made = vectors.layer_default(layer.index, ids, weights)
        path = streams(model)[layer.index : following.index + 1]
        for t in range(len(r)):
            d = vectors.shared[layer.index].clone()
            for expert, weight in zip(ids[t].tolist(), weights[t]):
                if expert != model.spec.E:
                    d += vectors.d[layer.index, expert] * (1 if vectors.weighted else weight)
            torch.testing.assert_close(made[t], d, rtol=1e-4, atol=1e-5)
            q = path[-1].norm((r[t] + d)[None])[0]
            torch.testing.assert_close(quasi_hidden(path, r, made)[t], q, rtol=1e-3, atol=1e-4)


def shared_experts(block, x):
    """The mean of the shared experts' own output, zero where there are none."""
    names = [n for n in ("shared_expert", "shared_experts") if hasattr(block, n)]
    if not names:
        return torch.zeros(x.shape[-1])
    y = getattr(block, names[0])(x)
    if hasattr(block, "shared_expert_gate"):
        y = torch.sigmoid(block.shared_expert_gate(x)) * y
    return y.mean(0)


@pytest.mark.parametrize("executor", ["fast", "sorted", "tiered"])
@pytest.mark.parametrize("memory", [None, "60%"])
def test_the_executor_that_a_model_was_opened_with_changes_no_default_vectors(
    tmp_path, executor, memory
):
    folder = tiny.save("qwen3_moe", tmp_path)
    with moelab.open_model(folder) as lm:
        expected = default_vectors(lm, PROMPTS)
        counts = record(lm, PROMPTS, batch_size=1).counts()
    with moelab.open_model(folder, executor=executor, memory=memory) as lm:
        found = default_vectors(lm, PROMPTS)
        lm(torch.tensor(PROMPTS[:1]))
    assert torch.equal(found.counts, expected.counts) and torch.equal(counts, expected.counts)
    torch.testing.assert_close(found.d, expected.d, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.shared, expected.shared, rtol=1e-4, atol=1e-6)


def test_measuring_changes_nothing(tiny_model):
    model = tiny_model("mixtral")
    classes = [type(m) for m in model.modules()]
    expected = default_vectors(model, PROMPTS)
    assert [type(m) for m in model.modules()] == classes

    def wrong(x, ids, weights, experts):
        return x

    with plugged(model, wrong):
        assert torch.equal(default_vectors(model, PROMPTS).d, expected.d)
        assert discover(model)[0].seam.executor is wrong


def test_prompts_are_needed(tiny_model):
    model = tiny_model("llama4_text")
    with pytest.raises(ValueError, match="prompts is"):
        default_vectors(model, [])
