"""The evaluator's operations against coremltools' own inference of constants, torch and numpy's
fp16."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ct = pytest.importorskip("coremltools")

from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from moelab.ane.coreml.evaluator import OPS, Evaluator
from moelab.ane.coreml.ffn_graph import save_program
from moelab.ane.coreml.package import coremltools, read_package

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 6)).astype(np.float32)
Y = RNG.standard_normal((2, 4, 6)).astype(np.float32)
POSITIVE = np.abs(X) + 0.5

#: (operation, its parameters): whatever coremltools can infer of constants
CASES = [
    ("add", dict(x=X, y=Y)),
    ("mul", dict(x=X, y=Y)),
    ("minimum", dict(x=X, y=Y)),
    ("add", dict(x=X, y=np.float32(2))),
    ("sigmoid", dict(x=X)),
    ("relu", dict(x=X)),
    ("gelu", dict(x=X, mode="EXACT")),
    ("gelu", dict(x=X, mode="TANH_APPROXIMATION")),
    ("gelu", dict(x=X)),
    ("rsqrt", dict(x=POSITIVE)),
    ("concat", dict(values=(X, Y), axis=-1, interleave=False)),
    ("matmul", dict(x=X, y=Y, transpose_x=True, transpose_y=False)),
    ("rsqrt", dict(x=POSITIVE, epsilon=np.float32(1e-3))),
    ("clip", dict(x=X, alpha=np.float32(-0.5), beta=np.float32(1))),
    ("softmax", dict(x=X, axis=1)),
    ("softmax", dict(x=X)),
    ("matmul", dict(x=X, y=Y, transpose_x=True)),
    ("matmul", dict(x=X, y=Y, transpose_y=True)),
    ("reshape", dict(x=X, shape=[-1, 3])),
    ("reshape", dict(x=X, shape=[4, 2, 6])),
    ("concat", dict(values=(X, Y), axis=1)),
    *[
        (f"reduce_{name}", dict(x=X, axes=[0, -1], keep_dims=keep))
        for keep in (True, False)
        for name in ("mean", "max")
    ],
]


def run_op(kind, parameters):
    """An operation of the evaluator on the same values, float tensors in double precision."""

    def given(value):
        array = np.asarray(value)
        return (
            torch.tensor(array, dtype=torch.float64)
            if array.dtype.kind == "f"
            else value
            if array.ndim == 0
            else array
        )

    return OPS[kind](
        **{
            name: list(map(given, value)) if isinstance(value, tuple) else given(value)
            for name, value in parameters.items()
        }
    )


@pytest.fixture(scope="module")
def inferred():
    """What coremltools makes of each case."""
    coremltools()
    values = []

    @mb.program(input_specs=[mb.TensorSpec(shape=(1,))], opset_version=ct.target.iOS18)
    def program(x):
        for kind, parameters in CASES:
            values.append(getattr(mb, kind)(**parameters).val)
        return mb.identity(x=x)

    return values


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=[f"{kind} {i}" for i, (kind, _) in enumerate(CASES)]
)
def test_operation(case, inferred):
    kind, parameters = CASES[case]
    result = run_op(kind, parameters)
    assert tuple(result.shape) == np.shape(inferred[case])
    np.testing.assert_allclose(result.numpy(), inferred[case], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (2, 6, 5)])
def test_convolution(shape):
    rng = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(s, generator=rng, dtype=torch.float64)
        for s in (shape, (4, 6, *[1] * len(shape[2:])), (4,))
    )
    direct = F.conv1d if x.dim() == 3 else F.conv2d
    torch.testing.assert_close(
        OPS["conv"](x=x, weight=w, bias=b), direct(x, w, b), atol=1e-12, rtol=0
    )
    for options in (
        {"weight": w.expand(-1, -1, *[3] * len(shape[2:]))},
        {"strides": np.array([2])},
        {"groups": 2},
        {"pad_type": "custom", "pad": np.array([1, 0])},
        {"pad_type": "full"},
    ):
        with pytest.raises(ValueError, match="1×1"):
            OPS["conv"](**{"x": x, "weight": w} | options)


WEIGHT = np.ones((4, 4, 1, 1), np.float16)


@pytest.mark.parametrize(
    "body, told",
    [
        (lambda x: mb.concat(values=(x, x), axis=1, interleave=True, name="y"), "interleave"),
        (lambda x: mb.conv(x=x, weight=WEIGHT, strides=[2, 2], name="y"), "conv y .*strides"),
        (
            lambda x: mb.conv(x=x, weight=WEIGHT, pad_type="custom", pad=[1, 1, 0, 0], name="y"),
            "conv y .*custom padding",
        ),
    ],
)
def test_an_option_that_is_not_computed_is_refused_by_its_name(body, told, tmp_path):
    evaluate = Evaluator(save(tmp_path / "p.mlpackage", (1, 4, 6, 6), body))
    with pytest.raises(ValueError, match=told):
        evaluate({"x": torch.zeros(1, 4, 6, 6)})
    for name, options in (("relu", {"alpha": 1.0}), ("softmax", {"beta": 2.0})):
        with pytest.raises(TypeError, match=next(iter(options))):
            OPS[name](x=torch.zeros(2), **options)


# ---- whole programs


def save(path, shape, body, dtype=types.fp16):
    """A package whose one input x goes through `body`."""
    spec = mb.TensorSpec(shape=shape, dtype=dtype)
    return save_program(
        path, mb.program(input_specs=[spec], opset_version=coremltools().target.iOS18)(body)
    )


def test_fp16_mode_rounds_every_result(tmp_path):
    path = save(
        tmp_path / "p.mlpackage",
        (1, 8),
        lambda x: mb.mul(x=mb.add(x=x, y=np.float16(0.1)), y=np.float16(3.3)),
    )
    x = RNG.standard_normal((1, 8)).astype(np.float16)
    out = Evaluator(path, mode="fp16")({"x": x})
    expected = (x + np.float16(0.1)) * np.float16(3.3)  # numpy rounds each step to fp16
    assert np.array_equal(next(iter(out.values())).numpy(), expected.astype(np.float32))
    exact = next(iter(Evaluator(path)({"x": x}).values())).numpy()
    assert np.array_equal(
        exact, (x.astype(float) + float(np.float16(0.1))) * float(np.float16(3.3))
    )


@pytest.mark.parametrize(
    "declared",
    [dict(shape=(1, 32)), dict(shape=(64,)), dict(dtype=types.int32), dict(dtype=types.bool)],
)
def test_a_result_that_is_not_as_declared_is_refused(declared, tmp_path):
    path = save(tmp_path / "p.mlpackage", (1, 64), lambda x: mb.relu(x=x, name="y"))
    for mode in ("double", "fp16"):
        evaluate = Evaluator(path, mode=mode)
        (value,) = evaluate.package.ops[-1].outputs
        value._sym_type = types.tensor(
            declared.get("dtype", types.fp16), declared.get("shape", (1, 64))
        )
        with pytest.raises(ValueError, match="relu y makes .* the file declares"):
            evaluate({"x": torch.zeros(1, 64)})


def test_what_is_no_package_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_package(tmp_path / "none.mlpackage")
    with pytest.raises(FileNotFoundError, match="mlpackage"):
        read_package(tmp_path)
    path = save(tmp_path / "p.mlpackage", (1, 64), lambda x: mb.relu(x=x))
    next(path.rglob("*.mlmodel")).write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="cannot be read"):
        read_package(path)
