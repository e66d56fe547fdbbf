"""A checkpoint is the whole model of its config or it is refused, naming what is wrong: opened,
external, converted. What an architecture ties, leaves out or keeps in fp32 is as it says."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moelab import convert, open_model
from moelab.base import configs
from moelab.base.files import small_model
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointExperts
from moelab.models import discover
from tests.depth import depth
from tests.models import tiny

#: small architectures: stacked by renaming, with biases, modules of their own, groups and
#: corrections, tied, quantised
SWEPT = (
    "small",
    "mixtral",
    "gpt_oss",
    "switch_transformers",
    "deepseek_v3",
    "qwen2_moe",
    "mxfp4",
    "fp8",
)
IDS = torch.arange(9)[None]


def checkpoint_of(name: str, folder: Path) -> Path:
    if name == "small":
        return Path(shutil.copytree(small_model(), folder))
    if name in ("mxfp4", "fp8"):
        return tiny.save_few(name, folder)
    return tiny.save(name, folder, torch.bfloat16, tie_word_embeddings=name == "qwen2_moe")


def write(folder: Path, tensors: dict) -> None:
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")


def changes(key: str, tensors: dict, experts: int):
    """(what is changed, the tensors with one of them changed) in every way that is tried."""
    t, others = tensors[key], {k: t for k, t in tensors.items() if k != key}
    yield "there", others
    yield "name", others | {key + "_": t}
    yield "name", others | {"x." + key: t}
    parts = key.split(".")
    for at, part in enumerate(parts):
        if part.isdigit() or part.startswith("expert_"):
            number = part.removeprefix("expert_")
            for other in (f"0{number}", f"{number}0000", str(experts)):
                name = ".".join([*parts[:at], part.replace(number, other), *parts[at + 1 :]])
                if name not in tensors:
                    yield "name", others | {name: t}
                    yield "name", tensors | {name: t.clone()}
    yield "shape", others | {key: t[..., None]}
    if len(set(t.shape)) > 1:
        yield "shape", others | {key: t.transpose(-1, -2)}
    if t.shape[0] > 1:
        yield "shape", others | {key: t[:-1]}
    yield "type", others | {key: torch.zeros(t.shape, dtype=torch.int32)}
    yield "type", others | {key: torch.zeros(t.shape, dtype=torch.bool)}


@pytest.mark.parametrize("name", SWEPT)
def test_a_changed_tensor_is_refused_by_name(name, tmp_path):
    """Any one tensor, in any one way, is noticed by all that read checkpoints."""
    folder = checkpoint_of(name, tmp_path / "m")
    plan, experts = Checkpoint.at(folder).plan, open_model(folder).spec.E
    tensors, rng = load_file(folder / "model.safetensors"), random.Random(name)
    for key in rng.sample(sorted(tensors), min(len(tensors), depth(2, len(tensors)))):
        groups: dict[str, list] = {}
        for what, changed in changes(key, tensors, experts):
            groups.setdefault(what, []).append(changed)
        parts = [p for layer in plan.experts for expert in layer for p in expert.values()]
        made = {p.target for p in parts if key in p.keys}
        for what in rng.sample(sorted(groups), depth(1, len(groups))):
            write(folder, changed := rng.choice(groups[what]))
            names = [key, *made, *(changed.keys() - tensors.keys())]
            for attempt in (
                lambda: open_model(folder),
                lambda: open_model(folder, experts="external"),
                lambda: convert(folder, tmp_path / "s"),
            ):
                with pytest.raises(ValueError) as error:
                    attempt()
                assert any(n in str(error.value) for n in names), (key, what, error.value)
        assert not list(tmp_path.glob("s*"))


def test_what_an_architecture_keeps_in_fp32_is_opened(tmp_path):
    """As DeepSeek-V3 is published: bf16, with its routers' corrections in fp32; or all in bf16."""
    folder = tiny.save("deepseek_v3", tmp_path, torch.bfloat16, num_hidden_layers=3)
    tensors = load_file(folder / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(8).to(dtype)
        bias = {k: values.clone() for k in tensors if k.endswith("e_score_correction_bias")}
        write(folder, tensors | bias)
        for experts in ("resident", "external"):
            router = discover(open_model(folder, experts=experts))[-1].router
            found = router.e_score_correction_bias
            assert torch.equal(found, values.float()) and found.dtype == torch.float32
            assert router.weight.dtype == torch.bfloat16


def test_tied_and_superfluous_tensors_are_what_the_architecture_says(tmp_path):
    folder = tiny.save("qwen2_moe", tmp_path, tie_word_embeddings=True)
    tensors, truth = load_file(folder / "model.safetensors"), open_model(folder)(IDS).logits
    embedding = tensors["model.embed_tokens.weight"]
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not embedding}
    assert "lm_head.weight" not in tensors
    for found in (
        kept | {"lm_head.weight": embedding},
        tensors | {"lm_head.weight": embedding.clone()},
        tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)},
    ):
        write(folder, found)
        for experts in ("resident", "external"):
            assert torch.equal(open_model(folder, experts=experts)(IDS).logits, truth)
    write(folder, kept)
    with pytest.raises(ValueError, match="lacks .*model.embed_tokens.weight"):
        open_model(folder)


