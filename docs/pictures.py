"""The pictures of docs/, from what notebooks and benches have left in results/: all of them by

python docs/pictures.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plotly.graph_objects import Figure

from moelab.base.files import atomic, read_json, results_root
from moelab.bench.results import bench_file, sections_of
from moelab.cache.policies import DEFAULT_POLICY
from moelab.comparison import MetricsFile
from moelab.evaluation.intervals import t95
from moelab.evaluation.questions import REMEMBERED
from moelab.viz import theme
from moelab.viz.charts import NOTE, Values

sys.path.insert(0, str(Path(__file__).parents[1]))
from notebooks.studies.charts import bars, intervals, lines  # noqa: E402

Rows = Mapping[str, Values]
ABOVE = {  # the legend, above the panels' titles
    "legend": {"orientation": "h", "x": 0, "y": 1.08, "yanchor": "bottom", "title": {"text": ""}},
    "margin": {"t": 70, "r": 24},
}


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
    read = {name: row["GB/s"] * row["ms"] for name, row in of.items()}
    took = {name: (row["ms"], row["10 %"], row["90 %"]) for name, row in of.items()}
    panels = {"MB read from memory (exact)": read, "ms of a decode step's products": took}
    return bars(
        {title: {"": values} for title, values in panels.items()},
        "",
        text="#.3g",
        height=320,
        margin_b=72,
    )


def balancing(metrics: Mapping[str, Any]) -> Figure:
    """What load balancing and prefetching add to tensor parallelism while decoding, by whether the
    link's reads cost the modules' DRAM anything; metrics of notebook 07."""
    ways = {
        "the link reads for free (as published)": "decode {}",
        "the link shares the modules' DRAM": "dram_shared_{}",
    }
    labels = {"+LB": "load balancing", "+PRE": "prefetching", "+LB+PRE": "both"}

    def added(key: str, name: str) -> float:
        with_it, alone = (metrics[key.format(of)]["value"] for of in (f"NDP+TP{name}", "NDP+TP"))
        return 100 * (with_it / alone - 1)

    return bars(
        {
            way: {label: added(key, name) for name, label in labels.items()}
            for way, key in ways.items()
        },
        "gain over tensor<br>parallelism alone (%, modelled)",
        text=".1f",
        height=340,
        **ABOVE,
    )


def by_model(results: Mapping[str, Any], what: str) -> dict[str, dict[str, Rows]]:
    """{model: {the rest of a title: rows}} of the sections of bench recall_and_misses about `what`;
    of trained models."""
    found: dict[str, dict[str, Rows]] = {}
    for title, rows in results.items():
        model, _, about = title.partition(": ")
        if "untrained" not in title and about.startswith(what):
            found.setdefault(model, {})[about.removeprefix(what)] = rows
    return found


def estimators(results: Mapping[str, Any]) -> Figure:
    """Recall of the next layer's experts by training tokens, a panel a model; `results` of bench
    recall_and_misses."""
    kinds = {
        "residual": "begins as the router (ours)",
        "appendix-a": "begins from nothing (the paper's)",
    }

    def learned(rows: Rows) -> dict[str, list[tuple[float, ...]]]:
        found: dict[str, list[tuple[float, ...]]] = {label: [] for label in kinds.values()}
        for name, row in rows.items():
            kind, _, tokens = name.partition(", ")
            if kind in kinds:
                thousands = int(tokens.split()[0].replace(",", "")) / 1e3
                ends = (100 * row[end] for end in ("recall", "from", "to"))
                found[kinds[kind]].append((thousands, *ends))
        xs = [point[0] for points in found.values() for point in points]
        router = 100 * rows["next router on q"]["recall"]
        return found | {"the next router itself": [(x, router) for x in (min(xs), max(xs))]}

    return lines(
        {
            model: learned(*of.values())
            for model, of in by_model(results, "recall one layer ahead").items()
        },
        "recall@K (%, measured)",
        "training tokens (thousands)",
        log="x",
        top=100,
        height=390,
        **ABOVE,
    )


def dropping(results: Mapping[str, Any]) -> Figure:
    """What dropping costs in right answers, by which routings go first, a panel a task; `results`
    of bench ane_accuracy."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {task: {} for task in REMEMBERED}
    for name, row in results["accuracy (measured), drops and padding (exact)"].items():
        task, _, order = name.partition(": ")
        if task in found and "dropped" in row:
            points = 100 * row["difference"]
            half = 100 * t95(row["n"] - 1) * row["difference error"]
            found[task][order] = points, points - half, points + half
    return intervals(found, "points (95 %)", height=320)


