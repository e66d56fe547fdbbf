"""What is kept of a checkpoint is kept by its content: one weight that is changed, wherever, is
seen; and so is a file that is written to while a model is open."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import moelab
from moelab.checkpoint import convert as converting
from moelab.checkpoint.convert import convert, kept_store
from moelab.checkpoint.experts import CheckpointExperts
from moelab.store.layout import StoreError
from tests.checkpoint.stores import identity_of
from tests.depth import depth, in_turn
from tests.store.faults import small_checkpoint

IDS = torch.arange(3, 19)[None]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A checkpoint of tensors that an identity has samples of, as it has of large ones."""
    for name, value in {"WHOLE": 256, "PIECE": 16}.items():
        monkeypatch.setattr(sys.modules["moelab.models.identity"], name, value)
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "cache"))
    return small_checkpoint(tmp_path / "m")


def edited(folder, share=0.4, file="model.safetensors"):
    """Another low bit of a weight, at a share of the file, in place and with the times as they
    were."""
    path = folder / file
    times = os.stat(path)
    with open(path, "r+b") as f:
        f.seek(int(share * times.st_size) & ~1)
        byte = f.read(1)[0]
        f.seek(-1, 1)
        f.write(bytes([byte ^ 4]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_kept_store_is_of_every_byte(source, tmp_path):
    """Wherever one is changed, also where no sample of the identity sees it."""
    seen = {kept_store(source, "raw").folder}
    assert kept_store(source, "raw").folder in seen
    for n in range(depth(3, 20)):
        edited(source, share=0.15 + 0.8 * n / depth(3, 20))
        store = kept_store(source, "raw")
        assert contents(store.folder) == contents(convert(source, tmp_path / f"s{n}", "raw").folder)
        assert store.folder not in seen
        seen.add(store.folder)
    (source / "generation_config.json").write_text("{}")
    assert kept_store(source, "raw").folder not in seen


def test_a_conversion_of_what_was_changed_since_begins_anew(source, tmp_path, monkeypatch):
    identity, made, calls = identity_of(source), CheckpointExperts.made, []

    def interrupted(self, layer, expert):
        calls.append((layer, expert))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return made(self, layer, expert)

    monkeypatch.setattr("moelab.store.writer.COMMIT", 1)
    with monkeypatch.context() as cut:
        cut.setattr(CheckpointExperts, "made", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "s")
    shares = (n / 97 for n in range(30, 90))
    while True:  # an edit that is no other model by the samples
        kept = contents(source)["model.safetensors"]
        edited(source, next(shares))
        if identity_of(source) == identity:
            break
        (source / "model.safetensors").write_bytes(kept)
    assert contents(convert(source, tmp_path / "s").folder) == contents(
        convert(source, tmp_path / "t").folder
    )


def test_a_source_that_changes_while_it_is_converted_is_refused(source, tmp_path, monkeypatch):
    finish = converting.StoreWriter.finish
    monkeypatch.setattr(
        converting.StoreWriter, "finish", lambda self, *of: (finish(self, *of), edited(source))
    )
    with pytest.raises(StoreError, match="was changed since"):
        convert(source, tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "options, how",
    in_turn(
        [{}, {"memory": "50%"}, {"memory": "100%"}, {"experts": "external"}],
        ["in place", "another file in its place", "nothing in its place"],
    ),
)
def test_a_checkpoint_that_is_changed_while_it_is_open(source, how, options, tmp_path):
    """Its own logits, or a refusal; times as they were."""
    lm = moelab.open_model(source, **options)
    before, file = lm(IDS).logits, source / "model.safetensors"
    if how == "in place":
        for n in range(8):
            edited(source, 0.1 + n / 10)
    else:
        file.rename(tmp_path / "elsewhere")
        if how == "another file in its place":
            shutil.copy2(tmp_path / "elsewhere", file)
            edited(source)
    try:
        assert torch.equal(lm(IDS).logits, before) and how != "in place"
    except StoreError as error:
        assert "was changed since the model was opened from it; open it again" in str(error)
    lm.moelab.close()


@pytest.mark.parametrize(
    "options, stored", in_turn([{}, {"memory": "50%"}, {"experts": "external"}], [False, True])
)
def test_a_relative_path_is_from_where_one_stood(source, tmp_path, monkeypatch, stored, options):
    monkeypatch.chdir(tmp_path)
    if stored:
        convert("m", "s", "raw")
    with moelab.open_model("s" if stored else "m", **options) as lm:
        before = lm(IDS).logits
        monkeypatch.chdir("/")
        assert torch.equal(lm(IDS).logits, before) and moelab.models.identity(lm) == identity_of(
            source
        )


def test_threads_that_want_the_same_store_at_first_wait_for_one(source):
    with ThreadPoolExecutor(4) as threads:
        stores = [*threads.map(lambda _: kept_store(source, quantize="int8"), range(8))]
    assert {store.folder for store in stores} == {stores[0].folder}
