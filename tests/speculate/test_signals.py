"""Default vectors and quasi-hidden states against loops over single tokens."""

from __future__ import annotations

import pytest
import torch

import moelab
from moelab import open_model
from moelab.models import discover, eager, plug
from moelab.models.stream import Stream, streams
from moelab.recording import record
from moelab.speculate.signals import DefaultVectors, default_vectors, quasi_hidden
from tests.models import tiny

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71], [3, 90, 17, 25, 31]]


@pytest.fixture
def measured(model):
    """(model, its default vectors, a trace of the same prompts)."""
    return model, default_vectors(model, PROMPTS), record(model, PROMPTS, hidden=True, batch_size=1)


def outputs_one_by_one(model, trace):
    """Outputs of every expert for every token it was chosen for, from the recorded router inputs:
    {(l, e): [H] …}.

    Through the stock experts module, one token and one expert at a time with weight 1; where a
    weight scales the input, with that weight."""
    plug(model)
    found = {}
    for layer in discover(model):
        scales_input = "Llama4" in type(layer.experts).__name__
        for t in range(len(trace)):
            for expert, weight in zip(
                trace.ids[t, layer.index].tolist(), trace.weights[t, layer.index].tolist()
            ):
                if expert == trace.spec.E:
                    continue
                x = trace.router_inputs[t, layer.index][None]
                y = eager(
                    x,
                    torch.tensor([[expert]]),
                    torch.tensor([[weight if scales_input else 1.0]], dtype=x.dtype),
                    layer.experts,
                )
                found.setdefault((layer.index, expert), []).append(y[0].double())
    moelab.models.unplug(model)
    return found


@torch.no_grad()
def test_default_vectors_are_means_over_tokens(measured):
    model, vectors, trace = measured
    found = outputs_one_by_one(model, trace)
    for layer in range(model.spec.L):
        everything = [y for (l, _), ys in found.items() if l == layer for y in ys]
        for expert in range(model.spec.E):
            ys = found.get((layer, expert), everything)  # never chosen: the mean of the layer
            assert vectors.counts[layer, expert] == len(found.get((layer, expert), []))
            torch.testing.assert_close(
                vectors.d[layer, expert].double(), torch.stack(ys).mean(0), rtol=1e-4, atol=1e-6
            )


