"""A small checkpoint, and kills after which its conversion resumes.

`kills(n)` kills conversions with SIGKILL at random moments, resumes each, and compares every byte
with an uninterrupted one. It raises at the first failure and otherwise counts what it tried."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch

from moelab.base.progress import progress
from moelab.store import writer


def small_checkpoint(folder: Path, seed: int = 0, E: int = 4) -> Path:
    """A random Qwen3-MoE checkpoint of 2 layers of E experts of 37 KB in bf16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=96,
        head_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=E,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )
    Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------
# kills


def kills(n: int = 50, seed: int = 0, codec: str = "zstd-huffman") -> dict[str, float]:
    """Kill `n` conversions at random moments, resume each, and compare with an uninterrupted one,
    byte for byte.

    Forks, so call it in a process of its own. Returns how many kills hit, and how many resumed work
    already done. Raises AssertionError if a resumed store differs or cannot be resumed."""
    from moelab.checkpoint.convert import convert

    rng, hit, resumed = random.Random(seed), 0, 0
    writer.COMMIT = 1  # sync after every expert: the more states to be killed in
    with tempfile.TemporaryDirectory() as temporary:
        source = small_checkpoint(Path(temporary) / "model", E=24)
        convert(source, Path(temporary) / "warm", codec)
        start = time.perf_counter()
        truth = _bytes(convert(source, Path(temporary) / "truth", codec).folder)
        seconds = time.perf_counter() - start
        for i in progress(range(n), "killing", unit="conversion"):
            target = Path(temporary) / f"store{i}"
            pid = os.fork()
            if not pid:
                try:
                    convert(source, target, codec)
                finally:
                    os._exit(0)
            time.sleep(rng.uniform(0, 1.3 * seconds))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if not target.exists():
                hit += 1
                journal = Path(f"{target}.part.jsonl")
                resumed += journal.exists() and journal.read_bytes().count(b"\n") > 1
                convert(source, target, codec)
            assert _bytes(target) == truth, f"the store resumed after kill {i} differs"
    return {"killed": hit, "resumed with work done": resumed, "finished before the kill": n - hit}


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
