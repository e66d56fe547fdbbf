"""Implanted routing: every engine routes as the trace says, in any order and grouping of tokens;
the next router asked early is right as often as was aimed at; refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import moelab
from moelab.__main__ import main
from moelab.base.specs import MoESpec
from moelab.bench import implant
from moelab.bench.synthesize import synthesize
from moelab.models.seam import discover
from moelab.trace import RoutingTrace
from tests.depth import in_turn

L, E, K, H = 3, 8, 2, 128
SIZES = {"vocab": 2000, "heads": 2, "kv_heads": 1, "head_dim": 32}
ARCHITECTURES = {
    "qwen3_moe": {},
    "olmoe": {},
    "mixtral": {},
    "gpt_oss": {"router": "topk-softmax", "bias": True},
    "deepseek_v2": {
        "num_layers": L + 1,
        "moe_layers": tuple(range(1, L + 1)),
        "shared_I": 64,
        "kv_heads": 2,
    },
}


def spec_of(kind):
    return replace(
        MoESpec("tiny", kind, L, tuple(range(L)), E, K, H, 32, **SIZES), **ARCHITECTURES[kind]
    )


def some_ids(T, seed=0):
    """Uniform routing, which no embedding makes easy."""
    return np.random.default_rng(seed).random((T, L, E)).argsort(-1)[..., :K].astype(np.int16)


def agreement(found, wanted):
    """Share of slots, in any order within a token and layer."""
    return float((np.asarray(found)[..., None] == wanted[..., None, :]).any(-1).mean())


def tokens_of(folder):
    return json.loads((folder / "tokens.json").read_text())["tokens"]


@pytest.mark.parametrize("kind, T", in_turn(ARCHITECTURES, [60, 300]))  # fewer and more than H
def test_transformers_and_stores_route_as_wanted(kind, T, tmp_path):
    wanted = some_ids(T)
    folder = synthesize(tmp_path / "model", spec_of(kind), routing=wanted)
    (tokens,) = tokens_of(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = moelab.record(model, [tokens])
    assert found.tokens.tolist() == tokens and agreement(found.ids, wanted) >= 0.99
    apart = moelab.record(model, [tokens[T // 2 :], tokens[: T // 2]])  # other neighbours
    rows = np.r_[T // 2 : T, : T // 2]
    assert agreement(apart.ids, wanted[rows]) >= 0.99
    if T < H:  # greedy decoding follows the sequence
        followed = moelab.record(model, [tokens[:5]], max_new_tokens=T - 5, eos_token_id=None)
        assert followed.tokens.tolist() == tokens[:-1]
        assert agreement(followed.ids, wanted[:-1]) >= 0.99
    store = synthesize(tmp_path / "store", spec_of(kind), routing=wanted, quantize="int4")
    assert tokens_of(store) == [tokens]
    assert agreement(moelab.record(moelab.open_model(store), [tokens]).ids, wanted) >= 0.99


def test_a_layer_early_routers_are_right_as_often_as_in_a_real_model(tmp_path):
    T = 60
    wanted = some_ids(T)
    model = moelab.open_model(synthesize(tmp_path / "m", spec_of("qwen3_moe"), routing=wanted))
    trace = moelab.record(model, tokens_of(tmp_path / "m"), hidden=True)
    right = []
    for layer in discover(model)[1:]:
        before = trace.router_inputs[:, layer.index - 1]
        ids, _ = layer.routing(layer.ask(before))
        right.append(agreement(ids.detach(), wanted[:, layer.index]))
    assert abs(np.mean(right) - implant.AHEAD) < 0.05


def test_a_trace_gives_sequences_and_weights(tmp_path):
    spec = spec_of("gpt_oss")
    ids = some_ids(12)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) + 0.1
    weights /= weights.sum(-1, keepdim=True)
    column = torch.zeros(12, dtype=torch.int32)
    sequence = torch.tensor([0] * 5 + [1] * 7, dtype=torch.int32)
    trace = RoutingTrace(
        torch.from_numpy(ids), weights, column.byte(), sequence, column, column + 1, spec, "other"
    )
    folder = synthesize(tmp_path / "m", spec, routing=trace.save(tmp_path / "t.safetensors"))
    assert [len(row) for row in tokens_of(folder)] == [5, 7]
    found = moelab.record(moelab.open_model(folder), tokens_of(folder), batch_size=1)
    for at in np.ndindex(12, L):
        said = dict(zip(ids[at].tolist(), weights[at].tolist()))
        ran = dict(zip(found.ids[at].tolist(), found.weights[at].tolist()))
        assert ran == pytest.approx(said, abs=0.05)


def test_refusals(tmp_path):
    spec = spec_of("qwen3_moe")
    twice = some_ids(4)
    twice[2, 1] = 5
    for ids, words in [
        (twice, "the same expert twice"),
        (np.full((4, L, K), E), "from 0 to 7"),
        (some_ids(4)[..., :1], "K = 1"),
        (some_ids(4)[:, :2], "has 2 layers"),
        (some_ids(3000), "the vocabulary has 2000"),
    ]:
        with pytest.raises(ValueError, match=words):
            synthesize(tmp_path / "m", spec, routing=ids)
    narrow = replace(spec, H=16)
    with pytest.raises(ValueError, match="too many for this model"):
        synthesize(tmp_path / "m", narrow, routing=some_ids(900))
    with pytest.raises(ValueError, match="not implanted into qwen2_moe"):
        synthesize(
            tmp_path / "m", replace(spec, model_type="qwen2_moe", shared_I=32), routing=some_ids(4)
        )
    assert not (tmp_path / "m").exists()
    missing = str(tmp_path / "no.safetensors")
    words = ["synthesize", str(tmp_path / "m"), "--model", "Mixtral-8x7B", "--scale", "0.1"]
    assert main([*words, "--routing", missing]) == 2
