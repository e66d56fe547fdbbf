"""Engines that are no part of transformers: llama.cpp on a mapped GGUF file, and ftllm with its disk cache.

Nothing of moelab's own is needed here, not even torch, so these run in whatever interpreter they are installed in.
`write_gguf` writes a Qwen3-MoE checkpoint, bf16 as it is, with a vocabulary that stands for nothing: tokens are given
by their numbers. llama.cpp normalises the routers' weights, which a checkpoint may ask not to be done; then its
logits differ, but not what it costs. Left out: GPUs, quantised weights, other architectures.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moelab.bench.peers import Contender


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Llama(Contender):
    """llama.cpp through llama-cpp-python; options: "gguf", a file."""

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp
        self.api = llama_cpp
        self.model = llama_cpp.Llama(
            options["gguf"], n_gpu_layers=0, n_threads=cores(), n_threads_batch=cores(), use_mmap=True, verbose=False,
            n_ctx=len(options["tokens"]) + 64, n_batch=max(options["prompts"]), n_ubatch=max(options["prompts"]))

    def restart(self) -> None:
        self.model.reset()

    def feed(self, ids: list[int]) -> Any:
        import numpy as np
        self.model.eval(ids)
        logits = self.api.llama_get_logits_ith(self.model._ctx.ctx, -1)
        return np.ctypeslib.as_array(logits, (self.model.n_vocab(),)).astype(np.float32)


class Ftllm(Contender):
    """ftllm; options: "checkpoint" with a weight for each expert, "cache" bytes for experts, 0 for all in memory.

    It cannot be told its tokens, so it samples them, all about equally likely; there are no logits to compare.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import ftllm
        sys.path.append(str(Path(ftllm.__file__).parent))       # its modules import each other by bare names
        from ftllm import llm
        llm.set_cpu_threads(cores())
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
        import ctypes

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
        """As all others, but a sequence goes on by itself as soon as its prompt is there, so it must be left time."""
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
    config = json.loads((folder / "config.json").read_text())
    part = path.with_name(path.name + ".part")
    out = gguf.GGUFWriter(part, "qwen3moe")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_expert_feed_forward_length(config["moe_intermediate_size"])
    out.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    out.add_expert_used_count(config["num_experts_per_tok"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    out.add_key_length(head)
    out.add_value_length(head)
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    words = _words(config["vocab_size"])
    out.add_token_list(words)
    out.add_token_types([gguf.TokenType.NORMAL] * len(words))
    out.add_token_merges([f"{words[0]} {words[1]}"])
    tensors = {name: words for key, found in _tensors(folder) for name, words in _renamed(key, found).items()}
    for name, bits in tensors.items():
        if bits.ndim == 1 or "ffn_gate_inp" in name:
            out.add_tensor_info(name, bits.shape, np.dtype(np.float32), 4 * bits.size)
        else:
            out.add_tensor_info(name, (*bits.shape[:-1], 2 * bits.shape[-1]), np.dtype(np.uint8),
                                2 * bits.size, gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for name, bits in tensors.items():
        wide = bits.ndim == 1 or "ffn_gate_inp" in name
        out.write_tensor_data((bits.astype(np.uint32) << 16).view(np.float32) if wide else
                              np.ascontiguousarray(bits).view(np.uint8))
    out.close()
    os.replace(part, path)
    return path


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The names and the bits (uint16, mapped) of a checkpoint's tensors, which must be bf16."""
    import numpy as np
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        header = int.from_bytes(data[:8], "little")
        for key, entry in json.loads(data[8:8 + header]).items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                bits = np.frombuffer(data, np.uint16, (end - begin) // 2, 8 + header + begin)
                yield key, bits.reshape(entry["shape"])


def write_unstacked(checkpoint: str | Path, folder: str | Path) -> Path:
    """Write a Qwen3-MoE checkpoint with stacked experts as the hub has it: three weights for each expert."""
    source, folder = Path(checkpoint), Path(folder)
    part = folder.with_name(folder.name + ".part")
    part.mkdir(exist_ok=True)
    files: dict[str, dict[str, Any]] = {}
    for key, bits in _tensors(source):
        layer = key.split(".")[2] if ".layers." in key else "rest"
        files.setdefault(f"model-{layer}.safetensors", {}).update(_unstacked(key, bits))
    for file, tensors in files.items():
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for key, bits in tensors.items():
            header[key] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
            at += bits.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(part / file, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for bits in tensors.values():
                f.write(bits.tobytes())
    (part / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": {key: file for file, tensors in files.items() for key in tensors}}))
    config = json.loads((source / "config.json").read_text())
    config |= {"num_experts": config.get("num_experts") or config["num_local_experts"],
               "rope_theta": config["rope_parameters"]["rope_theta"],
               "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}
    (part / "config.json").write_text(json.dumps(config))
    words = _words(config["vocab_size"])
    (part / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": None, "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)},
                                   "merges": [f"{words[0]} {words[1]}"]}}))
    (part / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    os.replace(part, folder)
    return folder


def _words(n: int) -> list[str]:
    """A vocabulary of n words that stand for nothing; the last is a merge, without which a byte-pair one is none."""
    words = [chr(256 + i) if i < 256 else f"token{i}" for i in range(n - 1)]
    return [*words, words[0] + words[1]]


def _unstacked(key: str, bits: Any) -> dict[str, Any]:
    stem, _, name = key.rpartition(".")
    if name == "gate_up_proj":
        half = bits.shape[1] // 2
        return {f"{stem}.{e}.{part}_proj.weight": rows for e, expert in enumerate(bits)
                for part, rows in (("gate", expert[:half]), ("up", expert[half:]))}
    if name == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": expert for e, expert in enumerate(bits)}
    return {key: bits}


def _renamed(key: str, words: Any) -> dict[str, Any]:
    """GGUF's tensors of one of the checkpoint's."""
    parts = key.split(".")
    if parts[1] != "layers":
        return {_REST[key.removesuffix(".weight")] + ".weight": words}
    inner, block = ".".join(parts[3:]).removesuffix(".weight"), f"blk.{parts[2]}."
    if inner == "mlp.experts.gate_up_proj":
        half = words.shape[1] // 2
        return {f"{block}ffn_gate_exps.weight": words[:, :half], f"{block}ffn_up_exps.weight": words[:, half:]}
    if inner == "mlp.experts.down_proj":
        return {f"{block}ffn_down_exps.weight": words}
    return {block + _LAYER[inner] + ".weight": words}
