import dataclasses
import json
import sys
from contextlib import nullcontext

import pytest

import moelab
from moelab.__main__ import main
from moelab.ane.plan import make_plan
from moelab.ane.runtime import prefill_through
from moelab.calibration import calibrate
from moelab.evaluation import accuracy, evaluate, lm_eval_adapter, scores
from moelab.recording import record
from moelab.trace import PREFILL
from tests.evaluation.test_accuracy import wrong_experts

QUICK = ["--limit", "4", "--tokens", "64"]


@pytest.fixture(scope="module")
def model():
    return moelab.open_model()


# ---- the command


def evaluated(tmp_path, *arguments):
    path = tmp_path / f"{len([*tmp_path.iterdir()])}.json"
    assert main(["evaluate", *arguments, *QUICK, "--output", str(path)]) == 0
    return json.loads(path.read_text())


def test_it_writes_a_result_and_shows_it(results, capsys):
    assert main(["evaluate", *QUICK, "--tasks", "loss,lookup", "--modes", "hint:router"]) == 0
    (file,) = (results / "runs" / "evaluate").glob("*")
    found = json.loads(file.read_text())
    assert list(found["scores"]) == ["loss", "lookup"] and found["kind"] == "measured"
    assert list(found["scores"]["loss"]) == ["baseline", "hint:router"]
    assert found["samples"]["loss"]["baseline"] == found["samples"]["loss"]["hint:router"]
    assert found["settings"]["limit"] == 4 and found["settings"]["model"] == "small"
    shown = capsys.readouterr().out
    assert str(file) in shown and "hint:router" in shown and "±" in shown


def test_a_store_scores_as_the_checkpoint_does(tmp_path):
    store = moelab.convert(None, tmp_path / "store").folder
    tasks = ["--tasks", "loss,needle"]
    resident = evaluated(tmp_path, *tasks)
    assert (
        resident["samples"] == evaluated(tmp_path, str(store), "--memory", "25%", *tasks)["samples"]
    )


def test_executors_and_decode_steps(tmp_path):
    modes = "executor:capacity:factor=0.5", "executor:blockwise:sharding=H"
    found = evaluated(tmp_path, "--tasks", "lookup", "--modes", ",".join(modes))
    assert list(found["scores"]["lookup"]) == ["baseline", *modes]
    assert found["settings"]["batch"] == 1  # or texts, and their padding, would compete for places
    mode = "speculative:previous"
    found = evaluated(tmp_path, "--tasks", "loss", "--modes", mode, "--decode-only")
    row = found["scores"]["loss"][mode]
    assert found["settings"]["scored"] == "decode steps"
    assert row["difference"] != 0 and 0 < row["recall"] < 1


def test_a_plan_answers_as_it_does_by_itself_and_says_what_it_drops(model, tmp_path):
    """Table 3's columns; every option reaches the plan or its run."""
    counts = calibrate(record(model, ["def f(x):\n    return x\n" * 20]), "a text")
    file = counts.save(tmp_path / "c.safetensors")
    modes = [
        "npumoe:chunk=32:overflow=pad",
        "npumoe:chunk=32:capacities=16",
        "npumoe:chunk=32:capacities=16,32:order=router:cold_share=0:min_rows=0:max_graphs=3",
        "executor:grouped:overflow=prune",
    ]
    few = ["--tasks", "loss", "--prompts", "4", "--calibration", str(file)]
    found = evaluated(tmp_path, *few, "--modes", ",".join(modes))
    assert list(found["scores"]["loss"]) == ["baseline", *modes]
    pad, prune, hot, grouped = (found["scores"]["loss"][mode] for mode in modes)
    assert pad["dropped"] == 0 < prune["dropped"] < 1 and 0 < pad["padded"] < 1
    assert pad["score"] == pytest.approx(found["scores"]["loss"]["baseline"]["score"], rel=1e-2)
    assert prune["score"] != pad["score"] and 0 < hot["padded"] < pad["padded"]
    assert {"dropped", "padded"} <= grouped.keys()
    calibrated = counts.counts(PREFILL), counts.tokens[PREFILL], 32
    plan = make_plan(model.spec, *calibrated, capacities=[16], model_id=counts.model_id)
    windows = scores.text_windows(model.tokenizer, "test", 4, 64)
    with prefill_through(model, plan) as ane:
        assert (
            scores.language_loss(model, windows, 1).tolist() == found["samples"]["loss"][modes[1]]
        )
    assert (ane.total.drop_rate, ane.total.padded_fraction) == (prune["dropped"], prune["padded"])


