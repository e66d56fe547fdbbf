"""The evaluator's operations against coremltools' own inference of constants, torch's convolutions and numpy's fp16."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ct = pytest.importorskip("coremltools")

from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from moelab.ane.coreml import evaluator_ops
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.evaluator_ops import OPS
from moelab.ane.coreml.ffn_graph import save_program
from moelab.ane.coreml.package import coremltools, read_package

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 6)).astype(np.float32)
Y = RNG.standard_normal((2, 4, 6)).astype(np.float32)
POSITIVE = np.abs(X) + 0.5

#: (operation, its parameters): whatever coremltools can infer of constants
CASES = [
    ("add", dict(x=X, y=Y)), ("sub", dict(x=X, y=Y)), ("mul", dict(x=X, y=Y)), ("real_div", dict(x=X, y=POSITIVE)),
    ("maximum", dict(x=X, y=Y)), ("minimum", dict(x=X, y=Y)), ("pow", dict(x=POSITIVE, y=Y)),
    ("add", dict(x=X, y=np.float32(2))), ("greater", dict(x=X, y=Y)), ("less_equal", dict(x=X, y=Y)),
    ("equal", dict(x=X, y=X)), ("sigmoid", dict(x=X)), ("relu", dict(x=X)), ("tanh", dict(x=X)), ("erf", dict(x=X)),
    ("gelu", dict(x=X, mode="EXACT")), ("gelu", dict(x=X, mode="TANH_APPROXIMATION")),
    ("gelu", dict(x=X, mode="SIGMOID_APPROXIMATION")), ("exp", dict(x=X)), ("sqrt", dict(x=POSITIVE)),
    ("square", dict(x=X)), ("abs", dict(x=X)), ("cos", dict(x=X)), ("sin", dict(x=X)),
    ("rsqrt", dict(x=POSITIVE, epsilon=np.float32(1e-3))), ("inverse", dict(x=POSITIVE, epsilon=np.float32(1e-3))),
    ("log", dict(x=POSITIVE, epsilon=np.float32(1e-3))),
    ("clip", dict(x=X, alpha=np.float32(-0.5), beta=np.float32(1))),
    ("softmax", dict(x=X, axis=1)), ("matmul", dict(x=X, y=Y, transpose_x=True)),
    ("matmul", dict(x=X, y=Y, transpose_y=True)), ("linear", dict(x=X, weight=Y[0], bias=Y[0, :, 0])),
    ("reshape", dict(x=X, shape=[4, 0, -1])), ("reshape", dict(x=X, shape=[-1, 3])),
    ("transpose", dict(x=X, perm=[2, 0, 1])),
    ("expand_dims", dict(x=X, axes=[0, 2])), ("expand_dims", dict(x=X, axes=[-1])),
    ("squeeze", dict(x=X[:1], axes=[0])),
    ("squeeze", dict(x=X[:1])), ("tile", dict(x=X, reps=[1, 2, 3])),
    ("slice_by_size", dict(x=X, begin=[0, 1, 2], size=[2, -1, 3])),
    ("slice_by_index", dict(x=X, begin=[0, 1, 0], end=[2, 3, 6], stride=[1, 1, 2])),
    ("slice_by_index", dict(x=X, begin=[0, 1, 2], end=[0, 3, 5], begin_mask=[True, False, False],
                            end_mask=[True, False, True])),
    ("slice_by_index", dict(x=X, begin=[0, 1, 0], end=[2, 2, 6], squeeze_mask=[False, True, False])),
    ("slice_by_index", dict(x=X, begin=[0, -2, 0], end=[2, -1, 6])),
    *[(f"reduce_{name}", dict(x=POSITIVE, axes=[0, -1], keep_dims=keep)) for keep in (True, False)
      for name in ("sum", "mean", "max", "min", "prod", "sum_square", "l2_norm", "log_sum_exp")],
    ("reduce_sum", dict(x=X)),
    ("layer_norm", dict(x=X, axes=[2], gamma=Y[0, 0], beta=Y[0, 1], epsilon=np.float32(1e-3))),
    ("select", dict(cond=X > 0, a=X, b=Y)), ("identity", dict(x=X)),
]


def run_op(kind, parameters):
    """An operation of the evaluator on the same values, float tensors in double precision."""
    given = {}
    for name, value in parameters.items():
        value = np.asarray(value)
        floating = value.dtype.kind == "f" or value.dtype.kind == "b" and value.ndim == 3
        given[name] = torch.as_tensor(value.astype(np.float64) if value.dtype.kind == "f" else value) if floating else \
            value.item() if value.ndim == 0 else value
    return OPS[kind](**given)


@pytest.fixture(scope="module")
def inferred():
    """What coremltools makes of each case; None where it infers nothing."""
    coremltools()
    values = []

    @mb.program(input_specs=[mb.TensorSpec(shape=(1,))], opset_version=ct.target.iOS18)
    def program(x):
        for kind, parameters in CASES:
            values.append(getattr(mb, kind)(**parameters).val)
        return mb.identity(x=x)
    return values


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{kind} {i}" for i, (kind, _) in enumerate(CASES)])
def test_operation(case, inferred):
    kind, parameters = CASES[case]
    expected = inferred[case]
    if expected is None:        # coremltools infers nothing here; these two have definitions in torch
        expected = {"layer_norm": lambda p: F.layer_norm(torch.tensor(p["x"]), (6,), torch.tensor(p["gamma"]),
                                                         torch.tensor(p["beta"]), 1e-3).numpy(),
                    "identity": lambda p: p["x"],
                    "slice_by_size": lambda p: p["x"][0:2, 1:, 2:5]}[kind](parameters)
    result = run_op(kind, parameters)
    assert tuple(result.shape) == np.shape(expected)
    np.testing.assert_allclose(result.numpy(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape, weight, options", [
    ((2, 6, 5, 7), (4, 6, 1, 1), {}), ((2, 6, 5, 7), (4, 6, 3, 3), {}),
    ((1, 6, 8, 8), (6, 1, 3, 3), {"groups": 6, "strides": [2, 1], "pad_type": "custom", "pad": [1, 0, 2, 1]}),
    ((1, 4, 9, 9), (3, 4, 3, 3), {"dilations": [2, 2]}), ((2, 4, 9), (3, 4, 3), {"strides": [2]})])
def test_convolution(shape, weight, options):
    rng = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=rng, dtype=torch.float64) for s in (shape, weight, weight[:1]))
    top, bottom, left, right = options.get("pad", [0, 0, 0, 0])
    padded = F.pad(x, (left, right, top, bottom)) if "pad" in options else x
    direct = F.conv1d if x.dim() == 3 else F.conv2d
    expected = direct(padded, w, b, tuple(options.get("strides", [1])), 0, tuple(options.get("dilations", [1])),
                      options.get("groups", 1))
    torch.testing.assert_close(OPS["conv"](x=x, weight=w, bias=b, **options), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["same", "same_lower"])
@pytest.mark.parametrize("n, k, stride, dilation", [(8, 3, 1, 1), (9, 2, 2, 1), (7, 4, 3, 1), (9, 2, 1, 3)])
def test_same_padding_has_a_window_a_stride(kind, n, k, stride, dilation):
    """A naive loop: window j lies at j·stride, moved to the front by half of what is missing."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(n), rng.standard_normal(k)
    outs = -(-n // stride)
    missing = max((outs - 1) * stride + (k - 1) * dilation + 1 - n, 0)
    front = missing // 2 if kind == "same" else -(-missing // 2)
    expected = [sum(w[i] * x[at] for i in range(k) if 0 <= (at := j * stride - front + i * dilation) < n)
                for j in range(outs)]
    found = OPS["conv"](x=torch.tensor(x)[None, None], weight=torch.tensor(w)[None, None], pad_type=kind,
                        strides=[stride], dilations=[dilation])
    np.testing.assert_allclose(found[0, 0].numpy(), expected, atol=1e-12)


def test_norms_that_coremltools_does_not_infer():
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, variance, gamma, beta = (torch.tensor([a, b, c], dtype=torch.float64)
                                   for a, b, c in ((1, 2, 3), (4, 1, 9), (0.5, 2, -1), (3, 0, 1)))
    expected = torch.stack([(x[:, c] - mean[c]) / (variance[c] + 0.1).sqrt() * gamma[c] + beta[c] for c in range(3)], 1)
    torch.testing.assert_close(OPS["batch_norm"](x=x, mean=mean, variance=variance, gamma=gamma, beta=beta,
                                                 epsilon=torch.tensor(0.1)), expected)
    rows = torch.stack([torch.stack([(r - r.mean()) / (r.var(correction=0) + 0.1).sqrt() for r in s]) for s in x])
    torch.testing.assert_close(OPS["instance_norm"](x=x, epsilon=0.1), rows)
    torch.testing.assert_close(OPS["silu"](x=x), x / (1 + (-x).exp()))


def test_split_concat_stack_and_slice_update():
    x = torch.arange(24.0).view(2, 3, 4)
    assert [t.tolist() for t in OPS["split"](x=x, num_splits=3, axis=1)] == [x[:, i:i + 1].tolist() for i in range(3)]
    assert [t.shape[2] for t in OPS["split"](x=x, split_sizes=np.array([1, 3]), axis=-1)] == [1, 3]
    assert torch.equal(OPS["concat"](values=[x, -x], axis=1), torch.cat([x, -x], 1))
    interleaved = OPS["concat"](values=[x, -x], axis=1, interleave=True)
    assert torch.equal(interleaved[:, ::2], x) and torch.equal(interleaved[:, 1::2], -x)
    assert torch.equal(OPS["stack"](values=[x, x], axis=0), torch.stack([x, x]))
    updated = OPS["slice_update"](x=x, update=torch.ones(2, 1, 2), begin=np.array([0, 1, 2]), end=np.array([2, 2, 4]))
    assert updated[:, 1, 2:].eq(1).all() and updated.sum() == x.sum() - x[:, 1, 2:].sum() + 4
    assert evaluator_ops.cast(torch.tensor([1.7, -1.7]), "int32").tolist() == [1, -1]


# ---------------------------------------------------------------------------------------------------- whole programs

def save(path, shape, body, dtype=types.fp16, states=()):
    """A package whose one input x goes through `body`."""
    specs = [mb.TensorSpec(shape=shape, dtype=dtype), *(mb.StateTensorSpec(shape=s, dtype=types.fp16) for s in states)]
    return save_program(path, mb.program(input_specs=specs, opset_version=coremltools().target.iOS18)(body))


def test_fp16_mode_rounds_every_result(tmp_path):
    path = save(tmp_path / "p.mlpackage", (1, 8), lambda x: mb.mul(x=mb.add(x=x, y=np.float16(0.1)), y=np.float16(3.3)))
    x = RNG.standard_normal((1, 8)).astype(np.float16)
    out = Evaluator(path, mode="fp16")({"x": x})
    expected = (x + np.float16(0.1)) * np.float16(3.3)                      # numpy rounds each step to fp16
    assert np.array_equal(next(iter(out.values())).numpy(), expected.astype(np.float32))
    exact = next(iter(Evaluator(path)({"x": x}).values())).numpy()
    assert np.array_equal(exact, (x.astype(float) + float(np.float16(0.1))) * float(np.float16(3.3)))


def test_alarms(tmp_path):
    weight = np.full((16, 16, 1, 1), 8, dtype=np.float16)

    def body(x):
        a, b = mb.split(x=mb.conv(x=x, weight=weight, name="c"), num_splits=2, axis=3, name="s")
        square = mb.mul(x=a, y=a, name="m")
        return mb.sub(x=square, y=square, name="d"), b
    evaluate = Evaluator(save(tmp_path / "p.mlpackage", (1, 16, 1, 32), body), mode="fp16")
    evaluate({"x": torch.full((1, 16, 1, 32), 0.5)})
    assert evaluate.alarms == []
    evaluate({"x": torch.full((1, 16, 1, 32), 40.0)})       # 5120 of a slice, whose square no fp16 holds
    kinds = {alarm.op: alarm.kind for alarm in evaluate.alarms}
    assert kinds == {"s": "saturation", "m": "overflow", "d": "nan"}
    evaluate({"x": torch.full((1, 16, 1, 32), 300.0)})
    worst = {alarm.op: alarm.value for alarm in evaluate.alarms}
    assert worst["c"] == 38400 and worst["s"] == 38400 and worst["m"] == np.inf
    double = Evaluator(tmp_path / "p.mlpackage")
    double({"x": torch.full((1, 16, 1, 32), 300.0)})
    assert double.alarms == []


def test_alarms_of_inputs_and_of_sums_inside(tmp_path):
    """Results that fp16 holds, of inputs and sums that it does not."""
    def body(x):
        mean = mb.reduce_mean(x=x, axes=[1], name="mean")
        square = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[1], name="square")
        norm = mb.reduce_l2_norm(x=x, axes=[1], name="norm")
        return mean, square, norm, mb.layer_norm(x=x, axes=[1], epsilon=np.float16(0.1), name="layer")
    evaluate = Evaluator(save(tmp_path / "p.mlpackage", (1, 1000), body), mode="fp16")
    signs = torch.ones(1, 1000)
    signs[:, ::2] = -1
    evaluate({"x": signs})
    assert evaluate.alarms == []
    out = evaluate({"x": 100 * signs})
    assert all(bool(value.isfinite().all()) for value in out.values())
    found = {alarm.op: (alarm.kind, alarm.value) for alarm in evaluate.alarms}
    assert found == {"mean": ("sum", 1e5), "square": ("sum", 1e7), "norm": ("sum", 1e7), "layer": ("sum", 1e7)}
    evaluate({"x": 65520 * signs})
    assert ("x", "input", "overflow", np.inf) in [(a.op, a.type, a.kind, a.value) for a in evaluate.alarms]


