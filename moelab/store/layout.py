"""The expert store on disk: which file holds what, and an index that vouches for every byte.

Source: ZipMoE §3.1 (E-chunks, SM-chunks and metadata, written once before deployment). A store is a folder that
any tool can open and that transformers opens as a checkpoint without its experts:

    config.json, tokenizer files          as in the source
    weights.safetensors                   all other weights under the source's keys, with model.safetensors.index.json
    experts-00000.safetensors …           one file a MoE layer, its entries the chunks of its experts, dtype U8
    index.json                            geometry, offsets, checksums, the identity of the source

`3.17.gate_up_proj.p0.1` is shard 1 of plane 0 of a tensor of expert 17 of MoE layer 3. Plane 0 are the exponents
(E-chunks); the other planes, one of sign-mantissa bytes for bf16, are the SM-chunks. For each expert all E-chunks
come first, then all SM-chunks, so each kind is one contiguous *run* and both together are one too. Every chunk
begins on a multiple of 4096 bytes of its file, for direct I/O; entries named `pad.…` fill the gaps, since a
safetensors file may have none.

Shapes: an expert's tensors are the model's own, without the leading axis E. Left out: writing, reading, decoding.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab.specs import MoESpec
from moelab.store.bits import LAYOUT, as_bytes

try:
    import xxhash
except ImportError:         # zlib's CRC is always there; it is six times slower
    xxhash = None

FORMAT, VERSION = "moelab-store", 1
ALIGN = 4096                # what direct I/O wants of offsets, lengths and addresses
INDEX, WEIGHTS, WEIGHT_MAP = "index.json", "weights.safetensors", "model.safetensors.index.json"
PARTS = ("E", "SM", "both")
#: torch's name of a type → the name that safetensors gives it
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
          "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "uint8": "U8", "int8": "I8", "int16": "I16",
          "int32": "I32", "int64": "I64", "bool": "BOOL"}
TORCH_NAMES = {short: name for name, short in DTYPES.items()}
WIDTHS = {short: getattr(torch, name).itemsize for short, name in TORCH_NAMES.items()}


class StoreError(ValueError):
    """A store that is damaged, incomplete or not the one that was asked for."""


#: name → checksum of a bytes-like object, 16 hex digits; both release the GIL
CHECKSUMS: dict[str, Callable[[Any], str]] = {"crc32": lambda data: f"{zlib.crc32(as_bytes(data)):016x}"}
if xxhash is not None:
    CHECKSUMS = {"xxh3": lambda data: xxhash.xxh3_64_hexdigest(as_bytes(data)), **CHECKSUMS}


def aligned(n: int) -> int:
    """`n` rounded up to a multiple of `ALIGN`."""
    return -(-n // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` bytes at `offset` of the layer's file."""

    offset: int
    length: int
    checksum: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one expert: its planes as (codec, chunks), the exponents' first, and the checksum of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str
    planes: tuple[tuple[str, tuple[Chunk, ...]], ...]

    @property
    def n(self) -> int:
        """Number of weights."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return self.n * WIDTHS[self.dtype]

    def stored(self, part: str = "both") -> int:
        """Bytes of its chunks, without padding."""
        planes = {"E": self.planes[:1], "SM": self.planes[1:], "both": self.planes}[part]
        return sum(chunk.length for _, chunks in planes for chunk in chunks)


class Layer:
    """The index of one MoE layer: where each of its experts lies.

    file : name of its file; module : its experts module in the model; stacked : whether the model holds one tensor
    [E, …] for all experts (or modules of their own); tensors : name → (dtype, shape).
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self.file, self.module, self.stacked = fields["file"], fields["module"], bool(fields["stacked"])
        self.tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in fields["tensors"].items()}
        self.size, self.header = fields["size"], fields["header"]
        self.experts = [read_entries(expert, self.tensors) for expert in fields["experts"]]


def read_entries(fields: dict[str, list], tensors: dict[str, tuple]) -> dict[str, TensorEntry]:
    """An expert's entries by name from their JSON, name → [checksum, [[codec, [[offset, length, checksum]]]]]."""
    return {name: TensorEntry(*tensors[name], checksum, tuple(
                (codec, tuple(Chunk(*chunk) for chunk in chunks)) for codec, chunks in planes))
            for name, (checksum, planes) in fields.items()}


