"""Advice beside a naive count of bytes, and properties that hold for any model and machine."""

import inspect
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab import advise, names, open_model
from moelab.__main__ import build_parser
from moelab.advice import machine
from moelab.advice.assumed import LAYERS, SHARES, TEXTS, TOKENS, Assumed, assumed
from moelab.advice.model import FORMS, Model, find_model
from moelab.advice.question import Question
from moelab.base.specs import DeviceSpec, Figure, MoESpec
from moelab.base.table import duration
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.offloading.budget import RESERVE, kv_bytes
from tests.depth import depth
from tests.models import tiny

RATES = {"storage_read_gbs": 1.0, "memory_bandwidth_gbs": 20.0, "fp32_tflops": 1.0}
SIZES = {"vocab": 1000, "heads": 4, "kv_heads": 2, "head_dim": 64}
specs = st.tuples(*(st.integers(*ends) for ends in ((1, 8), (2, 32), (1, 4), (1, 20)))).map(
    lambda of: MoESpec(
        "drawn",
        "qwen3_moe",
        of[0],
        tuple(range(of[0])),
        of[1],
        min(of[1:3]),
        640,
        32 * of[3],
        **SIZES,
    )
)


def alike(spec):
    """Routing that prefers nothing, drawn layer by layer."""

    def draw(layers, lengths, n):
        scores = np.random.default_rng(n).random((sum(lengths), layers, spec.E))
        return np.argsort(scores, 2)[..., : spec.K]

    return draw


def ways(spec, memory, batch=1, **rates):
    figures = {name: Figure(of, "", "published", "") for name, of in (RATES | rates).items()}
    device = DeviceSpec("card", figures)
    model = Model("drawn", spec, 10**7, "drawn")
    routing = Assumed(spec, "alike", alike(spec), batch=batch, layers=1)
    return Question(model, device, memory, 64, batch, 0.0, True, routing).arithmetic()


def distinct_experts(spec, batch):
    """Mean of a step in which every sequence takes a token, layer by layer."""
    layers = 1
    tokens = alike(spec)(layers, [2 * TOKENS] * batch, 0).reshape(batch, -1, layers, spec.K)
    sizes = [
        len({int(e) for one in range(batch) for e in tokens[one, at, layer]})
        for at in range(2 * TOKENS)
        for layer in range(layers)
    ]
    return sum(sizes) / len(sizes)


@given(specs, st.integers(RESERVE, RESERVE + 2 * 10**9), st.sampled_from([1, 3]))
def test_times_are_a_naive_count_of_bytes(spec, memory, batch):
    for way in ways(spec, memory, batch=batch):
        bits = FORMS.get(way.form, 16)
        expert = round(3 * spec.H * spec.I * bits / 8)
        token = 0.0
        distinct = distinct_experts(spec, batch)
        for _ in range(spec.L):
            touched = distinct * expert
            token += max(touched * (1 - way.hit_rate) / 1e9, touched / 20e9)
        dense = max(10**7 - spec.vocab * spec.H * 2, 0) + kv_bytes(spec, 64 * batch)
        assert way.tpot == pytest.approx(token + dense / 20e9)
        assert way.between[0] <= way.tpot <= way.between[1]
        assert way.memory <= memory and 0 <= way.hit_rate <= 1 and way.budget <= way.experts
        assert way.resident == (way.hit_rate == 1 and way.budget == way.experts)


@given(specs, st.integers(RESERVE, RESERVE + 10**9), st.integers(0, 10**9))
def test_more_memory_or_a_faster_disk_is_never_slower(spec, memory, more):
    richer, quicker = (
        {way.form: way for way in found}
        for found in (ways(spec, memory + more), ways(spec, memory, storage_read_gbs=2.0))
    )
    for way in ways(spec, memory):
        for other in (richer[way.form], quicker[way.form]):
            assert other.tpot <= way.tpot * (1 + 1e-12) and other.ttft <= way.ttft * (1 + 1e-12)


