"""Conversion, restoring and opening: bit-identical to transformers on every architecture; faults are survived."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import torch

from moelab.bench.faults import corruptions, small_checkpoint
from moelab.models import discover, open_model, plug
from moelab.models.checkpoint import Checkpoint, CheckpointExperts
from moelab.runtime import convert as converting
from moelab.runtime.convert import convert, identity_of, open_store, require_model, restore
from moelab.store.layout import ExpertStore, StoreError
from moelab.store.reader import StoreExperts
from moelab.store.verify import main as verify_main
from moelab.store.verify import verify

from ..models import tiny
from ..models.test_seam import generate


def source_of(name, folder, **changes):
    return tiny.save_mxfp4(folder) if name == "mxfp4" else tiny.save(name, folder, torch.bfloat16, **changes)


def same_tensors(a, b):
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    assert not [k for k in first if first[k].dtype != second[k].dtype or not torch.equal(first[k], second[k])]


@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES, "mxfp4"])
def test_restored_is_what_the_model_loads(name, tmp_path):
    source = source_of(name, tmp_path / "m")
    store = convert(source, tmp_path / "s", "zstd-huffman")
    store.require(identity_of(source))
    same_tensors(open_model(source), open_model(restore(store, tmp_path / "r")))
    found = verify(store)
    assert found["experts"] == store.spec.L * store.spec.E
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "switch_transformers", "mxfp4"])
def test_a_model_runs_from_its_store_bit_for_bit(name, tmp_path):
    source = source_of(name, tmp_path / "m")
    store = convert(source, tmp_path / "s")
    tokens, logits = generate(open_model(source), 0)
    external = open_model(source, experts="external")
    require_model(store, external)
    plug(external, source=StoreExperts(store))
    for model in (external, open_store(store.folder, mode="buffered")):
        assert all(isinstance(layer.experts.source, StoreExperts) for layer in discover(model))
        tokens_stored, logits_stored = generate(model, 0)
        assert torch.equal(tokens, tokens_stored) and torch.equal(logits, logits_stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_other_dtypes(dtype, tmp_path):
    source = tiny.save("mixtral", tmp_path / "m", dtype)
    store = convert(source, tmp_path / "s")
    same_tensors(open_model(source), open_model(restore(store, tmp_path / "r")))


def test_tied_weights_and_shards(tmp_path):
    torch.manual_seed(0)
    source = tiny.save("qwen2_moe", tmp_path / "m", torch.bfloat16, tie_word_embeddings=True)
    model = open_model(source)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    for folder in (source, tmp_path / "sharded"):
        store = convert(folder, tmp_path / (folder.name + "-store"))
        assert "lm_head.weight" not in store.weights
        restored = open_model(restore(store, tmp_path / (folder.name + "-restored")))
        same_tensors(model, restored)
        assert restored.lm_head.weight.data_ptr() == restored.model.embed_tokens.weight.data_ptr()


def test_the_stores_tensors_are_the_checkpoints(tmp_path):
    """Straight against the source for the seam, casting included."""
    source = tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
    truth = CheckpointExperts(Checkpoint.at(source), open_model(source).config)
    stored = StoreExperts(convert(source, tmp_path / "s"))
    for layer in range(2):
        for expert in range(8):
            a, b = truth(layer, expert), stored(layer, expert)
            assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def test_refusals(tmp_path, monkeypatch):
    source, other = small_checkpoint(tmp_path / "m"), small_checkpoint(tmp_path / "n", seed=1)
    assert identity_of(source) != identity_of(other)
    with pytest.raises(ValueError, match="unknown codec"):
        convert(source, tmp_path / "s", "gzip")
    store = convert(source, tmp_path / "s")
    with pytest.raises(FileExistsError, match="not overwritten"):
        convert(source, tmp_path / "s")
    with pytest.raises(StoreError, match="not those of the checkpoint asked for"):
        store.require(identity_of(other))
    require_model(store, open_model(source))
    for model in (open_model(other), open_model(tiny.save("olmoe", tmp_path / "o"))):
        with pytest.raises(StoreError, match="not those of the checkpoint asked for"):
            require_model(store, model)
    with pytest.raises(FileExistsError, match="not overwritten"):
        restore(store, tmp_path / "m")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="quantised with 'fp8'; only MXFP4"):
        convert(other, tmp_path / "t")


def test_an_interrupted_conversion_goes_on_and_not_with_another_source(tmp_path, monkeypatch):
    source, other = small_checkpoint(tmp_path / "m"), small_checkpoint(tmp_path / "n", seed=1)
    truth = {p.name: p.read_bytes() for p in convert(source, tmp_path / "truth").folder.iterdir()}
    monkeypatch.setattr("moelab.store.writer.COMMIT", 1)
    call, calls = CheckpointExperts.__call__, []

    def interrupted(self, layer, expert):
        calls.append((layer, expert))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return call(self, layer, expert)
    monkeypatch.setattr(CheckpointExperts, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "s")
    with pytest.raises(FileNotFoundError, match="was cut off; run the same convert command again"):
        ExpertStore(tmp_path / "s")
    with pytest.raises(ValueError, match="unfinished store with another identity"):
        convert(other, tmp_path / "s")
    calls[:] = [None] * 10
    source.rename(tmp_path / "elsewhere")                               # the same checkpoint under another name
    done = convert(tmp_path / "elsewhere", tmp_path / "s").folder
    assert (0, 0) not in calls and {p.name: p.read_bytes() for p in done.iterdir()} == truth


def test_verify_finds_what_the_writing_got_wrong(tmp_path, monkeypatch, capsys):
    """A codec that is not lossless is found by the re-reading at the end, and nothing is published."""
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


def test_random_corruptions_are_found():
    tried = corruptions(300, seed=1)
    assert sum(tried.values()) >= 250 and len(tried) == 8


def test_killed_conversions_resume_to_the_same_bytes():
    """In a process of its own, which forks: threads of the test runner would not survive that."""
    done = subprocess.run([sys.executable, "-c", "import json; from moelab.bench.faults import kills; "
                                                 "print(json.dumps(kills(5, seed=3)))"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["killed"] >= 1