@torch.no_grad()
def test_shared_is_what_the_block_adds(measured):
    """The mean of the shared experts' own output where there are some, else exactly zero."""
    model, vectors, trace = measured
    for layer in discover(model):
        block = layer.block
        module = next(
            (getattr(block, n) for n in ("shared_expert", "shared_experts") if hasattr(block, n)),
            None,
        )
        passed = trace.router_inputs[:, layer.index].ne(0).any(-1)
        x = trace.router_inputs[passed, layer.index]
        if module is None:
            assert torch.equal(vectors.shared[layer.index], torch.zeros(model.spec.H))
            continue
        y = module(x)
        if hasattr(block, "shared_expert_gate"):
            y = torch.sigmoid(block.shared_expert_gate(x)) * y
        torch.testing.assert_close(vectors.shared[layer.index], y.mean(0), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_layer_default_and_q_are_their_definitions(measured):
    model, vectors, trace = measured
    layers = discover(model)
    for layer, following in zip(layers, layers[1:]):
        rows = trace.router_inputs[:, layer.index].ne(0).any(-1).nonzero().flatten()
        ids, weights = trace.ids[rows, layer.index].long(), trace.weights[rows, layer.index]
        r = trace.residuals[rows, layer.index]
        got_d = vectors.layer_default(layer.index, ids, weights)
        path = streams(model)[layer.index : following.index + 1]
        norm, got_q = path[-1].norm, quasi_hidden(path, r, got_d)
        for t in range(len(rows)):
            d = vectors.shared[layer.index].clone()
            for expert, weight in zip(ids[t].tolist(), weights[t].tolist()):
                if expert != model.spec.E:
                    d += vectors.d[layer.index, expert] * (1 if vectors.weighted else weight)
            torch.testing.assert_close(got_d[t], d, rtol=1e-4, atol=1e-5)
            x = r[t] + d
            if isinstance(norm, torch.nn.LayerNorm):
                x = (x - x.mean()) / (x.var(unbiased=False) + norm.eps).sqrt() * norm.weight
                x = x + norm.bias
            else:
                eps = getattr(norm, "variance_epsilon", None) or norm.eps
                x = x / (x.square().mean() + eps).sqrt() * norm.weight
            torch.testing.assert_close(got_q[t], x, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("between", [0, 1, 3])
def test_q_passes_what_lies_between_by_the_relation_of_each_layer(between):
    """r' = α r + β d around the layer, r' = α r around those in between, and γ r' from each to the
    next: a loop."""
    rng, H = torch.Generator().manual_seed(between), 6
    norm = torch.nn.LayerNorm(H)
    path = [
        Stream(None, None, norm, "block", None, 1.0, *(0.5 + torch.rand(3, generator=rng)).tolist())
        for _ in range(between + 2)
    ]
    r, d = torch.randn(2, 4, H, generator=rng).double().unbind(0)
    norm.double()
    x = path[0].keep * r + path[0].gain * d
    for stream in path[1:]:
        x = stream.carry * x
        last, x = x, stream.keep * x
    with torch.no_grad():
        torch.testing.assert_close(quasi_hidden(path, r, d), norm(last))


@torch.no_grad()
def test_default_vectors_have_the_factor_of_all_experts(tiny_model):
    """Of a model that multiplies the sum of its experts, by 2.5 here: d are their mean outputs
    times that."""
    model = tiny_model("beam")
    vectors, found = (
        default_vectors(model, PROMPTS),
        outputs_one_by_one(model, record(model, PROMPTS, hidden=True, batch_size=1)),
    )
    assert found and model.config.routed_scaling_factor == 2.5
    for (layer, expert), ys in found.items():
        torch.testing.assert_close(
            vectors.d[layer, expert].double(), 2.5 * torch.stack(ys).mean(0), rtol=1e-4, atol=1e-6
        )


def test_with_the_true_outputs_the_layer_default_is_the_blocks_output(tiny_model):
    """One token, whose experts' outputs are then their own means: d_l is what the block puts
    out."""
    for name in ("qwen2_moe", "llama4_text", "gpt_oss"):
        model, seen = tiny_model(name), {}
        handles = [
            layer.block.register_forward_hook(
                lambda _m, _a, out, i=layer.index: seen.__setitem__(
                    i, out[0] if isinstance(out, tuple) else out
                )
            )
            for layer in discover(model)
        ]
        trace = record(model, [[7]])
        for handle in handles:
            handle.remove()
        vectors = default_vectors(model, [[7]])
        for i, y in seen.items():
            d = vectors.layer_default(i, trace.ids[:, i].long(), trace.weights[:, i])
            torch.testing.assert_close(d, y.reshape(1, -1), rtol=1e-4, atol=1e-6)


def test_measuring_changes_nothing_whatever_computes_the_experts(tiny_model):
    model = tiny_model("mixtral")
    classes = [type(m) for m in model.modules()]
    expected = default_vectors(model, PROMPTS)
    assert [type(m) for m in model.modules()] == classes

    def wrong(x, ids, weights, experts):
        return x

    plug(model, executor=wrong)
    try:
        assert torch.equal(default_vectors(model, PROMPTS).d, expected.d)
        assert discover(model)[0].seam.executor is wrong
    finally:
        plug(model, executor=eager)
        moelab.models.unplug(model)


@pytest.mark.parametrize("executor", ["fast", "gemv", "sorted", "tiered", "blockwise"])
@pytest.mark.parametrize("memory", [None, "60%"])
def test_the_executor_that_a_model_was_opened_with_changes_no_default_vectors(
    tmp_path, executor, memory
):
    folder = tiny.save("qwen3_moe", tmp_path)
    with moelab.open_model(folder) as lm:
        expected = default_vectors(lm, PROMPTS, max_new_tokens=2)
    with moelab.open_model(folder, executor=executor, memory=memory) as lm:
        found = default_vectors(lm, PROMPTS, max_new_tokens=2)
        lm(torch.tensor(PROMPTS[:1]))
    assert torch.equal(found.counts, expected.counts)
    torch.testing.assert_close(found.d, expected.d, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.shared, expected.shared, rtol=1e-4, atol=1e-6)


def test_generated_tokens_count_too(tiny_model):
    model = tiny_model("mixtral")
    vectors = default_vectors(model, PROMPTS[:1], max_new_tokens=4)
    assert torch.equal(vectors.counts, record(model, PROMPTS[:1], max_new_tokens=4).counts())


def test_memory_does_not_grow_with_the_prompts(tiny_model):
    """What is kept after a thousand tokens is as large as after one."""
    from moelab.speculate.signals import _Sums

    sizes, vectors = [], _Sums.vectors
    for prompts in ([[5]], [list(range(3, 90))] * 6):

        def measure(self, model_id):
            sizes.append(sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor)))
            assert not self.routed
            return vectors(self, model_id)

        _Sums.vectors = measure
        try:
            default_vectors(tiny_model("mixtral"), prompts)
        finally:
            _Sums.vectors = vectors
    assert sizes[0] == sizes[1]


def test_saving_and_loading(tiny_model, tmp_path):
    model = tiny_model("llama4_text")
    vectors = default_vectors(model, PROMPTS)
    path = vectors.save(tmp_path / "folder" / "vectors.safetensors")
    loaded = DefaultVectors.load(path, model)
    for name in ("d", "shared", "counts"):
        assert torch.equal(getattr(loaded, name), getattr(vectors, name))
    assert loaded.weighted is True and loaded.model_id == vectors.model_id
    assert [p.name for p in path.parent.iterdir()] == ["vectors.safetensors"]


def test_bad_files_are_refused(tiny_model, tmp_path):
    model = tiny_model("mixtral")
    path = default_vectors(model, PROMPTS).save(tmp_path / "vectors.safetensors")
    with pytest.raises(ValueError, match="measured on another model"):
        DefaultVectors.load(path, open_model(tiny.save("mixtral", tmp_path / "other", seed=1)))
    with pytest.raises(FileNotFoundError, match="no default vectors at"):
        DefaultVectors.load(tmp_path / "none.safetensors", model)
    with pytest.raises(ValueError, match="but no default vectors"):
        DefaultVectors.load(record(model, PROMPTS).save(tmp_path / "trace.safetensors"), model)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="no readable"):
        DefaultVectors.load(path, model)
    with pytest.raises(ValueError, match="prompts is empty"):
        default_vectors(model, [])
