"""A checkpoint offloaded without conversion: the experts that a store would give, exact, within its
memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moelab import open_model
from moelab.base.specs import MoESpec
from moelab.bench.synthesize import synthesize
from moelab.cache.pools import Pools
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.convert import convert
from moelab.checkpoint.experts import CheckpointExperts, CheckpointStore
from moelab.models.identity import identity
from moelab.offloading.offload import offload
from moelab.store.layout import StoreError
from moelab.store.reader import Reader, StoreExperts
from tests.depth import depth, in_turn
from tests.models import tiny

IDS = torch.arange(3, 20)[None]


def store_of(folder, dtype="auto"):
    checkpoint = Checkpoint.at(folder)
    return CheckpointStore(checkpoint, checkpoint.dtype(dtype))


@pytest.mark.parametrize(
    "name, dtype",
    in_turn(
        ["mixtral", "gpt_oss", "switch_transformers", "mxfp4", "fp8"],
        [torch.bfloat16, torch.float32],
    ),
)
def test_experts_are_those_that_are_converted(name, dtype, tmp_path):
    """Apart, fused, numbered and quantised, in the stored dtype and in another."""
    folder = tiny.save_few(name, tmp_path)
    store = store_of(folder, dtype)
    truth = CheckpointExperts(store.checkpoint, dtype)
    experts = StoreExperts(store)
    for layer in range(len(store.layers)):
        for expert in range(store.spec.E):
            read, wanted = experts(layer, expert), truth(layer, expert)
            assert read.keys() == wanted.keys()
            assert all(
                read[key].dtype == dtype and torch.equal(read[key], wanted[key]) for key in read
            )
    assert experts.reader.bytes_read == sum(
        store.stored_bytes(layer, expert, "both")
        for layer in range(len(store.layers))
        for expert in range(store.spec.E)
    )
    plain = name not in ("mxfp4", "fp8") and dtype == torch.bfloat16
    assert plain == (store.scratch == 0)


@pytest.mark.parametrize(
    "name, pools", in_turn(["mixtral", "gpt_oss", "mxfp4", "fp8"], [False, True])
)
def test_offloaded_it_is_exact_and_counts_its_bytes(name, pools, tmp_path):
    folder = tiny.save_few(name, tmp_path)
    truth = open_model(folder)
    plan = Pools(F=2, C=2, S=1, E=1) if pools else None
    model = offload(folder, 0.9 if plan else 0.4, plan=plan, staging=1)
    with closing(model.moelab) as offloading:
        assert torch.equal(truth(IDS).logits, model(IDS).logits)
        metrics, reads = (
            offloading.metrics(),
            [event for event in offloading.timeline if event.resource == "disk"],
        )
        expert = offloading.store.stored_bytes(0, 0, "both")
        assert sum(event.bytes for event in reads) == metrics.misses * expert
        assert offloading.store.identity == identity(truth)


@pytest.mark.parametrize(
    "name, form, dtype",
    [
        ("mxfp4", "mxfp4.T", torch.bfloat16),
        ("fp8", "fp8", torch.bfloat16),
        ("fp8", "raw", torch.float32),
        ("mixtral", "raw", torch.bfloat16),
    ],
)
def test_few_bits_stay_few_where_they_unpack_to_the_models_own(name, form, dtype, tmp_path):
    """Byte for byte what a store holds, in all experts; in fp32 transformers' FP8 is rounded to
    bf16 first."""
    folder = tiny.save_few(name, tmp_path / "m")
    store, converted = store_of(folder, dtype), convert(folder, tmp_path / "s", "raw")
    with Reader(store) as reader, Reader(converted, "buffered") as theirs:
        for layer in range(len(store.layers)):
            for expert in range(store.spec.E):
                read, wanted = reader.read(layer, expert), theirs.read(layer, expert)
                for key, entry in store.entries(layer, expert).items():
                    plane = read.plane(key, 0)
                    assert plane.codec.name == (form if len(entry.shape) > 1 else "raw")
                    if dtype == torch.bfloat16:
                        assert plane.codec == wanted.plane(key, 0).codec
                        assert np.array_equal(plane.shards[0], wanted.plane(key, 0).shards[0])
    assert all(
        (entry.stored() < entry.nbytes) == (form != "raw" and len(entry.shape) > 1)
        for entry in store.entries(0, 0).values()
    )


def test_what_equals_its_transpose_is_not_kept_in_few_bits(tmp_path):
    """A square matrix of zeros unpacks to itself however it lies: it does not say how the others
    do."""
    folder = tiny.save_fp8(tmp_path / "m")  # gate and up together are 256 × 256
    tensors = load_file(folder / "model.safetensors")
    for key, codes in tensors.items():
        if key.endswith(("experts.0.gate_proj.weight", "experts.0.up_proj.weight")):
            codes.view(torch.uint8).zero_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    entries = store_of(folder).entries(0, 1)
    assert {key: entry.codec.name for key, entry in entries.items()} == {
        "gate_up_proj": "raw",
        "down_proj": "fp8",
    }
    with open_model(folder) as whole, open_model(folder, memory="40%") as model:
        assert torch.equal(whole(IDS).logits, model(IDS).logits)


def test_a_file_that_changes_is_noticed(tmp_path):
    folder = tiny.save("mixtral", tmp_path)
    model = offload(folder, 0.4)
    file = next(folder.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))
    with (
        closing(model.moelab),
        pytest.raises(StoreError, match="was changed since the model was opened"),
    ):
        model(IDS)


WITHIN = """
import json, re, sys, torch
from pathlib import Path
from moelab import open_model

def memory(name):
    return 1024 * int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

small, folder, budget = sys.argv[1:]
with open_model(small, memory="50%"):                   # all that is imported and compiled
    pass
before = memory("VmRSS")
with open_model(folder, memory=budget) as model:
    offloading = model.moelab
    logits = model(torch.arange(3, 20)[None]).logits
    print(json.dumps({"used": memory("VmHWM") - before, "others": offloading.store.weights_bytes,
                      "read": offloading.engine.loader.reader.bytes_read, "experts": offloading.metrics().misses,
                      "bytes": offloading.store.stored_bytes(0, 0, "both"), "budget": offloading.budget,
                      "logits": logits.double().sum(1).flatten().tolist()}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("H, E, budget", [(128, 16, "1MB"), (1024, 60, "700MB")][: depth(1, 2)])
def test_a_large_checkpoint_within_its_memory(H, E, budget, tmp_path):
    """3 MB or 1.5 GB of experts, opened without conversion."""
    sizes = {"H": H, "I": H // 2, "vocab": 1024, "heads": 8, "kv_heads": 2, "head_dim": H // 8}
    spec = MoESpec("synthetic", "qwen3_moe", 8, tuple(range(8)), E=E, K=4, **sizes)
    folder = synthesize(tmp_path / "large", spec)
    small = tiny.save("qwen3_moe", tmp_path / "small", torch.bfloat16)
    done = subprocess.run(
        [sys.executable, "-c", WITHIN, small, folder, budget],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["logits"] == open_model(folder)(IDS).logits.double().sum(1).flatten().tolist()
    assert found["used"] < found["budget"] + found["others"] + (40 << 20)
    assert found["read"] >= found["experts"] * found["bytes"] > 0
