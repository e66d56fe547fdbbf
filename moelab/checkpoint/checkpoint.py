"""A checkpoint: what is found of a model before a weight of it is read, each thing once.

    locate → headers (`Checkpoint.at`) → config → geometry (spec) → plan

`Checkpoint.at` takes whatever names a model and reads headers only; config, spec, plan and identity
are found when they are first asked for. Opening, converting, offloading and restoring hand this one
object on. The folder of an expert store is a checkpoint whose experts lie in the store.

Weights may be links to any safetensors file; other files lie in the folder or in the blobs of a hub
cache, so that no link in a folder from elsewhere brings a person's own files into a prompt, a
message or a store."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash

from moelab.base import registry
from moelab.base.configs import QUANTISATION, quantisation, spec_from_config
from moelab.base.files import absolute, from_hub, small_model, stamp
from moelab.base.schema import blamed
from moelab.base.specs import DTYPE_BYTES, MoESpec
from moelab.cards import load_card
from moelab.checkpoint.config import load_config
from moelab.checkpoint.gguf import GGUF, Decoded, file_of, weights_of
from moelab.checkpoint.gguf_names import Made
from moelab.checkpoint.plan import FLOATS, LoadingPlan, make_plan
from moelab.models.experts import shapes
from moelab.models.identity import of_tensors
from moelab.store.bits import as_bytes
from moelab.store.headers import (
    DTYPES,
    NAMES,
    OTHER_WEIGHTS,
    WEIGHT_MAP,
    Header,
    Stored,
    other_weights,
    read_folder,
)
from moelab.store.layout import INDEX, SOURCE_LAYOUT, ExpertStore, StoreError

#: kinds of files of a checkpoint that are read here or by transformers
SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")
#: prefix of a source's file whose name a store uses itself
BESIDE = "source."
#: names of those without which there is no model; without others it only has no tokenizer
NEEDED = re.compile(r"safetensors|^(generation_config|index)\.json$")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder with config.json and whole safetensors files, or a model in GGUF.

    name : what the model is called in print: "small", the folder's name, or the hub id.
    folder : where it is; of GGUF the file.
    files : the files that hold weights; tensors : every tensor in them by its key.
    store : the expert store that holds the experts, if the folder is one.
    gguf : if it is in GGUF.
    stamps : config.json and the files that hold weights, each with its `stamp` when it was found."""

    name: str
    folder: Path
    files: tuple[Path, ...]
    tensors: Header = field(repr=False)
    store: ExpertStore | None
    stamps: dict[Path, tuple[int, ...]] = field(repr=False)
    gguf: GGUF | None = field(default=None, repr=False)

    @classmethod
    def at(cls, source: str | Path | ExpertStore | Checkpoint | None) -> Checkpoint:
        """Find and check the files of a model; reads headers only.

        source : a hub id, the folder of a checkpoint or of an expert store, an `ExpertStore`, a GGUF
            file, of several any one, or a folder of one model in such, None for the small model that is shipped; a `Checkpoint` is returned as it is.

        Raises FileNotFoundError: no folder, config.json or safetensors files, or a shard that the
        index names is gone; a hub id that can be had neither from the cache nor the network.
        ValueError: a file is cut off, not safetensors or contradicts itself; an index and its
        shards disagree; a name, or the link of a small file, leads out of the folder; a store that
        is damaged or unfinished."""
        if isinstance(source, Checkpoint):
            return source
        store = source if isinstance(source, ExpertStore) else None
        name, folder = (store.folder.name, store.folder) if store else locate(source)
        if file := file_of(folder):
            gguf = GGUF(file)
            stamps = {of: stamp(of) for of in gguf.files}
            return cls(file.stem, file, tuple(gguf.files), gguf.tensors, None, stamps, gguf)
        _check_folder(folder)
        if (folder / INDEX).is_file() and any(folder.glob("experts-*.safetensors")):
            store = store or ExpertStore(folder)
        files, tensors = read_folder(folder)
        stamps = {file: stamp(file) for file in (folder / "config.json", *files)}
        return cls(name, folder, tuple(files), tensors, store, stamps)

    @property
    def said(self) -> Path:
        """The file that says its config."""
        return self.folder if self.gguf else self.folder / "config.json"

    @cached_property
    def config(self) -> Any:
        """Its config. Tools that dequantise a checkpoint leave its quantization_config in
        config.json: where all weights are plain, that does not count."""
        if self.gguf:
            return self.gguf.config
        config = load_config(self.folder)
        plain = all(entry.dtype in FLOATS for entry in self.tensors.values())
        if self.store:
            plain = plain and DTYPE_BYTES[self.store.spec.dtype] >= 2
        if plain or not quantisation(config):
            for name in QUANTISATION:
                vars(config).pop(name, None)
        return config

    @cached_property
    def spec(self) -> MoESpec:
        """Its geometry. Raises ValueError: a dense model, or one that is not run here."""
        with blamed(self.said, "its values make no sense", passing=ValueError):
            return spec_from_config(self.config, name=self.name)

    @cached_property
    def plan(self) -> LoadingPlan:
        """Which tensor feeds which parameter (`checkpoint.plan`). Raises ValueError unless the
        checkpoint is the whole model of its config."""
        spec = self.spec
        with blamed(self.said, "no model can be made of it", passing=ValueError):
            plan = make_plan(self.folder, self.said, self.tensors, self.store, self.config)
        weights = sum(map(math.prod, shapes(plan.layers[0].experts).values()))
        found = len(plan.layers), plan.layers[0].E, weights
        if found != (said := (spec.L, spec.E, spec.expert_params)):
            raise ValueError(
                f"{self.folder}: MoE layers, experts a layer and weights an expert are {found}, and by "
                f"its config {said}: moelab/base/configs.py reads {spec.model_type} wrongly"
            )
        return plan

    @cached_property
    def identity(self) -> str:
        """The identity of a model that is made of it (`models.identity`), read when it is first
        asked for: most runs never ask."""
        self.require_unchanged()  # else nothing tells which model it was
        if self.store:
            return self.store.identity
        return of_tensors(self.gguf.stored if self.gguf else self.tensors, self.config)

    @cached_property
    def content(self) -> str:
        """32 hex digits that are others when a file was changed that a conversion reads: of the
        identity, the bytes of small files, and sizes and times of those that hold weights."""
        small = [item for item in self.small_files() if Path(item[0]).suffix in SUFFIXES]
        large = [(file.name, *self.stamps[file][2:]) for file in self.files]
        return xxhash.xxh3_128_hexdigest(repr((self.identity, small, large)).encode())

    def small_files(self) -> Iterator[tuple[str, bytes]]:
        """(name in a store, content) of everything in the folder that is no weights; links, as far
        as they were found to stay inside."""
        if self.gguf:
            yield from self.gguf.small_files()
            return
        for path in sorted(self.folder.iterdir()):
            name = path.name
            foreign = path.is_symlink() and path.suffix not in SUFFIXES
            known = name.startswith(".") or path.suffix in OTHER_WEIGHTS
            if known or foreign or not path.is_file():
                continue
            taken = name in (INDEX, WEIGHT_MAP, SOURCE_LAYOUT) or name.startswith(BESIDE)
            yield BESIDE * taken + name, path.read_bytes()

    def dtype(self, dtype: torch.dtype | str = "auto") -> torch.dtype:
        """What to compute in: as asked, or as config.json says, or else as most weights are
        stored."""
        if dtype == "auto":
            return getattr(self.config, "dtype", None) or self.plan.dtype
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(
                f"dtype is {dtype!r}; it must be 'auto' or a floating-point type of torch"
            )
        return found

    def require_unchanged(self, *files: Path, mapped: bool = False) -> None:
        """StoreError if one of these files, or of all, is not the one any more that was found.

        mapped : for weights that were mapped, which a file that takes the place of another one does
        not change."""
        for file in files or (self.files if mapped else self.stamps):
            now = stamp(file)
            before = self.stamps[file]
            if now != before and not (mapped and now[:2] != before[:2]):
                raise StoreError(
                    f"{file} was changed since the model was opened from it; open it again"
                )

    def read(self, stored: Stored) -> torch.Tensor:
        """A tensor, or a slice of one, by plain reads into new memory at a multiple of 64 bytes.

        Plain, since what is read of a mapped file would count as this process's memory; and at odd
        offsets CPU kernels take other, slower paths whose fp32 results differ in the last bit."""
        self.require_unchanged(stored.file)
        tensor = stored.empty()
        as_bytes(tensor, writable=True)[:] = stored.read(0, stored.nbytes)
        self.check(stored, tensor)
        return tensor

    def check(self, stored: Stored, read: Any) -> None:
        """StoreError if what was read of a file without checksums is not what it was before."""
        if self.gguf:
            self.gguf.sums[stored.file].check(stored, read)

    def plain(self, key: str) -> Stored | Decoded:
        """A tensor as safetensors can have it; what is decoded, in the model's dtype."""
        entry = self.tensors[key]
        if isinstance(entry, Stored) and entry.dtype in DTYPES:
            return entry
        return Decoded(NAMES[self.dtype()], entry.shape, lambda: self.weights(entry))

    def weights(self, entry: Stored | Made) -> torch.Tensor:
        """The weights of an entry of `tensors`: as stored, or fp32 where they are decoded."""
        return weights_of(entry, [self.read(part) for part in entry.parts])


