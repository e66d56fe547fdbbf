"""`record` against the routers recomputed, and batches against one prompt at a time."""

from __future__ import annotations

import pytest
import torch

from moelab import open_model
from moelab.checkpoint.opening import open_checkpoint
from moelab.models import discover, plug
from moelab.models.patches import Patches
from moelab.models.stream import streams
from moelab.recording import record
from moelab.trace import DECODE, PREFILL, RoutingTrace
from tests.models import tiny

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71], [3, 90, 17, 25, 31]]


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def model(request, tmp_path_factory):
    return open_model(tiny.save(request.param, tmp_path_factory.mktemp(request.param)))


def by_token(trace: RoutingTrace) -> dict[tuple[int, int, int], tuple]:
    """(sequence, layers that ran, position) → (ids, weights, token, phase) of every token."""
    out = {}
    for t in range(len(trace)):
        ran = tuple((trace.ids[t] != trace.spec.E).any(-1).tolist())
        order = trace.ids[t].sort(-1)
        out[int(trace.sequence[t]), int(trace.phase[t]), int(trace.position[t]), ran] = (
            order.values.tolist(),
            trace.weights[t].gather(-1, order.indices),
            int(trace.tokens[t]),
        )
    return out


def test_record_equals_the_recomputed_router(model):
    trace = record(model, PROMPTS, max_new_tokens=4, hidden=True, batch_size=3)
    for layer in discover(model):
        passed = (
            trace.router_inputs[:, layer.index].abs().sum(-1) > 0
        )  # encoder tokens skip the decoder
        s = trace.router_inputs[passed, layer.index]
        if model.config.is_encoder_decoder:
            continue  # capacity makes Switch's routing depend on the whole sequence: see the test below
        with torch.no_grad():
            ids, weights = layer.routing(type(layer.router).forward(layer.router, s))
        ids, weights = ids.long(), weights
        order, recorded = ids.argsort(-1), trace.ids[passed, layer.index].long()
        assert torch.equal(ids.gather(-1, order), recorded.sort(-1).values)
        torch.testing.assert_close(
            weights.gather(-1, order),
            trace.weights[passed, layer.index].gather(-1, recorded.argsort(-1)),
        )


def test_residuals_are_what_the_norm_turns_into_router_inputs(model):
    trace = record(model, PROMPTS[:1], hidden=True)
    for layer in discover(model):
        passed = trace.residuals[:, layer.index].abs().sum(-1) > 0
        with torch.no_grad():
            expected = streams(model)[layer.index].norm(trace.residuals[passed, layer.index])
        torch.testing.assert_close(expected, trace.router_inputs[passed, layer.index])


def test_a_batch_records_what_its_prompts_record_alone(model):
    together = by_token(record(model, PROMPTS, max_new_tokens=4, batch_size=3, min_new_tokens=4))
    alone = by_token(record(model, PROMPTS, max_new_tokens=4, batch_size=1, min_new_tokens=4))
    assert together.keys() == alone.keys()
    for key, (ids, weights, token) in alone.items():
        assert together[key][0] == ids and together[key][2] == token
        torch.testing.assert_close(together[key][1], weights, rtol=1e-4, atol=1e-5)


def test_tokens_and_phases(model):
    trace = record(model, PROMPTS, max_new_tokens=4, batch_size=2, min_new_tokens=4)
    for i, prompt in enumerate(PROMPTS):
        mine = trace.select(trace.sequence == i)
        prefill = mine.select(mine.phase == PREFILL)
        assert prefill.tokens[: len(prompt)].tolist() == prompt
        assert prefill.position[: len(prompt)].tolist() == list(range(len(prompt)))
        assert int((mine.phase == DECODE).sum()) == 3  # the fourth new token is never fed back


def test_a_plugged_model_records_the_same(model):
    before = by_token(record(model, PROMPTS, max_new_tokens=3, min_new_tokens=3))
    plug(model)
    try:
        after = by_token(record(model, PROMPTS, max_new_tokens=3, min_new_tokens=3))
    finally:
        recording_unplug(model)
    assert before.keys() == after.keys()
    assert all(
        before[key][0] == after[key][0] and torch.equal(before[key][1], after[key][1])
        for key in before
    )


def recording_unplug(model):
    from moelab.models import unplug

    unplug(model)


def test_finished_sequences_are_left_out(tmp_path):
    model = open_model(tiny.save("qwen3_moe", tmp_path / "m"))
    free = record(model, PROMPTS, max_new_tokens=8, batch_size=1)
    produced = [
        free.select((free.sequence == i) & (free.phase == DECODE)).tokens.tolist() for i in range(3)
    ]
    stop = produced[0][2]  # make the third new token of one prompt the end
    model.generation_config.eos_token_id = stop
    trace = record(model, PROMPTS, max_new_tokens=8, batch_size=3)
    for i in range(3):
        tokens = trace.select((trace.sequence == i) & (trace.phase == DECODE)).tokens.tolist()
        assert stop not in tokens
        until = produced[i].index(stop) if stop in produced[i] else len(produced[i])
        assert tokens == produced[i][:until]


def test_hidden_states_are_the_same_in_a_temporary_folder_and_in_named_files(tmp_path):
    model = open_model(tiny.save("mixtral", tmp_path / "m"))
    own = record(model, PROMPTS, max_new_tokens=3, hidden=True)
    named = record(model, PROMPTS, max_new_tokens=3, hidden=tmp_path / "traces" / "t.safetensors")
    loaded = RoutingTrace.load(tmp_path / "traces" / "t.safetensors")
    moved = RoutingTrace.load(own.save(tmp_path / "elsewhere.safetensors"))
    for trace in (named, loaded, moved):
        for name in ("ids", "weights", "router_inputs", "residuals"):
            assert torch.equal(getattr(own, name), getattr(trace, name)), name


def test_an_interrupted_recording_leaves_nothing_behind(tmp_path):
    model = open_checkpoint(tiny.save("mixtral", tmp_path / "m"))
    layer = discover(model)[-1]
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = layer.block.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        record(model, PROMPTS, max_new_tokens=6, hidden=tmp_path / "t.safetensors")
    handle.remove()
    assert not list(tmp_path.glob("t.*"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "empty"),
        ("text", "one string"),
        ([[]], "prompt 0 is empty"),
        (["text"], "no tokenizer"),
    ],
)
def test_bad_prompts_are_refused(tmp_path, prompts, message):
    model = open_model(tiny.save("mixtral", tmp_path / "m"))
    with pytest.raises(ValueError, match=message):
        record(model, prompts)


def test_a_block_that_calls_its_experts_twice_is_refused(tmp_path):
    model = open_model(tiny.save("mixtral", tmp_path / "m"))
    block = discover(model)[0].block
    forward = type(block).forward
    with Patches() as patches:
        patches.wrap(
            block, "forward", lambda below: lambda x: (forward(block, x), forward(block, x))[1]
        )
        with pytest.raises(ValueError, match="MoE layer 0 calls its experts more than once"):
            record(model, PROMPTS)
