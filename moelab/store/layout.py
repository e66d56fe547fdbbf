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
every chunk lies where the order of the file puts it, without gaps. Its SHA-256
is in the header of weights.safetensors too, so that neither file can be exchanged alone. A forger
can still write a whole store of other weights, which is a store of another model.

Shapes: an expert's tensors are the model's own, without the leading axis E.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from moelab.base.files import absolute
from moelab.base.records import Record
from moelab.base.schema import blamed, typed
from moelab.base.specs import MoESpec
from moelab.store import fewbit
from moelab.store.bits import LAYOUT, as_bytes
from moelab.store.codec import RAW, Codec
from moelab.store.codecs import find_codec, read_codec, shard_bounds
from moelab.store.headers import DTYPES, Shape, header_bytes, nbytes

FORMAT = "moelab-store"
VERSION = 2
ALIGN = 4096  # what direct I/O wants of offsets, lengths and addresses
INDEX = "index.json"
WEIGHTS = "weights.safetensors"
SOURCE_LAYOUT = "layout.json"  # of the source, see `moelab.checkpoint.restore`
#: bytes of the other weights that a checksum covers, and of an index and of a small file at most
PIECE = 16 << 20
INDEX_LIMIT = 256 << 20
FILE_LIMIT = 64 << 20
AGAIN = "copy the store again, or convert the model again"


class StoreError(ValueError):
    """A store that is damaged, incomplete or not the one that was asked for."""


CHECKSUM = "xxh3"


def checksum(data: Any) -> str:
    """XXH3 of a bytes-like object, 16 hex digits; releases the GIL."""
    return xxhash.xxh3_64_hexdigest(as_bytes(data))


