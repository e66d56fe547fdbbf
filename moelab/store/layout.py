"""The expert store on disk: which file holds what, and an index that is checked when the store is
opened.

Source: ZipMoE §3.1 (E-chunks, SM-chunks and metadata, written once before deployment). A store is a
folder of safetensors files that transformers opens as a checkpoint without its experts:

    config.json, tokenizer files          as in the source
    weights.safetensors                   all other weights under the source's keys, with model.safetensors.index.json
    experts-00000.safetensors …           one file a MoE layer, its entries the chunks of its experts, dtype U8
    layout.json                           the source's files and headers, and which of its tensors each expert's are
    index.json                            geometry, offsets, checksums, the identity of the source

`3.17.gate_up_proj.p0.1` is shard 1 of plane 0 of a tensor of expert 17 of MoE layer 3. Plane 0 are
the exponents (E-chunks); the other planes, sign-mantissa bytes for bf16, are the SM-chunks. For
each expert all E-chunks come first, then all SM-chunks, so each kind is contiguous, and so are
both. Every chunk begins on a multiple of 4096 bytes of its file, for direct I/O; entries named
`pad.…` fill the gaps, since a safetensors file may have none.

Nothing in an index is trusted: every number is an integer within bounds, every name a plain one,
every chunk lies where the order of the file puts it, without gaps; files are no links. Its SHA-256
is in the header of weights.safetensors too, so that neither file can be exchanged alone. A forger
can still write a whole store of other weights, which is a store of another model.

Shapes: an expert's tensors are the model's own, without the leading axis E.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from moelab.files import absolute
from moelab.records import Record
from moelab.specs import MoESpec
from moelab.store import bf12, fewbit
from moelab.store.bits import LAYOUT, as_bytes
from moelab.store.codecs import find_codec
from moelab.store.headers import DTYPES, Shape, header_bytes, nbytes

FORMAT, VERSION = "moelab-store", 2
ALIGN = 4096  # what direct I/O wants of offsets, lengths and addresses
INDEX, WEIGHTS = "index.json", "weights.safetensors"
SOURCE_LAYOUT = "layout.json"  # of the source, see `moelab.checkpoint.restore`
PARTS = ("E", "SM", "both")
#: bytes of the other weights that a checksum covers, and of an index and of a small file at most
PIECE, INDEX_LIMIT, FILE_LIMIT = 16 << 20, 256 << 20, 64 << 20


class StoreError(ValueError):
    """A store that is damaged, incomplete or not the one that was asked for."""


#: name → checksum of a bytes-like object, 16 hex digits; releases the GIL
CHECKSUMS: dict[str, Callable[[Any], str]] = {
    "xxh3": lambda data: xxhash.xxh3_64_hexdigest(as_bytes(data))
}


def aligned(n: int) -> int:
    """`n` rounded up to a multiple of `ALIGN`."""
    return -(-n // ALIGN) * ALIGN


class Chunk(NamedTuple):
    offset: int
    length: int
    checksum: str


class TensorEntry(NamedTuple):
    """One tensor of one expert; its planes as (codec, chunks), the exponents' first."""

    dtype: str
    shape: Shape
    checksum: str
    planes: tuple[tuple[str, tuple[Chunk, ...]], ...]

    @property
    def n(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return nbytes(self.dtype, self.shape)

    def stored(self, part: str = "both") -> int:
        """Bytes of its chunks of a part, without padding."""
        planes = {"E": self.planes[:1], "SM": self.planes[1:], "both": self.planes}[part]
        return sum(chunk.length for _, chunks in planes for chunk in chunks)


class Layer:
    """The index of one MoE layer.

    file : name of its file; size, header : bytes of the file and of its header.
    module : its experts module in the model; stacked : whether that holds one tensor [E, …] for all
        experts, or a module for each.
    tensors : name → (dtype, shape); experts : the entries of each by name.
    """

    def __init__(self, index: int, fields: Record) -> None:
        self.file, self.stacked = layer_file(index), fields["stacked"]
        self.module = _text(fields["module"], "the module of a layer")
        _need(type(self.stacked) is bool, "stacked is neither true nor false")
        self.size, self.header = (
            _integer(fields[name], f"{name} of {self.file}") for name in ("size", "header")
        )
        self.tensors = {
            _text(name, "a tensor"): _dtype_and_shape(tensor, f"{self.module}.{name}")
            for name, tensor in fields["tensors"].items()
        }
        _need(
            self.tensors and self.header % ALIGN == 0 < self.header <= self.size,
            f"{self.file} has no room",
        )
        self.experts = [read_entries(expert, self.tensors) for expert in fields["experts"]]
        at = self.header
        for expert, entries in enumerate(self.experts):
            _need(
                sum(entry.nbytes for entry in entries.values()) <= 256 * self.size,
                f"impossible entry: expert {expert} of {self.module} has the size {self.tensors}",
            )
            for _, chunk in in_file(entries):
                _need(
                    chunk.offset == at,
                    f"impossible entry: a chunk of expert {expert} of {self.module} lies at "
                    f"{chunk.offset:,}; the one before it ends at {at:,}",
                )
                at += aligned(chunk.length)
        _need(at == self.size, f"{self.file} has {self.size:,} bytes, and its chunks end at {at:,}")


def layer_file(layer: int) -> str:
    return f"experts-{layer:05d}.safetensors"


def read_entries(fields: dict[str, list], tensors: dict[str, tuple]) -> dict[str, TensorEntry]:
    """An expert's entries by name from their JSON, name → [checksum, [[codec, [[offset, length,
    checksum]]]]]."""
    _need(
        list(fields) == list(tensors),
        f"impossible entry: an expert has {', '.join(fields) or 'nothing'} where the "
        f"others have {', '.join(tensors)}",
    )
    found = {}
    for name, (checksum, planes) in fields.items():
        dtype, shape = tensors[name]
        entry = found[name] = TensorEntry(
            dtype,
            tuple(shape),
            _checksum(checksum),
            tuple(
                (
                    codec,
                    tuple(
                        Chunk(
                            _integer(offset, "an offset"),
                            _integer(length, "a length"),
                            _checksum(check),
                        )
                        for offset, length, check in chunks
                    ),
                )
                for codec, chunks in planes
            ),
        )
        _need(
            len(planes) in (1, DTYPES[dtype].itemsize),
            f"impossible entry: {name} in {len(planes)} planes",
        )
        for codec, chunks in entry.planes:
            _need(
                codec != "bf12"
                or (dtype, len(planes), len(chunks)) == ("BF16", 1, 1)
                and bf12.packs(entry.shape)
                and bf12.escapes(chunks[0].length, entry.nbytes) >= 0,
                f"impossible entry: {name} is no bf12",
            )
            stored, n = [chunk.length for chunk in chunks], entry.nbytes // len(planes)
            if few := fewbit.is_format(codec):
                _need(
                    len(planes) == 1 and DTYPES[dtype].is_floating_point,
                    f"impossible entry: {name} is no {codec}",
                )
                n = fewbit.nbytes(codec, entry.shape)
            else:
                find_codec(codec)
            _need(
                stored == [n]
                if few or codec == "raw"
                else stored and min(stored) > 0 and sum(stored) <= n,
                f"impossible entry: {name} is {n:,} bytes in a plane, and its chunks ({codec}) have {stored}",
            )
    return found


#: (file, offset, memory to fill) of what is read
Extent = tuple[Path, int, list[memoryview]]


def run(entries: dict[str, TensorEntry], part: str) -> tuple[int, int]:
    """(offset, length) of an expert's E-chunks, SM-chunks or both, both multiples of `ALIGN`; (0,
    0) for no chunks."""
    chunks = [
        chunk
        for entry in entries.values()
        for i, (_, chunks) in enumerate(entry.planes)
        if part == "both" or (i == 0) == (part == "E")
        for chunk in chunks
    ]
    if not chunks:
        return 0, 0
    begin = min(chunk.offset for chunk in chunks)
    return begin, aligned(max(chunk.offset + chunk.length for chunk in chunks)) - begin


def in_file(entries: dict[str, TensorEntry]) -> Iterator[tuple[str, Chunk]]:
    """(name within the expert, chunk) of an expert's chunks in the order of the file."""
    for part in (slice(0, 1), slice(1, None)):
        for name, entry in entries.items():
            for plane, (_, chunks) in list(enumerate(entry.planes))[part]:
                yield from ((f"{name}.p{plane}.{i}", chunk) for i, chunk in enumerate(chunks))


def layer_header(index: int, layer: Layer) -> bytes:
    """The safetensors header of a layer's chunks and the padding between them."""
    start = layer.header
    about = {name: getattr(layer, name) for name in ("module", "stacked", "tensors")}
    entries: Record = {"__metadata__": {"moelab.layer": json.dumps(about)}}
    for expert, tensors in enumerate(layer.experts):
        for name, chunk in in_file(tensors):
            key, begin = f"{index}.{expert}.{name}", chunk.offset - start
            end, after = begin + chunk.length, begin + aligned(chunk.length)
            entries[key] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            if after > end:
                entries["pad." + key] = {
                    "dtype": "U8",
                    "shape": [after - end],
                    "data_offsets": [end, after],
                }
    text = json.dumps(entries, separators=(",", ":")).encode()
    if len(text) > start - 8:
        raise StoreError(
            f"a header of {len(text):,} bytes does not fit into the {start - 8:,} reserved for it"
        )
    return (start - 8).to_bytes(8, "little") + text.ljust(start - 8)


def weights_header(weights: dict[str, list], digest: str) -> bytes:
    """The safetensors header of the other weights, key → [dtype, shape, …]; `digest` is that of the
    index."""
    return header_bytes(weights, {"moelab.index": digest})


def seal(fields: Record) -> tuple[bytes, str]:
    """(bytes of an index, digest): JSON whose last member is the SHA-256 of all bytes before it."""
    text = json.dumps(fields, separators=(",", ":"))[:-1]
    digest = sha256(text.encode()).hexdigest()
    return f'{text},"sha256":"{digest}"}}'.encode(), digest


def unseal(raw: bytes, file: Path) -> Record:
    """The fields of a sealed index; StoreError unless every byte is as it was written."""
    text, _, _ = raw.rpartition(b',"sha256":"')
    if f'{{}},"sha256":"{sha256(text).hexdigest()}"}}'.encode()[2:] != raw[len(text) :]:
        raise StoreError(
            f"{file} is damaged: it does not match its own checksum. Convert the model again"
        )
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{file} is no JSON ({type(error).__name__}: {error}). Convert the model again"
        ) from error


