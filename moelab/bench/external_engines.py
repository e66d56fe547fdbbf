"""External engines: llama.cpp on a mapped GGUF file, and ftllm with its disk cache; CPU, bf16, Qwen3-MoE only.

The engines and `write_gguf` need neither torch nor transformers, so they run in the interpreter that they are
installed in. Both files have a placeholder vocabulary: tokens are given by their numbers. llama.cpp always normalises
routing weights, even where a checkpoint says not to; then its logits differ, but not what it costs.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moelab.bench.peers import BenchmarkedEngine
from moelab.files import atomic

#: CPU cores that this process may use
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Llama(BenchmarkedEngine):
    """llama.cpp through llama-cpp-python; options: "gguf", a file."""

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp
        self.api = llama_cpp
        self.model = llama_cpp.Llama(
            options["gguf"], n_gpu_layers=0, n_threads=CORES, n_threads_batch=CORES, use_mmap=True, verbose=False,
            n_ctx=len(options["tokens"]) + 64, n_batch=max(options["prompts"]), n_ubatch=max(options["prompts"]))

    def restart(self) -> None:
        self.model.reset()

    def feed(self, ids: list[int]) -> Any:
        import numpy as np
        self.model.eval(ids)
        logits = self.api.llama_get_logits_ith(self.model._ctx.ctx, -1)
        return np.ctypeslib.as_array(logits, (self.model.n_vocab(),)).astype(np.float32)


class Ftllm(BenchmarkedEngine):
    """ftllm; options: "checkpoint" with a weight for each expert, "cache" bytes for experts, 0 for all in memory.

    It cannot be told its tokens, so it samples them, all about equally likely; there are no logits to compare.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import ftllm
        sys.path.append(str(Path(ftllm.__file__).parent))       # its modules import each other by bare names
        from ftllm import llm
        llm.set_cpu_threads(CORES)
        llm.set_device_map("cpu")
        if options["cache"]:
            llm.set_device_map("disk", True)
            llm.set_moe_cpu_cache(options["cache"])
        self.api, self.model = llm, llm.model(options["checkpoint"], dtype="bfloat16")
        self.model.set_atype("bfloat16")
        self.model.set_moe_atype("bfloat16")

    def restart(self) -> None:
        self.handle = None

    def feed(self, ids: list[int]) -> Any:
        """One more token; a new sequence begins with `ids`, later ones are its own."""
        import numpy as np
        library = self.api.fastllm_lib
        if self.handle is None:
            # up to so many new tokens, at least as many; sampled: top_p 1, top_k 400, temperature 1000; no penalty
            self.handle = library.launch_response_llm_model(
                self.model.model, len(ids), (ctypes.c_int * len(ids))(*ids), self.new, self.new, ctypes.c_bool(True),
                ctypes.c_float(1), 400, ctypes.c_float(1000), ctypes.c_float(1), ctypes.c_bool(False),
                *self.model.stop_token_ctypes(None))
        token = library.fetch_response_llm_model(self.model.model, self.handle)
        if token < 0:
            raise RuntimeError(f"ftllm ended its answer early ({token})")
        return np.zeros(1, np.float32)

    def measure(self, tokens: list[int], prompts: list[int]) -> dict[str, Any]:
        """As all others, but each sequence is told its length, as it continues by itself once its prompt is there."""
        first = sum(prompts[:-1])
        self.new = 1
        alone = super().measure(tokens[:first], prompts[:-1]) if first else {"ttft_s": []}
        self.new = 1 + len(tokens) - sum(prompts)
        last = super().measure(tokens[first:], prompts[-1:])
        return last | {"ttft_s": alone["ttft_s"] + last["ttft_s"], "digest": None, "best": None}

    def decoding(self) -> None:
        self.before = self.api.get_disk_moe_cache_stats()

    def report(self) -> dict[str, Any]:
        after = self.api.get_disk_moe_cache_stats()
        hits, misses = (after[key] - self.before[key] for key in ("cpu_hits", "misses"))
        return {"decode_hit_rate": hits / (hits + misses) if hits + misses else None}


#: GGUF's names of a layer's tensors
_LAYER = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
          "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
          "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp"}
