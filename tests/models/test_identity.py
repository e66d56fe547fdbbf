"""Who a model is: the same whatever it was opened from, another for every other weight; what
belongs to it knows it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import moelab
from moelab import open_model
from moelab.checkpoint.convert import convert
from moelab.checkpoint.restore import restore
from moelab.models import discover, plug
from moelab.models.identity import identity
from moelab.store.reader import StoreExperts
from tests.checkpoint.stores import identity_of, open_store
from tests.depth import depth
from tests.models import tiny


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """(checkpoint, store) of a small bf16 model with 4 experts a layer."""
    folder = tmp_path_factory.mktemp("mixtral")
    return tiny.save("mixtral", folder / "m", torch.bfloat16), convert(
        folder / "m", folder / "s"
    ).folder


def fine_tune(source, folder, key, change):
    """A copy of a checkpoint with one tensor changed."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[key] = change(tensors[key].clone())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "name",
    depth(
        ["qwen3_moe", "gpt_oss", "switch_transformers", "mxfp4", "fp8"],
        [*tiny.ARCHITECTURES, "mxfp4", "fp8"],
    ),
)
def test_one_model_however_it_is_opened(name, tmp_path):
    source = tiny.save_few(name, tmp_path / "m")
    store = convert(source, tmp_path / "s").folder
    found = {
        identity_of(source),
        identity_of(store),
        identity(open_model(source, experts="external")),
        identity(open_model(source)),
        identity(open_model(store)),
        identity(open_store(store)),
        identity(moelab.open_model(store, memory="50%")),
        identity_of(restore(store, tmp_path / "r")),
        identity(open_model(source, dtype=torch.float32)),
    }
    assert len(found) == 1 and len(found.pop()) == 16


def test_shards_and_another_writing_of_the_config_are_the_same_model(mixtral, tmp_path):
    source, _ = mixtral
    open_model(source).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    config = json.loads((source / "config.json").read_text()) | {
        "transformers_version": "5.0.0",
        "use_cache": False,
    }
    (tmp_path / "shards" / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert identity_of(tmp_path / "shards") == identity_of(source)


def test_every_tensor_counts_and_so_does_the_config(mixtral, tmp_path):
    source, _ = mixtral
    found = {identity_of(source)}
    keys = list(load_file(source / "model.safetensors"))
    for i, key in enumerate(keys):

        def nudge(t):
            t.view(-1)[t.numel() // 3] += 1
            return t

        found.add(identity_of(fine_tune(source, tmp_path / str(i), key, nudge)))
    config = json.loads((source / "config.json").read_text())
    for change in ({"rms_norm_eps": 1e-3}, {"num_experts_per_tok": 1}):
        (tmp_path / "0" / "config.json").write_text(json.dumps(config | change))
        found.add(identity_of(tmp_path / "0"))
    assert len(found) == len(keys) + 3


def test_a_model_that_was_changed_is_another_one(mixtral):
    model = open_model(mixtral[0])
    first = identity(model)
    assert identity(open_model(mixtral[0], dtype="float16")) == first
    with torch.no_grad():
        discover(model)[0].experts.down_proj[1].mul_(1.5)
    assert identity(model) != first
    other = transformers.AutoModelForCausalLM.from_pretrained(mixtral[0])
    assert identity(other) not in (first, identity(model)) and identity(other) == identity(other)


def test_a_checkpoint_that_was_changed_after_opening_names_nobody(mixtral, tmp_path):
    source = fine_tune(mixtral[0], tmp_path / "m", "lm_head.weight", lambda t: t)
    model = open_model(source)
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="was changed since the model was opened"):
        identity(model)


def test_a_source_of_another_model_is_refused(mixtral, tmp_path):
    """The other one differs in one expert only: same geometry, same routers, same everything
    else."""
    source, store = mixtral
    key = next(k for k in load_file(source / "model.safetensors") if "experts.2.w2" in k)
    other = fine_tune(source, tmp_path / "m", key, lambda t: t * 2)
    theirs = StoreExperts(moelab.ExpertStore(store), mode="buffered")
    for experts in ("external", "resident"):
        plug(open_model(source, experts=experts), source=theirs)
        with pytest.raises(
            ValueError, match=f"{identity_of(source)}.*the model is {identity_of(other)}"
        ):
            plug(open_model(other, experts=experts), source=theirs)
    with pytest.raises(
        ValueError, match="open the model that they belong to with moelab.open_model"
    ):
        plug(transformers.AutoModelForCausalLM.from_pretrained(source), source=theirs)
