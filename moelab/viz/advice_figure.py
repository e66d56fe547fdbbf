"""The figure of an advice: time of a token against memory, and what no other way beats."""

from __future__ import annotations

from moelab.advice.answer import Advice
from moelab.advice.model import AS_IS, DECODED, FORMS
from moelab.advice.ways import Way
from moelab.records import Record
from moelab.table import duration, size, unit_of
from moelab.viz import theme
from moelab.viz.charts import ROUND, add_points, finish, point_look
from moelab.viz.notebook import say, show, table
from moelab.viz.plotly_json import Figure

#: forms in the order of their colours and symbols
SERIES = [AS_IS, DECODED, *FORMS]
#: those that take as many bytes as another one, and often as long: open and larger, so that both
#: are seen
OPEN = {"int8", "int4"}


def pareto(advice: Advice) -> Figure:
    """TPOT against memory; the lossless Pareto front is a line.

    Each form of the experts has its colour and symbol, larger where measured; the legend says what
    it loses, and it or the axis what was modelled, simulated or measured. The ring is what is
    advised."""
    ways = sorted(
        (*advice.ways, *advice.elsewhere), key=lambda way: (SERIES.index(way.form), way.kind)
    )
    best, times = advice.best, [way.tpot for way in ways]
    kinds = {way.kind for way in ways}
    (small, B), (fast, s) = unit_of(min(way.memory for way in ways), "B"), unit_of(min(times), "s")
    kind, wide = best.kind if len(kinds) == 1 else "", max(times) > 3 * min(times)
    figure = Figure()
    if wide:
        figure.update_yaxes(type="log", tickvals=ROUND)
    groups: dict[str, list[Way]] = {}
    for way in ways:
        name = f"{way.form}, {way.loses}" + f", {way.kind}" * (not kind)
        groups.setdefault(name, []).append(way)
    for name, group in groups.items():
        text = [f"{way.name}, {size(way.memory)}: {duration(way.tpot)}" for way in group]
        points = [(way.memory / B, way.tpot / s) for way in group]
        add_points(figure, points, name, 0, "%{text}", marker=_look(group[0]), text=text)
    line: list[tuple[float, float]] = []
    for memory, tpot in sorted((way.memory, way.tpot) for way in ways if way.lossless):
        if not line or tpot < line[-1][1]:
            line.append((memory, tpot))
    # to the end of the axis: what fits less memory fits more
    line += [(max(way.memory for way in ways), tpot) for _, tpot in line[-1:]]
    ring = {"symbol": "circle-open", "size": 30, "color": theme.BLACK, "line": {"width": 2}}
    step = {"color": theme.BLACK, "width": 1.5, "shape": "hv", "dash": "solid"}
    for name, points, look in (
        ("the best lossless", line, {"mode": "lines", "line": step}),
        ("advised", [(best.memory, best.tpot)], {"marker": ring}),
    ):
        scaled = [(memory / B, tpot / s) for memory, tpot in points]
        add_points(figure, scaled, name, 0, "", hoverinfo="skip", **look)
    y = f"{kind} TPOT ({fast}{', log' * wide})".strip()
    return finish(figure, f"memory of the process ({small})", y, height=440)


def _look(way: Way) -> Record:
    """The marker of a form and a kind."""
    marker = point_look(SERIES.index(way.form), 16 if way.kind == "measured" else 11)
    if way.form not in OPEN:
        return marker
    size = marker["size"] + 8
    return marker | {"symbol": f"{marker['symbol']}-open", "size": size, "line": {"width": 2}}


def draw(advice: Advice) -> None:
    """Show an advice in a notebook: its words, the figure, the table and what else there is to
    know."""
    *told, commands = advice.words.split("\n\n")
    say("\n\n".join(told).replace("\n", "  \n") + f"\n```text\n{commands}\n```")
    name, best = advice.model.spec.name, advice.best
    show(
        pareto(advice),
        f"{name} on {advice.asked.device.name}: time of a token and memory of the process, of every "
        "way that was tried. The line is the fastest lossless one in so much memory, the "
        "ring what is advised.",
        f"Points: {len(advice.ways) + len(advice.elsewhere)} ways of running {name}; the advised "
        f"one, {best.name}, takes {duration(best.tpot)} a token in {size(best.memory)}",
        "advice",
    )
    table(advice.table())
    say("\n\n".join(advice.notes))
