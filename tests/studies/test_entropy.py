"""Entropies of a checkpoint's tensors, layers and kinds, against counting one by one."""

import json

import pytest
import torch
from safetensors.torch import save_file

from notebooks.studies import entropy
from notebooks.studies.entropy import analyse
from tests.zipmoe.test_entropy import check


def patterns(t):
    """The bits that are counted of each weight; of fp32 the upper half."""
    raw, step = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), t.element_size()
    found = [int.from_bytes(raw[i : i + step], "little") for i in range(0, len(raw), step)]
    return [x >> 16 for x in found] if step == 4 else found


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


def test_without_floats_there_is_nothing_to_analyse(tmp_path):
    save_file({"ids": torch.zeros(3, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    with pytest.raises(ValueError, match="nothing to analyse"):
        analyse(tmp_path)