def static_sets(results: Mapping[str, Any]) -> Figure:
    """Hit rate of a set of experts that were popular in other texts less LRU's, with a quarter of
    the experts in memory, of recorded traces; `results` of bench referee."""
    name = "static, other texts, less LRU"
    found = {
        trace: tuple(row[f"{name} {end}".strip()] for end in ("", "from", "to"))
        for trace, row in results["static sets, 25%"].items()
        if "," in trace and f"{name} from" in row  # a recorded one
    }
    return intervals(found, "points of hit rate (95 % over texts)", kind="exact", height=320)


def guide(results: Mapping[str, Any]) -> Figure:
    """KL of a quarter of the experts in int8, chosen in several ways, over that of the popular ones;
    `results` of bench rounding."""
    end = ": who gets more bits (measured)"
    name = "KL less popularity's"
    found = {
        title.removesuffix(end): {
            way: tuple(
                100 * row[key] / rows["popularity"]["KL"]
                for key in (name, f"{name}, low", f"{name}, high")
            )
            for way, row in rows.items()
            if name in row
        }
        for title, rows in results.items()
        if title.endswith(end)
    }
    return intervals(found, "KL more than popularity's (%)", kind="measured", height=300)


def planned(results: Mapping[str, Any]) -> Figure:
    """A token's time by what memory holds, on fitted routing and on independent draws; `results` of
    bench referee."""
    labels = {
        "uncompressed, LRU": "uncompressed, LRU",
        "only C, LRU": "kept compressed, LRU",
        "planned, ZipMoE's rule": "planned pools, ZipMoE's rule",
    }
    of = {
        label: {routing: row[f"{way} ms"] for routing, row in results["planned pools"].items()}
        for way, label in labels.items()
    }
    return bars(of, "ms of a token (simulated)", kind="simulated", text=".0f", height=340)


def routing(results: Mapping[str, Any]) -> Figure:
    """LRU's and Belady's hit rates with a quarter of the experts in memory, on parts of recorded
    traces that nothing was fitted to and on what was drawn; `results` of bench routing_fit."""
    kinds = {"recorded": "trace (exact)", "drawn": "drawn (simulated)"}
    panels = {"LRU": "lru at 25 %", "Belady's rule": "belady at 25 %"}
    of = {
        panel: {
            label: {name: results[kind][name][metric] for name in results["fits"]}
            for label, kind in kinds.items()
        }
        for panel, metric in panels.items()
    }
    return bars(of, "hit rate (%)", kind="exact; simulated", height=390)


def next_use(results: Mapping[str, Any]) -> Figure:
    """Hits of `next-use` over the default's with a quarter of the experts in memory, beside what the
    optimum leaves to gain, of traces that it was not chosen on; `results` of bench policies."""
    rows = results["25% of the experts, about 600 tokens"]

    def gained(policy: str) -> dict[str, float]:
        unseen = (name for name in rows if "used" not in name)
        return {name: 100 * (rows[name][policy] - rows[name][DEFAULT_POLICY]) for name in unseen}

    of = {"next-use (ours)": gained("next-use"), "Belady's rule": gained("belady")}
    return bars(of, "points over LRFU's hits", kind="exact", height=390)


#: recorded traces → their models, whose cards say bytes
MODELS = {
    "bigmoeonedge/qwen": "Qwen3-30B-A3B",
    "bigmoeonedge/gemma": "Gemma-4-26B-A4B",
    "bigmoeonedge/gptoss": "gpt-oss-120b",
    "gpt-oss-20b-fingerprinting": "gpt-oss-20b",
    "esft-deepseek-v2-lite": "DeepSeek-V2-Lite",
    "olmoe-mmlu-logits": "OLMoE-1B-7B",
}


