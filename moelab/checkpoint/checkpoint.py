"""A checkpoint folder: every header and index checked before it is trusted, tensors read one at a
time.

Weights may be links to any safetensors file; other files lie in the folder or in the blobs of a hub
cache, so that no link in a folder from elsewhere brings a person's own files into a prompt, a
message or a store. The folder of an expert store is a checkpoint whose experts lie in the store.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moelab.checkpoint import deepseek
from moelab.configs import QUANTISATION, quantisation
from moelab.files import absolute, stamp
from moelab.models import compat
from moelab.models.identity import of_checkpoint
from moelab.specs import DTYPE_BYTES
from moelab.store.headers import Stored, other_weights, read_folder, read_json
from moelab.store.layout import INDEX, ExpertStore, StoreError

#: kinds of files of a checkpoint that are read here or by transformers
SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")
#: names of those without which there is no model; without others it only has no tokenizer
NEEDED = re.compile(r"safetensors|^((generation|hf_quant)_config|index)\.json$")
#: safetensors' names of the types of plain weights
FLOATS = ("F64", "F32", "F16", "BF16")
#: names of what a config counts, and constructing a model takes time for
COUNTS = re.compile(r"^(?!.*(?:size|feature))(.*_)?(layers?|experts?|heads|blocks)(_|$)")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and whole safetensors files.

    files : the files that hold weights; tensors : every tensor in them by its key.
    store : the expert store that holds the experts, if the folder is one.
    stamps : config.json and the files that hold weights, each with its `stamp` when the checkpoint
    was found."""

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, Stored] = field(repr=False)
    store: ExpertStore | None = None
    stamps: dict[Path, tuple[int, ...]] = field(kw_only=True, repr=False)

    @classmethod
    def at(cls, folder: str | Path) -> Checkpoint:
        """Find and check the files of a checkpoint; reads headers only.

        Raises FileNotFoundError: no folder, config.json or safetensors files, or a shard that the
        index names is gone. ValueError: a file is cut off, not safetensors or contradicts itself;
        an index and its shards disagree; a
            name, or the link of a small file, leads out of the folder; a store that is damaged or
            unfinished.
        """
        folder = absolute(folder)
        if folder.is_file():
            raise ValueError(f"{folder} is a file; give the folder of a safetensors checkpoint")
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no checkpoint folder at {folder}")
        if folder.suffix == ".part" and Path(f"{folder}.jsonl").exists():
            raise ValueError(
                f"{folder} is an unfinished expert store; run its convert command again and it goes on"
            )
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{folder} has no config.json, so it is no transformers checkpoint"
                f"{other_weights(folder)}"
            )
        for path in read_by_name(folder):
            if path.is_file() or NEEDED.search(path.name):
                _stays_inside(path, folder.resolve())
        stored = (folder / INDEX).is_file() and any(folder.glob("experts-*.safetensors"))
        store = ExpertStore(folder) if stored else None
        files, tensors = read_folder(folder)
        stamps = {file: stamp(file) for file in (folder / "config.json", *files)}
        return cls(folder, tuple(files), tensors, store, stamps=stamps)

    def require_unchanged(self, *files: Path, mapped: bool = False) -> None:
        """StoreError if one of these files, or of all, is not the one any more that was found.

        mapped : for weights that were mapped, which a file that takes the place of another one does
        not change."""
        for file in files or (self.files if mapped else self.stamps):
            now, before = stamp(file), self.stamps[file]
            if now != before and not (mapped and now[:2] != before[:2]):
                raise StoreError(
                    f"{file} was changed since the model was opened from it; open it again"
                )

    def config(self) -> Any:
        """Its config, see `load_config`, told to dequantise (`compat.dequantising`) if some weights
        are quantised: tools that dequantise a checkpoint leave its quantization_config in
        config.json."""
        config = load_config(self.folder)
        method, store = quantisation(config), self.store
        plain = all(entry.dtype in FLOATS for entry in self.tensors.values()) and (
            store is None or DTYPE_BYTES[store.spec.dtype] >= 2
        )
        if method and plain and store is None:
            warnings.warn(
                f"{self.folder} is said to be quantised with {method}, and all its weights are plain "
                f"floating-point numbers: they are read as they are",
                stacklevel=2,
            )
        if plain or not method:
            for name in QUANTISATION:
                vars(config).pop(name, None)
        return compat.dequantising(config)

    def identity(self) -> str:
        """The identity of a model that is made of it (`models.identity`)."""
        return of_checkpoint(self, load_config(self.folder))

    def read(self, key: str, part: int | None = None) -> torch.Tensor:
        """A tensor, or its part [part:part+1], by plain reads into new memory at a multiple of 64
        bytes.

        Plain, since what is read of a mapped file would count as this process's memory; and at odd
        offsets CPU kernels take other, slower paths whose fp32 results differ in the last bit."""
        entry = self.tensors[key] if part is None else self.tensors[key].slice(part)
        tensor = entry.empty()
        self.require_unchanged(entry.file)
        with open(entry.file, "rb") as f:
            f.seek(entry.begin)
            if f.readinto(tensor.reshape(-1).view(torch.uint8).numpy()) != entry.nbytes:
                raise ValueError(f"{entry.file} ends inside the tensor {key}; download it again")
        return tensor


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


