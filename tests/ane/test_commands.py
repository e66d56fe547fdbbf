"""`moelab ane …`: what it prints, writes and answers with."""

import json

import numpy as np
import pytest
import torch

import moelab
from moelab.__main__ import main
from moelab.ane import commands
from moelab.ane.coreml.ffn_graph import Expert, save_ffn
from moelab.ane.device import mac
from moelab.ane.plan import ANEPlan
from moelab.ane.predict import DeviceModel
from moelab.ane.systems import SYSTEMS
from moelab.calibration import calibrate
from moelab.recording import record
from moelab.simulation.routing import routing_of
from tests.depth import depth
from tests.models import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(
        "qwen3_moe",
        tmp_path_factory.mktemp("model") / "tiny",
        num_hidden_layers=1,
        mlp_only_layers=[],
    )


@pytest.fixture(scope="module")
def calibration(checkpoint, tmp_path_factory):
    ids = torch.randint(3, 96, (4, 32), generator=torch.Generator().manual_seed(0)).tolist()
    found = calibrate(record(moelab.open_model(checkpoint), ids), "four random prompts")
    return found.save(tmp_path_factory.mktemp("calibration") / "c.safetensors")


def run(line):
    return main(["ane", *line.split()])


@pytest.mark.parametrize("card", depth(["Phi-3.5-MoE"], ["Qwen3-30B-A3B", "Phi-3.5-MoE"]))
def test_plans_of_cards_need_no_weights(card, capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert run(f"plan {card} --save {path}") == 0
    out, plan = capsys.readouterr().out, ANEPlan.load(path)
    assert plan.spec.name == card and plan.popularity == routing_of(plan.spec)[1]
    assert f"launches {plan.launches} expert graphs" in out
    assert max(group.weight_bytes for group in plan.graphs) <= 1200 * 2**20
    for system in SYSTEMS:  # the fastest by the model is planned, another one if it is asked for
        assert run(f"plan {card} --system {system} --save {path}") == 0
        assert ANEPlan.load(path).system == system
        device = DeviceModel.of()
        assert device.prefill(ANEPlan.load(path), 1024).ttft_s >= device.prefill(plan, 1024).ttft_s
    assert f"fastest: {plan.system}" in out and "Apple M2 Ultra" in out


def test_what_a_machine_does_not_hold_or_the_model_does_not_know_is_said(capsys):
    assert run("plan Phi-3.5-MoE --device m2-max") == 2
    assert "Apple M2 Max has 64 GB of memory" in capsys.readouterr().err
    assert run("plan Phi-3.5-MoE --device m2-max --weights int8") == 0
    assert run("plan DeepSeek-V2-Lite") == 0
    assert "attention of DeepSeek-V2-Lite" in capsys.readouterr().out
    assert run("plan Phi-3.5-MoE --device rtx-a6000") == 2
    assert "not known of this device" in capsys.readouterr().err


def test_a_plan_from_a_calibration_of_that_very_model(checkpoint, calibration, capsys, tmp_path):
    arguments = ["ane", "plan", str(checkpoint), "--calibration", str(calibration), "--chunk", "32"]
    assert main(arguments) == 0
    assert "calibrated on four random prompts" in capsys.readouterr().out
    other = tiny.save(
        "qwen3_moe", tmp_path / "other", seed=1, num_hidden_layers=1, mlp_only_layers=[]
    )
    assert main([*arguments[:2], str(other), *arguments[3:]]) == 2
    assert "another model" in capsys.readouterr().err


def large_expert():
    """One that no rule complains of."""
    rng = np.random.default_rng(0)
    return Expert(
        *(
            rng.standard_normal(shape).astype(np.float16)
            for shape in ((128, 64), (64, 128), (128, 64))
        )
    )


def test_convert_lint_and_parity(checkpoint, calibration, capsys, tmp_path, monkeypatch):
    pytest.importorskip("coremltools")
    folder, plan = tmp_path / "ane", tmp_path / "plan.json"
    options = f"--chunk 32 --calibration {calibration} --group-size 4 --system npumoe"
    assert run(f"plan {checkpoint} {options} --save {plan}") == 0
    assert run(f"convert {checkpoint} {folder} --context 64 --plan {plan}") == 0
    assert "differ from torch by" in capsys.readouterr().out
    assert main(["ane", "lint", str(folder)]) == 1  # all of them are tiny
    out = capsys.readouterr().out
    packages = json.loads((folder / "manifest.json").read_text())["layers"][0]
    n = 1 + sum("file" in group for group in packages["groups"])
    assert out.count("tiny-graph") == n and f"0 of {n} packages are clean" in out
    assert main(["ane", "lint", str(folder / packages["attention"]["file"])]) == 1
    assert "tiny-graph" in capsys.readouterr().out
    large = save_ffn(tmp_path / "large.mlpackage", [large_expert()] * 2, 32)
    assert main(["ane", "lint", str(large)]) == 0
    assert "clean" in capsys.readouterr().out
    assert main(["ane", "lint", str(large), str(folder)]) == 1
    assert f"1 of {1 + n} packages are clean" in capsys.readouterr().out
    assert main(["ane", "parity", str(folder)]) == 2
    assert "no tokenizer" in capsys.readouterr().err
    real = commands._model_of

    def with_tokenizer(converted, at):
        model = real(converted, at)
        model.tokenizer = lambda text, **_: {
            "input_ids": [3 + ord(word[0]) % 90 for word in text.split()]
        }
        return model

    monkeypatch.setattr(commands, "_model_of", with_tokenizer)
    assert run(f"parity {folder} --prompts 3 --tokens 64 --checkpoint {checkpoint}") == 0
    assert "same next token" in capsys.readouterr().out
    assert main(["ane", "convert", str(checkpoint), str(folder)]) == 2
    assert "not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["doctor", "x"]])
def test_without_a_mac_it_says_so_and_ends_with_2(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mac.platform, "system", lambda: "Linux")
    assert main(["ane", *arguments]) == 2
    error = capsys.readouterr().err
    assert (
        f"ane {arguments[0]} needs a Mac" in error
        and "Traceback" not in error
        and list(tmp_path.iterdir()) == []
    )


def test_bad_input(capsys):
    assert main(["ane", "plan", "Qwen3-30B"]) == 2
    assert "Qwen3-30B-A3B" in capsys.readouterr().err
