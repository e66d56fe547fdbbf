"""Small random models of every architecture, for tests: `config(name)` and `save(name, folder)`.

One recipe, `SMALL`, gives any config of transformers small sizes by the names of its fields, those
of a multimodal model's parts as well; `DIFFERENT` holds the few architectures that need, or should
also be tried with, something else."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from moelab.models import (
    compat,
    deepseek,  # noqa: F401  (makes transformers know it)
)
from tests.depth import depth

#: field → small value; fields that a config does not have are left out
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(
        (
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_k",
            "moe_top_k",
            "top_k_experts",
        ),
        2,
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(
        (
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "shared_experts_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        40,
    ),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "ffn_hidden_size"), 48),
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 1,
    "topk_group": 1,
    "zero_expert_num": 4,
    # latent and indexed attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "o_lora_rank": 8,
    "o_groups": 2,
    "attention_chunk_size": 64,
    "rotary_dim": 8,
    # linear attention and state spaces
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    # encoder and decoder, and towers
    **dict.fromkeys(
        (
            "num_layers",
            "num_decoder_layers",
            "n_layers",
            "encoder_layers",
            "decoder_layers",
            "depth",
        ),
        4,
    ),
    **dict.fromkeys(
        ("num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
    ),
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 24,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "out_hidden_size": 32,
}
#: what every decoder's config has
COMMON = {
    key: SMALL[key]
    for key in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
    )
}
#: architecture → what differs from `SMALL`; of the parts of a multimodal model by their own names
DIFFERENT: dict[str, dict[str, Any]] = {
    # as other tests like them
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "sliding_window": None,
    },
    "qwen2_moe": {
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "mlp_only_layers": [],
        "sliding_window": 0,
    },
    "olmoe": {"num_hidden_layers": 3},
    # of rope_theta, transformers' class of attention has no default, and does not use what it is
    "dbrx": {
        "attn_config": {"rope_theta": 5e5, "clip_qkv": 8, "kv_n_heads": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "mixtral": {
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "sliding_window": None,
        "head_dim": None,
    },
    "phimoe": {"num_hidden_layers": 3, "num_local_experts": 4, "sliding_window": None},
    "deepseek_v2": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "intermediate_size": 48,
    },
    "glm4_moe_lite": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "gpt_oss": {"num_hidden_layers": 3, "num_local_experts": 4, "sliding_window": 128},
    "llama4_text": {
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 1,
    },
    "switch_transformers": {
        "num_experts": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "expert_capacity": 5,
        "decoder_start_token_id": 0,
        "router_dtype": "float32",
    },
    "deepseek": {
        "num_hidden_layers": 3,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "intermediate_size": 48,
    },
    # what `SMALL` alone does not build or run, or builds large or without experts
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v32",
            "glm_moe_dsa",
            "dots3_note_text",
            "mistral4",
            "mistral_large4_text",
        ),
        {"num_key_value_heads": 4},
    ),
    "longcat_flash": {"num_layers": 2, "num_key_value_heads": 4},
    **dict.fromkeys(
        ("bailing_hybrid", "kimi_linear"),
        {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4},
    ),
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 8,
    },
    "diffusion_gemma_text": {"global_head_dim": 8},
    "glm5_next_text": {"num_key_value_heads": 4, "index_kpool": 4, "qk_rope_head_dim": 0},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 95},
    "glm4v_moe_text": {"head_dim": 128},
    "inkling2_vision": {"text_hidden_size": 32},
}

#: a dozen that differ most, for tests of what is built upon the seam; `every` names all
ARCHITECTURES = tuple(list(DIFFERENT)[:12])
#: those of them that `make test` tries: plain; shared experts and groups; biases; weights before the
#: experts; an encoder
SOME = depth(
    ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "switch_transformers"), ARCHITECTURES
)


@cache
def every() -> tuple[str, ...]:
    """The model types of all causal language models, encoder-decoders and image-text models of this
    transformers whose code has routed experts: those whose modeling file defines a class with
    "Expert" in its name."""
    maps = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    found = {}
    for name in (name for names in maps for name in names):
        module = transformers.models.auto.configuration_auto.model_type_to_module_name(name)
        folder = Path(transformers.models.__path__[0], module)
        code = "".join(file.read_text() for file in folder.glob("modeling_*.py"))
        if re.search(r"^class \w*Expert", code, re.M):
            found[name] = None
    return (*found, "deepseek")


def config(name: str, **changes: Any) -> transformers.PretrainedConfig:
    """A small config of one architecture."""
    return _small(
        type(transformers.AutoConfig.for_model(name)), {**DIFFERENT.get(name, {}), **changes}
    )


def _small(cls: type, changes: dict[str, Any]) -> Any:
    """A config of a class with what `SMALL` says of its fields, and so for each of its parts;
    `changes` win."""
    fields = {key: value for key, value in SMALL.items() if key in cls.__dataclass_fields__}
    for part, default in vars(cls()).items():
        if isinstance(default, transformers.PretrainedConfig):
            different = {**DIFFERENT.get(default.model_type, {}), **changes.get(part, {})}
            fields[part] = _small(type(default), different)
    parts = fields.keys() - SMALL.keys()
    return cls(**{**fields, **{key: value for key, value in changes.items() if key not in parts}})


def save(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object
) -> Path:
    """A random checkpoint of one architecture, written by transformers in the layout of its hub
    checkpoints.

    Routers are scaled up so that routing is decided, not a coin toss between near-equal logits.
    """
    torch.manual_seed(seed)
    cfg = config(name, **changes)
    randomise(compat.model_class(cfg)._from_config(cfg, dtype=dtype)).save_pretrained(folder)
    return folder


def randomise(model: Any) -> Any:
    """A model with weights that make a difference, in place."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(
                    0, 0.5 if "router" in parameter_name or ".gate." in parameter_name else 0.15
                )
            elif "bias" in parameter_name:
                parameter.normal_(0, 0.1)
    return model


