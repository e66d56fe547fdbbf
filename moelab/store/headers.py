"""Tensors in files; headers of safetensors files, checked when they are read, and written.

A file is the size of the header (8 bytes, little-endian), the header (JSON: key → dtype, shape,
data_offsets) and the tensors, without gaps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from moelab.base.files import beside
from moelab.base.records import Record
from moelab.base.schema import blamed

Shape = tuple[int, ...]
#: name → tensor
Tensors = dict[str, torch.Tensor]
#: the index of a folder of several files
WEIGHT_MAP = "model.safetensors.index.json"
_KNOWN = beside(__file__)
#: endings of files of weights; safetensors alone are read
OTHER_WEIGHTS = _KNOWN["other_weights"]
#: safetensors' name of a type → torch's
DTYPES = {name: getattr(torch, of) for name, of in _KNOWN["dtypes"].items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@cache
def block_of(dtype: str) -> tuple[int, int]:
    """(weights, bytes) of what a tensor's rows are made of: one weight, or a block of a GGML type.
    KeyError for an unknown type."""
    if dtype in DTYPES:
        return 1, DTYPES[dtype].itemsize
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor, rows of whole blocks; `dtype` by safetensors' name, or GGML's."""
    block, size = block_of(dtype)
    return prod(shape) // block * size


class Stored(NamedTuple):
    """A tensor in a file, or a part of one: its type by safetensors' name, or GGML's, where in the
    file its bytes begin, its key there, and which of the tensor's weights is its first."""

    file: Path
    dtype: str
    shape: Shape
    begin: int
    key: str = ""
    first: int = 0

    # one that is put together of several is `moelab.checkpoint.gguf_names.Made`
    rows = make = None
    transposed = False

    @property
    def parts(self) -> tuple[Stored, ...]:
        """What it is read from."""
        return (self,)

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)

    def join(self, read: list[torch.Tensor]) -> torch.Tensor:
        """It, of what was read of its parts, decoded or not."""
        return read[0]

    values = join

    def empty(self) -> torch.Tensor:
        """A new tensor to read it into; of a GGML type the bytes of its rows, uint8."""
        if self.dtype in DTYPES:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        row = nbytes(self.dtype, self.shape[-1:])
        return torch.empty((*self.shape[:-1], row), dtype=torch.uint8)

    def read(self, begin: int, size: int) -> np.ndarray:
        """So many of its bytes from `begin` on, uint8, read and not mapped: mapped pages count as
        memory."""
        raw = np.fromfile(self.file, np.uint8, size, offset=self.begin + begin)
        if len(raw) != size:
            raise ValueError(f"{self.file} became shorter while it was read")
        return raw

    def pieces(self, most: int) -> Iterator[np.ndarray]:
        """All its bytes, at most so many at a time."""
        for begin in range(0, self.nbytes, most):
            yield self.read(begin, min(most, self.nbytes - begin))

    def slice(self, i: int, rows: int = 1) -> Stored:
        """The i-th of its parts of so many rows."""
        shape = (rows, *self.shape[1:])
        begin = self.begin + i * nbytes(self.dtype, shape)
        return Stored(self.file, self.dtype, shape, begin, self.key, i * prod(shape))


def on_meta(entry: Stored) -> torch.Tensor:
    """A tensor like the one that is stored, without memory; of a GGML type in bf16."""
    return torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype, torch.bfloat16), device="meta")


#: the tensors of files by key
Header = dict[str, Stored]


