"""Deliberately bad graphs, each caught by the rule that is about it, and good ones that are
clean."""

from dataclasses import replace

import numpy as np
import pytest
import torch

ct = pytest.importorskip("coremltools")

import coremltools.optimize.coreml as cto
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from moelab.ane.coreml import lint_rules
from moelab.ane.coreml.attention_graph import AttentionShape, save_attention
from moelab.ane.coreml.ffn_graph import Expert, save_ffn
from moelab.ane.coreml.linter import lint, lint_examples
from moelab.ane.coreml.package import Op, Value, coremltools, quiet, read_package
from moelab.checkpoint.opening import open_checkpoint
from moelab.models import plug

H, I = 64, 128
WEIGHT = np.full((H, H, 1, 1), 0.01, dtype=np.float16)
ROW = (1, H, 1, 256)


def make_experts(G):
    rng = np.random.default_rng(0)
    up, down, gate = (
        rng.standard_normal(shape).astype(np.float16) for shape in ((I, H), (H, I), (I, H))
    )
    return [Expert(up, down, gate)] * G


def build(body, shape=ROW, dtype=types.fp16, more=(), states=(), path=None, after=None):
    """A package whose body follows a 1×1 convolution, so that it is neither tiny nor otherwise
    remarkable."""
    specs = [
        mb.TensorSpec(shape=shape, dtype=dtype),
        *(mb.TensorSpec(shape=s, dtype=types.int32) for s in more),
        *(mb.StateTensorSpec(shape=s, dtype=types.fp16) for s in states),
    ]
    program = mb.program(input_specs=specs, opset_version=coremltools().target.iOS18)(body)
    with quiet():
        model = ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
        (model if after is None else after(model)).save(str(path))
    return path


def conv(x):
    return mb.conv(x=x, weight=WEIGHT)


def per_block(model):
    config = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric",
        dtype="int4",
        granularity="per_block",
        block_size=32,
        weight_threshold=0,
    )
    return cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config))


def with_state(x, memory):
    kept = mb.coreml_update_state(
        state=memory, value=mb.mul(x=mb.read_state(input=memory), y=np.float16(2))
    )
    return conv(x), kept


#: rule → how to build a package that it must object to
BAD = {
    "fig4-topk": dict(body=lambda x: mb.topk(x=conv(x), k=4, axis=3)[0]),
    "fig4-scatter-gather": dict(
        body=lambda x: mb.gather(x=conv(x), indices=np.int32([0, 1]), axis=3)
    ),
    "fig4-comparison": dict(
        body=lambda x: mb.cast(x=mb.greater(x=conv(x), y=np.float16(0)), dtype="fp16")
    ),
    "fig4-layernorm": dict(
        body=lambda x: mb.layer_norm(x=conv(x), axes=[1], epsilon=np.float16(1e-3))
    ),
    "fig4-indexing": dict(body=lambda x: mb.cumsum(x=conv(x), axis=3)),
    "fig4-dilated": dict(
        body=lambda x: mb.conv(
            x=x,
            weight=np.ones((H, H, 1, 3), np.float16),
            dilations=[1, 2],
            pad_type="custom",
            pad=[0, 0, 2, 2],
        )
    ),
    "fig4-dynamic-index": dict(
        body=lambda x, at: mb.slice_by_size(x=conv(x), begin=at, size=[1, 64, 1, 32]), more=[(4,)]
    ),
    "fig4-linear": dict(body=lambda x: mb.linear(x=x, weight=WEIGHT[:, :, 0, 0]), shape=(256, H)),
    "unknown-op": dict(body=lambda x: mb.softsign(x=conv(x))),
    "fp32-compute": dict(body=lambda x: mb.relu(x=x), dtype=types.fp32),
    "risky-op": dict(
        body=lambda x: mb.slice_by_index(x=conv(x), begin=[0, 0, 0, 0], end=[1, H, 1, 128])
    ),
    "integer-compute": dict(
        body=lambda x, n: (conv(x), mb.add(x=mb.mul(x=n, y=n), y=np.int32(1))), more=[(1, 64)]
    ),
    "conv-3d": dict(
        body=lambda x: mb.conv(x=x, weight=np.full((H, H, 1, 1, 1), 0.01, np.float16)),
        shape=(1, H, 2, 2, 256),
    ),
    "fp32-inputs": dict(body=lambda x: conv(mb.cast(x=x, dtype="fp16")), dtype=types.fp32),
    "align-16": dict(body=lambda x: mb.relu(x=conv(x)), shape=(1, H, 1, 250)),
    "row-padding": dict(body=lambda x: mb.relu(x=conv(x)), shape=(256, H, 1, 1)),
    "channels": dict(
        body=lambda x: mb.conv(x=x, weight=np.ones((16, 16400, 1, 1), np.float16)),
        shape=(1, 16400, 1, 32),
    ),
    "tiny-graph": dict(body=lambda x: conv(x), shape=(1, H, 1, 16)),
    "per-block": dict(body=lambda x: conv(x), after=per_block),
    "mask-constant": dict(
        body=lambda x: mb.softmax(x=mb.add(x=conv(x), y=np.float16(-65504)), axis=3)
    ),
    "state-axis": dict(body=with_state, states=[(1, 2, 30, 64)]),
    "state": dict(body=with_state, states=[(1, 2, 32, 64)]),
}


