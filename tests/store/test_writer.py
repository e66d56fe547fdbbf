"""Writing: the bytes on disk against the safetensors library, resuming from every cut, refusing
what it must."""

from __future__ import annotations

import errno
import random
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moelab.base.specs import MoESpec
from moelab.store import writer as writing
from moelab.store.headers import read_header
from moelab.store.layout import ALIGN, WEIGHTS, ExpertStore, run
from moelab.store.writer import StoreWriter

SPEC = MoESpec("tiny", "tiny", 2, (0, 1), E=3, K=1, H=48, I=40)
EVERYONE = [(layer, expert) for layer in range(2) for expert in range(3)]
LAYERS = [("model.layers.0.mlp.experts", 3, True), ("model.layers.1.mlp.experts", 3, True)]


def expert(layer, index):
    """bf16 and fp32 matrices, an fp16 bias, integers, and nothing at all."""
    g = torch.Generator().manual_seed(100 * layer + index)
    return {
        "up": (torch.randn(40, 48, generator=g) * 0.02).bfloat16(),
        "wide": torch.randn(48, 40, generator=g),
        "bias": torch.randn(7, generator=g).half(),
        "ids": torch.arange(5) + index,
        "nothing": torch.empty(0, 4, dtype=torch.bfloat16),
    }


def others(folder):
    """Two weights that are no expert's, as `finish` wants them, and the tensors."""
    tensors = {
        "embed": torch.randn(30, 4, generator=torch.Generator().manual_seed(9)),
        "norm": torch.ones(6).half(),
    }
    save_file(tensors, folder / "source.safetensors")
    return read_header(folder / "source.safetensors"), tensors


def begin(folder, **changes):
    options = {
        "spec": SPEC,
        "identity": "a" * 16,
        "layers": LAYERS,
        "codec": "zstd-huffman",
    } | changes
    return StoreWriter(folder / "store", **options)


def write(folder, stop_after=None, **changes):
    """A whole store, or the state that is left after so many experts."""
    w = begin(folder, **changes)
    try:
        for n, key in enumerate(w.missing()):
            if n == stop_after:
                return None
            w.add(*key, expert(*key))
        w.finish(others(folder)[0], [("config.json", b"{}")])
        return w.publish()
    finally:
        w.close()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_any_tool_reads_the_files(tmp_path):
    folder = write(tmp_path)
    store = ExpertStore(folder)
    weights, truth = safe_open(folder / WEIGHTS, "pt"), others(tmp_path)[1]
    assert set(weights.keys()) == set(truth) and all(
        torch.equal(weights.get_tensor(k), truth[k]) for k in truth
    )
    for layer in range(2):
        file = safe_open(folder / f"experts-{layer:05d}.safetensors", "np")
        names = file.keys()  # noqa: SIM118
        assert sum(not name.startswith("pad.") for name in names) == 3 * (
            2 + 4 + 2 + 1 + 2
        )  # planes of bf16, fp32, fp16, ints, nothing
        for e in range(3):
            entry, words = (
                store.entries(layer, e)["up"],
                expert(layer, e)["up"].view(torch.uint16).numpy(),
            )
            codec, (chunk,) = entry.planes[0]
            blob = file.get_tensor(f"{layer}.{e}.up.p0.0")
            out = bytearray(words.size)
            codec.decompress(blob, out)
            assert (
                bytes(out) == ((words >> 7) & 255).astype("uint8").tobytes()
            )  # the exponents themselves
            assert chunk.length == len(blob) and chunk.offset % ALIGN == 0
            raw = (folder / f"experts-{layer:05d}.safetensors").read_bytes()
            assert raw[chunk.offset : chunk.offset + chunk.length] == blob.tobytes()


@pytest.fixture
def truth(tmp_path, monkeypatch):
    """The files of a whole store; from now on each expert is synced."""
    monkeypatch.setattr(writing, "COMMIT", 1)
    (tmp_path / "truth").mkdir()
    return contents(write(tmp_path / "truth"))


