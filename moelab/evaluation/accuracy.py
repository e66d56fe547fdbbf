"""Accuracy of running a model in several modes: language loss and right answers, each mode against
a baseline.

Source: Speculating Experts §4.1 and Table 1 (accuracy ± standard error of executing predicted
experts), on text and questions that need no network. All modes see the same windows and prompts, so
differences are *paired*.

    score        mean ± s/√n over windows or prompts (s: sample standard deviation)
    difference   mean of mode − baseline over the same windows or prompts, ± s/√n of these
                 differences
    relative     of the loss, in per cent of the baseline's; its error is that of a ratio of means
                 (delta method)
    p            of right answers: exact two-sided McNemar test on the answers lost and gained
    interval     95 %: of right answers that of Agresti and Min (2005), which is never empty; of
                 losses Student's
Windows of one library file are taken as independent, which makes errors of the loss slightly small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from moelab.base.library import token_count
from moelab.base.records import Numbers, Record, Records
from moelab.base.registry import require
from moelab.base.table import head_and_rows, percent, text_table
from moelab.evaluation import questions, scores
from moelab.evaluation.intervals import interval, standard_error
from moelab.evaluation.questions import Prompt

#: task → the sources of its prompts, in equal parts; "loss" is the language loss on held-out
#: library text
TASKS: dict[str, tuple[str, ...]] = {
    "loss": (),
    "needle": ("needle",),
    "needle_multikey": ("needle_multikey",),
    "lookup": ("lookup",),
    "yesno": ("yesno",),
    "completion": ("code", "prose"),
    **{name: (name,) for name in questions.REMEMBERED},
}

#: what a row has beside scores where the mode counts it, see `counted`
COUNTED = ("recall", "dropped", "padded")

#: name of a mode → what makes the context manager under which the model runs in that mode
Modes = Mapping[str, Callable[[], AbstractContextManager]]
#: task → mode → one score a window (nats a token) or a prompt (right or wrong), in the same order
#: in every mode
Samples = dict[str, dict[str, np.ndarray]]


def compare(
    model: Any,
    modes: Modes,
    tasks: Sequence[str] = tuple(TASKS),
    *,
    n: int = 200,
    windows: int = 64,
    tokens: int = 256,
    seed: int = 0,
    decode: bool = False,
    batch_size: int = 16,
    ran: dict[tuple[str, str], Any] | None = None,
) -> Record:
    """Score one model in several modes on the same held-out text and prompts.

    modes : the first is the baseline; `nullcontext` is the model as it is.
    n : prompts a task; windows : windows of library text; tokens : length of each, in the model's
        own tokens.
    decode : False reads each text in one forward pass; True computes what is scored (the answers,
        the last quarter of each window) in decode steps after an ordinary prefill, one text at a
        time.
    batch_size : texts of one length in a forward pass.
    ran : gets (mode, task) → what the mode's context yielded.

    Returns a JSON-able dictionary: "settings"; "scores", see `summarise`, with what `counted` finds;
    "samples": {task: {mode: [score, …]}}. Raises ValueError: unknown tasks, no modes,
    fewer than two samples, an encoder-decoder, no tokenizer."""
    _require_scorable(model, modes, tasks)
    texts = {
        task: scores.text_windows(model.tokenizer, "test", windows, tokens, seed)
        if task == "loss"
        else task_prompts(model.tokenizer, task, n, tokens, seed)
        for task in tasks
    }
    samples: Samples = {task: {} for task in texts}
    ran = {} if ran is None else ran
    for mode, context in modes.items():
        for task, items in texts.items():
            decoded = tokens // 4 if decode and task == "loss" else decode
            score = scores.language_loss if task == "loss" else scores.right_answers
            with context() as ran[mode, task]:
                samples[task][mode] = np.array(
                    score(model, items, batch_size, decoded, f"{mode}: {task}")
                )
    settings = {
        "prompts": n,
        "windows": windows,
        "tokens": tokens,
        "seed": seed,
        "scored": "decode steps" if decode else "one forward pass",
    }
    return result(samples, settings, ran)


def _require_scorable(model: Any, modes: Modes, tasks: Sequence[str]) -> None:
    for task in tasks:
        require("task", task, TASKS)
    if not modes or not tasks:
        raise ValueError(
            "there is no mode or no task; give at least a baseline, such as {'baseline': "
            f"nullcontext}}, and one of {', '.join(TASKS)}"
        )
    if model.config.is_encoder_decoder or getattr(model, "tokenizer", None) is None:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder or has no tokenizer, and the tasks here "
            "continue a text; put a tokenizer beside its weights, or use lm-eval's tasks"
        )


def task_prompts(tokenizer: Any, task: str, n: int, tokens: int, seed: int) -> list[Prompt]:
    """`n` prompts of a task; a task of several sources takes them in turn."""
    count = token_count(tokenizer)
    sources = [
        questions.prompts(source, -(-n // len(TASKS[task])), tokens=tokens, seed=seed, count=count)
        for source in TASKS[task]
    ]
    return [prompt for turn in zip(*sources) for prompt in turn][:n]


def counted(running: Any) -> Numbers:
    """What a mode's context has counted, as shares: "recall" of predictions, "dropped" routings and
    "padded" rows of experts with static capacities (NPUMoE Table 3)."""
    found = {}
    if hasattr(running, "recall"):
        found["recall"] = float(running.recall().nanmean())
    if tally := getattr(running, "total", None) or getattr(running, "tally", None):
        found["dropped"], found["padded"] = tally.drop_rate, tally.padded_fraction
    return {name: share for name, share in found.items() if not math.isnan(share)}


def result(
    samples: Samples, settings: Record, ran: Mapping[tuple[str, str], Any] | None = None
) -> Record:
    """The document that `compare` returns, of any samples and (mode, task) → what ran."""
    scores_of = summarise(samples)
    for (mode, task), running in (ran or {}).items():
        scores_of[task][mode] |= counted(running)
    return {
        "kind": "measured",
        "settings": settings,
        "scores": scores_of,
        "samples": {
            task: {mode: values.tolist() for mode, values in by_mode.items()}
            for task, by_mode in samples.items()
        },
    }


def summarise(samples: Samples) -> dict[str, Records]:
    """{task: {mode: row}}; the first mode of a task is its baseline.

    A row has "unit", "n", "score" and "error" and, but for the baseline, what `paired` returns."""
    rows: dict[str, Records] = {}
    for task, of in samples.items():
        by_mode = {mode: np.asarray(values) for mode, values in of.items()}
        base = next(iter(by_mode.values()))
        # a metric that happens to be 0 or 1 throughout in one mode is no count of right answers
        answers = all(values.dtype == bool for values in by_mode.values())
        unit = "share of right answers" if answers else {"loss": "nats a token"}.get(task, "score")
        rows[task] = {}
        for mode, values in by_mode.items():
            if len(values) < 2 or len(values) != len(base):
                raise ValueError(
                    f"{task}: {mode} has {len(values)} samples and the baseline {len(base)}; "
                    "a standard error needs at least two, and pairs as many of each"
                )
            row = {"unit": unit, "n": len(values)} | _mean("score", "error", values)
            rows[task][mode] = row if values is base else row | paired(base, values)
    return rows


def paired(base: np.ndarray, values: np.ndarray) -> Record:
    """One mode's scores against another's, over the same windows or prompts [n]: "difference",
    "difference error" and "interval"; of right answers, if both are bool, "lost", "gained" and "p",
    of other scores "relative" and "relative error" (per cent of the baseline's mean)."""
    from scipy.stats import binomtest  # takes a moment to import

    base, values = np.asarray(base), np.asarray(values)
    change = values.astype(float) - base
    row: Record = _mean("difference", "difference error", change)
    if base.dtype == values.dtype == bool:
        lost, gained, n = int((change < 0).sum()), int((change > 0).sum()), len(base)
        # Agresti and Min: 1/2 to each cell of the 2×2 table
        mean = (gained - lost) / (n + 2)
        half = 1.96 * math.sqrt(((lost + gained + 1) / (n + 2) - mean**2) / (n + 2))
        row["interval"] = [max(mean - half, -1.0), min(mean + half, 1.0)]
        p = float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0
        return row | {"lost": lost, "gained": gained, "p": p}
    row["interval"] = list(interval(change)[1:])
    if base.mean() > 0:
        ratio = values.mean() / base.mean()
        row["relative"] = 100 * (ratio - 1)
        row["relative error"] = 100 * standard_error(values - ratio * base) / base.mean()
    return row


def _mean(name: str, error: str, values: np.ndarray) -> Numbers:
    values = values.astype(float)
    return {name: float(values.mean()), error: standard_error(values)}


def table(found: Record) -> str:
    """A result as text, one line a task and mode; answers in per cent and points, losses in nats a
    token."""
    rows = []
    for task, by_mode in found["scores"].items():
        answers = next(iter(by_mode.values()))["unit"].startswith("share")
        scale, digits = (100, 1) if answers else (1, 4)
        for mode, row in by_mode.items():
            score = f"{scale * row['score']:.{digits}f} ± {scale * row['error']:.{digits}f}"
            told = {"task": task, "mode": mode, "score ± s.e.": score + " %" * answers}
            if "difference" in row:
                low, high = (f"{scale * end:+.{digits}f}" for end in row["interval"])
                error = f"{scale * row['difference error']:.{digits}f}"
                told["paired difference"] = f"{scale * row['difference']:+.{digits}f} ± {error}"
                told["95 %"] = f"[{low}, {high}]"
            if answers and "p" in row:
                lost, gained = row["lost"], row["gained"]
                told["change"] = f"{lost} lost, {gained} gained, p = {row['p']:.2g}"
            elif "relative" in row:
                told["change"] = f"{row['relative']:+.2f} % ± {row['relative error']:.2f}"
            rows.append(told | {name: percent(row[name]) for name in COUNTED if name in row})
    return text_table(*head_and_rows(rows))