@pytest.mark.parametrize(
    "modes, message",
    [
        ("guess", "no mode 'guess'. There are: baseline, hint"),
        ("hint:hybrid", "needs estimator= (--estimator FILE); `moelab train estimator MODEL FILE`"),
        ("hint:psychic", "There are: router, quasi"),
        ("router-free:quasi", "only the estimator"),
        ("router-free", "needs estimator= (--estimator FILE); `moelab train estimator MODEL FILE`"),
        ("executor:fsat", "there is no executor"),
        ("executor:capacity:2", "OPTION=VALUE"),
        ("executor:capacity:colour=2", "colour"),
        ("executor:blockwise:sharding=h", "no sharding 'h'. Did you mean 'H'"),
        ("executor:grouped:colour=2", "no option of grouped 'colour'"),
        ("npumoe:colour=2", "no option of npumoe 'colour'"),
        ("npumoe:slack=none", "slack: 'none' is not a finite number"),
        ("npumoe:order", "OPTION=VALUE"),
        ("npumoe:capacities=16,40", "capacities 16, 40: each must be a multiple of 16"),
    ],
)
def test_what_makes_no_sense_is_told_in_a_line(modes, message, capsys):
    assert main(["evaluate", "--prompts", "1", "--tokens", "64", "--modes", modes]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told


def test_a_foreign_file_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "x").write_bytes(b"something else")
    monkeypatch.setattr(evaluate.accuracy, "compare", lambda *_, **__: pytest.fail("measured"))
    given = ["--modes", "speculative:router", "--estimator", str(tmp_path / "x")]
    assert main(["evaluate", *QUICK, *given]) == 2
    assert "no readable estimator" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["npumoe", "executor:grouped"])
def test_a_mode_that_cannot_run_is_told_before_the_baseline_is_scored(
    mode, model, tmp_path, monkeypatch, capsys
):
    counts = calibrate(record(model, ["def f(x):"]), "a text")
    file = dataclasses.replace(counts, model_id="of another").save(tmp_path / "c.safetensors")
    monkeypatch.setattr(evaluate.accuracy, "compare", lambda *_, **__: pytest.fail("measured"))
    assert main(["evaluate", *QUICK, "--modes", f"hint:router,{mode}", "--calibration", str(file)])
    assert "another model" in capsys.readouterr().err


def test_a_plan_that_there_cannot_be_is_told_before_the_model_is_opened(monkeypatch, capsys):
    monkeypatch.setattr(moelab, "open_model", lambda *_, **__: pytest.fail("opened"))
    assert main(["evaluate", "--modes", "npumoe:chunk=64,npumoe:capacities=16,40"]) == 2
    assert "each must be a multiple of 16" in capsys.readouterr().err


def test_without_lm_eval_its_tasks_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.task", None)
    assert main(["evaluate", "--tasks", "gsm8k"]) == 2
    told = capsys.readouterr().err
    assert "gsm8k" in told and "pip install 'moelab[peers]'" in told and "needle" in told


# ---- lm-eval


