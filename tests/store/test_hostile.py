"""Stores that somebody changed, with a right seal or a wrong one: refused by name, or they give the
right bits.

Nothing outside their folders is read or written, nothing else than StoreError and FileNotFoundError
is raised."""

from __future__ import annotations

import json
import os
import random
import shutil
from contextlib import closing
from hashlib import sha256

import pytest
import torch

from moelab import restore
from moelab.base.journal import Journal
from moelab.checkpoint.convert import convert
from moelab.store.layout import INDEX, SOURCE_LAYOUT, WEIGHTS, ExpertStore, StoreError, seal
from moelab.store.reader import StoreExperts
from moelab.store.verify import check_weights, verify
from tests.depth import depth
from tests.models import tiny
from tests.store.test_writer import contents, write

WORDS = (
    "",
    "..",
    "../x",
    "/etc/passwd",
    "a\\b",
    "\0",
    "x" * 5000,
    INDEX,
    "F16",
    "raw",
    "zstd",
    "-1",
)
NUMBERS = (-1, 0, 1, 2, 4096, 10**9, 2**31, 2**63, 10**40, 0.5, 1e300, float("nan"))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of a real small model, and its source."""
    folder = tmp_path_factory.mktemp("hostile")
    source = tiny.save("mixtral", folder / "m", torch.bfloat16, num_hidden_layers=2)
    return convert(source, folder / "s", "huffman").folder, source


def fields_of(folder):
    fields = json.loads((folder / INDEX).read_bytes())
    del fields["sha256"]
    return fields


def reseal(folder, fields, thorough=True):
    """Write an index as an attacker would: sealed anew, and with the new digest in the weights'
    header, too."""
    raw, digest = seal(fields)
    old = json.loads((folder / INDEX).read_bytes())["sha256"]
    (folder / INDEX).write_bytes(raw)
    if thorough:
        weights = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(weights.replace(old.encode(), digest.encode(), 1))


def bits(folder):
    """Every expert's tensors and every other weight, as bits, with dtype and shape."""
    store, found = ExpertStore(folder), {}
    source = StoreExperts(store, mode="buffered")
    for layer in range(len(store.layers)):
        for index in range(len(store.layers[layer].experts)):
            for name, t in source(layer, index).items():
                raw = t.view(torch.uint8).numpy().tobytes()
                found[layer, index, name] = t.dtype, tuple(t.shape), raw
    check_weights(store)  # as all do that open a model
    raw = (folder / WEIGHTS).read_bytes()
    for key, (dtype, shape, offset, size, _) in store.weights.items():
        found[key] = dtype, shape, raw[offset : offset + size]
    return found


def attack(folder, work, truth, source):
    """Open, read, verify and restore: each is refused by name, or gives what the model has; returns
    what was refused."""

    def everything():
        files = (p for p in work.rglob("*") if p.is_file() and not p.is_symlink())
        return {str(path): path.read_bytes() for path in files}

    before, refused = everything(), set()
    for name, what in {
        "read": lambda: bits(folder) == truth,
        "verify": lambda: verify(folder)["experts"] == 8,
        "restore": lambda: contents(restore(folder, work / "restored")) == contents(source),
    }.items():
        try:
            assert what(), f"{name} gave something else"
        except (StoreError, FileNotFoundError) as error:
            assert str(folder) in str(error) or "cannot be decoded" in str(error), error
            refused.add(name)
    shutil.rmtree(work / "restored", ignore_errors=True)
    assert everything() == before  # nothing else was left or touched
    return refused


