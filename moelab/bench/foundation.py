"""What the foundation costs: opening without experts, recording, saving a trace.

Three questions, answered on this machine. How much memory does it take to open a 2 GB checkpoint with external
experts, beside opening it whole? By what factor does `record` slow a forward pass down (interleaved medians)? How
long do saving and loading a trace of 100,000 tokens, 48 layers and 128 experts take?
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

GB, MB = 1e9, 1e6

_OPEN = """
import json, re, resource, sys, time
import moelab, torch, transformers
def peak():
    try:        # not ru_maxrss: on Linux a process inherits its parent's
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
base, start = peak(), time.perf_counter()
model = moelab.open_model(sys.argv[1], experts=sys.argv[2])
print(json.dumps({"peak": peak(), "imports": base, "seconds": time.perf_counter() - start}))
"""


def write_checkpoint(folder: Path, size: float = 2 * GB, seed: int = 0) -> int:
    """A random Qwen3-MoE checkpoint of about `size` bytes, one shard a layer, as the hub lays it out; its bytes."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig

    E, H, I = 32, 1024, 1024
    layers = max(1, round(size / (E * 3 * H * I * 2)))
    config = Qwen3MoeConfig(vocab_size=4096, hidden_size=H, intermediate_size=I, moe_intermediate_size=I,
                            num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
                            num_experts=E, num_experts_per_tok=4, dtype="bfloat16", mlp_only_layers=[],
                            architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)

    index: dict[str, str] = {}
    some = weight(I, H)                                        # random once: this is about bytes, not about numbers
    for layer in range(layers):
        p = f"model.layers.{layer}."
        tensors = {p + "self_attn.q_proj.weight": weight(1024, H), p + "self_attn.k_proj.weight": weight(256, H),
                   p + "self_attn.v_proj.weight": weight(256, H), p + "self_attn.o_proj.weight": weight(H, 1024),
                   p + "mlp.gate.weight": weight(E, H)}
        tensors |= {p + f"self_attn.{n}_norm.weight": torch.ones(128, dtype=torch.bfloat16) for n in "qk"}
        tensors |= {p + n + ".weight": torch.ones(H, dtype=torch.bfloat16)
                    for n in ("input_layernorm", "post_attention_layernorm")}
        for e in range(E):
            tensors |= {p + f"mlp.experts.{e}.{n}_proj.weight": some.clone() for n in ("gate", "up", "down")}
        if layer == 0:
            tensors |= {"model.embed_tokens.weight": weight(4096, H), "lm_head.weight": weight(4096, H),
                        "model.norm.weight": torch.ones(H, dtype=torch.bfloat16)}
        name = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    total = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return total


def opening(size: float = 2 * GB) -> dict[str, float]:
    """Peak resident memory (bytes) and seconds of opening a checkpoint, external and resident, a process each."""
    with tempfile.TemporaryDirectory() as folder:
        result = {"checkpoint bytes": float(write_checkpoint(Path(folder), size))}
        for experts in ("external", "resident"):
            done = subprocess.run([sys.executable, "-c", _OPEN, folder, experts], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"opening with {experts} experts failed:\n{done.stderr}")
            said = json.loads(done.stdout.splitlines()[-1])
            result |= {f"{experts} peak bytes": said["peak"], f"{experts} seconds": said["seconds"],
                       "imports alone bytes": said["imports"]}
    return result


def recording(repeats: int = 11, batch: int = 8, tokens: int = 256) -> dict[str, float]:
    """Seconds of a plain forward pass of the small model and of the same under `record`, interleaved medians."""
    import moelab
    model = moelab.open_model()
    ids = torch.randint(1, model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))
    mask, rows = torch.ones_like(ids), ids.tolist()
    plain, recorded = [], []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        with torch.no_grad():
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        middle = time.perf_counter()
        moelab.record(model, rows, batch_size=batch)
        end = time.perf_counter()
        if repeat:                                             # the first round warms up
            plain.append(middle - start)
            recorded.append(end - middle)
    ratios = [r / p for p, r in zip(plain, recorded)]
    return {"forward seconds": statistics.median(plain), "record seconds": statistics.median(recorded),
            "record ÷ forward": statistics.median(ratios), "record ÷ forward, worst": max(ratios)}


def saving(T: int = 100_000, L: int = 48, E: int = 128, K: int = 8, repeats: int = 3) -> dict[str, float]:
    """Median seconds of saving and of loading a trace of T tokens, and its bytes."""
    from moelab.specs import MoESpec
    from moelab.trace import RoutingTrace

    generator = torch.Generator().manual_seed(0)
    column = torch.arange(T, dtype=torch.int32)
    trace = RoutingTrace(
        ids=torch.randint(0, E, (T, L, K), generator=generator, dtype=torch.int16),
        weights=torch.rand((T, L, K), generator=generator), phase=(column % 2).to(torch.uint8), sequence=column // 512,
        position=column % 512, tokens=column, spec=MoESpec("bench", "bench", L, tuple(range(L)), E, K, 8, 8),
        model_id="0" * 16)
    saves, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.safetensors"
        for _ in range(repeats):
            start = time.perf_counter()
            trace.save(path)
            middle = time.perf_counter()
            loaded = RoutingTrace.load(path)
            loaded.counts()                                    # touches every page: a mapped file is not yet read
            saves.append(middle - start)
            loads.append(time.perf_counter() - middle)
        size = float(path.stat().st_size)
    return {"trace bytes": size, "save seconds": statistics.median(saves), "load seconds": statistics.median(loads)}


def run() -> dict[str, Any]:
    """All three, as one JSON-able dictionary."""
    return {"opening": opening(), "recording": recording(), "trace": saving()}