@pytest.mark.parametrize("rule", BAD)
def test_a_bad_graph_is_caught_by_its_rule(rule, tmp_path):
    report = lint(build(**BAD[rule], path=tmp_path / "bad.mlpackage"))
    found = [finding for finding in report.findings if finding.rule == rule]
    assert found and all(
        f.severity == lint_rules.RULES[rule].severity and f.source and f.text for f in found
    )
    more = {
        "per-block": {"quantised-conv"},
        "fp32-compute": {"fp32-inputs", "tiny-graph"},
        "state-axis": {"state"},
        "fig4-comparison": {"risky-op"},
        "fp32-inputs": {"risky-op"},
    }  # casts
    assert {f.rule for f in report.findings} - {rule} == more.get(rule, set())  # and by no other
    assert not report.clean


@pytest.mark.parametrize(
    "body, shape, where",
    [
        (
            lambda x: mb.conv(x=x, weight=np.ones((16400, 16, 1, 1), np.float16), name="wide"),
            (1, 16, 1, 64),
            "wide",
        ),
        (
            lambda x: mb.matmul(x=x, y=np.ones((64, 16400), np.float16), name="wide"),
            (64, 64),
            "wide",
        ),
        (lambda x: mb.matmul(x=x, y=np.ones((16400, 64), np.float16)), (64, 16400), "x"),
        (
            lambda x: mb.mul(x=conv(mb.reduce_sum(x=x, axes=[2], keep_dims=True)), y=np.float16(2)),
            (1, H, 16400, 64),
            "x",
        ),
    ],
)
def test_nothing_is_wider_than_the_ane_takes(body, shape, where, tmp_path):
    found = [
        f
        for f in lint(build(body, shape, path=tmp_path / "p.mlpackage")).findings
        if f.rule == "channels"
    ]
    assert [f.where for f in found] == [where] and "16,400" in found[0].text


BIG = np.float16(65504)


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: mb.add(x=x, y=-BIG),
        lambda x: mb.sub(x=x, y=BIG),
        lambda x: mb.add(x=mb.mul(x=x, y=BIG), y=x),
        lambda x: mb.sub(x=x, y=np.full((1, H, 1, 256), 30000, np.float16)),
        lambda x: mb.add(x=x, y=mb.cast(x=np.float32(-3e38), dtype="fp16")),
        lambda x: mb.add(x=x, y=mb.tile(x=np.full((1, 1, 1, 1), -BIG), reps=[1, 1, 1, 256])),
        lambda x: mb.maximum(x=x, y=-BIG),
    ],
)
def test_masks_are_seen_however_they_are_written(mask, tmp_path):
    report = lint(
        build(lambda x: mb.softmax(x=mask(conv(x)), axis=3), path=tmp_path / "p.mlpackage")
    )
    assert "mask-constant" in {f.rule for f in report.findings}
    right = lint(
        build(
            lambda x: mb.softmax(
                x=mb.sub(x=mb.add(x=conv(x), y=np.float16(-1e4)), y=np.float16(1e4)), axis=3
            ),
            path=tmp_path / "q.mlpackage",
        )
    )
    assert right.clean


