"""The figure of an advice: time of a token against memory, and what no other way beats."""

from __future__ import annotations

import numpy as np
from plotly.graph_objects import Figure

from moelab.advice.answer import Advice
from moelab.advice.model import AS_IS, FORMS
from moelab.advice.ways import Way
from moelab.base.table import duration, size, unit_of
from moelab.viz.charts import LOOKS, ROUND, add_points, finish
from moelab.viz.notebook import say, show, table

#: forms in the order of their colours and symbols
SERIES = [AS_IS, *FORMS]


def pareto(advice: Advice) -> Figure:
    """TPOT against memory; the lossless Pareto front is a line.

    Each form of the experts has its colour and symbol, larger where measured; the legend says what
    it loses and what was modelled, simulated or measured. The ring is what is advised."""
    every = [*advice.ways, *advice.elsewhere]
    small, B = unit_of(min(way.memory for way in every), "B")
    fast, s = unit_of(min(way.tpot for way in every), "s")
    groups: dict[str, list[Way]] = {}
    for way in sorted(every, key=lambda way: (SERIES.index(way.form), way.kind)):
        where = "" if way.device == "cpu" else " on the GPU"
        groups.setdefault(f"{way.form}{where}, {way.loses}, {way.kind}", []).append(way)
    figure = Figure()
    for name, group in groups.items():
        first = group[0]
        add_points(
            figure,
            [(way.memory / B, way.tpot / s) for way in group],
            name,
            SERIES.index(first.form),
            "%{text}",
            opacity=0.7,  # some lie on each other
            marker_size=16 if first.kind == "measured" else 11,
            text=[f"{way.name}, {size(way.memory)}: {duration(way.tpot)}" for way in group],
        )
    lossless = sorted((way.memory / B, way.tpot / s) for way in every if way.lossless)
    front = np.minimum.accumulate([tpot for _, tpot in lossless])
    # to the end of the axis: what fits less memory fits more
    figure.add_scatter(
        x=[*(memory for memory, _ in lossless), max(way.memory for way in every) / B],
        y=[*front, *front[-1:]],
        **LOOKS["front"],
    )
    figure.add_scatter(x=[advice.best.memory / B], y=[advice.best.tpot / s], **LOOKS["advised"])
    near = max(way.tpot for way in every) < 10 * min(way.tpot for way in every)
    between = [digit * power for power in ROUND[::3] for digit in (1.5, 3, 4, 7)] if near else []
    figure.update_yaxes(type="log", tickvals=sorted(ROUND + between))
    return finish(
        figure, f"memory of the {_whose(advice)} ({small})", f"TPOT ({fast}, log)", height=440
    )


def _whose(advice: Advice) -> str:
    return "process" if advice.best.device == "cpu" else "GPU"


def draw(advice: Advice) -> None:
    """Show an advice in a notebook: its words, the figure, the table and what else there is to
    know."""
    *told, commands = advice.words.split("\n\n")
    say("\n\n".join(told).replace("\n", "  \n") + f"\n```text\n{commands}\n```")
    name, best = advice.model.spec.name, advice.best
    show(
        pareto(advice),
        f"{name} on {advice.asked.device.name}: time of a token and memory of the {_whose(advice)}, of "
        "every way that was tried. The line is the fastest lossless one in so much memory, the "
        "ring what is advised.",
        f"Points: {len(advice.ways) + len(advice.elsewhere)} ways of running {name}; the advised "
        f"one, {best.name}, takes {duration(best.tpot)} a token in {size(best.memory)}",
        "advice",
    )
    table(advice.table())
    say("\n\n".join(advice.notes))