def test_an_index_nested_too_deep_or_too_long(store, tmp_path):
    folder = shutil.copytree(store[0], tmp_path / "s")
    for raw in (b"[" * 200_000, b"null", b"[]", b"{}", b"\xff", b"1" * 9999):
        sealed = raw + b',"sha256":"' + sha256(raw).hexdigest().encode() + b'"}'
        (folder / INDEX).write_bytes(sealed)
        with pytest.raises(StoreError):
            ExpertStore(folder)
    with open(folder / INDEX, "wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(StoreError, match="does not match its own checksum"):
        ExpertStore(folder)


def test_links_in_the_place_of_what_would_be_written_are_not_followed(store, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "d").symlink_to(tmp_path / "victim")
    for what in (
        lambda: restore(store[0], tmp_path / "d"),
        lambda: convert(store[1], tmp_path / "d"),
    ):
        with pytest.raises(FileExistsError, match="not overwritten"):
            what()
    for trap in ("c.part", "c.part.jsonl"):
        (tmp_path / trap).symlink_to(tmp_path / "victim")
        with pytest.raises(ValueError, match="is a link, and writing would follow it"):
            convert(store[1], tmp_path / "c")
        (tmp_path / trap).unlink()
    assert (tmp_path / "victim").read_text() == "mine"


# ---------------------------------------------------------------------------------------------
# at random


def mutate(node, rng):
    """Change something somewhere below a node of JSON: a number, a word, a name, an order, a member
    less or twice."""
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        child, how = node[key], rng.randrange(5)
        if isinstance(child, (dict, list)) and child and rng.random() < 0.9:
            node = child
            continue
        if how == 0:
            del node[key]
        elif how == 1 and isinstance(node, dict):
            node[rng.choice(WORDS)] = node.pop(key)
        elif how == 2 and isinstance(node, list):
            node.insert(key, child)
        elif how == 3 and isinstance(child, int):
            node[key] = child + rng.choice((-4096, -1, 1, 4096, 2**20))
        else:
            node[key] = rng.choice((*WORDS, *NUMBERS, None, True, [], {}, [[]], [1] * 100))
        return


def damage(folder, rng):
    """Change a store's bytes, names or index; returns whether the new index is sealed as a right
    one is."""
    files = sorted(folder.iterdir())
    kind, path = rng.randrange(7), rng.choice(files)
    if kind < 3:
        fields, thorough = fields_of(folder), rng.random() < 0.5
        mutate(fields, rng)
        reseal(folder, fields, thorough)
        return thorough
    raw = bytearray(path.read_bytes())
    if kind == 3:
        at = rng.randrange(min(len(raw), rng.choice((64, 4096, len(raw)))))
        raw[at : at + 8] = rng.choice((rng.randbytes(8), bytes(8), b"\xff" * 8))
        path.write_bytes(raw)
    elif kind == 4:
        path.write_bytes(raw[: rng.randrange(len(raw))] + bytes(rng.choice((0, 5000))))
    elif kind == 5:
        path.rename(folder / rng.choice(("x", rng.choice(files).name)))
    else:
        path.unlink()
        rng.choice(
            (path.mkdir, lambda: path.symlink_to("/etc/hostname"), lambda: os.mkfifo(path))
        )()
    return False


def test_stores_changed_at_random(store, tmp_path):
    """None gives a wrong weight; whatever is not sealed anew, `verify` finds. So with what is
    recorded of the source."""
    truth = bits(store[0])
    for seed in range(depth(40, 1500)):
        folder, rng = shutil.copytree(store[0], tmp_path / "s"), random.Random(seed)
        if seed % 4:
            sealed = damage(folder, rng)
        else:
            layout, fields = json.loads((folder / SOURCE_LAYOUT).read_bytes()), fields_of(folder)
            mutate(layout["files"] if seed % 8 else layout, rng)
            raw, sealed = json.dumps(layout).encode(), True
            (folder / SOURCE_LAYOUT).write_bytes(raw)
            fields["files"][SOURCE_LAYOUT] = [len(raw), ExpertStore(store[0]).checksum(raw)]
            reseal(folder, fields)
        try:
            same = contents(folder) == contents(store[0])
        except OSError:
            same = False
        refused = attack(folder, tmp_path, truth, store[1])
        assert same or sealed or "verify" in refused, seed
        shutil.rmtree(folder)


def test_journals_changed_at_random(tmp_path, monkeypatch):
    """A conversion goes on from them to the same store, or refuses them in words."""
    monkeypatch.setattr("moelab.store.writer.COMMIT", 1)
    (tmp_path / "truth").mkdir()
    truth = contents(write(tmp_path / "truth"))
    write(tmp_path, stop_after=5)
    part, journal = tmp_path / "store.part", tmp_path / "store.part.jsonl"
    files, kept = contents(part), journal.read_bytes()
    for seed in range(depth(20, 500)):
        journal.write_bytes(kept)
        with closing(Journal(journal)) as forged:
            mutate(records := forged.lines, random.Random(seed))
            forged.restart(records)
        try:
            verify(write(tmp_path))  # as `convert` does
            assert contents(tmp_path / "store") == truth
        except ValueError as error:
            assert str(tmp_path) in str(error)
        for folder in (part, tmp_path / "store"):
            shutil.rmtree(folder, ignore_errors=True)
        part.mkdir()
        for name, data in files.items():
            (part / name).write_bytes(data)
