"""Conversion, restoring and opening: bit-identical to transformers on every architecture; faults
are survived."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import open_model
from moelab.__main__ import main as moelab_main
from moelab.bench.synthesize import synthesize
from moelab.checkpoint import convert as converting
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.convert import convert
from moelab.checkpoint.restore import places, restore
from moelab.store.layout import StoreError
from moelab.store.verify import main as verify_main
from moelab.store.verify import verify
from tests.checkpoint.stores import identity_of
from tests.models import tiny
from tests.store.faults import small_checkpoint


def source_of(name, folder, **changes):
    return (
        tiny.save(name, folder, torch.bfloat16, **changes)
        if changes
        else tiny.save_few(name, folder)
    )


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", [*tiny.SOME, "mxfp4", "fp8"])
def test_restored_is_what_was_converted(name, tmp_path):
    """The same files, byte for byte."""
    source = source_of(name, tmp_path / "m")
    for stray, content in {
        "merges.txt": b"\xff\x00",
        "index.json": b"[]",
        "source.index.json": b"1",
        "layout.json": b"",
        "README.md": b"#",
        "tokenizer.tiktoken": b"QQ== 0",
    }.items():
        (source / stray).write_bytes(content)
    store = convert(source, tmp_path / "s", "zstd-huffman")
    assert store.identity == identity_of(source)
    restored = tmp_path / "r"
    assert moelab_main(["restore", str(store.folder), str(restored)]) == 0
    assert files(restored) == files(source)
    found = verify(store)
    assert found["experts"] == store.spec.L * store.spec.E
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "switch_transformers", "llama4_text"])
def test_restored_in_the_sources_shards(name, tmp_path):
    """Sharded, with odd headers: padded, another order of the keys, metadata; through two stores,
    one made of the other."""
    open_model(source_of(name, tmp_path / "whole")).save_pretrained(
        tmp_path / "m", max_shard_size="20KB"
    )
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 3
    raw = shards[1].read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    text = json.dumps(
        {**dict(reversed(header.items())), "__metadata__": {"é": "ü"}}, ensure_ascii=False, indent=1
    )
    text = text.encode() + b" " * 37
    shards[1].write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :])
    first = convert(tmp_path / "m", tmp_path / "s")
    second = convert(first.folder, tmp_path / "t", "raw")
    assert first.identity == second.identity == identity_of(tmp_path / "m")
    for store in (first, second):
        assert files(restore(store, tmp_path / f"{store.folder.name}-r")) == files(tmp_path / "m")


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=3),
    st.integers(0, 1),
    st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    st.sampled_from(["joined", "interleaved", "transposed", "turned over", "apart"]),
)
def test_places_of_source_tensors(shape, dim, dtype, how):
    """Of tensors joined, interleaved and transposed; the naive oracle reads single weights."""
    first, second = torch.randint(0, 250, [2, *shape]).to(dtype)
    sources = [first, second]
    if how == "joined":
        made = {"w": torch.cat(sources, dim)}
    elif how == "interleaved":
        made = {"w": torch.stack(sources, dim + 1).flatten(dim, dim + 1)}
    elif how == "transposed":
        made = {"w": torch.cat(sources, -1).transpose(-1, -2).contiguous()}
    elif how == "turned over":
        sources = [torch.stack(sources, dim + 1).flatten(dim, dim + 1)]
        made = {"w": torch.cat([first, second], dim)}
    else:
        made = {"w": second, "v": first}
    read = [(str(i), 0, t.contiguous()[None]) for i, t in enumerate(sources)]
    found = places(read, made)
    assert [place[0] for place in found] == [str(i) for i in range(len(sources))]
    for (_, _, name, size, offset, strides, _), source in zip(found, sources):
        flat = made[name].reshape(-1)
        got = [
            flat[offset + sum(i * stride for i, stride in zip(where, strides))].item()
            for where in itertools.product(*map(range, size))
        ]
        assert got == source.reshape(-1).tolist()
    assert dtype == torch.uint8 or places([("x", 0, -1 - first[None])], made) is None


def test_a_destination_that_cannot_be_made_is_told_before_the_work(tmp_path, monkeypatch):
    store = convert(small_checkpoint(tmp_path / "m"), tmp_path / "s")
    monkeypatch.setattr(Checkpoint, "at", lambda folder: pytest.fail("the source was read"))
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("nowhere")
    for name, words in (
        ("file", "not overwritten"),
        ("link", "not overwritten"),
        ("file/below", "Not a directory"),
        ("file/further/below", "Not a directory"),
    ):
        for make in (
            lambda to: convert(tmp_path / "m", to),
            lambda to: restore(store, to),
            lambda to: synthesize(to, "Mixtral-8x7B"),
        ):
            with pytest.raises(OSError, match=f"{name}.* {words}"):
                make(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"


def test_verify_finds_what_the_writing_got_wrong(tmp_path, monkeypatch, capsys):
    """A codec that is not lossless is found by the re-reading at the end, and nothing is
    published."""
    source = small_checkpoint(tmp_path / "m")
    real = converting.codecs.compress_tensor

    def lossy(weights, *options):
        return real(weights.clone().fill_(0) if weights.dim() > 1 else weights, *options)

    monkeypatch.setattr("moelab.store.writer.codecs.compress_tensor", lossy)
    with pytest.raises(StoreError, match="does not decode to what was converted"):
        convert(source, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    monkeypatch.undo()
    store = convert(source, tmp_path / "t")
    args = argparse.Namespace(store=str(store.folder))
    assert verify_main(args) == 0 and "is whole: 8 experts" in capsys.readouterr().out
    with open(store.folder / "weights.safetensors", "r+b") as f:
        f.seek(-3, 2)
        f.write(b"abc")
    assert verify_main(args) == 1 and "does not match its checksum" in capsys.readouterr().out


def test_killed_conversions_resume_to_the_same_bytes():
    """In a process of its own, which forks: threads of the test runner would not survive that."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json; from tests.store.faults import kills; "
            "print(json.dumps(kills(5, seed=3)))",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["killed"] >= 1
