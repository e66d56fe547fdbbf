"""The figure of an advice: time of a token against memory and against loss, and what no other way
beats."""

from __future__ import annotations

from typing import Any

from moelab.advice.answer import Advice
from moelab.advice.model import AS_IS, DECODED, FORMS
from moelab.advice.ways import Way
from moelab.table import duration, size, unit_of
from moelab.viz import theme
from moelab.viz.charts import ROUND, add_points, finish, panels, point_look
from moelab.viz.notebook import say, show, table
from moelab.viz.plotly_json import Figure

#: forms in the order of their colours and symbols
SERIES = [AS_IS, DECODED, *FORMS]
#: those that take as many bytes as another one, and often as long: open and larger, so that both
#: are seen
OPEN = {"int8", "int4"}


def pareto(advice: Advice) -> Figure:
    """TPOT against memory and, of ways whose loss is known, against their loss; the lossless Pareto
    front is a line.

    Each form of the experts has its colour and symbol, larger where measured; the legend says what
    it loses, and it or the axis what was modelled, simulated or measured. The ring is what is
    advised."""
    ways = [*advice.ways, *advice.elsewhere]
    best = advice.best
    kind = best.kind if len({way.kind for way in ways}) == 1 else ""
    times = sorted(way.tpot for way in ways)
    (small, B), (fast, s) = unit_of(min(way.memory for way in ways), "B"), unit_of(times[0], "s")
    axes = {f"memory of the process ({small})": lambda way: way.memory / B}
    if any(way.loss for way in ways):
        axes["more language loss (%)"] = lambda way: 100 * way.loss
    wide = times[-1] > 3 * times[0]
    figure, places = panels([""] * len(axes), y=f"{kind} TPOT ({fast}{', log' * wide})".strip())
    if wide:
        figure.update_yaxes(type="log", tickvals=ROUND)
    for (title, of), place in zip(axes.items(), places):
        figure.update_xaxes(title=title, **place)
        for name, group in _groups(ways, not kind).items():
            known = [way for way in group if way.loss is not None or place is places[0]]
            add_points(
                figure,
                [(of(way), way.tpot / s) for way in known],
                name,
                0,
                "%{text}",
                **place,
                marker=_look(group[0]),
                text=[f"{way.name}, {size(way.memory)}: {duration(way.tpot)}" for way in known],
            )
    line = _front(ways)
    figure.add_scatter(
        x=[x / B for x, _ in line],
        y=[y / s for _, y in line],
        mode="lines",
        name="the best lossless",
        line={"color": theme.BLACK, "width": 1.5, "shape": "hv", "dash": "solid"},
        hoverinfo="skip",
        **places[0],
    )
    figure.add_scatter(
        x=[best.memory / B],
        y=[best.tpot / s],
        mode="markers",
        name="advised",
        hoverinfo="skip",
        marker={"symbol": "circle-open", "size": 30, "color": theme.BLACK, "line": {"width": 2}},
        **places[0],
    )
    return finish(figure, height=440)


def _groups(ways: list[Way], kinds: bool) -> dict[str, list[Way]]:
    """Name in the legend → its ways, form by form; with their kind if there are several."""
    groups: dict[str, list[Way]] = {}
    for way in sorted(ways, key=lambda way: (SERIES.index(way.form), way.kind)):
        name = f"{way.form}, {way.loses}"
        groups.setdefault(f"{name}, {way.kind}" if kinds else name, []).append(way)
    return groups


def _front(ways: list[Way]) -> list[tuple[float, float]]:
    """(bytes, seconds) of the fastest lossless way in so much memory, to the end of the axis: what
    fits less memory fits more."""
    line: list[tuple[float, float]] = []
    for memory, tpot in sorted((way.memory, way.tpot) for way in ways if way.lossless):
        if not line or tpot < line[-1][1]:
            line.append((memory, tpot))
    return line + [(max(way.memory for way in ways), tpot) for _, tpot in line[-1:]]


def _look(way: Way) -> dict[str, Any]:
    """The marker of a form and a kind."""
    marker = point_look(SERIES.index(way.form), 16 if way.kind == "measured" else 11)
    if way.form in OPEN:
        marker |= {
            "symbol": f"{marker['symbol']}-open",
            "size": marker["size"] + 8,
            "line": {"width": 2},
        }
    return marker


def draw(advice: Advice) -> None:
    """Show an advice in a notebook: its words, the figure, the table and what else there is to
    know."""
    *told, commands = advice.words.split("\n\n")
    say("\n\n".join(told).replace("\n", "  \n") + f"\n```text\n{commands}\n```")
    name = advice.model.spec.name
    best = advice.best
    tried = len(advice.ways) + len(advice.elsewhere)
    show(
        pareto(advice),
        f"{name} on {advice.device.name}: time of a token and memory of the process, of every "
        "way that was tried. The line is the fastest lossless one in so much memory, the "
        "ring what is advised.",
        f"Points: {tried} ways of running {name}; the advised one, {best.name}, takes "
        f"{duration(best.tpot)} a token in {size(best.memory)}",
        "advice",
    )
    rows, common = advice.rounded()
    table(rows)
    say("\n\n".join(filter(None, (common, *advice.notes))))
