"""Checkpoints as people find them: tensors of other types, formats of other tools, clutter,
leftovers, links."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moelab import open_model
from moelab.advice.model import find_model
from moelab.checkpoint.convert import convert
from moelab.checkpoint.opening import require_tokenizer
from moelab.checkpoint.restore import restore
from moelab.store.layout import SOURCE_LAYOUT
from tests.checkpoint import packed
from tests.depth import depth, in_turn
from tests.models import tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(more precisely|without a tokenizer|plain floating)"
)
IDS = torch.arange(3, 20)[None]
FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def theirs(folder, **options):
    """transformers itself; fp32 weights at aligned addresses, as torch allocates them."""
    kind = (
        transformers.AutoModelForImageTextToText
        if "qwen3_vl" in (folder / "config.json").read_text()
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_pretrained(folder, experts_implementation="eager", **options).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def rewrite(folder: Path, tensors: dict, **config) -> Path:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))
    return folder


def every_way(folder: Path, scratch: Path):
    """(how, its logits) of a checkpoint opened in each way, converted, and restored."""
    store = convert(folder, scratch / "store")
    places = {"checkpoint": folder, "store": store.folder}
    if SOURCE_LAYOUT in store.files:
        places["restored"] = restore(store, scratch / "back")
    for name, options in in_turn([*places], [{"memory": "50%"}, {"experts": "external"}, {}]):
        with open_model(places[name], **options) as model:
            yield f"{name} {options}", logits(model)


# -------------------------------------------------------------------------------------------------------------
# types


@pytest.mark.parametrize(
    "name, seed",
    depth(
        [("qwen3_moe", 0), ("gpt_oss", 1)],
        [
            (name, n)
            for name in ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3")
            for n in range(4)
        ],
    ),
)
def test_tensors_of_all_types_at_once(name, seed, tmp_path):
    """Parts of one expert, too: the same model however it is opened."""
    folder, rng = tiny.save(name, tmp_path / "m", torch.bfloat16), random.Random(seed)
    kinds, tensors = FLOATS[:4] if seed % 2 else FLOATS, load_file(folder / "model.safetensors")
    kind = {key: rng.choice(kinds) for key in {re.sub(r"experts.\d+", "", key) for key in tensors}}
    rewrite(
        folder, {key: t.to(kind[re.sub(r"experts.\d+", "", key)]) for key, t in tensors.items()}
    )
    truth = logits(theirs(folder))
    for how, found in every_way(folder, tmp_path):
        assert torch.equal(found, truth), how


# ------------------------------------------------------------------------------------------------------
# quantisation


def fp8(
    folder: Path, how: str, scale_of=lambda R, n: torch.full((1, 1), 0.01), seed: int = 0, **said
) -> Path:
    """A checkpoint whose linear layers are FP8 (`how` "half": every other one), with scales of a
    shape."""
    tiny.save("qwen3_moe", folder, torch.bfloat16, seed)
    tensors = {}
    for key, w in sorted(load_file(folder / "model.safetensors").items()):
        tensors[key] = w
        if key.endswith("_proj.weight") and not (
            how == "half" and key.partition(".mlp")[0][-1:] == "1"
        ):
            codes = torch.float8_e5m2 if how == "e5m2" else torch.float8_e4m3fn
            tensors |= {key: (w.float() * 100).to(codes), f"{key}_scale_inv": scale_of(*w.shape)}
            if how == "static":
                tensors[f"{key.removesuffix('weight')}activation_scale"] = torch.tensor(0.5)
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "static" if how == "static" else "dynamic",
    } | said
    return rewrite(folder, tensors, quantization_config=settings)


@pytest.mark.parametrize(
    "how, scale_of, said",
    [
        ("one a tensor", lambda R, n: torch.tensor(0.01), {"weight_block_size": None}),
        ("static", lambda R, n: torch.tensor(0.01), {"weight_block_size": None}),
        ("one a channel", lambda R, n: torch.rand(R, 1) * 0.02, {"weight_block_size": None}),
        (
            "blocks",
            lambda R, n: torch.rand(-(-R // 8), -(-n // 8)) * 0.02,
            {"weight_block_size": [8, 8]},
        ),
        (
            "half",
            lambda R, n: torch.full((1, 1), 0.01, dtype=torch.bfloat16),
            {"weight_block_size": [128, 128]},
        ),
        ("e5m2", lambda R, n: torch.full((1, 1), 0.01), {}),
    ],
)
def test_fp8_of_every_kind_that_transformers_reads(how, scale_of, said, tmp_path):
    """sgl-project/sglang pull request 23841."""
    pytest.importorskip("accelerate")  # which transformers wants
    folder = fp8(tmp_path / "m", how, scale_of, **said)
    truth = logits(theirs(folder, dtype=torch.bfloat16))
    assert torch.equal(logits(open_model(folder)), truth)
    for way, found in every_way(folder, tmp_path) if depth(how == "blocks", True) else ():
        assert torch.equal(found, truth), way


KEY = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    "change, named",
    [
        ({f"{KEY}_scale_inv": None}, "experts.5.up_proj"),
        ({KEY: torch.ones(24, 32, dtype=torch.bfloat16)}, KEY),
        ({f"{KEY}_scale_inv": torch.ones(2, 2)}, KEY),
        ({KEY: None}, "experts.5.up_proj"),
        ({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "model.norm.weight"),
    ],
)
def test_fp8_without_its_scales_is_refused_by_name(change, named, tmp_path):
    folder = fp8(tmp_path / "m", "all")
    tensors = load_file(folder / "model.safetensors") | change
    rewrite(folder, {key: t for key, t in tensors.items() if t is not None})
    for attempt in (open_model, lambda folder: convert(folder, tmp_path / "s")):
        with pytest.raises(ValueError, match=named):
            attempt(folder)


LEFT = [
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "gptq", "bits": 3},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"bits": 4, "group_size": 64},
]


@pytest.mark.parametrize("left", LEFT, ids=str)
def test_a_quantisation_that_only_the_config_has_does_not_count(left, tmp_path):
    """Cast to bf16, and config.json still says fp8: huggingface/transformers issue 35471."""
    folder = tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
    truth = logits(theirs(folder))
    rewrite(folder, load_file(folder / "model.safetensors"), quantization_config=left)
    model = open_model(folder)
    assert model.spec.dtype == "bfloat16" and torch.equal(logits(model), truth)
    for way, found in every_way(folder, tmp_path) if left is LEFT[0] else ():
        assert torch.equal(found, truth), way


def nvfp4(key: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
    R, n = w.shape
    return {
        key: torch.zeros(R, n // 2, dtype=torch.uint8),
        f"{key}_scale_2": torch.tensor(0.1),
        f"{key}_scale": torch.ones(R, n // 16).to(torch.float8_e4m3fn),
    }


def mlx(key: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
    R, n = w.shape
    layer = key.removesuffix("weight")
    return {
        key: torch.zeros(R, n // 8, dtype=torch.uint32),
        f"{layer}scales": torch.ones(R, 1, dtype=torch.bfloat16),
        f"{layer}biases": torch.ones(R, 1, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    "words, made, said",
    [
        ("modelopt NVFP4", nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        ("MLX", mlx, {"group_size": 64, "bits": 4}),
        ("MLX", mlx, {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}),
        ("bitsandbytes", mlx, {"load_in_4bit": True}),
        ("exl3", mlx, {"quant_method": "exl3"}),
    ],
)
def test_a_format_that_is_not_read_is_named(words, made, said, tmp_path):
    """NVIDIA-NeMo/RL pull request 3615, vllm-project/vllm issue 13283."""
    folder = tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
    tensors = {}
    for key, w in load_file(folder / "model.safetensors").items():
        tensors |= made(key, w) if ".experts." in key else {key: w}
    if "quantization" not in said:
        said = {"quantization_config": said}
    rewrite(folder, tensors, **said)
    for attempt in (open_model, find_model, lambda folder: convert(folder, tmp_path / "s")):
        with pytest.raises(ValueError, match=f"quantised with {words}.*unquantised checkpoint"):
            attempt(folder)


def test_weights_of_other_formats_are_named(tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    named = "pytorch_model.bin are weights in a format that is not read.*safetensors"
    for config in (True, False):
        if not config:
            (folder / "config.json").unlink()
        with pytest.raises(FileNotFoundError, match=named):
            open_model(folder)
    with pytest.raises(FileNotFoundError, match="no checkpoint folder at"):
        open_model(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").rename(folder / "m.gguf")
    for source in (folder, folder / "m.gguf"):
        with pytest.raises(ValueError, match="m.gguf: it cannot be read as GGUF"):
            open_model(source)


@pytest.mark.parametrize(
    "name, kind",
    [("llama4_text", "gptq"), ("qwen3_vl_moe", "pack")],
)
def test_experts_that_are_stacked_in_bf16_and_quantised_one_by_one(name, kind, tmp_path):
    """Llama 4 in int4, and Qwen3.5 in GPTQ: kvcache-ai/ktransformers issue 1928."""
    sizes = dict(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64, intermediate_size_mlp=64
    )
    if name == "qwen3_vl_moe":
        sizes = {"text_config": sizes, "vision_config": {"out_hidden_size": 64}}
    plain = tiny.save(name, tmp_path / "plain", torch.bfloat16, **sizes)
    folder, generator = (
        Path(shutil.copytree(plain, tmp_path / "m")),
        torch.Generator().manual_seed(0),
    )
    tensors, truth = {}, {}
    for key, stack in load_file(plain / "model.safetensors").items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = truth[key] = stack
            continue
        module, _, matrix = key.rpartition(".")
        names, made = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",), []
        turned = name == "llama4_text"
        for e, expert in enumerate(stack.mT if turned else stack):
            rows = []
            for part, w in zip(names, expert.chunk(len(names)), strict=True):
                found, means = packed.layer(kind, *w.shape, 32, generator, scales=torch.float16)
                tensors |= {f"{module}.{e}.{part}.{tensor}": t for tensor, t in found.items()}
                rows.append(means)
            made.append(torch.cat(rows))
        truth[key] = (torch.stack(made).mT if turned else torch.stack(made)).contiguous()
    rewrite(plain, truth)
    rewrite(folder, tensors, quantization_config=packed.config(kind, 32))
    expected = logits(theirs(plain))
    for way, found in every_way(folder, tmp_path):
        assert torch.equal(found, expected), way


# -----------------------------------------------------------------------------------------------------------
# clutter

APPLE = b"\0\5\x16\7\0\2\0\0Mac OS X        " + b"\0" * 4000


def test_what_systems_and_tools_leave_beside_is_not_read(tmp_path):
    """macOS writes ._NAME beside each file of a foreign disk: SceneWorks/SceneWorks issue 1333."""
    folder = tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
    truth = logits(theirs(folder))
    store = convert(folder, tmp_path / "s").folder
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")
    for place in (folder, store):
        for name in [
            *(f"._{path.name}" for path in place.iterdir()),
            ".DS_Store",
            ".model.safetensors.swp",
            ".hidden.safetensors",
            "model.safetensors.part",
            "model.safetensors.incomplete",
        ]:
            (place / name).write_bytes(APPLE)
        (place / ".gone.safetensors").symlink_to("nowhere")
        (place / "original").mkdir()
        (place / "original" / "consolidated.safetensors").write_bytes(APPLE)
        for options in ({}, {"memory": "50%"}):
            with open_model(place, **options) as model:
                assert torch.equal(logits(model), truth)
        again = convert(place, tmp_path / f"again-{place.name}")
        assert not list(again.folder.glob(".*")) and torch.equal(
            logits(open_model(again.folder)), truth
        )


def test_the_files_that_are_meant_are_those_that_transformers_reads(tmp_path):
    """Mistral's own consolidated.safetensors beside the shards; an old index beside a new
    model.safetensors."""
    folder = tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
    other = load_file(
        tiny.save("qwen3_moe", tmp_path / "n", torch.bfloat16, seed=1) / "model.safetensors"
    )
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    truth = logits(theirs(folder))
    assert torch.equal(logits(open_model(folder)), truth)
    where = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(other)}
    for name in set(where.values()):
        save_file(
            {key: other[key] for key in other if where[key] == name},
            folder / name,
            {"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    assert torch.equal(logits(theirs(folder)), truth) and torch.equal(
        logits(open_model(folder)), truth
    )
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits(theirs(folder)), logits(open_model(folder)))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ValueError, match="twice, in consolidated.safetensors and in model-00001.*remove"
    ):
        open_model(folder)


# --------------------------------------------------------------------------------------------------------
# tokenizers

CLASS = json.dumps(
    {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
)
TOKENIZERS = {
    "code of its own": (
        {
            "tokenizer_config.json": CLASS,
            "tiktoken.model": "IQ== 0\n",
            "own.py": "raise SystemExit",
        },
        "tokenizer cannot be read",
    ),
    "damaged": ({"tokenizer.json": "{}"}, "tokenizer cannot be read"),
    "cut off": ({"tokenizer.json": '{"model": 3'}, "tokenizer cannot be read"),
    "settings alone": ({"tokenizer_config.json": "{}"}, "no vocabulary"),
    "tiktoken": ({"tiktoken.model": "IQ== 0\n"}, "tokenizer cannot be read"),
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_model_whose_tokenizer_cannot_be_read_opens_without_it(what, tmp_path):
    """NVIDIA-NeMo/RL pull request 3116. Nothing is installed or run for it, and prompts are refused
    with the reason."""
    folder, (files, words) = tiny.save("qwen3_moe", tmp_path / "m"), TOKENIZERS[what]
    for name, content in files.items():
        (folder / name).write_text(content)
    truth = logits(theirs(folder))
    for options in ({}, {"memory": "50%"}):
        with pytest.warns(UserWarning, match=f"without a tokenizer.*{words}"):
            model = open_model(folder, **options)
        with model:
            assert model.tokenizer is None and torch.equal(logits(model), truth)
    with pytest.raises(ValueError, match=words):
        require_tokenizer(folder)
