"""lm-eval's tasks on a model that moelab has opened: resident, offloaded or speculating.

lm-eval is given the open model, so what is plugged into its seam is what is measured. moelab's own
prompts are lm-eval tasks too (`moelab_needle` …), need no network, and get the verdicts of
`moelab.evaluation.scores`. lm-eval's own go by its names, or by those in Table 1 of Speculating
Experts, and download their data. One score a question is kept, so that modes are compared in pairs;
metrics that are no mean over questions (corpus BLEU, perplexities) are left out."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from moelab.evaluation.accuracy import TASKS, Modes, Samples, task_prompts
from moelab.models.greedy import greedy
from moelab.records import Record
from moelab.registry import near

ALLOW_CODE = "HF_ALLOW_CODE_EVAL"
INSTALL = "pip install 'moelab[peers]'"
#: moelab's tasks under lm-eval
LOCAL = {f"moelab_{task}": task for task in TASKS if task != "loss"}
OWN = [*TASKS, *LOCAL]
#: the benchmarks of the sources that lm-eval calls otherwise
BENCHMARKS = {"mbpp+": "mbpp_plus", "strategyqa": "bigbench_strategyqa_multiple_choice"}


def compare(
    model: Any,
    modes: Modes,
    tasks: Sequence[Any],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    chat: bool = False,
) -> Samples:
    """Run what `load` returned in every mode: {"task metric": {mode: one score a question [n]}};
    `limit` questions a task, None for all; `chat` puts them into the tokenizer's chat template."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # The tasks are made already, so that no list of lm-eval's ten thousand is needed, which takes
    # long; `load` has asked whether code may run.
    options = {
        "bootstrap_iters": 0,
        "task_manager": TaskManager(include_defaults=False),
        "confirm_run_unsafe_code": True,
    }
    samples: Samples = {}
    for mode, context in modes.items():
        lm = _adapter(model, batch_size)
        with context():
            found = simple_evaluate(
                lm, tasks=list(tasks), limit=limit, apply_chat_template=chat, **options
            )
        for name, values in per_question(found).items():
            samples.setdefault(name, {})[mode] = values
    if not samples:
        raise ValueError(
            f"no metric of {', '.join(task.task_name for task in tasks)} is a mean over "
            "questions, so modes cannot be compared in pairs; use lm-eval itself"
        )
    for name, of in samples.items():
        if lacking := [mode for mode in modes if mode not in of]:
            raise ValueError(
                f"{name} is no mean over questions in mode {lacking[0]}, though it is in "
                f"{next(iter(of))}: a score there is no number; leave out the mode or the task"
            )
    return samples


def per_question(found: Record) -> dict[str, np.ndarray]:
    """{"task metric": score of each question [n]} of lm-eval's results, in its order of questions;
    right or wrong is bool. A metric stays only if the mean of its scores is what lm-eval
    reports."""
    scores: dict[str, np.ndarray] = {}
    for task, rows in found["samples"].items():
        filters = list(dict.fromkeys(row["filter"] for row in rows))
        for kind in filters:
            own = sorted((of for of in rows if of["filter"] == kind), key=lambda of: of["doc_id"])
            for metric in own[0]["metrics"]:
                try:
                    values = np.array([float(row[metric]) for row in own])
                except (TypeError, ValueError):  # no number
                    continue
                reported = found["results"][task].get(f"{metric},{kind}", np.nan)
                if np.isclose(values.mean(), reported):
                    name = " ".join([task, metric] + [kind] * (len(filters) > 1))
                    scores[name] = values.astype(bool) if {*values} <= {0.0, 1.0} else values
    return scores


def load(
    names: Sequence[str],
    model: Any,
    *,
    n: int = 200,
    tokens: int = 256,
    seed: int = 0,
    run_code: bool = False,
) -> list[Any]:
    """lm-eval's task objects, their data loaded.

    names : of `LOCAL`, or lm-eval's own; a group or tag stands for its
        members.
    n, tokens, seed : prompts of a local task; `tokens`, of the model's tokenizer, is RULER's
        context length too.
    run_code : allow tasks that execute what the model writes (HumanEval, MBPP+), on this machine,
        without a sandbox.

    Raises ImportError without lm-eval; ValueError for an unknown task, or one that executes code
    without `run_code`; RuntimeError: the data of a task cannot be had here."""
    try:
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(
            f"{', '.join(names)}: no task of moelab's own ({', '.join(TASKS)})."
            f"{near(names[0], OWN)} lm-eval, which may have it, is not installed ({error}): "
            f"{INSTALL}"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if run_code:
        os.environ[ALLOW_CODE] = "1"  # asked for when such a task is made
    tasks, manager = [], None
    for name in names:
        if name in LOCAL:
            config = local_config(name, model.tokenizer, n, tokens, seed)
            tasks.append(ConfigurableTask(config=config))
            continue
        if manager is None:
            about = {"max_seq_lengths": [tokens], "pretrained": model.name_or_path}
            manager = TaskManager(metadata=about)
        called = (name, BENCHMARKS.get(name.lower(), name.lower()))
        known = next((one for one in called if one in manager.all_tasks), None)
        if known is None:
            raise ValueError(
                f"neither moelab nor lm-eval has a task {name!r}.{near(name, OWN)} moelab's "
                f"are {', '.join(OWN)}, and `lm-eval ls tasks` lists lm-eval's"
            )
        try:
            found = [*manager.load([known])["tasks"].values()]
            unsafe = any(getattr(task, "UNSAFE_CODE", False) for task in found)
        except Exception as error:  # each data set has its own kinds of "cannot be had"
            if unsafe := ALLOW_CODE in str(error):
                found = []
            else:
                why = (str(error).splitlines() or ["no details"])[0]
                raise RuntimeError(
                    f"the data of the task {name} cannot be loaded here: {type(error).__name__}: "
                    f"{why}. Data need a network, or a cache that was filled before (HF_HOME); "
                    f"without one, use {', '.join(LOCAL)}"
                ) from error
        if unsafe and not run_code:
            raise ValueError(
                f"{name}: the code that the model writes is executed, on this machine and without "
                "a sandbox; --run-code (run_code=True) allows that"
            )
        tasks += found
    return tasks


def local_config(name: str, tokenizer: Any, n: int, tokens: int, seed: int) -> Record:
    """lm-eval's configuration of one of moelab's tasks: right if greedy decoding gives exactly the
    answer."""

    def questions(**_: Any) -> Record:
        from datasets import Dataset

        prompts = task_prompts(tokenizer, LOCAL[name], n, tokens, seed)
        return {"test": Dataset.from_list([{"text": p.text, "answer": p.answer} for p in prompts])}

    return {
        "task": name,
        "custom_dataset": questions,
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": lambda doc: doc["text"],
        "doc_to_target": lambda doc: doc["answer"],
        "target_delimiter": "",
        "num_fewshot": 0,
        "metadata": {"version": 1},
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def _adapter(model: Any, batch_size: int) -> Any:
    """lm-eval's view of an open model, which decodes as the model does."""
    from lm_eval.models.huggingface import HFLM

    class OpenModel(HFLM):
        def _model_generate(self, *args: Any, **options: Any) -> Any:
            return super()._model_generate(*args, **greedy(model) | options)

    return OpenModel(pretrained=model, tokenizer=model.tokenizer, batch_size=batch_size)
