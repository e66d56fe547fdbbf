"""The pictures of README's findings, from what notebooks and benches have left in results/: all of
them by

python -m moelab.viz.findings
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moelab.cache.policies import DEFAULT_POLICY
from moelab.comparison import MetricsFile
from moelab.evaluation.intervals import t95
from moelab.evaluation.questions import REMEMBERED
from moelab.files import atomic, read_json, results_root
from moelab.ndp.fit import JUDGED
from moelab.results import bench_file, sections_of
from moelab.viz import theme
from moelab.viz.figures import (
    DASHED,
    NOTE,
    Values,
    add_lines,
    bar_look,
    bars,
    differences,
    finish,
    hover,
    interval,
    panels,
    power_ticks,
)
from moelab.viz.plotly_json import Figure

Rows = Mapping[str, Values]
ABOVE = {"legend_y": 1.08, "margin_t": 70, "margin_r": 24}  # the legend, above the panels' titles


def bf12(results: Mapping[str, Any]) -> Figure:
    """Bytes that a decode step's products read and what they take, of weights in sixteen and in
    twelve bits; `results` of bench experts."""
    rows = results["bf16 decode, 1 token"]
    stock = next(
        name
        for name, row in rows.items()
        if name.startswith("transformers") and row["× transformers' best"] == 1
    )
    of = {
        "transformers<br>bf16": rows[stock],
        "ours<br>bf16": rows["gemv"],
        "ours<br>bf12": rows["gemv of bf12"],
    }
    figure, (left, right) = panels(
        ["read from memory", "a decode step's products; whiskers: p10 to p90"],
        2,
        horizontal_spacing=0.14,
    )
    for i, (name, row) in enumerate(of.items()):
        megabytes, ms = row["GB/s"] * row["ms"], row["ms"]
        for value, at, spread in (
            (megabytes, left, None),
            (ms, right, interval([ms], [row["10 %"]], [row["90 %"]], color="#333333")),
        ):
            figure.add_bar(
                x=[f"{name}<br><b>{value:#.3g}</b>"],
                y=[value],
                name=name.replace("<br>", ", "),
                marker=bar_look(i),
                error_y=spread,
                showlegend=False,
                hovertemplate=hover("%{y:.3g}", name),
                **at,
            )
    figure.update_yaxes(title="MB (exact)", **left).update_yaxes(title="ms (measured)", **right)
    return finish(
        figure.update_xaxes(type="category", showgrid=False),
        height=320,
        showlegend=False,
        margin_b=72,
    )


def balancing(metrics: Mapping[str, Any]) -> Figure:
    """What load balancing and prefetching add to tensor parallelism while decoding, by whether the
    link's reads cost the modules' DRAM anything; metrics of notebook 07."""
    ways = {
        "the link reads for free (as published)": "decode {}",
        "the link shares the modules' DRAM": "dram_shared_{}",
    }

    def added(key: str, name: str) -> float:
        return 100 * (
            metrics[key.format(f"NDP+TP{name}")]["value"] / metrics[key.format("NDP+TP")]["value"]
            - 1
        )

    figure = bars(
        {
            "": {
                way: {
                    label: (added(key, name),) * 3
                    for name, label in (
                        ("+LB", "load balancing"),
                        ("+PRE", "prefetching"),
                        ("+LB+PRE", "both"),
                    )
                }
                for way, key in ways.items()
            }
        },
        "gain over tensor<br>parallelism alone (%, modelled)",
        columns=1,
    )
    return figure.update_traces(
        texttemplate="%{y:.1f}", textposition="outside", cliponaxis=False
    ).update_layout(
        height=340,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "title": {"text": ""}},
    )


def combinations(metrics: Mapping[str, Any]) -> Figure:
    """With how many figures that were held out the combinations agree that fit all others; metrics
    of notebook 07."""
    counts = [
        metrics.get(f"readings_judged_{n}", {"value": 0})["value"] for n in range(len(JUDGED) + 1)
    ]
    figure = Figure().add_bar(
        x=list(range(len(counts))),
        y=counts,
        marker=bar_look(0),
        text=[f"{n:,}" for n in counts],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{x}: %{y:,}<extra></extra>",
    )
    for name, key in (
        ("chosen in notebook 07", "agree_judge"),
        ("ratios of published numbers,<br>without any simulator", "agree_null"),
    ):
        n = metrics[key]["value"]
        figure.add_annotation(
            x=n,
            y=counts[n],
            text=name,
            ay=-64,
            ax=0,
            yshift=18,
            arrowhead=2,
            xanchor="left",
            align="left",
            font={"size": 13},
        )
    figure.update_xaxes(
        tickvals=list(range(len(counts))), range=[-0.6, len(counts) + 0.4], showgrid=False
    )
    return finish(
        figure,
        f"of {len(JUDGED)} published figures that were held out, agree",
        "combinations that fit (modelled)",
        height=360,
    )


def by_model(results: Mapping[str, Any], what: str) -> dict[str, Rows]:
    """{model: rows} of the sections of bench recall_and_misses about `what`; of trained models."""
    parts = {
        tuple(title.partition(": ")[::2]): rows
        for title, rows in results.items()
        if "untrained" not in title
    }
    return {model: rows for (model, about), rows in parts.items() if about.startswith(what)}


def estimators(results: Mapping[str, Any]) -> Figure:
    """Recall of the next layer's experts by training tokens, a panel a model; `results` of bench
    recall_and_misses."""
    found = by_model(results, "recall one layer ahead")
    figure, places = panels(
        found,
        x="training tokens (thousands)",
        y="recall@K (%, measured)",
        shared_yaxes=True,
        horizontal_spacing=0.04,
    )
    thousands: set[float] = set()
    kinds = {
        "residual": "begins as the router (ours)",
        "appendix-a": "begins from nothing (the paper's)",
    }
    for at, rows in zip(places, found.values()):
        lines: dict[str, list[tuple[float, ...]]] = {label: [] for label in kinds.values()}
        for name, row in rows.items():
            kind, _, tokens = name.partition(", ")
            if kind in kinds:
                thousands.add(n := int(tokens.split()[0].replace(",", "")) / 1e3)
                lines[kinds[kind]].append(
                    (n, *(100 * row[end] for end in ("recall", "from", "to")))
                )
        add_lines(figure, lines, "%{x:g} thousand: %{y:.1f} %", **at)
        router = 100 * rows["next router on q"]["recall"]
        figure.add_hline(
            y=router,
            line=DASHED,
            annotation_text=f"the next router itself: {router:.1f} %",
            annotation_position="bottom left",
            annotation_font=NOTE,
            **at,
        )
    power_ticks(figure, thousands)
    return finish(figure.update_yaxes(range=[0, 100]), height=390, **ABOVE)


def evictions(results: Mapping[str, Any]) -> Figure:
    """Misses of eviction policies over LRU's by the share of experts in memory, a panel a model;
    `results` of bench recall_and_misses."""
    found: dict[str, dict[float, Rows]] = {}
    for title, rows in results.items():
        model, _, about = title.partition(": evictions, ")
        if about and "untrained" not in model:
            found.setdefault(model, {})[float(about.partition("%")[0])] = rows
    figure, places = panels(
        found,
        x="experts in memory (%)",
        y="misses over LRU's (%, exact counts)",
        shared_yaxes=True,
        horizontal_spacing=0.04,
    )
    own = {"next-token", "belady"}
    for at, of in zip(places, found.values()):
        rules = {
            "predicts the next tokens (ours)": lambda rows: "next-token",
            "default": lambda rows: DEFAULT_POLICY,
            "best that knows the past": lambda rows: min(
                rows.keys() - own, key=lambda name: rows[name]["misses ÷ lru"]
            ),
            "Belady's": lambda rows: "belady",
        }
        add_lines(
            figure,
            {
                label: [
                    (
                        share,
                        *(100 * rows[rule(rows)][end] for end in ("misses ÷ lru", "from", "to")),
                    )
                    for share, rows in of.items()
                ]
                for label, rule in rules.items()
            },
            "%{x:g} %: %{y:.1f} %",
            **at,
        )
        figure.add_hline(
            y=100,
            line=DASHED,
            annotation_text="LRU",
            annotation_position="top right",
            annotation_font=NOTE,
            **at,
        )
        figure.update_xaxes(tickvals=list(of), range=[min(of) - 8, max(of) + 8], **at)
    return finish(figure.update_yaxes(rangemode="tozero"), height=390, **ABOVE)


def dropping(results: Mapping[str, Any]) -> Figure:
    """What dropping costs in right answers, by which routings go first, a panel a task; `results`
    of bench ane_accuracy."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {task: {} for task in REMEMBERED}
    for name, row in results["accuracy (measured), drops and padding (exact)"].items():
        task, _, order = name.partition(": ")
        if task in found and "dropped" in row:
            points, half = (
                100 * row["difference"],
                100 * t95(row["n"] - 1) * row["difference error"],
            )
            found[task][order] = points, points - half, points + half
    return differences(found, "points (95 %)").update_layout(height=320, margin_l=200)


def bench(name: str) -> Callable[[Path], Any]:
    """Reads the results of a bench below a folder of results."""
    return lambda root: sections_of(bench_file(name, root))


def notebook(name: str) -> Callable[[Path], Any]:
    """Reads a notebook's baseline metrics below a folder of results."""
    return lambda root: read_json(root / "baseline" / f"{name}.json", MetricsFile)["metrics"]


#: picture → (what it is drawn from, how)
FINDINGS: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Figure]]] = {
    "bf12": (bench("experts"), bf12),
    "balancing": (notebook("07_ndp_scheduling"), balancing),
    "combinations": (notebook("07_ndp_scheduling"), combinations),
    "estimators": (bench("recall_and_misses"), estimators),
    "evictions": (bench("recall_and_misses"), evictions),
    "dropping": (bench("ane_accuracy"), dropping),
}


def main() -> int:
    root = results_root()
    pictures = theme.render_png(
        [theme.to_json(draw(read(root))) for read, draw in FINDINGS.values()]
    )
    for name, picture in zip(FINDINGS, pictures):
        with atomic(root / "findings" / f"{name}.png") as path:
            path.write_bytes(picture)
    return 0 if pictures else 1


if __name__ == "__main__":
    sys.exit(main())
