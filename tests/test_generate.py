"""The command `generate`, alone and under torchrun."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moelab import open_model
from moelab.__main__ import main
from moelab.base.files import small_model
from moelab.generate import generate
from moelab.models.greedy import OPTIONS
from moelab.models.identity import identity
from moelab.parallel import launch
from moelab.speculate import Estimator

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


def test_predictors_are_refused_before_opening_or_get_what_they_need(tmp_path, capsys):
    model, files = open_model(), {}
    files["estimator"] = tmp_path / "e.safetensors"
    Estimator(model.spec.H, model.spec.E, model.spec.L, 8, model_id=identity(model)).save(
        files["estimator"]
    )
    files["calibration"] = tmp_path / "c.safetensors"
    few = ["--sources", "prose", "--prompts", "1", "--tokens", "64", "--new-tokens", "2"]
    assert main(["calibrate", "small", str(files["calibration"]), *few]) == 0
    capsys.readouterr()
    short = ["generate", "--prompt", "the red fox", "--max-new-tokens", "3", "--memory", "50%"]
    tokens = generate(prompt="the red fox", max_new_tokens=3).tokens
    for name, needs in (("estimator", "estimator"), ("static", "calibration")):
        assert main([*short, "--json", "--prefetch", name, f"--{needs}", str(files[needs])]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == tokens
        assert main([*short, "--prefetch", name]) == 2
        told = capsys.readouterr().err
        assert f"--{needs} FILE" in told and "opening" not in told
    with pytest.raises(SystemExit):
        main([*short, "--prefetch", "hybrid"])  # for Python
    assert main([*short, "--prefetch", "estimator", "--estimator", str(tmp_path / "none")]) == 2
    assert "no estimator at" in capsys.readouterr().err


@pytest.mark.parametrize(
    "parallel, executor",
    [("tp", "neuron"), ("auto", "fast")],
)
def test_other_ways_on_two_ranks_give_the_tokens_of_one_process(parallel, executor):
    alone = generate(max_new_tokens=8, dtype="float32")
    made = launch(generate, 2, None, None, 8, parallel, None, executor, "float32")
    timed = {name: getattr(made[0], name) for name in ("seconds", "ttft", "tpot")}
    assert made[0] == replace(made[1], **timed)
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
