"""Models in GGUF: opened as they lie, whole and within a budget, equal to transformers' with the
weights that gguf-py decodes."""

import os
import shutil

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

import moelab
from moelab.base.files import small_model
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.export import export
from moelab.store.layout import StoreError
from tests.gguf_files import in_transformers, qwen3moe

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "cache"))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    "kind, down",
    [
        ("Q8_0", None),
        ("Q4_0", "Q8_0"),
        ("Q4_K", "Q6_K"),
        ("Q3_K", "Q5_K"),
        ("F16", None),
        ("F32", None),
    ],
)
def test_logits_are_those_of_transformers_on_the_decoded_weights(tmp_path, kind, down):
    made = qwen3moe(tmp_path / "m.gguf", kind, down)
    dtype = {"F16": torch.float16, "F32": torch.float32}.get(kind, torch.bfloat16)
    stock = in_transformers(made, dtype)
    reference = logits(stock)
    for how in ({}, {"memory": "30%"}, {"experts": "external"}):
        with moelab.open_model(tmp_path / "m.gguf", **how) as model:
            assert model.dtype == dtype
            assert torch.equal(logits(model), reference), how
    for how in ({}, {"memory": "30%"}):
        with moelab.open_model(tmp_path / "m.gguf", executor="fast", **how) as model:
            apart = (logits(model) - reference).abs().max() / reference.abs().max()
        assert apart < 0.03, how


def test_experts_stay_in_the_bits_of_the_file(tmp_path):
    qwen3moe(tmp_path / "m.gguf", "Q4_K", "Q6_K")
    with moelab.open_model(tmp_path / "m.gguf") as model:
        logits(model)
        experts = model.moelab.store
        assert all(e.in_place for layer in experts.layers for e in layer.experts[0].values())
        size = sum(
            e.stored() for layer in experts.layers for x in layer.experts for e in x.values()
        )
    stored = Checkpoint.at(tmp_path / "m.gguf").gguf.stored
    assert size == sum(of.nbytes for name, of in stored.items() if "_exps" in name)


def test_dense_weights_take_what_the_file_takes(tmp_path):
    qwen3moe(tmp_path / "m.gguf", "Q8_0")
    with moelab.open_model(tmp_path / "m.gguf", executor="fast") as model:
        head = model.get_output_embeddings().weight
        assert head.nbytes == 320 * 256 // 32 * 34
        assert model.get_input_embeddings().weight.nbytes == head.nbytes


def test_shards_by_any_of_them_and_by_their_folder(tmp_path):
    whole = tmp_path / "whole.gguf"
    qwen3moe(whole, "Q4_0")
    (tmp_path / "parts").mkdir()
    qwen3moe(tmp_path / "parts" / "m.gguf", "Q4_0", shards=7)
    files = sorted((tmp_path / "parts").iterdir())
    assert len(files) > 3
    with moelab.open_model(whole) as model:
        reference = logits(model)
    for source in (files[0], files[2], tmp_path / "parts"):
        with moelab.open_model(source) as model:
            assert torch.equal(logits(model), reference)
    with pytest.raises(ValueError, match="several models.*whole.gguf"):
        shutil.copy(whole, tmp_path / "other.gguf")
        moelab.open_model(tmp_path)
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match="00002-of-"):
        moelab.open_model(files[0])


def test_the_tokenizer_is_the_files(tmp_path):
    qwen3moe(tmp_path / "m.gguf")
    with moelab.open_model(tmp_path / "m.gguf") as model:
        ids = model.tokenizer("token to<|end|>")["input_ids"]
        assert model.tokenizer.convert_ids_to_tokens(ids) == ["token", "Ġ", "to", "<|end|>"]
        assert model.tokenizer.eos_token == "<|end|>" and model.tokenizer.pad_token == "<|pad|>"
        assert model.generation_config.eos_token_id == model.tokenizer.eos_token_id
        chat = [{"role": "user", "content": "to"}]
        assert model.tokenizer.apply_chat_template(chat, tokenize=False) == "to"


