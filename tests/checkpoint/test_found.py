"""Checkpoints as people find them: tensors of other types, formats of other tools, clutter,
leftovers, links."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
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
from moelab.files import small_model
from tests.checkpoint import packed
from tests.depth import depth
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
    for how, options in {
        "resident": {},
        "external": {"experts": "external"},
        "offloaded": {"memory": "50%"},
    }.items():
        with open_model(folder, **options) as model:
            yield how, logits(model)
    store = convert(folder, scratch / "store")
    back = restore(store, scratch / "back")
    for how, place, options in (
        ("store", store.folder, {}),
        ("offloaded store", store.folder, {"memory": "50%"}),
        ("restored", back, {}),
    ):
        with open_model(place, **options) as model:
            yield how, logits(model)


# -------------------------------------------------------------------------------------------------------------
# types


@pytest.mark.stress
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_any_tensor_in_any_floating_type_is_what_transformers_makes_of_it(name, tmp_path):
    """A merged fine-tune with its head in fp32: axolotl-ai-cloud/axolotl issue 1510,
    Lightning-AI/litgpt pull request 1246."""
    folder, rng = tiny.save(name, tmp_path / "m", torch.bfloat16), random.Random(name)
    tensors = load_file(folder / "model.safetensors")
    tried = [(key, dtype) for key in tensors for dtype in FLOATS if dtype != tensors[key].dtype]
    for key, dtype in rng.sample(tried, depth(4, len(tried))):
        rewrite(folder, tensors | {key: tensors[key].to(dtype)})
        truth, found = theirs(folder).state_dict(), open_model(folder).state_dict()
        assert truth.keys() == found.keys()
        for parameter, values in truth.items():
            assert values.dtype == found[parameter].dtype and torch.equal(
                values, found[parameter]
            ), (key, dtype)


@pytest.mark.stress
@pytest.mark.parametrize(
    "name, seed",
    depth(
        [("qwen3_moe", 0), ("gpt_oss", 1)],
        [
            (name, seed)
            for name in ("qwen3_moe", "gpt_oss", "mixtral", "switch_transformers", "deepseek_v3")
            for seed in range(6)
        ],
    ),
)
def test_tensors_of_all_types_at_once(name, seed, tmp_path):
    """Experts of one layer and parts of one expert, too: the same model however it is opened."""
    folder, rng = tiny.save(name, tmp_path / "m", torch.bfloat16), random.Random(seed)
    tensors = {
        key: t.to(rng.choice(FLOATS[:4] if seed % 2 else FLOATS))
        for key, t in load_file(folder / "model.safetensors").items()
    }
    rewrite(folder, tensors)
    if name == "switch_transformers":
        truth = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            folder, experts_implementation="eager"
        ).state_dict()
        assert all(
            torch.equal(truth[key], found) for key, found in open_model(folder).state_dict().items()
        )
        return
    truth = logits(theirs(folder))
    for how, found in every_way(folder, tmp_path):
        assert torch.equal(found, truth), how


@pytest.mark.stress
def test_whole_models_in_every_type(tmp_path):
    for dtype in depth([torch.float64], FLOATS[:4]):
        folder = tiny.save("qwen3_moe", tmp_path / str(dtype), dtype)
        truth = logits(theirs(folder))
        for how, found in every_way(folder, folder):
            assert torch.equal(found, truth), (dtype, how)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.uint8, torch.bool, torch.int16, torch.complex64]
)
def test_numbers_of_no_floating_type_are_refused_by_name(dtype, tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for key in ("model.norm.weight", "model.layers.0.mlp.experts.3.up_proj.weight"):
        rewrite(folder, tensors | {key: tensors[key].float().to(dtype)})
        with pytest.raises(ValueError, match=key) as error:
            open_model(folder)
        assert "download" not in str(error.value)


# ------------------------------------------------------------------------------------------------------
# quantisation


def fp8(
    folder: Path, how: str, scale_of=lambda R, n: torch.full((1, 1), 0.01), seed: int = 0, **said
) -> Path:
    """A checkpoint whose linear layers are FP8 (`how` "half": every other one), with scales of a
    shape."""
    tiny.save("qwen3_moe", folder, torch.bfloat16, seed)
    tensors = {}
    for _i, (key, w) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
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


@pytest.mark.stress
@pytest.mark.parametrize(
    "how, scale_of, said",
    [
        ("one a tensor", lambda R, n: torch.tensor(0.01), {"weight_block_size": None}),
        ("one a tensor, in a list", lambda R, n: torch.tensor([0.01]), {"weight_block_size": None}),
        ("one a tensor, blocks by default", lambda R, n: torch.full((1, 1), 0.01), {}),
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
    for way, found in (
        every_way(folder, tmp_path) if depth(how in ("static", "blocks"), True) else ()
    ):
        assert torch.equal(found, truth), way


@pytest.mark.parametrize("key", ["lm_head.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_one_tensor_in_fp32_beside_fp8(key, tmp_path):
    """transformers leaves it so, and then cannot multiply it: it is the model of the rounded
    tensor."""
    folder = fp8(tmp_path / "m", "all")
    tensors = load_file(folder / "model.safetensors")
    truth = {dtype: logits(open_model(folder, dtype=dtype)) for dtype in ("auto", "float32")}
    rewrite(folder, tensors | {key: tensors[key].float()})
    for dtype, options in (("auto", {}), ("auto", {"memory": "50%"}), ("float32", {})):
        with open_model(folder, dtype=dtype, **options) as model:
            assert torch.equal(logits(model), truth[dtype]) and {
                p.dtype for p in model.parameters()
            } == {model.dtype}


KEY = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    "change",
    [
        {f"{KEY}_scale_inv": None},
        {KEY: torch.ones(24, 32, dtype=torch.bfloat16)},
        {f"{KEY}_scale_inv": torch.ones(2, 2)},
        {f"{KEY}_scale_inv": torch.ones(0, 1)},
        {f"{KEY}_scale_inv": torch.ones(3)},
        {KEY: torch.ones(24, 32, dtype=torch.int32)},
        {KEY: None},
        {f"{KEY}_scale_inv": None, f"{KEY}_scale": torch.tensor(0.1)},
        {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)},
        {
            "lm_head.weight": torch.ones(96, 32).to(torch.float8_e4m3fn),
            "lm_head.weight_scale": torch.tensor(0.1),
        },
    ],
)
def test_fp8_without_its_scales_is_refused_by_name(change, tmp_path):
    folder = fp8(tmp_path / "m", "all")
    tensors = load_file(folder / "model.safetensors") | change
    rewrite(folder, {key: t for key, t in tensors.items() if t is not None})
    for attempt in (
        open_model,
        lambda folder: open_model(folder, memory="50%"),
        lambda folder: convert(folder, tmp_path / "s"),
    ):
        with pytest.raises(
            ValueError, match=next(iter(change)).removesuffix("_scale_inv")
        ) as error:
            attempt(folder)
        assert "again" not in str(error.value)


LEFT = [
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "mxfp4"},
    {"quant_method": "gptq", "bits": 3},
    {"quant_method": "awq", "bits": 4, "version": "gemm"},
    {"quant_method": "compressed-tensors", "config_groups": {}, "format": "nvfp4-pack-quantized"},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"load_in_8bit": True},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"bits": 4, "group_size": 64},
    {"quant_method": "exl3", "bits": 3.0},
    {"quant_method": "hqq"},
    {},
]


@pytest.mark.parametrize("left", LEFT, ids=str)
def test_a_quantisation_that_only_the_config_has_does_not_count(left, tmp_path):
    """Cast to bf16, and config.json still says fp8: huggingface/transformers issue 35471."""
    folder = tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
    truth = logits(theirs(folder))
    rewrite(folder, load_file(folder / "model.safetensors"), quantization_config=left)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = open_model(folder)
    assert model.spec.dtype == "bfloat16" and torch.equal(logits(model), truth)
    assert not left or any("weights are plain" in str(of.message) for of in said)
    for way, found in every_way(folder, tmp_path) if left in LEFT[:6:3] else ():
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


def codes(key: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(w.numel() // 2, 1, dtype=torch.uint8), f"{key}.absmax": torch.ones(4)}


@pytest.mark.parametrize(
    "words, made, said",
    [
        ("modelopt NVFP4", nvfp4, None),
        ("modelopt NVFP4", nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        (
            "compressed-tensors, in the layout 'nvfp4-pack-quantized'",
            nvfp4,
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
                    }
                },
            },
        ),
        ("MLX", mlx, {"group_size": 64, "bits": 4}),
        ("MLX", mlx, {"quantization": {"group_size": 64, "bits": 4}}),
        ("MLX", mlx, {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}),
        ("bitsandbytes", codes, {"load_in_4bit": True}),
        ("bitsandbytes", codes, {"quant_method": "bitsandbytes"}),
        *(
            (method, codes, {"quant_method": method})
            for method in ("exl2", "exl3", "hqq", "aqlm", "quanto", "mxfp8")
        ),
    ],
)
def test_a_format_that_is_not_read_is_named(words, made, said, tmp_path):
    """NVIDIA-NeMo/RL pull request 3615, FlashML-org/FreeToken pull request 462, vllm-project/vllm
    issue 13283."""
    folder = tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
    tensors = {}
    for key, w in load_file(folder / "model.safetensors").items():
        tensors |= made(key, w) if ".experts." in key else {key: w}
    said = said or {}
    rewrite(folder, tensors, **said if "quantization" in said else {"quantization_config": said})
    if not said:
        (folder / "hf_quant_config.json").write_text(
            json.dumps(
                {
                    "producer": {"name": "modelopt"},
                    "quantization": {"quant_algo": "NVFP4", "group_size": 16},
                }
            )
        )
    for attempt in (
        open_model,
        lambda folder: open_model(folder, memory="50%"),
        find_model,
        lambda folder: convert(folder, tmp_path / "s"),
    ):
        with pytest.raises(
            ValueError, match=f"quantised with {words}.*unquantised checkpoint"
        ) as error:
            attempt(folder)
        assert "again" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model-Q4_K_M.gguf", "model.pt"]
)
def test_weights_of_other_formats_are_named(name, tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    for config in (True, False):
        if not config:
            (folder / "config.json").unlink()
        with pytest.raises(
            FileNotFoundError, match=f"{name} are weights in a format that is not read.*safetensors"
        ):
            open_model(folder)
    with pytest.raises(
        ValueError, match=f"{name} is a file; give the folder of a safetensors checkpoint"
    ):
        open_model(folder / name)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("llama4_text", "pack"),
        ("llama4_text", "gptq"),
        ("qwen3_vl_moe", "pack"),
        ("qwen3_5_moe_text", "gptq"),
    ],
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


def test_more_shards_than_files_may_be_open(tmp_path):
    """macOS allows 256: JustVugg/colibri pull request 147."""
    resource = pytest.importorskip("resource")
    folder = tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16, num_hidden_layers=8)
    truth, tensors = logits(theirs(folder)), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {
        key: f"model-{i:05d}-of-{len(tensors):05d}.safetensors" for i, key in enumerate(tensors)
    }
    for key, name in where.items():
        save_file({key: tensors[key]}, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    before, may = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 100, may))
    try:
        found = dict(every_way(folder, tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, may))
    assert len(where) > 200 and all(torch.equal(logits, truth) for logits in found.values())


@pytest.mark.parametrize("E, K", [(5, 2), (3, 3), (1, 1)])
def test_pruned_models(E, K, tmp_path):
    """vllm-project/llm-compressor pull request 2864, egesabanci/reap-mlx issue 48."""
    folder = tiny.save("qwen3_moe", tmp_path / "m", num_experts=E, num_experts_per_tok=K)
    truth = logits(theirs(folder))
    for options in ({}, {"memory": "50%"}):
        with open_model(folder, **options) as model:
            assert torch.equal(logits(model), truth)
    tensors = load_file(folder / "model.safetensors")
    gone = {key: t for key, t in tensors.items() if f"layers.2.mlp.experts.{E - 1}." not in key}
    rewrite(
        folder, gone | {(key := "model.layers.2.mlp.gate.weight"): tensors[key][:-1].contiguous()}
    )
    with pytest.raises(ValueError, match=r"layers\.2"):
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
        "auto_map.*never run here; put a tokenizer.json",
    ),
    "damaged": ({"tokenizer.json": "{}"}, "tokenizer cannot be read"),
    "cut off": ({"tokenizer.json": '{"model": 3'}, "tokenizer cannot be read"),
    "settings alone": ({"tokenizer_config.json": "{}"}, "no vocabulary"),
    "tiktoken": ({"tiktoken.model": "IQ== 0\n"}, "install tiktoken"),
    "sentencepiece": ({"tokenizer.model": "x"}, "install sentencepiece"),
    "tekken": ({"tekken.json": "{}"}, "install mistral_common"),
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_model_whose_tokenizer_cannot_be_read_opens_without_it(what, tmp_path, monkeypatch):
    """NVIDIA-NeMo/RL pull request 3116. Nothing is installed or run for it, and prompts are refused
    with the reason."""
    monkeypatch.setattr(
        "moelab.checkpoint.opening.find_spec", lambda name: None
    )  # whatever is installed here
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


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda file: file.symlink_to("nowhere")])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_a_tokenizer_that_is_no_file(name, make, tmp_path):
    folder = Path(shutil.copytree(small_model(), tmp_path / "m"))
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.warns(UserWarning, match=f"without a tokenizer.*{name} is no regular file"):
        assert open_model(folder, experts="external").tokenizer is None


@pytest.mark.parametrize("said", [5, "x", [], ["a"], True])
def test_quantisation_in_a_file_of_its_own_is_an_object(said, tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "m")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    with pytest.raises(ValueError, match="hf_quant_config.json says quantization = .*no object"):
        open_model(folder)


@pytest.mark.skipif(
    not Path("/proc/self/mem").exists(), reason="a file that cannot be mapped is needed"
)
def test_weights_that_are_a_file_of_the_system(tmp_path):
    file = tiny.save("qwen3_moe", tmp_path / "m") / "model.safetensors"
    file.unlink()
    file.symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match="model.safetensors is no whole safetensors file"):
        open_model(file.parent)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("quantization_config", [], "quantization_config = '\\[\\]', which is no object"),
        (
            "quantization_config",
            {"quant_method": "fp8", "weight_block_size": "x"},
            "weight_block_size = 'x'.*two whole numbers",
        ),
        (
            "quantization_config",
            {"quant_method": "fp8", "weight_block_size": [128, 0]},
            "weight_block_size = .*two whole numbers",
        ),
        ("hidden_act", "nope", "'nope' is not known as hidden_act"),
        ("hidden_act", 7, "'hidden_act' expected str"),
        ("rope_scaling", 7, "rope_scaling = '7', which is no object"),
        ("rope_parameters", {"rope_type": "none"}, "'none' is not known as rope_type"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(field, value, words, tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "m")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {field: value}))
    with pytest.raises(ValueError, match=words) as error:
        open_model(folder)
    assert "\n" not in str(error.value) and "config.json" in str(error.value)


def test_own_code_beside_a_tokenizer_that_needs_none(tmp_path):
    folder = Path(shutil.copytree(small_model(), tmp_path / "m"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["own.X", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text("raise SystemExit")
    assert (
        open_model(folder).tokenizer("a b")["input_ids"]
        == open_model().tokenizer("a b")["input_ids"]
    )
