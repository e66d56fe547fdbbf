"""A calibration as llama.cpp's importance matrix, which its quantizer reads (`llama-quantize --imatrix`).

Source: llama.cpp, tools/imatrix. For each matrix Σx² of each column of its inputs, and how many there
were: of the experts' matrices an expert each, [E, n] and [E, 1], and of the router, which is given the
same inputs as gate and up. Other matrices are not among a calibration's inputs, and llama.cpp rounds
them without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moelab.base.files import absolute, atomic
from moelab.calibration import Calibration
from moelab.checkpoint.quantize import inputs_of
from moelab.models.seam import discover, plugged


@torch.no_grad()
def write_imatrix(path: str | Path, model: Any, calibration: Calibration) -> Path:
    """Write a .gguf of a calibration with inputs, of this model; returns its path. ValueError: experts
    of another kind than llama.cpp's."""
    from gguf import GGUFWriter

    inputs, spec = calibration.inputs, calibration.spec
    found = {}
    with plugged(model):
        for layer, number in zip(discover(model), spec.moe_layers):
            x = inputs.x[layer.index].float()
            given = [x[(inputs.ids[layer.index] == e).any(1)] for e in range(layer.E)]
            for name, keys in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
                if name not in layer.seam.shapes:
                    raise ValueError(f"{spec.model_type}: its experts have no {name}")
                rows = [
                    inputs_of(name, layer.seam.weights(e), layer.seam, of)
                    for e, of in enumerate(given)
                ]
                for key in keys:
                    found[f"blk.{number}.ffn_{key}_exps"] = rows
            found[f"blk.{number}.ffn_gate_inp"] = [x]
    with atomic(path) as part:
        writer = GGUFWriter(part, spec.model_type)
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [calibration.source])
        writer.add_uint32("imatrix.chunk_count", 1)
        writer.add_uint32("imatrix.chunk_size", inputs.x.shape[1])
        for name, rows in found.items():
            sums = torch.stack([of.square().sum(0) for of in rows])
            counts = torch.tensor([[len(of)] for of in rows]).float()
            writer.add_tensor(f"{name}.weight.in_sum2", sums.numpy())
            writer.add_tensor(f"{name}.weight.counts", counts.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return absolute(path)