def test_scores_a_question_are_taken_where_lm_eval_reports_their_mean():
    def samples(kind, *rows):
        about = {"filter": kind, "metrics": list(rows[0])}
        return [about | {"doc_id": i} | row for i, row in enumerate(rows)][::-1]

    text = {"nats": 0.5, "perplexity": 2.0, "pair": (1.0, 2)}
    found = {
        "samples": {
            "gsm": samples("strict", {"hit": 0.0}, {"hit": 1.0})
            + samples("loose", {"hit": 1.0}, {"hit": 1.0}),
            "text": samples("none", text, text | {"nats": 1.5, "perplexity": 4.0}),
            "unreported": samples("none", {"hit": 1.0}),
        },
        "results": {
            "gsm": {"hit,strict": 0.5, "hit,loose": 1.0},
            "text": {"nats,none": 1.0, "perplexity,none": 20.0, "pair,none": 1.0},
            "unreported": {},
        },
    }
    taken = lm_eval_adapter.per_question(found)
    assert {name: values.tolist() for name, values in taken.items()} == {
        "gsm hit strict": [False, True],
        "gsm hit loose": [True, True],
        "text nats": [0.5, 1.5],
    }


def task_of(name, prompts, kind="loglikelihood"):
    """An lm-eval task that needs no network: right if greedy decoding gives exactly the answer."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    data = Dataset.from_list([{"text": p.text, "answer": p.answer} for p in prompts])
    about = {"task": name, "custom_dataset": lambda **_: {"test": data}, "test_split": "test"}
    about |= {"output_type": kind, "target_delimiter": "", "num_fewshot": 0}
    about |= {"doc_to_text": lambda doc: doc["text"], "doc_to_target": lambda doc: doc["answer"]}
    if kind == "generate_until":
        about["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}
    metric = "acc" if kind == "loglikelihood" else "exact_match"
    about["metric_list"] = [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]
    return ConfigurableTask(config=about | {"metadata": {"version": 1}})


def test_lm_eval_gives_moelabs_verdicts_in_every_mode(model):
    """What is plugged into the model is what lm-eval measures."""
    pytest.importorskip("lm_eval")
    prompts = accuracy.task_prompts(model.tokenizer, "lookup", 8, 128, 3)
    counts = calibrate(record(model, [p.text for p in prompts]))
    plan = make_plan(
        model.spec, counts.counts(PREFILL), counts.tokens[PREFILL], 128, capacities=[16]
    )
    modes = {"baseline": nullcontext, "damaged": lambda: wrong_experts(model)}
    modes |= {"plan": lambda: prefill_through(model, plan)}
    tasks = [task_of("words", prompts), task_of("said", prompts, "generate_until")]
    found, ran = lm_eval_adapter.compare(model, modes, tasks, limit=6, batch_size=1)
    for mode, context in modes.items():
        with context():
            right = scores.right_answers(model, prompts[:6], batch_size=1)
        assert found["words acc"][mode].tolist() == right
        if mode == "plan":
            assert all(ran[mode, name].total.drop_rate > 0 for name in found)
    words = found["words acc"]
    assert any(words["baseline"]) and list(words["damaged"]) != list(words["baseline"])


class FakeManager:
    """lm-eval's list of tasks, and data that cannot be had."""

    all_tasks = ("gsm8k", "boolq", "humaneval")

    def __init__(self, **_):
        pass

    def load(self, names):
        if names == ["humaneval"]:
            raise ValueError("set the environment variable HF_ALLOW_CODE_EVAL")
        raise ConnectionError(f"Couldn't reach {names[0]} on the Hub\nand much more")


@pytest.mark.parametrize(
    "tasks, message",
    [
        ("boolq", "boolq cannot be loaded here: ConnectionError: Couldn't reach boolq on the Hub."),
        ("humaneval", "without a sandbox; --run-code"),
        ("gsm9k", "neither moelab nor lm-eval has a task 'gsm9k'"),
    ],
)
def test_what_lm_eval_cannot_do_is_told_in_a_line(tasks, message, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("lm_eval.tasks.TaskManager", FakeManager)
    assert main(["evaluate", "--tasks", tasks]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told and "much more" not in told