@pytest.mark.parametrize(
    "kind", [*lint_rules.SUPPORTED, *lint_rules.RISKY, *lint_rules.UNSUPPORTED, "never_heard_of"]
)
def test_only_supported_operations_are_clean(kind, clean_graph):
    """An operation of each kind in a graph that is clean without it."""
    package, function = clean_graph, clean_graph.function()
    given = {name: "x" for name in ("x", "y", "scale", "data")} | {
        "weight": next(iter(function.constants))
    }
    op = Op(kind, "odd", given, (Value("odd", ROW, "fp16"),))
    if kind in ("read_state", "coreml_update_state", "write_state"):
        function = replace(function, states=(Value("s", (1, 32, 1, 64), "fp16"),))
    report = lint(replace(package, functions={"main": replace(function, ops=(*function.ops, op))}))
    assert report.clean == (lint_rules.verdict(kind)[0] == "supported"), report.table()


@pytest.fixture(scope="module")
def clean_graph(tmp_path_factory):
    return read_package(build(conv, path=tmp_path_factory.mktemp("clean") / "p.mlpackage"))


def test_what_is_too_large(tmp_path):
    package = read_package(save_ffn(tmp_path / "g.mlpackage", make_experts(2), 32))
    for size, rules in ((1.2e9, set()), (1.4e9, {"weight-size"}), (2.2e9, {"weight-limit"})):
        assert {f.rule for f in lint(replace(package, weight_bytes=int(size))).findings} == rules


def test_good_graphs_are_clean_and_every_operation_has_a_verdict(tmp_path):
    shape = AttentionShape(64, 4, 2, 32, 32, 64, "head")
    rng = torch.Generator().manual_seed(0)
    sizes = {"q_proj": (128, 64), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (64, 128)}
    weights = {f"{name}.weight": torch.randn(size, generator=rng) for name, size in sizes.items()}
    weights |= {"q_norm.weight": torch.ones(32), "k_norm.weight": torch.ones(32)}
    for path in (
        save_attention(tmp_path / "a.mlpackage", shape, weights),
        save_ffn(tmp_path / "g.mlpackage", make_experts(2), (16, 32)),
        save_ffn(tmp_path / "p.mlpackage", make_experts(2), 16, weights="palette4"),
    ):
        report, package = lint(path), read_package(path)
        assert report.clean and not report.findings
        assert {(op.function, op.type) for op in report.ops} == {
            (name, op.type)
            for name, f in package.functions.items()
            for op in f.ops
            if op.type != "const"
        }
        assert {op.verdict for op in report.ops} == {"supported"}


# --------------------------------------------------------------------------------------- examples
# of mistakes

EXAMPLES = {
    "the paper's layout": {"row-padding"},
    "one expert, capacities 16, 32 or 64": {"fig4-dynamic-shape"},
    "int8 weights": {"quantised-conv"},
    "capacity 40": {"align-16"},
    "one expert, capacity 16": {"tiny-graph"},
    "the router": {"fig4-linear", "fig4-topk"},
}


def test_each_mistake_is_found_by_its_own_rule(tmp_path):
    model = open_checkpoint(experts="external")  # of the shipped model's sizes no rule complains
    good, bad = lint_examples(plug(model)[0].seam, model.spec, tmp_path)
    assert good.clean and not good.findings
    assert {
        name: {finding.rule for finding in report.findings} for name, report in bad.items()
    } == EXAMPLES
    assert not any(report.clean for report in bad.values())
    assert "32 times" in next(f.text for f in bad["the paper's layout"].findings if f.where == "x")
    assert len(list(tmp_path.glob("*.mlpackage"))) == len(bad) + 1
