"""A checkpoint folder: every header and index checked before it is trusted, tensors read one at a time.

What is read lies inside the folder, or in the blobs of the hub cache that the folder is a snapshot of. The folder of
an expert store is a checkpoint whose experts lie in the store.

`CheckpointExperts` is a source for the seam: it gives any expert of any hub checkpoint in the layout the model
computes with, whether the checkpoint keeps an expert's tensors apart (Mixtral's w1, w3, w2), fused (GPT-OSS,
Llama 4) or quantised (MXFP4), by transformers' own renaming and conversion tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from moelab.models import compat
from moelab.models.seam import Weights

INDEX = "model.safetensors.index.json"
#: kinds of files of a checkpoint that are read here or by transformers
SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")
#: bytes of a header or a JSON file above which it is no such thing; the limit of safetensors
MOST_JSON = 100_000_000
#: safetensors' name of a type → torch's
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64,
          "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file: its type by safetensors' name, and where in the file its bytes begin."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def empty(self) -> torch.Tensor:
        """A new tensor to read it into."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype])

    def slice(self, i: int) -> Stored:
        """Its part [i:i+1]."""
        size = self.nbytes // self.shape[0]
        return Stored(self.file, self.dtype, (1, *self.shape[1:]), self.begin + i * size)


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and whole safetensors files.

    files : the files that hold weights; tensors : every tensor in them by its key.
    store : the `moelab.store.layout.ExpertStore` that holds the experts, if the folder is one.
    """

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, Stored] = field(repr=False)
    store: Any = None

    @classmethod
    def at(cls, folder: str | Path) -> Checkpoint:
        """Find and check the files of a checkpoint; reads headers only.

        Raises
        ------
        FileNotFoundError : no folder, no config.json, no safetensors files, or a shard that the index names is gone.
        ValueError : a file is cut off, not safetensors or contradicts itself; an index and its shards disagree; a
            name or a link leads out of the folder; a store that is damaged or unfinished.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no checkpoint folder at {folder}")
        if folder.suffix == ".part" and Path(f"{folder}.jsonl").exists():
            raise ValueError(f"{folder} is an unfinished expert store; run its convert command again and it goes on")
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} has no config.json, so it is no transformers checkpoint")
        for path in (*folder.iterdir(), *folder.glob("*chat_templates/*")):
            if path.suffix in SUFFIXES:
                _stays_inside(path, folder.resolve())
        store = _store_at(folder)
        index = folder / INDEX
        named = _weight_map(index) if index.is_file() else {}
        if named:
            files = [folder / name for name in sorted(set(named.values()))]
            if missing := [f.name for f in files if not f.is_file()]:
                raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, which its index names; "
                                        f"download the checkpoint again")
        else:
            whole = folder / "model.safetensors"
            files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has no .safetensors files (weights in .bin or GGUF form are not read); "
                                    f"convert it with transformers' save_pretrained first")
        tensors: dict[str, Stored] = {}
        for file in files:
            for key, entry in read_header(file).items():
                if key in tensors:
                    raise ValueError(f"{folder} has the tensor {key} twice, in {tensors[key].file.name} and in "
                                     f"{file.name}; download the checkpoint again")
                tensors[key] = entry
        for key in sorted(named.keys() ^ tensors.keys()) if named else ():
            where = f"{tensors[key].file.name} has it" if key in tensors else f"{named[key]} lacks it"
            raise ValueError(f"{index} and its shards disagree about the tensor {key}: {where}; download the "
                             f"checkpoint again")
        for key, name in named.items():
            if tensors[key].file.name != name:
                raise ValueError(f"{index} says that the tensor {key} is in {name}, and it is in "
                                 f"{tensors[key].file.name}; download the checkpoint again")
        return cls(folder, tuple(files), tensors, store)

    def keys(self) -> Iterator[tuple[str, Path]]:
        """(key, file) of every tensor."""
        return ((key, entry.file) for key, entry in self.tensors.items())

    def read(self, key: str, part: int | None = None) -> torch.Tensor:
        """A tensor, or its part [part:part+1], by plain reads into new memory at a multiple of 64 bytes.

        Plain, since what is read of a mapped file would count as this process's memory; and at odd offsets CPU
        kernels take other, slower paths whose fp32 results differ in the last bit.
        """
        entry = self.tensors[key] if part is None else self.tensors[key].slice(part)
        tensor = entry.empty()
        with open(entry.file, "rb", buffering=0) as f:
            f.seek(entry.begin)
            view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while view:
                n = f.readinto(view)
                if not n:
                    raise ValueError(f"{entry.file} ends inside the tensor {key}; download it again")
                view = view[n:]
        return tensor


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by key, of which every byte of the file's data belongs to exactly one.

    Raises ValueError, naming the file and what is wrong, unless all names, types, shapes and offsets are possible.
    """
    with open(file, "rb") as f:
        size, limit = int.from_bytes(f.read(8), "little"), file.stat().st_size - 8
        if not 2 <= size <= min(limit, MOST_JSON):
            raise ValueError(f"{file} is no whole safetensors file: its header claims {size:,} bytes of "
                             f"{max(limit, 0):,}; download or write it again")
        header = _parse(file, f.read(size), "its header")
    header.pop("__metadata__", None)
    tensors, places = {}, []
    for key, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            possible = dtype in DTYPES and len(shape) <= 16 and all(
                type(n) is int and 0 <= n < 1 << 63 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            possible = False
        if not possible or end - begin != prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{file} is damaged: its header has the impossible entry {str(entry)[:200]} for {key}; "
                             f"download or write it again")
        tensors[key] = Stored(file, dtype, tuple(shape), 8 + size + begin)
        places.append((begin, end, key))
    at = 0
    for begin, end, key in sorted(places):
        if begin != at:
            raise ValueError(f"{file} is damaged: by its header, {key} begins at byte {begin:,}, and what is before it "
                             f"ends at {at:,}; download or write it again")
        at = end
    if limit - size != at:
        raise ValueError(f"{file} is damaged: it holds {limit - size:,} bytes of tensors, its header promises {at:,}; "
                         f"download or write it again")
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError for a person where there is none."""
    if file.stat().st_size > MOST_JSON:
        raise ValueError(f"{file} has {file.stat().st_size:,} bytes, which no such file has; download it again")
    return _parse(file, file.read_bytes(), "it")