@pytest.mark.parametrize("declared", [dict(shape=(1, 32)), dict(shape=(64,)), dict(dtype="int32"), dict(dtype="bool")])
def test_a_result_that_is_not_as_declared_is_refused(declared, tmp_path):
    package = read_package(save(tmp_path / "p.mlpackage", (1, 64), lambda x: mb.relu(x=x, name="y")))
    function = package.function()
    op = function.ops[-1]
    other = replace(op, outputs=(replace(op.outputs[0], **declared),))
    wrong = replace(package, functions={"main": replace(function, ops=(*function.ops[:-1], other))})
    for mode in ("double", "fp16"):
        with pytest.raises(ValueError, match="relu y makes .* the file declares"):
            Evaluator(wrong, mode=mode)({"x": torch.zeros(1, 64)})


def test_what_no_definition_covers_is_refused(tmp_path):
    def body(x, n):
        return mb.cast(x=mb.cast(x=x, dtype="int8"), dtype="fp16"), mb.real_div(x=np.int32(5), y=n)
    specs = [mb.TensorSpec(shape=(4,), dtype=types.fp32), mb.TensorSpec(shape=(2,), dtype=types.int32)]
    path = save_program(tmp_path / "p.mlpackage", mb.program(input_specs=specs, opset_version=ct.target.iOS18)(body))
    evaluate = Evaluator(path)
    first, second = evaluate({"x": [1.5, -129, 300, 0], "n": [2, -3]}).values()
    assert first.tolist() == [1, 127, 44, 0] and second.tolist() == [2, -1]
    for x in (float("nan"), float("inf"), 2.0 ** 31):
        with pytest.raises(ValueError, match="no definition covers"):
            evaluate({"x": [x, 0, 0, 0], "n": [1, 1]})
    with pytest.raises(ValueError, match="real_div .* is not evaluated"):
        evaluate({"x": [0, 0, 0, 0], "n": [0, 1]})
    with pytest.raises(ValueError, match="n of type torch.float32.* int32"):
        evaluate({"x": [0, 0, 0, 0], "n": [0.5, 1]})


