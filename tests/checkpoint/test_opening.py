"""Opening models: what is read, what is refused, and what the refusal says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import moelab
from moelab import open_model
from moelab.base.files import small_model
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointExperts
from moelab.checkpoint.opening import require_tokenizer
from moelab.models import discover, plug
from tests.models import tiny


def test_the_small_model_opens_by_default():
    model = moelab.open_model()
    assert model.spec.L >= 4 and model.spec.E >= 16 and model.spec.name == "small"
    assert model.tokenizer.padding_side == "left"
    text = model.tokenizer("\nkey = 123")["input_ids"]
    assert model(torch.tensor([text])).logits.shape == (1, len(text), model.config.vocab_size)


def test_a_config_imports_no_model():
    code = (
        "import sys, moelab.checkpoint.config as c, moelab.base.files as f; c.load_config(f.small_model())\n"
        "print('transformers.modeling_utils' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


@pytest.mark.parametrize("name", tiny.SOME)
def test_checkpoint_experts_are_the_models_own(name, tmp_path):
    folder = tiny.save(name, tmp_path / "m")
    resident = open_model(folder)
    source = CheckpointExperts(Checkpoint.at(folder), torch.float32)
    plug(resident)
    for layer in discover(resident):
        for expert in range(resident.spec.E):
            own, read = layer.seam.own(expert), source(layer.index, expert)
            assert own.keys() == read.keys()
            assert all(torch.equal(own[n], read[n]) and read[n].data_ptr() % 64 == 0 for n in own)


def test_external_never_reads_the_experts(tmp_path):
    """With its expert bytes destroyed, the checkpoint still opens, and only using an expert shows
    the damage."""
    folder = tiny.save("mixtral", tmp_path / "m")
    file = next(folder.glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for key, entry in header.items():
        if ".experts." in key:
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            raw[start:end] = b"\xff" * (end - start)  # NaN in every float type
    file.write_bytes(raw)
    model = open_model(folder, experts="external")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not any(".experts." in name for name, _ in model.named_parameters())
    assert model(torch.arange(3, 9)[None]).logits.isnan().any()


# ----------------------------------------------------------------------------------------------------
# bad input


def test_a_hub_that_cannot_be_reached_is_asked_once_and_the_error_says_so(tmp_path):
    code = (
        "import time, moelab; from moelab.advice.model import find_model\n"
        "def waits(seconds): raise SystemExit('waits to ask again')\n"
        "time.sleep = waits\n"
        "for open_it in (moelab.open_model, find_model):\n"
        "    try: open_it('some-where/else')\n"
        "    except FileNotFoundError as error: print(error)"
    )
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    environment = os.environ | offline | {"HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.count("Check the spelling and the network") == 2, done.stderr


@pytest.mark.parametrize(
    "what, words",
    [
        ("nothing", "no checkpoint folder"),
        ("empty", "no config.json"),
        ("file", "no checkpoint folder"),
        ("config", "no .safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_not_told_to_get_a_tokenizer(what, words, tmp_path):
    path = tmp_path / "model"
    if what == "nothing":
        path = tmp_path / "nowhere" / "model"
    elif what == "file":
        path.write_text("text")
    else:
        path.mkdir()
    if what == "config":
        shutil.copy(small_model() / "config.json", path)
    with pytest.raises((FileNotFoundError, ValueError), match=words):
        require_tokenizer(path)


def test_where_in_its_file_a_weight_lies_changes_no_bit(tmp_path):
    """The last bits of an fp32 product with one row depend on it, on some processors."""
    folder = tiny.save("qwen2_moe", tmp_path / "m", torch.float32)
    file, found = folder / "model.safetensors", []
    for padding in range(0, 64, 8):  # a longer header moves all weights
        save_file(load_file(file), file, {"format": "pt", "padding": "x" * padding})
        model = open_model(folder)
        assert all(weight.data_ptr() % 64 == 0 for weight in model.parameters())
        found.append(model(torch.tensor([[5]])).logits)
    assert all(torch.equal(logits, found[0]) for logits in found)
