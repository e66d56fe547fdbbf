"""Stores that somebody changed, with a right seal or a wrong one: refused by name, or they give the
right bits.

Nothing outside their folders is read or written, nothing else than StoreError and FileNotFoundError
is raised."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from contextlib import closing

import pytest
import torch

from moelab import restore
from moelab.checkpoint.convert import convert
from moelab.journal import Journal
from moelab.store.layout import INDEX, SOURCE_LAYOUT, WEIGHTS, ExpertStore, StoreError, seal
from moelab.store.reader import StoreExperts
from moelab.store.verify import check_weights, verify
from tests.depth import depth
from tests.models import tiny
from tests.store.test_writer import begin, expert, write

WORDS = (
    "",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "\0",
    "x" * 5000,
    "experts-00000.safetensors",
    INDEX,
    "é",
    "__metadata__",
    "BF16",
    "F16",
    "F32",
    "U8",
    "raw",
    "huffman",
    "zstd",
    "0" * 16,
    "-1",
)
NUMBERS = (-1, 0, 1, 2, 7, 4096, 10**9, 2**31, 2**62, 2**63, 10**40, 0.5, 1e300, float("nan"))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of a real small model, and its source."""
    folder = tmp_path_factory.mktemp("hostile")
    source = tiny.save("mixtral", folder / "m", torch.bfloat16, num_hidden_layers=2)
    return convert(source, folder / "s").folder, source


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


def copy(folder, to):
    shutil.copytree(folder, to)
    return to


def bits(folder):
    """Every expert's tensors and every other weight, as bits, with dtype and shape."""
    store, found = ExpertStore(folder), {}
    with StoreExperts(store, mode="buffered") as source:
        for layer in range(len(store.layers)):
            for index in range(len(store.layers[layer].experts)):
                for name, t in source(layer, index).items():
                    found[layer, index, name] = (
                        t.dtype,
                        tuple(t.shape),
                        t.view(torch.uint8).numpy().tobytes(),
                    )
    check_weights(store)  # as all do that open a model
    raw = (folder / WEIGHTS).read_bytes()
    for key, (dtype, shape, offset, size, _) in store.weights.items():
        found[key] = dtype, shape, raw[offset : offset + size]
    return found


def everything_under(folder):
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def attack(folder, work, truth, source):
    """Open, read, verify and restore: each is refused by name, or gives what the model has; returns
    what was refused."""
    before, start, refused = everything_under(work), time.process_time(), set()

    def files(path):
        return {p.name: p.read_bytes() for p in path.iterdir()}

    for name, what in {
        "read": lambda: bits(folder) == truth,
        "verify": lambda: verify(folder)["experts"] == 8,
        "restore": lambda: files(restore(folder, work / "restored")) == files(source),
    }.items():
        try:
            assert what(), f"{name} gave something else"
        except (StoreError, FileNotFoundError) as error:
            assert len(str(error)) > 30 and (
                str(folder) in str(error) or "cannot be decoded" in str(error)
            ), error
            refused.add(name)
    shutil.rmtree(work / "restored", ignore_errors=True)
    assert everything_under(work) == before  # and nothing else was left or touched
    assert time.process_time() - start < 10  # of this process, however busy the machine
    return refused


# -------------------------------------------------------------------------------------------------
# the known attacks

LIES = ("a file less", "another model")


def each(fields):
    """Names of ways to change an index, and what they do with it."""
    layer, entries = fields["layers"][0], fields["layers"][0]["experts"]
    name = next(iter(layer["tensors"]))
    chunk = entries[1][name][1][0][1][0]
    return {
        "an expert less": lambda: entries.pop(),
        "a layer less": lambda: fields["layers"].pop(),
        "no layers": lambda: fields.update(layers=[]),
        "swapped experts": lambda: entries.__setitem__(slice(0, 2), entries[1::-1]),
        "swapped layers": lambda: fields["layers"].reverse(),
        "one expert twice": lambda: entries.__setitem__(1, entries[0]),
        "E of 10^9": lambda: fields["spec"].update(E=10**9),
        "other geometry": lambda: fields["spec"].update(E=3, moe_layers=[0]),
        "swapped tensors": lambda: layer.update(tensors=dict(reversed(layer["tensors"].items()))),
        "another dtype": lambda: layer["tensors"][name].__setitem__(0, "F16"),
        "another shape": lambda: layer["tensors"][name][1].reverse(),
        "overlap": lambda: chunk.__setitem__(0, entries[0][name][1][0][1][0][0]),
        "a negative length": lambda: chunk.__setitem__(1, -1),
        "a true offset": lambda: chunk.__setitem__(0, True),
        "another codec": lambda: entries[0][name][1][0].__setitem__(0, "zstd"),
        "a weight less": lambda: fields["weights"].popitem(),
        "weights in another order": lambda: fields.update(
            weights=dict(reversed(fields["weights"].items()))
        ),
        "a file less": lambda: fields["files"].pop("config.json"),
        "../": lambda: fields["files"].update({"../m/config.json": fields["files"]["config.json"]}),
        "absolute": lambda: fields["files"].update({"/etc/hostname": [1, "0" * 16]}),
        "another model": lambda: fields.update(identity="0" * 16),
        "nested": lambda: fields["spec"].update(name=json.loads("[" * 500 + "]" * 500)),
    }


