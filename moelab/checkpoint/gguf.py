"""A model in GGUF files, as a checkpoint: its config, tokenizer and tensors under transformers' names,
and weights as they lie, decoded, or put together of several tensors (`gguf_names.Made`).

GGUF has no checksums. So what is read of a file for the first time is summed, and the sums are kept
in the cache, by the file's path, size and time: what is read later and differs is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from moelab.base.files import atomic, cache_folder, stamp
from moelab.base.schema import blamed
from moelab.checkpoint.gguf_names import Made, config_of, header_of
from moelab.models import compat
from moelab.store.bits import as_bytes
from moelab.store.codec import RAW, Codec
from moelab.store.ggml import GGML
from moelab.store.gguf import SHARD, read_shards
from moelab.store.headers import DTYPES, Header, Shape, Stored
from moelab.store.layout import StoreError

#: fields that are counts, and what no model has
COUNTS = {"block_count": 2_000, "expert_count": 100_000, "attention.head_count": 100_000}


class GGUF:
    """A model in one GGUF file or several.

    files; fields : what the first says; stored : their tensors by llama.cpp's names.
    config : transformers'; tensors : by the keys of a checkpoint of transformers."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.files, self.fields, self.stored = read_shards(file)
        name = self.fields.get("general.architecture")
        for count, most in COUNTS.items():
            found = np.max(self.fields.get(f"{name}.{count}", 0), initial=0)
            if not 0 <= found < most:
                raise ValueError(f"{file} says {count} = {found:,}, which no model has")
        with blamed(file, "it says no model that is run here"):
            self.config = config_of(self.fields, self.stored)
            self.config.dtype = self._dtype()
            self.tensors: Header = header_of(self.config, self.fields, self.stored)

    def _dtype(self) -> torch.dtype:
        """What to compute in: the type of all matrices, if they are plain, or else bf16."""
        kinds = {tensor.dtype for tensor in self.stored.values() if len(tensor.shape) > 1}
        for kind in ("F32", "F16"):
            if kinds <= {"F32", kind}:
                return DTYPES[kind]
        return torch.bfloat16

    def tokenizer(self) -> Any:
        """Its tokenizer; None for none."""
        known = self.fields.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"
        if known or "tokenizer.huggingface.json" in self.fields:
            return compat.gguf_tokenizer(self.fields)
        return None

    def divided(self, experts: Collection[str]) -> tuple[int, int]:
        """Bytes of all other tensors, and of those with the keys of experts."""
        found = [0, 0]
        for key, entry in self.tensors.items():
            found[key in experts] += entry.nbytes
        return tuple(found)

    def small_files(self) -> Iterator[tuple[str, bytes]]:
        """Its config, tokenizer and the like, as a checkpoint of transformers has them."""
        with tempfile.TemporaryDirectory() as folder:
            self.config.save_pretrained(folder)
            with suppress(ValueError):  # token ids will do
                if tokenizer := self.tokenizer():
                    tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                yield path.name, path.read_bytes()

    @cached_property
    def sums(self) -> dict[Path, Sums]:
        return {file: Sums(file) for file in self.files}


def file_of(path: Path) -> Path | None:
    """The GGUF file, or the first of several, of a model that a path names: itself, or the only one in
    a folder without safetensors files. ValueError for a folder of several models."""
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = [f for f in sorted(path.glob("*.gguf")) if not f.name.startswith((".", "mmproj"))]
    models = [f for f in files if not (m := SHARD.fullmatch(f.name)) or m[2] == "00001"] or files
    if len(models) > 1:
        names = ", ".join(f.name for f in models)
        raise ValueError(f"{path} has several models: give one of {names[:1000]}")
    return models[0] if models else None


# ------------------------------------------------------------------------------------------ weights


def codec_of(entries: Collection[Stored | Made]) -> Codec:
    """The codec of GGML's in which entries, one after another, are one blob; RAW for none."""
    kinds = {part.dtype for entry in entries for part in entry.parts}
    if len(kinds) > 1 or not kinds <= GGML.keys() or any(of.make for of in entries):
        return RAW
    codec = GGML[kinds.pop()]
    return codec.T if any(of.transposed for of in entries) else codec


def decoded(stored: Stored, read: torch.Tensor) -> torch.Tensor:
    """What was read of a tensor, in fp32 if it is of a GGML type."""
    if stored.dtype in DTYPES:
        return read
    return GGML[stored.dtype].dequantize(read.view(-1), stored.shape)


def weights_of(entry: Stored | Made, read: list[torch.Tensor]) -> torch.Tensor:
    """An entry's weights, of what was read of its parts."""
    return entry.values([decoded(*of) for of in zip(entry.parts, read, strict=True)])


class Decoded(NamedTuple):
    """An entry as a tensor to be written, decoded when it is: attributes as of `Stored`."""

    dtype: str
    shape: Shape
    weights: Callable[[], torch.Tensor]

    def pieces(self, most: int) -> Iterator[np.ndarray]:
        data = as_bytes(self.weights().to(DTYPES[self.dtype]).contiguous())
        yield from (data[at : at + most] for at in range(0, len(data), most))


# ------------------------------------------------------------------------------------------ checksums


class Sums:
    """XXH3 of what has been read of a file, by any process: records (begin, bytes, sum) in a file of
    the cache, behind one that says of which state of the file they are. At most 24 MB."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.kept = cache_folder("sums") / xxhash.xxh3_64_hexdigest(str(file.resolve()).encode())
        head = _record(xxhash.xxh3_64_intdigest(repr(stamp(file)[:4]).encode()))
        raw = b""
        with suppress(OSError):
            raw = self.kept.read_bytes()
        if len(raw) % len(head) or raw[: len(head)] != head:
            raw = head
            with atomic(self.kept) as new:
                new.write_bytes(head)
        records = np.frombuffer(raw, "<u8").reshape(-1, 3)[:0:-1].tolist()
        self.known = {(begin, size): checksum for begin, size, checksum in records}

    def check(self, stored: Stored, data: Any) -> None:
        """StoreError if what was read is not what was read there before."""
        place = stored.begin, stored.nbytes
        found = xxhash.xxh3_64_intdigest(as_bytes(data))
        if place not in self.known:
            self.known[place] = found
            with suppress(OSError), open(self.kept, "ab", buffering=0) as file:
                if file.tell() < 24 << 20:
                    file.write(_record(*place, found))
        if self.known[place] != found:
            raise StoreError(
                f"{self.file} is damaged: {stored.key}, {place[1]:,} bytes at {place[0]:,}, is not what "
                f"was read there before; download it again, or, if it is right now, delete {self.kept}"
            )


def _record(*numbers: int) -> bytes:
    return np.array([*numbers, 0, 0][:3], "<u8").tobytes()
