"""`moelab ndp`: the systems on one's own model and machine, and the band over readings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from moelab import cards
from moelab.__main__ import main
from moelab.advice import ndp
from moelab.advice.ndp import OURS, SHOWN, band, compare, fastest, readings
from moelab.base.files import small_model
from moelab.calibration import Calibration
from moelab.evaluation.calibrate import calibrate
from moelab.ndp.assumptions import CHOICES, Assumptions
from moelab.ndp.routing import PromptRouting
from moelab.ndp.simulation import simulate
from moelab.ndp.systems import MoNDE
from moelab.simulation.routing import routing_of
from moelab.trace import RoutingTrace

TOKENS = ["--prompt", "12", "--answer", "5"]


@pytest.fixture(scope="module")
def routing():
    spec = replace(cards.load_model("OLMoE-1B-7B"), num_layers=2, moe_layers=(0, 1), E=12, K=3)
    return Assumptions().routing(spec, 0, 24, 6)


@pytest.fixture(scope="module")
def found(routing):
    return compare(routing, 3)


def test_every_reading_is_what_simulating_it_alone_gives(routing, found):
    assert set(found) == set(readings()) and len(found) == 1 + 1 + sum(
        len(choices) for name, choices in CHOICES.items() if name not in ("zipf", "bias")
    )
    for words, assumed in readings().items():
        for name in ("MoNDE", "NDP+TP+LB+PRE", "Fiddler"):
            alone = simulate(assumed.hardware(3), assumed.system(name), routing)
            assert found[words][name] == alone


def test_a_band_holds_every_reading(found):
    for name in SHOWN:
        mine, least, most = band(found, name)
        times = [by[name].end_to_end for by in found.values()]
        assert (mine, least, most) == (found[OURS][name].end_to_end, min(times), max(times))
        ratios = [by["MoNDE"].end_to_end / by[name].end_to_end for by in found.values()]
        assert band(found, name, "MoNDE") == (ratios[0], min(ratios), max(ratios))
    assert sum(fastest(found).values()) == len(found)


def test_cards_decide_what_is_open():
    gpu, unit = readings(gpu="rtx-a6000"), readings(unit="lpddr-ndp")
    assert not [words for words in gpu if words.startswith("gpu_")]
    assert "mapping = stated" in gpu and "gpu_ghz = 2.3" in unit
    assert not [words for words in unit if words.startswith(("mapping", "clock"))]


def test_mondes_correction_by_the_prompt_takes_the_best_factor(routing):
    """Against decoding the prompt with each share that it can have."""
    machine = Assumptions().hardware(3)
    its = Assumptions(monde_correction="prompt").system("MoNDE")
    assert its == MoNDE(correction="prompt")
    plain, corrected = (
        simulate(machine, of, replace(routing, decode=routing.prefill)) for of in (MoNDE(), its)
    )
    assert corrected.moe_decode <= plain.moe_decode * (1 + 1e-9)
    assert corrected.moe_prefill == plain.moe_prefill and its.factor == 1.0  # a run has a copy


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A trace of the small model with two texts, and a calibration of it."""
    folder = tmp_path_factory.mktemp("ndp")
    spec = cards.load_model("OLMoE-1B-7B")
    trace = routing_of(spec)[0].trace(spec, [14, 10])
    phase = torch.tensor(([0] * 8 + [1] * 6) + ([0] * 6 + [1] * 4), dtype=torch.uint8)
    replace(trace, phase=phase).save(folder / "both.safetensors")
    trace.save(folder / "one.safetensors")
    return folder


@pytest.fixture
def fewer(monkeypatch):
    """Three readings."""
    monkeypatch.setattr(ndp, "MACHINE", {"mapping": ("MOP4CLXOR",)})
    monkeypatch.setattr(ndp, "READINGS", {})


def run(capsys, *arguments):
    status = main(["ndp", *arguments])
    return status, capsys.readouterr()


@pytest.mark.parametrize("model", ["OLMoE-1B-7B", str(small_model()), None])
def test_it_takes_cards_and_checkpoints(model, fewer, tmp_path, capsys):
    out = tmp_path / "ndp.json"
    given = ["--modules", "2", *TOKENS, "--output", str(out)]
    status, said = run(capsys, *([model] if model else []), *given)
    assert status == 0 and all(name in said.out for name in SHOWN)
    assert "assumed: a run of Ramulator 2" in said.out  # rates that nobody published
    kept = json.loads(out.read_text())
    assert kept["kind"] == "modelled" and (kept["prompt"], kept["answer"]) == (12, 5)
    assert set(kept["readings"]) == set(readings())
    ours = kept["readings"][OURS]["NDP+TP"]
    assert ours["moe_decode"] > 0 and ours["hit_rate"] is None
    assert str(kept["machine"]) in said.out and "link 63 GB/s" in said.out


@pytest.mark.parametrize("name, split", [("both", (8, 6)), ("one", (7, 7))])
def test_a_trace_is_taken_as_it_was_recorded(name, split, files, fewer, tmp_path, capsys):
    path, out = files / f"{name}.safetensors", tmp_path / "ndp.json"
    status, _ = run(capsys, "OLMoE-1B-7B", "--trace", str(path), "--output", str(out))
    kept = json.loads(out.read_text())
    assert status == 0 and (kept["prompt"], kept["answer"]) == split
    trace = RoutingTrace.load(path)
    own = PromptRouting.of(trace, 0)
    assert (np.concatenate([own.prefill, own.decode]) == trace.ids[:14].numpy()).all()
    alone = simulate(Assumptions().hardware(4), Assumptions().system("NDP+TP"), own)
    assert kept["readings"][OURS]["NDP+TP"]["moe_decode"] == pytest.approx(alone.moe_decode)


def test_a_calibration_says_which_experts_are_popular(files, fewer, tmp_path, capsys):
    counted = calibrate(RoutingTrace.load(files / "both.safetensors"))
    assert isinstance(counted, Calibration)
    counted.save(tmp_path / "c.safetensors")
    given = ["--calibration", str(tmp_path / "c.safetensors"), *TOKENS]
    status, said = run(capsys, "OLMoE-1B-7B", *given)
    assert status == 0 and "as the calibration counted" in said.out
    status, said = run(capsys, "Mixtral-8x7B", *given)
    assert status == 2 and "counted on" in said.err


def test_what_does_not_fit_is_said(fewer, capsys):
    status, said = run(capsys, "Qwen3-235B-A22B", "--modules", "2", *TOKENS)
    assert status == 2 and "GB too large for the units" in said.err
    status, said = run(capsys, "Qwen3-30B-A3B", "--modules", "1", *TOKENS)
    assert status == 0 and said.out.count("not supported") == len(SHOWN) - 2  # those on the host
    assert "Fastest of the paper's: Fiddler by" in said.out


@pytest.mark.parametrize(
    "given, says",
    [
        (["OLMoE-1B-7"], "OLMoE-1B-7B"),
        (["OLMoE-1B-7B", "--gpu", "m2-max"], "link_bandwidth_gbs"),
        (["OLMoE-1B-7B", "--dimm", "rtx-5080"], "multipliers_count"),
    ],
)
def test_what_it_refuses(given, says, fewer, capsys):
    status, said = run(capsys, *given, *TOKENS)
    assert status == 2 and says in said.err


def test_a_trace_or_a_calibration(capsys):
    with pytest.raises(SystemExit):
        main(["ndp", "--trace", "x.npz", "--calibration", "y"])
    assert "not allowed with" in capsys.readouterr().err
