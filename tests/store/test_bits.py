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


def test_all_patterns():
    e, sm = bits.split(ALL)  # NaNs with every payload, infinities, denormals, −0
    assert (
        e.tolist() == EXPONENTS and sm.tolist() == SIGN_MANTISSA and e.dtype == sm.dtype == np.uint8
    )
    assert (bits.join(e, sm, np.empty_like(ALL)) == ALL).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2000), st.integers(0, 7), st.integers(0, 7), st.booleans(), st.integers(0, 10**6)
)
def test_any_slice_at_any_address(n, before, after, odd, seed):
    x = np.random.default_rng(seed).integers(0, 65536, n, dtype=np.uint16)
    memory = np.full(2 * (before + n + after) + odd, 0x5A, np.uint8)
    part = memory[odd:].view(np.uint16)[before : before + n]
    part[:] = x
    room = np.full(before + n + after, 0x5A, np.uint8)
    e, sm = bits.split(part, room[before : before + n])
    assert np.shares_memory(e, room) or not n
    assert e.tolist() == [int(v) >> 7 & 0xFF for v in x] and sm.tolist() == [
        (int(v) & 0x7F) << 1 | int(v) >> 15 for v in x
    ]
    part[:] = 0
    assert bits.join(e, sm, part) is part and (part == x).all()
    for around in (
        room[:before],
        room[before + n :],
        memory[: 2 * before + odd],
        memory[2 * (before + n) + odd :],
    ):
        assert (around == 0x5A).all()


def test_errors():
    square = torch.zeros(4, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not contiguous"):
        bits.as_bytes(square.T[1:])
    with pytest.raises(ValueError, match="read-only"):
        bits.as_bytes(bytes(16), writable=True)
    with pytest.raises(ValueError, match="16 exponent bytes"):
        bits.split(ALL[:16], np.empty(15, np.uint8))
    with pytest.raises(ValueError, match="buffers have"):
        bits.join(np.empty(3, np.uint8), np.empty(4, np.uint8), np.empty(4, np.uint16))


def test_the_triton_kernel(triton_device):
    from moelab.store import bits_triton

    for n in (0, 1, 4097, 65536):
        e, sm = (
            torch.tensor(of[:n], dtype=torch.uint8, device=triton_device)
            for of in (EXPONENTS, SIGN_MANTISSA)
        )
        joined = bits_triton.join(e, sm, torch.empty(n, dtype=torch.bfloat16, device=triton_device))
        assert joined.view(torch.int16).cpu().numpy().view(np.uint16).tolist() == ALL[:n].tolist()
        with pytest.raises(ValueError, match="must be"):
            bits_triton.join(e, sm, torch.empty(n + 1, dtype=torch.bfloat16, device=triton_device))


def python(code: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_a_cache_folder_that_cannot_be_written():
    """numba refuses to make a cached function where no folder can be written: here, a file in
    /dev/null/."""
    pytest.importorskip("numba")
    python(
        """
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
""",
        NUMBA_CACHE_DIR="/dev/null/cache",
        HOME="/dev/null",
        XDG_CACHE_HOME="/dev/null/cache",
        XDG_DATA_HOME="/dev/null/x",
    )