@pytest.mark.filterwarnings("ignore:llama.cpp takes token ids only")
def test_a_tokenizer_that_llama_has_no_name_for_comes_back_whole(tmp_path):
    text = "def close(self):\n    return 12345  # ünïcode<|endoftext|>"
    own = AutoTokenizer.from_pretrained(small_model())
    with moelab.open_model(export(None, tmp_path / "m.gguf", "Q8_0")) as model:
        assert model.tokenizer(text)["input_ids"] == own(text)["input_ids"]
        assert model.tokenizer.decode(own(text)["input_ids"]) == text
        assert model.tokenizer.eos_token_id == model.config.eos_token_id == own.eos_token_id


def test_a_way_to_split_text_that_is_not_known_is_no_tokenizer(tmp_path):
    qwen3moe(tmp_path / "m.gguf", pre="of-tomorrow")
    with pytest.warns(UserWarning, match="without a tokenizer.*of-tomorrow"):
        moelab.open_model(tmp_path / "m.gguf").moelab.close()


def damaged(path, where):
    """Change a byte, and nothing that a file system tells."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(where)
        byte = file.read(1)
        file.seek(where)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["blk.1.ffn_up_exps.weight", "blk.0.attn_q.weight"])
def test_what_was_read_before_and_differs_is_refused(tmp_path, name):
    path = tmp_path / "m.gguf"
    qwen3moe(path)
    moelab.open_model(path).moelab.close()
    moelab.open_model(path).moelab.close()
    stored = Checkpoint.at(path).gguf.stored[name]
    damaged(path, stored.begin + stored.nbytes - 1)
    with pytest.raises(StoreError, match=name):
        moelab.open_model(path)
    if "exps" in name:
        moelab.open_model(path, memory="100%", verify=False).moelab.close()
    os.utime(path)  # as another file would have: its sums begin anew
    moelab.open_model(path).moelab.close()


def test_a_damaged_sidecar_begins_anew(tmp_path):
    path = tmp_path / "m.gguf"
    qwen3moe(path)
    moelab.open_model(path).moelab.close()
    (kept,) = (tmp_path / "cache" / "sums").iterdir()
    size = kept.stat().st_size
    assert 0 < size < 1 << 14
    kept.write_bytes(kept.read_bytes()[:-5])
    moelab.open_model(path).moelab.close()
    assert kept.stat().st_size == size
    moelab.open_model(path).moelab.close()
    assert kept.stat().st_size == size


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16"])
def test_a_store_of_it_is_the_same_model(tmp_path, kind):
    path = tmp_path / "m.gguf"
    qwen3moe(path, kind)
    with moelab.open_model(path) as model:
        reference, ids = logits(model), model.tokenizer("token")["input_ids"]
    store = moelab.convert(path, tmp_path / "store")
    with moelab.open_model(store, memory="50%") as model:
        found = logits(model)
        assert model.tokenizer("token")["input_ids"] == ids
    assert torch.equal(found, reference)
    with pytest.raises(StoreError, match="layout.json"):
        moelab.restore(store, tmp_path / "back")


@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "Q4_K"])
def test_experts_lie_in_their_blocks_of_memory_as_in_those_of_the_file(tmp_path, monkeypatch, kind):
    """And a token's sum does not depend on which of its experts are in memory, or come first."""
    monkeypatch.setattr("moelab.checkpoint.experts.LARGE", 1)
    path = tmp_path / "m.gguf"
    qwen3moe(path, kind)
    ids = torch.arange(12)[None]
    for executor in ("exact", "fast"):
        found = []
        for memory in ("100%", "45%"):
            with moelab.open_model(path, memory=memory, executor=executor, warm=False) as lm:
                cache, logits = DynamicCache(config=lm.config), []
                for token in ids.T if executor == "fast" else [ids[0]]:
                    logits.append(lm(token[None], past_key_values=cache).logits)
                found.append(torch.cat(logits, 1))
        assert torch.equal(*found), executor
