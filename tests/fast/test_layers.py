"""A token's layers in one call against the same layers one by one, to which a hook on a part sends
them."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from moelab import open_model
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.specs import State
from moelab.speculate import default_vectors
from moelab.speculate.predictors import Quasi
from tests.models import tiny

pytest.importorskip("numba")
from moelab.fast import layers as stretches

PROMPT, STEPS = torch.arange(3, 9)[None], 12
NAMES = ("olmoe", "mixtral", "qwen3_moe")


@pytest.fixture
def calls(monkeypatch):
    """How many layers each call has computed."""
    done, run = [], stretches.stretch
    monkeypatch.setattr(stretches, "stretch", lambda *args: done.append(run(*args)) or done[-1])
    return done


def decode(lm, hook=None, steps=STEPS, prompt=PROMPT):
    """The logits of a prompt and of steps; what the session then knows, but for times."""
    for layer in lm.model.layers if hook else ():
        layer.mlp.register_forward_hook(lambda *_: None)
    with torch.inference_mode():
        out = lm(prompt, use_cache=True, past_key_values=DynamicCache())
        logits = [out.logits[:, -1:]]
        for _ in range(steps):
            out = lm(logits[-1].argmax(-1), past_key_values=out.past_key_values)
            logits.append(out.logits)
    session = lm.moelab
    executor = session.executor
    events = sorted(
        tuple(event[:4])
        for event in session.timeline
        if event.resource == "compute" and event.kind != "wait"
    )
    return torch.cat(logits, 1), {
        "counters": session.residency.counters,
        "resident": session.residency.resident(State.FULL),
        "steps": session.steps,
        "predictions": session.predictions,
        "tally": executor.tally,
        "forwards": [forward[2:] for forward in session.forwards],
        "events": events,
        "cache": [(layer.keys.shape, layer.values.shape) for layer in out.past_key_values.layers],
    }


@pytest.mark.parametrize("memory", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_one_call_leaves_what_its_layers_leave(name, dtype, memory, tmp_path, calls):
    folder, found = tiny.save(name, tmp_path / "model", dtype), []
    for hook in (True, False):
        assert not calls
        with open_model(folder, memory=memory, executor="fast") as lm:
            found.append(decode(lm, hook))
            # the second layer of this qwen3_moe is dense
            L, runs = lm.spec.L, [1, 1] if name == "qwen3_moe" else [lm.spec.L]
    (wanted, before), (got, after) = found
    assert torch.equal(got, wanted) and after == before
    # Experts that no token has chosen yet end a call of an engine's; then nothing is read any more.
    assert len(calls) == STEPS * len(runs) and sum(calls) > L * STEPS // 2
    assert memory is not None or calls == runs * STEPS
    for event in ("expert", "other") if memory else ():
        assert sum(kind == event for _, kind, *_ in after["events"]) >= L * STEPS


def test_experts_begin_and_end_in_order_within_the_forward(tmp_path, calls):
    with open_model(
        tiny.save("olmoe", tmp_path / "model", torch.float32), memory=1.0, executor="fast"
    ) as lm:
        decode(lm)
        forward = lm.moelab.forwards[-1]
        times = [
            time
            for event in lm.moelab.timeline
            if event.resource == "compute" and event.start >= forward.start
            for time in event[4:6]
        ]
    assert calls[-1] == lm.spec.L and len(times) == 2 * (
        2 * lm.spec.L + 1
    )  # a last one for norm and head
    assert times == sorted(times) and forward.start <= times[0] and times[-1] <= forward.end


def test_whoever_listens_hears_the_same(tmp_path, calls):
    with open_model(tiny.save("mixtral", tmp_path / "model", torch.float32), executor="fast") as lm:
        from moelab.models.seam import discover

        heard = []
        for layer in discover(lm):
            register, hook, options = layer.listening(
                lambda ids, w, i=layer.index: heard.append((i, ids, w))
            )
            lm.moelab._patches.hook(register, hook, **options)
        decode(lm)
        assert calls == [lm.spec.L] * STEPS
        one_call, heard[:] = list(heard), []
        decode(lm, hook=True)
    assert len(calls) == STEPS and len(heard) == len(one_call)
    for (i, *a), (j, *b) in zip(heard, one_call):
        assert i == j and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b))


def test_whatever_is_not_exactly_this_goes_layer_by_layer(tmp_path, calls):
    with open_model(tiny.save("olmoe", tmp_path / "model", torch.float32), executor="fast") as lm:
        layers, block = lm.model.layers, lm.model.layers[-1].mlp
        for part in (
            layers[-1],
            layers[1].self_attn,
            layers[1].input_layernorm,
            block,
            block.gate,
            block.experts,
        ):
            for register in (part.register_forward_hook, part.register_forward_pre_hook):
                hook = register(lambda *_: None)
                decode(lm, steps=1)
                assert not calls
                hook.remove()
        block.gate.top_k -= 1  # the other layers choose as many as before
        decode(lm, steps=1)
        block.gate.top_k += 1
        lm.model.config.num_hidden_layers -= 1
        decode(lm, steps=1)
        lm.model.config.num_hidden_layers += 1
        block.gate.weight = torch.nn.Parameter(
            block.gate.weight.detach().flip(0), requires_grad=False
        )
        decode(lm, steps=1)
        decode(lm, steps=1, prompt=PROMPT.repeat(2, 1))
        assert not calls
    with open_model(tmp_path / "model", memory=0.5, executor="fast") as lm:
        decode(lm, steps=3)
    assert not calls
    with open_model(tmp_path / "model", memory=1.0, executor="fast", prefetch="router") as lm:
        decode(lm, steps=3)
    assert calls  # nothing can be prefetched, so nothing lies on the layers


@pytest.mark.parametrize("opens", [True, False])
def test_a_predictor_leaves_layers_in_one_call_and_a_shut_gate_leaves_nothing_on_them(
    opens, tmp_path, monkeypatch
):
    """Up to their experts, which run one by one as not all are in memory; the predictor reads r,
    too."""
    folder = tiny.save("olmoe", tmp_path / "model", torch.float32)
    with open_model(folder, executor="exact") as lm:
        vectors = default_vectors(lm, [PROMPT[0].tolist()])
    found, fast, run = [], [], stretches.to_experts
    monkeypatch.setattr(stretches, "to_experts", lambda *args: fast.append(args) or run(*args))
    for prefetch in (None, lambda lm: Quasi(lm, vectors=vectors)):
        with open_model(
            folder, memory=0.5, executor="fast", prefetch=prefetch, ahead=2 if prefetch else 0
        ) as lm:
            lm.moelab.engine.gate, fast[:] = PrefetchGate(trials=not opens), []
            if opens:
                lm.moelab.engine.gate.pays = lambda of, rank: True
            found.append(decode(lm)[0])
            assert len(fast) == STEPS * lm.spec.L
            decoded = lm.moelab.predictions[1:]
            hooks = [
                hook
                for layer in lm.model.layers
                for part in layer.modules()
                for hook in part._forward_pre_hooks
            ]
            assert any(decoded) == bool(hooks) == bool(opens and prefetch)
    assert torch.equal(*found)


def test_a_model_that_was_interrupted_goes_on(tmp_path, calls, monkeypatch):
    """In the middle of the accounts; nothing is lost that was in memory, and the cache is as
    before."""
    with open_model(
        tiny.save("olmoe", tmp_path / "model", torch.float32), memory=1.0, executor="fast"
    ) as lm:
        wanted, _ = decode(lm)
        engine, resident = lm.moelab.engine, lm.moelab.residency.resident(State.FULL)
        decide, left = engine._decide, [4]

        def interrupted(*args):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return decide(*args)

        with torch.inference_mode():
            out = lm(PROMPT, use_cache=True)
            monkeypatch.setattr(engine, "_decide", interrupted)
            left[0] = lm.spec.L
            with pytest.raises(KeyboardInterrupt):
                lm(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)
        assert out.past_key_values.get_seq_length() == PROMPT.shape[1] and not engine._sound
        calls.clear()
        assert torch.equal(decode(lm)[0], wanted) and calls.count(lm.spec.L) >= STEPS - 1
        assert set(lm.moelab.residency.resident(State.FULL)) == set(resident)
