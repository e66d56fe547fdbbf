"""Checkpoints in the layouts of compressed-tensors, GPTQ and AWQ with random codes, and the weights
that they mean, by the published formulas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import tiny

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble k of a word is column AWQ[k] of its eight


def words(codes: Tensor, bits: int, order: Any = None) -> Tensor:
    """Codes [R, n] in words int32 along n, 32/bits each, the first in the lowest bits or in another
    order."""
    per = 32 // bits
    out = torch.zeros(codes.shape[0], codes.shape[1] // per, dtype=torch.int64)
    for k in range(per):
        out |= codes[:, (order[k] if order else k) :: per].long() << bits * k
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def meant(
    codes: Tensor, zeros: Tensor, scales: Tensor, group: list[int], dtype: torch.dtype
) -> Tensor:
    """Weights [R, n] of codes [R, n], and of zero points and scales [R, groups] by the group of
    each input."""
    product = (codes.double() - zeros.double()[:, group]) * scales.double()[:, group]
    return product.float().to(scales.dtype).to(dtype)


def layer(
    kind: str,
    R: int,
    n: int,
    group: int,
    generator: torch.Generator,
    bits: int = 4,
    symmetric: bool = True,
    scales: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of a quantised layer by name, its weights). kind : "pack", "int", "float", "gptq",
        "gptq_v2",
    "act-order", "awq". group : inputs of a scale; n for one an output, 0 for one in all, −128 for
        128 × 128."""

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, 1 << bits, shape, generator=generator)

    G = n // group if group > 0 else 1
    s = (0.002 + 0.01 * torch.rand(R, G, generator=generator)).to(scales)
    middle, zeros = 1 << bits - 1, draw(R, G)
    zeros = torch.full_like(zeros, middle) if symmetric else zeros
    groups = [i // group if group > 0 else 0 for i in range(n)]
    if kind in ("int", "float"):
        codes = (
            torch.randint(-128, 128, (R, n), generator=generator)
            if kind == "int"
            else torch.randn(R, n, generator=generator) * 100
        ).to(torch.int8 if kind == "int" else torch.float8_e4m3fn)
        found = {"weight": codes, "weight_scale": s}
        if group == 0:
            found["weight_scale"], s = s[:1, 0].clone(), s[:1].expand(R, 1)
        if group < 0:
            grid = (0.002 + 0.01 * torch.rand(-(-R // 128), -(-n // 128), generator=generator)).to(
                scales
            )
            found["weight_scale"], groups = grid, [i // 128 for i in range(n)]
            s = torch.stack([grid[r // 128] for r in range(R)])
        zeros = zeros - middle if kind == "int" and not symmetric else torch.zeros_like(s)
        if kind == "int" and not symmetric:
            found["weight_zero_point"] = zeros.to(torch.int8)
        return found, meant(codes.float(), zeros, s, groups, dtype)
    codes = draw(R, n)
    if kind == "act-order":
        groups = [groups[i] for i in torch.randperm(n, generator=generator).tolist()]
    truth = meant(codes, zeros, s, groups, dtype)
    if kind == "pack":
        found = {
            "weight_packed": words(codes, bits),
            "weight_scale": s,
            "weight_shape": torch.tensor([R, n]),
        }
        return found | (
            {} if symmetric else {"weight_zero_point": words(zeros.T, bits).T.contiguous()}
        ), truth
    order = AWQ if kind == "awq" else None
    less = 0 if kind in ("awq", "gptq_v2") else 1
    found = {
        "qzeros": words((zeros.T - less) % (1 << bits), bits, order),
        "scales": s.T.contiguous(),
    }
    if kind == "awq":
        return found | {"qweight": words(codes.T, bits, order)}, truth
    found |= {
        "qweight": words(codes, bits).T.contiguous(),
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    return found, truth


def config(kind: str, group: int | None, bits: int = 4, symmetric: bool = True) -> dict[str, Any]:
    """The quantization_config of such layers."""
    if kind == "awq":
        return {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group or -1,
            "version": "gemm",
            "zero_point": True,
        }
    if kind in ("gptq", "gptq_v2", "act-order"):
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group or -1,
            "sym": symmetric,
            "desc_act": kind == "act-order",
            "checkpoint_format": "gptq_v2" if kind == "gptq_v2" else "gptq",
        }
    strategy = {0: "tensor", -128: "block", None: "channel"}.get(group, "group")
    weights = {
        "num_bits": bits if kind == "pack" else 8,
        "type": "float" if kind == "float" else "int",
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": group if strategy == "group" else None,
        "block_structure": [128, 128] if strategy == "block" else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
    }


def save(
    folder: Path,
    kind: str,
    group: int | None = 32,
    architecture: str = "qwen3_moe",
    skip: str = "\0",
    seed: int = 0,
    H: int = 64,
    I: int = 64,
    **options: Any,
) -> tuple[Path, Path]:
    """(a checkpoint all of whose linear layers are such, but routers and what has `skip` in its
    name; a bf16 checkpoint of the weights that it means)."""
    plain = tiny.save(
        architecture,
        folder.with_name(folder.name + "-bf16"),
        torch.bfloat16,
        seed,
        hidden_size=H,
        moe_intermediate_size=I,
        intermediate_size=128,
        head_dim=16,
    )
    shutil.copytree(plain, folder)
    generator, tensors, truth = torch.Generator().manual_seed(seed), {}, {}
    for key, w in load_file(plain / "model.safetensors").items():
        if not key.endswith("_proj.weight") or skip in key:
            tensors[key] = truth[key] = w
            continue
        R, n = w.shape
        found, truth[key] = layer(kind, R, n, n if group is None else group, generator, **options)
        tensors |= {f"{key.removesuffix('weight')}{name}": t for name, t in found.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(truth, plain / "model.safetensors", {"format": "pt"})
    cfg = json.loads((folder / "config.json").read_text())
    cfg["quantization_config"] = config(
        kind, group, options.get("bits", 4), options.get("symmetric", True)
    )
    (folder / "config.json").write_text(json.dumps(cfg))
    return folder, plain