def test_state_is_carried_and_separate(tmp_path):
    def body(x, memory):
        kept = mb.coreml_update_state(state=memory, value=mb.add(x=mb.read_state(input=memory), y=x))
        return mb.mul(x=kept, y=np.float16(2), name="y")
    evaluate = Evaluator(save(tmp_path / "p.mlpackage", (1, 32), body, states=[(1, 32)]))
    one, other = evaluate.make_state(), evaluate.make_state()
    ones = torch.ones(1, 32)
    assert [float(evaluate({"x": ones}, one)["y"][0, 0]) for _ in range(3)] == [2, 4, 6]
    assert float(evaluate({"x": ones}, other)["y"][0, 0]) == 2
    with pytest.raises(ValueError, match="make_state"):
        evaluate({"x": ones})
    with pytest.raises(ValueError, match="the state has other"):
        evaluate({"x": ones}, {"other": torch.zeros(1, 32)})
    with pytest.raises(ValueError, match="the file declares"):
        evaluate({"x": ones}, {"memory": torch.zeros(1, 64)})


def test_slice_update_of_a_state_and_static_slices(tmp_path):
    def body(x, memory):
        new = mb.slice_update(x=mb.read_state(input=memory), update=x, begin=[0, 32], end=[1, 64])
        kept = mb.coreml_update_state(state=memory, value=new)
        return mb.slice_by_index(x=kept, begin=[0, 16], end=[1, 48], name="y")
    evaluate = Evaluator(save(tmp_path / "p.mlpackage", (1, 32), body, states=[(1, 64)]))
    x = torch.arange(32.0)[None]
    assert evaluate({"x": x}, evaluate.make_state())["y"].tolist() == [[0.0] * 16 + list(range(16))]


def test_what_cannot_be_evaluated_is_named(tmp_path):
    path = save(tmp_path / "p.mlpackage", (1, 64), lambda x: mb.topk(x=x, k=4, axis=1)[0])
    with pytest.raises(ValueError, match="'topk'"):
        Evaluator(path)
    path = save(tmp_path / "q.mlpackage", (1, 64), lambda x: mb.relu(x=x, name="y"))
    evaluate = Evaluator(path)
    for inputs in ({}, {"z": torch.zeros(1, 64)}, {"x": torch.zeros(1, 32)}):
        with pytest.raises(ValueError, match="x"):
            evaluate(inputs)
    with pytest.raises(ValueError, match="mode"):
        Evaluator(path, mode="fp8")
    with pytest.raises(ValueError, match="no function 'c16'"):
        Evaluator(path, "c16")


def test_what_is_no_package_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_package(tmp_path / "none.mlpackage")
    with pytest.raises(ValueError, match="mlpackage"):
        read_package(tmp_path)
    path = save(tmp_path / "p.mlpackage", (1, 64), lambda x: mb.relu(x=x))
    next(path.rglob("*.mlmodel")).write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="cannot be read"):
        read_package(path)
