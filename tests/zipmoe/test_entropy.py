"""Entropy against counting one by one."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moelab.store.headers import DTYPES
from moelab.zipmoe.entropy import describe, joint_counts, marginals
from notebooks.studies import entropy
from notebooks.studies.entropy import analyse

FIELDS = {"BF16": (8, 7), "F16": (5, 10), "F8_E4M3": (4, 3), "F8_E5M2": (5, 2), "F32": (8, 7)}


def shannon(values):
    counts, n = Counter(values), len(values)
    return -sum(c / n * math.log2(c / n) for c in counts.values())


def patterns(t):
    """The bits that are counted of each weight; of fp32 the upper half."""
    raw, step = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), t.element_size()
    found = [int.from_bytes(raw[i : i + step], "little") for i in range(0, len(raw), step)]
    return [x >> 16 for x in found] if step == 4 else found


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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 65535), min_size=1, max_size=200))
def test_any_bit_patterns_and_histograms_that_add_up(values):
    words = np.array(values, np.uint16)
    counts = joint_counts(words)
    assert all(counts[x] == n for x, n in Counter(values).items())
    check(describe(counts), values, "BF16")
    for dtype in set(FIELDS) - {"F32"}:
        of = words.astype(np.uint8) if dtype.startswith("F8") else words
        check(describe(joint_counts(of, dtype), dtype), of.tolist(), dtype)
    assert (joint_counts(words, counts=counts.copy()) == 2 * counts).all()
    assert [of.sum() for of in marginals(counts)] == [len(values)] * 3


def test_a_sharded_checkpoint_read_in_small_slices(tmp_path, monkeypatch):
    torch.manual_seed(0)
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight": torch.randn(20, 30).bfloat16()
        for layer in (0, 1, 10)
        for expert in range(2)
        for kind in ("up_proj", "down_proj")
    } | {"model.embed.weight": torch.randn(50, 8).half(), "model.layers.1.ids": torch.arange(9)}
    names, files = sorted(tensors), ("a.safetensors", "b.safetensors")
    where = {name: files[i >= 9] for i, name in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if where[n] == file}, tmp_path / file)
    index = json.dumps({"weight_map": where})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    monkeypatch.setattr(entropy, "SLICE", 256)
    by = {(row.scope, row.name, row.dtype): row for row in analyse(tmp_path)}
    bf16 = {n: patterns(t) for n, t in tensors.items() if t.dtype == torch.bfloat16}
    for scope, name, part in (
        *(("tensor", name, name) for name in bf16),
        *(("layer", f"model.layers.{layer}", f"layers.{layer}.") for layer in (0, 1, 10)),
        *(("kind", f"mlp.experts.{kind}.weight", kind) for kind in ("up_proj", "down_proj")),
        ("all", "all", ""),
    ):
        pooled = [x for one, values in bf16.items() if part in one for x in values]
        check(by[scope, name, "BF16"], pooled, "BF16")
    assert {name for scope, name, _ in by if scope == "tensor"} == {*bf16, "model.embed.weight"}


def test_errors(tmp_path):
    save_file({"ids": torch.zeros(3, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    with pytest.raises(ValueError, match="nothing to analyse"):
        analyse(tmp_path)
    with pytest.raises(ValueError, match="no float type 'I8'"):
        joint_counts(np.zeros(3, np.uint16), "I8")
