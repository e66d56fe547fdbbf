"""The command `generate`, alone and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moelab.__main__ import main
from moelab.parallel import launch
from moelab import open_model
from moelab.generate import generate, open_parallel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def alone():
    return generate(max_new_tokens=12)


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "moelab",
                           "generate", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_torchrun_gives_the_tokens_of_one_process(alone):
    done = torchrun("--max-new-tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)              # so only one rank printed
    assert (made["tokens"], made["text"], made["prompt"]) == (alone.tokens, alone.text, alone.prompt)
    assert (made["parallel"], made["ranks"]) == ("ep-a2a", 2)
    whole = sum(p.numel() * 2 for name, p in open_model().named_parameters() if ".experts." in name)
    assert made["expert_bytes"] == [whole // 2, whole // 2]
    assert {"dispatch", "combine", "result"} < set(made["sent"]) and min(made["sent"]["combine"]) > 0


def test_alone_it_is_transformers_own_greedy_generation(alone):
    model = open_model()
    ids = model.tokenizer(alone.prompt, return_tensors="pt").input_ids
    assert alone.tokens == model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1]:].tolist()
    assert alone.text == model.tokenizer.decode(alone.tokens) and alone.parallel is None


def test_the_command_prints_text_and_json(capsys):
    arguments = ["generate", "--prompt", "the red fox 37\nthe red", "--max-new-tokens", "3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json", "--executor", "exact", "--dtype", "float32"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert text.startswith("the red fox 37\nthe red fox 37") and "3 tokens" in text
    assert made["text"] == " fox 37\n"[:len(made["text"])]


@pytest.mark.parametrize("parallel, executor", [("hidden", None), ("blocks", "gemv"), ("ep", "neuron")])
def test_other_ways_on_two_ranks_give_the_tokens_of_one_process(parallel, executor):
    alone = generate(max_new_tokens=8, dtype="float32")
    made = launch(generate, 2, None, None, 8, parallel, None, executor, "float32")
    assert made[0] == replace(made[1], seconds=made[0].seconds)
    assert made[0].tokens == alone.tokens and min(made[0].sent["result"]) > 0


def test_the_executor_int8_quantises_and_needs_a_whole_model():
    ids = []
    for executor in (None, "int8"):
        ids.append(generate(prompt="the red fox 37\nthe red", max_new_tokens=2, executor=executor).tokens)
    assert ids[0] == ids[1]                         # rounded, but alive
    with pytest.raises(ValueError, match="in one process"):
        generate(parallel="ep", executor="int8")


@pytest.mark.parametrize("arguments, said", [
    (["--executor", "tiered"], "capacities, overflow='prune'"), (["--executor", "grouped"], "'groups'"),
    (["--parallel", "ep"], "torchrun"), (["--prompt", ""], "empty"),
    (["nowhere/at/all"], "no checkpoint folder")])
def test_bad_input_is_explained(arguments, said, capsys):
    assert main(["generate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_process_that_is_alone_is_told():
    with pytest.raises(RuntimeError, match="alone"):
        open_parallel(parallel="ep")