@pytest.mark.parametrize(
    "name", list(each({"layers": [{"tensors": {"x": 0}, "experts": [0, {"x": [0, [[0, [0]]]]}]}]}))
)
@pytest.mark.parametrize("thorough", [True, False])
def test_an_index_that_was_changed(store, tmp_path, name, thorough):
    folder = copy(store[0], tmp_path / "s")
    fields = fields_of(folder)
    each(fields)[name]()
    reseal(folder, fields, thorough)
    refused = attack(folder, tmp_path, bits(store[0]), store[1])
    # With the right digest in two places one can still lie about whose weights these are; restoring
    # them finds it out.
    assert (
        refused == {"read", "verify", "restore"}
        or thorough
        and name in LIES
        and refused == {"restore"}
    )


def test_an_index_nested_too_deep_or_too_long(store, tmp_path):
    folder = copy(store[0], tmp_path / "s")
    for raw in (
        b"[" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"1" * 9999,
    ):
        from hashlib import sha256

        (folder / INDEX).write_bytes(
            raw + b',"sha256":"' + sha256(raw).hexdigest().encode() + b'"}'
        )
        with pytest.raises(StoreError):
            ExpertStore(folder)
    with open(folder / INDEX, "wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(StoreError, match="an index has .* at most"):
        ExpertStore(folder)


@pytest.mark.parametrize(
    "name", [INDEX, WEIGHTS, "experts-00001.safetensors", "config.json", SOURCE_LAYOUT]
)
def test_links_are_not_followed(store, tmp_path, name):
    folder = copy(store[0], tmp_path / "s")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=f"{name} is a link"):
        ExpertStore(folder)


def test_nothing_is_written_where_a_link_leads(store, tmp_path):
    """A link in the place of what restoring, converting or measuring would write."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "r").symlink_to(tmp_path / "victim")
    (tmp_path / "d").symlink_to(tmp_path / "nowhere")
    for name in "rd":
        with pytest.raises(FileExistsError, match="not overwritten"):
            restore(store[0], tmp_path / name)
        with pytest.raises(FileExistsError, match="not overwritten"):
            convert(store[1], tmp_path / name)
    for trap in ("c.part", "c.part.jsonl"):
        (tmp_path / trap).symlink_to(tmp_path / "victim")
        with pytest.raises(ValueError, match="is a link, and writing would follow it"):
            convert(store[1], tmp_path / "c")
        (tmp_path / trap).unlink()
    folder = copy(store[0], tmp_path / "s")
    (folder / "read_mode.json").unlink(missing_ok=True)
    (folder / "read_mode.json").symlink_to(tmp_path / "victim")
    (folder / f"read_mode.{os.getpid()}").symlink_to(tmp_path / "victim")
    StoreExperts(ExpertStore(folder))
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_layout_of_the_source_is_believed_in_nothing(store, tmp_path):
    """Every place exchanged, moved or misnamed, the small file's checksum made right again."""
    truth, rng = bits(store[0]), random.Random(4)
    for i in range(depth(12, 400)):
        folder = copy(store[0], tmp_path / "s")
        layout, fields = json.loads((folder / SOURCE_LAYOUT).read_bytes()), fields_of(folder)
        mutate(layout["files"] if i % 4 == 0 else layout, rng)
        raw = json.dumps(layout).encode()
        (folder / SOURCE_LAYOUT).write_bytes(raw)
        fields["files"][SOURCE_LAYOUT] = [len(raw), ExpertStore(store[0]).checksum(raw)]
        reseal(folder, fields)
        refused = attack(folder, tmp_path, truth, store[1])
        assert refused <= {"restore"} or "read" in refused
        shutil.rmtree(folder)


# -------------------------------------------------------------------------------------------------------
# at random


def mutate(node, rng):
    """Change something somewhere below a node of JSON: a number, a word, a name, an order, a member
    less or twice."""
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        child = node[key]
        if isinstance(child, (dict, list)) and child and rng.random() < 0.9:
            node = child
            continue
        how = rng.randrange(6)
        if how == 0:
            del node[key]
        elif how == 1 and isinstance(node, dict):
            node[rng.choice(WORDS)] = node.pop(key)
        elif how == 2:
            other = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            node[key], node[other] = node[other], node[key]
        elif how == 3 and isinstance(node, list):
            node.insert(key, child)
        elif how == 4 and isinstance(child, int):
            node[key] = child + rng.choice((-4096, -1, 1, 4096, 2**20))
        else:
            node[key] = rng.choice(
                (*WORDS, *NUMBERS, None, True, [], {}, [[]], "9" * 5000, [1] * 100)
            )
        return


