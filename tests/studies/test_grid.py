"""The experiment of the benches of tokens, on a tiny model: engines agree bit for bit, no speed
without the right output, every figure beside its limit, what is missing is said."""

import random
import signal
import subprocess
import sys
from shutil import rmtree

import pytest
import torch

from moelab.base.specs import MoESpec
from moelab.bench import memory_limit
from moelab.bench.synthesize import synthesize
from moelab.checkpoint.convert import convert
from moelab.store.layout import ExpertStore, run
from notebooks.studies import end_to_end, engine, external_engines, grid, peers, scale
from notebooks.studies.disk import disk
from notebooks.studies.end_to_end import BASE, together
from notebooks.studies.grid import Experiment, divergence

SPEC = MoESpec(
    "tiny", "qwen3_moe", 2, (0, 1), 8, 2, 64, 32, vocab=96, heads=2, kv_heads=1, head_dim=32
)
PROMPT, DECODE = 5, 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    model = synthesize(folder / "model", SPEC)
    for codec in ("huffman", "bf12", "raw"):
        convert(model, folder / codec, codec)
    return folder


def options(place, **more):
    rng = random.Random(0)
    return {
        "model": str(place / "model"),
        "tokens": [[rng.randrange(96) for _ in range(PROMPT + DECODE)]],
        "prompt": PROMPT,
        "store": str(place / "huffman"),
        "budget": 0.5,
    } | more


def cached(place, slots):
    """The options of the LRU baseline with memory for so many experts."""
    raw = ExpertStore(place / "raw")
    return options(place, store=str(raw.folder), budget=slots * run(raw.entries(0, 0), "both")[1])


@pytest.fixture(scope="module")
def eager(place):
    return peers.run("eager", options(place))


def test_eager_is_what_transformers_computes(place, eager):
    """The oracle feeds each whole prefix to a model of its own, without a cache of keys and
    values."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    (tokens,) = options(place)["tokens"]
    assert len(eager["best"]) == 1 + DECODE
    for end, said in zip(range(PROMPT, len(tokens) + 1), eager["best"]):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:end]])).logits[0, -1]
        assert int(logits[said]) >= int(logits.max() - 0.1)
    assert len(eager["tpot_s"]) == DECODE


@pytest.mark.parametrize(
    "name, more",
    [
        ("mapped", {}),
        ("moelab", {}),
        ("moelab", {"budget": 1.0}),
        ("moelab", {"predictor": "auto"}),
        ("moelab", {"options": {"workers": 2, "bandwidth": 1e8}}),
        ("accelerate", {"layers": 1}),
    ],
)
def test_engines_agree_with_eager_bit_for_bit(place, eager, name, more, tmp_path):
    more = {**more, "offload": str(tmp_path)}
    report = peers.run(name, options(place, **more))
    assert report["digest"] == eager["digest"] and report["best"] == eager["best"]
    assert report["digest"] != peers.run("mapped", options(place, tokens=[[1] * 8]))["digest"]
    if name == "moelab":
        assert 0 <= report["decode_hit_rate"] <= 1


def test_the_lru_baseline_is_an_lru_of_experts(place, eager):
    """Its hits are those of a list that is searched and reordered, on the same steps."""
    steps = peers.run("moelab", options(place))["replay"]["steps"]
    report = peers.run("lru baseline", cached(place, 9))
    assert report["digest"] == eager["digest"] and report["best"] == eager["best"]
    kept, hits, total = [], 0, 0
    for number, forward in enumerate(steps):
        for layer, experts in forward:
            keys = [(layer, expert) for expert, _ in sorted(experts)]
            found = [key for key in keys if key in kept]
            if number:
                hits, total = hits + len(found), total + len(keys)
            missing = [key for key in keys if key not in found]
            kept = ([key for key in kept if key not in found] + found + missing)[-9:]
    assert report["decode_hit_rate"] == hits / total


def test_what_an_engine_refuses_is_its_last_word(place, eager):
    with pytest.raises(ValueError, match="7 slots; it needs one for each of a layer's 8 experts"):
        peers.run("lru baseline", cached(place, 7))
    made = grid.Experiment(SPEC, place, PROMPT, DECODE, 1, tokens=options(place)["tokens"])
    assert made.report(("mapped", {}, 10**10))["digest"] == eager["digest"]
    assert made.report(("nobody", {}, None))["result"] == "failed: KeyError: 'nobody'"


@pytest.mark.parametrize(
    "sign, parent, file",
    [
        ("cgroup.controllers", "", "memory.max"),
        ("memory/memory.limit_in_bytes", "memory", "memory.limit_in_bytes"),
    ],
)
def test_a_control_group_holds_the_limit_and_is_removed(sign, parent, file, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_limit, "_remove", rmtree)
    (tmp_path / sign).parent.mkdir(exist_ok=True)
    (tmp_path / sign).write_text("memory")
    with memory_limit.memory_limit(12345, tmp_path) as group:
        assert (group.procs.parent / file).read_text() == "12345"
        assert group.procs.parent.parent == tmp_path / parent
    assert not group.procs.parent.exists()


ENDS = """
import os
from pathlib import Path
from notebooks.studies.disk import disk

