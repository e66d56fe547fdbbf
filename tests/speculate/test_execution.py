"""Running on predictions: bit for bit against eager, and against the oracle's truth."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import moelab
from moelab.models import discover, plug
from moelab.models.identity import identity
from moelab.recording import record, stacks
from moelab.speculate import DefaultVectors, Speculation, default_vectors
from moelab.speculate.predictors import route, teacher
from moelab.trace import DECODE, PREFILL
from tests.checkpoint import wild
from tests.depth import in_turn
from tests.models import tiny
from tests.models.sweep import generate
from tests.speculate.conftest import make

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71], [3, 90, 17, 25, 31]]


def run(model, prompt, n=6):
    """Greedy generation of one prompt: (tokens, logits of every step)."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n,
        min_new_tokens=n,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, torch.stack(out.logits)


def linear_estimator(model, seed=0):
    """An estimator that is a fixed random matrix for each layer."""
    spec, generator = model.spec, torch.Generator().manual_seed(seed)
    matrices = torch.randn(spec.L, spec.E, spec.H, generator=generator)
    return lambda q, layer: q.float() @ matrices[layer].T


@pytest.mark.stress
@pytest.mark.parametrize(
    "name, dtype", in_turn(tiny.ARCHITECTURES, [torch.float32, torch.bfloat16])
)
def test_hints_change_no_bit(name, dtype, tiny_model):
    model = tiny_model(name, dtype)

    def state():
        return [
            (type(m), list(m._forward_pre_hooks), list(m._forward_hooks)) for m in model.modules()
        ]

    before = state()
    predictor = make("quasi", model, vectors=default_vectors(model, PROMPTS[:1]))
    tokens, logits = generate(model, 0)  # two prompts, one of them padded
    with Speculation(model, predictor) as speculation:
        hinted_tokens, hinted_logits = generate(model, 0)
    assert torch.equal(tokens, hinted_tokens) and torch.equal(logits, hinted_logits)
    has_prediction = torch.zeros(model.spec.L, dtype=torch.bool)
    has_prediction[[there.index for there in predictor.targets.values()]] = True
    assert torch.equal(speculation.requests.sum(0) > 0, has_prediction)
    assert state() == before


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_executing_the_truth_is_eager(name, tiny_model):
    """If one index of one layer were off, the oracle's experts would not be this layer's."""
    model, prompts = tiny_model(name), PROMPTS[:2]
    trace = record(model, prompts, max_new_tokens=4, min_new_tokens=4, batch_size=1)
    expected = [run(model, prompt, 4) for prompt in prompts]
    for prefill in (False, True):
        with Speculation(
            model, make("oracle", model, trace=trace), "speculative", prefill=prefill
        ) as speculation:
            for prompt, (tokens, logits) in zip(prompts, expected):
                got_tokens, got_logits = run(model, prompt, 4)
                assert torch.equal(tokens, got_tokens) and torch.equal(logits, got_logits)
        predicted = speculation.requests.sum(0) > 0
        assert predicted.any() and torch.equal(speculation.hits, speculation.requests)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text", "mixtral"])
def test_what_was_predicted_is_what_runs(name, tiny_model):
    """Another oracle: the run recorded, and its predictions written down as they are made."""
    model = tiny_model(name)
    predictor = make("random", model)
    said = []
    predict = predictor.predict

    def listen(layer, s, r, ids, weights):
        prediction = predict(layer, s, r, ids, weights)
        if prediction is not None:
            said.append((len(s), layer + 1, prediction))
        return prediction

    predictor.predict = listen
    plain = run(model, PROMPTS[0])[1]
    with Speculation(model, predictor, "speculative"):
        trace = record(model, PROMPTS[:1], max_new_tokens=6, min_new_tokens=6)
        predictor.generator.manual_seed(0)
        assert not torch.equal(run(model, PROMPTS[0])[1], plain)
    decode, at = trace.decode, {layer: 0 for layer in range(model.spec.L)}
    for T, layer, (ids, weights) in said:
        if T == 1 and at[layer] < len(decode):
            assert torch.equal(decode.ids[at[layer], layer].long(), ids[0])
            assert torch.equal(
                decode.weights[at[layer], layer], weights[0].to(decode.weights.dtype)
            )
            at[layer] += 1
    assert set(at.values()) == {0, len(decode)}  # the first layer has no prediction
    prefill = record(model, PROMPTS[:1]).ids  # prefill ran on the true experts
    assert torch.equal(trace.prefill.ids, prefill)