def read_header(file: Path) -> Header:
    """The tensors of a safetensors file by key, of which every byte of the file's data belongs to
    exactly one.

    Raises ValueError, naming the file and what is wrong, unless all names, types, shapes and
    offsets are possible."""
    try:
        with safe_open(file, "pt"):  # the library checks them
            pass
    except (FileNotFoundError, PermissionError):
        raise
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is no whole safetensors file: {str(error)[:1000]}; download or write it again"
        ) from error
    raw = raw_header(file)
    header = _parse_json(file, raw)
    header.pop("__metadata__", None)
    found = {}
    for key, entry in header.items():
        if (dtype := entry["dtype"]) not in DTYPES:
            raise ValueError(
                f"{file}: {key} is {dtype}, a type that is not read; it can be {', '.join(DTYPES)}. "
                f"Write it again"
            )
        begin = 8 + len(raw) + entry["data_offsets"][0]
        found[key] = Stored(file, dtype, tuple(entry["shape"]), begin, key)
    return found


def raw_header(file: Path) -> bytes:
    """The JSON of a safetensors file's header."""
    with open(file, "rb") as f:
        return f.read(int.from_bytes(f.read(8), "little"))


def read_json(file: Path) -> Record:
    """The object in a JSON file; ValueError, saying what is wrong, where there is none."""
    return _parse_json(file, file.read_bytes())


def _parse_json(file: Path, raw: bytes) -> Record:
    """A JSON object; ValueError, naming the file, for anything else. As JSON of Python, it may have
    Infinity, as some configs do."""
    with blamed(file, "it is damaged; download or write it again"):
        return {**json.loads(raw)}


def read_folder(folder: Path) -> tuple[list[Path], Header]:
    """(files, tensors by key) of a folder of safetensors files: model.safetensors, or those that an
    index names, as transformers looks for them; or else all there are but hidden ones.

    Raises FileNotFoundError: there are none, or one that the index names is gone. ValueError: one
    is damaged; two have the same tensor; they are not what the index says."""
    index = folder / WEIGHT_MAP
    whole = folder / "model.safetensors"
    named = {}
    if whole.is_file():
        files = [whole]
    elif index.is_file():
        named = _weight_map(index)
        files = [folder / name for name in sorted(set(named.values()))]
    else:
        files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("."))
    if not files:
        raise FileNotFoundError(f"{folder} has no .safetensors files{other_weights(folder)}")
    tensors = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{folder} lacks {file.name}; download the checkpoint again")
        for key, entry in read_header(file).items():
            if key in tensors:
                raise ValueError(
                    f"{folder} has the tensor {key} twice, in {tensors[key].file.name} and in "
                    f"{file.name}; remove the one that is not of this model"
                )
            tensors[key] = entry
    there = {key: entry.file.name for key, entry in tensors.items()}
    for key in sorted(named.keys() | there.keys()) if named else ():
        if named.get(key) != there.get(key):
            raise ValueError(
                f"{index} says that the tensor {key} is in {named.get(key)}, and it is in "
                f"{there.get(key)}; download the checkpoint again"
            )
    return files, tensors


def other_weights(folder: Path) -> str:
    """For a message: the files of weights in other formats that lie in a folder, and what to do; ""
    for none."""
    found = sorted(file.name for file in folder.iterdir() if file.suffix in OTHER_WEIGHTS[1:])
    if not found:
        return ""
    return (
        f", and {', '.join(found)[:200]} are weights in a format that is not read: take the "
        f"safetensors checkpoint of this model, or write one with transformers' save_pretrained"
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Key → file of an index, every name a plain one."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index} is damaged: it has no weight_map; download the checkpoint again")
    for key, name in found.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise ValueError(
                f"{index} says that {key} is in {str(name)[:200]!r}, which is no plain name of a "
                f".safetensors file; nothing outside the folder is read"
            )
    return found


def header_bytes(tensors: Record, about: dict[str, str] | None = None, least: int = 0) -> bytes:
    """The header, with its size before it, at least so many bytes, of tensors that follow each other:
    key → (dtype, shape, …)."""
    entries = {"__metadata__": about or {"format": "pt"}}
    at = 0
    for key, (dtype, shape, *_) in tensors.items():
        end = at + nbytes(dtype, shape)
        entries[key], at = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = max(least - 8, -(-len(text) // 8) * 8)
    return size.to_bytes(8, "little") + text.ljust(size)
