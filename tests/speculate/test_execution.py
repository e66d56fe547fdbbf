"""Running on predictions: bit for bit against eager, and against the oracle's truth."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import moelab
from moelab.models import discover, plugged
from moelab.models.identity import identity
from moelab.recording import record
from moelab.speculate import DefaultVectors, Speculation, default_vectors
from moelab.speculate.routers import route, router_logits
from moelab.trace import PREFILL
from tests.checkpoint import wild
from tests.depth import in_turn
from tests.models import tiny
from tests.models.sweep import generate
from tests.speculate.conftest import PROMPTS, make


def run(model, prompts, n=6):
    """Greedy generation of prompts, padded left: (new tokens, logits of every step)."""
    longest = max(map(len, prompts))
    out = model.generate(
        torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
        max_new_tokens=n,
        min_new_tokens=n,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, -n:], torch.stack(out.logits)


def same(one, other):
    return all(map(torch.equal, one, other))


def linear_estimator(model):
    """An estimator that is a fixed random matrix for each layer."""
    spec, generator = model.spec, torch.Generator().manual_seed(0)
    matrices = torch.randn(spec.L, spec.E, spec.H, generator=generator)
    return lambda q, layer: q.float() @ matrices[layer].T


def listened(predictor, said):
    """The predictor, whose predictions are written down as (layer, prediction)."""
    predict = predictor.predict

    def listen(layer, *args):
        said.append((layer, predict(layer, *args)))
        return said[-1][1]

    predictor.predict = listen
    return predictor


@pytest.mark.parametrize("name, dtype", in_turn(tiny.SOME, [torch.float32, torch.bfloat16]))
def test_hints_change_no_bit(name, dtype, tiny_model):
    model = tiny_model(name, dtype)

    def state():
        hooks = [(m._forward_pre_hooks, m._forward_hooks) for m in model.modules()]
        return [type(m) for m in model.modules()], [list(of) for pair in hooks for of in pair]

    before = state()
    predictor = make("quasi", model, vectors=default_vectors(model, PROMPTS[:1]))
    plain = generate(model, 0)  # two prompts, one of them padded
    with Speculation(model, predictor) as speculation:
        assert same(generate(model, 0), plain)
        assert state() != before
    predicted = {there.index for there in predictor.targets.values()}
    assert set(speculation.requests.sum(0).nonzero().flatten().tolist()) == predicted
    speculation.close()
    assert state() == before


@pytest.mark.parametrize("name", tiny.SOME)
def test_executing_the_truth_is_eager(name, tiny_model):
    """If one index of one layer were off, the oracle's experts would not be this layer's; two
    layers ahead, too."""
    model, prompts = tiny_model(name), PROMPTS[:2]
    trace = record(model, prompts, max_new_tokens=4, min_new_tokens=4, batch_size=1)
    expected = [run(model, [prompt], 4) for prompt in prompts]
    for prefill, ahead in ((False, 1), (True, 1), (True, 2)):
        oracle = make("oracle", model, trace=trace, ahead=ahead)
        with Speculation(model, oracle, "speculative", prefill=prefill) as speculation:
            assert all(same(run(model, [p], 4), of) for p, of in zip(prompts, expected))
        predicted = {there.index for there in oracle.targets.values()}
        assert set(speculation.requests.sum(0).nonzero().flatten().tolist()) == predicted
        assert torch.equal(speculation.hits, speculation.requests)


class CountLinear(TorchFunctionMode):
    """Counts the linear layers whose weight is one of some tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.pointers = {t.data_ptr(): i for i, t in enumerate(tensors)}
        self.calls = [0] * len(tensors)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and args[1].data_ptr() in self.pointers:
            self.calls[self.pointers[args[1].data_ptr()]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", tiny.SOME)
def test_router_free_is_speculative_without_the_routers(name, tiny_model):
    model = tiny_model(name)
    bag = {"vectors": default_vectors(model, PROMPTS[:1]), "estimator": linear_estimator(model)}
    outputs, calls = [], []
    for mode in ("speculative", "router-free"):
        predictor = make("estimator", model, **bag)
        routers = [next(layer.router.parameters()) for layer in discover(model)]
        with Speculation(model, predictor, mode), CountLinear(routers) as counter:
            outputs.append(generate(model, 1))
        calls.append(counter.calls)
    assert same(*outputs)
    predicted = {there.index for there in predictor.targets.values()}
    encoder = 2 if model.config.is_encoder_decoder else 0  # layers that are only ever in prefill
    for layer in range(model.spec.L):
        decode_steps = 5 if layer >= encoder else 0
        assert calls[0][layer] == 1 + decode_steps
        assert calls[1][layer] == 1 + decode_steps * (layer not in predicted)
    assert not torch.equal(outputs[0][1], generate(model, 1)[1])  # the estimate is no truth
    assert all("forward" not in vars(layer.router) for layer in discover(model))


def test_a_batch_is_its_prompts(tiny_model):
    """Padded or alone, the same tokens come out of speculation; of every predictor that looks at
    tokens."""
    model = tiny_model("qwen2_moe")
    bag = {"vectors": default_vectors(model, PROMPTS), "estimator": linear_estimator(model)}
    for name in ("router", "quasi", "frequency", "previous", "estimator"):
        with Speculation(model, make(name, model, **bag), "speculative") as speculation:
            together = run(model, PROMPTS)
        counts = speculation.requests, speculation.hits
        with Speculation(model, make(name, model, **bag), "speculative") as speculation:
            for i, prompt in enumerate(PROMPTS):
                tokens, logits = run(model, [prompt])
                assert torch.equal(together[0][i], tokens[0]), name
                torch.testing.assert_close(together[1][:, i], logits[:, 0], rtol=1e-3, atol=1e-4)
        assert same(counts, (speculation.requests, speculation.hits)), name


def test_predictions_are_announced(tiny_model):
    """To an executor that has a `prefetch`, before it runs the layer, with what will be executed
    there; not where it `wants_predictions` nothing."""
    model, events = tiny_model("mixtral"), []

    class Fetching:
        wants_predictions = True

        def __call__(self, x, ids, weights, experts):
            events.append(("run", experts.layer, ids.clone()))
            return moelab.models.eager(x, ids, weights, experts)

        def prefetch(self, layer, ids):
            events.append(("prefetch", layer, ids.clone()))

    with plugged(model, Fetching()) as executor:
        with Speculation(model, make("router", model), "speculative", prefill=True):
            run(model, PROMPTS[:1], 3)
        order = [("prefetch", 1), ("run", 0), ("prefetch", 2), ("run", 1), ("run", 2)]
        assert [event[:2] for event in events] == order * 3
        for i, (kind, layer, ids) in enumerate(events):
            if kind == "prefetch":
                assert torch.equal(
                    ids, next(of for *what, of in events[i:] if what == ["run", layer])
                )
        executor.wants_predictions, said = False, []
        with Speculation(model, listened(make("previous", model), said)) as speculation:
            run(model, PROMPTS[:1], 3)
            assert not said and not speculation.requests.any()
            assert speculation.predictor.last.keys() == {0, 1, 2}  # it learns all the same


@pytest.mark.parametrize("name", ["mixtral", "switch_transformers"])
def test_an_error_leaves_nothing_behind(name, tiny_model):
    model = tiny_model(name)
    trace = record(model, PROMPTS[:1], max_new_tokens=6, min_new_tokens=6)
    expected, layer, said = run(model, PROMPTS[:1]), discover(model)[1], []
    oracle = listened(make("oracle", model, trace=trace), said)

    def fail(*_):
        assert said
        raise OSError("the disk is gone")

    with Speculation(model, oracle, "speculative", prefill=True):
        for module in (layer.block, layer.router):  # before and after the residual was seen
            handle = module.register_forward_pre_hook(fail)
            with pytest.raises(OSError):
                run(model, PROMPTS[:1])
            handle.remove()
        # A block by itself is no forward pass: nothing is predicted and nothing executed.
        said.clear()
        layer.block(torch.randn(1, 2, model.spec.H))
        assert not said
        assert torch.equal(run(model, PROMPTS[:1])[1], expected[1])


def test_recall_counts_what_a_loop_counts(tiny_model):
    """From the predictions as they were made and the true choices as they were recorded."""
    model, said = tiny_model("deepseek_v3"), []
    with Speculation(model, listened(make("router", model), said)) as speculation:
        trace = record(model, PROMPTS[:1], max_new_tokens=5, min_new_tokens=5)
    row, last = 0, max(layer for layer, _ in said)
    requests, hits = torch.zeros(2, 2, model.spec.L, dtype=torch.long)
    for layer, (ids, _) in said:
        for t, predicted in enumerate(ids.tolist()):
            phase, true = int(trace.phase[row + t]), trace.ids[row + t, layer + 1].tolist()
            requests[phase, layer + 1] += len(true)
            hits[phase, layer + 1] += len({*true} & {*predicted})
        row += len(ids) * (layer == last)
    assert same((speculation.requests, speculation.hits), (requests, hits))
    assert torch.equal(
        speculation.recall()[1:], hits[:, 1:].sum(0).double() / requests[:, 1:].sum(0)
    )


def test_bad_arguments_and_predictions_are_refused(tiny_model):
    model = tiny_model("mixtral")
    with pytest.raises(ValueError, match="hint, speculative, router-free"):
        Speculation(model, make("router", model), "guess")
    with pytest.raises(ValueError, match="needs the predictor 'estimator'"):
        Speculation(model, make("router", model), "router-free")
    assert not isinstance(discover(model)[0].experts, moelab.models.SeamExperts)
    one = torch.ones(7, 2)
    for wrong, message in (
        (3, "predicted a int"),
        ((one, one), "torch.float32"),
        ((one.long()[:2], one[:2]), r"\[2, 2\]"),
        ((one.long() * 5, one), "ids from 5 to 5"),
    ):
        predictor = make("router", model)
        predictor.predict = lambda *_, wrong=wrong: wrong
        with (
            Speculation(model, predictor),
            pytest.raises(ValueError, match=f"NextRouter.*{message}"),
        ):
            model(torch.tensor(PROMPTS[:1]))


@pytest.mark.parametrize("name", ["hy_v4", "minimax"])
def test_without_a_residual_stream_only_those_that_need_none_predict(name):
    model = wild.model_of(name)
    for predictor in ("router", "frequency", "previous", "random"):
        with Speculation(model, make(predictor, model)) as speculation:
            model(input_ids=torch.tensor([[5, 9, 33, 12]]), use_cache=False)
        there = speculation.requests[PREFILL, 1:] > 0
        assert predictor not in ("router", "random") or there.all()
    zeros = torch.zeros(3, 1, 32), torch.zeros(3, 32), torch.zeros(3, 1)
    with pytest.raises(ValueError, match="Residuals.*router, frequency, static and previous"):
        make("quasi", model, vectors=DefaultVectors(*zeros, False, identity(model)))


@torch.no_grad()
@pytest.mark.parametrize("name", ["afmoe", "lfm2_moe", "minimax_m2", "hy_v3"])
def test_routers_that_are_called_with_a_bias_are_asked_with_it_and_left_out_with_it(name):
    """The next router on its true input chooses what it chose; router-free runs."""
    model = wild.model_of(name)
    trace = record(model, PROMPTS[:1], hidden=True)
    for layer in discover(model):
        ids, _ = route(layer, trace.router_inputs[:, layer.index])
        true = trace.ids[:, layer.index].long()
        assert torch.equal(ids.sort(-1).values, true.sort(-1).values)
    targets = {layer.index - 1: layer for layer in discover(model)}
    bag = {
        "vectors": default_vectors(model, PROMPTS[:1]),
        "estimator": lambda q, layer: router_logits(targets[layer], q),
    }
    logits = {}
    for kind, mode in (
        ("quasi", "speculative"),
        ("estimator", "speculative"),
        ("estimator", "router-free"),
    ):
        with Speculation(model, make(kind, model, **bag), mode, prefill=True):
            logits[kind, mode] = model(torch.tensor(PROMPTS[:1]), use_cache=False).logits
    assert torch.equal(logits["estimator", "speculative"], logits["estimator", "router-free"])
    torch.testing.assert_close(logits["quasi", "speculative"], logits["estimator", "speculative"])


def test_an_estimator_is_refused_where_the_router_caps_its_logits():
    model = deepcopy(wild.model_of("laguna"))
    bag = {"vectors": default_vectors(model, PROMPTS[:1]), "estimator": lambda q, layer: q}
    make("estimator", model, **bag)
    for layer in discover(model):
        layer.router.router_logit_softcapping = 0.5
    with pytest.raises(ValueError, match="changes its logits"):
        make("estimator", model, **bag)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["hint", "speculative"])
@pytest.mark.parametrize("where", ["stack", "experts"])
def test_what_another_thread_closes_within_a_call_changes_nothing_more(mode, where, tiny_model):
    """torch then calls the hooks that lay there once more, without keywords."""
    model = tiny_model("qwen2_moe")
    predictor = make("quasi", model, vectors=default_vectors(model, PROMPTS[:1]))
    ids = torch.tensor(PROMPTS[:1])
    expected = model(ids).logits
    speculation = Speculation(model, predictor, mode)
    module = model.model if where == "stack" else discover(model)[1].experts
    hook = module.register_forward_pre_hook(lambda *_: speculation.close(), prepend=True)
    logits = model(ids).logits
    hook.remove()
    assert torch.equal(logits, expected) and torch.equal(model(ids).logits, expected)
