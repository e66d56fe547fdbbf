"""Small GGUF files for tests, written by gguf-py as llama.cpp's converter lays them: independent of
how moelab reads and writes them.

`write(name, folder)` saves a random transformers model whose weights are what the file holds,
decoded, and the file beside it."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

from moelab.models import compat
from tests.models import tiny

#: model type → (llama.cpp's name, what differs from small configs)
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", {}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3_moe": ("qwen3moe", {"mlp_only_layers": []}),
    "qwen3_next": ("qwen3next", {}),
    "qwen3_5_moe_text": ("qwen35moe", {}),
    "olmoe": ("olmoe", {}),
    "phimoe": ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    "granitemoe": ("granitemoe", {"embedding_multiplier": 3.0, "residual_multiplier": 0.37}),
    "granitemoeshared": ("granitemoe", {"shared_intermediate_size": 64}),
    "gpt_oss": ("gpt-oss", {"sliding_window": 8}),
    "deepseek_v2": ("deepseek2", {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek2", {"q_lora_rank": None, "n_group": 2, "topk_group": 1}),
    "glm4_moe": ("glm4moe", {"use_qk_norm": True, "attention_bias": True}),
    "ernie4_5_moe": ("ernie4_5-moe", {}),
    "hunyuan_v1_moe": ("hunyuan-moe", {}),
    "lfm2_moe": ("lfm2moe", {"tie_word_embeddings": True}),
    "minimax_m2": ("minimax-m2", {"rotary_dim": 4}),
    "dots1": ("dots1", {"sliding_window": None, "norm_topk_prob": True}),
}
SIZES = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 32)
#: types of matrices, which take turns
KINDS = ("Q8_0", "F16", "Q4_0", "BF16", "F32")
PLAIN = ("F16", "BF16", "F32")


def write(
    name: str,
    folder: Path,
    experts: str = "stacked",
    kinds: tuple[str, ...] = KINDS,
    **sizes: int,
) -> Path:
    """Save a model to a folder, and what llama.cpp makes of it to folder.gguf; returns the file.

    experts : "stacked"; "apart", each in tensors of its own; "together", gate above up.
    sizes : fields of the config that differ."""
    arch, changes = NAMES[name]
    config = tiny.config(name, **{**SIZES, **changes, **sizes})
    torch.manual_seed(0)
    model = tiny.randomise(compat.model_class(config)._from_config(config, dtype=torch.float32))
    with torch.no_grad():
        for key, norm in model.named_parameters():
            if "norm" in key or "sinks" in key:
                norm.add_(torch.randn_like(norm) * 0.2)
        for key, bias in model.named_buffers():
            if "bias" in key:
                bias.normal_(0, 0.2)
    model.save_pretrained(folder)
    saved = next(folder.glob("*.safetensors"))
    tensors, turn, rows = load_file(saved), cycle(kinds), {}
    of_stack = defaultdict(lambda: next(turn))
    for key, values in tensors.items():
        plain = values.dim() == 1 or re.search(r"norm|router|\.gate\.|A_log|bias|conv", key)
        kind = "F32" if plain else of_stack[re.sub(r"(experts)\.\d+", r"\1", key)]
        turned = re.search(r"experts\.(gate_up|down)_proj$", key)  # inputs are the first axis
        values = values.mT.contiguous() if turned else values
        whole = not re.search("kv_b_proj|out_proj", key)
        if kind not in PLAIN and (
            not whole or values.shape[-1] % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
        ):
            kind = "BF16"
        found = blocks(values.numpy(), GGMLQuantizationType[kind])
        back = torch.from_numpy(quants.dequantize(found, GGMLQuantizationType[kind]).copy())
        rows[key] = (kind, back.numpy() if kind in PLAIN else found)
        tensors[key] = back.mT.contiguous() if turned else back
    save_file(tensors, saved, {"format": "pt"})
    file = folder.with_suffix(".gguf")
    writer = gguf.GGUFWriter(file, arch)
    for key, value in metadata(config).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add = {**add, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"{arch}.{key}", value)
    for key, (kind, array) in laid(arch, config, rows, experts).items():
        if array.dtype != np.uint8:
            array = quants.quantize(array.astype(np.float32), GGMLQuantizationType[kind])
        writer.add_tensor(key, np.ascontiguousarray(array), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def blocks(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows of a type; of one that gguf-py only decodes, of random codes and scales of 2 ** -11 or so."""
    try:
        return quants.quantize(values, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block * size)
        return np.random.default_rng(values.size).integers(0, 17, shape, dtype=np.uint8)


