"""Folders from elsewhere: no code of theirs runs, nothing outside them is read, and what is damaged
is refused in words or harmless."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moelab import open_model
from tests.models import tiny

IDS = torch.arange(5)[None]
CODE = "import pathlib; pathlib.Path({!r}).touch()\nclass Own: pass\ndef generate(*_, **__): pass\n"


@pytest.fixture
def folder(tmp_path):
    return tiny.save("mixtral", tmp_path / "m", torch.bfloat16)


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager", trust_remote_code=False
    ).eval()


@pytest.mark.parametrize("part", ["config", "tokenizer", "generate"])
def test_no_code_of_a_checkpoint_runs(part, folder, tmp_path, monkeypatch):
    """Nor is anybody asked on standard input whether it may."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    (folder / "custom_generate").mkdir()
    for file in ("own.py", "custom_generate/generate.py"):
        (folder / file).write_text(CODE.format(str(tmp_path / "ran")))
    config = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    if part == "tokenizer":
        settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.warns(UserWarning, match="its tokenizer cannot be read"):
            assert open_model(folder).tokenizer is None
    elif part == "config":
        (folder / "config.json").write_text(json.dumps({**config, **own, "model_type": "own"}))
        with pytest.raises(ValueError, match="code of its own.*never run"):
            open_model(folder)
    else:
        (folder / "config.json").write_text(json.dumps({**config, **own}))
        open_model(folder).generate(IDS, max_new_tokens=1)
    assert not (tmp_path / "ran").exists()


def test_small_files_are_read_in_the_folder_and_the_hub_cache_and_weights_anywhere(
    folder, tmp_path
):
    """Shards that are links into the cache or to another disk: huggingface/huggingface_hub issue
    2284."""
    truth = open_model(folder)(IDS).logits
    cache, local = tmp_path / "models--a--b", tmp_path / "local"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    for made in (snapshot, blobs, local):
        made.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
        (local / file.name).symlink_to(blobs / str(i))  # as `hf download --local-dir` made it
    elsewhere = shutil.move(folder / "model.safetensors", tmp_path / "a shard on another disk")
    (folder / "model.safetensors").symlink_to(elsewhere)
    for place in (snapshot, local, folder):
        for options in ({}, {"memory": "50%"}):
            with open_model(place, **options) as lm:
                assert torch.equal(lm(IDS).logits, truth)
    (tmp_path / "own").write_bytes(b"a secret")
    for name in ("config.json", "tokenizer.json", "generation_config.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
        for target in (tmp_path / "own", Path("nowhere"), Path(name), tmp_path):
            (folder / name).symlink_to(target)
            if name == "tokenizer.json" and target.name != "own":  # a model runs without one
                assert open_model(folder).tokenizer is None
            else:
                with pytest.raises((ValueError, FileNotFoundError), match=name):
                    open_model(folder)
            (folder / name).unlink()
        if (local / name).exists():
            shutil.copyfile(local / name, folder / name)


@pytest.mark.parametrize("name", ["../m/model.safetensors", "..", "", "a\\b.safetensors", 3])
def test_an_index_names_files_of_its_folder(name, folder):
    keys = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(keys, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="index.json.*no plain name"):
        open_model(folder)


def test_an_index_and_its_shards_say_the_same(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(tensors)}
    index, key = folder / "model.safetensors.index.json", next(iter(tensors))
    for shard in set(names.values()):
        save_file({k: t for k, t in tensors.items() if names[k] == shard}, folder / shard)
    for wrong, message in (
        (names, None),
        ({**names, "x": names[key]}, f"x is in {names[key]}, and it is in None"),
        ({k: n for k, n in names.items() if k != key}, f"{key} is in None"),
        ({**names, key: "model-1.safetensors"}, f"{key} is in model-1"),
        ({}, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        if message is None:
            open_model(folder)
        else:
            with pytest.raises(ValueError, match=message):
                open_model(folder)
    index.write_text(json.dumps({"weight_map": {**names, "x": "model-2.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="lacks model-2"):
        open_model(folder)


def headers(header: dict) -> list[bytes]:
    """Headers that no file should have."""
    a, b = [key for key in header if header[key]["data_offsets"][1]][:2]
    (begin, end), (_, after) = header[a]["data_offsets"], header[b]["data_offsets"]

    def with_(**fields):
        return json.dumps({**header, a: {**header[a], **fields}}).encode()

    return [
        with_(data_offsets=header[b]["data_offsets"]),
        with_(data_offsets=[begin + 4, end]),
        with_(data_offsets=[begin, after]),
        with_(data_offsets=[begin, 10**30]),
        with_(dtype="Q4"),
        with_(shape=[-s for s in header[a]["shape"]]),
        json.dumps({**header, a: [1, 2]}).encode(),
        b"[1, 2]",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"\xff" * 50,
        b"{}",
    ]


def test_impossible_headers_are_refused(folder):
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__")
    cases = [len(text).to_bytes(8, "little") + text + raw[start:] for text in headers(header)]
    cases += [n.to_bytes(8, "little") + raw[8:] for n in (0, start, 1 << 40, (1 << 64) - 1)]
    for case in (*cases, raw[:-7], raw[:40], b""):
        file.write_bytes(case)
        with pytest.raises(ValueError, match="model.safetensors.*again"):
            open_model(folder)


CONFIGS = [
    b"[]",
    b"",
    b"\xff\xfe",
    b'{"a":' * 100_000,
    {"model_type": ["mixtral"]},
    {"model_type": "moonbeam"},
    {"hidden_size": "32"},
    {"hidden_size": 10**18},
    {"num_hidden_layers": 10**9},
    {"num_local_experts": 0},
    {"num_attention_heads": 0},
    {"hidden_act": "nothing"},
    {"rope_parameters": 3},
    {"dtype": "int3"},
    {"quantization_config": 3},
    {"quantization_config": {"quant_method": "none"}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
    {"attn_implementation": "a/kernel"},
    {"transformers_weights": "../other.safetensors"},
    {"pad_token_id": 10**9},
]


@pytest.mark.parametrize("change", CONFIGS, ids=lambda c: repr(c)[:40])
def test_a_config_that_makes_no_sense_is_refused(change, folder):
    """Or it is harmless: then the model is that of transformers with this config."""
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    is_bytes = isinstance(change, bytes)
    file.write_bytes(change if is_bytes else json.dumps({**fields, **change}).encode())
    try:
        model = open_model(folder)
    except (ValueError, OSError) as error:
        assert len(str(error)) > 30 and "\n" not in str(error)
    else:
        if "quantization_config" not in change:
            assert torch.equal(model(IDS).logits, theirs(folder)(IDS).logits)