# ---------------------------------------------------------------------------------------------------
# what is checked


def _need(ok: Any, what: str) -> None:
    if not ok:
        raise StoreError(what)


def _integer(value: Any, what: str, least: int = 0) -> int:
    _need(
        type(value) is int and least <= value < 1 << 50,
        f"{what} is {str(value)[:40]!r}, which is impossible",
    )
    return value


def _text(value: Any, what: str) -> str:
    _need(type(value) is str and 0 < len(value) <= 1000, f"{what} has the name {str(value)[:40]!r}")
    return value


def _checksum(value: Any) -> str:
    _need(
        type(value) is str and re.fullmatch("[0-9a-f]{16}", value),
        f"a checksum is {str(value)[:40]!r}",
    )
    return value


def _dtype_and_shape(value: Any, what: str) -> tuple[str, Shape]:
    dtype, shape = value
    _need(dtype in DTYPES and len(shape) <= 8, f"{what} is {str(dtype)[:40]!r} {str(shape)[:80]}")
    return dtype, tuple(_integer(n, f"the shape of {what}") for n in shape)


def plain_name(name: Any) -> str:
    """The name of a file in a folder; StoreError for one that leads out of it or that no file
    should have."""
    if (
        type(name) is not str
        or not re.fullmatch(r"[^/\\:\x00-\x1f]{1,200}", name)
        or name in (".", "..")
    ):
        raise StoreError(f"{str(name)[:80]!r} is not the plain name of a file")
    return name


