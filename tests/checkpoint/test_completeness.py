"""A checkpoint is the whole model of its config or it is refused, naming what is wrong: opened,
external, converted."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from moelab import open_model
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.convert import convert
from moelab.checkpoint.experts import CheckpointExperts
from moelab.files import small_model
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
Tensors = dict[str, tuple[str, list[int], bytes]]  # key → dtype, shape, bytes


def checkpoint_of(name: str, folder: Path) -> Path:
    if name == "small":
        return Path(shutil.copytree(small_model(), folder))
    if name in ("mxfp4", "fp8"):
        return tiny.save_few(name, folder)
    return tiny.save(name, folder, torch.bfloat16, tie_word_embeddings=name == "qwen2_moe")


def read(file: Path) -> Tensors:
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        key: (
            e["dtype"],
            e["shape"],
            raw[start + e["data_offsets"][0] : start + e["data_offsets"][1]],
        )
        for key, e in header.items()
    }


def write(file: Path, tensors: Tensors) -> None:
    header, at = {}, 0
    for key, (dtype, shape, data) in tensors.items():
        header[key], at = (
            {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]},
            at + len(data),
        )
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors.values())
    )


#: the first word of a change → what is changed
GROUPS = {
    "removed": "there",
    "renamed": "name",
    "renumbered": "name",
    "once": "name",
    "reshaped": "shape",
    "flattened": "shape",
    "transposed": "shape",
    "a": "shape",
    "now": "type",
}


def changes(key: str, tensors: Tensors, experts: int):
    """(what, the tensors with one of them changed) in every way that is tried."""
    dtype, shape, data = tensors[key]
    others = {k: t for k, t in tensors.items() if k != key}
    yield "removed", others
    yield "renamed", others | {key + "_": tensors[key]}
    yield "renamed in front", others | {"x." + key: tensors[key]}
    parts = key.split(".")
    for at, part in enumerate(parts):
        if part.isdigit() or part.startswith("expert_"):
            number = int(part.removeprefix("expert_"))
            for other in (f"0{number}", f"{number}0000", str(experts)):
                name = ".".join([*parts[:at], part.replace(str(number), other), *parts[at + 1 :]])
                if name not in tensors:
                    yield f"renumbered to {name}", others | {name: tensors[key]}
                    yield f"once more as {name}", tensors | {name: tensors[key]}
    yield "reshaped", others | {key: (dtype, [*shape, 1], data)}
    yield "flattened", others | {key: (dtype, [math.prod(shape), 1, 1, 1], data)}
    if len(set(shape)) > 1:
        yield "transposed", others | {key: (dtype, [*shape[:-2], shape[-1], shape[-2]], data)}
    if shape[0] > 1:
        rows = [shape[0] - 1, *shape[1:]]
        yield (
            "a row less",
            others
            | {key: (dtype, rows, data[: math.prod(rows) * (len(data) // math.prod(shape))])},
        )
    width = len(data) // max(1, math.prod(shape))
    for other, size in {"I16": 2, "I8": 1, "I32": 4, "BOOL": 1}.items():
        if other != dtype:
            bytes_ = data[: len(data) // width * size] if size <= width else data * (size // width)
            yield f"now {other}", others | {key: (other, shape, bytes_)}


def attempts(folder: Path, destination: Path):
    yield "resident", lambda: open_model(folder)
    yield "external", lambda: open_model(folder, experts="external")
    yield "convert", lambda: convert(folder, destination)


@pytest.mark.stress
@pytest.mark.parametrize("name", SWEPT)
def test_a_changed_tensor_is_refused_by_name(name, tmp_path):
    """Any one tensor, in any one way, is noticed by all that read checkpoints; before, nearly none
    was."""
    folder = checkpoint_of(name, tmp_path / "m")
    experts = open_model(folder).spec.E
    file = next(folder.glob("*.safetensors"))
    tensors = read(file)
    plan = Checkpoint.at(folder).plan
    silent, tried, rng = [], 0, random.Random(name)
    for key in rng.sample(list(tensors), min(len(tensors), depth(5, len(tensors)))):
        groups: dict[str, list] = {}
        for what, changed in changes(key, tensors, experts):
            groups.setdefault(GROUPS[what.split()[0]], []).append((what, changed))
        chosen = [rng.choice(group) for group in groups.values()]
        for what, changed in rng.sample(chosen, depth(1, len(chosen))):
            write(file, changed)
            silent += refusals(key, what, changed, tensors, plan, folder, tmp_path / "s")
            tried += 3
        assert not list(tmp_path.glob("s*"))
    assert not silent, f"{len(silent)} of {tried}:\n" + "\n".join(silent[:20])


def refusals(key, what, changed, tensors, plan, folder, destination):
    """What is wrong with how this change is taken; nothing if it is refused by name everywhere."""
    stored = {p.target for plans in plan.experts for p in plans.values() if key in p.keys}
    for how, attempt in attempts(folder, destination):
        try:
            attempt()
            yield f"{key} {what}: {how} took it"
        except ValueError as error:
            if not any(n in str(error) for n in (key, *stored, *(changed.keys() - tensors.keys()))):
                yield f"{key} {what}: {how} does not name it: {error}"


def test_what_an_architecture_keeps_in_fp32_is_opened(tmp_path):
    """As DeepSeek-V3 is published: bf16, with its routers' corrections in fp32; or all of it in
    bf16."""
    for layers in (2, 3):  # of which the first is dense
        folder = tiny.save(
            "deepseek_v3", tmp_path / str(layers), torch.bfloat16, num_hidden_layers=layers
        )
        file = next(folder.glob("*.safetensors"))
        tensors = read(file)
        for key in (bias := [key for key in tensors if key.endswith("e_score_correction_bias")]):
            values = torch.randn(8)
            tensors[key] = "F32", [8], values.numpy().tobytes()
        write(file, tensors)
        for experts in ("resident", "external"):
            router = discover(open_model(folder, experts=experts))[-1].router
            assert (
                torch.equal(router.e_score_correction_bias, values)
                and router.weight.dtype == torch.bfloat16
            )
        for key in bias[-1:]:
            write(
                file,
                tensors
                | {key: ("BF16", [8], values.bfloat16().view(torch.int16).numpy().tobytes())},
            )
            found = discover(open_model(folder))[-1].router.e_score_correction_bias
            assert torch.equal(found, values.bfloat16().float()) and found.dtype == torch.float32


def test_tied_and_superfluous_tensors_are_what_the_architecture_says(tmp_path):
    folder = tiny.save("qwen2_moe", tmp_path / "m", tie_word_embeddings=True)
    file = next(folder.glob("*.safetensors"))
    tensors, truth = read(file), open_model(folder)(torch.arange(9)[None]).logits
    embedding = "model.embed_tokens.weight"
    assert "lm_head.weight" not in tensors
    kept = {key: tensor for key, tensor in tensors.items() if key != embedding}
    for found in (
        kept | {"lm_head.weight": tensors[embedding]},
        tensors | {"lm_head.weight": tensors[embedding]},
        tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [4], bytes(16))},
    ):
        write(file, found)
        for experts in ("resident", "external"):
            assert torch.equal(
                open_model(folder, experts=experts)(torch.arange(9)[None]).logits, truth
            )
    write(file, kept)
    with pytest.raises(ValueError, match="lacks .*model.embed_tokens.weight"):
        open_model(folder)


def test_the_dtype_is_the_configs_or_else_the_weights(tmp_path):
    folder = tiny.save("mixtral", tmp_path / "m", torch.bfloat16)
    fields = json.loads((folder / "config.json").read_text())
    for said, meant in (("float32", torch.float32), (None, torch.bfloat16)):
        (folder / "config.json").write_text(json.dumps({**fields, "dtype": said}))
        assert open_model(folder).dtype == open_model(folder, experts="external").dtype == meant
    file = folder / "model.safetensors"
    tensors = read(file)
    write(
        file,
        {
            key: (
                "F32",
                t[1],
                torch.frombuffer(bytearray(t[2]), dtype=torch.bfloat16).float().numpy().tobytes(),
            )
            for key, t in tensors.items()
        },
    )
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": "bfloat16"}))
    with pytest.warns(UserWarning, match="more precisely than transformers computes"):
        assert open_model(folder).dtype == torch.bfloat16
    for key in (
        "model.norm.weight",
        "lm_head.weight",
    ):  # the first one decides where the config does not
        dtype, shape, data = tensors[key]
        wide = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float().numpy().tobytes()
        write(file, tensors | {key: ("F32", shape, wide)})
        (folder / "config.json").write_text(json.dumps({**fields, "dtype": None}))
        assert open_model(folder).dtype == theirs(folder).dtype
    write(file, tensors)
    (folder / "config.json").write_text(json.dumps(fields))
    assert open_model(folder, dtype="float16").dtype == torch.float16
    for wrong in ("flaot32", "int8", torch.int8):
        with pytest.raises(ValueError, match="dtype is"):
            open_model(folder, dtype=wrong)


# -------------------------------------------------------------------------------------------------
# stores as models


@pytest.mark.parametrize(
    "name",
    [
        "small",
        "mixtral",
        "gpt_oss",
        "switch_transformers",
        "llama4_text",
        "deepseek_v3",
        "mxfp4",
        "fp8",
    ],
)
def test_a_store_opens_as_the_model_that_it_holds(name, tmp_path):
    folder = checkpoint_of(name, tmp_path / "m")
    truth = open_model(folder)
    store = convert(folder, tmp_path / "s").folder
    resident, external = open_model(store), open_model(store, experts="external")
    assert truth.state_dict().keys() == resident.state_dict().keys()
    for key, tensor in truth.state_dict().items():
        assert (
            torch.equal(tensor, resident.state_dict()[key])
            and tensor.dtype == resident.state_dict()[key].dtype
        )
    assert [type(m) for m in truth.modules()] == [type(m) for m in resident.modules()]
    ids = torch.arange(3, 20)[None]
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = torch.stack(truth.generate(ids, **options).logits)
    for model in (resident, external, open_model(store, dtype=truth.dtype)):
        assert torch.equal(torch.stack(model.generate(ids, **options).logits), expected)
    stored, read = (CheckpointExperts(Checkpoint.at(place))(0, 1) for place in (store, folder))
    assert stored.keys() == read.keys() and all(
        torch.equal(stored[name], read[name]) for name in read
    )


def test_a_store_that_is_unfinished_or_damaged_is_no_model(tmp_path):
    folder = tiny.save("mixtral", tmp_path / "m", torch.bfloat16)
    store = convert(folder, tmp_path / "s").folder
    weights = store / "weights.safetensors"
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-2] + b"\1\1")
    for experts in ("resident", "external"):
        with pytest.raises(ValueError, match="weights.safetensors"):
            open_model(store, experts=experts)
    weights.write_bytes(raw)
    (store / "config.json").write_text(
        (store / "config.json").read_text().replace("1e-05", "1e-04")
    )
    with pytest.raises(ValueError, match="config.json"):
        open_model(store)
    store.rename(tmp_path / "s.part")
    with pytest.raises(FileNotFoundError, match="cut off.*same convert"):
        open_model(tmp_path / "s")
    (tmp_path / "s.part.jsonl").touch()
    with pytest.raises(ValueError, match="unfinished"):
        open_model(tmp_path / "s.part")


# --------------------------------------------------------------------------------------------------
# hostile folders

CODE = "import pathlib; pathlib.Path({!r}).touch()\nclass Own: pass\n"


@pytest.mark.parametrize("part", ["config", "tokenizer", "generate"])
def test_no_code_of_a_checkpoint_runs(part, tmp_path, monkeypatch):
    """Nor is anybody asked on standard input whether it may."""
    folder, ran = tiny.save("mixtral", tmp_path / "m"), tmp_path / "ran"
    (folder / "own.py").write_text(CODE.format(str(ran)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        CODE.format(str(ran)) + "def generate(*_, **__): pass"
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    config = json.loads((folder / "config.json").read_text())
    if part == "config":
        (folder / "config.json").write_text(
            json.dumps(
                {
                    **config,
                    "model_type": "own",
                    "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
                }
            )
        )
        with pytest.raises(ValueError, match="code of its own.*never run"):
            open_model(folder)
    elif part == "tokenizer":
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})
        )
        with pytest.warns(
            UserWarning, match="code of its own .*never run here; put a tokenizer.json there"
        ):
            assert open_model(folder).tokenizer is None
    else:
        (folder / "config.json").write_text(
            json.dumps({**config, "auto_map": {"AutoConfig": "own.Own"}})
        )
        open_model(folder).generate(torch.arange(3)[None], max_new_tokens=1)
    assert not ran.exists()


def test_small_files_are_read_in_the_folder_and_the_hub_cache_and_weights_anywhere(tmp_path):
    """Shards that are links into the cache or to another disk: huggingface/huggingface_hub issue
    2284."""
    folder = tiny.save("mixtral", tmp_path / "m")
    truth = open_model(folder)(torch.arange(5)[None]).logits
    snapshot, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "0123",
        tmp_path / "models--a--b" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    local = tmp_path / "local"  # as `hf download --local-dir` made it, whose links are absolute
    local.mkdir()
    for file in folder.iterdir():
        (local / file.name).symlink_to((snapshot / file.name).resolve())
    elsewhere = shutil.move(folder / "model.safetensors", tmp_path / "a shard on another disk")
    (folder / "model.safetensors").symlink_to(elsewhere)
    for place in (snapshot, local, folder):
        assert torch.equal(open_model(place)(torch.arange(5)[None]).logits, truth)
        with open_model(place, memory="50%") as lm:
            assert torch.equal(lm(torch.arange(5)[None]).logits, truth)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        kept = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).unlink(missing_ok=True)
        (tmp_path / "own").write_bytes(b"a secret")
        for target in (tmp_path / "own", Path("nowhere"), Path(name), tmp_path):
            (folder / name).symlink_to(target)
            if (
                name == "tokenizer.json" and target.name != "own"
            ):  # a model runs without one that is damaged
                assert open_model(folder).tokenizer is None
            else:
                with pytest.raises((ValueError, FileNotFoundError), match=name):
                    open_model(folder)
            (folder / name).unlink()
        if kept is not None:
            (folder / name).write_bytes(kept)
    assert torch.equal(open_model(folder)(torch.arange(5)[None]).logits, truth)


@pytest.mark.parametrize(
    "name",
    [
        "../m/model.safetensors",
        "/etc/passwd",
        "..",
        "",
        ".",
        "a\\b.safetensors",
        3,
        None,
        "sub/model.safetensors",
    ],
)
def test_an_index_names_files_of_its_folder(name, tmp_path):
    folder = tiny.save("mixtral", tmp_path / "m")
    keys = read(folder / "model.safetensors")
    (folder / "sub").mkdir()
    shutil.move(folder / "model.safetensors", folder / "sub")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(keys, name)})
    )
    with pytest.raises(ValueError, match="index.json.*no plain name"):
        open_model(folder)


def test_an_index_and_its_shards_say_the_same(tmp_path):
    folder = tiny.save("mixtral", tmp_path / "m")
    tensors = read(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(tensors)}
    index, key = folder / "model.safetensors.index.json", next(iter(tensors))

    def split(names, **extra):
        for name in set(names.values()):
            write(folder / name, {k: tensors[k] for k in tensors if names[k] == name} | extra)

    split(names)
    index.write_text(json.dumps({"weight_map": names}))
    open_model(folder)
    for wrong, message in (
        ({**names, "x": names[key]}, f"x is in {names[key]}, and it is in None"),
        (
            {k: n for k, n in names.items() if k != key},
            f"{key} is in None, and it is in {names[key]}",
        ),
        ({**names, key: "model-1.safetensors"}, f"{key} is in model-1"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ValueError, match=message):
            open_model(folder)
    index.write_text(json.dumps({"weight_map": names}))
    split(names, **{key: tensors[key]})
    with pytest.raises(ValueError, match=f"{key} twice, in model-0.safetensors and in model-1"):
        open_model(folder)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ValueError, match="no weight_map"):
        open_model(folder)


def header_cases(header: dict) -> dict[str, bytes]:
    """Headers that no file should have."""
    a, b = [key for key in header if header[key]["data_offsets"][1]][:2]
    (begin, end), (_, after) = header[a]["data_offsets"], header[b]["data_offsets"]

    def with_(**fields):
        return json.dumps({**header, a: {**header[a], **fields}}).encode()

    return {
        "negative": with_(data_offsets=[-8, end]),
        "reversed": with_(data_offsets=[end, begin]),
        "overlapping": with_(data_offsets=header[b]["data_offsets"]),
        "gapped": with_(data_offsets=[begin + 4, end]),
        "too long": with_(data_offsets=[begin, after]),
        "a float": with_(data_offsets=[float(begin), end]),
        "three": with_(data_offsets=[begin, end, end]),
        "no offsets": with_(data_offsets=None),
        "huge": with_(data_offsets=[begin, 10**30]),
        "true": with_(data_offsets=[False, end]),
        "unknown dtype": with_(dtype="Q4"),
        "dtype list": with_(dtype=["F32"]),
        "no dtype": with_(dtype=None),
        "negative shape": with_(shape=[-s for s in header[a]["shape"]]),
        "shape of text": with_(shape="96"),
        "huge shape": with_(shape=[10**12, 10**12]),
        "zero": with_(shape=[0]),
        "nested": with_(shape=[[1]]),
        "entry list": json.dumps({**header, a: [1, 2]}).encode(),
        "no dict": b"[1, 2]",
        "number": b"3" + b" " * 9,
        "twice": json.dumps(header)[:-1].encode() + b", " + json.dumps({a: header[a]})[1:].encode(),
        "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "digits": b'{"a":' + b"9" * 100_000 + b"}",
        "not text": b"\xff" * 50,
        "cut": json.dumps(header).encode()[:-9],
        "empty": b"{}",
    }


def test_impossible_headers_are_refused(tmp_path):
    folder = tiny.save("mixtral", tmp_path / "m")
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__")
    for what, text in header_cases(header).items():
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
        with pytest.raises(ValueError, match="model.safetensors.*again"):
            open_model(folder)
            pytest.fail(what)
    for size in (0, 1, start, len(raw), 1 << 40, (1 << 64) - 1):
        file.write_bytes(size.to_bytes(8, "little") + raw[8:])
        with pytest.raises(ValueError, match="model.safetensors.*again"):
            open_model(folder)


CONFIGS = [
    b"[]",
    b"3",
    b"null",
    b'"text"',
    b"",
    b"{",
    b"\xff\xfe",
    b'{"a":' * 100_000,
    b"[" * 100_000,
    b"{}",
    {"model_type": 3},
    {"model_type": ["mixtral"]},
    {"model_type": None},
    {"hidden_size": "32"},
    {"hidden_size": None},
    {"hidden_size": -32},
    {"hidden_size": 10**18},
    {"hidden_size": {}},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": 2.5},
    {"num_local_experts": 10**9},
    {"num_local_experts": 0},
    {"num_local_experts": []},
    {"num_experts_per_tok": "two"},
    {"num_attention_heads": 0},
    {"num_attention_heads": 10**9},
    {"vocab_size": -1},
    {"vocab_size": 10**15},
    {"hidden_act": "nothing"},
    {"hidden_act": 7},
    {"rope_parameters": 3},
    {"rope_parameters": {"rope_type": "none"}},
    {"dtype": "int3"},
    {"dtype": 5},
    {"layer_types": "all"},
    {"architectures": 3},
    {"quantization_config": 3},
    {"quantization_config": {"quant_method": "none"}},
    {"intermediate_size": 10**12},
    {"head_dim": 10**12},
    {"attn_implementation": "a/kernel"},
    {"transformers_weights": "../other.safetensors"},
    {"rms_norm_eps": "x"},
    {"sliding_window": "x"},
    {"pad_token_id": 10**9},
    {"tie_word_embeddings": "x"},
]


@pytest.mark.parametrize("change", CONFIGS, ids=lambda c: repr(c)[:40])
def test_a_config_that_makes_no_sense_is_refused(change, tmp_path):
    """Or it is harmless: then the model is that of transformers with this config."""
    folder = tiny.save("mixtral", tmp_path / "m")
    file = folder / "config.json"
    file.write_bytes(
        change
        if isinstance(change, bytes)
        else json.dumps({**json.loads(file.read_text()), **change}).encode()
    )
    for experts in ("resident", "external"):
        try:
            model = open_model(folder, experts=experts)
        except (ValueError, OSError) as error:
            assert len(str(error)) > 30
        else:
            assert torch.equal(
                model(torch.arange(5)[None]).logits, theirs(folder)(torch.arange(5)[None]).logits
            )


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager", trust_remote_code=False
    ).eval()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_damaged_small_files(name, tmp_path):
    folder = Path(shutil.copytree(small_model(), tmp_path / "m"))
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    for content in (
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"a":' * 50_000,
        b"3",
        b'{"model": 3}',
        b'{"max_length": []}',
        b'{"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]}',
    ):
        (folder / name).write_bytes(content)
        try:
            open_model(folder, experts="external")
        except ValueError as error:
            assert str(folder) in str(error)


@pytest.mark.stress
def test_random_damage_is_refused_or_harmless(tmp_path):
    """Bytes of headers, indices and configs at random: an error in words within seconds, or the
    very same model."""
    import time

    rng, ids = random.Random(5), torch.arange(3, 12)[None]
    folder = tiny.save("mixtral", tmp_path / "m", torch.bfloat16)
    open_model(folder).save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink()
    files = [
        folder / "config.json",
        folder / "model.safetensors.index.json",
        *folder.glob("*.safetensors"),
    ]
    truth, opened = open_model(folder)(ids).logits, 0
    for _ in range(depth(40, 1000)):
        file = rng.choice(files)
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little") if file.suffix == ".safetensors" else len(raw)
        file.write_bytes(mutated(raw, end, rng))
        start = time.process_time()
        try:
            logits = open_model(folder, experts=rng.choice(["resident", "external"]))(ids).logits
        except (ValueError, LookupError, OSError):
            pass
        else:
            opened += 1
            expected = theirs(folder)(ids).logits if file.name == "config.json" else truth
            assert torch.equal(logits, expected), file.read_bytes()[:2000]
        assert time.process_time() - start < 10  # of this process, however busy the machine
        file.write_bytes(raw)
    assert opened < depth(40, 1000)


def mutated(raw: bytes, end: int, rng: random.Random) -> bytes:
    """The bytes with something among the first `end` changed, cut, doubled or inserted."""
    at, n = rng.randrange(end), rng.choice((1, 1, 1, 2, 8, 60))
    head, tail = raw[:at], raw[at + n :]
    return rng.choice(
        (
            lambda: head + bytes(rng.randrange(256) for _ in range(n)) + tail,
            lambda: head + bytes(rng.choice(b'0123456789-."{}[],:nul') for _ in range(n)) + tail,
            lambda: head + tail,
            lambda: raw[: at + n] + raw[at:],
            lambda: head,
            lambda: (
                head
                + rng.choice((b"1e9", b"-1", b"null", b"[]", b"{}", b'"x"', b"true", b"0.5"))
                + tail
            ),
        )
    )()
