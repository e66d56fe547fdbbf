"""Deliberately bad graphs, each caught by the rule that is about it, and good ones that are
clean."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

ct = pytest.importorskip("coremltools")

from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from moelab.ane.coreml import linter
from moelab.ane.coreml.attention_graph import AttentionShape, attention_program
from moelab.ane.coreml.ffn_graph import Expert, save_ffn, save_program
from moelab.ane.coreml.linter import RULES, lint
from moelab.ane.coreml.package import coremltools, quiet, read_package
from moelab.checkpoint.opening import open_checkpoint
from moelab.models import plug
from notebooks.studies.ane_lint import lint_examples

H, I = 64, 128
WEIGHT = np.full((H, H, 1, 1), 0.01, dtype=np.float16)
ROW = (1, H, 1, 256)

SUPPORTED = {kind for kind, (rule, _) in linter.KNOWN.items() if rule == "supported"}


def make_experts(G):
    rng = np.random.default_rng(0)
    up, down, gate = (
        rng.standard_normal(shape).astype(np.float16) for shape in ((I, H), (H, I), (I, H))
    )
    return [Expert(up, down, gate)] * G


def build(body, path, shape=ROW, dtype=types.fp16, more=()):
    """A package whose body follows a 1×1 convolution, so that it is neither tiny nor otherwise
    remarkable."""
    specs = [
        mb.TensorSpec(shape=shape, dtype=dtype),
        *(mb.TensorSpec(shape=s, dtype=types.int32) for s in more),
    ]
    program = mb.program(input_specs=specs, opset_version=coremltools().target.iOS18)(body)
    with quiet():
        ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        ).save(str(path))
    return path


def conv(x):
    return mb.conv(x=x, weight=WEIGHT)


#: rule → the body, and what else is not usual, of a package that it must object to
BAD = {
    "unsupported-op": (
        lambda x: mb.layer_norm(x=conv(x), axes=[1], epsilon=np.float16(1e-3)),
        {},
    ),
    "dilated": (
        lambda x: mb.conv(
            x=x,
            weight=np.ones((H, H, 1, 3), np.float16),
            dilations=[1, 2],
            pad_type="custom",
            pad=[0, 0, 2, 2],
        ),
        {},
    ),
    "dynamic-index": (
        lambda x, at: mb.slice_by_size(x=conv(x), begin=at, size=[1, 64, 1, 32]),
        dict(more=[(4,)]),
    ),
    "unknown-op": (lambda x: mb.softsign(x=conv(x)), {}),
    "fp32-compute": (
        lambda x: mb.conv(x=x, weight=np.ones((H, H, 1, 1), np.float32)),
        dict(dtype=types.fp32),
    ),
    "risky-op": (
        lambda x: mb.slice_by_index(x=conv(x), begin=[0, 0, 0, 0], end=[1, H, 1, 128]),
        {},
    ),
    "align-16": (lambda x: mb.relu(x=conv(x)), dict(shape=(1, H, 1, 250))),
    "row-padding": (lambda x: mb.relu(x=conv(x)), dict(shape=(256, H, 1, 1))),
    "channels": (
        lambda x: mb.conv(x=x, weight=np.ones((16, 16400, 1, 1), np.float16)),
        dict(shape=(1, 16400, 1, 32)),
    ),
    "tiny-graph": (lambda x: conv(x), dict(shape=(1, H, 1, 16))),
}


@pytest.mark.parametrize("rule", BAD)
def test_a_bad_graph_is_caught_by_its_rule_and_by_no_other(rule, tmp_path):
    body, unusual = BAD[rule]
    report = lint(build(body, tmp_path / "bad.mlpackage", **unusual))
    assert {(f.rule, f.severity) for f in report.findings} == {(rule, RULES[rule])}
    assert not report.clean and all(f.text for f in report.findings)


@pytest.mark.parametrize("kind", [*linter.KNOWN, "never_heard_of"])
def test_only_supported_operations_are_clean(kind, clean_graph, monkeypatch):
    """An operation of each kind in a graph that is clean without it."""
    function, (product,) = clean_graph.function, clean_graph.ops
    (x,) = function.inputs.values()
    given = dict.fromkeys(("x", "y", "scale", "data"), x) | {"weight": product.inputs["weight"]}
    op = SimpleNamespace(op_type=kind, name="odd", inputs=given, outputs=product.outputs)
    other = SimpleNamespace(inputs=function.inputs, operations=[*function.operations, op])
    monkeypatch.setattr(linter, "read_package", lambda _: clean_graph._replace(function=other))
    report = lint("odd")
    assert report.clean == (kind in SUPPORTED), report.table()


@pytest.fixture(scope="module")
def clean_graph(tmp_path_factory):
    return read_package(build(conv, tmp_path_factory.mktemp("clean") / "p.mlpackage"))


def test_what_is_too_large(clean_graph, monkeypatch):
    for size, rules in ((1.2e9, set()), (1.4e9, {"weight-size"}), (2.2e9, {"weight-size"})):
        large = clean_graph._replace(weight_bytes=int(size))
        monkeypatch.setattr(linter, "read_package", lambda _, large=large: large)
        found = lint("large").findings
        assert {f.rule for f in found} == rules


def test_good_graphs_are_clean_and_every_operation_has_a_verdict(tmp_path):
    shape = AttentionShape(64, 4, 2, 32, 32, 64, "head")
    rng = torch.Generator().manual_seed(0)
    sizes = {"q_proj": (128, 64), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (64, 128)}
    weights = {f"{name}.weight": torch.randn(size, generator=rng) for name, size in sizes.items()}
    weights |= {"q_norm.weight": torch.ones(32), "k_norm.weight": torch.ones(32)}
    for path in (
        save_program(tmp_path / "a.mlpackage", attention_program(shape, weights)),
        save_ffn(tmp_path / "g.mlpackage", make_experts(2), 32),
    ):
        report = lint(path)
        assert report.clean, report.table()
        assert {op.op_type for op in read_package(path).ops} <= SUPPORTED


EXAMPLES = {
    "the paper's layout": {"row-padding"},
    "one expert, capacities 16, 32 or 64": {"dynamic-shape"},
    "int8 weights": {"risky-op"},
    "capacity 40": {"align-16"},
    "one expert, capacity 16": {"tiny-graph"},
    "the router": {"risky-op", "unsupported-op"},
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
