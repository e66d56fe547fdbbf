"""The bench of weight formats on the small model: its figures are those of the parts it is made
of."""

from notebooks.studies import quantization


def test_fewer_bits_err_and_lose_more():
    found = quantization.run(tasks=("loss", "lookup"), prompts=8, tokens=64, calibration=4)
    errors, rows = found.values()
    assert len(errors) == 4 * 7
    for layer in [*(f"layer {i}" for i in range(6)), "all"]:
        int8, mxfp4 = (errors[f"{name}, {layer}"] for name in ("int8", "mxfp4"))
        for key in ("weights", "experts", "layer"):
            assert 0 < 4 * int8[key] < mxfp4[key] < 20
    assert list(rows) == ["raw", "bf12", "huffman", "int8", "fp8", "mxfp4", "int4"]
    bits = {name: row["bits a weight"] for name, row in rows.items()}
    assert (bits["raw"], bits["int8"], bits["mxfp4"], bits["int4"]) == (16, 8.5, 4.25, 4.5)
    assert 12 < bits["bf12"] < 12.2 and 8 < bits["fp8"] < 8.01 and 10 < bits["huffman"] < 12
    assert rows["raw"]["bytes"] == 6 * 32 * 6 * 128 * 64
    scores = {name: row["loss: score"] for name, row in rows.items()}
    assert scores["raw"] == scores["huffman"] == scores["bf12"]
    off = {name: rows[name]["loss: difference error"] for name in ("int8", "int4", "mxfp4")}
    assert 0 < off["int8"] < min(off["int4"], off["mxfp4"])