def metadata(c: Any) -> dict[str, Any]:
    """What llama.cpp's converter says of a config."""
    get = lambda *names: next((v for n in names if (v := getattr(c, n, None)) is not None), None)  # noqa: E731
    size = get("head_dim") or c.hidden_size // c.num_attention_heads
    said = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": get("intermediate_size"),
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps", "norm_eps"),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
        "rope.dimension_count": int(size * c.rope_parameters.get("partial_rotary_factor", 1)),
        "expert_count": get(
            "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"
        ),
        "expert_used_count": get("num_experts_per_tok", "moe_topk", "moe_k"),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "expert_shared_count": get("n_shared_experts", "moe_num_shared_experts"),
        "expert_shared_feed_forward_length": get(
            "shared_expert_intermediate_size", "shared_intermediate_size"
        ),
        "expert_weights_scale": get("routed_scaling_factor"),
        "expert_weights_norm": get("norm_topk_prob"),
        "expert_group_count": get("n_group"),
        "expert_group_used_count": get("topk_group"),
        "interleave_moe_layer_step": get("moe_layer_interval"),
        "attention.sliding_window": get("sliding_window"),
        "attention.scale": get("attention_multiplier"),
        "embedding_scale": get("embedding_multiplier"),
        "residual_scale": get("residual_multiplier"),
        "logit_scale": get("logits_scaling"),
    }
    if c.rope_parameters["rope_type"] == "yarn":
        said["rope.scaling.type"] = "yarn"
        said["rope.scaling.factor"] = c.rope_parameters["factor"]
        original = c.rope_parameters["original_max_position_embeddings"]
        said["rope.scaling.original_context_length"] = original
    if get("kv_lora_rank"):
        rotary = c.qk_rope_head_dim
        said |= {
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": c.kv_lora_rank,
            "attention.q_lora_rank": c.q_lora_rank,
            "attention.key_length": c.kv_lora_rank + rotary,
            "attention.value_length": c.kv_lora_rank,
            "attention.key_length_mla": c.qk_nope_head_dim + rotary,
            "attention.value_length_mla": c.v_head_dim,
            "rope.dimension_count": rotary,
        }
    if c.model_type == "lfm2_moe":
        heads = [c.num_key_value_heads * (of == "full_attention") for of in c.layer_types]
        said |= {"attention.head_count_kv": heads, "shortconv.l_cache": c.conv_L_cache}
    if get("linear_num_value_heads"):
        said |= {
            "ssm.conv_kernel": c.linear_conv_kernel_dim,
            "ssm.state_size": c.linear_key_head_dim,
            "ssm.group_count": c.linear_num_key_heads,
            "ssm.time_step_rank": c.linear_num_value_heads,
            "ssm.inner_size": c.linear_value_head_dim * c.linear_num_value_heads,
            "rope.dimension_sections": [11, 11, 10, 0],
        }
    return {key: value for key, value in said.items() if value is not None}


