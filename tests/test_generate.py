"""The command `generate`, alone and under torchrun."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moelab import open_model
from moelab.__main__ import main
from moelab.base.files import small_model
from moelab.generate import generate
from moelab.models.greedy import OPTIONS
from moelab.parallel import launch
from moelab.speculate import Estimator
from tests.depth import depth

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def alone():
    return generate(max_new_tokens=12)


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "moelab"]
    return subprocess.run(
        [*run, "generate", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )


def test_torchrun_gives_the_tokens_of_one_process(alone):
    done = torchrun("--max-new-tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)  # so only one rank printed
    assert (made["tokens"], made["text"], made["prompt"]) == (
        alone.tokens,
        alone.text,
        alone.prompt,
    )
    assert (made["parallel"], made["ranks"]) == ("ep-a2a", 2)
    whole = sum(p.numel() * 2 for name, p in open_model().named_parameters() if ".experts." in name)
    assert made["expert_bytes"] == [whole // 2, whole // 2]
    assert {"dispatch", "combine", "result"} < {*made["sent"]}
    assert min(made["sent"]["combine"]) > 0


def test_the_command_prints_transformers_own_greedy_generation_and_json(capsys, alone):
    model = open_model()
    ids = model.tokenizer(alone.prompt, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert alone.tokens == made and alone.text == model.tokenizer.decode(made)
    arguments = ["generate", "--prompt", "the red fox 37\nthe red", "--max-new-tokens", "3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("the red fox 37\nthe red fox 37") and "3 tokens" in text


@pytest.mark.parametrize(
    "defaults",
    [
        {"return_dict_in_generate": True, "output_logits": True},
        {"do_sample": True, "temperature": 0.0},
        {"cache_implementation": "static"},
    ],
)
def test_a_checkpoint_s_defaults_are_honoured_or_named(defaults, tmp_path, capsys):
    """huggingface/transformers issue 21185, QwenLM/Qwen2.5-Omni issue 350."""
    folder = shutil.copytree(small_model(), tmp_path / "m")
    (folder / "generation_config.json").write_text(
        json.dumps(defaults | {"eos_token_id": 0, "pad_token_id": 0})
    )
    made = generate(str(folder), "the red fox", 3, stream=True)
    assert made.tokens == generate(prompt="the red fox", max_new_tokens=3).tokens
    told = capsys.readouterr().err
    wanted = {of: value for of, value in defaults.items() if value}
    assert all(f"{of}=" in told for of in wanted if OPTIONS.get(of, wanted[of]) != wanted[of])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Of the small model, by the commands that error messages name: option → its file."""
    folder = tmp_path_factory.mktemp("files")
    few = ["--sources", "prose", "--prompts", "2", "--tokens", "64"]
    made = {}
    for option, command, *more in (
        ("calibration", ["calibrate"], "--new-tokens", "2"),
        ("vectors", ["train", "vectors"]),
        ("estimator", ["train", "estimator"], "--train-tokens", "1000"),
    ):
        made[option] = str(folder / f"{option}.safetensors")
        assert main([*command, "small", made[option], *few, *more]) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{option}.safetensors"
        for option in made  # what was recorded beside them is gone
    )
    return made


SHORT = ["generate", "--prompt", "the red fox", "--max-new-tokens", "6", "--memory", "50%"]


