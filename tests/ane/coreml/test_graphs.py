"""Graphs as saved, evaluated, against plain double-precision torch with the same fp16 weights."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("coremltools")

from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from moelab.ane.coreml import attention_graph
from moelab.ane.coreml.attention_graph import (
    attention_inputs,
    attention_program,
    attention_shape,
    mask_of,
    shifted,
    with_ones,
)
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.ffn_graph import (
    Expert,
    activation_of,
    expert_of,
    half,
    pack,
    save_ffn,
    save_program,
    unpack,
)
from moelab.ane.coreml.package import constant, coremltools, read_package
from moelab.models import compat
from tests.experts import toy
from tests.models import tiny

H, I = 32, 48


def make_experts(G, biased=False, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def random(*shape):
        return half(torch.randn(*shape, generator=rng) * 0.3)

    return [
        Expert(
            random(I, H),
            random(H, I),
            random(I, H),
            random(I) if biased else None,
            random(H) if biased else None,
            random(I) if biased else None,
        )
        for _ in range(G)
    ]


def make_slots(n, seed=1):
    """Rows that are fp16 numbers, in double precision."""
    return torch.randn(n, H, generator=torch.Generator().manual_seed(seed)).half().double()


def oracle(expert, x, activation):
    def linear(x, weight, bias):
        return F.linear(
            x,
            torch.tensor(weight, dtype=torch.float64),
            None if bias is None else torch.tensor(bias, dtype=torch.float64),
        )

    act = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    }
    up = linear(x, expert.up, expert.up_bias)
    gate = linear(x, expert.gate, expert.gate_bias)
    if activation == "clamped":
        slope = float(np.float16(1.702))
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return linear(
            (up + 1) * (gate * torch.sigmoid(gate * slope)), expert.down, expert.down_bias
        )
    return linear(act[activation](gate) * up, expert.down, expert.down_bias)


def relative_rms(y, expected):
    return float(((y - expected).square().mean() / expected.square().mean()).sqrt())


@pytest.mark.parametrize(
    "G, C, activation, biased",
    [
        (4, 16, "silu", False),
        (1, 32, "gelu", False),
        (2, 16, "clamped", True),
        (3, 16, "gelu_tanh", True),
    ],
)
def test_group_equals_torch_in_double_precision_and_nearly_in_fp16(
    G, C, activation, biased, tmp_path
):
    experts, x = make_experts(G, biased), make_slots(G * C)
    path = save_ffn(tmp_path / "g.mlpackage", experts, C, activation)
    expected = torch.cat([oracle(e, rows, activation) for e, rows in zip(experts, x.split(C))])
    y = unpack(Evaluator(path)({"x": pack(x)})["y"])
    assert torch.equal(y, expected) and torch.equal(unpack(pack(x)), x)
    fp16 = Evaluator(path, mode="fp16")
    assert 0 < relative_rms(unpack(fp16({"x": pack(x)})["y"]).double(), expected) < 1e-3
    assert read_package(path).weight_bytes >= 2 * sum(
        a.size for e in experts for a in (e.up, e.down)
    )


@pytest.mark.parametrize("weights, levels", [("int8", 255)])
def test_compressed_weights(weights, levels, tmp_path):
    experts, x = make_experts(2), make_slots(32)
    path = save_ffn(tmp_path / "g.mlpackage", experts, 16, weights=weights)
    stored = [op.inputs["weight"] for op in read_package(path).ops if op.op_type == "conv"]
    kept = [constant(value)[:, :, 0, 0] for value in stored]
    made = [
        Expert(*matrices) for matrices in ((kept[0], kept[2], kept[1]), (kept[3], kept[5], kept[4]))
    ]
    for expert, original in zip(made, experts):
        for name in ("up", "gate", "down"):
            was, now = getattr(original, name).astype(float), getattr(expert, name).astype(float)
            if (
                weights == "int8"
            ):  # one scale an output channel, and no value further off than half a step
                step = np.abs(was).max(1, keepdims=True) / 127
                assert (np.abs(now - was) <= 0.51 * step + 1e-3 * np.abs(was).max()).all()
            assert len(np.unique(now)) <= levels * (len(now) if weights == "int8" else 1)
    y = unpack(Evaluator(path)({"x": pack(x)})["y"])
    assert torch.equal(
        y, torch.cat([oracle(e, rows, "silu") for e, rows in zip(made, x.split(16))])
    )
    assert read_package(path).weight_bytes < 0.7 * 2 * 6 * H * I


def test_what_has_no_graph_is_refused(tmp_path):
    with pytest.raises(ValueError, match="65504"):
        half(torch.tensor([1e5]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", toy.LAYOUTS)
def test_gated_experts_of_every_layout_become_plain_matrices(layout):
    experts = toy.make_experts(3, 16, 24, layout)
    if not experts.has_gate:
        with pytest.raises(ValueError, match="no gate"):
            expert_of(experts, experts.weights(0))
        return
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).double()
    activation = activation_of(experts)
    for e in range(3):
        rounded = {name: t.half().double() for name, t in experts.weights(e).items()}
        y = oracle(expert_of(experts, experts.weights(e)), x, activation)
        torch.testing.assert_close(
            y, experts.ffn(x, rounded), atol=2e-3 if activation == "clamped" else 1e-12, rtol=0
        )


# ---- attention


def attention_case(name, seed=0, **changes):
    """(config, attention module, its model) of a random model with weights that are fp16
    numbers."""
    torch.manual_seed(seed)
    config = tiny.config(name, num_hidden_layers=1, **changes)
    config._attn_implementation = "eager"
    model = compat.model_class(config)._from_config(config).eval()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for parameter in attention.parameters():
            value = torch.randn_like(parameter) * 0.2 * (32 / config.hidden_size) ** 0.5 + (
                parameter.dim() == 1
            )
            parameter.copy_(value.half())
    return config, attention, model


def plain_attention(weights, x, cos, sin, shape):
    """Causal attention over a whole sequence [T, H] in double precision, one head at a time."""
    D, eps = shape.head_dim, float(np.float16(shape.eps))

    def project(name):
        bias = weights.get(f"{name}.bias")
        return F.linear(
            x, weights[f"{name}.weight"].double(), None if bias is None else bias.double()
        )

    def rms(t, name):
        return (
            t
            / (t.square().mean(-1, keepdim=True) + eps).sqrt()
            * weights[f"{name}.weight"].double()
        )

    def rotated(t):
        return t * cos + torch.cat([-t[:, D // 2 :], t[:, : D // 2]], 1) * sin

    q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
    if shape.norm == "full":
        q, k = rms(q, "q_norm"), rms(k, "k_norm")
    outs = []
    for head in range(shape.heads):
        group = head // (shape.heads // shape.kv_heads)
        qh, kh, vh = (t[:, i * D : (i + 1) * D] for t, i in ((q, head), (k, group), (v, group)))
        if shape.norm == "head":
            qh, kh = rms(qh, "q_norm"), rms(kh, "k_norm")
        scores = rotated(qh) @ rotated(kh).T / math.sqrt(D)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        outs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ vh)
    y = torch.cat(outs, 1)
    bias = weights.get("o_proj.bias")
    return F.linear(y, weights["o_proj.weight"].double(), None if bias is None else bias.double())


def in_chunks(evaluate, shape, x, cos, sin):
    """A sequence [T, H] chunk by chunk, with the keys and values of the chunks before."""
    (keys, values), outs = torch.zeros(2, *shape.cache, dtype=x.dtype), []
    for start in range(0, len(x), shape.chunk):
        part = slice(start, min(start + shape.chunk, len(x)))
        inputs = attention_inputs(shape, x[part], start, cos[part], sin[part])
        out, n = evaluate(inputs | {"k_past": keys, "v_past": values}), len(x[part])
        keys[..., part], values[..., part] = out["k_new"][..., :n], out["v_new"][..., :n]
        outs.append(out["y"][0, :, 0, :n].T.double())
    return torch.cat(outs)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("qwen3_moe", {}),
        ("olmoe", {}),
        ("qwen2_moe", {}),
        ("mixtral", {"num_key_value_heads": 4}),
        ("phimoe", {"attention_bias": True}),
    ],
)
def test_attention_over_four_chunks(name, changes, tmp_path):
    config, attention, model = attention_case(name, **changes)
    shape, T = attention_shape(config, 16, 64), 60  # the last chunk is short
    weights = dict(attention.named_parameters())
    path = save_program(tmp_path / "a.mlpackage", attention_program(shape, weights))
    x = torch.randn(T, shape.hidden, generator=torch.Generator().manual_seed(1)).half().double()
    with torch.no_grad():
        cos, sin = (t[0].double() for t in model.model.rotary_emb(x[None], torch.arange(T)[None]))
        expected = plain_attention(weights, x, cos, sin, shape)
        hidden = torch.full((T, T), -math.inf).triu(1)[None, None]
        theirs = attention(
            x[None].float(),
            position_embeddings=(cos[None].float(), sin[None].float()),
            attention_mask=hidden,
        )[0][0]
    torch.testing.assert_close(
        expected, theirs.double(), atol=1e-4, rtol=1e-4
    )  # the oracle is theirs, in fp64
    y = in_chunks(Evaluator(path), shape, x, cos, sin)
    assert float((y - expected).abs().max()) < 1e-12
    fp16 = Evaluator(path, mode="fp16")
    assert relative_rms(in_chunks(fp16, shape, x, cos, sin), expected) < 1e-3


def test_shares_of_large_scores(tmp_path):
    """q and k are fp16 numbers, so rounding the scores, at their own size or near 0, is all that
    differs."""
    rng = torch.Generator().manual_seed(0)
    q, k = (2 * torch.randn(1, 2, 24, 32, generator=rng).half().double() for _ in range(2))

    @mb.program(
        input_specs=[mb.TensorSpec(shape=q.shape, dtype=types.fp16) for _ in (q, k)],
        opset_version=coremltools().target.iOS18,
    )
    def program(q, k):
        return mb.softmax(x=shifted(mb, q, with_ones(mb, k), k), axis=-1, name="shares")

    evaluate = Evaluator(save_program(tmp_path / "s.mlpackage", program), mode="fp16")
    scores = q.mT @ k
    expected = scores.softmax(-1)
    assert scores.abs().max() > 50
    assert relative_rms(evaluate({"q": q, "k": k})["shares"], expected) < 5e-4
    assert relative_rms(scores.half().double().softmax(-1), expected) > 2e-3


@given(st.integers(1, 6), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 9)), st.data())
def test_mask_lets_a_query_see_what_it_may(S, chunks, window, data):
    P = S * chunks
    shape = attention_graph.AttentionShape(8, 1, 1, 4, S, P)
    start = data.draw(st.integers(0, P - S))
    mask = mask_of(shape, start, window)[0, 0]
    for i in range(S):
        seen = {int(j) for j in torch.nonzero(mask[i] == 0)}
        positions = range(max(0, start + i + 1 - window) if window else 0, start + i + 1)
        expected = {p if p < start else P + p - start for p in positions}
        assert seen == expected
    assert set(mask.unique().tolist()) <= {0.0, -1e4}


def test_attention_that_has_no_graph_is_refused():
    for name, changes in (
        ("gpt_oss", {}),
        ("deepseek_v2", {}),
        ("llama4_text", {}),
        ("olmoe", {"clip_qkv": 1.0}),
    ):
        with pytest.raises(ValueError, match="graph"):
            attention_shape(tiny.config(name, **changes), 16, 64)
    attention_shape(tiny.config("qwen3_moe", rms_norm_eps=6e-8), 16, 64)
    attention_shape(tiny.config("mixtral", rms_norm_eps=1e-8), 16, 64)  # no norm of q and k
    with pytest.raises(ValueError, match="epsilon 1e-08 .* is 0 in fp16"):
        attention_shape(tiny.config("qwen3_moe", rms_norm_eps=1e-8), 16, 64)
    config, attention, _ = attention_case("mixtral")
    shape = attention_shape(config, 16, 64)
    with pytest.raises(ValueError, match="sinks"):
        attention_graph.attention_program(
            shape, dict(attention.named_parameters()) | {"sinks": torch.zeros(4)}
        )
    x, cos = torch.zeros(20, 32), torch.zeros(20, 8)
    for n, start in ((0, 0), (17, 0), (10, 60)):
        with pytest.raises(ValueError, match="context"):
            attention_inputs(shape, x[:n], start, cos[:n], cos[:n])