def run(entries: dict[str, TensorEntry], part: str) -> tuple[int, int]:
    """(offset, length) of an expert's E-chunks, SM-chunks or both, both multiples of `ALIGN`; (0, 0) for no chunks."""
    chunks = [chunk for entry in entries.values() for i, (_, chunks) in enumerate(entry.planes)
              if part == "both" or (i == 0) == (part == "E") for chunk in chunks]
    if not chunks:
        return 0, 0
    begin = min(chunk.offset for chunk in chunks)
    return begin, aligned(max(chunk.offset + chunk.length for chunk in chunks)) - begin


def chunk_names(layer: int, expert: int, entries: dict[str, TensorEntry]) -> Iterator[tuple[str, Chunk]]:
    """(name in the safetensors file, chunk) of an expert's chunks in the order of the file."""
    for exponents in (True, False):
        for name, entry in entries.items():
            for plane, (_, chunks) in enumerate(entry.planes):
                if (plane == 0) == exponents:
                    yield from ((f"{layer}.{expert}.{name}.p{plane}.{i}", chunk) for i, chunk in enumerate(chunks))


def seal(fields: dict[str, Any]) -> bytes:
    """The bytes of an index: JSON whose last member is the SHA-256 of all bytes before it."""
    text = json.dumps(fields, separators=(",", ":"))[:-1]
    return f'{text},"sha256":"{sha256(text.encode()).hexdigest()}"}}'.encode()


def unseal(raw: bytes, file: Path) -> dict[str, Any]:
    """The fields of a sealed index; StoreError unless every byte is as it was written."""
    text, _, _ = raw.rpartition(b',"sha256":"')
    if f'{{}},"sha256":"{sha256(text).hexdigest()}"}}'.encode()[2:] != raw[len(text):]:
        raise StoreError(f"{file} is damaged: it does not match its own checksum. Convert the model again")
    return json.loads(raw)


