"""GGUF, the files of llama.cpp: what they say of a model, and where its tensors lie.

A file is "GGUF", a version, the numbers of tensors and of fields; the fields (key, kind, value); of
each tensor its name, sizes, the fastest first, type and offset; then the tensors, at multiples of
the alignment. Of a model in several files each says which it is, and the first has the fields.

Nothing in a file is trusted: it is read front to back, and no number is believed before the bytes
for it are there.

Source: ggml, `docs/gguf.md`; llama.cpp, `llama-model-loader.cpp` (shards)."""

from __future__ import annotations

import mmap
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from moelab.base.files import stamp
from moelab.base.records import Record
from moelab.base.schema import blamed
from moelab.store.ggml import GGML
from moelab.store.headers import DTYPES, Header, Stored, block_of

#: kinds of values → numpy's types; texts and arrays
SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd"))
TEXT = 8
ARRAY = 9
#: bytes before the tensors, entries of arrays there, fields, tensors at most
HEAD = 64 << 20
ENTRIES = 1 << 21
FIELDS = 1 << 16
TENSORS = 1 << 14
#: the name of one of several files of a model
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf(file: Path) -> tuple[Record, Header]:
    """(fields, tensors by name) of one GGUF file; shapes are torch's.

    Raises ValueError, naming the file and what is wrong, for one that is cut off, contradicts
    itself or has types that are not read."""
    with open(file, "rb") as f, blamed(file, "it cannot be read as GGUF"):
        size = file.stat().st_size
        with mmap.mmap(f.fileno(), min(size, HEAD), access=mmap.ACCESS_READ) as data:
            return _read(_Head(data), file, size)


class _Head:
    """What is before the tensors, read from its beginning on."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = self.entries = 0

    def take(self, n: int) -> bytes:
        found = self.data[self.at : self.at + n]
        if len(found) < n:
            raise ValueError(f"what is before its tensors is cut off, or above {HEAD:,} bytes")
        self.at += n
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def texts(self, n: int) -> list[str]:
        found = []
        data = self.data
        begin = self.at
        for _ in range(n):
            at = begin + 8
            begin = at + int.from_bytes(data[begin:at], "little")
            found.append(data[at:begin].decode(errors="replace"))
            if begin > len(data):
                self.take(begin)
        self.at = begin
        return found

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.texts(1)[0]
        if kind != ARRAY:
            return np.frombuffer(self.take(_scalar(kind).itemsize), _scalar(kind))[0].item()
        kind = self.number(4)
        n = self.number(8)
        self.entries += n
        if self.entries > ENTRIES:
            raise ValueError(f"its arrays have more than {ENTRIES:,} entries, as no vocabulary has")
        if kind == TEXT:
            return self.texts(n)
        return np.frombuffer(self.take(n * _scalar(kind).itemsize), _scalar(kind)).tolist()


def _scalar(kind: int) -> np.dtype:
    if kind not in SCALARS:
        raise ValueError(f"a value is of kind {kind}, or arrays lie in an array, which is not read")
    return np.dtype(SCALARS[kind])


def _read(head: _Head, file: Path, size: int) -> tuple[Record, Header]:
    magic = head.take(4)
    version = head.number(4)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(
            f"it begins with {magic!r} and version {version}; versions 2 and 3 are read, with the "
            f"lowest byte first"
        )
    tensors = head.number(8)
    count = head.number(8)
    if tensors > TENSORS or count > FIELDS:
        raise ValueError(f"it has {tensors:,} tensors and {count:,} fields, which no model has")
    fields = {}
    for _ in range(count):
        key = head.texts(1)[0]
        if key in fields:
            raise ValueError(f"it has the field {key[:80]} twice")
        fields[key] = head.value(head.number(4))
    align = fields.get("general.alignment", 32)
    if type(align) is not int or align % 8 or not 0 < align <= 1 << 20:
        raise ValueError(f"its alignment is {align!r}")
    found = {}
    for _ in range(tensors):
        tensor = _read_tensor(head, file)
        if tensor.key in found or tensor.begin % align:
            raise ValueError(f"{tensor.key} is there twice, or at {tensor.begin:,}, not aligned")
        found[tensor.key] = tensor
    begin = -(-head.at // align) * align
    end = 0
    for tensor in sorted(found.values(), key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            raise ValueError(f"{tensor.key} begins inside the tensor before it")
        end = tensor.begin + tensor.nbytes
        if begin + end > size:
            raise ValueError(f"{tensor.key} ends at {begin + end:,}, and the file at {size:,}")
    return fields, {key: of._replace(begin=begin + of.begin) for key, of in found.items()}


def _read_tensor(head: _Head, file: Path) -> Stored:
    """A tensor, its place counted from where the first begins."""
    from gguf import GGMLQuantizationType

    name = head.texts(1)[0]
    dims = head.number(4)
    if not 0 < dims <= 4 or len(name) > 1024:
        raise ValueError(f"{name[:80]} has {dims:,} axes, or too long a name")
    shape = tuple(head.number(8) for _ in range(dims))[::-1]
    kind = head.number(4)
    begin = head.number(8)
    known = kind in GGMLQuantizationType.__members__.values()
    dtype = GGMLQuantizationType(kind).name if known else f"type {kind}"
    if dtype not in DTYPES | GGML:
        raise ValueError(
            f"{name} is {dtype}, a type that is not read; take the model in another one: "
            f"{', '.join(['F32', 'F16', 'BF16', *GGML])}"
        )
    if not 0 < prod(shape) < 1 << 48 or shape[-1] % block_of(dtype)[0]:
        raise ValueError(f"{name} is {list(shape)}, which cannot be {dtype}")
    return Stored(file, dtype, shape, begin, name)


def read_shards(file: Path) -> tuple[list[Path], Record, Header]:
    """(files, fields, tensors by name) of a model in GGUF, by any of its files.

    Raises FileNotFoundError: one is missing. ValueError: as `read_gguf`; files that are not of one
    model, or one that is there twice."""
    fields, tensors = read_gguf(file)
    count = fields.get("split.count", 1)
    if count in (0, 1):
        return [file], fields, tensors
    name = SHARD.fullmatch(file.name)
    if not name or int(name[3]) != count:
        raise ValueError(
            f"{file} is one of {count} files, which are named NAME-00001-of-{count:05}.gguf; give them "
            f"their names back"
        )
    files = [file.with_name(f"{name[1]}-{i:05}-of-{name[3]}.gguf") for i in range(1, count + 1)]
    about = {}
    found = {}
    seen = set()
    for number, shard in enumerate(files):
        if not shard.is_file():
            raise FileNotFoundError(f"{shard} is missing; download all {count} files of the model")
        fields, tensors = read_gguf(shard)
        about = about or fields
        said = [fields.get(f"split.{name}") for name in ("no", "count", "tensors.count")]
        seen.add(stamp(shard)[:2])
        if said != [number, count, about.get("split.tensors.count")] or len(seen) <= number:
            raise ValueError(
                f"{shard} says that it is file, of files, with tensors {said}, or it is a link to "
                f"another shard: it is not of this model; download it again"
            )
        if twice := found.keys() & tensors.keys():
            raise ValueError(f"{shard} has {min(twice)}, which is in a file before it, too")
        found |= tensors
    if len(found) != about["split.tensors.count"]:
        raise ValueError(f"{files[0]} says {about['split.tensors.count']} tensors of {len(found)}")
    return files, about, found
