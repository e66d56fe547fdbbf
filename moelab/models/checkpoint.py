"""A checkpoint folder: checked before it is trusted, its experts read one at a time.

`CheckpointExperts` is a source for the seam: it gives any expert of any hub checkpoint in the layout the model
computes with, whether the checkpoint keeps an expert's tensors apart (Mixtral's w1, w3, w2), fused (GPT-OSS,
Llama 4) or quantised (MXFP4), by transformers' own renaming and conversion tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moelab.models import compat
from moelab.models.seam import Weights, discover


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and whole safetensors files."""

    folder: Path
    files: tuple[Path, ...]

    @classmethod
    def at(cls, folder: str | Path) -> Checkpoint:
        """Find and check the files of a checkpoint; reads headers only.

        Raises
        ------
        FileNotFoundError : no folder, no config.json, no safetensors files, or a shard that the index names is gone.
        ValueError : a file is cut off or not safetensors.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no checkpoint folder at {folder}")
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} has no config.json, so it is no transformers checkpoint")
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (json.JSONDecodeError, KeyError) as error:
                raise ValueError(f"{index} is damaged ({error}); download the checkpoint again") from error
            files = [folder / name for name in names]
            missing = [f.name for f in files if not f.is_file()]
            if missing:
                raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, which its index names; "
                                        f"download the checkpoint again")
        else:
            files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has no .safetensors files (weights in .bin or GGUF form are not read); "
                                    f"convert it with transformers' save_pretrained first")
        for file in files:
            check_safetensors(file)
        return cls(folder, tuple(files))

    def keys(self) -> Iterator[tuple[str, Path]]:
        """(key, file) of every tensor."""
        for file in self.files:
            for key in read_header(file):
                if key != "__metadata__":
                    yield key, file


def read_header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file; ValueError for a person where it cannot be read."""
    with open(file, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        limit = file.stat().st_size - 8
        if not 2 <= size <= limit:
            raise ValueError(f"{file} is no whole safetensors file: its header claims {size:,} bytes of "
                             f"{max(limit, 0):,}; download or write it again")
        try:
            header = json.loads(f.read(size))
        except ValueError as error:
            raise ValueError(f"{file} is damaged: its header is no JSON ({error}); download or write it again"
                             ) from error
    return {**header, "__metadata__": {**header.get("__metadata__", {}), "moelab.header": str(size)}}


def check_safetensors(file: Path) -> None:
    """Raise ValueError unless the header is readable and the file is exactly as long as it says."""
    header = read_header(file)
    size = int(header.pop("__metadata__")["moelab.header"])
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    actual = file.stat().st_size - 8 - size
    if actual != end:
        raise ValueError(f"{file} is damaged: it holds {actual:,} bytes of tensors, its header promises {end:,}; "
                         f"download or write it again")


class CheckpointExperts:
    """Source of one expert after another, straight from a checkpoint: `source(layer, expert) → tensors`.

    Nothing is cached: this is the slow and simple source, the oracle for faster ones.

    dtype : what the tensors are cast to, as loading the whole model would cast them; None keeps the stored one.
    device : where they are put.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, dtype: torch.dtype | None = None,
                 device: torch.device | str = "cpu") -> None:
        self.checkpoint, self.config, self.dtype, self.device = checkpoint, config, dtype, device

    @cached_property
    def _plans(self) -> list[tuple[str, dict[str, compat.ParameterPlan]]]:
        plans = compat.expert_plan(self._twin, self._files, [layer.name + ".experts" for layer in self._layers],
                                   self._quantizer)
        return [(layer.name + ".experts", plans[layer.name + ".experts"]) for layer in self._layers]

    @cached_property
    def _twin(self) -> torch.nn.Module:
        return compat.meta_twin(self.config)

    @cached_property
    def _layers(self):
        return discover(self._twin)

    @cached_property
    def _quantizer(self):
        return compat.quantizer_for(self.config)

    @cached_property
    def _files(self) -> dict[str, Path]:
        return dict(self.checkpoint.keys())

    @cached_property
    def _handles(self) -> dict[Path, Any]:
        from safetensors import safe_open
        return {file: safe_open(file, "pt") for file in self.checkpoint.files}

    def __call__(self, layer: int, expert: int) -> Weights:
        """The tensors of one expert; KeyError names what the checkpoint lacks."""
        module, plans = self._plans[layer]
        wanted = {n for n, _ in self._layers[layer].experts.named_parameters()}
        if missing := wanted - set(plans):
            raise KeyError(f"{self.checkpoint.folder} has no weights for {module}.{sorted(missing)[0]}"
                           + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
        tensors: Weights = {}
        for name, plan in plans.items():
            numbered = compat.numbered_expert(name)
            if numbered is not None and numbered[0] != expert:
                continue
            sources = {pattern: self._read(keys, expert) for pattern, keys in plan.sources.items()}
            made = compat.convert_expert(plan, sources, f"{module}.{name}", self._twin, self._quantizer)
            if numbered is not None:
                tensors[numbered[1]] = self._ready(made)
            else:
                tensors[name] = self._ready(made[0])
        return tensors

    def _read(self, keys: list[str], expert: int) -> torch.Tensor:
        """One expert's share: its own tensor, or its slice [1, …] of a tensor that holds all experts."""
        E = self._layers[0].experts.num_experts
        if len(keys) == E and E > 1:
            return self._handles[self._files[keys[expert]]].get_tensor(keys[expert])
        piece = self._handles[self._files[keys[0]]].get_slice(keys[0])
        return piece[...] if compat.numbered_expert(keys[0].rpartition("experts.")[2]) else piece[expert:expert + 1]

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the model's dtype, on its device and at a 64-byte boundary: at odd offsets CPU kernels take other,
        slower paths whose fp32 results differ in the last bit."""
        tensor = tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
        return tensor.contiguous() if tensor.data_ptr() % 64 == 0 else tensor.clone()
