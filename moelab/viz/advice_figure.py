"""The figure of an advice: time of a token against memory and against loss, and what no other way beats."""

from __future__ import annotations

from moelab.advice.answer import Advice
from moelab.advice.ways import Way, front
from moelab.table import duration, format_value, size
from moelab.viz import theme
from moelab.viz.figures import add_points, finish, panels
from moelab.viz.notebook import say, show, table
from moelab.viz.plotly_json import Figure


def pareto(advice: Advice) -> Figure:
    """TPOT against memory and, of ways whose loss is known, against their loss; the Pareto front is a line.

    Ways that lose nothing, ways of known and of unknown loss differ in colour and symbol; each says in the legend
    whether it was modelled, simulated or measured.
    """
    ways = [*advice.ways, *advice.elsewhere]
    groups: dict[str, list[Way]] = {}
    for way in ways:
        loss = "lossless" if way.lossless else "loss unknown" if way.loss is None else "loss measured"
        groups.setdefault(f"{loss}, {way.kind}", []).append(way)
    known = [way for way in ways if way.loss]
    figure, places = panels(["memory", "loss"] if known else ["memory"], horizontal_spacing=0.12,
                            y="TPOT (ms)")
    for i, (name, of) in enumerate(sorted(groups.items())):
        told = {"text": [f"{way.name}, {size(way.memory)}" for way in of]}
        add_points(figure, [(way.memory / 1e9, 1e3 * way.tpot) for way in of], name, i, "%{text}: %{y:.4g} ms", **told,
                   **places[0])
        if known and of[0].loss is not None:
            add_points(figure, [(100 * way.loss, 1e3 * way.tpot) for way in of], name, i, "%{text}: %{y:.4g} ms",
                       **told, **places[1])
    sound = sorted(front(way for way in ways if way.lossless), key=lambda way: way.memory)
    figure.add_scatter(x=[way.memory / 1e9 for way in sound], y=[1e3 * way.tpot for way in sound], mode="lines",
                       name="nothing lossless is better", line={"color": theme.BLACK, "width": 1.5, "shape": "hv"},
                       hoverinfo="skip", **places[0])
    best = advice.best
    figure.add_scatter(x=[best.memory / 1e9], y=[1e3 * best.tpot], mode="markers", name="advised", hoverinfo="skip",
                       marker={"symbol": "circle-open", "size": 20, "color": theme.BLACK, "line": {"width": 2}},
                       **places[0])
    figure.update_xaxes(title="memory of the process (GB)", **places[0])
    if known:
        figure.update_xaxes(title="more language loss (%)", **places[1])
    return finish(figure, legend="ways", height=420)


def draw(advice: Advice) -> None:
    """Show an advice in a notebook: its words, the figure, the table and what else there is to know."""
    *told, commands = advice.words.split("\n\n")
    say("\n\n".join(told).replace("\n", "  \n") + f"\n```text\n{commands}\n```")
    name, best = advice.model.spec.name, advice.best
    tried = len(advice.ways) + len(advice.elsewhere)
    show(pareto(advice), f"{name} on {advice.device.name}: time of a token and memory of the process, of every way "
         f"that was tried. Kinds of numbers differ by series; the ring is what is advised.",
         f"Points: {tried} ways of running {name}; the advised one, {best.name}, takes {duration(best.tpot)} a "
         f"token in {size(best.memory)}", "advice")
    rows = advice.table()           # what is the same in all rows takes no column
    same = {name: value for name, value in rows[0].items() if len(rows) > 1 and all(r[name] == value for r in rows)}
    table([{name: value for name, value in row.items() if name not in same} for row in rows])
    common = "; ".join(f"{name}: {format_value(value)}" for name, value in same.items())
    say("\n\n".join([*[f"All rows: {common}."] * bool(common), *advice.notes]))