def laid(
    arch: str, c: Any, tensors: dict[str, tuple[str, np.ndarray]], experts: str
) -> dict[str, tuple[str, np.ndarray]]:
    """The file's tensors by name, of a checkpoint's: (type, values, or rows of blocks)."""
    number = {name: of for of, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    found: dict[str, tuple[str, np.ndarray]] = {}
    stacks: dict[str, list[tuple[str, np.ndarray]]] = {}
    for key, (kind, w) in sorted(tensors.items(), key=lambda of: _natural(of[0])):
        layer = re.search(r"layers\.(\d+)\.", key)
        blk = f"blk.{layer[1]}." if layer else ""
        expert = re.search(r"\.experts\.(\d+)\.", key)
        if expert:
            part = re.search(r"(gate|up|down)(?=_proj)|w[123]", key)[0]
            part = {"w1": "gate", "w3": "up", "w2": "down"}.get(part, part)
            if experts == "apart":
                found[f"{blk}ffn_{part}.{expert[1]}.weight"] = "F16", _decoded(kind, w)
            else:
                stacks.setdefault(f"{blk}ffn_{part}_exps.weight", []).append((kind, w))
        elif arch in ("llama", "granitemoe") and re.search("[qk]_proj", key):
            heads = c.num_attention_heads if "q_proj" in key else c.num_key_value_heads
            w = w.reshape(heads, 2, -1, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)
            found[f"{blk}attn_{key[key.index('_proj') - 1]}.weight"] = kind, w
        elif "input_linear" in key:
            which = "shexp" if "shared" in key else "exps"
            for part, half in zip(("gate", "up"), np.split(w, 2, -2), strict=True):
                found[f"{blk}ffn_{part}_{which}.weight"] = kind, half
        elif arch == "gpt-oss" and ".experts." in key:
            end = "bias" if "bias" in key else "weight"
            if "gate_up" in key:
                found[f"{blk}ffn_gate_exps.{end}"] = kind, w[:, ::2]
                found[f"{blk}ffn_up_exps.{end}"] = kind, w[:, 1::2]
            else:
                found[f"{blk}ffn_down_exps.{end}"] = kind, w
        elif "in_proj_qkvz" in key:
            keys, k = c.linear_num_key_heads, c.linear_key_head_dim
            v = c.linear_num_value_heads // keys * c.linear_value_head_dim
            heads = np.split(w.reshape(keys, -1, w.shape[-1]), np.cumsum([k, k, v]), 1)
            q, k, v, z = (part.reshape(-1, w.shape[-1]) for part in heads)
            found[f"{blk}attn_qkv.weight"] = kind, np.concatenate([q, k, v])
            found[f"{blk}attn_gate.weight"] = kind, z
        elif "kv_b_proj" in key:
            w = w.reshape(c.num_attention_heads, -1, w.shape[-1])
            found[f"{blk}attn_k_b.weight"] = kind, w[:, : c.qk_nope_head_dim].swapaxes(1, 2)
            found[f"{blk}attn_v_b.weight"] = kind, w[:, c.qk_nope_head_dim :]
        else:
            if arch == "qwen35moe" and re.search("linear_attn|norm.weight$", key):
                w = _qwen35(c, key, w)
            elif arch == "qwen3next" and re.search("A_log|(?<!attn.)norm.weight$", key):
                w = -np.exp(w) if "A_log" in key else w + 1
            w = w.squeeze(1) if "conv" in key and w.ndim == 3 else w
            found[_name(names, key)] = kind, w
    for name, stack in stacks.items():
        found[name] = stack[0][0], np.stack([w for _, w in stack])
    for i in range(c.num_hidden_layers) if experts == "together" else ():
        if gate := found.pop(f"blk.{i}.ffn_gate_exps.weight", None):
            up = found.pop(f"blk.{i}.ffn_up_exps.weight")
            both = np.concatenate([_decoded(*gate), _decoded(*up)], 1)
            found[f"blk.{i}.ffn_gate_up_exps.weight"] = "F32", both
    return found


def _natural(key: str) -> list[Any]:
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", key)]


def _decoded(kind: str, rows: np.ndarray) -> np.ndarray:
    if rows.dtype == np.uint8:
        return quants.dequantize(rows, GGMLQuantizationType[kind])
    return rows


def _name(names: Any, key: str) -> str:
    for old, new in (
        ("e_score_correction_bias", "e_score_correction.bias"),
        (".expert_bias", ".expert_bias.bias"),
        (".sinks", ".sinks.weight"),
        (".dt_bias", ".dt_proj.bias"),
    ):
        key = key.removesuffix(old) + new if key.endswith(old) else key
    return names.get_name(key, (".weight", ".bias"))


def _qwen35(c: Any, key: str, w: np.ndarray) -> np.ndarray:
    """Value heads in turn of their key heads, norms beside 1, decay rates themselves."""
    keys, values = c.linear_num_key_heads, c.linear_num_value_heads
    if key.endswith("norm.weight"):
        return w if "linear_attn.norm" in key else w + 1
    if "out_proj" in key:
        parts = w.reshape(len(w), keys, values // keys, -1)
        return parts.swapaxes(1, 2).reshape(w.shape)
    if key.endswith("A_log"):
        w = -np.exp(w)
    first = 2 * keys * c.linear_key_head_dim if re.search("in_proj_qkv|conv1d", key) else 0
    parts = w[first:].reshape(keys, values // keys, -1, *w.shape[1:]).swapaxes(0, 1)
    return np.concatenate([w[:first], parts.reshape(-1, *w.shape[1:])])
