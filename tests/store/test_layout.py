"""The index: sealed, checked before it is believed; the store refuses what it is not."""

from __future__ import annotations

import shutil

import pytest

from moelab.store.layout import ALIGN, INDEX, ExpertStore, StoreError, run, seal, unseal
from tests.store.test_writer import expert, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("layout"))


def reseal(folder, tmp_path, change):
    """A copy of the store whose index was changed by someone who sealed it again."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    fields = unseal((copy / INDEX).read_bytes())
    fields.pop("sha256")
    change(fields)
    (copy / INDEX).write_bytes(seal(fields)[0])
    return copy


def test_what_the_store_says_of_itself(folder):
    store, truth = ExpertStore(folder), expert(0, 0)
    *rows, every = store.table()
    found = {row["tensor"]: (row["count"], row["bytes"]) for row in rows}
    assert found == {name: (6, 6 * t.nbytes) for name, t in truth.items()}
    entries = [entry for layer in store.layers for of in layer.experts for entry in of.values()]
    assert every["E_bytes"] + every["SM_bytes"] == sum(entry.stored() for entry in entries)
    assert every["count"] == 6 and rows[0]["fraction"] < 0.75  # exponents of bf16 are compressible


def test_runs_are_contiguous_and_tile_the_file(folder):
    store = ExpertStore(folder)
    for layer in store.layers:
        at = layer.header
        for entries in layer.experts:
            (e, e_length), (sm, sm_length), both = (
                run(entries, part) for part in ("E", "SM", "both")
            )
            assert e == at and sm == e + e_length and both == (e, e_length + sm_length)
            assert all(x % ALIGN == 0 for x in (e, e_length, sm_length))
            at = sm + sm_length
        assert at == layer.size == (folder / layer.file).stat().st_size


def test_any_changed_byte_of_the_index_is_seen(folder):
    raw = (folder / INDEX).read_bytes()
    for i in [*range(0, len(raw), 61), *range(len(raw) - 80, len(raw))]:
        broken = raw[:i] + bytes([raw[i] ^ 4]) + raw[i + 1 :]
        with pytest.raises(StoreError, match="does not match its own checksum"):
            unseal(broken)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: f.update(version=99), "99, .*this moelab reads"),
        (lambda f: f.pop("spec"), "no index of an expert store"),
        (lambda f: f["files"].update({"gone.json": [3, "0" * 16]}), "lacks gone.json"),
    ],
)
def test_an_index_that_makes_no_sense(folder, tmp_path, change, message):
    with pytest.raises(StoreError, match=message):
        ExpertStore(reseal(folder, tmp_path, change))


def test_refusals(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="makes one"):
        ExpertStore(tmp_path / "none")
