"""Accuracy of the small model through an NPUMoE plan, with drops and padding, against dense
execution.

The plan comes from a calibration on the training split, its `slack` from the share of routings to
drop (10.6 to 21.8 % in NPUMoE Table 3). Every order of dropping answers the same held-out prompts,
at batch size 1, by teacher forcing, in float32. The answer's own tokens are in the prefill and may
be dropped, which is harder than the paper's setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from moelab import open_model
from moelab.ane.device.published import TABLE_3
from moelab.ane.plan import Account, ANEPlan, count, make_plan
from moelab.ane.runtime import prefill_through
from moelab.arguments import number, one_of, several, whole
from moelab.calibration import calibrate
from moelab.evaluation import accuracy, questions
from moelab.library import token_count
from moelab.recording import record
from moelab.records import Record, Records
from moelab.static.loads import loads_of_ids
from moelab.trace import PREFILL, RoutingTrace

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


OPTIONS = {
    "model": (None, "a checkpoint folder, a store or a hub id; if not given, the small model"),
    "tasks": (several(one_of(accuracy.TASKS)), f"of {', '.join(accuracy.TASKS)}"),
    "prompts": (whole(1), "a task"),
    "tokens": (whole(1), "length of a prompt"),
    "chunk": (whole(1), "tokens of a prefill chunk"),
    "group_size": (whole(1), "experts a graph"),
    "system": (None, "a key of moelab.ane.systems.SYSTEMS"),
    "drop": (
        number(0, most=1),
        "share of routings to drop, by which the slack is chosen on the calibration",
    ),
    "slack": (number(above=0), "factor of all capacities, instead of --drop"),
    "calibration": (whole(1), "prompts a source"),
    "seed": (whole(), "picks the prompts"),
}


def run(
    model: str | None = None,
    tasks: Sequence[str] = TASKS,
    prompts: int = 400,
    tokens: int = 256,
    chunk: int = 256,
    group_size: int = 8,
    system: str = "npumoe",
    drop: float = 0.14,
    slack: float | None = None,
    calibration: int = 32,
    seed: int = 0,
) -> Records:
    """{section: {row: {column: figure}}}; the sections' names say what kind of figures they are."""
    live = open_model(model, dtype=torch.float32)
    trace = recorded(live, calibration, tokens, "train", seed)
    plan, slack, expected = fitting_plan(
        trace, chunk, drop, slack, group_size=group_size, system=system
    )
    found, of = compare(
        live,
        {name: (plan, order) for name, order in MODES.items()},
        tasks,
        seed,
        n=prompts,
        windows=max(prompts // 4, 4),
        tokens=tokens,
    )
    print("\n" + accuracy.table(found), flush=True)
    return {
        "plan (exact)": {
            "slack": slack,
            "chunk": float(chunk),
            "layers": float(plan.spec.L),
            "expert graphs a chunk": float(plan.launches),
            "rows a chunk": float(plan.slots),
            "drop rate on the calibration": expected,
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
        "NPUMoE Table 3 (paper), PhiMoE": {
            name: {"dropped": dropped, "padded": padded}
            for name, (dropped, padded, *_) in TABLE_3.items()
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
    found, ran = accuracy.compare_dropping(model, modes, tasks, "dense", seed=seed, **how)
    return found, {
        name: {task: ane.total for task, ane in by_task.items()} for name, by_task in ran.items()
    }


def recorded(model: Any, n: int, tokens: int, split: str, seed: int = 0) -> RoutingTrace:
    """The routing of n prompts of each source of `CALIBRATION`."""
    return record(
        model,
        questions.prompts(
            CALIBRATION,
            n,
            tokens=tokens,
            seed=seed,
            split=split,
            count=token_count(model.tokenizer),
        ),
        batch_size=16,
    )


def prompt_loads(trace: RoutingTrace, chunk: int) -> np.ndarray:
    """Tokens that each expert gets in each chunk of the prompts, int64 [n, L, E]; each prompt has
    chunks of its own."""
    ids, sequence = (values[trace.phase == PREFILL] for values in (trace.ids, trace.sequence))
    return torch.cat(
        [loads_of_ids(ids[sequence == s], chunk, trace.spec.E) for s in sequence.unique()]
    ).numpy()


def fitting_plan(
    trace: RoutingTrace, chunk: int, drop: float, slack: float | None = None, **options: Any
) -> tuple[ANEPlan, float, float]:
    """(plan, slack, drop rate on the trace): with the slack, or that which drops about `drop` of
    its routings."""
    found = calibrate(trace)
    loads = prompt_loads(trace, chunk)
    plans = {
        factor: make_plan(
            trace.spec,
            found.counts(PREFILL),
            found.tokens[PREFILL],
            chunk,
            slack=factor,
            model_id=found.model_id,
            **options,
        )
        for factor in ([slack] if slack is not None else [round(0.05 * i, 2) for i in range(4, 41)])
    }
    rates = {factor: count(plan, loads).drop_rate for factor, plan in plans.items()}
    best = min(rates, key=lambda factor: abs(rates[factor] - drop))
    return plans[best], best, rates[best]


class Answers(NamedTuple):
    """Right answers, dense and through a plan: task → row of `accuracy.compare`, and its counts."""

    dense: Records
    pruned: Records
    counts: dict[str, Account]


def pruned_answers(
    model: Any, plan: ANEPlan, tasks: Sequence[str] = TASKS, seed: int = 0, **how: Any
) -> Answers:
    """Ask every task of the model, dense and pruned by the plan; `how` are the sizes of
    `accuracy.compare`."""
    found, counts = compare(model, {"pruned": (plan, "saliency")}, tasks, seed, **how)
    dense, pruned = (
        {task: of[mode] for task, of in found["scores"].items()} for mode in ("dense", "pruned")
    )
    return Answers(dense, pruned, counts["pruned"])


Cost = tuple[
    float, float, float
]  # share dropped, loss in per cent more than dense, its standard error


class LossByOrder(NamedTuple):
    """Language loss by the order of dropping and by the capacities' slack.

    cost : mode of `MODES` → slack → what it costs.
    beside_random : slack → loss by saliency less loss at random on the same windows, nats a token:
    (mean, low, high)."""

    cost: dict[str, dict[float, Cost]]
    beside_random: dict[float, tuple[float, float, float]]

    def at(self, slack: float) -> dict[str, Cost]:
        """Order, a key of `ORDERS`, → its cost at that slack, by increasing loss."""
        found = {MODES[mode]: of[slack] for mode, of in self.cost.items()}
        return dict(sorted(found.items(), key=lambda one: one[1][1]))


def loss_by_order(
    model: Any,
    trace: RoutingTrace,
    slacks: Sequence[float],
    chunk: int,
    group_size: int,
    seed: int = 0,
    **how: Any,
) -> LossByOrder:
    """Language loss through plans of the trace's calibration, in every order; `how` as in
    `pruned_answers`."""
    plans = {s: fitting_plan(trace, chunk, 0.0, s, group_size=group_size)[0] for s in slacks}
    found, counts = compare(
        model,
        {f"{order} @ {s:g}": (plans[s], order) for order in MODES.values() for s in slacks},
        ["loss"],
        seed,
        **how,
    )
    samples = found["samples"]["loss"]

    def cost(way: str) -> Cost:
        row = found["scores"]["loss"][way]
        return counts[way]["loss"].drop_rate, row["relative"], row["relative error"]

    beside = {
        s: accuracy.paired_means(
            *(np.array(samples[f"{order} @ {s:g}"]) for order in ("random", "saliency"))
        )
        for s in slacks
    }
    return LossByOrder(
        {mode: {s: cost(f"{order} @ {s:g}") for s in slacks} for mode, order in MODES.items()},
        {s: (row["difference"], *row["interval"]) for s, row in beside.items()},
    )
