"""What runs on a Mac only, with Core ML's classes imitated: probes, placements, the doctor, timing,
energy."""

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("coremltools")

import moelab
from moelab.ane import doctor, opening
from moelab.ane.coreml.convert import convert_model
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.coreml.package import read_package
from moelab.ane.device import mac
from moelab.ane.parity import parity
from moelab.ane.predict import DeviceModel, Rates
from notebooks.studies import ane_micro
from notebooks.studies.ane_mac import run, time_prefill
from notebooks.studies.ane_micro import measure
from tests.ane import fake_mac
from tests.ane.test_backends import CONTEXT, make_plan, prompt
from tests.models import tiny

COMMAND = (sys.executable, str(Path(fake_mac.__file__)))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    checkpoint = tiny.save("qwen3_moe", root / "tiny", num_hidden_layers=1, mlp_only_layers=[])
    plan = make_plan(moelab.open_model(checkpoint).spec)
    return convert_model(checkpoint, root / "ane", plan, context=CONTEXT)


def machine(system, processor, version):
    """The module `platform` there."""
    return SimpleNamespace(
        node=lambda: "a Mac",
        system=lambda: system,
        machine=lambda: processor,
        mac_ver=lambda: (version, ("", "", ""), ""),
    )


@pytest.fixture
def on_mac(monkeypatch):
    for module in (mac, doctor):
        monkeypatch.setattr(module, "platform", machine("Darwin", "arm64", "15.1"))


@pytest.fixture
def fakes(monkeypatch, on_mac):
    """Core ML in this process, and `probe` without another one: starting Python takes seconds."""
    fake_mac.install(monkeypatch.setattr)
    monkeypatch.setattr(fake_mac, "behaviour", "")

    monkeypatch.setattr(doctor, "probe", lambda path, key, timeout: mac.examine(path, key))


@pytest.mark.parametrize(
    "here", [("Linux", "x86_64", ""), ("Darwin", "x86_64", "15.0"), ("Darwin", "arm64", "14.7")]
)
def test_elsewhere_it_says_what_it_would_take(monkeypatch, here):
    monkeypatch.setattr(mac, "platform", machine(*here))
    with pytest.raises(
        RuntimeError, match="(?s)ane doctor needs a Mac.*macOS 15.*pip install.*ane lint"
    ):
        mac.require_mac("ane doctor")


def test_a_probe_runs_in_a_process_of_its_own(converted, monkeypatch):
    monkeypatch.setenv("FAKE", "softmax,matmul")
    path = converted.folder / "layers/000/attention.mlpackage"
    found = mac.probe(path, converted.packages[0]["checksum"], command=COMMAND)
    fallen = "softmax", "matmul"
    counts = Counter(op.op_type for op in read_package(path).ops)
    on = {op: "cpu" if op in fallen else "ane" for op in counts}
    assert {(op, at): n for op, at, n in found["placed"]} == {
        (op, on[op]): n for op, n in counts.items()
    }
    assert found["difference"] == 0
    assert [folder.suffix for folder in path.parent.glob("attention-*")] == [".mlmodelc"]


@pytest.mark.parametrize(
    "script, timeout, says",
    [
        ("import os; os.kill(os.getpid(), 11)", 60, "status -11"),
        ("import time; time.sleep(60)", 0.5, "within 0.5 s"),
        ("raise MemoryError('too large')", 60, "status 1: MemoryError: too large"),
    ],
)
def test_a_package_that_kills_its_process_is_reported(tmp_path, script, timeout, says):
    found = mac.probe(tmp_path, "0" * 64, timeout=timeout, command=(sys.executable, "-c", script))
    assert says in found["error"]


def probe_anew(converted):
    """What the doctor finds when it has kept nothing."""
    (converted.folder / doctor.KEPT).unlink(missing_ok=True)
    return doctor.diagnose(converted)


@torch.no_grad()
def test_the_backend_is_called_ANE_only_where_the_plan_says_so(converted, fakes, monkeypatch):
    backend = doctor.coreml_backend(converted, probe_anew(converted))
    packages = [read_package(converted.package(e)) for e in converted.packages]
    n = sum(len(package.ops) for package in packages)
    assert len(packages) == 3
    assert backend.name == f"Core ML, {n} of {n} operations on the ANE by the compute plan"
    found = parity(backend, moelab.open_model(converted.checkpoint()), [prompt(33)[0].tolist()])
    assert found.backend == backend.name and 0 < found.last.max() < 1e-2
    monkeypatch.setattr(fake_mac, "behaviour", "silu")
    assert doctor.coreml_backend(converted, probe_anew(converted)).name.startswith(
        f"Core ML, {n - 4} of {n} "
    )
    killed = {"error": "was ended by SIGSEGV: x"}
    monkeypatch.setattr(doctor, "probe", lambda *_: killed)
    with pytest.raises(RuntimeError, match="(?s)attention.mlpackage was ended by SIGSEGV.*the CPU"):
        doctor.coreml_backend(converted, probe_anew(converted))


def test_the_doctor_finds_what_is_wrong(converted, fakes, monkeypatch):
    found = probe_anew(converted)
    assert [c.complaints for c in found] == [[]] * 3 and all(c.difference == 0.0 for c in found)
    assert doctor.table(found).count("well") == 3
    for behaviour, told in (
        ("softmax", "not on the ANE: 1 × softmax on the cpu"),
        ("wrong", "by 0.2"),
    ):
        monkeypatch.setattr(fake_mac, "behaviour", behaviour)
        assert told in probe_anew(converted)[0].complaints[0]
    monkeypatch.setattr(doctor, "probe", lambda *_: {"error": "did not load"})
    found = probe_anew(converted)
    assert all(c.difference is None and c.complaints == ["did not load"] for c in found)