def _parse(file: Path, raw: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{key[:200]!r} twice")
            found[key] = value
        return found
    try:
        found = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {what} is no JSON object that can be read "
                         f"({type(error).__name__}: {error}); download or write it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: {what} is a JSON {type(found).__name__}, where an object is expected; "
                         f"download or write it again")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    """Key → file of an index, every name a plain one."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index} is damaged: it has no weight_map; download the checkpoint again")
    for key, name in found.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name or "\\" in name:
            raise ValueError(f"{index} says that {key} is in {str(name)[:200]!r}, which is no plain name of a "
                             f".safetensors file; nothing outside the folder is read")
    return found


def _stays_inside(path: Path, home: Path) -> None:
    """ValueError for what is no regular file or leads out of the folder, except into the hub cache it belongs to."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:            # RuntimeError: links in a circle
        raise ValueError(f"{path} is a link that leads nowhere ({error}); download it again") from error
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (real.is_relative_to(home) or real.is_relative_to(cache)):
        raise ValueError(f"{path} is a link to {real}, outside the folder, so it is not read; put the file there")
    if not real.is_file():
        raise ValueError(f"{path} is no regular file; download it again")


def _store_at(folder: Path) -> Any:
    """The expert store in a folder; None where it is a plain checkpoint."""
    index = folder / "index.json"
    if not index.is_file() or not next(folder.glob("experts-*.safetensors"), None):
        return None
    from moelab.store.layout import ExpertStore
    return ExpertStore(folder)


class CheckpointExperts:
    """Source of one expert after another, straight from a checkpoint: `source(layer, expert) → tensors`.

    Nothing is cached: this is the slow and simple source, the oracle for faster ones.

    dtype : what the tensors are cast to, as loading the whole model would cast them; None keeps the stored one.
    device : where they are put.
    plan : what `moelab.models.completeness.complete` returns for them; by default it is asked for.

    Raises what `complete` raises when it is first used.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, dtype: torch.dtype | None = None,
                 device: torch.device | str = "cpu", plan: Any = None) -> None:
        self.checkpoint, self.config, self.dtype, self.device = checkpoint, config, dtype, device
        if plan is not None:
            self.plan = plan

    @cached_property
    def plan(self) -> Any:
        from moelab.models.completeness import complete
        return complete(self.checkpoint, self.config)

    @cached_property
    def _stored(self) -> Any:
        from moelab.store.reader import StoreExperts
        return StoreExperts(self.checkpoint.store, mode="buffered")

    def __call__(self, layer: int, expert: int) -> Weights:
        """The tensors of one expert."""
        if self.checkpoint.store is not None:
            return {name: self._ready(tensor) for name, tensor in self._stored(layer, expert).items()}
        return {name: self._ready(converted(self.plan, parameter, {
                    pattern: self.checkpoint.read(*where) for pattern, where in sources.items()}))
                for name, parameter, sources in expert_sources(self.plan, layer, expert)}

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the model's dtype, on its device and at a 64-byte boundary."""
        tensor = tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
        return tensor.contiguous() if tensor.data_ptr() % 64 == 0 else tensor.clone()


def expert_sources(plan: Any, layer: int, expert: int
                   ) -> Iterator[tuple[str, compat.ParameterPlan, dict[str, tuple[str, int | None]]]]:
    """(name, plan, {pattern: (key, part of it)}) of each parameter of one expert: what it is made of."""
    for name, parameter in plan.experts[layer].items():
        numbered = compat.numbered_expert(name)
        if numbered is None:
            yield name, parameter, {pattern: (keys[expert], None) if parameter.apart else (keys[0], expert)
                                    for pattern, keys in parameter.sources.items()}
        elif numbered[0] == expert:
            yield numbered[1], parameter, {pattern: (keys[0], None) for pattern, keys in parameter.sources.items()}


def converted(plan: Any, parameter: compat.ParameterPlan, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """One expert's parameter from its source tensors by pattern."""
    made = compat.convert_expert(parameter, tensors, plan.twin, plan.quantizer)
    return made if compat.numbered_expert(parameter.target.rpartition(".experts.")[2]) else made[0]
