"""What runs on a Mac only, with Core ML's classes imitated: probes, placements, the doctor, timing,
energy."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("coremltools")

import moelab
from moelab.ane import doctor
from moelab.ane.coreml.convert import ConversionSettings, convert_model
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.package import read_package
from moelab.ane.device import mac
from moelab.ane.device.device_model import DeviceModel
from moelab.ane.device.published import TABLE_5
from moelab.ane.device.timing import GRID, Meter, load_samples, measure, save_samples, time_grid
from moelab.ane.parity import parity
from tests.ane import fake_mac
from tests.ane.test_backends import CONTEXT, make_plan, prompt
from tests.models import tiny

COMMAND = (sys.executable, str(Path(fake_mac.__file__)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    checkpoint = tiny.save("qwen3_moe", root / "tiny", num_hidden_layers=1, mlp_only_layers=[])
    plan = make_plan(moelab.open_model(checkpoint).spec)
    return convert_model(
        checkpoint, root / "ane", plan, ConversionSettings(context=CONTEXT), validate=False
    ).folder


def machine(system, processor, version):
    """The module `platform` there."""
    return SimpleNamespace(
        system=lambda: system,
        machine=lambda: processor,
        mac_ver=lambda: (version, ("", "", ""), ""),
    )


@pytest.fixture
def on_mac(monkeypatch):
    monkeypatch.setattr(mac, "platform", machine("Darwin", "arm64", "15.1"))


@pytest.fixture
def fakes(monkeypatch, on_mac):
    """Core ML in this process, and `probe` without another one: starting Python takes seconds."""
    fake_mac.install(monkeypatch.setattr)
    monkeypatch.setattr(fake_mac, "behaviour", "")

    def probed(package, inputs, function=None, units="cpuAndNeuralEngine", timeout=300.0):
        runner = mac.CoreMLRunner(package, function, units)
        return mac.PackageProbe(
            Path(package),
            "",
            0.5,
            0.01,
            tuple(mac.placements(runner)),
            {name: value.numpy() for name, value in runner(inputs).items()},
        )

    monkeypatch.setattr(doctor, "probe", probed)


@pytest.mark.parametrize(
    "here", [("Linux", "x86_64", ""), ("Darwin", "x86_64", "15.0"), ("Darwin", "arm64", "14.7")]
)
def test_elsewhere_it_says_what_it_would_take(monkeypatch, here):
    monkeypatch.setattr(mac, "platform", machine(*here))
    with pytest.raises(
        RuntimeError, match="(?s)ane doctor needs a Mac.*macOS 15.*pip install.*ane lint"
    ):
        mac.require_mac("ane doctor")


def test_a_probe_runs_in_a_process_of_its_own(folder, monkeypatch):
    monkeypatch.setenv("FAKE", "softmax,matmul")
    path = folder / "layers/000/attention.mlpackage"
    function = read_package(path).function()
    inputs = mac.sample_inputs(function)
    assert {name: a.shape for name, a in inputs.items()} == {
        v.name: v.shape for v in function.inputs
    }
    found = mac.probe(path, inputs, command=COMMAND)
    assert found.error == "" and found.load_s > 0 and found.predict_s > 0 and not found.on_ane
    counts = function.counts()
    assert found.devices == {
        "cpu": counts["softmax"] + counts["matmul"],
        "ane": counts.total() - counts["softmax"] - counts["matmul"],
    }
    assert all(
        p.can == (("cpu",) if p.type in ("softmax", "matmul") else ("cpu", "ane"))
        and p.cost == 0.01
        for p in found.placements
    )
    expected = Evaluator(path, mode="fp16")(inputs)
    assert all(
        np.array_equal(found.outputs[name], value.numpy()) for name, value in expected.items()
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory, folder):
    """Packages with several functions."""
    from moelab.ane.coreml.converted import ConvertedModel

    converted = ConvertedModel(folder)
    settings = ConversionSettings(context=CONTEXT, every_tier=True)
    return convert_model(
        converted.checkpoint(),
        tmp_path_factory.mktemp("several") / "ane",
        converted.plan,
        settings,
        validate=False,
    )


def test_every_function_is_examined(several, fakes):
    names = [
        checkup.package.removeprefix("layers/000/") for checkup in doctor.diagnose(several).checkups
    ]
    assert sorted(names) == [
        "attention.mlpackage",
        "group00.mlpackage c16",
        "group00.mlpackage c4",
        "group01.mlpackage c16",
        "group01.mlpackage c4",
    ]


@pytest.mark.parametrize(
    "script, timeout, says",
    [
        ("import os; os.kill(os.getpid(), 11)", 60, "SIGSEGV"),
        ("import time; time.sleep(60)", 0.5, "within 0.5 s"),
        ("raise MemoryError('too large')", 60, "status 1: MemoryError: too large"),
    ],
)
def test_a_package_that_kills_its_process_is_reported(tmp_path, script, timeout, says):
    found = mac.probe(tmp_path, {}, timeout=timeout, command=(sys.executable, "-c", script))
    assert says in found.error and not found.on_ane and found.devices == {}


@torch.no_grad()
def test_the_backend_is_called_ANE_only_where_the_plan_says_so(folder, fakes, monkeypatch):
    backend = doctor.coreml_backend(folder)
    packages = [
        read_package(folder / entry["file"]).function() for entry in backend.converted.packages
    ]
    operations = sum(function.counts().total() for function in packages)
    assert (
        len(packages) == 3
        and backend.name
        == f"Core ML, {operations} of {operations} operations on the ANE by the compute plan"
    )
    converted = backend.converted
    found = parity(backend, moelab.open_model(converted.checkpoint()), [prompt(33)[0].tolist()])
    assert found.backend == backend.name and 0 < found.last.max() < 1e-2
    monkeypatch.setattr(fake_mac, "behaviour", "silu")
    assert doctor.coreml_backend(folder).name.startswith(
        f"Core ML, {operations - 4} of {operations} "
    )
    monkeypatch.setattr(
        doctor,
        "probe",
        lambda package, *_, **__: mac.PackageProbe(Path(package), "was ended by SIGSEGV: x"),
    )
    with pytest.raises(
        RuntimeError, match="(?s)attention.mlpackage was ended by SIGSEGV.*for the CPU"
    ):
        doctor.coreml_backend(folder)


def test_the_doctor_finds_what_is_wrong(folder, fakes, monkeypatch):
    found = doctor.diagnose(folder)
    assert (
        found.well
        and all(c.difference == 0.0 for c in found.checkups)
        and found.table().count("well") == 3
    )
    monkeypatch.setattr(fake_mac, "behaviour", "softmax")
    found = doctor.diagnose(folder)
    assert [c.complaints for c in found.checkups] == [
        ["not on the ANE: 1 × softmax on the cpu"],
        [],
        [],
    ]
    monkeypatch.setattr(fake_mac, "behaviour", "wrong")
    found = doctor.diagnose(folder)
    assert (
        all("differs from the evaluator by 0.2" in c.complaints[0] for c in found.checkups)
        and not found.well
    )
    with monkeypatch.context() as damage, pytest.raises(ValueError, match="damaged"):
        damage.setattr("moelab.ane.coreml.converted.checksum", lambda package: "another")
        doctor.diagnose(folder)
    monkeypatch.setattr(
        doctor, "probe", lambda package, *_, **__: mac.PackageProbe(Path(package), "did not load")
    )
    found = doctor.diagnose(folder)
    assert all(
        math.isnan(c.difference) and c.complaints == ["did not load"] for c in found.checkups
    )
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["well"] is False


# ---- time and energy


@pytest.fixture
def meter(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus.monitor", SimpleNamespace(ZeusMonitor=fake_mac.Monitor))
    return Meter()


def test_a_measurement_is_a_median_of_repeats_after_one_that_does_not_count(meter):
    ticks, ran = iter([0, 1, 10, 17, 20, 22]), []
    timing = measure(lambda: ran.append(1), 3, meter, clock=lambda: next(ticks))
    assert len(ran) == 4 and timing.seconds == (1, 7, 2) and timing.median == 2
    assert timing.mj == {"ane": 400 / 3, "cpu": 50.0, "dram": 50 / 3}


def test_the_grid_times_all_experts_of_a_layer(meter, tmp_path):
    loaded, calls = [], []

    def runner(path, function):
        loaded.append(path)
        assert sum(op.type == "silu" for op in read_package(path).function().ops) in (2, 4)

        def run(inputs):
            calls.append((len(loaded), tuple(inputs["x"].shape)))

        return run

    samples = time_grid(
        [(2, 16), (4, 32)],
        experts=8,
        hidden=16,
        intermediate=24,
        repeats=3,
        meter=meter,
        runner=runner,
    )
    assert [(s.G, s.C, s.mode) for s in samples] == [
        (G, C, mode) for G, C in ((2, 16), (4, 32)) for mode in ("serial", "parallel")
    ]
    assert len(loaded) == 4 + 2 and len(calls) == 2 * 4 * (4 + 2)
    assert {shape for _, shape in calls} == {(1, 16, 1, 32), (1, 16, 1, 128)}
    assert [s.mj for s in samples] == [pytest.approx(600 / 3 / (8 * C)) for C in (16, 16, 32, 32)]
    path = save_samples(tmp_path / "samples.json", samples, "a Mac")
    assert load_samples(path) == (samples, "a Mac")
    with pytest.raises(ValueError, match="groups of 3"):
        time_grid([(3, 16)], experts=8, meter=meter, runner=runner)


def test_samples_of_table_5_refit_the_published_model(tmp_path):
    samples, device = load_samples(save_samples(tmp_path / "s.json", TABLE_5, "again"))
    assert (
        DeviceModel.of("m2-ultra").refit(samples, device).rates == DeviceModel.of("m2-ultra").rates
    )
    assert set(GRID) == {(s.G, s.C) for s in TABLE_5}
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="ane calibrate"):
        load_samples(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="bad.json is no readable file of samples"):
        load_samples(tmp_path / "bad.json")
