"""Small models of experts in GGUF, written by gguf-py, and the same in transformers."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants

E, K, H, I, V, HEADS, KV = 8, 2, 256, 256, 320, 4, 2  # noqa: E741
TOKENS = [*"!abcdefghijklmnopqrstuvwxyzĠ", "to", "ken", "tok", "to" + "ken", "<|end|>", "<|pad|>"]
MERGES = ["t o", "k e", "ke n", "to ken"]


def qwen3moe(path, kind="Q8_0", down=None, layers=2, shards=0, seed=0, **fields):
    """A Qwen3-MoE of random weights in one type, the first layer's `down` perhaps in another; in files
    of so many tensors, if `shards`."""
    rng = np.random.default_rng(seed)
    w = GGUFWriter(str(path), "qwen3moe", split_max_tensors=shards)
    w.add_block_count(layers)
    w.add_context_length(512)
    w.add_embedding_length(H)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV)
    w.add_key_length(H // HEADS)
    w.add_value_length(H // HEADS)
    w.add_expert_count(E)
    w.add_expert_used_count(K)
    w.add_expert_feed_forward_length(I)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e4)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(fields.get("pre", "qwen2"))
    known = [*TOKENS[:-2], *("ke",), *TOKENS[-2:]]
    w.add_token_list(known + [f"[unused{i}]" for i in range(V - len(known))])
    w.add_token_types([1] * (len(known) - 2) + [3, 3] + [5] * (V - len(known)))
    w.add_token_merges(MERGES)
    w.add_eos_token_id(len(known) - 2)
    w.add_pad_token_id(len(known) - 1)
    w.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    made = {}

    def add(name, *shape, kind=kind, mean=0.0):
        a = (rng.standard_normal(shape) * 0.05 + mean).astype("f4")
        made[name] = torch.from_numpy(encoded(w, name, a, kind))

    one = {"kind": "F32", "mean": 1.0}
    add("token_embd.weight", V, H)
    add("output_norm.weight", H, **one)
    add("output.weight", V, H)
    for i in range(layers):
        block = f"blk.{i}."
        for name, size in (("attn", H), ("ffn", H), ("attn_q", H // HEADS), ("attn_k", H // HEADS)):
            add(f"{block}{name}_norm.weight", size, **one)
        add(block + "attn_q.weight", H, H)
        add(block + "attn_k.weight", H * KV // HEADS, H)
        add(block + "attn_v.weight", H * KV // HEADS, H)
        add(block + "attn_output.weight", H, H)
        add(block + "ffn_gate_inp.weight", E, H, kind="F32")
        add(block + "ffn_gate_exps.weight", E, I, H)
        add(block + "ffn_up_exps.weight", E, I, H)
        add(block + "ffn_down_exps.weight", E, H, I, kind=(down if down and not i else kind))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return made


def encoded(writer, name, a, kind):
    """Write a tensor; returns what gguf-py decodes of it."""
    if kind in ("F32", "F16"):
        a = a.astype({"F32": "f4", "F16": "f2"}[kind])
        writer.add_tensor(name, a)
        return a.astype("f4")
    of = GGMLQuantizationType[kind]
    try:
        data = quants.quantize(a, of)
    except (
        NotImplementedError
    ):  # gguf-py only decodes it: small codes, and scales of 2 ** -11 or so
        block, size = gguf.GGML_QUANT_SIZES[of]
        rng = np.random.default_rng(a.size)
        data = rng.integers(0, 17, (*a.shape[:-1], a.shape[-1] // block * size), dtype=np.uint8)
    writer.add_tensor(name, data, raw_dtype=of)
    return quants.dequantize(data, of)


NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate",
}


def in_transformers(made, dtype=torch.bfloat16):
    """transformers' model, eager, with these weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    layers = sum(name.endswith("attn_q.weight") for name in made)
    config = Qwen3MoeConfig(
        vocab_size=V,
        hidden_size=H,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=H // HEADS,
        num_experts=E,
        num_experts_per_tok=K,
        moe_intermediate_size=I,
        norm_topk_prob=True,
        max_position_embeddings=512,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(config)
    state = {}
    for name, tensor in made.items():
        if not name.startswith("blk."):
            state[NAMES[name]] = tensor
        elif "_exps" not in name:
            _, i, part, _ = name.split(".")
            state[f"model.layers.{i}.{NAMES[part]}.weight"] = tensor
    for i in range(layers):
        gate, up, down = (
            made[f"blk.{i}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")
        )
        state[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        state[f"model.layers.{i}.mlp.experts.down_proj"] = down
    model.load_state_dict(state)
    rotary = model.model.rotary_emb  # which stays in fp32
    model.model.rotary_emb = None
    model.to(dtype).model.rotary_emb = rotary
    return model.eval()
