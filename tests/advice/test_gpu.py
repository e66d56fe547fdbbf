"""Advice for a GPU beside a CPU's memory: against sums over every set of experts that may miss, and
whether what is printed can be run."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import advise
from moelab.__main__ import build_parser
from moelab.advice import gpu, gpu_machine
from moelab.advice.assumed import assumed
from moelab.advice.model import Model, find_model
from moelab.api import OpenOptions
from moelab.base.specs import DeviceSpec, Figure, MoESpec
from moelab.bench.synthesize import synthesize
from moelab.cache.residency import SPARE
from moelab.fast.token import FAMILIES
from moelab.offloading.budget import RESERVE, kv_bytes
from moelab.offloading.offload import host_slots
from moelab.offloading.slots import Sizes, divide
from moelab.simulation.costs import MachineRates
from moelab.store.layout import ExpertStore
from tests.advice.test_advise import SIZES, Assumed, alike

RATES = {"memory": 100e9, "link": 10e9, "host": 20e9}
TRIP = 1e-6


def card(**more):
    figures = {
        "memory_gb": 100,
        "memory_bandwidth_gbs": RATES["memory"] / 1e9,
        "link_bandwidth_gbs": RATES["link"] / 1e9,
        "host_memory_bandwidth_gbs": RATES["host"] / 1e9,
        "bf16_tflops": 10,
        "host_trip_ms": 1e3 * TRIP,
        "graph_launch_ms": 0.02,
        "layer_ms": 0.1,
        "step_ms": 0.3,
    } | more
    return DeviceSpec("a GPU", {n: Figure(v, "", "assumed", "") for n, v in figures.items()})


def asked(K=2, memory=3 * 10**8, host=10**10, model_type="qwen3_moe", **more):
    spec = MoESpec("drawn", model_type, 3, (0, 1, 2), 16, K, 640, 640, **SIZES)
    model = Model("drawn", spec, 10**7, "drawn")
    routing = Assumed(spec, "alike", alike(spec), layers=1)
    return gpu.OnGpu(
        model, card(**more), RESERVE + memory, 64, 1, 0.0, True, routing, host=RESERVE + host
    )


def waiting(m, expert, threads):
    """The best of every number of experts that are sent while the others are computed in place."""
    times = []
    for sent in range(m + 1) if threads else (m,):
        there = done = 0.0
        for _ in range(sent):
            there += expert / RATES["link"]
            done = max(done, there) + expert / RATES["memory"]
        far = TRIP * (sent < m) + (m - sent) * expert / RATES["host"]
        times.append(max(done, far))
    return min(times)


@given(st.integers(1, 4), st.integers(5 * 10**7, 2 * 10**8), st.booleans())
def test_a_token_is_launches_reads_and_the_better_split_of_what_misses(K, memory, alone):
    one = asked(K, memory, model_type="qwen3_moe" if alone else "phimoe")
    for way in one.arithmetic():
        spec, hit = one.model.spec, way.hit_rate
        expert = one.model.expert_bytes(way.form)
        token = 2e-5 + spec.L * (1e-4 + 3e-4 * (hit < 1 and not alone))
        token += (10**7 - spec.vocab * spec.H * 2 + kv_bytes(spec, 64)) / RATES["memory"]
        for misses in product((False, True), repeat=K):
            m = sum(misses)
            likely = (1 - hit) ** m * hit ** (K - m)
            found = (K - m) * expert / RATES["memory"] + waiting(m, expert, alone)
            token += spec.L * likely * found
        assert way.tpot == pytest.approx(token, rel=1e-6)
        assert way.between[0] <= way.tpot <= way.between[1]
        assert way.device == "cuda" and way.memory <= one.memory
        assert way.pinned <= one.host - RESERVE and bool(way.pinned) != way.resident
        assert bool(way.hybrid) == (alone and not way.resident)


@pytest.mark.parametrize("faster", ["link", "host", "memory"])
def test_more_memory_or_a_faster_part_is_never_slower(faster):
    name = {"link": "link", "host": "host_memory", "memory": "memory"}[faster] + "_bandwidth_gbs"
    usual, quick, rich = (
        {way.form: way for way in one.arithmetic()}
        for one in (asked(), asked(**{name: 2e-9 * RATES[faster]}), asked(memory=4 * 10**8))
    )
    for form, way in usual.items():
        assert quick[form].tpot <= way.tpot * (1 + 1e-9) >= rich[form].tpot
        assert rich[form].ttft <= way.ttft


def test_only_architectures_that_have_them_are_promised_whole_tokens():
    families = {
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Model")).lower()
        for name in FAMILIES
    }
    assert {*gpu.ALONE} == families


@pytest.mark.parametrize("name", ["rtx-4070-laptop-8gb", "rtx-4090", "h200-141gb"])
def test_what_is_printed_can_be_run(name, monkeypatch):
    """By the command line and by `open_model`: no option is unknown, or excludes another."""
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # as if a GPU were here
    found = advise("Qwen3-30B-A3B", "auto", host="128GB", device=name, loss="any")
    assert found.best.resident == (name != "rtx-4070-laptop-8gb")
    for way in found.ways:
        OpenOptions(**way.options(None)).require_possible()
    for command in found.commands:
        words = command.split()[1:]
        build_parser(words).parse_args(words)
    assert "--device cuda" in found.commands[-1] and "device='cuda'" in found.python
    text = " ".join(str(found).split())
    assert "modelled" in text and "of the CPU's memory, which is read at" in text
    assert found.best.between[0] < found.best.tpot < found.best.between[1]


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"memory": "24GB", "host": "8GB"},
            "8 GB of the CPU's .--host.* and 47.4 GB for all of them",
        ),
        ({"memory": "3GB"}, "at least 4.13 GB .--memory., and 47.4 GB for all of them"),
        ({"memory": "60GB"}, "RTX 4090, which has 24 GB"),
        ({"memory": "20GB", "device": "m2-max", "host": "8GB"}, "memory beside a GPU"),
        ({"host": "50%"}, "memory is '50%'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(options, words):
    with pytest.raises(ValueError, match=words):
        advise(**{"model": "Qwen3-30B-A3B", "device": "rtx-4090"} | options)


def test_two_sequences_ask_the_host_between_layers():
    one, two = (advise("Qwen3-30B-A3B", "20GB", batch=n, device="rtx-4090").best for n in (1, 2))
    assert one.hybrid and not two.hybrid and two.tpot > one.tpot


def test_a_gpu_of_this_machine_is_measured_and_stands_beside_its_cpu(tmp_path, monkeypatch):
    """Measured on whatever torch computes with here; without a GPU, what that gave stands for one."""
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path))
    monkeypatch.setattr(gpu_machine, "there", lambda: True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(gpu_machine, "SIZE", 1 << 20)
    monkeypatch.setattr(gpu_machine, "SIDE", 64)
    found = gpu_machine.measured(device, "a GPU")
    assert gpu.is_gpu(found) and MachineRates.of(found) == MachineRates.of(found, reached=0)
    kinds = {name: of.kind for name, of in found.figures.items()}
    assert kinds.pop("layer_ms") == kinds.pop("step_ms") == kinds.pop("host_trip_ms") == "assumed"
    assert {*kinds.values()} == {"measured"}
    monkeypatch.setattr(gpu_machine, "here", lambda: card(host_memory_gb=64))
    both = advise("Qwen3-30B-A3B", "60GB")
    assert {way.device for way in both.ways} == {"cpu", "cuda"}
    assert both.best == next(way for way in both.ways if way.lossless)
    rows = both.table()
    assert {row["on"] for row in rows} == {"CPU", "GPU"}
    only = advise("Qwen3-30B-A3B", "2GB", host="60GB")  # too little for the CPU alone
    assert {way.device for way in only.ways} == {"cuda"}
    assert any("does not fit 2 GB" in note for note in only.notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_none_is_advised():
    with pytest.raises(ValueError, match="no GPU here"):
        advise("Qwen3-30B-A3B", "24GB", device="cuda")


def test_who_is_computed_in_place_does_not_come_and_is_not_found():
    routing, K = assumed(find_model("OLMoE-1B-7B").spec), 8
    for share in (0.15, 0.5):
        every, some, none = (
            routing.found(share, tuple(min(m, most) for m in range(K + 1))) for most in (K, 2, 0)
        )
        assert min(every[1], some[1]) > none[1] > 0
    assert routing.found(1, (0,) * 9) == (1, 1, 1)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_the_cpus_memory_that_is_told_holds_what_is_not_on_the_gpu(tmp_path, share):
    """As the engine divides it: nothing is left for the disk."""
    spec = MoESpec("s", "qwen3_moe", 4, (0, 1, 2, 3), 16, 2, 128, 128, **SIZES)
    store = ExpertStore(synthesize(tmp_path / "s", spec, codec="raw"))
    found = find_model(store.folder)
    budget = round(share * found.spec.experts_bytes)
    asked = gpu.OnGpu(found, card(), 0, 64, 1, 0.0, True, assumed(spec), host=10**12)
    (way,) = replace(asked, memory=asked.fixed + budget).arithmetic()[:1]
    sizes, L, E, K = Sizes.of(store, None), spec.L, spec.E, spec.K
    pools, _ = divide(way.budget, sizes, L, E, None, "model", 2 * K - 2, None, 0)
    stay = pools.F - min(-(-pools.F // SPARE), L * K)
    told = int(way.options("raw")["host"].removesuffix("MB")) * 10**6
    every = host_slots(store, sizes, L * E * Sizes.of(store, True).full, stay)
    assert host_slots(store, sizes, told, stay) == every
