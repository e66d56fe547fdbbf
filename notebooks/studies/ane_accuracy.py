"""Accuracy of the small model through an NPUMoE plan, with drops and padding, against dense
execution.

The plan comes from a calibration on the training split, its `slack` from the share of routings to
drop (10.6 to 21.8 % in NPUMoE Table 3). Every order of dropping answers the same held-out prompts,
at batch size 1, by teacher forcing, in float32. The answer's own tokens are in the prefill and may
be dropped, which is harder than the paper's setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from moelab import open_model
from moelab.ane.plan import Account, ANEPlan, make_plan
from moelab.ane.runtime import prefill_through
from moelab.base.arguments import number, one_of, several, whole
from moelab.base.library import token_count
from moelab.base.records import Record, Records
from moelab.calibration import calibrate
from moelab.evaluation import accuracy, questions
from moelab.recording import record
from moelab.trace import PREFILL, RoutingTrace

from .ane_counts import count
from .chunks import loads_of_ids

#: mode → which routings it drops first, a name in `moelab.static.static.ORDERS`
MODES = {
    "weakest attention (NPUMoE)": "saliency",
    "lowest router weight": "router",
    "random": "random",
    "latest token": "token",
    "strongest attention": "strongest",
}
TASKS = ("needle_multikey", *questions.REMEMBERED, "completion")
COLUMNS = ("n", "score", "error", "difference", "difference error", "lost", "gained", "p")
#: sources of the training split that the plan is calibrated on
CALIBRATION = ("needle", "needle_multikey", "yesno", "code", "prose")
SLACKS = tuple(i / 20 for i in range(4, 41))
MEASURES = ("moelab/ane", "moelab/static")


def run(
    model: str | None = None,
    tasks: Sequence[str] = TASKS,
    prompts: int = 400,
    tokens: int = 256,
    chunk: int = 256,
    drop: float = 0.14,
    calibration: int = 32,
    seed: int = 0,
) -> Records:
    """{section: {row: {column: figure}}}; the sections' names say what kind of figures they are."""
    live = open_model(model, dtype=torch.float32)
    trace = recorded(live, calibration, tokens, "train", seed)
    plans = plans_of(trace, chunk, 8)
    seen = prompt_loads(trace, chunk)
    rates = {slack: count(plan, seen).drop_rate for slack, plan in plans.items()}
    slack = min(rates, key=lambda slack: abs(rates[slack] - drop))
    plan, sizes = plans[slack], {"windows": max(prompts // 4, 4), "tokens": tokens}
    ways = {name: (plan, order) for name, order in MODES.items()}
    found, of = compare(live, ways, tasks, seed, n=prompts, **sizes)
    print("\n" + accuracy.table(found), flush=True)
    return {
        "plan (exact)": {
            "slack": slack,
            "chunk": float(chunk),
            "expert graphs a chunk": float(plan.launches),
            "rows a chunk": float(plan.slots),
            "drop rate on the calibration": rates[slack],
        },
        "accuracy (measured), drops and padding (exact)": {
            f"{task}: {mode}": {key: row[key] for key in COLUMNS if key in row}
            | (
                {
                    "dropped": (counts := of[mode][task]).drop_rate,
                    "padded": counts.padded_fraction,
                    "launches a chunk and layer": counts.launches / counts.chunks,
                }
                if mode in of
                else {}
            )
            for task, by_mode in found["scores"].items()
            for mode, row in by_mode.items()
        },
    }


def compare(
    model: Any,
    ways: Mapping[str, tuple[ANEPlan, str]],
    tasks: Sequence[str],
    seed: int = 0,
    **how: Any,
) -> tuple[Record, dict[str, dict[str, Account]]]:
    """(`accuracy.compare` of "dense" and of name → (plan, order of dropping); name → task →
    counts)."""
    modes = {
        name: partial(prefill_through, model, plan, order=order, seed=seed)
        for name, (plan, order) in ways.items()
    }
    ran: dict[tuple[str, str], Any] = {}
    modes = {"dense": nullcontext} | modes  # texts of a batch would compete for capacity
    found = accuracy.compare(model, modes, tasks, seed=seed, batch_size=1, ran=ran, **how)
    return found, {name: {task: ran[name, task].total for task in tasks} for name in ways}


def recorded(model: Any, n: int, tokens: int, split: str, seed: int = 0) -> RoutingTrace:
    """The routing of n prompts of each source of `CALIBRATION`."""
    how = {"tokens": tokens, "seed": seed, "split": split, "count": token_count(model.tokenizer)}
    return record(model, questions.prompts(CALIBRATION, n, **how), batch_size=16)


def prompt_loads(trace: RoutingTrace, chunk: int) -> np.ndarray:
    """Tokens that each expert gets in each chunk of the prompts, int64 [n, L, E]; each prompt has
    chunks of its own."""
    ids, sequence = (values[trace.phase == PREFILL] for values in (trace.ids, trace.sequence))
    return torch.cat(
        [loads_of_ids(ids[sequence == s], chunk, trace.spec.E) for s in sequence.unique()]
    ).numpy()


def plans_of(
    trace: RoutingTrace, chunk: int, group_size: int, slacks: Sequence[float] = SLACKS
) -> dict[float, ANEPlan]:
    """Factor on all capacities → the plan by the trace's calibration."""
    found = calibrate(trace)
    counts = found.counts(PREFILL), found.tokens[PREFILL]
    how = {"model_id": found.model_id, "group_size": group_size}
    return {s: make_plan(trace.spec, *counts, chunk, slack=s, **how) for s in slacks}


#: share dropped, loss in per cent more than dense, its standard error
Cost = tuple[float, float, float]


def loss_by_order(
    model: Any, plans: Mapping[float, ANEPlan], seed: int = 0, **how: Any
) -> tuple[dict[str, dict[float, Cost]], dict[float, tuple[float, float, float]]]:
    """Language loss through plans, in every order; `how` are the sizes of `accuracy.compare`.

    Returns order → slack → what it costs; and slack → loss by saliency less loss at random on the
    same windows, nats a token: (mean, low, high)."""
    ways = {f"{order} @ {s:g}": (plans[s], order) for order in MODES.values() for s in plans}
    found, counts = compare(model, ways, ["loss"], seed, **how)
    samples, rows = found["samples"]["loss"], found["scores"]["loss"]

    def cost(way: str) -> Cost:
        row = rows[way]
        return counts[way]["loss"].drop_rate, row["relative"], row["relative error"]

    beside = {}
    for s in plans:
        pair = (np.array(samples[f"{order} @ {s:g}"]) for order in ("random", "saliency"))
        row = accuracy.paired(*pair)
        beside[s] = row["difference"], *row["interval"]
    costs = {order: {s: cost(f"{order} @ {s:g}") for s in plans} for order in MODES.values()}
    return costs, beside


OPTIONS = {
    "model": (None, "a checkpoint folder, a store or a hub id; if not given, the small model"),
    "tasks": (several(one_of(accuracy.TASKS)), f"of {', '.join(accuracy.TASKS)}"),
    "prompts": (whole(1), "a task"),
    "tokens": (whole(1), "length of a prompt"),
    "chunk": (whole(1), "tokens of a prefill chunk"),
    "drop": (
        number(0, most=1),
        "share of routings to drop, by which the slack is chosen on the calibration",
    ),
    "calibration": (whole(1), "prompts a source"),
    "seed": (whole(), "picks the prompts"),
}
