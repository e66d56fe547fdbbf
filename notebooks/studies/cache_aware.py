"""Cache-aware routing: what choosing experts that are in memory costs in accuracy, and what it
saves in misses. Lossy.

In decode steps an expert on disk gives way to one in memory that trails it by less than a margin of
logits (`moelab.offloading.cache_aware`). The same held-out texts and questions at every margin, one
at a time, what is scored in decode steps; 0 is the model's own routing with the same kernels. Hit
rates and changed choices are exact counts, those of all tasks together; losses are in nats a token,
their differences paired, with 95 % intervals; of answers the share that is right, and how many were
lost and gained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from moelab import open_model, using
from moelab.base.arguments import number, several, whole
from moelab.base.records import Records
from moelab.evaluation import accuracy
from moelab.offloading.cache_aware import CacheAwareRouting

TASKS = ("loss", "needle_multikey", "lookup")


def compare(
    model: Any, margins: Sequence[float], tasks: Sequence[str] = TASKS, **how: Any
) -> Records:
    """One row a margin of an offloaded model that computes with "fast"; `how` is of
    `accuracy.compare`."""
    used: dict[str, list[CacheAwareRouting]] = {}

    @contextmanager
    def counting(name: str, margin: float) -> Iterator[None]:
        with using(model, cache_aware=margin):
            used.setdefault(name, []).append(model.moelab.routing)
            yield

    modes = {f"margin {margin:g}": margin for margin in dict.fromkeys((0.0, *margins))}
    scores = accuracy.compare(
        model,
        {name: partial(counting, name, margin) for name, margin in modes.items()},
        tasks,
        decode=True,
        **how,
    )["scores"]
    counts = {
        name: [sum(getattr(one, what) for one in of) for what in ("requests", "hits", "changed")]
        for name, of in used.items()
    }
    requests, hits, _ = counts["margin 0"]
    rows = {}
    for name, (asked, found, changed) in counts.items():
        rows[name] = {
            "hit rate": found / asked,
            "misses ÷ margin 0": (asked - found) / (requests - hits),
            "choices changed": changed / asked,
        }
        for task, row in ((task, scores[task][name]) for task in tasks):
            if task == "loss":
                low, high = row.get("interval", (0.0, 0.0))
                rows[name] |= {
                    "loss, nats": row["score"],
                    "difference": row.get("difference", 0.0),
                    "from": low,
                    "to": high,
                }
            else:
                rows[name] |= {
                    f"{task}, right": row["score"],
                    f"{task}, lost": row.get("lost", 0),
                    f"{task}, gained": row.get("gained", 0),
                }
    return rows


def run(
    budgets: Sequence[float] = (0.25, 0.5),
    margins: Sequence[float] = (0.1, 0.25, 0.5, 1.0, 2.0),
    prompts: int = 48,
    windows: int = 24,
    tokens: int = 128,
    seed: int = 0,
) -> Records:
    found = {}
    for share in budgets:
        with open_model(memory=share, executor="fast") as model:
            found[f"{share:.0%} of the experts in memory (measured accuracy, exact counts)"] = (
                compare(model, margins, n=prompts, windows=windows, tokens=tokens, seed=seed)
            )
    return found


OPTIONS = {
    "budgets": (several(number(above=0)), "shares of the experts"),
    "margins": (several(number(0)), "logits, beside 0"),
    "prompts": (whole(2), "questions a task"),
    "windows": (whole(2), "windows of text"),
    "tokens": (whole(64), "of a window and a question, about"),
    "seed": (whole(), "picks texts and questions"),
}
