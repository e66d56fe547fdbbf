"""Entropy against counting one by one."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.store.headers import DTYPES
from moelab.zipmoe.entropy import joint_counts
from notebooks.studies.entropy import describe, marginals

FIELDS = {"BF16": (8, 7), "F16": (5, 10), "F8_E4M3": (4, 3), "F8_E5M2": (5, 2), "F32": (8, 7)}


def shannon(values):
    counts, n = Counter(values), len(values)
    return -sum(c / n * math.log2(c / n) for c in counts.values())


def check(row, values, dtype):
    e, m = FIELDS[dtype]
    exponents = [x >> m & (1 << e) - 1 for x in values]
    assert row.weights == len(values)
    assert row.sign == pytest.approx(shannon([x >> (e + m) for x in values]), abs=1e-9)
    assert row.exponent == pytest.approx(shannon(exponents), abs=1e-9)
    assert row.mantissa == pytest.approx(shannon([x & (1 << m) - 1 for x in values]), abs=1e-9)
    assert row.joint == pytest.approx(shannon(values), abs=1e-9)
    assert row.support == len(set(exponents)) / (1 << e)
    bits = 8 * DTYPES[dtype].itemsize
    assert row.bound == pytest.approx((bits - e + shannon(exponents)) / bits)


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=200))
def test_any_bit_patterns_and_histograms_that_add_up(values):
    words = np.array(values, np.uint16)
    counts = joint_counts(words)
    assert all(counts[x] == n for x, n in Counter(values).items())
    check(describe(counts), values, "BF16")
    for dtype in set(FIELDS) - {"F32"}:
        of = words.astype(np.uint8) if dtype.startswith("F8") else words
        check(describe(joint_counts(of, dtype), dtype), of.tolist(), dtype)
    assert [of.sum() for of in marginals(counts)] == [len(values)] * 3


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="no float type 'I8'"):
        joint_counts(np.zeros(3, np.uint16), "I8")
