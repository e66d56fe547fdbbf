"""llama.cpp and ik_llama.cpp on a GGUF file, and writing one; CPU, Qwen3-MoE only.

Engines and `write_gguf` need neither torch nor transformers, so they run in an interpreter of
their own (psutil, gguf and numpy are enough). Files have a placeholder vocabulary. llama.cpp always
normalises routing weights, as published and synthetic Qwen3-MoE do."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from moelab.base.files import atomic
from moelab.base.records import Record

from .peers import BenchmarkedEngine, Sequences

CPU = Path("/proc/cpuinfo")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

#: field of a GGUF file → key of the config
GGUF_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "rope_freq_base": "rope_theta",
    "layer_norm_rms_eps": "rms_norm_eps",
}


class Llama(BenchmarkedEngine):
    """llama.cpp by its C interface, with its own defaults; options: "gguf", a file; "how", fields of
    its parameters for a model."""

    module = "llama_cpp"
    parameters: Record = {}  # of a context

    def __init__(self, options: Record) -> None:
        self.api = import_module(self.module)
        self.api.llama_backend_init()
        how = _with(self.api.llama_model_default_params(), n_gpu_layers=0, **options.get("how", {}))
        self.model = self.api.llama_model_load_from_file(os.fsencode(options["gguf"]), how)
        if not self.model:
            raise ValueError(f"{self.module} cannot open {options['gguf']}")
        self.vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        size = len(options["tokens"][0]) + 64
        threads = {"n_threads": CORES, "n_threads_batch": CORES, "n_ctx": size}
        self.how = _with(
            self.api.llama_context_default_params(), **threads, **self.parameters, n_batch=size
        )
        self.restart()

    def restart(self) -> None:
        self.context, self.at = self.api.llama_init_from_model(self.model, self.how), 0

    def feed(self, ids: Sequences) -> Any:
        """Of one sequence."""
        import numpy as np

        (row,) = ids
        batch = self.api.llama_batch_init(len(row), 0, 1)
        batch.n_tokens = len(row)
        for i, token in enumerate(row):
            batch.token[i], batch.pos[i] = token, self.at + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(row) - 1
        if failed := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"{self.module} could not compute: {failed}")
        self.api.llama_batch_free(batch)
        self.at += len(row)
        logits = self.api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, (self.vocab,))[None].astype(np.float32)


class IkLlama(Llama):
    """ik_llama.cpp, of the package ik-llama-cpp-python, which takes flash attention only where the
    processor has AVX-VNNI: it asserts elsewhere."""

    module = "ik_llama_cpp._ctypes_api"
    parameters = {"flash_attn": CPU.exists() and "avx_vnni" in CPU.read_text()}


def _with(parameters: Any, **fields: Any) -> Any:
    """A struct of parameters with some fields set. ValueError: another version has no such field."""
    for name, value in fields.items():
        if not hasattr(parameters, name):
            raise ValueError(f"this version has no parameter {name}")
        setattr(parameters, name, value)
    return parameters


#: kind → llama.cpp's number of the file type
FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15, "Q6_K": 18}


def quantize_gguf(source: str | Path, path: str | Path, kind: str) -> None:
    """Round a file by llama.cpp's own quantizer, with its choice of a kind for each tensor."""
    import llama_cpp

    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.nthread = FILE_TYPES[kind], CORES
    with atomic(Path(path)) as part:
        if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(part), how):
            raise RuntimeError(f"llama.cpp could not write {kind}")


def write_gguf(checkpoint: str | Path, path: str | Path, kind: str = "BF16") -> Path:
    """Write a Qwen3-MoE checkpoint with stacked experts as a GGUF file, a tensor at a time: norms
    and routers in fp32, all else, attention, embeddings and head too, as `kind`, which gguf's own
    quantizer makes, such as Q8_0 or Q4_0."""
    import gguf
    import numpy as np
    from gguf.quants import quant_shape_to_byte_shape, quantize

    folder = Path(checkpoint)
    path = Path(path)
    config, words = _config(folder)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config["num_hidden_layers"])
    tensors = {}
    for key, found in _tensors(folder):
        banks = {
            f"{key.rpartition('.')[0]}.{part}.weight": bank
            for part, bank in _banks(key, found).items()
        }
        tensors |= {
            names.get_name(name, (".weight",)): bits
            for name, bits in (banks or {key: found}).items()
        }
    kinds = {
        name: gguf.GGMLQuantizationType["F32" if bits.ndim == 1 or "ffn_gate_inp" in name else kind]
        for name, bits in tensors.items()
    }
    with atomic(path) as part:
        out = gguf.GGUFWriter(part, "qwen3moe")
        for field, key in GGUF_FIELDS.items():
            getattr(out, f"add_{field}")(config[key])
        out.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("gpt-2")
        out.add_token_list(words)
        out.add_token_types([gguf.TokenType.NORMAL] * len(words))
        out.add_token_merges([f"{words[0]} {words[1]}"])
        for name, bits in tensors.items():
            shape = quant_shape_to_byte_shape(bits.shape, kinds[name])
            out.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), kinds[name])
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_ti_data_to_file()
        for name, bits in tensors.items():
            out.write_tensor_data(
                quantize((bits.astype(np.uint32) << 16).view(np.float32), kinds[name])
            )
        out.close()
    return path


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The names and the bits (uint16, mapped) of a checkpoint's tensors, which must be bf16."""
    import numpy as np

    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        header = int.from_bytes(data[:8], "little")
        for key, entry in json.loads(data[8 : 8 + header]).items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                bits = np.frombuffer(data, np.uint16, (end - begin) // 2, 8 + header + begin)
                yield key, bits.reshape(entry["shape"])


def _banks(key: str, tensor: Any) -> Record:
    """Projection → its bank [E, rows, columns], of stacked experts; {} of any other tensor."""
    if key.endswith("experts.gate_up_proj"):
        half = tensor.shape[1] // 2
        return {"gate_proj": tensor[:, :half], "up_proj": tensor[:, half:]}
    return {"down_proj": tensor} if key.endswith("experts.down_proj") else {}


def _config(folder: Path) -> tuple[Record, list[str]]:
    """The checkpoint's config with the fields that other programs read, and a vocabulary of
    placeholder words, of which the last is a merge of two, as byte-pair encoding needs at least
    one."""
    config = json.loads((folder / "config.json").read_text())
    words = [chr(256 + i) if i < 256 else f"token{i}" for i in range(config["vocab_size"] - 1)]
    return config | {
        "num_experts": config.get("num_experts") or config["num_local_experts"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "head_dim": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
    }, [*words, words[0] + words[1]]