def drafts(results: Mapping[str, Any]) -> Figure:
    """Experts that a token reads with eight drafts over without any, by the share of drafts that are
    right, with a quarter of the experts in memory; `results` of bench draft_passes."""
    rows = {name: results["passes"][f"{trace}, 25% in memory"] for trace, name in MODELS.items()}
    shares = 50, 70, 90, 100
    found = {
        name: [
            (share, row[f"misses a token, 8 drafts, {share}% right"] / row["misses a token"])
            for share in shares
        ]
        for name, row in rows.items()
    } | {"without drafts": [(share, 1) for share in shares]}
    return lines(found, "experts read, ×", "drafts that are right (%)", height=390)


def scale(results: Mapping[str, Any]) -> Figure:
    """A model larger than the machine, in each form: its size and what the process took, beside the
    machine's memory; a token's mean time beside its limit; `results` of bench scale. Arms that
    failed are left out; ValueError if all are."""
    conditions, rows, *_ = results.values()
    ran = {name: row for name, row in rows.items() if "TPOT limit s" in row}
    names = sorted(
        (name for name in ran if "prefetching" not in name),
        key=lambda name: -ran[name]["stored fraction"],
    )
    if not names:
        why = "; ".join(f"{name}: {row['result']}" for name, row in rows.items())
        raise ValueError(f"no arm has run, so there is nothing to draw: {why}")
    others = ran[names[0]]["other weights GB"]
    plain = conditions["experts in bf16 GB"]
    stored = {name: ran[name]["stored fraction"] for name in names}
    sizes = {name: others + plain * of for name, of in ({"bf16": 1.0} | stored).items()}
    times = {
        what: {name: 1e3 * ran[name][key] for name in names}
        for what, key in {"on demand": "mean TPOT s", "limit on demand": "TPOT limit s"}.items()
    }
    peak = {name: ran[name]["peak GB"] for name in names}
    left = "the whole model (GB)"
    right = f"a token, executor {conditions['executor']} (ms)"
    figure = bars(
        {left: {"weights": sizes, "peak of the process": peak}, right: times},
        "",
        text=".0f",
        kind="",
        width=900,
        height=460,
        **ABOVE,
    )
    return figure.add_hline(
        y=conditions["memory GB"],
        row=1,
        col=1,
        annotation_text="this machine's memory",
        annotation_font=NOTE,
    )


def bench(name: str) -> Callable[[Path], Any]:
    """Reads the results of a bench below a folder of results."""
    return lambda root: sections_of(bench_file(name, root))


def notebook(name: str) -> Callable[[Path], Any]:
    """Reads a notebook's baseline metrics below a folder of results."""
    return lambda root: read_json(root / "baseline" / f"{name}.json", MetricsFile)["metrics"]


#: picture below results/ → (what it is drawn from, how)
FINDINGS: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Figure]]] = {
    "findings/bf12": (bench("experts"), bf12),
    "findings/balancing": (notebook("07_ndp_scheduling"), balancing),
    "findings/estimators": (bench("recall_and_misses"), estimators),
    "findings/dropping": (bench("ane_accuracy"), dropping),
    "findings/static_sets": (bench("referee"), static_sets),
    "findings/guide": (bench("rounding"), guide),
    "findings/planned": (bench("referee"), planned),
    "findings/routing": (bench("routing_fit"), routing),
    "findings/next_use": (bench("policies"), next_use),
    "findings/drafts": (bench("draft_passes"), drafts),
    "bench/scale": (bench("scale"), scale),
}


def main() -> None:
    root = results_root()
    for name, (read, draw) in FINDINGS.items():
        picture = theme.render_png(draw(read(root)))
        with atomic(root / f"{name}.png") as path:
            path.write_bytes(picture)


if __name__ == "__main__":
    main()
