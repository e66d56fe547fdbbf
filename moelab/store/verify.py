"""Re-reading a store: every byte against its checksum, every tensor decoded and against its own
checksum.

What passes is, bit for bit, what was converted. A damaged store is copied or converted again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from moelab.base.progress import progress
from moelab.store.headers import Tensors
from moelab.store.layout import AGAIN, PIECE, WEIGHTS, ExpertStore, StoreError, intact
from moelab.store.reader import Chunks, Reader, decode, empty_tensors


def verify(store: ExpertStore | str | Path) -> dict[str, int]:
    """Re-read a store completely, from the disk itself where the system can; returns how much was
    found right.

    Raises
    ------
    StoreError : something is damaged; names the file, and the chunk or tensor.
    FileNotFoundError, OSError : there is no store, or it cannot be read.
    """
    store = store if isinstance(store, ExpertStore) else ExpertStore(store)
    check_weights(store)
    found = {"experts": 0, "chunks": 0, "bytes": store.weights_bytes}
    for chunks, _ in checked_experts(store, "verifying"):
        if not intact(chunks.entries, chunks.data, chunks.offset):
            raise StoreError(
                f"{store.folder / store.layers[chunks.layer].file} is damaged: behind the chunks of expert "
                f"{chunks.expert} is something else than zeros; {AGAIN}"
            )
        found["experts"] += 1
        found["chunks"] += sum(len(c) for entry in chunks.entries.values() for _, c in entry.planes)
        found["bytes"] += len(chunks.data)
    return found


def checked_experts(store: ExpertStore, doing: str) -> Iterator[tuple[Chunks, Tensors]]:
    """(chunks, tensors) of every expert, checked, in the same memory one after another; StoreError
    for damage."""
    total = sum(layer.size - layer.header for layer in store.layers)
    with Reader(store) as reader, progress(desc=doing, total=total, unit="B") as bar:
        buffer = reader.buffer()
        for i, layer in enumerate(store.layers):
            out = empty_tensors(layer.experts[0])
            for expert, entries in enumerate(layer.experts):
                chunks = reader.read(i, expert, "both", buffer)
                for name, tensor in decode(chunks, chunks, out).items():
                    if store.checksum(tensor) != entries[name].checksum:
                        raise StoreError(
                            f"{store.folder / layer.file}: {name} of expert {expert} of MoE layer {i} "
                            f"does not decode to what was converted; convert the model again"
                        )
                yield chunks, out
                bar.update(len(chunks.data))


def check_weights(store: ExpertStore) -> None:
    """Check the weights that are not experts'. Raises StoreError naming the damaged tensor."""
    for _ in checked_weights(store):
        pass


def checked_weights(store: ExpertStore) -> Iterator[tuple[str, int, bytes]]:
    """(key, first byte, bytes) of pieces of the weights that are not experts', checked."""
    path = store.folder / WEIGHTS
    with open(path, "rb") as f:
        for key, (_, _, offset, size, checksums) in store.weights.items():
            f.seek(offset)
            for i, expected in enumerate(checksums):
                begin = i * PIECE
                data = f.read(min(PIECE, size - begin))
                if store.checksum(data) != expected:
                    raise StoreError(
                        f"{path} is damaged: {key} does not match its checksum (between bytes "
                        f"{offset + begin:,} and {offset + begin + len(data):,}); copy the store "
                        f"again, or convert the model again"
                    )
                yield key, begin, data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="the store's folder")


def main(args: argparse.Namespace) -> int:
    try:
        found = verify(args.store)
    except StoreError as error:
        print(f"moelab: {error}")
        return 1
    print(
        f"{args.store} is whole: {found['experts']:,} experts in {found['chunks']:,} chunks and all other weights, "
        f"{found['bytes'] / 1e9:,.2f} GB"
    )
    return 0