def damage(folder, rng):
    """Change a store's bytes, names or index; returns whether the new index is sealed as a right
    one is."""
    files = [path for path in sorted(folder.iterdir()) if path.name != "read_mode.json"]
    kind, path = rng.randrange(8), rng.choice(files)
    if kind < 4:
        fields = fields_of(folder)
        for _ in range(rng.choice((1, 1, 2))):
            mutate(fields, rng)
        thorough = rng.random() < 0.5
        reseal(folder, fields, thorough)
        return thorough
    if (
        kind == 4 and rng.random() < 0.3
    ):  # two aligned pieces change places: chunks, where there are some
        raw = path.read_bytes()
        size = 4096 if len(raw) >= 8192 else max(1, len(raw) // 4)
        first, second = sorted(rng.randrange(len(raw) // size) * size for _ in "ab")
        pieces = (
            raw[:first],
            raw[first : first + size],
            raw[first + size : second],
            raw[second : second + size],
        )
        path.write_bytes(
            b"".join((pieces[0], pieces[3], pieces[2], pieces[1], raw[second + size :]))
            if first < second
            else raw
        )
    elif kind == 4:
        raw = bytearray(path.read_bytes())
        at = rng.randrange(min(len(raw), rng.choice((64, 4096, len(raw)))))
        raw[at : at + 8] = rng.choice((rng.randbytes(8), bytes(8), b"\xff" * 8))
        path.write_bytes(raw)
    elif kind == 5:
        path.write_bytes(
            path.read_bytes()[: rng.randrange(path.stat().st_size)] + bytes(rng.choice((0, 5000)))
        )
    elif kind == 6:
        path.rename(folder / rng.choice(("x", rng.choice(files).name)))
    else:
        path.unlink()
        rng.choice(
            (
                lambda: None,
                path.mkdir,
                lambda: path.symlink_to("/etc/hostname"),
                lambda: os.mkfifo(path),
            )
        )()
    return False


@pytest.mark.stress
def test_stores_changed_at_random(store, tmp_path):
    """None gives a wrong weight; whatever is not sealed anew, `verify` finds."""
    truth, names = bits(store[0]), sorted(path.name for path in store[0].iterdir())
    for seed in range(depth(60, 1500)):
        folder = copy(store[0], tmp_path / "s")
        sealed = damage(folder, random.Random(seed))
        same = sorted(path.name for path in folder.iterdir()) == names and all(
            (folder / name).is_file()
            and (folder / name).read_bytes() == (store[0] / name).read_bytes()
            for name in names
            if name != "read_mode.json"
        )
        refused = attack(folder, tmp_path, truth, store[1])
        assert same or sealed or "verify" in refused, seed
        shutil.rmtree(folder)


@pytest.mark.stress
def test_journals_changed_at_random(tmp_path, monkeypatch):
    """A conversion goes on from them to the same store, or refuses them in words."""
    monkeypatch.setattr("moelab.store.writer.COMMIT", 1)
    (tmp_path / "truth").mkdir()
    truth = {path.name: path.read_bytes() for path in write(tmp_path / "truth").iterdir()}
    write(tmp_path, stop_after=5)
    part, journal = tmp_path / "store.part", tmp_path / "store.part.jsonl"
    files, kept = {path.name: path.read_bytes() for path in part.iterdir()}, journal.read_bytes()
    for seed in range(depth(25, 500)):
        rng = random.Random(seed)
        journal.write_bytes(kept)
        with closing(Journal(journal)) as forged:
            mutate(records := forged.lines, rng)
            forged.restart(records)
        try:
            w = begin(tmp_path)
            try:
                for key in w.missing():
                    w.add(*key, expert(*key))
                from tests.store.test_writer import others

                w.finish(others(tmp_path / "truth")[0], [("config.json", b"{}")])
                verify(w.folder)
                done = w.publish()
            finally:
                w.close()
            assert {path.name: path.read_bytes() for path in done.iterdir()} == truth
        except ValueError as error:
            assert str(tmp_path) in str(error)
        for folder in (part, tmp_path / "store"):
            shutil.rmtree(folder, ignore_errors=True)
        part.mkdir()
        for name, data in files.items():
            (part / name).write_bytes(data)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"shards": 0}, "shards is 0"),
        ({"shards": -3}, "shards is -3"),
        ({"shards": 2.5}, "shards is 2.5"),
        ({"codec": "gzip"}, "unknown codec"),
    ],
)
def test_options_that_cannot_be_leave_nothing_behind(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        begin(tmp_path, **options)
    assert not list(tmp_path.iterdir())
    assert write(tmp_path)


def test_a_start_that_failed_does_not_block_the_next_one(tmp_path):
    begin(tmp_path, identity="b" * 16).close()
    assert (tmp_path / "store.part").is_dir() and write(tmp_path)