def aligned(n: int) -> int:
    """`n` rounded up to a multiple of `ALIGN`."""
    return -(-n // ALIGN) * ALIGN


# ---------------------------------------------------------------------------------------------
# what an index says of an expert


class Chunk(NamedTuple):
    offset: int
    length: int
    checksum: str


class TensorEntry(NamedTuple):
    """One tensor of one expert; its planes as (codec, chunks), the exponents' first."""

    dtype: str
    shape: Shape
    checksum: str
    planes: tuple[tuple[Codec, tuple[Chunk, ...]], ...]

    @property
    def n(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return nbytes(self.dtype, self.shape)

    @property
    def codec(self) -> Codec:
        """Of the first plane."""
        return self.planes[0][0]

    @property
    def in_place(self) -> bool:
        """Whether it is one blob that is computed from as it lies."""
        return len(self.planes) == 1 and self.codec.in_place

    @property
    def shards(self) -> int:
        """Of its exponents, each of which can be decoded by itself; 0 if it cannot be decoded in two
        stages, as 16-bit weights can whose exponents are compressed."""
        if len(self.planes) != 2 or self.codec is RAW:
            return 0
        return len(self.planes[0][1]) if self.planes[1][0] is RAW else 1

    def bounds(self, shard: int) -> tuple[int, int]:
        """The first weight of a shard, and the first behind it."""
        return shard_bounds(self.n, self.shards)[shard]

    def stored(self, part: str = "both") -> int:
        """Bytes of its chunks of a part, without padding."""
        return sum(chunk.length for _, chunks in self.of(part) for chunk in chunks)

    def of(self, part: str) -> tuple[tuple[Codec, tuple[Chunk, ...]], ...]:
        """The planes of "E", "SM" or both."""
        return {"E": self.planes[:1], "SM": self.planes[1:], "both": self.planes}[part]


#: of an expert, by name
Entries = dict[str, TensorEntry]


def read_entries(fields: dict[str, list], tensors: dict[str, tuple]) -> Entries:
    """An expert's entries by name from their JSON, name → [checksum, [[codec, [[offset, length,
    checksum]]]]]."""
    _need(list(fields) == list(tensors), "impossible entry: an expert has not the others' tensors")
    entries = {}
    for name, (check, planes) in fields.items():
        dtype, shape = tensors[name]
        possible = len(planes) in (1, DTYPES[dtype].itemsize)
        found = []
        for record, given in planes:
            codec = read_codec(record)
            chunks = tuple(Chunk(int(offset), int(length), of) for offset, length, of in given)
            lengths = [chunk.length for chunk in chunks]
            possible = possible and codec.admits(dtype, tuple(shape), len(planes), lengths)
            found.append((codec, chunks))
        _need(possible, "impossible entry: chunks that do not fit their tensor's type and shape")
        entries[name] = TensorEntry(dtype, tuple(shape), check, tuple(found))
    return entries


def run(entries: Entries, part: str) -> tuple[int, int]:
    """(offset, length) of an expert's E-chunks, SM-chunks or both, both multiples of `ALIGN`; (0,
    0) for no chunks."""
    chunks = [
        chunk for entry in entries.values() for _, chunks in entry.of(part) for chunk in chunks
    ]
    if not chunks:
        return 0, 0
    begin = min(chunk.offset for chunk in chunks) // ALIGN * ALIGN
    return begin, aligned(max(chunk.offset + chunk.length for chunk in chunks)) - begin


def in_file(entries: Entries) -> Iterator[tuple[str, Chunk]]:
    """(name within the expert, chunk) of an expert's chunks in the order of the file."""
    for part, first in (("E", 0), ("SM", 1)):
        for name, entry in entries.items():
            for plane, (_, chunks) in enumerate(entry.of(part), first):
                yield from ((f"{name}.p{plane}.{i}", chunk) for i, chunk in enumerate(chunks))


def intact(entries: Entries, data: Any, offset: int) -> bool:
    """Whether an expert's bytes from `offset` of its file on are its chunks, by their checksums, one
    after another, with zeros behind each up to a multiple of `ALIGN`."""
    at = 0
    for _, chunk in in_file(entries):
        end = at + chunk.length
        after = at + aligned(chunk.length)
        if (
            chunk.offset != offset + at
            or checksum(data[at:end]) != chunk.checksum
            or np.any(as_bytes(data[end:after]))
        ):
            return False
        at = after
    return at == len(data)


class Layer:
    """The index of one MoE layer.

    file : name of its file; size, header : bytes of the file and of its header.
    module : its experts module in the model; stacked : whether that holds one tensor [E, …] for all
        experts, or a module for each.
    tensors : name → (dtype, shape); experts : the entries of each by name.
    """

    def __init__(self, index: int, fields: Record) -> None:
        self.index = index
        self.file = layer_file(index)
        self.module = fields["module"]
        self.stacked = fields["stacked"]
        self.size = int(fields["size"])
        self.header = int(fields["header"])
        self.tensors = {name: _dtype_and_shape(*of) for name, of in fields["tensors"].items()}
        self.experts = [read_entries(expert, self.tensors) for expert in fields["experts"]]
        at = self.header
        contiguous = self.tensors and self.header % ALIGN == 0 < self.header
        for entries in self.experts:
            size = sum(entry.nbytes for entry in entries.values())
            contiguous = contiguous and size <= 256 * self.size
            for _, chunk in in_file(entries):
                contiguous = contiguous and chunk.offset == at
                at += aligned(chunk.length)
        _need(
            contiguous and at == self.size,
            f"impossible entry: the chunks in {self.file} do not follow each other to its end",
        )


def layer_file(layer: int) -> str:
    return f"experts-{layer:05d}.safetensors"


# ---------------------------------------------------------------------------------------------
# headers of files, and the index


def layer_header(layer: Layer) -> bytes:
    """The safetensors header of a layer's chunks and the padding between them."""
    about = {name: getattr(layer, name) for name in ("module", "stacked", "tensors")}
    parts: Record = {}
    for expert, entries in enumerate(layer.experts):
        for name, chunk in in_file(entries):
            key = f"{layer.index}.{expert}.{name}"
            parts[key] = "U8", [chunk.length]
            if padding := aligned(chunk.length) - chunk.length:
                parts["pad." + key] = "U8", [padding]
    return header_bytes(parts, {"moelab.layer": json.dumps(about)}, layer.header)


def weights_header(weights: dict[str, list], digest: str) -> bytes:
    """The safetensors header of the other weights, key → [dtype, shape, …]; `digest` is that of the
    index."""
    return header_bytes(weights, {"format": "pt", "moelab.index": digest})


def seal(fields: Record) -> tuple[bytes, str]:
    """(bytes of an index, digest): JSON whose last member is the SHA-256 of all bytes before it."""
    text = json.dumps(fields, separators=(",", ":"))[:-1]
    digest = sha256(text.encode()).hexdigest()
    return f'{text},"sha256":"{digest}"}}'.encode(), digest


def unseal(raw: bytes) -> Record:
    """The fields of a sealed index; StoreError unless every byte is as it was written."""
    text, _, _ = raw.rpartition(b',"sha256":"')
    intact = raw == text + f',"sha256":"{sha256(text).hexdigest()}"}}'.encode()
    _need(intact, f"it does not match its own checksum; {AGAIN}")
    return json.loads(raw)


# ---------------------------------------------------------------------------------------------
# what is checked


def _need(ok: Any, what: str) -> None:
    if not ok:
        raise StoreError(what)


def _dtype_and_shape(dtype: str, shape: list[int]) -> tuple[str, Shape]:
    shape = tuple(map(int, shape))
    _need(dtype in DTYPES and min(shape, default=0) >= 0, "impossible entry: its type or shape")
    return dtype, shape


def plain_name(name: Any) -> str:
    """The name of a file in a folder; StoreError for one that leads out of it or that no file
    should have."""
    ok = type(name) is str and re.fullmatch(r"[^/\\:\x00-\x1f]{1,200}", name)
    _need(ok and name not in (".", ".."), f"{str(name)[:80]!r} is not the plain name of a file")
    return name


# ---------------------------------------------------------------------------------------------
# stores

#: (file, offset, memory to fill) of what is read
Extent = tuple[Path, int, list[memoryview]]


class ExpertFiles:
    """What a `Reader` reads experts from: a store, or a checkpoint in place of one.

    folder, spec, identity : as of `ExpertStore`.
    codec : how its experts are compressed, by name.
    layers : for each MoE layer something with `tensors` and `experts`, as of `Layer`.
    aligned : whether chunks begin at multiples of `ALIGN`.
    checksum : of a bytes-like object, as entries have them; None if chunks have none.
    scratch : bytes of memory that reading takes besides its buffers.
    weights_bytes : of the weights that are not experts'.
    stored_bytes(layer, expert, part) : that are read for a part of an expert.
    extents(parts) : what to read, one after another, for `Chunks` that follow each other in the file.
    """

    scratch = 0

    def entries(self, layer: int, expert: int) -> Entries:
        """One expert's entries by tensor name."""
        return self.layers[layer].experts[expert]

    @cached_property
    def _kinds(self) -> list[TensorEntry]:
        """A tensor of each kind that experts have."""
        kinds = {
            (entry.codec, entry.dtype, entry.shape, len(entry.planes)): entry
            for layer in self.layers
            for entries in layer.experts
            for entry in entries.values()
        }
        return list(kinds.values())

    @property
    def in_place(self) -> bool:
        """Whether every tensor of every expert can be computed from as it lies."""
        return all(entry.in_place for entry in self._kinds)

    @property
    def few_bits(self) -> bool:
        """Whether some expert's tensor is in few bits."""
        return any(entry.codec.few_bits for entry in self._kinds)

    @property
    def raw(self) -> bool:
        """Whether every tensor is stored as eager computes with it."""
        return all(entry.codec is RAW for entry in self._kinds)

    @property
    def multiplied(self) -> bool:
        """Whether kernels multiply every tensor in few bits as it lies."""
        packed = [entry for entry in self._kinds if entry.codec.few_bits]
        return all(entry.codec.kernel(entry.dtype, entry.shape) for entry in packed)


class ExpertStore(ExpertFiles):
    """An expert store; index, sizes, headers and small files are checked when it is opened, weights
    are not read.

    codec : how the experts are compressed, by name.
    quantized : the few-bit format that the weights were rounded to, and by which calibration, as of
        `fewbit.require_rounding`; None where they are the source's own.
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

    aligned = True
    checksum = staticmethod(checksum)

    def __init__(self, folder: str | Path) -> None:
        self.folder = absolute(folder)
        index = self.folder / INDEX
        if not index.is_file():
            raise FileNotFoundError(
                f"there is no expert store at {self.folder} (no {INDEX}); `moelab convert SOURCE "
                f"FOLDER` makes one, or goes on with one that was cut off"
            )
        what = "it is no index of an expert store; convert the model again"
        with blamed(index, what, raising=StoreError):
            self._read(self._begin(INDEX, index.stat().st_size, INDEX_LIMIT))
        self._check_files()

    def _read(self, index: bytes) -> None:
        fields = unseal(index)
        found = [fields[name] for name in ("format", "version", "layout", "checksum")]
        readable = [FORMAT, VERSION, LAYOUT, CHECKSUM]
        _need(found == readable, f"it is in {found}; this moelab reads {readable}")
        self.spec = typed(fields["spec"], MoESpec)
        self.identity = fields["identity"]
        _need(re.fullmatch("[0-9a-f]{16}", self.identity), "an impossible identity")
        self.quantized: str | None = fields.get("quantized") or None
        if self.quantized:
            fewbit.require_rounding(self.quantized)
            self.identity += f"-{self.quantized}"
        self.codec = fields["codec"]
        find_codec(self.codec)
        self.layers = [Layer(i, layer) for i, layer in enumerate(fields["layers"])]
        experts = [len(layer.experts) for layer in self.layers]
        _need(
            len(experts) == self.spec.L and {*experts} == {self.spec.E},
            f"its layers are not {self.spec.L} of {self.spec.E} experts, as of {self.spec.name}",
        )
        files = fields["files"].items()
        self.files = {plain_name(name): (int(size), check) for name, (size, check) in files}
        weights = fields["weights"]
        shapes = {key: _dtype_and_shape(*of[:2]) for key, of in weights.items()}
        self._weights_header = weights_header(shapes, fields["sha256"])
        self.weights: dict[str, tuple[str, Shape, int, int, list[str]]] = {}
        at = len(self._weights_header)
        for key, (dtype, shape) in shapes.items():
            size = nbytes(dtype, shape)
            checks = weights[key][2]
            _need(len(checks) == -(-size // PIECE), f"{key} has {len(checks)} checksums")
            self.weights[key] = dtype, shape, at, size, checks
            at += size
        self.weights_size, self.weights_bytes = at, at - len(self._weights_header)

    def _check_files(self) -> None:
        """Sizes of all files, contents of small ones, headers of the others."""
        begins = [(name, *of, FILE_LIMIT) for name, of in self.files.items()]
        headers = [(WEIGHTS, self.weights_size, self._weights_header)]
        headers += [(layer.file, layer.size, layer_header(layer)) for layer in self.layers]
        begins += [(name, size, checksum(of), len(of)) for name, size, of in headers]
        wrong = [
            name for name, size, of, most in begins if checksum(self._begin(name, size, most)) != of
        ]
        _need(
            not wrong,
            f"{self.folder}: {', '.join(wrong)[:200]} is damaged at its beginning, or does not belong "
            f"to this {INDEX}; {AGAIN}",
        )

    def _begin(self, name: str, size: int, most: int) -> bytes:
        """What a file begins with; StoreError if it is not there or has another size."""
        path = self.folder / name
        _need(path.is_file(), f"{self.folder} lacks {name}; {AGAIN}")
        found = path.stat().st_size
        _need(found == size, f"{path} has {found:,} bytes, not {size:,}; {AGAIN}")
        with open(path, "rb") as f:
            return f.read(most)

    def stored_bytes(self, layer: int, expert: int, part: str) -> int:
        return run(self.entries(layer, expert), part)[1]

    def extents(self, parts: list[Any]) -> Iterable[Extent]:
        memory = [memoryview(part.data) for part in parts]
        return [(self.folder / layer_file(parts[0].layer), parts[0].offset, memory)]

    def table(self) -> list[Record]:
        """A row for each tensor of an expert (all layers together) and one for all: counts, bytes
        and fractions."""
        sizes: dict[tuple, Any] = defaultdict(int)
        for entries in (entries for layer in self.layers for entries in layer.experts):
            for name, entry in entries.items():
                codec = "+".join(codec.name for codec, _ in entry.planes)
                key = name, entry.dtype, entry.shape, codec
                of = np.array([1, entry.nbytes, entry.stored("E"), entry.stored("SM")])
                sizes[key] += of
        total = sum(sizes.values())
        total[0] = self.spec.L * self.spec.E
        sizes["all experts", "", (), self.quantized or self.codec] = total
        columns = "tensor", "dtype", "shape", "codec", "count", "bytes", "E_bytes", "SM_bytes"
        rows = [dict(zip(columns, (*key, *of.tolist()))) for key, of in sizes.items()]
        for row in rows:
            row["fraction"] = (row["E_bytes"] + row["SM_bytes"]) / max(1, row["bytes"])
        return rows
