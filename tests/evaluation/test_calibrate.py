"""`moelab calibrate`: the file is what counting by hand gives, and bad input is refused before any
work."""

import pytest

import moelab
from moelab.__main__ import main
from moelab.calibration import Calibration
from moelab.evaluation import calibrate
from moelab.trace import DECODE, PREFILL

SMALL = ("--prompts", "1", "--tokens", "64", "--sources", "code,lookup")


def test_the_file_is_what_counting_by_hand_gives(tmp_path, capsys):
    file = tmp_path / "new" / "small.safetensors"
    assert main(["calibrate", "small", str(file), *SMALL, "--new-tokens", "3", "--seed", "2"]) == 0
    found, out = Calibration.load(file), capsys.readouterr().out
    model = moelab.open_model(None)
    trace = moelab.record(
        model,
        [
            p.text
            for source in ("code", "lookup")
            for p in moelab.prompts(source, 1, tokens=64, seed=2, split="train")
        ],
        max_new_tokens=3,
    )
    for phase in (PREFILL, DECODE):
        of = trace.select(trace.phase == phase)
        for layer in range(model.spec.L):
            counts = [int((of.ids[:, layer] == e).sum()) for e in range(model.spec.E)]
            assert found.counts(phase)[layer].tolist() == counts
        assert found.tokens[phase] == len(of)
    assert found.require(trace.model_id, model.spec) is found and "lookup" in found.source
    assert f"{found.tokens[PREFILL]:,} tokens" in out and "decode: " in out and str(file) in out
    assert [path.name for path in file.parent.iterdir()] == [
        file.name
    ]  # nothing half written is left


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--sources", "code,nothing"], "'nothing'"),
        (["--sources", ","], "names nothing"),
        (["--tokens", "8"], "at least 64"),
    ],
)
def test_bad_input_is_refused(arguments, told, tmp_path, capsys):
    try:
        assert main(["calibrate", "small", str(tmp_path / "c"), *arguments]) == 2
    except SystemExit as end:  # refused while the arguments are read
        assert end.code == 2
    assert told in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_if_one_says_so(tmp_path, capsys, monkeypatch):
    file = tmp_path / "c.safetensors"
    file.write_text("kept")
    monkeypatch.setattr(
        calibrate, "open_model", lambda *_, **__: pytest.fail("a model is opened for nothing")
    )
    assert main(["calibrate", "small", str(file)]) == 2
    assert "--force" in capsys.readouterr().err and file.read_text() == "kept"
    assert main(["calibrate", "small", str(tmp_path), "--force"]) == 2
    assert main(["calibrate", "small", str(file / "below")]) == 2
    assert "Not a directory" in capsys.readouterr().err
    monkeypatch.undo()
    short = [*SMALL, "--new-tokens", "0", "--external"]
    assert main(["calibrate", "small", str(file), *short, "--force"]) == 0
    found = Calibration.load(file)
    assert found.tokens[PREFILL] > 0 == found.tokens[DECODE]
    assert "decode: " not in capsys.readouterr().out
    assert main(["ane", "plan", "small", "--calibration", str(file)]) == 0
    assert "calibrated on 1 prompts each of code, lookup" in capsys.readouterr().out