def regular_file(path: Path) -> int:
    """The size of a file; StoreError if there is none, or a link, which may lead anywhere."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise StoreError(
            f"{path.parent} lacks {path.name}; copy the store again, or convert the model again"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(
            f"{path} is a {'link' if stat.S_ISLNK(found.st_mode) else 'folder or device'}, not a file; "
            f"copy the store itself (cp -L follows links)"
        )
    return found.st_size


class ExpertStore:
    """An expert store; index, sizes, headers and small files are checked when it is opened, weights
    are not read.

    codec, shards : how the experts are compressed; name of the codec, exponent shards a tensor at
        most.
    quantized : the few-bit format that the weights were rounded to; None where they are the
        source's own.
    identity : of the model that the store was made from, see `moelab.models.identity`, and the
        format.
    weights : key → dtype, shape, offset, bytes, checksums of its pieces, of the weights that are
        not experts'.
    files : the small files, name → size, checksum.

    Raises
    ------
    FileNotFoundError : no such folder or no index in it.
    StoreError : another format or version, a damaged index, a file that is missing or has another
    size."""

    #: whether chunks begin at multiples of `ALIGN`; bytes of memory that reading takes besides its
    #: buffers
    aligned, scratch = True, 0

    def __init__(self, folder: str | Path) -> None:
        self.folder = absolute(folder)
        index = self.folder / INDEX
        if not index.is_file():
            unfinished = self.folder.with_name(self.folder.name + ".part").is_dir()
            raise FileNotFoundError(
                f"there is no expert store at {self.folder}"
                + (
                    ": its conversion was cut off; run the same convert command again and it goes on"
                    if unfinished
                    else f" (no {INDEX}); make one with `moelab convert SOURCE {self.folder}`"
                )
            )
        if (size := regular_file(index)) > INDEX_LIMIT:
            raise StoreError(f"{index} has {size:,} bytes; an index has {INDEX_LIMIT:,} at most")
        fields = unseal(index.read_bytes(), index)
        try:
            self._set(fields)
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
            OverflowError,
        ) as error:
            what = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            raise StoreError(
                f"{index} is no index of an expert store ({what}). Convert the model again"
            ) from error
        self._check_files(fields["sha256"])

    def _set(self, fields: Record) -> None:
        if fields["format"] != FORMAT or fields["version"] != VERSION:
            raise StoreError(
                f"format {fields['format']!r} version {fields['version']!r}; this moelab reads {FORMAT!r} "
                f"version {VERSION}"
            )
        if fields["layout"] != LAYOUT or fields["checksum"] not in CHECKSUMS:
            raise StoreError(
                f"byte layout {fields['layout']!r} and checksums {fields['checksum']!r}; here there are "
                f"{LAYOUT!r} and {', '.join(CHECKSUMS)}"
            )
        self.spec, self.identity = MoESpec.from_dict(fields["spec"]), _checksum(fields["identity"])
        _need(self.spec.L, "the model has no MoE layers")
        if quantized := fields.get("quantized"):
            fewbit.find_format(quantized)
            self.identity += f"-{quantized}"
        self.quantized: str | None = quantized
        find_codec(fields["codec"])
        self.codec, self.shards = fields["codec"], _integer(fields["K"], "K", 1)
        self.checksum_name, self.checksum = fields["checksum"], CHECKSUMS[fields["checksum"]]
        _need(
            type(fields["layers"]) is list and len(fields["layers"]) == self.spec.L,
            f"it has {len(fields['layers'])} layers of experts; {self.spec.name} has {self.spec.L}",
        )
        self.layers = [Layer(i, layer) for i, layer in enumerate(fields["layers"])]
        for layer in self.layers:
            _need(
                len(layer.experts) == self.spec.E,
                f"{layer.module} has {len(layer.experts)} experts; "
                f"{self.spec.name} has {self.spec.E:,} a layer",
            )
        _need(
            len({layer.module for layer in self.layers}) == self.spec.L,
            "two layers are of one module",
        )
        self.weights: dict[str, tuple[str, Shape, int, int, list[str]]] = {}
        shapes = {
            _text(key, "a weight"): _dtype_and_shape(entry[:2], key)
            for key, entry in fields["weights"].items()
        }
        at = len(weights_header(shapes, fields["sha256"]))
        for key, (dtype, shape) in shapes.items():
            size, checks = nbytes(dtype, shape), fields["weights"][key][2]
            _need(
                len(checks) == -(-size // PIECE),
                f"{key} of {size:,} bytes has {len(checks)} checksums",
            )
            self.weights[key] = dtype, shape, at, size, [_checksum(check) for check in checks]
            at += size
        self.weights_size = at
        self.files: dict[str, list] = {
            plain_name(name): [_integer(size, f"the size of {name}"), _checksum(check)]
            for name, (size, check) in fields["files"].items()
        }
        for name in (INDEX, WEIGHTS, *(layer.file for layer in self.layers)):
            _need(name not in self.files, f"{name} is no small file")

    def _check_files(self, digest: str) -> None:
        """Sizes of all files, contents of small ones, headers of the others; nothing but plain
        files of the folder."""

        def begins(name: str, size: int, n: int) -> bytes:
            """The first n bytes of a file of `size` bytes."""
            path = self.folder / name
            if (found := regular_file(path)) != size or n == size > FILE_LIMIT:
                raise StoreError(
                    f"{path} has {found:,} bytes, {size:,} were written; copy the store again, or convert "
                    f"the model again"
                )
            with open(path, "rb") as f:
                return f.read(n)

        header = weights_header(self.weights, digest)
        right = {WEIGHTS: begins(WEIGHTS, self.weights_size, len(header)) == header}
        for name, (size, check) in self.files.items():
            right[name] = self.checksum(begins(name, size, size)) == check
        for i, layer in enumerate(self.layers):
            right[layer.file] = begins(layer.file, layer.size, layer.header) == layer_header(
                i, layer
            )
        for name in (name for name, equal in right.items() if not equal):
            raise StoreError(
                f"{self.folder / name} is damaged at its beginning, or does not belong to this {INDEX}; "
                f"copy the store again, or convert the model again"
            )

    def entries(self, layer: int, expert: int) -> dict[str, TensorEntry]:
        """One expert's entries by tensor name; LookupError for an expert that the model does not
        have."""
        if not 0 <= layer < len(self.layers) or not 0 <= expert < len(self.layers[layer].experts):
            raise LookupError(
                f"{self.folder} has no expert {expert} of MoE layer {layer}; it has "
                f"{len(self.layers)} layers of {self.spec.E} experts"
            )
        return self.layers[layer].experts[expert]

    def stored_bytes(self, layer: int, expert: int, part: str) -> int:
        """Bytes that are read for a part of an expert."""
        return run(self.entries(layer, expert), part)[1]

    def paths(self, layer: int) -> list[Path]:
        """The files that hold a layer's experts."""
        return [self._paths[layer]]

    @cached_property
    def _paths(self) -> list[Path]:
        return [self.folder / layer.file for layer in self.layers]

    def extents(self, parts: list[Any]) -> list[Iterable[Extent]]:
        """What to read for `Chunks` that follow each other in the file. Each of the list can be
        read by another thread, a list in it also in any order, and what is an iterator in its
        own."""
        return [
            [
                (
                    self._paths[parts[0].layer],
                    parts[0].offset,
                    [memoryview(part.data) for part in parts],
                )
            ]
        ]

    @property
    def weights_bytes(self) -> int:
        return sum(size for _, _, _, size, _ in self.weights.values())

    def table(self) -> list[Record]:
        """A row for each tensor of an expert (all layers together) and one for all: counts, bytes
        and fractions."""
        rows: dict[tuple, Record] = {}
        for layer in self.layers:
            for entries in layer.experts:
                for name, entry in entries.items():
                    codec = "+".join(codec for codec, _ in entry.planes)
                    everything = "all experts", "", (), self.quantized or self.codec
                    for key in ((name, entry.dtype, entry.shape, codec), everything):
                        row = rows.setdefault(
                            key,
                            dict(zip(("tensor", "dtype", "shape", "codec"), key))
                            | dict(count=0, bytes=0, E_bytes=0, SM_bytes=0),
                        )
                        row["count"] += key[0] == name or name == next(
                            iter(entries)
                        )  # experts, not tensors
                        row["bytes"] += entry.nbytes
                        row["E_bytes"] += entry.stored("E")
                        row["SM_bytes"] += entry.stored("SM")
        for row in rows.values():
            row["fraction"] = (row["E_bytes"] + row["SM_bytes"]) / max(1, row["bytes"])
        return sorted(rows.values(), key=lambda row: row["tensor"] == "all experts")
