"""A token's layers in one call against the same layers one by one, to which a hook on a part sends
them."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from moelab import open_model
from moelab.base.specs import State
from moelab.models.patches import Patches
from moelab.models.seam import discover
from moelab.offloading.prefetch_gate import ungated
from moelab.recording import record
from tests.models import tiny

pytest.importorskip("numba")
from moelab.fast import layers as fused

PROMPT, STEPS = torch.arange(3, 9)[None], 12


@pytest.fixture
def calls(monkeypatch):
    """How many layers each call has computed."""
    done, run = [], fused.decode_layers
    monkeypatch.setattr(fused, "decode_layers", lambda *args: done.append(run(*args)) or done[-1])
    return done


def decode(lm, hook=None, steps=STEPS):
    """The logits of a prompt and of steps; what the session then knows, but for times."""
    for layer in lm.model.layers if hook else ():
        layer.mlp.register_forward_hook(lambda *_: None)
    with torch.inference_mode():
        out = lm(PROMPT, use_cache=True, past_key_values=DynamicCache())
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
        "forwards": [forward[2:6] for forward in session.forwards],
        "events": events,
        "cache": [(layer.keys.shape, layer.values.shape) for layer in out.past_key_values.layers],
    }


@pytest.mark.parametrize("memory", [None, 1.0])
@pytest.mark.parametrize(
    "name, dtype",
    [("olmoe", torch.float32), ("mixtral", torch.bfloat16), ("qwen3_moe", torch.bfloat16)],
)
def test_one_call_leaves_what_its_layers_leave(name, dtype, memory, tmp_path, calls):
    folder, found = tiny.save(name, tmp_path / "model", dtype), []
    for hook in (True, False):
        assert not calls
        with open_model(folder, memory=memory, executor="fast") as lm:
            found.append(decode(lm, hook))
            forward = lm.moelab.forwards[-1]
            events = [event for event in lm.moelab.timeline if event.start >= forward.start]
            # the second layer of this qwen3_moe is dense
            L, runs = lm.spec.L, [1, 1] if name == "qwen3_moe" else [lm.spec.L]
    (wanted, before), (got, after) = found
    assert torch.equal(got, wanted) and after == before
    # Experts that no token has chosen yet end a call of an engine's; then nothing is read any more.
    assert len(calls) == STEPS * len(runs) and sum(calls) > L * STEPS // 2
    assert memory is not None or calls == runs * STEPS
    for event in ("expert", "other") if memory else ():
        assert sum(kind == event for _, kind, *_ in after["events"]) >= L * STEPS
    times = [time for event in events if event.resource == "compute" for time in event[4:6]]
    assert times == sorted(times)
    assert not times or forward.start <= times[0] and times[-1] <= forward.end


def test_who_listens_or_records_hears_the_same(tmp_path, calls):
    folder = tiny.save("mixtral", tmp_path / "model", torch.float32)
    with open_model(folder, executor="fast") as lm, Patches() as patches:
        heard = []
        for layer in discover(lm):
            layer.listen(patches, lambda ids, w, i=layer.index: heard.append((i, ids, w)))
        decode(lm)
        assert calls == [lm.spec.L] * STEPS
        one_call, heard[:] = list(heard), []
        decode(lm, hook=True)
        assert len(calls) == STEPS and len(heard) == len(one_call)
        for (i, *a), (j, *b) in zip(heard, one_call):
            assert i == j and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b))
    calls.clear()
    traces = []
    for executor in ("exact", "fast"):
        with open_model(tmp_path / "model", executor=executor) as lm:
            traces.append(record(lm, [PROMPT[0].tolist()], max_new_tokens=6))
    assert calls == [lm.spec.L] * 5  # a recording does not keep layers apart
    assert torch.equal(*(trace.ids for trace in traces))


@pytest.mark.parametrize("memory", [0.4, 0.8, 0.95])
@pytest.mark.parametrize("cache", ["lru", "zipmoe"])
def test_an_engine_with_too_little_memory_goes_on_behind_what_is_missing(
    memory, cache, tmp_path, calls
):
    """Whoever is missing is loaded, whoever leaves is not computed with, and all is counted as ever."""
    folder, found = tiny.save("olmoe", tmp_path / "model", torch.bfloat16), []
    for hook in (True, False):
        assert not calls
        how = {"executor": "fast", "cache": cache, "prefetch": None}
        with open_model(folder, memory=memory, **how) as lm:
            found.append(decode(lm, hook, steps=40))
    (wanted, before), (got, after) = found
    assert torch.equal(got, wanted) and after == before
    # layer by layer where most lack somebody
    assert after["counters"].evictions and (len(calls) > 40) is (memory > 0.5)


def test_nobody_runs_ahead_of_what_is_predicted(tmp_path, calls):
    folder = tiny.save("olmoe", tmp_path / "model", torch.float32)
    with open_model(folder, memory=0.5, executor="fast", prefetch="router") as lm:
        with ungated(lm.moelab.engine):
            decode(lm, steps=3)
    assert not calls
    with open_model(folder, memory=1.0, executor="fast", prefetch="router") as lm:
        decode(lm, steps=3)
    assert calls  # nothing can be prefetched, so nothing lies on the layers


def test_one_call_for_layers_of_several_kinds(tmp_path, calls):
    """As in Q4_K_M, where some layers have another kind of `down` than others."""
    pytest.importorskip("gguf")
    from tests.gguf_files import qwen3moe

    qwen3moe(tmp_path / "m.gguf", "Q4_K", down="Q6_K", layers=3)
    found = []
    for hook in (True, False):
        assert not calls
        with open_model(tmp_path / "m.gguf", memory=1.0, executor="fast") as lm:
            found.append(decode(lm, hook, steps=4))
            assert "Packed" in {type(weight).__name__ for weight in lm.parameters()}
    (wanted, before), (got, after) = found
    assert torch.equal(got, wanted) and after == before and 3 in calls
