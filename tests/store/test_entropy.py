import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moelab.store import entropy
from moelab.store.entropy import analyse, describe, joint_counts, marginals
from moelab.store.headers import read_header

FIELDS = {
    "BF16": (torch.bfloat16, 8, 7),
    "F16": (torch.float16, 5, 10),
    "F8_E4M3": (torch.float8_e4m3fn, 4, 3),
    "F8_E5M2": (torch.float8_e5m2, 5, 2),
}


def shannon(values) -> float:
    counts, n = Counter(values), len(values)
    return -sum(c / n * math.log2(c / n) for c in counts.values())


def patterns(t: torch.Tensor) -> list[int]:
    raw = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    step = t.element_size()
    return [int.from_bytes(raw[i : i + step], "little") for i in range(0, len(raw), step)]


def check(row, values: list[int], e: int, m: int, bits: int) -> None:
    exponents = [x >> m & (1 << e) - 1 for x in values]
    assert row.weights == len(values)
    assert row.sign == pytest.approx(shannon([x >> (e + m) for x in values]), abs=1e-9)
    assert row.exponent == pytest.approx(shannon(exponents), abs=1e-9)
    assert row.mantissa == pytest.approx(shannon([x & (1 << m) - 1 for x in values]), abs=1e-9)
    assert row.joint == pytest.approx(shannon(values), abs=1e-9)
    assert row.support == len(set(exponents)) / (1 << e)
    assert row.bound == pytest.approx((bits - e + shannon(exponents)) / bits)


@pytest.mark.parametrize("dtype", FIELDS)
def test_against_counting_one_by_one(dtype):
    torch_type, e, m = FIELDS[dtype]
    weights = (torch.randn(3, 700, generator=torch.Generator().manual_seed(1)) * 0.1).to(torch_type)
    row = describe(joint_counts(weights, dtype), dtype)
    check(row, patterns(weights), e, m, 1 + e + m)


def test_fp32_counts_the_upper_half():
    weights = torch.randn(999) * 0.1
    row = describe(joint_counts(weights, "F32"), "F32")
    values = [x >> 16 for x in patterns(weights)]
    check(row, values, 8, 7, 32)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 65535), min_size=1, max_size=200))
def test_any_bit_patterns(values):
    counts = joint_counts(np.array(values, np.uint16))
    assert counts.sum() == len(values) and all(counts[x] == n for x, n in Counter(values).items())
    check(describe(counts), values, 8, 7, 16)


def test_histograms_add_up():
    a, b = np.arange(0, 40000, dtype=np.uint16), np.arange(30000, 65535, dtype=np.uint16)
    counts = joint_counts(b, counts=joint_counts(a))
    assert (counts == joint_counts(np.concatenate([a, b]))).all()
    sign, exponent, mantissa = marginals(counts)
    assert (len(sign), len(exponent), len(mantissa)) == (2, 256, 128)
    assert sign.sum() == exponent.sum() == mantissa.sum() == len(a) + len(b)


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    prefix = "model.layers.{}.mlp.experts.{}.{}.weight"
    tensors = {
        prefix.format(layer, expert, kind): (torch.randn(20, 30) * (1 + expert)).bfloat16()
        for layer in (0, 1, 10)
        for expert in range(3)
        for kind in ("up_proj", "down_proj")
    }
    tensors |= {
        "model.layers.0.norm.weight": torch.ones(30),
        "model.embed.weight": torch.randn(50, 8).half(),
        "model.layers.1.ids": torch.arange(9),
        "empty.weight": torch.zeros(0, 4, dtype=torch.bfloat16),
    }
    names = sorted(tensors)
    save_file(
        {n: tensors[n] for n in names[:9]},
        tmp_path / "model-00001-of-00002.safetensors",
        {"format": "pt"},
    )
    save_file({n: tensors[n] for n in names[9:]}, tmp_path / "model-00002-of-00002.safetensors")
    where = {n: f"model-0000{1 + (i >= 9)}-of-00002.safetensors" for i, n in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return tmp_path, tensors


def test_a_sharded_checkpoint_read_in_small_slices(checkpoint, monkeypatch):
    folder, tensors = checkpoint
    monkeypatch.setattr(entropy, "SLICE", 256)
    rows = analyse(folder)
    by = {(row.scope, row.name, row.dtype): row for row in rows}
    assert len(by) == len(rows)
    floats = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert {row.name for row in rows if row.scope == "tensor"} == floats
    bf16 = {n: patterns(t) for n, t in tensors.items() if t.dtype == torch.bfloat16}
    for name, values in bf16.items():
        if values:
            check(by["tensor", name, "BF16"], values, 8, 7, 16)
    assert by["tensor", "empty.weight", "BF16"].weights == 0

    def pooled(part):
        return [x for name, values in bf16.items() if part in name for x in values]

    for layer in (0, 1, 10):
        row = by["layer", f"model.layers.{layer}", "BF16"]
        check(row, pooled(f"layers.{layer}."), 8, 7, 16)
        assert row.layer == layer
    for kind in ("up_proj", "down_proj"):
        check(by["kind", f"mlp.experts.{kind}.weight", "BF16"], pooled(kind), 8, 7, 16)
    check(by["all", "all", "BF16"], pooled(""), 8, 7, 16)
    check(by["all", "all", "F16"], patterns(tensors["model.embed.weight"]), 5, 10, 16)
    assert [row.layer for row in rows if row.scope == "layer" and row.dtype == "BF16"] == [0, 1, 10]


def test_one_file_of_several(checkpoint):
    folder, _ = checkpoint
    one = folder / "model-00001-of-00002.safetensors"
    assert {row.name for row in analyse(one) if row.scope == "tensor"} <= set(read_header(one))


def test_errors(checkpoint, tmp_path):
    folder, _ = checkpoint
    (integers := tmp_path / "integers").mkdir()
    save_file({"ids": torch.zeros(3, dtype=torch.int64)}, integers / "ids.safetensors")
    with pytest.raises(ValueError, match="nothing to analyse"):
        analyse(integers)
    with pytest.raises(ValueError, match="no float type 'I8'"):
        joint_counts(np.zeros(3, np.uint16), "I8")
    first, second = sorted(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(ValueError, match="file not fully covered; download"):
        analyse(folder)
    first.write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match="no whole safetensors file"):
        analyse(folder)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="lacks model-00002"):
        analyse(folder)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="no .safetensors"):
        analyse(tmp_path / "nothing")
