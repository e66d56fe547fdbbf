import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.store import bits

ALL = np.arange(65536, dtype=np.uint16)
EXPONENTS = [int(x) >> 7 & 0xFF for x in ALL]
SIGN_MANTISSA = [(int(x) & 0x7F) << 1 | int(x) >> 15 for x in ALL]


def tensor(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16)


def words(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.int16).numpy().view(np.uint16)


def test_all_patterns():
    e, sm = bits.split(ALL)
    assert e.tolist() == EXPONENTS and sm.tolist() == SIGN_MANTISSA
    assert e.dtype == sm.dtype == np.uint8
    joined = bits.join(e, sm)
    assert joined.dtype == np.uint16 and (joined == ALL).all()


def test_all_patterns_as_a_tensor():
    weights = tensor(ALL)               # NaNs with every payload, infinities, denormals, −0
    e, sm = bits.split(weights)
    assert isinstance(e, torch.Tensor) and e.tolist() == EXPONENTS and sm.tolist() == SIGN_MANTISSA
    assert (words(bits.join(e, sm)) == ALL).all()
    assert bits.join(e, sm).dtype == torch.bfloat16


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=0, max_size=4), st.integers(0, 7), st.integers(0, 7), st.integers(0, 10**6))
def test_any_shape_and_any_contiguous_slice(shape, before, after, seed):
    n = int(np.prod(shape, dtype=int))
    whole = tensor(np.random.default_rng(seed).integers(0, 65536, before + n + after, dtype=np.uint16))
    part = whole[before:before + n].view(shape)             # may be empty
    bytes_ = torch.full((2, before + n + after), 0x5A, dtype=torch.uint8)
    e, sm = (row[before:before + n] for row in bytes_)
    out = torch.zeros(before + n + after, dtype=torch.bfloat16)
    assert bits.split(part, e, sm)[0] is e
    target = out[before:before + n].view(shape)
    assert bits.join(e, sm, target) is target
    assert e.tolist() == [int(x) >> 7 & 0xFF for x in words(part).ravel()]
    assert (words(target) == words(part)).all()
    assert (bytes_[:, :before] == 0x5A).all() and (bytes_[:, before + n:] == 0x5A).all()
    assert (out[:before] == 0).all() and (out[before + n:] == 0).all()


def test_long_tensors_and_odd_addresses():
    n = (1 << 17) + 12345
    x = np.random.default_rng(0).integers(0, 65536, n, dtype=np.uint16)
    store = np.zeros(2 * n + 1, np.uint8)
    odd = store[1:].view(np.uint16)
    odd[:] = x
    e, sm = bits.split(odd)
    assert (e == (x >> 7).astype(np.uint8)).all()
    odd[:] = 0
    bits.join(e, sm, odd)
    assert (odd == x).all()


def test_bytes_and_read_only_inputs():
    x = ALL[:1000].copy()
    x.flags.writeable = False
    e, sm = bits.split(x, bytearray(1000), bytearray(1000))
    assert (bits.join(bytes(e), memoryview(sm)) == x).all()
    assert (bits.join(bytes(e), sm, np.zeros(1000, np.float16)).view(np.uint16) == x).all()


def test_errors():
    square = torch.zeros(4, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not contiguous"):
        bits.split(square.T[1:])
    with pytest.raises(ValueError, match="4 bytes wide"):
        bits.split(torch.zeros(3))
    with pytest.raises(ValueError, match="16 exponent bytes"):
        bits.split(square, bytearray(15), bytearray(16))
    with pytest.raises(ValueError, match="buffers have"):
        bits.join(bytes(3), bytes(4))
    with pytest.raises(ValueError, match="read-only"):
        bits.split(square, bytes(16), bytes(16))


def test_triton_kernels_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from moelab.store import bits_triton
    for n in (0, 1, 4097, 65536):
        e, sm = bits_triton.split(tensor(ALL[:n]))
        assert e.tolist() == EXPONENTS[:n] and sm.tolist() == SIGN_MANTISSA[:n]
        assert (words(bits_triton.join(e, sm)) == ALL[:n]).all()


def python(code: str, **environment: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_a_cache_folder_that_cannot_be_written():
    """numba refuses to make a cached function where no folder can be written: here, a file in /dev/null/."""
    pytest.importorskip("numba")
    python("""
from moelab.kernels.compile import kernel
scope = {}
exec(compile("def double(x): return 2 * x", "/dev/null/nowhere.py", "exec"), scope)
import numba
try:
    numba.njit(scope["double"], cache=True)
    raise SystemExit("numba found a folder after all: this test shows nothing")
except RuntimeError:
    pass
assert kernel(scope["double"])(21) == 42
""", NUMBA_CACHE_DIR="/dev/null/cache", HOME="/dev/null", XDG_CACHE_HOME="/dev/null/cache", XDG_DATA_HOME="/dev/null/x")