def test_each_package_is_probed_and_compiled_once(converted, fakes, monkeypatch):
    first = probe_anew(converted)
    kept = sorted(converted.folder.rglob("*.mlmodelc"))
    assert len(kept) == len(converted.packages) == 3
    monkeypatch.setattr(doctor, "probe", lambda *_: pytest.fail("probed again"))
    monkeypatch.setattr(fake_mac, "compile_model", lambda *_: pytest.fail("compiled again"))
    fake_mac.install(monkeypatch.setattr)
    assert doctor.diagnose(converted) == first
    backend = opening.backend_for(ConvertedModel(converted.folder))
    assert backend.name.startswith("Core ML") and backend.resource == "ane"
    assert sorted(converted.folder.rglob("*.mlmodelc")) == kept
    monkeypatch.setattr(doctor, "platform", machine("Darwin", "arm64", "15.2"))
    killed = {"error": "was ended by SIGSEGV: x"}  # what fails is tried again, and not kept
    monkeypatch.setattr(doctor, "probe", lambda *_: killed)
    assert [c.error for c in doctor.diagnose(converted)] == [killed["error"]] * 3


# ---- time and energy


@pytest.fixture
def meter(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus.monitor", SimpleNamespace(ZeusMonitor=fake_mac.Monitor))
    return mac.Meter()


def test_a_measurement_is_of_repeats_after_one_that_does_not_count(meter):
    ticks, ran = iter([0, 1, 10, 17, 20, 22]), []
    seconds, mj, _ = measure(lambda: ran.append(1), 3, meter, clock=lambda: next(ticks))
    assert len(ran) == 4 and seconds == [1, 7, 2]
    assert mj == {"ane": 400 / 3, "cpu": 50.0, "dram": 50 / 3}


def test_prefills_are_timed(converted, fakes, meter):
    model = moelab.open_model(converted.checkpoint())
    backend = doctor.coreml_backend(converted, probe_anew(converted))
    (row,) = time_prefill(model, backend, [40], 2, meter)
    assert row["fastest, s"] <= row["TTFT, s"] <= row["slowest, s"]
    assert row["ane, mJ a token"] == 400 / 2 / 40 and row["ms a chunk"] == 1e3 * row["TTFT, s"] / 3
    assert 0 < row["launches a chunk"] <= 2 and 0 < row["dropped"] < 1


def test_the_bench_of_a_mac(converted, fakes, meter, monkeypatch):
    """Every section has its rows."""
    monkeypatch.setattr(ane_micro, "MATRICES", (64, 128))
    few = ((1, 32), (1, 128), (4, 32), (8, 192))
    monkeypatch.setattr(ane_micro, "GRAPHS", few)
    found = run([converted.folder], [40], 1, sizes=(64, 32))
    for unit in ("ANE", "CPU", "GPU"):
        ((name, row),) = found[f"prefills, {unit}"].items()
        assert "40" in name and row["ane, mJ a token"] > 0 and row["CPU, s"] > 0
        assert row["scatter on compute, ms"] > 0 and row["launch on ane, ms"] > 0
    assert len(found["matrix products (Fig. 7)"]) == 2 * 3
    assert set(found["launches (Fig. 8)"]) == {
        f"{n} launches, {u}" for n in (16, 4) for u in ("CPU", "ANE")
    }
    assert len(found["graphs (Table 5)"]) == len(few) + 1
    tables = [section for section in found if "Table 8" in section or "Table 9" in section]
    assert len(tables) == 2 and all(set(found[of]) == {"ANE", "CPU", "GPU"} for of in tables)
    assert found["conditions"]["energy"] == "by Zeus"


def test_a_card_of_a_mac_has_the_rates_that_made_its_times(tmp_path):
    rates = Rates(0.2, 3.0, 0.05, 0.02, 3.0, 0.4)
    half = rates.scaled(0.5, 0.5)  # experts of half the size were timed
    graphs = {
        f"{G}×{C}": {"ms": half.graph_ms(G, C), "mJ": half.graph_mj(G, C), "cpu, mJ": 1.0}
        for G, C in ane_micro.GRAPHS
    }
    graphs["1×128, Core ML places"] = {"ms": half.graph_ms(1, 128) + 2.0, "mJ": 1.0}
    cpu = {f"{n} rows": {"ms": 4 + 0.1 * n, "mJ": 9.0, "cpu, mJ": 8.0} for n in (1, 64)}
    cpu["512 choices"] = {"ms": 5.12, "mJ": 1.0}
    sections = {"graphs (Table 5)": graphs, "experts on the CPU": cpu}
    card, sizes = tmp_path / "mac.toml", (4096, 3200)
    found = DeviceModel.of(ane_micro.refit(card, "mine", sections, 1.3, sizes))
    assert found.device == "mine" and found.memory_bytes > 1e9
    assert vars(found.rates) == pytest.approx(vars(rates), rel=1e-4)
    of = found.cpu
    assert (of.expert_ms, of.row_ms, of.dispatch_ms) == pytest.approx((8.0, 0.2, 4.0), rel=1e-4)
    assert (of.choice_ms, of.attention_ratio) == pytest.approx((0.01, 1.3), rel=1e-4)
    noisy = sections | {"experts on the CPU": cpu | {"1 rows": {"ms": 0.0, "mJ": 1.0}}}
    with pytest.raises(RuntimeError, match="cpu_expert_ms came out negative"):
        ane_micro.refit(card, "mine", noisy, 1.3, sizes)
    del graphs["8×64"]["mJ"]
    with pytest.raises(RuntimeError, match="zeus"):
        ane_micro.refit(card, "mine", sections, 1.3, sizes)
