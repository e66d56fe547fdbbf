"""`record` against the routers recomputed, and batches against one prompt at a time."""

from __future__ import annotations

import pytest
import torch

from moelab import open_model
from moelab.models import discover, plugged
from moelab.models.patches import Patches
from moelab.models.stream import streams
from moelab.recording import record
from moelab.trace import DECODE, HIDDEN, PREFILL, RoutingTrace
from tests.models import tiny

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [11, 4, 71], [3, 90, 17, 25, 31]]


@pytest.fixture(scope="module", params=tiny.SOME)
def model(request, tmp_path_factory):
    return open_model(tiny.save(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def mixtral(tmp_path):
    return open_model(tiny.save("mixtral", tmp_path / "model"))


def by_token(trace: RoutingTrace) -> dict[tuple, tuple]:
    """(sequence, phase, position, layers that ran) → (ids, token, weights) of every token."""
    out = {}
    for t in range(len(trace)):
        ran = tuple((trace.ids[t] != trace.spec.E).any(-1).tolist())
        order, at = trace.ids[t].sort(-1), (trace.sequence[t], trace.phase[t], trace.position[t])
        weights = trace.weights[t].gather(-1, order.indices)
        out[(*map(int, at), ran)] = order.values.tolist(), int(trace.tokens[t]), weights
    return out


@torch.no_grad()
def test_it_is_what_the_routers_choose_for_the_recorded_inputs(model):
    trace = record(model, PROMPTS, max_new_tokens=4, hidden=True, batch_size=3)
    for layer, stream in zip(discover(model), streams(model)):
        passed = trace.router_inputs[:, layer.index].any(-1)  # encoder tokens skip the decoder
        s, r = (getattr(trace, name)[passed, layer.index] for name in HIDDEN)
        torch.testing.assert_close(stream.router_input(r), s)
        if model.config.is_encoder_decoder:
            continue  # capacity makes Switch's routing depend on the whole sequence
        ids, weights = layer.routing(type(layer.router).forward(layer.router, s))
        order, recorded = ids.argsort(-1), trace.ids[passed, layer.index].long()
        assert torch.equal(ids.gather(-1, order), recorded.sort(-1).values)
        found = trace.weights[passed, layer.index].gather(-1, recorded.argsort(-1))
        torch.testing.assert_close(weights.gather(-1, order), found)


def test_a_batch_and_a_plugged_model_record_what_prompts_record_alone(model):
    options = {"max_new_tokens": 4, "min_new_tokens": 4}
    trace = record(model, PROMPTS, batch_size=1, **options)
    alone = by_token(trace)
    together = by_token(record(model, PROMPTS, batch_size=2, **options))
    with plugged(model):
        seam = by_token(record(model, PROMPTS, batch_size=1, **options))
    assert together.keys() == alone.keys() == seam.keys()
    for key, (*exact, weights) in alone.items():
        assert together[key][:2] == seam[key][:2] == tuple(exact)
        torch.testing.assert_close(together[key][2], weights, rtol=1e-4, atol=1e-5)
        assert torch.equal(seam[key][2], weights)
    for i, prompt in enumerate(PROMPTS):
        prefill = trace.select((trace.sequence == i) & (trace.phase == PREFILL))
        assert prefill.tokens[: len(prompt)].tolist() == prompt
        assert prefill.position[: len(prompt)].tolist() == list(range(len(prompt)))
        # the fourth new token is never fed back
        assert int(((trace.sequence == i) & (trace.phase == DECODE)).sum()) == 3


def test_finished_sequences_are_left_out(mixtral):
    def decoded(trace):
        of = [(trace.sequence == i) & (trace.phase == DECODE) for i in range(3)]
        return [trace.tokens[mask].tolist() for mask in of]

    produced = decoded(record(mixtral, PROMPTS, max_new_tokens=8, batch_size=1))
    stop = produced[0][2]  # make the third new token of one prompt the end
    mixtral.generation_config.eos_token_id = stop
    for tokens, free in zip(decoded(record(mixtral, PROMPTS, max_new_tokens=8)), produced):
        assert tokens == free[: free.index(stop) if stop in free else None]


def test_hidden_states_are_the_same_in_temporary_and_in_named_files(mixtral, tmp_path):
    path = tmp_path / "traces" / "t.safetensors"
    own = record(mixtral, PROMPTS, max_new_tokens=3, hidden=True)
    named = record(mixtral, PROMPTS, max_new_tokens=3, hidden=path)
    moved = RoutingTrace.load(own.save(tmp_path / "elsewhere.safetensors"))
    for trace in (named, RoutingTrace.load(path), moved):
        for name in ("ids", "weights", *HIDDEN):
            assert torch.equal(getattr(own, name), getattr(trace, name)), name


def test_an_interrupted_recording_leaves_nothing_behind(mixtral, tmp_path):
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = discover(mixtral)[-1].block.register_forward_pre_hook(fail)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in mixtral.modules()]
    with pytest.raises(KeyboardInterrupt):
        record(mixtral, PROMPTS, max_new_tokens=6, hidden=tmp_path / "t.safetensors")
    assert not list(tmp_path.glob("t.*"))
    after = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in mixtral.modules()]
    assert hooks == after
    handle.remove()


def test_what_cannot_be_recorded_is_refused(mixtral):
    for prompts, message in (
        ([], "empty"),
        ("text", "one string"),
        ([[]], "prompt 0 is empty"),
        (["text"], "no tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            record(mixtral, prompts)
    block = discover(mixtral)[0].block
    forward = type(block).forward
    with Patches() as patches:
        patches.wrap(
            block, "forward", lambda _: lambda x: (forward(block, x), forward(block, x))[1]
        )
        with pytest.raises(ValueError, match="MoE layer 0 calls its experts more than once"):
            record(mixtral, PROMPTS)
