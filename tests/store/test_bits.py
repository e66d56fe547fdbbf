import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.store import bits

ALL = np.arange(65536, dtype=np.uint16)
EXPONENTS = [int(x) >> 7 & 0xFF for x in ALL]
SIGN_MANTISSA = [(int(x) & 0x7F) << 1 | int(x) >> 15 for x in ALL]


def test_all_patterns():
    e, sm = bits.split(ALL)  # NaNs with every payload, infinities, denormals, −0
    assert e.tolist() == EXPONENTS and sm.tolist() == SIGN_MANTISSA
    bits.join(e, sm, joined := np.empty_like(ALL))
    assert (joined == ALL).all()


@given(st.integers(0, 2000), st.integers(0, 7), st.booleans(), st.integers(0, 10**6))
def test_any_slice_at_any_address(n, before, odd, seed):
    x = np.random.default_rng(seed).integers(0, 65536, n, dtype=np.uint16)
    memory = np.full(2 * (before + n + 5) + odd, 0x5A, np.uint8)
    part = memory[odd : len(memory) - 10].view(np.uint16)[before:]
    part[:] = x
    e, sm = bits.split(part)
    part.view(np.uint8)[n:] = e
    bits.recover(sm, part)
    assert (part == x).all()
    for around in (memory[: 2 * before + odd], memory[-10:]):
        assert (around == 0x5A).all()


def test_errors():
    with pytest.raises(ValueError, match="not contiguous"):
        bits.as_bytes(torch.zeros(4, 4, dtype=torch.bfloat16).T[1:])
    with pytest.raises(ValueError, match="read-only"):
        bits.as_bytes(bytes(16), writable=True)