@pytest.mark.parametrize("name", depth(["GPT-OSS-20B", "DeepSeek-V2-Lite"], names("model")))
def test_a_card_needs_no_weights_and_what_is_printed_can_be_run(name):
    found = advise(name, "2000GB", device="m2-max", loss="any")
    assert found.best.resident and found.best == min(found.ways, key=lambda way: way.tpot)
    for command in found.commands:
        words = command.split()[1:]
        build_parser(words).parse_args(words)
    given = {key: value for _, _, options in found.steps[-1:] for key, value in options.items()}
    inspect.signature(open_model).bind(found.steps[-1][1], **given)
    assert f"{duration(found.best.tpot)} a token" in str(found) and "modelled" in str(found)


def test_lossless_is_advised_unless_loss_is_allowed():
    exact, lossy = (
        advise("Qwen3-30B-A3B", "18GB", device="m2-max", loss=loss) for loss in (0, "any")
    )
    assert exact.best.form == "bf12" and not exact.best.resident
    assert not lossy.best.lossless and lossy.best.tpot < exact.best.tpot
    assert any("loss unknown" in what for what, _ in exact.more)
    assert "loss unknown" in str(lossy) and exact.best.memory == 18 * 10**9


def test_a_config_alone_is_enough_and_loads_no_torch(tmp_path):
    code = (
        "import sys, moelab; print(moelab.advise('Qwen3-30B-A3B', '16GB')); assert 'torch' not "
        "in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "bf12" in done.stdout, done.stderr


def test_a_config_without_weights_is_enough_and_a_card_stands_for_its_hub_id(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert find_model("Qwen/Qwen3-30B-A3B") == find_model("Qwen3-30B-A3B")
    tiny.save("qwen3_moe", tmp_path / "model")
    whole = find_model(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    found = find_model(tmp_path / "model")
    assert found.folder is None and found.spec == whole.spec and found.most == whole.most
    assert found.how == "estimated from its geometry"


def offline(*_, **__):
    raise ConnectionError


@pytest.mark.parametrize(
    "options, words",
    [
        ({"memory": "1GB"}, "does not fit 1 GB"),
        ({"memory": "50%"}, "whole process"),
        ({"model": "qwen3-30b"}, "Did you mean 'Qwen3-30B-A3B'"),
        ({"memory": "lots"}, "the budget is .lots."),
        ({"model": None, "context": 2049}, "at most 2,048"),
        ({"device": "no-such-card"}, "there is no card"),
        ({"device": "trn2"}, "moelab neuron plan Qwen3-30B-A3B"),
        ({"model": "no/such/folder"}, "no checkpoint folder"),
        ({"model": "some-where/else"}, "cannot be had"),
        ({"verify": True}, "only a model whose weights are here"),
    ],
)
def test_bad_input(options, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        advise(**{"model": "Qwen3-30B-A3B", "memory": "20GB", "device": "m2-max"} | options)


def test_a_calibration_says_how_popular_experts_are(tmp_path):
    import torch

    from moelab.calibration import Calibration

    spec = find_model("Qwen3-30B-A3B").spec
    counts = torch.zeros(2, spec.L, spec.E, dtype=torch.int64)
    counts[:, :, : spec.K] = 5  # the same few experts always
    Calibration(counts, (5, 5), spec, "x").save(tmp_path / "c.safetensors")
    found = advise("Qwen3-30B-A3B", "12GB", device="m2-max", calibration=tmp_path / "c.safetensors")
    assert found.best.hit_rate > 0.999 and "as the calibration counted" in " ".join(
        str(found).split()
    )
    with pytest.raises(ValueError, match="another than"):
        advise("Mixtral-8x7B", "60GB", device="m2-max", calibration=tmp_path / "c.safetensors")


def test_what_a_cache_finds_is_what_the_policy_finds_of_the_tokens():
    """Beside every text and share, played token by token."""
    spec = find_model("OLMoE-1B-7B").spec
    own = assumed(spec)
    assert own.others == () and "OLMoE-1B-7B" in own.words
    for share in (0.05, 0.3, 0.75):
        rates = []
        for ids in own.texts(LAYERS, [2 * TOKENS]):
            residency = Residency(LAYERS, spec.E, Pools(F=round(share * LAYERS * spec.E)))
            hits = 0
            for at, token in enumerate(ids):
                for layer, experts in enumerate(token):
                    step = residency.begin(layer, dict.fromkeys(experts.tolist(), 1))
                    hits += (at >= TOKENS) * (spec.K - len(step.loads))
            rates.append(hits / (TOKENS * LAYERS * spec.K))
        low, middle, high = own.found(share)
        assert middle == pytest.approx(sorted(rates)[TEXTS // 2])
        assert low == pytest.approx(min(rates) - own.margin)
        assert high == pytest.approx(min(max(rates) + own.margin, 1))
    assert own.found(0) == (0, 0, 0) and own.found(1) == (1, 1, 1)
    middles = [own.found(share)[1] for share in (0, *SHARES, 1)]
    assert middles == sorted(middles)


def test_a_model_without_a_fit_has_the_range_of_all_families():
    other = assumed(find_model("Phi-3.5-MoE").spec)
    assert len(other.texts(1, [2])) == TEXTS + len(other.others) and len(other.others) > 1
    found = advise("Phi-3.5-MoE", "30GB", device="m2-max")
    own = advise("OLMoE-1B-7B", "6GB", device="m2-max")
    for advice in (found, own):
        least, most = advice.best.between
        assert least < advice.best.tpot < most and advice.asked.assumed.words in " ".join(
            str(advice).split()
        )


def test_a_trace_is_the_routing_that_is_asked_about(tmp_path):
    """A text that always has the same experts is found in memory, whatever the model's fit says."""
    spec = find_model("GPT-OSS-20B").spec
    trace = made_trace(spec, T=300)
    asked = {"memory": "7GB", "device": "m2-max"}
    path = trace.save(tmp_path / "mine.safetensors")
    for mine in (trace, path):
        found = advise("GPT-OSS-20B", **asked, trace=mine)
        assert found.best.hit_rate == 1 and found.best.between[0] == found.best.between[1]
    assert "mine.safetensors (300 tokens)" in " ".join(str(found).split())
    assert found.best.tpot < advise("GPT-OSS-20B", **asked).best.tpot
    with pytest.raises(ValueError, match="32 experts a layer"):
        advise("Mixtral-8x7B", "60GB", device="m2-max", trace=trace)
    with pytest.raises(ValueError, match="give no calibration"):
        advise("GPT-OSS-20B", **asked, trace=trace, calibration=tmp_path / "none")


def made_trace(spec, T):
    import torch

    from moelab.trace import DECODE, RoutingTrace

    zeros = torch.zeros(T, dtype=torch.int32)
    ids = torch.arange(spec.K, dtype=torch.int16).expand(T, spec.L, spec.K).contiguous()
    weights = torch.full(ids.shape, 1 / spec.K)
    phase = torch.full((T,), DECODE, dtype=torch.uint8)
    positions = torch.arange(T, dtype=torch.int32)
    return RoutingTrace(
        ids, weights, phase, zeros, positions, zeros.clone(), spec, "somewhere else"
    )


def test_a_quiet_machine_is_measured_once_and_a_busy_one_again(tmp_path, monkeypatch):
    """Of two times that others disturbed, the less disturbed one stays."""
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path))
    rates = iter([(1, 9, 1.5), (5, 2, 0.5), (3, 3, 0.9), (4, 4, 0.1)])  # disk, memory, cores
    names = "storage_read_gbs", "memory_bandwidth_gbs"

    def fake(work):
        disk, memory, others = next(rates)
        figures = dict(zip((*names, "fp32_tflops"), (disk, memory, 1.0)))
        card = DeviceSpec("m", {n: Figure(of, "", "measured", "") for n, of in figures.items()})
        return {"card": asdict(card)}, others

    monkeypatch.setattr(machine, "watched", fake)
    monkeypatch.setattr(machine, "why_busy", lambda: None)
    found = [machine.here(tmp_path) for _ in range(5)]
    assert [tuple(of[name] for name in names) for of in found] == [
        (1, 9),
        (5, 2),
        (5, 2),
        (4, 4),
        (4, 4),
    ]
    assert found[-1]["others_cores"] == 0.1 and "memory_gb" in found[-1].figures
