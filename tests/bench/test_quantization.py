"""The bench of weight formats on the small model: its figures are those of the parts it is made
of."""

from __future__ import annotations

import pytest

from moelab.bench import quantization


@pytest.fixture(scope="module")
def results():
    return quantization.run(
        formats="bf16,int8,mxfp4", tasks="loss,lookup", prompts=8, tokens=64, calibration=4
    )


def test_bytes_are_those_of_the_format(results):
    rows = results["bytes of an expert (exact)"]
    H, I = 128, 64
    assert {name: row["bytes"] for name, row in rows.items()} == {
        "bf16": 6 * H * I,
        "int8": 3 * H * I * 17 // 16,
        "mxfp4": 3 * H * I * 17 // 32,
    }
    assert rows["bf16"]["of the model's own"] == 1.0
    assert rows["mxfp4"]["bits a weight"] == 4.25
    assert all(row["all experts, bytes"] == 6 * 32 * row["bytes"] for row in rows.values())


def test_errors_grow_as_bits_shrink_and_bf16_has_none(results):
    rows = results["relative RMS error by layer, per cent (measured)"]
    assert len(rows) == 3 * 7
    for layer in [*(f"layer {i}" for i in range(6)), "all"]:
        exact, int8, mxfp4 = (rows[f"{name}, {layer}"] for name in ("bf16", "int8", "mxfp4"))
        for key in ("weights", "experts", "layer"):
            assert exact[key] == 0.0
            assert 0 < 4 * int8[key] < mxfp4[key] < 20


def test_a_store_in_fewer_bits_loses_more(results):
    rows = results["as a store holds them (bytes exact, scores measured)"]
    assert list(rows) == ["raw", "bf12", "huffman", "int8", "fp8", "mxfp4", "int4"]
    assert {
        name: row["bits a weight"]
        for name, row in rows.items()
        if name not in ("bf12", "huffman", "fp8")
    } == {"raw": 16, "int8": 8.5, "mxfp4": 4.25, "int4": 4.5}
    assert 12 < rows["bf12"]["bits a weight"] < 12.2
    assert 8 < rows["fp8"]["bits a weight"] < 8.01 and 10 < rows["huffman"]["bits a weight"] < 12
    assert (
        rows["raw"]["loss: score"] == rows["huffman"]["loss: score"] == rows["bf12"]["loss: score"]
    )
    off = {
        name: row["loss: difference error"]
        for name, row in rows.items()
        if name not in ("raw", "bf12", "huffman")
    }
    assert 0 < off["int8"] < min(off["int4"], off["mxfp4"])
