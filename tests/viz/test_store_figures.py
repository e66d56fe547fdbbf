"""Figures of compression draw the numbers they are given, and never tell series apart by colour
alone."""

import numpy as np
import pytest

pytest.importorskip("plotly.io")

from moelab.viz import store_figures as figures
from moelab.zipmoe.entropy import joint_counts
from tests.viz.lazily import Lazily

EXPONENTS = np.zeros(256)
EXPONENTS[[120, 121, 123]] = 2, 1, 1  # 2^-7, 2^-6, 2^-4: 1.5 bits
WEIGHTS = np.array([0x3F80, 0x3F80, 0xBF80, 0x4040], np.uint16)  # 1, 1, -1 and 3 in bf16
RATES = {"1 thread": {"zstd": 0.7, "huffman": 12.0}, "2 threads": {"zstd": 1.4, "huffman": 24.0}}
MADE = Lazily(
    {
        "exponents": lambda: figures.exponents({"experts": EXPONENTS, "flat": np.ones(256)}),
        "fractions": lambda: figures.fractions(
            {"lz4hc": 0.75, "huffman": 0.6671}, 0.665, {"lz4hc": 0.74, "entropy bound": 0.66}
        ),
        "trade": lambda: figures.trade(
            {"bf16": 1.0, "bf12": 0.75}, {"bf16": [2e-3, 3e-3, 4e-3], "bf12": [2e-3] * 3}, 0.66
        ),
        "rates": lambda: figures.rates(RATES, {"memcpy": 30}),
        "delivery": lambda: figures.delivery(
            [0.5, 1, 8],
            {"as it is": [0.5, 1, 8], "huffman": [0.75, 1.5, 4]},
            {"huffman": [(0.9, 1.2)]},
        ),
        "timeline": lambda: figures.timeline(
            {"disk": [("read", 0, 5), ("read", 5, 9)], "thread": [("decode", 5, 8)]}
        ),
        "microscope": lambda: figures.microscope(joint_counts(WEIGHTS)),
    }
)


def test_exponents_are_shares_at_their_powers_of_two_with_the_entropy_in_the_legend():
    (alone,) = figures.exponents({"experts": EXPONENTS}).data
    np.testing.assert_array_equal(alone.x, [-7, -6, -5, -4])
    np.testing.assert_allclose(alone.y, [50, 25, 0, 25])
    assert alone.name == "experts: 1.50 of 8 bits"
    half = np.eye(32)[15]  # fp16: 1.0 has exponent 0
    assert figures.exponents({"fp16": half}).data[0].x.tolist() == [0]


def test_size_and_time_of_each_way_of_keeping_experts():
    bf16, bf12 = MADE["trade"].data
    assert [(trace.x[0], trace.y[0]) for trace in (bf16, bf12)] == [
        (100, pytest.approx(3)),
        (75, pytest.approx(2)),
    ]
    assert [shape.x0 for shape in MADE["trade"].layout.shapes] == [66]


def test_rates_are_grouped_by_codec_with_references_across():
    assert [dict(zip(trace.x, trace.y)) for trace in MADE["rates"].data] == list(RATES.values())
    assert MADE["rates"].data[0].text == ("0.70", "12")
    assert [note.text for note in MADE["rates"].layout.annotations] == ["memcpy: 30.0 GB/s"]


def test_the_timeline_puts_each_kind_at_its_time():
    read, decode = MADE["timeline"].data
    assert (read.y, read.base, read.x) == (("disk", "disk"), (0, 5), (5, 4))
    assert (decode.y, decode.base, decode.x) == (("thread",), (5,), (3,))


def test_the_microscope_counts_signs_exponents_and_mantissas():
    sign, exponent, mantissa = MADE["microscope"].data
    np.testing.assert_allclose(sign.y, [75, 25])
    assert dict(zip(exponent.x.tolist(), exponent.y)) == {0: 75, 1: 25}
    assert {i: y for i, y in enumerate(mantissa.y) if y} == {0: 75, 64: 25}  # 3 is 1.1000000 · 2^1
    assert [note.text for note in MADE["microscope"].layout.annotations] == [
        "sign: 0.811 of 1 bit",
        "exponent: 0.811 of 8 bits",
        "mantissa: 0.811 of 7 bits",
    ]
