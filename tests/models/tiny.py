"""Small random models of many architectures, for tests: `config(name)` and `save(name, folder)`."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from moelab.models import compat, deepseek

COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
          "pad_token_id": 0, "tie_word_embeddings": False}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
       "num_key_value_heads": 4}

#: architecture → what differs from COMMON
ARCHITECTURES: dict[str, dict] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "intermediate_size": 48,
                  "head_dim": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 48,
                  "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "deepseek_v2": {**MLA, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 4,
                    "topk_group": 2, "topk_method": "group_limited_greedy", "moe_intermediate_size": 24,
                    "intermediate_size": 48, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    "deepseek_v3": {**MLA, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4,
                    "topk_group": 2, "moe_intermediate_size": 24, "intermediate_size": 48,
                    "first_k_dense_replace": 1},
    "glm4_moe_lite": {**MLA, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 1,
                      "topk_group": 1, "moe_intermediate_size": 24, "intermediate_size": 48,
                      "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 8},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 8,
                    "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1, "attention_chunk_size": 64},
    "switch_transformers": {"num_experts": 4, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 4,
                            "num_decoder_layers": 4, "num_heads": 4, "num_sparse_encoder_layers": 2,
                            "num_sparse_decoder_layers": 2, "expert_capacity": 5, "decoder_start_token_id": 0,
                            "vocab_size": 96, "router_dtype": "float32"},
    "deepseek": {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 24,
                 "intermediate_size": 48, "first_k_dense_replace": 1},
}


def config(name: str, **changes: object) -> transformers.PretrainedConfig:
    """A small config of one architecture."""
    deepseek.register()
    common = {} if name == "switch_transformers" else COMMON
    return transformers.AutoConfig.for_model(name, **{**common, **ARCHITECTURES[name], **changes})


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> Path:
    """A random checkpoint of one architecture, written by transformers in the layout of its hub checkpoints.

    Routers are scaled up so that routing is decided, not a coin toss between near-equal logits.
    """
    torch.manual_seed(seed)
    cfg = config(name, **changes)
    model = compat.model_class(cfg)._from_config(cfg, dtype=dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5 if "router" in parameter_name or ".gate." in parameter_name else 0.15)
            elif "bias" in parameter_name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def save_uneven(folder: Path, name: str = "qwen3_moe", seed: int = 0, **changes: object) -> Path:
    """A random bf16 checkpoint of which expert e of every layer has e + 1 different exponents: the first ones compress
    to almost nothing, the last ones hardly."""
    from safetensors.torch import load_file, save_file
    save(name, folder, torch.bfloat16, seed, **changes)
    file, generator = next(folder.glob("*.safetensors")), torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for key, tensor in tensors.items():
        if ".experts." in key:
            expert = int(key.partition(".experts.")[2].partition(".")[0])
            exponents = torch.randint(0, expert + 1, tensor.shape, generator=generator)
            tensors[key] = (torch.rand(tensor.shape, generator=generator) - 0.5).sign() * (
                1 + torch.rand(tensor.shape, generator=generator)) * 2.0 ** (-5 - exponents)
            tensors[key] = tensors[key].bfloat16()
    save_file(tensors, file, {"format": "pt"})
    return folder


def save_mxfp4(folder: Path, seed: int = 0) -> Path:
    """A random GPT-OSS checkpoint whose experts are MXFP4 blocks and scales, as OpenAI published them."""
    import json

    from safetensors.torch import load_file, save_file
    save("gpt_oss", folder, torch.bfloat16, seed, intermediate_size=32)
    file = next(folder.glob("*.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, tensor in load_file(file).items():
        if key.endswith(("gate_up_proj", "down_proj")):
            E, inputs, outputs = tensor.shape                      # blocks run along the inputs, 32 to a scale
            tensors[key + "_blocks"] = torch.randint(0, 256, (E, outputs, inputs // 32, 16), dtype=torch.uint8,
                                                     generator=generator)
            tensors[key + "_scales"] = torch.randint(122, 126, (E, outputs, inputs // 32), dtype=torch.uint8,
                                                     generator=generator)
        else:
            tensors[key] = tensor
    save_file(tensors, file, {"format": "pt"})
    cfg = json.loads((folder / "config.json").read_text())
    cfg["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(cfg))
    return folder
