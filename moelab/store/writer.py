"""Writing an expert store, one expert in memory at a time; a kill at any byte costs only the last
seconds.

Source: ZipMoE §3.1, offline initialization. Everything is written to `DESTINATION.part`. Experts
are appended to their layer's file; once their bytes are on the disk (fsync), a line for each goes
to the journal `DESTINATION.part.jsonl`. To resume, what the journal lists is read again; from the
first expert on that is damaged or missing they are written anew. What is written depends on the
tensors and the codec alone, so a resumed store has the same bytes. Room for a safetensors
header is reserved at the beginning of a layer's file and filled at the end; then come the other
weights and the index, and the folder is renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moelab.base.files import nearest, vacant
from moelab.base.journal import Journal
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.base.specs import MoESpec
from moelab.store import codecs
from moelab.store.bits import LAYOUT, as_bytes
from moelab.store.codec import Blobs
from moelab.store.headers import NAMES, WEIGHT_MAP, Header
from moelab.store.layout import (
    CHECKSUM,
    FORMAT,
    INDEX,
    PIECE,
    SOURCE_LAYOUT,
    VERSION,
    WEIGHTS,
    Layer,
    aligned,
    checksum,
    intact,
    layer_file,
    layer_header,
    plain_name,
    read_entries,
    seal,
    weights_header,
)

COMMIT = 64 << 20  # bytes of a layer's file between two syncs
BEHIND = 32 << 20  # bytes of an expert that may be written while the next one is compressed


class StoreWriter:
    """Writes experts in order, then the other weights and files, then the index. One process at a
    time.

    destination : the store's folder; `destination.part` until it is finished.
    spec, identity : of the source.
    layers : for each MoE layer its experts module's name, its number of experts and whether the
        model stacks them.
    codec : see `moelab.store.codecs.compress_tensor`.
    quantized : the few-bit format that experts are rounded to, as the index then says; None for the
        source's weights.
    content : a digest of the source's files; an unfinished store of other ones is begun anew.

    `records` has a line of the journal for each expert that is safely on the disk, in order.

    Raises
    ------
    FileExistsError : the destination is there, or another process is writing it.
    ValueError : an unknown codec, before anything is written; an unfinished store of another model,
        codec or number of shards is in the way.
    """

    def __init__(
        self,
        destination: str | Path,
        spec: MoESpec,
        identity: str,
        layers: list[tuple[str, int, bool]],
        codec: str = codecs.DEFAULT,
        quantized: str | None = None,
        content: str = "",
    ) -> None:
        self.destination = vacant(destination)
        self.folder = self.destination.with_name(self.destination.name + ".part")
        codecs.find_codec(codec)
        self.layers = layers
        self.codec = codec
        self._keys = [(layer, expert) for layer in range(spec.L) for expert in range(spec.E)]
        head = {
            "format": FORMAT,
            "version": VERSION,
            "spec": asdict(spec),
            "identity": identity,
            "codec": codec,
            "K": codecs.SHARDS,
            "layout": LAYOUT,
            "checksum": CHECKSUM,
            "layers": layers,
            **({"quantized": quantized} if quantized else {}),
        }
        self.head = json.loads(json.dumps(head))  # as it will be read back: lists for tuples
        self.records: list[Record] = []
        self._pending: list[Record] = []  # of experts that are written but not yet synced
        self._file: Any = None  # of the layer that is written, at byte `_end`
        self._end = self._unsynced = 0
        self._thread = ThreadPoolExecutor(1)
        self._writing = None
        with self._explained():
            journal = Path(f"{self.folder}.jsonl")
            for path in (self.folder, journal, *self.folder.glob("*")):
                if path.is_symlink():
                    raise ValueError(f"{path} is a link, and writing would follow it; remove it")
            self.folder.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(journal)
        try:
            self._resume(content)
        except BaseException:
            self.close()
            raise

    # -----------------------------------------------------------------------------------------
    # resuming

    def _resume(self, content: str) -> None:
        """Go on from what the journal lists; anew if that is of another source, refused if it was
        begun with other options."""
        lines = self._journal.lines
        begun = lines[0] if lines and isinstance(lines[0], dict) else {}
        head = self.head | {"content": content}
        differ = {key for key in begun | head if begun.get(key) != head.get(key)}
        there = begun.get("format") == FORMAT and any(self.folder.glob("experts-*"))
        if there and differ - {"content"}:
            raise ValueError(
                f"{self.folder} is an unfinished store with another {', '.join(sorted(differ))}; "
                f"finish it with the source and the options that it was begun with, or remove it"
            )
        if not differ:
            self.records = list(self._whole(lines[1:]))
        if differ or len(self.records) < len(lines) - 1:
            with self._explained():
                self._journal.restart([head, *self.records])
        self._end = self.records[-1]["end"] if self.records else 0
        for path in self.folder.glob("experts-*.safetensors"):
            if path.name not in (layer_file(record["layer"]) for record in self.records):
                path.unlink()

    def _whole(self, records: list[Record]) -> Iterator[Record]:
        """The journal's records up to the first one that is not the next expert's, or whose bytes are
        not whole or do not lie right behind those of the one before."""
        checked = progress(records, "checking what is there", unit="expert") if records else ()
        after = 0
        with suppress(Exception):  # a journal that makes no sense, a file that cannot be read
            for key, record in zip(self._keys, checked):
                entries = read_entries(record["entries"], record["tensors"])
                begin = record["begin"]
                end = record["end"]
                with open(self.folder / layer_file(key[0]), "rb") as f:
                    f.seek(begin)
                    data = f.read(end - begin)
                follows = begin + len(data) == end and (not key[1] or begin == after)
                said = record["layer"], record["expert"]
                if not (follows and said == key and intact(entries, data, begin)):
                    return
                after = end
                yield record

    # -----------------------------------------------------------------------------------------
    # experts

    def missing(self) -> Iterator[tuple[int, int]]:
        """(layer, expert) of every expert that is still to be added, in the order to add them."""
        yield from self._keys[len(self.records) :]

    def add(
        self,
        layer: int,
        expert: int,
        tensors: Record,
        sources: list[list] | None = None,
        blobs: Blobs | None = None,
    ) -> None:
        """Compress and append the next expert; empties `tensors` as it goes, to free them.

        sources : which of the source's tensors these are, for `moelab.checkpoint.restore`; kept as they
            are.
        blobs : (codec, blob) of tensors that are stored in few bits; `tensors` has what they unpack
            to.

        A thread writes it while the next expert is compressed, unless it is larger than `BEHIND`.
        Raises OSError, saying what to do, if the disk is full or fails, perhaps for the expert
        before."""
        # beside few-bit matrices what is left stays readable in place
        codec = self.codec if not blobs or codecs.find_codec(self.codec).in_place else "bf12"
        packed = {}
        entries = {}
        shapes = {}
        size = 0
        for name in list(tensors):
            tensor = tensors.pop(name).contiguous()
            shapes[name] = [NAMES[tensor.dtype], list(tensor.shape)]
            entries[name] = [checksum(tensor), []]
            if blobs and name in blobs:
                form, blob = blobs[name]
                packed[name] = codecs.PackedTensor([codecs.Plane(form, (blob,))])
            else:
                packed[name] = codecs.compress_tensor(tensor, codec)
            size += tensor.nbytes
            del tensor
        self._wait()
        record = {"layer": layer, "expert": expert, "entries": entries, "tensors": shapes}
        begin = self._end
        if not expert:  # room for the header of the layer's file
            n_chunks = sum(
                len(plane.shards) + codecs.SHARDS for p in packed.values() for plane in p
            )
            longest = (
                max(map(len, packed)) + 150
            )  # bytes of an entry's JSON; its padding's are fewer
            about = 1000 + 2 * len(json.dumps([self.layers[layer], shapes]))
            begin = aligned(8 + about + 2 * self.layers[layer][1] * n_chunks * longest)
        self._writing = self._thread.submit(
            self._write_expert, record | {"sources": sources}, packed, begin
        )
        if size > BEHIND:
            self._wait()

    def _wait(self) -> None:
        """Wait until the expert before is written; raises what writing it raised."""
        if self._writing:
            done = self._writing
            self._writing = None
            done.result()

    def _write_expert(
        self, record: Record, packed: dict[str, codecs.PackedTensor], begin: int
    ) -> None:
        with self._explained():
            if not self._file or not record["expert"]:
                self._open(record["layer"], begin)
            for exponents in (True, False):
                for name, p in packed.items():
                    for plane in p[:1] if exponents else p[1:]:
                        chunks = [self._append(shard) for shard in plane.shards]
                        record["entries"][name][1].append([plane.codec.record, chunks])
            self._pending.append(record | {"begin": begin, "end": self._end})
            if self._unsynced >= COMMIT:
                self._commit()

    def _open(self, layer: int, begin: int) -> None:
        """Write to a layer's file from `begin` on."""
        self._commit()
        if self._file:
            self._file.close()
        path = self.folder / layer_file(layer)
        self._file = open(path, "r+b" if path.exists() else "x+b", buffering=0)
        self._file.seek(begin)
        self._end = begin

    def _append(self, shard: Any) -> list:
        n = len(shard)
        for view in (memoryview(as_bytes(shard)), memoryview(bytes(aligned(n) - n))):
            while view:
                view = view[self._file.write(view) :]  # the system may take less than it is given
        self._end += aligned(n)
        self._unsynced += aligned(n)
        return [self._end - aligned(n), n, checksum(shard)]

    def _commit(self) -> None:
        """Wait until the layer's file is on the disk, then enter its new experts in the journal."""
        if self._pending:
            os.fsync(self._file.fileno())
            self._journal.append(self._pending)
            self.records += self._pending
            self._pending = []
            self._unsynced = 0

    # -----------------------------------------------------------------------------------------
    # the rest of the store

    def finish(
        self,
        weights: Header,
        files: list[tuple[str, bytes]],
        source: Record | None = None,
    ) -> None:
        """Write headers, the other weights, the small files and the index; all but the renaming.

        weights : by key, where they are in files, or what decodes them; copied piece by piece.
        files : (name, content) of config, tokenizer and the like.
        source : the source's files, for `layout.json`; None for a store that cannot be restored to
        a source."""
        self._wait()
        with self._explained():
            self._commit()
            contents = dict(files)
            experts = [record.get("sources") for record in self.records]
            if source is not None and None not in experts:
                contents[SOURCE_LAYOUT] = json.dumps(source | {"experts": experts}).encode()
            weight_map = {"metadata": {}, "weight_map": dict.fromkeys(weights, WEIGHTS)}
            contents[WEIGHT_MAP] = json.dumps(weight_map, indent=1).encode()
            table = {}
            for name, content in contents.items():
                _write(self.folder / plain_name(name), content)
                table[name] = [len(content), checksum(content)]
            layers = self._write_headers()
            others = {key: [of.dtype, list(of.shape), []] for key, of in weights.items()}
            with open(self.folder / WEIGHTS, "wb") as out:
                out.write(bytes(len(weights_header(others, "0" * 64))))  # room for their header
                for key, tensor in weights.items():
                    for piece in tensor.pieces(PIECE):
                        others[key][2].append(checksum(piece))
                        out.write(piece)
            index, digest = seal(self.head | {"layers": layers, "weights": others, "files": table})
            _write(self.folder / WEIGHTS, weights_header(others, digest), "r+b")
            _write(self.folder / INDEX, index)

    def _write_headers(self) -> list[Record]:
        """Fill in the layers' headers; returns their index."""
        layers = []
        for layer, (module, E, stacked) in enumerate(self.layers):
            records = self.records[layer * E : (layer + 1) * E]
            layers.append(
                {
                    "module": module,
                    "stacked": stacked,
                    "tensors": records[0]["tensors"],
                    "header": records[0]["begin"],
                    "size": records[-1]["end"],
                    "experts": [record["entries"] for record in records],
                }
            )
            os.truncate(self.folder / layer_file(layer), records[-1]["end"])
            _write(
                self.folder / layer_file(layer),
                layer_header(Layer(layer, layers[-1])),
                "r+b",
            )
        return layers

    def publish(self) -> Path:
        """Give the finished store its name."""
        os.rename(self.folder, self.destination)
        self._journal.remove()
        return self.destination

    def close(self) -> None:
        """Close the files; what is committed stays and can be resumed."""
        self._thread.shutdown()
        for file in (self._file, self._journal):
            if file is not None:
                file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Let errors of the disk say where, how much space there is, and that what is written is
        kept."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            folder = nearest(self.folder)
            raise OSError(
                error.errno,
                f"writing {self.folder} failed: {error.strerror} {error.filename or ''} "
                f"({shutil.disk_usage(folder).free / 1e9:.2f} GB free). What is written is kept: put it "
                f"right and run the same command again, and it goes on from there",
            ) from error


def _write(path: Path, content: bytes, mode: str = "wb") -> None:
    with open(path, mode) as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
