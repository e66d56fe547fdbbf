"""The engine's benchmark on a tiny model: engines agree bit for bit, what is missing is said,
tables are whole."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moelab.bench import (
    engine,
    external_engines,
    grid,
    lru_baseline,
    machine,
    memory_limit,
    peers,
    scale,
)
from moelab.bench.synthesize import synthesize
from moelab.checkpoint.convert import convert
from moelab.specs import MoESpec

SPEC = MoESpec(
    "tiny", "qwen3_moe", 2, (0, 1), 8, 2, 64, 32, vocab=96, heads=2, kv_heads=1, head_dim=32
)
PROMPTS, DECODE = [5, 9], 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    model = synthesize(folder / "model", SPEC)
    for codec in ("huffman", "bf12", "raw"):
        convert(model, folder / codec, codec)
    lru_baseline.lay_out(model, folder / "experts.bin")
    return folder


def options(place, **more):
    rng = random.Random(0)
    return {
        "model": str(place / "model"),
        "tokens": [[rng.randrange(96) for _ in range(sum(PROMPTS) + DECODE)]],
        "prompts": PROMPTS,
        "store": str(place / "huffman"),
        "budget": 0.5,
        "experts": str(place / "experts.bin"),
        "slots": 8,
    } | more


@pytest.fixture(scope="module")
def eager(place):
    return peers.run("eager", options(place))


@pytest.fixture
def here(monkeypatch):
    """Engines run in this process: starting one takes longer than all that these tests measure."""

    def run(interpreter, *words):
        return subprocess.CompletedProcess(
            words, 0, json.dumps(peers.run(words[2], json.loads(words[3]))), ""
        )

    monkeypatch.setattr(grid, "_python", run)


def test_eager_is_what_transformers_computes(place, eager):
    """The oracle feeds each whole prefix to a model of its own, without a cache of keys and
    values."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    (tokens,), best = options(place)["tokens"], []
    for begin, end in [(0, 5), *((5, 14 + i) for i in range(DECODE + 1))]:
        with torch.no_grad():
            best.append(model(torch.tensor([tokens[begin:end]])).logits[0, -1])
    found = sum(
        int(logits[said]) >= int(logits.max() - 0.1) for said, logits in zip(eager["best"], best)
    )
    assert len(eager["best"]) == len(best) == 2 + DECODE and found == len(best)
    assert len(eager["ttft_s"]) == 2 and len(eager["tpot_s"]) == DECODE


@pytest.mark.parametrize(
    "name, more",
    [
        ("mapped", {}),
        ("lru baseline", {}),
        ("lru baseline", {"slots": 11}),
        ("moelab", {}),
        ("moelab", {"budget": 1.0}),
        ("moelab", {"predictor": "auto"}),
        ("moelab", {"options": {"workers": 2, "bandwidth": 1e8}}),
    ],
)
def test_engines_agree_with_eager_bit_for_bit(place, eager, name, more):
    report = peers.run(name, options(place, **more))
    assert report["digest"] == eager["digest"] and report["best"] == eager["best"]
    assert report["digest"] != peers.run("mapped", options(place, tokens=[[1] * 17]))["digest"]
    if name != "mapped":
        assert 0 <= report["decode_hit_rate"] <= 1


def test_accelerate_agrees_with_eager(place, eager, tmp_path):
    pytest.importorskip("accelerate")
    assert (
        peers.run("accelerate", options(place, layers=1, offload=str(tmp_path)))["digest"]
        == eager["digest"]
    )


def test_the_lru_baseline_is_an_lru_of_experts(place):
    """Its hits are those of a list that is searched and reordered, on the same steps."""
    trace = place / "trace.json"
    peers.run("moelab", options(place, trace=str(trace)))
    report = peers.run("lru baseline", options(place, slots=9))
    kept, hits, total = [], 0, 0
    for number, forward in enumerate(json.loads(trace.read_text())["steps"]):
        for layer, experts in forward:
            keys = [(layer, expert) for expert, _ in sorted(experts)]
            found = [key for key in keys if key in kept]
            if number >= len(PROMPTS):
                hits, total = hits + len(found), total + len(keys)
            kept = (
                [key for key in kept if key not in found]
                + found
                + [k for k in keys if k not in found]
            )[-9:]
    assert report["decode_hit_rate"] == hits / total


def test_the_lru_baseline_refuses_fewer_slots_than_a_layer_has_experts(place):
    with pytest.raises(ValueError, match="7 slots; it needs one for each of a layer's 8 experts"):
        peers.run("lru baseline", options(place, slots=7))


def test_an_engine_is_a_process_whose_last_line_is_its_report(place, eager):
    done = subprocess.run(
        [sys.executable, "-m", "moelab.bench.peers", "mapped", json.dumps(options(place))],
        capture_output=True,
        text=True,
        check=True,
    )
    line = done.stdout.splitlines()[-1]
    assert json.loads(line)["digest"] == eager["digest"]