def test_the_dtype_is_the_configs_or_else_the_weights(tmp_path):
    folder = tiny.save("mixtral", tmp_path, torch.bfloat16)
    fields = json.loads((folder / "config.json").read_text())
    for said, meant in (("float32", torch.float32), (None, torch.bfloat16)):
        (folder / "config.json").write_text(json.dumps({**fields, "dtype": said}))
        assert open_model(folder).dtype == open_model(folder, experts="external").dtype == meant
    tensors = load_file(folder / "model.safetensors")
    for key in ("model.norm.weight", "lm_head.weight"):  # the first one decides
        write(folder, tensors | {key: tensors[key].float()})
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert open_model(folder).dtype == theirs.dtype
    assert open_model(folder, dtype="float16").dtype == torch.float16
    for wrong in ("flaot32", "int8", torch.int8):
        with pytest.raises(ValueError, match="dtype is"):
            open_model(folder, dtype=wrong)


@pytest.mark.parametrize(
    "name",
    depth(["gpt_oss", "switch_transformers", "fp8"], [*SWEPT[:4], "llama4_text", "mxfp4", "fp8"]),
)
def test_a_store_opens_as_the_model_that_it_holds(name, tmp_path):
    folder = checkpoint_of(name, tmp_path / "m")
    truth, store = open_model(folder), convert(folder, tmp_path / "s").folder
    resident, external = open_model(store), open_model(store, experts="external")
    theirs, ours = truth.state_dict(), resident.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(t, ours[k]) and t.dtype == ours[k].dtype for k, t in theirs.items())
    assert [type(m) for m in truth.modules()] == [type(m) for m in resident.modules()]
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    for model in (resident, external, open_model(store, dtype=truth.dtype)):
        found, wanted = (
            m.generate(IDS, return_dict_in_generate=True, **options).logits for m in (model, truth)
        )
        assert torch.equal(torch.stack(found), torch.stack(wanted))
    stored, read = (CheckpointExperts(Checkpoint.at(place))(0, 1) for place in (store, folder))
    assert stored.keys() == read.keys() and all(torch.equal(stored[n], read[n]) for n in read)


def test_a_store_that_is_damaged_is_no_model(tmp_path):
    folder = tiny.save("mixtral", tmp_path / "m", torch.bfloat16)
    store = convert(folder, tmp_path / "s").folder
    for name, old, new in (
        ("weights.safetensors", b"", b"\1\1"),
        ("config.json", b"1e-05", b"1e-04"),
    ):
        raw = (store / name).read_bytes()
        (store / name).write_bytes(raw.replace(old, new) if old else raw[:-2] + new)
        with pytest.raises(ValueError, match=name):
            open_model(store)
        (store / name).write_bytes(raw)


def test_a_config_that_is_read_wrongly_opens_nothing(monkeypatch, tmp_path):
    folder = tiny.save("mixtral", tmp_path / "m")
    monkeypatch.setitem(configs.EXCEPTIONS, "mixtral", {"moe_layers": lambda config: [0, 2]})
    for use in (open_model, lambda folder: convert(folder, tmp_path / "s")):
        with pytest.raises(ValueError, match=r"are \(3, 4, \d+\), and by its config \(2, 4"):
            use(folder)


def test_a_base_of_positions_that_transformers_does_not_read_is_refused(tmp_path):
    """DBRX's own config.json says it in attn_config alone; transformers would take 10,000."""
    file = tiny.save("dbrx", tmp_path) / "config.json"
    fields = json.loads(file.read_text())
    del fields["rope_parameters"]
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r'"rope_theta": 500000.0 beside attn_config'):
        open_model(tmp_path)
    file.write_text(json.dumps(fields | {"rope_theta": 5e5}))
    assert open_model(tmp_path).config.rope_parameters["rope_theta"] == 5e5


def test_longcats_rows_without_an_expert_have_no_place_in_a_store(tmp_path):
    said = "12 rows for 8 experts.*longcat_flash cannot be converted"
    with pytest.raises(ValueError, match=said):
        convert(tiny.save("longcat_flash", tmp_path / "m"), tmp_path / "s")


def test_a_width_by_layer_is_no_number_of_layers(tmp_path):
    """Gemma 4's `vocab_size_per_layer_input` is 262,144."""
    open_model(tiny.save("gemma4_text", tmp_path / "m"))