class ExpertStore:
    """An expert store, checked as far as that costs no reading of weights: index, sizes, headers, small files.

    Attributes
    ----------
    folder : where it is.
    spec : the geometry of the model, `moelab.specs.MoESpec`.
    codec, K : how the experts are compressed; name of the codec, exponent shards a tensor.
    identity : of the checkpoint that the store was made from, see `source_identity`.
    layers : one `Layer` for each MoE layer.

    Raises
    ------
    FileNotFoundError : no such folder or no index in it.
    StoreError : another format or version, a damaged index, a file that is missing or has another size.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        if not index.is_file():
            unfinished = self.folder.with_name(self.folder.name + ".part").is_dir()
            raise FileNotFoundError(f"there is no expert store at {self.folder}" + (
                ": its conversion was cut off; run the same convert command again and it goes on" if unfinished else
                f" (no {INDEX}); make one with `python -m moelab convert SOURCE {self.folder}`"))
        fields = unseal(index.read_bytes(), index)
        try:
            self._set(fields)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise error if isinstance(error, StoreError) else StoreError(
                f"{index} is no index of an expert store ({type(error).__name__}: {error})") from error
        self._check_files()

    def _set(self, fields: dict[str, Any]) -> None:
        if fields["format"] != FORMAT or fields["version"] != VERSION:
            raise StoreError(f"{self.folder} has format {fields['format']!r} version {fields['version']!r}; this "
                             f"moelab reads {FORMAT!r} version {VERSION}. Convert the model again")
        if fields["layout"] != LAYOUT or fields["checksum"] not in CHECKSUMS:
            raise StoreError(f"{self.folder} has byte layout {fields['layout']!r} and checksums "
                             f"{fields['checksum']!r}; here there are {LAYOUT!r} and {', '.join(CHECKSUMS)}"
                             + ("; install the package xxhash" if fields["checksum"] == "xxh3" else ""))
        self.spec = MoESpec.from_dict(fields["spec"])
        self.codec, self.K, self.identity = fields["codec"], fields["K"], fields["identity"]
        self.checksum_name, self.checksum = fields["checksum"], CHECKSUMS[fields["checksum"]]
        self.weights: dict[str, list] = fields["weights"]       # key → dtype, shape, offset, length, checksums
        self.files: dict[str, list] = fields["files"]           # name → size, length of the header, its checksum
        self.layers = [Layer(layer) for layer in fields["layers"]]
        for layer in self.layers:
            sizes = {name: int(np.prod(shape, dtype=np.int64)) for name, (_, shape) in layer.tensors.items()}
            for entries in layer.experts:
                self._check_entries(layer, entries, sizes)

    def _check_entries(self, layer: Layer, entries: dict[str, TensorEntry], sizes: dict[str, int]) -> None:
        """Whatever else the index says, no reader may be led out of the file or into absurd sizes."""
        for name, entry in entries.items():
            chunks = [chunk for _, plane in entry.planes for chunk in plane]
            if len(entry.planes) not in (1, WIDTHS[entry.dtype]) or not all(plane for _, plane in entry.planes) or any(
                    c.offset % ALIGN or c.length < 0 or not layer.header <= c.offset <= layer.size - c.length
                    for c in chunks) or sizes[name] > 256 * max(1, layer.size) or set(entries) != set(layer.tensors):
                raise StoreError(f"{self.folder / INDEX} has an impossible entry for {name} of {layer.module}")

    def _check_files(self) -> None:
        for name, (size, header, checksum) in self.files.items():
            path = self.folder / name
            if not path.is_file():
                raise StoreError(f"{self.folder} lacks {name}; copy the store again, or convert the model again")
            if path.stat().st_size != size:
                raise StoreError(f"{path} has {path.stat().st_size:,} bytes, {size:,} were written; copy the store "
                                 f"again, or convert the model again")
            with open(path, "rb") as f:
                if self.checksum(f.read(header)) != checksum:
                    raise StoreError(f"{path} is damaged in its first {header:,} bytes; copy the store again, or "
                                     f"convert the model again")

    def entries(self, layer: int, expert: int) -> dict[str, TensorEntry]:
        """One expert's entries by tensor name; LookupError for an expert that the model does not have."""
        if not 0 <= layer < len(self.layers) or not 0 <= expert < len(self.layers[layer].experts):
            raise LookupError(f"{self.folder} has no expert {expert} of MoE layer {layer}; it has "
                              f"{len(self.layers)} layers of {self.spec.E} experts")
        return self.layers[layer].experts[expert]

    def require(self, identity: str) -> None:
        """Raise StoreError unless the store was made from the checkpoint with this identity (`source_identity`)."""
        if identity != self.identity:
            raise StoreError(f"{self.folder} holds the experts of {self.spec.name} (source {self.identity}), not those "
                             f"of the checkpoint asked for (source {identity}); convert that one to a store of its own")

    def table(self) -> list[dict[str, Any]]:
        """A row for each tensor of an expert (all layers together) and one for all: counts, bytes and fractions."""
        rows: dict[tuple, dict[str, Any]] = {}
        for layer in self.layers:
            for entries in layer.experts:
                for name, entry in entries.items():
                    codec = "+".join(codec for codec, _ in entry.planes)
                    for key in ((name, entry.dtype, entry.shape, codec), ("all experts", "", (), self.codec)):
                        row = rows.setdefault(key, dict(zip(("tensor", "dtype", "shape", "codec"), key)) | dict(
                            count=0, bytes=0, E_bytes=0, SM_bytes=0))
                        row["count"] += key[0] == name or name == next(iter(entries))       # experts, not tensors
                        row["bytes"] += entry.nbytes
                        row["E_bytes"] += entry.stored("E")
                        row["SM_bytes"] += entry.stored("SM")
        for row in rows.values():
            row["fraction"] = (row["E_bytes"] + row["SM_bytes"]) / max(1, row["bytes"])
        return sorted(rows.values(), key=lambda row: row["tensor"] == "all experts")


def source_identity(config: Path, files: Iterable[Path]) -> str:
    """Sixteen hex digits that name a checkpoint by its config and its files' names, sizes, headers and samples.

    The samples are 64 pieces of 4 KB spread over the file, so two fine-tunes of one model differ although their
    headers are the same. Reading everything would cost as much as converting it; a change that leaves all samples
    untouched is not seen.
    """
    digest = sha256(config.read_bytes())
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with open(file, "rb") as f:
            digest.update(f.read(8 + int.from_bytes(f.read(8), "little")))
            for i in range(64):
                f.seek(max(0, size - ALIGN) * i // 63)
                digest.update(f.read(ALIGN))
    return digest.hexdigest()[:16]
