"""What executing predictions costs in right answers and language loss: Table 1's rows on the small
model, or on one's own.

Source: Speculating Experts §4.1 and Table 1 (Router-PF, Est-PF, Hybrid-PF). Predictions are executed
in decode steps alone, as a server would, and all is scored in decode steps. Tasks are moelab's own
and, where lm-eval is installed, its own that need no network: RULER's needles. Differences are
paired, with 95 % intervals. The estimator is a file of

    moelab train estimator MODEL FILE"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from moelab import open_model, using
from moelab.base.arguments import one_of, several, whole
from moelab.base.records import Record
from moelab.evaluation import accuracy, lm_eval_adapter

#: the paper's name of a way → what `speculate` names it
MODES = {"Router-PF": "quasi", "Est-PF": "estimator", "Hybrid-PF": "hybrid"}
OWN = ("loss", "needle_multikey", "lookup", "yesno", "completion", "couples", "sums")
RULER = ("niah_single_1",)


def rows(scores: Mapping[str, Mapping[str, Record]]) -> dict[str, Record]:
    """A row a task and mode, of what `accuracy.summarise` returns."""
    found = {}
    for task, modes in scores.items():
        for mode, of in modes.items():
            low, high = of.get("interval", (None, None))
            row = {"n": of["n"], "score": of["score"], "error": of["error"]}
            row |= {"difference": of.get("difference"), "from": low, "to": high}
            row |= {name: of.get(name) for name in ("lost", "gained")}
            found[f"{task}, {mode}"] = {name: x for name, x in row.items() if x is not None}
    return found


def run(
    estimator: str | None = None,
    model: str | None = None,
    modes: Iterable[str] = tuple(MODES),
    tasks: Sequence[str] = OWN,
    ruler: Sequence[str] = RULER,
    questions: int = 100,
    limit: int = 20,
    windows: int = 24,
    tokens: int = 256,
    seed: int = 0,
) -> dict[str, Any]:
    if estimator is None:
        raise ValueError(
            "--estimator FILE is missing; `moelab train estimator MODEL FILE` makes one"
        )
    lm = open_model(model)
    ways: dict[str, Any] = {"baseline": nullcontext} | {
        name: partial(using, lm, speculate=MODES[name], estimator=estimator) for name in modes
    }
    how = {"n": questions, "windows": windows, "tokens": tokens, "seed": seed, "decode": True}
    found = {"own tasks (measured)": rows(accuracy.compare(lm, ways, tasks, **how)["scores"])}
    title = "lm-eval (measured)"
    try:
        asked = lm_eval_adapter.load(ruler, lm, tokens=2 * tokens) if ruler else []
    except (ImportError, RuntimeError) as error:
        return found | {title: {"all": {"result": str(error)}}}
    if asked:
        samples = lm_eval_adapter.compare(lm, ways, asked, limit=limit, batch_size=1)
        known = {name: of for name, of in samples.items() if str(2 * tokens) in name}
        found[title] = rows(accuracy.summarise(known))
    return found


MEASURES = ("moelab/speculate", "moelab/evaluation")
OPTIONS = {
    "estimator": (None, "a file of `moelab train estimator`, of this model"),
    "model": (None, "a checkpoint's folder, a store or a hub id; else the small model"),
    "modes": (several(one_of(MODES)), "of executing predictions"),
    "tasks": (several(one_of(accuracy.TASKS)), "moelab's own"),
    "ruler": (several(one_of(RULER)), "of lm-eval, that need no network"),
    "questions": (whole(2), "of each of moelab's tasks"),
    "limit": (whole(2), "questions of each of lm-eval's"),
    "windows": (whole(2), "of library text, for the loss"),
    "tokens": (whole(64), "of a prompt; RULER's have twice as many"),
    "seed": (whole(), "picks prompts and windows"),
}