def save_uneven(folder: Path, name: str = "qwen3_moe", seed: int = 0, **changes: object) -> Path:
    """A random bf16 checkpoint of which expert e of every layer has e + 1 different exponents: the
    first ones compress to almost nothing, the last ones hardly."""
    from safetensors.torch import load_file, save_file

    save(name, folder, torch.bfloat16, seed, **changes)
    file, generator = next(folder.glob("*.safetensors")), torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for key, tensor in tensors.items():
        if ".experts." in key:
            expert = int(key.partition(".experts.")[2].partition(".")[0])
            exponents = torch.randint(0, expert + 1, tensor.shape, generator=generator)
            tensors[key] = (
                (torch.rand(tensor.shape, generator=generator) - 0.5).sign()
                * (1 + torch.rand(tensor.shape, generator=generator))
                * 2.0 ** (-5 - exponents)
            )
            tensors[key] = tensors[key].bfloat16()
    save_file(tensors, file, {"format": "pt"})
    return folder


def save_few(name: str, folder: Path) -> Path:
    """A random checkpoint of bf16 weights, of "mxfp4" or of "fp8"."""
    return (
        {"mxfp4": save_mxfp4, "fp8": save_fp8}[name](folder)
        if name in ("mxfp4", "fp8")
        else save(name, folder, torch.bfloat16)
    )


def save_fp8(
    folder: Path,
    name: str = "qwen3_moe",
    seed: int = 0,
    scales: torch.dtype = torch.float32,
    block: int = 128,
) -> Path:
    """A random checkpoint whose linear layers are e4m3 with a scale for each block, as DeepSeek and
    Qwen publish them: experts of 128 × 256, attention with parts of blocks."""
    import json

    from safetensors.torch import load_file, save_file

    save(name, folder, torch.bfloat16, seed, hidden_size=256, moe_intermediate_size=128)
    file, tensors = next(folder.glob("*.safetensors")), {}
    for key, w in load_file(file).items():
        if not key.endswith("_proj.weight"):
            tensors[key] = w
            continue
        grid = torch.ones(-(-w.shape[0] // block), -(-w.shape[1] // block))
        codes = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                here = slice(block * i, block * i + block), slice(block * j, block * j + block)
                largest = w[here].abs().max().float() / 448
                grid[i, j] = (
                    largest.log2().ceil().exp2()
                    if scales == torch.float8_e8m0fnu
                    else largest.to(scales)
                )
                codes[here] = (w[here].float() / grid[i, j]).clamp(-448, 448).to(codes.dtype)
        tensors |= {key: codes, key + "_scale_inv": grid.to(scales)}
    save_file(tensors, file, {"format": "pt"})
    cfg = json.loads((folder / "config.json").read_text())
    cfg["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [block, block],
    }
    (folder / "config.json").write_text(json.dumps(cfg))
    return folder


def save_mxfp4(folder: Path, seed: int = 0) -> Path:
    """A random GPT-OSS checkpoint whose experts are MXFP4 blocks and scales, as OpenAI published
    them."""
    import json

    from safetensors.torch import load_file, save_file

    save("gpt_oss", folder, torch.bfloat16, seed, intermediate_size=32)
    file = next(folder.glob("*.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, tensor in load_file(file).items():
        if key.endswith(("gate_up_proj", "down_proj")):
            E, inputs, outputs = tensor.shape  # blocks run along the inputs, 32 to a scale
            tensors[key + "_blocks"] = torch.randint(
                0, 256, (E, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator
            )
            tensors[key + "_scales"] = torch.randint(
                122, 126, (E, outputs, inputs // 32), dtype=torch.uint8, generator=generator
            )
        else:
            tensors[key] = tensor
    save_file(tensors, file, {"format": "pt"})
    cfg = json.loads((folder / "config.json").read_text())
    cfg["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (folder / "config.json").write_text(json.dumps(cfg))
    return folder