def run():
    with disk(Path({folder!r}), 3e7) as (folder, _):
        (folder / "kept").write_text("before")
        os.sync()
        os.kill(os.getpid(), {number})
"""


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_the_file_system_of_a_bench_that_was_ended_is_in_nobodys_way(ended_by, tmp_path):
    with disk(tmp_path, 3e7) as (folder, words):
        pass
    if folder == tmp_path:
        pytest.skip(words)
    own = tmp_path / "ends_early.py"
    own.write_text(ENDS.format(folder=str(tmp_path), number=int(ended_by)))
    done = subprocess.run([sys.executable, "-m", "moelab", "bench", str(own), "--busy"])
    assert done.returncode == (128 + ended_by if ended_by == signal.SIGTERM else -ended_by)
    assert folder.is_mount() == (ended_by == signal.SIGKILL)
    with disk(tmp_path, 3e7) as (folder, _):
        assert folder != tmp_path and (folder / "kept").read_text() == "before"
    assert not folder.is_mount()


@pytest.mark.parametrize("kind, bits, steps", [("Q8_0", 8.5, 127), ("Q4_0", 4.5, 8)])
def test_gguf_in_few_bits_holds_the_checkpoint_rounded(place, tmp_path, kind, bits, steps):
    """gguf's own reader and dequantizer say what was written: no weight is further away than a step
    of its block, the widest weight's share; what is not multiplied stays as it was."""
    gguf = pytest.importorskip("gguf")
    import numpy as np
    from gguf.quants import dequantize

    def written(kind):
        path = external_engines.write_gguf(place / "model", tmp_path / kind, kind)
        return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    exact, rounded = written("BF16"), written(kind)
    assert list(exact) == list(rounded)
    assert {tensor.tensor_type.name for tensor in rounded.values()} == {"F32", kind}
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


ARMS = ("huffman", "prefetch", "huffman + prefetch", "mxfp4 + fast")


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    return tmp_path_factory.mktemp("forms")


def ends(folder, arms=(), rates=(0,), **how):
    """bench end_to_end, small, in this process."""
    given = {"contexts": (5,), "decode": 3, "spec": SPEC, "here": True, "alone": True} | how
    return end_to_end.run(arms, (0.75,), rates, folder=folder, **given)


def test_a_table_for_each_budget_and_rate_has_every_configuration(forms):
    found = ends(forms, ARMS, (100, 0), alone=False)
    titles = [f"75% of experts, {rate}" for rate in ("100 MB/s", "the disk as it is")]
    assert list(end_to_end.titled(found)) == titles
    others = {"LRU baseline", "transformers mmap", "accelerate disk"}
    for title, more in zip(titles, (set(), others)):
        rows = found[title]
        assert set(rows) == {BASE, *ARMS} | more
        for name in (BASE, *ARMS):
            row = rows[name]
            assert min(row["TPOT s"], row["TTFT s"], row["TPOT limit s"]) > 0
            if name == "mxfp4 + fast":
                assert row["KL"] > 0 and row["output"].startswith("best token")
            else:
                assert row["KL"] == 0 and row["output"] == "= eager"
        assert rows[BASE]["÷ on demand"] == 1 and rows[BASE]["simulated TPOT s"] > 0
        assert "simulated TPOT s" not in rows["prefetch"]
    pairs = found["together (two sources)"]
    assert set(pairs) == {f"{title}: huffman + prefetch" for title in titles}


def test_executed_predictions_have_a_divergence_and_serial_loading_has_none(forms):
    rows = ends(forms, ("serial", "speculate", "huffman + speculate"))
    rows = rows["75% of experts, the disk as it is"]
    assert rows["serial"]["KL"] == 0 and rows["serial"]["output"] == "= eager"
    for name in ("speculate", "huffman + speculate"):
        assert rows[name]["KL"] > 0 and rows[name]["output"].startswith("best token")
        assert rows[name]["TPOT s"] > 0 and "simulated TPOT s" not in rows[name]


def test_a_wrong_output_has_no_speed(forms, monkeypatch):
    def wrong(name, options):
        report = right(name, options)
        return report | ({"digest": "another"} if options.get("predictor") else {})

    right = peers.run
    monkeypatch.setattr(grid.peers, "run", wrong)
    rows = ends(forms, ("prefetch",))["75% of experts, the disk as it is"]
    assert rows["prefetch"] == {"result": "≠ EAGER: its speed does not count"}
    assert rows[BASE]["output"] == "= eager"


