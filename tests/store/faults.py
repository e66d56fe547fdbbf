"""Faults injected into stores: random corruptions that must be found, and kills after which conversion resumes.

`corruptions(n)` damages a small store in n random ways, one at a time, and asks two questions of each: does any
reader ever hand out a wrong weight, and does `verify` find the damage with an error that says so? `kills(n)` kills
conversions with SIGKILL at random moments, resumes each, and compares every byte with an uninterrupted one. Both
raise at the first failure and otherwise count what they tried:

    python -m tests.store.faults 10000 50
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from moelab.progress import progress
from moelab.store import writer
from moelab.store.layout import INDEX, ExpertStore, StoreError, seal
from moelab.store.reader import StoreExperts
from moelab.store.verify import check_weights, verify


def small_checkpoint(folder: Path, seed: int = 0, E: int = 4) -> Path:
    """A random Qwen3-MoE checkpoint of 2 layers of E experts of 37 KB in bf16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(vocab_size=96, hidden_size=64, intermediate_size=64, moe_intermediate_size=96, head_dim=16,
                            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=E,
                            num_experts_per_tok=2, dtype="bfloat16")
    Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------ corruptions

def corruptions(n: int = 10_000, seed: int = 0, store: str | Path | None = None) -> dict[str, int]:
    """Damage a store in `n` random ways, one after another, undoing each; returns how often each way was tried.

    store : a small one, which is changed and put back; by default a new one of `small_checkpoint`.
    Raises AssertionError for damage that is not found, an error of an unexpected kind, or a wrong weight.
    """
    from moelab.models.convert import convert
    rng, tried = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as temporary:
        if store is None:
            store = convert(small_checkpoint(Path(temporary) / "model"), Path(temporary) / "store").folder
        folder = Path(store)
        truth, files = _everything(folder), [path for path in sorted(folder.iterdir()) if path.name != "read_mode.json"]
        for i in progress(range(n), "corrupting", unit="store"):
            kind = rng.choice(list(KINDS))
            path = folder / INDEX if "index" in kind else rng.choice(files)
            before = path.read_bytes()
            after = KINDS[kind](before, rng)
            if after == before:
                continue
            path.write_bytes(after) if after is not None else path.unlink()
            try:
                _check(folder, truth, must_find=kind != "resealed index", what=f"corruption {i} ({kind}, {path.name})")
            finally:
                path.write_bytes(before)
            tried[kind] += 1
        assert verify(folder)                           # put back as it was: the errors above came from the damage
    return dict(tried)


def _check(folder: Path, truth: dict, must_find: bool, what: str) -> None:
    """A reader gives right weights or a clear error; `verify` finds the damage."""
    try:
        wrong = [key for key, value in _everything(folder).items() if key not in truth or truth[key] != value]
        assert not wrong, f"{what}: wrong weights in {wrong[:3]}"
    except (StoreError, FileNotFoundError):
        pass
    try:
        verify(folder)
    except (StoreError, FileNotFoundError) as error:
        assert len(str(error)) > 30 and str(folder) in str(error) or "cannot be decoded" in str(error), \
            f"{what}: the error says too little: {error}"
    else:
        assert not must_find, f"{what} was not found"


def _everything(folder: Path) -> dict[Any, Any]:
    """The bits of every expert, through the reader, and of all other weights; key → (dtype, shape, bytes)."""
    store = ExpertStore(folder)
    source, found = StoreExperts(store, mode="buffered"), {}
    with source.reader:
        for layer in range(len(store.layers)):
            for expert in range(len(store.layers[layer].experts)):
                for name, t in source(layer, expert).items():
                    bits = t.reshape(-1).view(torch.uint8).numpy().tobytes()
                    found[layer, expert, name] = t.dtype, t.shape, bits
    check_weights(store)
    found["weights"] = (folder / "weights.safetensors").read_bytes()
    return found


def _flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    begin, length = rng.randrange(len(data)), rng.choice((1, 64, 4096))
    piece = rng.choice((bytes, lambda n: b"\xff" * n, rng.randbytes))(min(length, len(data) - begin))
    return data[:begin] + piece + data[begin + len(piece):]


def _swap(data: bytes, rng: random.Random) -> bytes:
    """Two aligned pieces change places: chunks, where the file has some."""
    size = 4096 if len(data) >= 8192 else max(1, len(data) // 4)
    a, b = (rng.randrange(len(data) // size) * size for _ in "ab")
    out = bytearray(data)
    out[a:a + size], out[b:b + size] = data[b:b + size], data[a:a + size]
    return bytes(out)


def _edit(data: bytes, rng: random.Random) -> bytes:
    fields = json.loads(data)
    _edit_leaf(fields, rng)
    return json.dumps(fields, separators=(",", ":")).encode()


def _edit_resealed(data: bytes, rng: random.Random) -> bytes:
    fields = json.loads(data)
    del fields["sha256"]
    _edit_leaf(rng.choice(rng.choice(fields["layers"])["experts"]), rng)
    return seal(fields)[0]


def _edit_leaf(node: Any, rng: random.Random) -> None:
    """Change one number or string below a node, or drop an item."""
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        child = node[key]
        if isinstance(child, (dict, list)) and child and rng.random() < 0.95:
            node = child
            continue
        if isinstance(child, (int, float)) and not isinstance(child, bool):
            node[key] = rng.choice((0, -1, child + 1, child + 4096, child * 2, -child, 1 << 62, str(child), None))
        elif isinstance(child, str) and rng.random() < 0.7:
            node[key] = rng.choice(("", child[::-1], child + "x", child[:-1], 7))
        else:
            del node[key]
        return


KINDS = {
    "flipped bits": _flip,
    "overwritten piece": _overwrite,
    "truncation": lambda data, rng: data[:rng.randrange(len(data))],
    "extension": lambda data, rng: data + rng.randbytes(rng.choice((1, 100, 4096))),
    "swapped pieces": _swap,
    "deleted file": lambda data, rng: None,
    "edited index": _edit,
    "resealed index": _edit_resealed,
}


# ------------------------------------------------------------------------------------------------------------ kills

def kills(n: int = 50, seed: int = 0, codec: str = "zstd-huffman") -> dict[str, float]:
    """Kill `n` conversions at random moments, resume each, and compare with an uninterrupted one, byte for byte.

    Forks, so call it in a process of its own. Returns how many kills hit, and how many resumed work already done.
    Raises AssertionError if a resumed store differs or cannot be resumed.
    """
    from moelab.models.convert import convert
    rng, hit, resumed = random.Random(seed), 0, 0
    writer.COMMIT = 1                                   # sync after every expert: the more states to be killed in
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


if __name__ == "__main__":
    counts = [int(word) for word in sys.argv[1:]] or [300, 5]
    print(json.dumps({"corruptions": corruptions(counts[0]), "kills": kills(counts[1]) if counts[1:] else {}}))
