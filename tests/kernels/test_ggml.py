"""Products of GGML's blocks as they lie against double precision on what gguf-py decodes."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")
quants = pytest.importorskip("gguf.quants")
from gguf import GGMLQuantizationType

from moelab.kernels.products import KINDS, PACKED, Matrices, multiply
from moelab.store.ggml import GGML
from tests.depth import depth
from tests.kernels.ggml_blocks import LAYOUT, blocks, without_codes

EVERY = pytest.mark.parametrize("name", LAYOUT)


def decoded(name, blob, shape):
    with np.errstate(all="ignore"):
        rows = quants.dequantize(blob.reshape(shape[0], -1), GGMLQuantizationType[name])
    return torch.from_numpy(rows).double()


def placed(blob):
    """The bytes at an odd address."""
    buffer = np.empty(len(blob) + 65, np.uint8)
    at = -buffer.ctypes.data % 64 + 1
    buffer[at : at + len(blob)] = blob
    return buffer[at : at + len(blob)]


def tolerance(form, x, blob, shape):
    """What inputs in fixed point and sums in fp32 may differ by.

    A quantum is at most 2⁻¹⁴ of the largest of 32 inputs. In a lane of a vector no more than n / 16
    products are summed up, each of them a code's and an offset's or a minimum's."""
    R, n = shape
    wide = decoded(form.name, blob, shape).abs()
    terms = wide + 2 * decoded(form.name, without_codes(form, blob), shape).abs()
    groups = x.double().abs().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
    sums = (n / 16 + 16) * 2.0**-24 * (x.double().abs() @ terms.T)
    return 1.001 * 2.0**-15 * (groups @ wide.T) + sums + 1e-30


@EVERY
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    rows=st.integers(1, 70),
    steps=st.integers(1, 4),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    biased=st.booleans(),
    seed=st.integers(0, 999),
)
def test_products_of_any_size(name, counts, rows, steps, dtype, biased, seed):
    form, rng = GGML[name], np.random.default_rng(seed)
    shape = rows, steps * max(64, form.block)
    T, bounds = int(rng.integers(1, 9)), np.cumsum([0, *counts])
    blobs = [placed(blocks(form, shape, rng)) for _ in counts]
    biases = torch.randn(len(counts), rows)
    x = torch.from_numpy(rng.standard_normal((T, shape[1]))).to(dtype)
    table = np.array([form.row(blob.ctypes.data, len(blob), shape) for blob in blobs])
    table[:, 2] = [bias.data_ptr() if biased else 0 for bias in biases]
    who = rng.integers(0, T, bounds[-1])
    of = Matrices(PACKED[form.kernel("", shape)], table, rows, biases=KINDS[torch.float32])
    y = multiply(of, bounds, x, who)
    for i, blob in enumerate(blobs):
        mine = slice(bounds[i], bounds[i + 1])
        inputs = x[who[mine]]
        wanted = inputs.double() @ decoded(name, blob, shape).T + biased * biases[i].double()
        near = tolerance(form, inputs, blob, shape) + 2.0**-24 * wanted.abs()
        assert ((y[mine].double() - wanted).abs() <= near).all()


@EVERY
def test_every_weight_is_read_right(name):
    """One input at a time: no rounding."""
    form = GGML[name]
    shape = 64, 512
    blob = placed(blocks(form, shape, np.random.default_rng(0)))
    of = Matrices(PACKED[name], np.array([form.row(blob.ctypes.data, len(blob), shape)]), 64)
    y = multiply(of, np.array([0, 512]), torch.eye(512)).T.double()
    floor = decoded(name, without_codes(form, blob), shape).abs()
    wanted = decoded(name, blob, shape)
    # A product and what is added are two roundings.
    assert ((y - wanted).abs() <= 2.0**-23 * (wanted.abs() + 2 * floor)).all()


@EVERY
def test_what_is_no_number_stays_none(name):
    form, shape = GGML[name], (64, 512)
    blob = blocks(form, shape, np.random.default_rng(1), scales=None)
    wide = decoded(name, blob, shape)
    of = Matrices(PACKED[name], np.array([form.row(blob.ctypes.data, len(blob), shape)]), 64)
    x = torch.randn(4, 512)
    x[1, 7], x[2, 300], x[3, 511] = torch.nan, torch.inf, -torch.inf
    y = multiply(of, np.array([0, 4]), x)
    finite = wide.isfinite().all(1) & (wide.abs().amax(1) < 1e30)
    assert y[0, finite].isfinite().all() and not y[0, ~wide.isfinite().all(1)].isfinite().any()
    assert not y[1:].isfinite().any()


PROGRAM = """
from numba import config
import sys
sys.path[:0] = {path!r}
config.CPU_FEATURES = {features!r}
from moelab.kernels.vectors import WIDTH
config.CPU_FEATURES = {compiled!r}
import numpy as np, torch
from moelab.kernels.compile import kernel
from moelab.kernels.products import KINDS, PACKED
from moelab.kernels.tiles import dots, spread
from moelab.store.ggml import GGML
from tests.kernels.ggml_blocks import blocks
from tests.kernels.test_ggml import decoded, tolerance
FP32 = KINDS[torch.float32].tag

@kernel
def run(kind, x, inputs, table, w, n, y):
    spread(FP32, kind, x, n, inputs)
    dots(1, 4, FP32, kind, table, w, 0, 0, n, y, 4, 64)

assert WIDTH == {width}, WIDTH
for name in {names}:
    form, shape = GGML[name], (4, 512)
    blob = blocks(form, shape, np.random.default_rng(0))
    x, inputs, y = torch.randn(1, 512), torch.empty(512), torch.empty(1, 4)
    table = np.array([inputs.data_ptr()])
    where = x.data_ptr(), inputs.data_ptr(), table.ctypes.data, blob.ctypes.data, 512, y.data_ptr()
    run(PACKED[name].tag, *where)
    wanted = x.double() @ decoded(name, blob, shape).T
    assert ((y.double() - wanted).abs() <= tolerance(form, x, blob, shape)).all(), name
"""
AVX = "+sse2,+ssse3,+sse4.1,+avx,+f16c"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86's features")
@pytest.mark.parametrize(
    "width, features, compiled", depth([(4, AVX, AVX)], [(4, AVX, AVX), (16, "+avx512bw", None)])
)
def test_vectors_of_other_widths(width, features, compiled):
    """Kernels for 128 bits, and for 512, which LLVM cuts into what this processor has."""
    root = str(Path(__file__).parents[2])
    names = depth(("Q6_K",), ("Q4_0", "Q6_K", "MXFP4"))  # each is compiled, for a minute
    program = PROGRAM.format(
        path=[root], features=features, compiled=compiled, width=width, names=names
    )
    kept = Path(__file__).with_name("__pycache__") / f"width-{width}"  # the next run has them
    env = os.environ | {"NUMBA_CACHE_DIR": str(kept)}
    if compiled:
        env["NUMBA_CPU_NAME"] = "x86-64"
    subprocess.run([sys.executable, "-c", program], check=True, env=env, cwd=root)