def locate(source: str | Path | None) -> tuple[str, Path]:
    """(name, local folder) of a model; a hub id is downloaded (config, tokenizer, safetensors) or
    found in the cache."""
    if source is None:
        return "small", small_model()
    path = absolute(source)
    text = str(source)
    if path.exists():
        return path.name, path
    if card := registry.like("model", text):
        raise ValueError(
            f"{card} is a card, the geometry of a model without its weights: give its hub id "
            f"({load_card(card).get('hub')}) or a folder; `moelab synthesize FOLDER --model {card}` "
            f"writes one with random weights"
        )
    if text == "small":
        return text, small_model()
    if path.suffix == ".gguf":
        raise FileNotFoundError(f"there is no file at {path}")
    if text.count("/") > 1 or text.startswith((".", "/", "~")) or os.sep * 2 in text:
        raise FileNotFoundError(f"there is no checkpoint folder at {path}")
    return text, from_hub(text, [f"*{suffix}" for suffix in SUFFIXES])


def _check_folder(folder: Path) -> None:
    """FileNotFoundError or ValueError unless it has a config, and no small file leads out of it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint folder at {folder}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json, so it is no transformers checkpoint, or a conversion that "
            f"was cut off{other_weights(folder)}"
        )
    home = folder.resolve()
    for path in read_by_name(folder):
        if not path.is_file() and not NEEDED.search(path.name):
            continue
        require_file(path)
        real = path.resolve()
        cached = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
        if not (real.is_relative_to(home) or cached or path.suffix == ".safetensors"):
            raise ValueError(
                f"{path} is a link to {real}. Weights may be in another folder; small files are read "
                f"in this folder or in the hub's cache: replace this link by a copy"
            )


def read_by_name(folder: Path) -> list[Path]:
    """What lies in a checkpoint's folder and would be read for its name, whatever it is."""
    return [
        path
        for path in (*folder.iterdir(), *folder.glob("*chat_templates/*"))
        if path.suffix in SUFFIXES and not path.name.startswith(".")
    ]


def require_file(path: Path) -> None:
    """ValueError for a folder, a pipe, or a link that leads nowhere."""
    if not path.is_file():
        raise ValueError(
            f"{path} is no regular file, or a link that leads nowhere; remove it, or put the file there"
        )