def _stays_inside(path: Path, home: Path) -> None:
    """ValueError for what is no regular file, or a small file that leads out of the folder but not
    into a hub cache."""
    require_file(path)
    real = path.resolve()
    cached = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if not (real.is_relative_to(home) or cached or path.suffix == ".safetensors"):
        raise ValueError(
            f"{path} is a link to {real}. Weights may be in another folder; small files are read in this "
            f"folder or in the hub's cache: replace this link by a copy"
        )


def load_config(folder: Path) -> Any:
    """The config of a checkpoint folder; ValueError for one that transformers does not know or that
    is damaged."""
    import transformers

    file = folder / "config.json"
    fields = read_json(file)
    model_type = fields.get("model_type")
    if model_type == "deepseek":
        deepseek.register()
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        own = (
            ", or it comes with code of its own (auto_map), which is never run here"
            if "auto_map" in fields
            else ""
        )
        raise ValueError(
            f"transformers {transformers.__version__} does not know model_type {str(model_type)[:80]!r} "
            f"({file}): upgrade transformers, or check the config{own}"
        )
    for name in ("attn_implementation", "_attn_implementation", "transformers_weights"):
        if "/" in str(fields.get(name, "")):
            raise ValueError(
                f"{file} asks for {name} = {str(fields[name])[:80]!r}, from outside the folder; nothing "
                f"of the kind is fetched. Remove that line"
            )
    for part in [fields, *(value for value in fields.values() if isinstance(value, dict))]:
        for name in ("quantization_config", "rope_scaling", "rope_parameters"):
            block = str(_object(file, part, name).get("weight_block_size"))[:80]
            if not re.fullmatch(r"None|\[[1-9]\d*, [1-9]\d*\]", block):
                raise ValueError(
                    f"{file} says weight_block_size = {block!r}, where two whole numbers of 1 or more are "
                    f"expected; correct it"
                )
        for name, value in part.items():
            if (
                COUNTS.search(name)
                and type(value) in (int, float)
                and not (0 <= value < (2_000 if "layer" in name else 100_000))
            ):
                raise ValueError(f"{file} says {name} = {value:,}, which no model has; correct it")
    with blamed(file, f"it is no config of a {model_type} model"):
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        for inner in (getattr(config, name, None) for name in type(config).sub_configs):
            if quantisation(inner) and not quantisation(config):
                config.quantization_config = (
                    vars(inner).pop("quantization_config", None) or inner.quantization
                )
    beside = folder / "hf_quant_config.json"
    if beside.is_file() and not quantisation(config):
        config.quantization_config = {"quant_method": "modelopt"} | _object(
            beside, read_json(beside), "quantization"
        )
    return config


def _object(file: Path, fields: dict[str, Any], name: str) -> dict[str, Any]:
    """An object that one of a JSON file has, {} if it has none; ValueError for anything else of
    that name."""
    if not isinstance(value := fields.get(name), dict | None):
        raise ValueError(
            f"{file} says {name} = {str(value)[:80]!r}, which is no object; correct it, or remove it"
        )
    return value or {}


@contextmanager
def blamed(file: Path, what: str, passing: type[Exception] | tuple = ()) -> Iterator[None]:
    """Whatever a library makes of a file that is damaged or foreign becomes a ValueError that names
    the file.

    passing : errors that are left as they are.
    """
    try:
        yield
    except passing:
        raise
    except BaseException as error:  # a panic of a Rust extension is no Exception
        if (
            isinstance(error, OSError)
            and error.errno
            or not (isinstance(error, Exception) or type(error).__name__ == "PanicException")
        ):
            raise
        raise ValueError(f"{file}: {what} ({_told(error, file)})") from error


def _told(error: BaseException, file: Path) -> str:
    """What a library's error says, in one line, and where the value that it does not know is in a
    JSON file."""
    error = error.__cause__ or error
    told = " ".join(str(error)[:1000].split())
    if type(error) is KeyError and file.is_file():
        for name in re.findall(rf'"(\w+)":\s*"{re.escape(told[1:-1])}"', file.read_text()):
            told += f" is not known as {name}"
    return f"{type(error).__name__}: {told}"