def test_what_is_not_installed_is_said(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert peers.run("llama.cpp", options(place, gguf="none"))["missing"].startswith(
        "not installed"
    )


def bench(place, reports):
    """A benchmark whose engines report what they are told to."""

    class Told(grid.Experiment):
        def report(self, arm, decode=None):
            name, options, _ = arm
            form = Path(options.get("store") or options.get("gguf", "")).stem
            if name == "llama.cpp":
                return reports[name + f" {form}" * (form != "model")]
            fast = options.get("options", {}).get("executor")
            return reports[f"{name} fast" + f", {form}" * (form != "raw") if fast else name]

    return Told(SPEC, place, 5, DECODE, 2, {})


def report(tpot, digest="same"):
    return {
        "ttft_s": [1.0, 0.5],
        "tpot_s": [tpot] * DECODE,
        "decode_read_bytes": 3e6 * DECODE,
        "load_s": 2.0,
        "peak_rss_bytes": 1e9,
        "digest": digest,
        "best": [1, 2],
        "limit": "no limit",
        "decode_major_faults": 6,
        "decode_hit_rate": 0.5,
    }


def test_tables_have_a_row_for_every_engine_and_a_reason_for_those_that_are_missing(place):
    told = {
        "moelab": report(0.1),
        "eager": report(0.2),
        "moelab fast": report(0.05, "other"),
        "moelab fast, bf12": report(0.025, "other"),
        "llama.cpp": {"result": "not installed (x)"},
    }
    made = bench(place, told)
    rows = engine.resident(made)["everything resident"]
    assert list(rows) == list(told) and rows["llama.cpp"] == {"result": "not installed (x)"}
    assert rows["moelab fast"]["output"] == "best token 100% as eager"
    assert (
        rows["moelab"]["TPOT s"] == 0.1
        and rows["moelab"]["÷ eager"] == 0.5
        and rows["moelab"]["MB a token"] == 3
    )
    assert rows["moelab"]["output"] == "= eager" and rows["moelab"]["2nd TTFT s"] == 0.5
    assert made.aims["everything resident: TPOT ÷ eager"] == {
        "measured": 0.5,
        "aim": "≤ 1.0",
        "met": True,
    }
    assert made.aims["resident, fast: TPOT of bf12 ÷ bf16"] == {
        "measured": 0.5,
        "aim": "≤ 0.85",
        "met": True,
    }
    assert rows["moelab"]["each token s"] == [0.1] * DECODE * 2
    made = bench(place, told | {"moelab": report(0.3, "other")})
    wrong = engine.resident(made)["everything resident"]["moelab"]
    assert wrong == {"result": "≠ EAGER: its speed does not count"}
    assert not made.aims["resident: outputs that differ"]["met"]


def test_a_process_that_fails_is_a_row_with_its_last_word(place):
    made = grid.Experiment(SPEC, place, 5, DECODE, 1, {"lru baseline": "/no/such/python"})
    assert made.report(("lru baseline", {}, None))["result"].startswith(
        "not installed (no interpreter"
    )
    assert made.report(("nobody", {}, None))["result"] == "failed: KeyError: 'nobody'"


def test_a_control_group_of_either_version_holds_the_limit_and_is_removed(tmp_path, monkeypatch):
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "cgroup.controllers").write_text("memory")
    monkeypatch.setattr(
        memory_limit,
        "_remove",
        lambda folder: [f.unlink() for f in folder.iterdir()] + [folder.rmdir()],
    )
    (tmp_path / "v1" / "memory").mkdir(parents=True)
    (tmp_path / "v1" / "memory" / "memory.limit_in_bytes").write_text("-1")
    for root, parent, file in (
        (tmp_path / "v2", "", "memory.max"),
        (tmp_path / "v1", "memory", "memory.limit_in_bytes"),
    ):
        with memory_limit.memory_limit(12345, root) as group:
            assert (
                group.procs.parent / file
            ).read_text() == "12345" and group.procs.parent.parent == root / parent
        assert not group.procs.parent.exists()


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_the_file_system_of_a_bench_that_was_ended_is_in_nobodys_way(ended_by, tmp_path):
    with machine.disk(tmp_path, 3e7) as (folder, words):
        pass
    if folder == tmp_path:
        pytest.skip(words)
    code = """if True:
        import argparse, os, pathlib, sys
        from moelab import bench
        from moelab.bench import machine
        def run():
            with machine.disk(pathlib.Path(sys.argv[1]), 3e7) as (folder, _):
                (folder / "kept").write_text("before")
                os.sync()
                os.kill(os.getpid(), int(sys.argv[2]))
        sys.modules["fake"] = argparse.Namespace(run=run, __doc__="Fake.")
        bench.BENCHES["fake"] = "fake"
        bench.main(argparse.Namespace(name="fake", options=["--busy"]))"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path, str(int(ended_by))])
    assert done.returncode == (128 + ended_by if ended_by == signal.SIGTERM else -ended_by)
    assert folder.is_mount() == (ended_by == signal.SIGKILL)
    with machine.disk(tmp_path, 3e7) as (folder, _):
        assert folder != tmp_path and (folder / "kept").read_text() == "before"
    assert not folder.is_mount()


def test_arguments_are_checked_before_anything_is_measured():
    with pytest.raises(ValueError, match="no section speed; there are resident, few_bits, limit"):
        engine.run(["speed"])
    with pytest.raises(ValueError, match="ENGINE=INTERPRETER"):
        engine.run(["memory"], python=["/usr/bin/python"])


def test_experts_are_unstacked_as_the_hub_has_them(place, tmp_path):

    import moelab

    stacked, apart = (
        moelab.open_model(path).state_dict()
        for path in (
            place / "model",
            external_engines.write_unstacked(place / "model", tmp_path / "hub"),
        )
    )
    assert stacked.keys() == apart.keys() and all(
        torch.equal(stacked[key], apart[key]) for key in stacked
    )


def test_gguf_holds_the_checkpoint(place, tmp_path):
    gguf = pytest.importorskip("gguf")
    import numpy as np
    from safetensors.torch import load_file

    file = external_engines.write_gguf(place / "model", tmp_path / "model.gguf")
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    (shard,) = (place / "model").glob("*.safetensors")
    fused = load_file(shard)["model.layers.1.mlp.experts.gate_up_proj"].view(torch.int16).numpy()
    up = written["blk.1.ffn_up_exps.weight"].data.view(np.int16).reshape(8, 32, 64)
    assert np.array_equal(up, fused[:, 32:]) and len(written) == 2 * 12 + 3


@pytest.mark.parametrize("kind, bits, steps", [("Q8_0", 8.5, 127), ("Q4_0", 4.5, 8)])
def test_gguf_in_few_bits_holds_the_checkpoint_rounded(place, tmp_path, kind, bits, steps):
    """gguf's own reader and dequantizer say what was written: no weight is further away than a step
    of its block, the widest weight's share; what is not multiplied stays as it was."""
    gguf = pytest.importorskip(
        "gguf", reason="gguf quantizes and reads; it comes with llama.cpp's Python packages"
    )
    import numpy as np
    from gguf.quants import dequantize

    exact, rounded = (
        {
            tensor.name: tensor
            for tensor in gguf.GGUFReader(
                external_engines.write_gguf(place / "model", tmp_path / name, name)
            ).tensors
        }
        for name in ("BF16", kind)
    )
    assert list(exact) == list(rounded) and {t.tensor_type.name for t in rounded.values()} == {
        "F32",
        kind,
    }
    for name, tensor in rounded.items():
        weights, truth = (dequantize(of.data, of.tensor_type) for of in (tensor, exact[name]))
        assert tensor.shape.tolist() == exact[name].shape.tolist() and weights.shape == truth.shape
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            assert np.array_equal(weights, truth) and ("norm" in name or "gate_inp" in name)
            continue
        assert 8 * tensor.n_bytes == bits * truth.size
        blocks = truth.reshape(-1, 32)
        step = np.abs(blocks).max(1, keepdims=True) / steps
        assert (np.abs(weights.reshape(-1, 32) - blocks) <= 1.01 * step).all()


def test_a_model_in_several_forms_beside_its_limit(tmp_path, here):
    how = {"prompt": 5, "decode": 3, "executor": "exact"}
    found = scale.run(SPEC, ("huffman", "bf12", "int4"), "60%", str(tmp_path / "here"), **how)
    conditions, rows, limits, turns = found.values()
    assert list(rows) == list(limits) == list(turns) == ["huffman", "bf12", "int4"]
    assert all(len(row["each token s"]) == 3 for row in rows.values())
    assert all(turn["MB read on demand"] > 0 for turn in turns.values())
    for name, fraction in (("bf12", 0.7), ("huffman", 0.6), ("int4", 0.2)):
        assert (
            fraction < limits[name]["stored fraction"] < fraction + 0.2
            and limits[name]["limit s"] > 0
        )
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [
        "bf12",
        "huffman",
        "int4",
    ]  # for next time


def test_joules_of_gpus_are_counted_where_nvml_tells_them(tmp_path, monkeypatch):
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 1500 * (handle + 1),
    )
    monkeypatch.setattr(peers, "RAPL", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert peers.joules() == 4.5
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("2000000")
    assert peers.joules() == 6.5
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert peers.joules() == 2