@pytest.mark.parametrize(
    "name, needs",
    [
        ("static", ["calibration"]),
        ("hybrid", ["estimator", "vectors"]),
        ("auto", ["estimator"]),
        *depth([], [("quasi", ["vectors"]), ("estimator", ["estimator"])]),
    ],
)
def test_predictors_take_files_and_say_which_command_writes_them(name, needs, files, capsys):
    tokens = generate(prompt="the red fox", max_new_tokens=6).tokens
    given = [word for option in needs for word in (f"--{option}", files[option])]
    assert main([*SHORT, "--json", "--prefetch", name, *given]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == tokens  # hints change none
    if name != "auto":
        assert main([*SHORT, "--json", "--speculate", name, *given]) == 0
        assert len(json.loads(capsys.readouterr().out)["tokens"]) == 6
    if name in ("static", "estimator", "hybrid"):
        for how in ("--prefetch", "--speculate"):
            assert main([*SHORT, how, name]) == 2
            told = capsys.readouterr().err
            assert "`moelab " in told and "FILE`" in told and "opened in" not in told
    assert main([*SHORT, "--prefetch", name, f"--{needs[0]}", "no.file"]) == 2
    told = capsys.readouterr().err
    assert "no.file" in told and "opened in" not in told


def test_evaluate_takes_the_same_files(files, tmp_path, capsys):
    modes = "speculative:estimator,speculative:hybrid,speculative:quasi,router-free"
    given = ["--estimator", files["estimator"], "--output", str(tmp_path / "e.json")]
    few = ["--tasks", "loss", "--limit", "4", "--tokens", "64"]
    assert main(["evaluate", "--modes", modes, *given, *few]) == 0
    found = json.loads((tmp_path / "e.json").read_text())["samples"]["loss"]
    assert found["router-free"] == found["speculative:estimator"] != found["baseline"]
    assert found["speculative:quasi"] != found["baseline"]


def test_a_training_that_was_cut_off_goes_on_with_what_it_has(tmp_path, monkeypatch, capsys):
    from moelab.evaluation import train

    few = ["--sources", "prose", "--prompts", "2", "--tokens", "64", "--train-tokens", "1000"]
    once, again = (["train", "estimator", "small", str(tmp_path / of), *few] for of in "ab")
    assert main(once) == 0
    ran = train.train
    monkeypatch.setattr(train, "train", lambda *_, **__: 1 / 0)
    assert main(again) == 2  # everything is recorded
    monkeypatch.setattr(train, "train", ran)
    monkeypatch.setattr(train, "record", lambda *_, **__: pytest.fail("recorded once more"))
    assert main(again) == 0 and "FILE" not in capsys.readouterr().out
    one, other = (Estimator.load(tmp_path / of) for of in "ab")
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    assert torch.equal(one.vectors.d, other.vectors.d) and one.choice == other.choice
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert main(again) == 2 and "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    "parallel, executor",
    [("tp", "neuron"), ("auto", "fast")],
)
def test_other_ways_on_two_ranks_give_the_tokens_of_one_process(parallel, executor):
    alone = generate(max_new_tokens=8, dtype="float32")
    made = launch(generate, 2, None, None, 8, parallel, None, executor, "float32")
    for name in ("prompt", "tokens", "text", "parallel", "ranks", "sent", "decode_tokens", "paths"):
        assert getattr(made[0], name) == getattr(made[1], name), name
    assert (
        made[0].expert_bytes == made[1].expert_bytes and made[0].other_bytes == made[1].other_bytes
    )
    assert made[0].tokens == alone.tokens and min(made[0].sent["result"]) > 0
    others = sum(p.numel() * 4 for n, p in open_model().named_parameters() if ".experts." not in n)
    assert (max(made[0].other_bytes) < others) == (parallel == "tp")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--prefetch", "router"], "--memory"),
        (["--memory", "1kB"], "the least that works"),
        (["--parallel", "ep"], "torchrun"),
        (["nowhere/at/all"], "no checkpoint folder"),
    ],
)
def test_bad_input_is_explained(arguments, said, monkeypatch, capsys):
    assert main(["generate", *arguments]) == 2
    assert said in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main(["generate", "--cache", "lfu"]) == 2
    assert "--cache: for one process" in capsys.readouterr().err


def test_within_a_memory_budget_the_text_is_the_same_and_the_cost_is_told(alone, capsys):
    within = ["generate", "--max-new-tokens", "12", "--memory", "50%"]
    assert main([*within, "--prefetch", "router", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["tokens"] == alone.tokens and 0 < made["hit_rate"] < 1
    assert main([*within, "--executor", "fast"]) == 0
    captured = capsys.readouterr()
    assert "opening the small model" in captured.err
    assert all(word in captured.out for word in ("TTFT", "TPOT", "hit rate", "MB read a token"))