_REST = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: str | Path, path: str | Path) -> Path:
    """Write a Qwen3-MoE checkpoint with stacked experts as a GGUF file in bf16 (norms and routers in fp32)."""
    import gguf
    import numpy as np
    folder, path = Path(checkpoint), Path(path)
    config = _config(folder)
    words = _vocabulary(config["vocab_size"])
    tensors = {name: bits for key, found in _tensors(folder) for name, bits in _renamed(key, found).items()}
    fp32 = {name for name, bits in tensors.items() if bits.ndim == 1 or "ffn_gate_inp" in name}
    with atomic(path) as part:
        out = gguf.GGUFWriter(part, "qwen3moe")
        out.add_context_length(config["max_position_embeddings"])
        out.add_embedding_length(config["hidden_size"])
        out.add_block_count(config["num_hidden_layers"])
        out.add_feed_forward_length(config["intermediate_size"])
        out.add_expert_feed_forward_length(config["moe_intermediate_size"])
        out.add_expert_count(config["num_experts"])
        out.add_expert_used_count(config["num_experts_per_tok"])
        out.add_head_count(config["num_attention_heads"])
        out.add_head_count_kv(config["num_key_value_heads"])
        out.add_key_length(config["head_dim"])
        out.add_value_length(config["head_dim"])
        out.add_rope_freq_base(config["rope_theta"])
        out.add_layer_norm_rms_eps(config["rms_norm_eps"])
        out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("gpt-2")
        out.add_token_list(words)
        out.add_token_types([gguf.TokenType.NORMAL] * len(words))
        out.add_token_merges([f"{words[0]} {words[1]}"])
        for name, bits in tensors.items():
            if name in fp32:
                out.add_tensor_info(name, bits.shape, np.dtype(np.float32), 4 * bits.size)
            else:
                out.add_tensor_info(name, (*bits.shape[:-1], 2 * bits.shape[-1]), np.dtype(np.uint8), 2 * bits.size,
                                    gguf.GGMLQuantizationType.BF16)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_ti_data_to_file()
        for name, bits in tensors.items():
            out.write_tensor_data((bits.astype(np.uint32) << 16).view(np.float32) if name in fp32 else
                                  np.ascontiguousarray(bits).view(np.uint8))
        out.close()
    return path


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The names and the bits (uint16, mapped) of a checkpoint's tensors, which must be bf16."""
    import numpy as np
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        header = int.from_bytes(data[:8], "little")
        for key, entry in json.loads(data[8:8 + header]).items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                bits = np.frombuffer(data, np.uint16, (end - begin) // 2, 8 + header + begin)
                yield key, bits.reshape(entry["shape"])


def _renamed(key: str, bits: Any) -> dict[str, Any]:
    """GGUF's tensors of one of the checkpoint's."""
    parts = key.split(".")
    if parts[1] != "layers":
        return {_REST[key.removesuffix(".weight")] + ".weight": bits}
    inner, block = ".".join(parts[3:]).removesuffix(".weight"), f"blk.{parts[2]}."
    if inner == "mlp.experts.gate_up_proj":
        half = bits.shape[1] // 2
        return {f"{block}ffn_gate_exps.weight": bits[:, :half], f"{block}ffn_up_exps.weight": bits[:, half:]}
    if inner == "mlp.experts.down_proj":
        return {f"{block}ffn_down_exps.weight": bits}
    return {block + _LAYER[inner] + ".weight": bits}


def write_unstacked(checkpoint: str | Path, folder: str | Path) -> Path:
    """Write a Qwen3-MoE checkpoint with stacked experts as the hub has it: three weights for each expert."""
    import torch
    from safetensors.torch import save_file
    source, files = Path(checkpoint), {}
    for key, bits in _tensors(source):
        layer = key.split(".")[2] if ".layers." in key else "rest"
        tensor = torch.frombuffer(bits, dtype=torch.bfloat16).view(bits.shape)
        files.setdefault(f"model-{layer}.safetensors", {}).update(_unstacked(key, tensor))
    config = _config(source)
    words = _vocabulary(config["vocab_size"])
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
                 "post_processor": None, "decoder": None,
                 "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)},
                           "merges": [f"{words[0]} {words[1]}"]}}
    with atomic(folder) as part:
        part.mkdir(exist_ok=True)
        for file, tensors in files.items():
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part / file, {"format": "pt"})
        weight_map = {key: file for file, tensors in files.items() for key in tensors}
        for file, content in (("model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map}),
                              ("config.json", config), ("tokenizer.json", tokenizer),
                              ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})):
            (part / file).write_text(json.dumps(content))
    return Path(folder)


def _unstacked(key: str, tensor: Any) -> dict[str, Any]:
    stem, _, name = key.rpartition(".")
    if name not in ("gate_up_proj", "down_proj"):
        return {key: tensor}
    parts = {"gate": 0, "up": 1} if name == "gate_up_proj" else {"down": 0}
    return {f"{stem}.{e}.{part}_proj.weight": expert.chunk(len(parts))[i]
            for e, expert in enumerate(tensor) for part, i in parts.items()}


def _config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config with the fields that other programs read."""
    config = json.loads((folder / "config.json").read_text())
    return config | {"num_experts": config.get("num_experts") or config["num_local_experts"],
                     "rope_theta": config["rope_parameters"]["rope_theta"],
                     "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}


def _vocabulary(n: int) -> list[str]:
    """n placeholder words, of which the last is a merge of two, as byte-pair encoding needs at least one."""
    words = [chr(256 + i) if i < 256 else f"token{i}" for i in range(n - 1)]
    return [*words, words[0] + words[1]]