def test_contexts_and_batches_are_axes_and_what_is_done_is_kept(forms, monkeypatch):
    def stops(bench, arm, decode=None):
        if (bench.prompt, len(bench.tokens or []), arm[0]) == (6, 1, "moelab"):
            raise KeyboardInterrupt
        return right(bench, arm, decode)

    right = Experiment.report
    monkeypatch.setattr(Experiment, "report", stops)
    found = ends(forms, ("fast",), contexts=(3, 6), batches=(1, 2))
    sections = end_to_end.titled(found)
    title = "75% of experts, the disk as it is, context 3, batch"
    assert list(sections) == [f"{title} 1", f"{title} 2"]
    assert found["conditions"]["stopped"] == "after 2 tables"
    for rows in sections.values():
        assert rows[BASE]["output"] == "= eager" and 0 <= rows["fast"]["KL"] < 1e-2
    assert rows[BASE]["tokens/s"] > 1 / max(rows[BASE]["each token s"])  # two at a time


def test_your_own_model_by_a_text_of_its_own_tokenizer(tmp_path):
    from moelab.base.files import small_model

    found = ends(tmp_path, model=str(small_model()))
    assert found["conditions"]["tokens"].startswith("of a text")
    assert found["75% of experts, the disk as it is"][BASE]["output"] == "= eager"
    with pytest.raises(ValueError, match="another model's forms"):
        end_to_end._use_model(tmp_path, tmp_path, tmp_path)


def test_other_engines_and_what_is_not_installed_are_rows(tmp_path):
    found = engine.run(["resident"], tmp_path, 1, 5, 2, spec=SPEC, here=True)
    rows = found["everything resident"]
    assert list(rows) == ["moelab", "eager", "moelab fast", "moelab fast, bf12", "llama.cpp"]
    assert rows["moelab"]["output"] == "= eager" and rows["eager"]["÷ eager"] == 1
    assert rows["moelab fast"]["output"].startswith("best token")
    few = found["everything resident in few bits"]
    assert few["moelab fast, int4, dense too"]["÷ moelab fast"] > 0


def test_a_model_in_several_forms_beside_its_limit(tmp_path):
    how = {"prompt": 5, "decode": 3, "executor": "exact", "here": True}
    found = scale.run(SPEC, ("huffman", "bf12", "int4"), "60%", str(tmp_path), **how)
    conditions, rows = found.values()
    assert list(rows)[::2] == ["huffman", "bf12", "int4"]
    for name, fraction in (("bf12", 0.7), ("huffman", 0.6), ("int4", 0.2)):
        assert fraction < rows[name]["stored fraction"] < fraction + 0.2
        assert rows[name]["TPOT limit s"] > 0 and rows[f"{name}, prefetching"][f"÷ {name}"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf12", "huffman", "int4"]


def test_the_divergence_is_torchs():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)) * 50
    other = logits + torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    log_p, log_q = (of.double().log_softmax(1) for of in (logits, other))
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    assert divergence(other.numpy(), logits.numpy()) == pytest.approx(expected.item())
    assert divergence(logits.numpy(), logits.numpy()) == 0


TOKENS = [0.5, 0.9, 1.0, 1.0, 1.1, 2.0]  # times the median
MEDIANS = {BASE: 8.0, "huffman": 5.0, "prefetch": 6.0, "huffman + prefetch": 4.0, "bf12": 6.0}
MEDIANS |= {"fast": 7.0, "bf12 + fast": 3.0, "mxfp4 + fast": 2.0, "llama.cpp": 1.0}


def row(seconds):
    tokens = {"TPOT s": seconds, "each token s": [seconds * of for of in TOKENS]}
    return tokens | {"MB a token": 1.0, "stall ms": seconds, "result": "no limit"}


@pytest.mark.parametrize("arm", ["hufman", "huffman + bf12"])
def test_configurations_that_make_no_sense_are_refused(arm):
    with pytest.raises(ValueError, match="a configuration is|exclude each other"):
        end_to_end.options_of(arm)


def test_two_techniques_together_are_compared_with_each_alone():
    rows = {name: row(seconds) for name, seconds in MEDIANS.items()}
    ((title, found),) = together({"x": rows}).items()
    # bf12 and fast are of one source; mxfp4 alone is absent
    assert title == "x: huffman + prefetch"
    assert list(found.values())[:4] == [0.8, 0.8, 0.8, True]
    assert [found[f"stall ms, {name}"] for name in ("huffman", "prefetch", "both")] == [5, 6, 4]
    rows["huffman"]["each token s"] = [2.0, 4.5, 5, 5, 5, 10]  # one token in six is faster
    (once,) = together({"x": rows}).values()
    assert once == found | {"to": 1.0, "beats each": False}


def test_a_folder_keeps_its_routing(tmp_path):
    """Fitted routing is that of a sequence, uniform routing that of random tokens; neither is taken
    for the other."""

    def bench(folder, routing):
        made = Experiment(SPEC, tmp_path / folder, PROMPT, DECODE, 1, routing=routing, here=True)
        made.prepare([])
        return made

    assert bench("fitted", "fitted").tokens != bench("uniform", "uniform").tokens
    for folder, routing in (("fitted", "uniform"), ("uniform", "fitted")):
        with pytest.raises(ValueError, match="give another folder"):
            bench(folder, routing)