class CountLinear(TorchFunctionMode):
    """Counts the linear layers whose weight is one of some tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.pointers, self.calls = (
            {t.data_ptr(): i for i, t in enumerate(tensors)},
            [0] * len(tensors),
        )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is F.linear and args[1].data_ptr() in self.pointers:
            self.calls[self.pointers[args[1].data_ptr()]] += 1
        return out


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_router_free_is_speculative_without_the_routers(name, tiny_model):
    model = tiny_model(name)
    ingredients = {
        "vectors": default_vectors(model, PROMPTS[:1]),
        "estimator": linear_estimator(model),
    }
    outputs, calls = [], []
    for mode in ("speculative", "router-free"):
        predictor = make("estimator", model, **ingredients)
        with (
            Speculation(model, predictor, mode),
            CountLinear([next(layer.router.parameters()) for layer in discover(model)]) as counter,
        ):
            outputs.append(generate(model, 1))
        calls.append(counter.calls)
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
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
    vectors = default_vectors(model, PROMPTS)
    for name in ("router", "quasi", "frequency", "previous", "estimator"):
        predictor = make(name, model, vectors=vectors, estimator=linear_estimator(model))
        longest = max(map(len, PROMPTS))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
        with Speculation(model, predictor, "speculative") as speculation:
            together = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=6,
                min_new_tokens=6,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            counts = speculation.requests.clone(), speculation.hits.clone()
            speculation.reset()
            alone = [run(model, p) for p in PROMPTS]
        for i, (tokens, logits) in enumerate(alone):
            assert together.sequences[i, -6:].tolist() == tokens[0, -6:].tolist(), name
            torch.testing.assert_close(
                torch.stack(together.logits)[:, i], logits[:, 0], rtol=1e-3, atol=1e-4
            )
        assert torch.equal(counts[0], speculation.requests) and torch.equal(
            counts[1], speculation.hits
        ), name


@pytest.mark.parametrize("ahead", [1, 2])
def test_several_layers_ahead(ahead, tiny_model):
    model = tiny_model("mixtral")
    trace = record(model, PROMPTS[:1], max_new_tokens=6, min_new_tokens=6)
    expected = run(model, PROMPTS[0])
    with Speculation(
        model, make("oracle", model, trace=trace, ahead=ahead), "speculative"
    ) as speculation:
        assert torch.equal(run(model, PROMPTS[0])[1], expected[1])
    assert (speculation.requests[DECODE] > 0).tolist() == [layer >= ahead for layer in range(3)]


def test_predictions_are_announced(tiny_model):
    """To an executor that has a `prefetch`, before it runs the layer, with what will be executed
    there."""
    model = tiny_model("mixtral")
    events = []

    class Fetching:
        def __call__(self, x, ids, weights, experts):
            events.append(("run", experts.layer, ids.clone()))
            return moelab.models.eager(x, ids, weights, experts)

        def prefetch(self, layer, ids):
            events.append(("prefetch", layer, ids.clone()))

    plug(model, executor=Fetching())
    try:
        with Speculation(model, make("router", model), "speculative", prefill=True):
            run(model, PROMPTS[0], 3)
        assert [(kind, layer) for kind, layer, _ in events] == [
            ("prefetch", 1),
            ("run", 0),
            ("prefetch", 2),
            ("run", 1),
            ("run", 2),
        ] * 3
        for i, (kind, layer, ids) in enumerate(events):
            if kind == "prefetch":
                ran = next(ran for k, l, ran in events[i:] if (k, l) == ("run", layer))
                assert torch.equal(ids, ran)
    finally:
        plug(model, executor=moelab.models.eager)
        moelab.models.unplug(model)


@pytest.mark.parametrize("name", ["mixtral", "switch_transformers"])
def test_an_error_leaves_nothing_behind(name, tiny_model):
    model = tiny_model(name)
    trace = record(model, PROMPTS[:1], max_new_tokens=6, min_new_tokens=6)
    expected = run(model, PROMPTS[0])
    layer = discover(model)[1]
    with Speculation(
        model, make("oracle", model, trace=trace), "speculative", prefill=True
    ) as speculation:

        def fail(*_):
            assert speculation._predicted
            raise OSError("the disk is gone")

        for module in (layer.block, layer.router):  # before and after the residual was seen
            handle = module.register_forward_pre_hook(fail)
            with pytest.raises(OSError):
                run(model, PROMPTS[0])
            handle.remove()
            assert (
                not speculation._predicted
                and not speculation._residuals
                and not speculation._running
            )
        # A block by itself is no forward pass: nothing is predicted and nothing executed.
        layer.block(torch.randn(1, 2, model.spec.H))
        assert not speculation._predicted
        assert torch.equal(run(model, PROMPTS[0])[1], expected[1])


def test_closing_restores_and_what_was_plugged_stays(tiny_model):
    model = tiny_model("llama4_text")
    classes = [type(m) for m in model.modules()]
    speculation = Speculation(model, make("router", model))
    assert [type(m) for m in model.modules()] != classes
    speculation.close()
    speculation.close()
    assert [type(m) for m in model.modules()] == classes
    plug(model)
    try:
        plugged = [type(m) for m in model.modules()]
        with pytest.raises(ZeroDivisionError), Speculation(model, make("router", model)):
            1 / 0
        assert [type(m) for m in model.modules()] == plugged
    finally:
        moelab.models.unplug(model)


def test_recall_counts_what_a_loop_counts(tiny_model):
    """From the predictions as they were made and the true choices as they were recorded, in
    loops."""
    model = tiny_model("deepseek_v3")
    predictor = make("router", model)
    predictions, predict = [], predictor.predict

    def listen(layer, *args):
        prediction = predict(layer, *args)
        predictions.append((layer, prediction))
        return prediction

    predictor.predict = listen
    with Speculation(model, predictor) as speculation:
        trace = record(model, PROMPTS[:1], max_new_tokens=5, min_new_tokens=5)
    row, requests, hits = 0, {}, {}
    for layer, prediction in predictions:
        T = len(prediction[0])
        for t in range(T):
            phase = int(trace.phase[row + t])
            for expert in trace.ids[row + t, layer + 1].tolist():
                requests[phase, layer + 1] = requests.get((phase, layer + 1), 0) + 1
                hits[phase, layer + 1] = hits.get((phase, layer + 1), 0) + (
                    expert in prediction[0][t].tolist()
                )
        row += T * (layer == max(predictor.targets))
    for (phase, layer), n in requests.items():
        assert (
            speculation.requests[phase, layer] == n
            and speculation.hits[phase, layer] == hits[phase, layer]
        )
    assert speculation.requests.sum() == sum(requests.values())
    assert speculation.recall(DECODE)[1] == hits[DECODE, 1] / requests[DECODE, 1]
    assert speculation.requests[PREFILL, 1] == len(PROMPTS[0]) * model.spec.K


def test_the_encoder_says_nothing_of_the_decoder(tiny_model):
    model = tiny_model("switch_transformers")
    (_, encoder), (_, decoder) = stacks(model)
    assert set(make("router", model).targets) == {encoder[0].index, decoder[0].index}


def test_bad_arguments_are_refused(tiny_model):
    model = tiny_model("mixtral")
    with pytest.raises(ValueError, match="hint, speculative, router-free"):
        Speculation(model, make("router", model), "guess")
    with pytest.raises(ValueError, match="needs the predictor 'estimator'"):
        Speculation(model, make("router", model), "router-free")
    assert not isinstance(discover(model)[0].experts, moelab.models.SeamExperts)


@pytest.mark.parametrize("name", ["hy_v4", "minimax"])
def test_without_a_residual_stream_only_those_that_need_none_predict(name):
    model = wild.model_of(name)
    for predictor in ("router", "frequency", "previous", "random"):
        with Speculation(model, make(predictor, model)) as speculation:
            model(input_ids=torch.tensor([[5, 9, 33, 12]]), use_cache=False)
        assert (
            predictor not in ("router", "random") or (speculation.requests[PREFILL, 1:] > 0).all()
        )
    vectors = DefaultVectors(
        torch.zeros(3, 1, 32), torch.zeros(3, 32), torch.zeros(3, 1), False, identity(model)
    )
    with pytest.raises(ValueError, match="Residuals.*router, frequency, static and previous"):
        make("quasi", model, vectors=vectors)


@torch.no_grad()
@pytest.mark.parametrize("name", ["afmoe", "lfm2_moe", "minimax_m2", "hy_v3"])
def test_routers_that_are_called_with_a_bias_are_asked_with_it_and_left_out_with_it(name):
    """The next router on q with a perfect q (the true router input) chooses what it chose;
    router-free runs."""
    model = wild.model_of(name)
    trace = record(model, PROMPTS[:1], hidden=True)
    for layer in discover(model):
        ids, _ = route(layer, trace.router_inputs[:, layer.index])
        assert torch.equal(ids.sort(-1).values, trace.ids[:, layer.index].long().sort(-1).values)
    vectors = default_vectors(model, PROMPTS[:1])
    targets = {layer.index - 1: layer for layer in discover(model)}
    bag = {"vectors": vectors, "estimator": lambda q, layer: teacher(targets[layer], q)}
    logits = {}
    for predictor, mode in (
        ("quasi", "speculative"),
        ("estimator", "speculative"),
        ("estimator", "router-free"),
    ):
        with Speculation(model, make(predictor, model, **bag), mode, prefill=True):
            logits[predictor, mode] = model(
                input_ids=torch.tensor([PROMPTS[0]]), use_cache=False
            ).logits
    assert torch.equal(logits["estimator", "speculative"], logits["estimator", "router-free"])
    torch.testing.assert_close(logits["quasi", "speculative"], logits["estimator", "speculative"])


def test_an_estimator_is_refused_where_the_router_caps_its_logits():
    model = wild.model_of("laguna")
    vectors = default_vectors(model, PROMPTS[:1])
    bag = {"vectors": vectors, "estimator": lambda q, layer: q}
    make("estimator", model, **bag)
    routers = [layer.router for layer in discover(model)]
    try:
        for router in routers:
            router.router_logit_softcapping = 0.5
        with pytest.raises(ValueError, match="changes its logits"):
            make("estimator", model, **bag)
    finally:
        for router in routers:
            router.router_logit_softcapping = 0.0
