"""lm-eval's tasks on a model that moelab has opened: resident, offloaded or speculating.

lm-eval is given the open model, so what is plugged into its seam is what is measured. Tasks go by
lm-eval's names and download their data. One score a question is kept, so that modes are compared in
pairs; metrics that are no mean over questions (corpus BLEU, perplexities) are left out."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from moelab.base.records import Record
from moelab.base.registry import near
from moelab.evaluation.accuracy import TASKS, Modes, Samples
from moelab.models.greedy import greedy

ALLOW_CODE = "HF_ALLOW_CODE_EVAL"


def compare(
    model: Any,
    modes: Modes,
    tasks: Sequence[Any],
    *,
    limit: int | None = None,
    few_shot: int | None = None,
    batch_size: int = 8,
    chat: bool = False,
) -> tuple[Samples, dict[tuple[str, str], Any]]:
    """Run what `load` returned in every mode: {"task metric": {mode: one score a question [n]}},
    and (mode, "task metric") → what the mode's context yielded.

    limit : questions a task, None for all; few_shot : solved examples before each, None for the
    task's own number; chat : in the tokenizer's chat template. ValueError: no metric is a mean over
    questions in every mode."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    class OpenModel(HFLM):
        """Decodes as the model does."""

        def _model_generate(self, *args: Any, **options: Any) -> Any:
            return super()._model_generate(*args, **greedy(model) | options)

    found: Samples = {}
    ran = {}
    lm = OpenModel(pretrained=model, tokenizer=model.tokenizer, batch_size=batch_size)
    for (mode, context), task in product(modes.items(), tasks):
        with context() as running:
            # The tasks are made already, so that no list of lm-eval's ten thousand is needed, which
            # takes long; `load` has asked whether code may run.
            results = simple_evaluate(
                lm,
                tasks=[task],
                limit=limit,
                num_fewshot=few_shot,
                apply_chat_template=chat,
                bootstrap_iters=0,
                task_manager=TaskManager(include_defaults=False),
                confirm_run_unsafe_code=True,
            )
        for name, scores in per_question(results).items():
            found.setdefault(name, {})[mode] = scores
            ran[mode, name] = running
    lacking = [name for name, of in found.items() if len(of) < len(modes)]
    if lacking or not found:
        raise ValueError(
            f"{', '.join(lacking or [task.task_name for task in tasks])}: no mean over "
            "questions in every mode, so modes cannot be compared in pairs; leave out the task or "
            "the mode, or use lm-eval itself"
        )
    return found, ran


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
    names: Sequence[str], model: Any, *, tokens: int = 256, run_code: bool = False
) -> list[Any]:
    """lm-eval's task objects, their data loaded.

    names : lm-eval's own; a group or tag stands for its members.
    tokens : of the model's tokenizer, RULER's context length.
    run_code : allow tasks that execute what the model writes (HumanEval, MBPP+), on this machine,
        without a sandbox.

    Raises ImportError without lm-eval; ValueError for an unknown task, or one that executes code
    without `run_code`; RuntimeError: the data of a task cannot be had here."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(
            f"{', '.join(names)}: no task of moelab's own ({', '.join(TASKS)})."
            f"{near(names[0], TASKS)} lm-eval, which may have it, is not installed ({error}): "
            "pip install 'moelab[peers]'"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if run_code:
        os.environ[ALLOW_CODE] = "1"  # asked for when such a task is made
    manager = TaskManager(metadata={"max_seq_lengths": [tokens], "pretrained": model.name_or_path})
    tasks = []
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(
                f"neither moelab nor lm-eval has a task {name!r}.{near(name, TASKS)} moelab's are "
                f"{', '.join(TASKS)}, and `lm-eval ls tasks` lists lm-eval's"
            )
        found, unsafe = [], False
        try:
            found = [*manager.load([name])["tasks"].values()]
            unsafe = any(getattr(task, "UNSAFE_CODE", False) for task in found)
        except Exception as error:  # each data set has its own kinds of "cannot be had"
            unsafe = ALLOW_CODE in str(error)
            if not unsafe:
                raise RuntimeError(
                    f"the data of the task {name} cannot be loaded here: {type(error).__name__}: "
                    f"{str(error).partition(chr(10))[0]}. Data need a network, or a cache that was "
                    f"filled before (HF_HOME); without one, use {', '.join(TASKS)}"
                ) from error
        if unsafe and not run_code:
            raise ValueError(
                f"{name}: the code that the model writes is executed, on this machine and without "
                "a sandbox; --run-code (run_code=True) allows that"
            )
        tasks += found
    return tasks