def test_resuming_after_any_byte_gives_the_same_bytes(tmp_path, truth):
    """After each expert; the journal cut at many places, the layers' files ahead of it or with
    rubbish at their ends."""
    for n in range(6):
        (tmp_path / str(n)).mkdir()
        assert write(tmp_path / str(n), stop_after=n) is None
        assert contents(write(tmp_path / str(n))) == truth
    write(tmp_path, stop_after=5)
    folder, journal = tmp_path / "store.part", tmp_path / "store.part.jsonl"
    state, log = contents(folder), journal.read_bytes()
    for cut in [*range(0, len(log), 997), len(log) - 1, len(log)]:
        shutil.rmtree(folder)
        folder.mkdir()
        for name, data in state.items():
            (folder / name).write_bytes(data + b"rubbish" * (cut % 3))
        journal.write_bytes(log[:cut])
        done = write(tmp_path)
        assert contents(done) == truth and not journal.exists(), f"cut at {cut}"
        done.rename(folder)


def resumed(folder, monkeypatch, **changes):
    """(files of the store that a conversion that goes on makes, the experts that it adds)."""
    added, add = [], StoreWriter.add

    def seen(self, layer, expert, *args):
        added.append((layer, expert))
        add(self, layer, expert, *args)

    with monkeypatch.context() as context:
        context.setattr(StoreWriter, "add", seen)
        return contents(write(folder, **changes)), added


@pytest.mark.parametrize("seed", range(4))
def test_from_an_expert_that_was_damaged_on_they_are_written_again(
    tmp_path, monkeypatch, truth, seed
):
    """A byte of its chunks or of its padding, or the end of the file."""
    write(tmp_path, stop_after=5)
    file = tmp_path / "store.part" / "experts-00000.safetensors"
    raw, store = bytearray(file.read_bytes()), ExpertStore(tmp_path / "truth" / "store")
    begins = [run(entries, "both")[0] for entries in store.layers[0].experts]
    at = len(raw) - 1 if not seed else random.Random(seed).randrange(begins[0], len(raw))
    raw[at] ^= 64
    file.write_bytes(raw if seed else raw[:at])
    hit = max(i for i, begin in enumerate(begins) if begin <= at)
    assert resumed(tmp_path, monkeypatch) == (truth, EVERYONE[hit:])


def test_another_content_of_the_source_begins_anew(tmp_path, monkeypatch, truth):
    write(tmp_path, stop_after=5)
    assert resumed(tmp_path, monkeypatch, content="edited") == (truth, EVERYONE)


@pytest.mark.parametrize(
    "change, named", [({"identity": "b" * 16}, "identity"), ({"codec": "raw"}, "codec")]
)
def test_no_resuming_from_another_source_or_codec(tmp_path, change, named):
    write(tmp_path, stop_after=2)
    with pytest.raises(ValueError, match=f"another {named}"):
        begin(tmp_path, **change)
    assert write(tmp_path)  # and the attempt did no harm


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="no codec 'gzip'"):
        begin(tmp_path, codec="gzip")
    assert not list(tmp_path.iterdir())
    w = begin(tmp_path)
    with pytest.raises(FileExistsError, match="another process"):
        begin(tmp_path)
    w.close()
    (tmp_path / "store").mkdir()
    with pytest.raises(FileExistsError, match="not overwritten"):
        begin(tmp_path)


@pytest.mark.parametrize("allowed", [3, 40_000])
def test_a_full_disk_leaves_a_state_to_resume(tmp_path, monkeypatch, allowed):
    (tmp_path / "truth").mkdir()
    truth, room = contents(write(tmp_path / "truth")), [allowed]
    append = StoreWriter._append

    def full(self, shard):
        room[0] -= len(shard)
        if room[0] < 0:
            self._file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(self, shard)

    monkeypatch.setattr(StoreWriter, "_append", full)
    with pytest.raises(
        OSError, match=r"No space left on device.*free\).*run the same command again"
    ) as caught:
        write(tmp_path)
    assert caught.value.errno == errno.ENOSPC and not (tmp_path / "store").exists()
    monkeypatch.undo()
    assert contents(write(tmp_path)) == truth
