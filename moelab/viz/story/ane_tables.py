"""The tables of the Neural Engine, as rows for `moelab.viz.notebook.table`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moelab.ane.coreml.linter import Report
from moelab.ane.device.comparison import RUNS, Outcome, Setting, Study, ratio
from moelab.ane.device.device_model import DeviceModel, Prefill
from moelab.ane.device.published import (
    REFERENCE_BYTES,
    REFERENCE_PARAMS,
    SAID,
    SLOTS,
    TABLE_3,
    TABLE_3_ACCURACY,
    Inconsistency,
)
from moelab.ane.parity import LOGITS, Parity
from moelab.ane.plan import MAX_GRAPH_BYTES, Account, ANEPlan
from moelab.ane.systems import ABLATION, SYSTEMS, TABLE_2, Operator
from moelab.bench.ane_accuracy import Answers
from moelab.bench.ane_conversion import Conversion
from moelab.cards import load_device
from moelab.claims import DIRECTION, REPRODUCED
from moelab.claims import Row as Answered
from moelab.records import Rows
from moelab.table import span

#: name of a plan of `moelab.bench.ane_accuracy.candidates` → what it is
CANDIDATES = {
    "printed": "tiers as printed, r·B/E",
    "factor_k": "tiers with the factor K, r·K·B/E",
    "plan": "the same, slack {:g}: **our plan**",
    "one_capacity": "one capacity for all, the busiest expert's",
}


def label(run: tuple[int, int]) -> str:
    return f"P={run[0]}, B={run[1]}"


def operators(of: Sequence[Operator]) -> Rows:
    """What runs where, and why."""
    return [
        {
            "operator": one.name,
            "runs on": one.unit.upper(),
            "because": one.reason,
            "source": one.source,
        }
        for one in of
    ]


def plans(
    of: Mapping[str, ANEPlan], slack: float, accounts: Mapping[str, tuple[Account, Account]]
) -> Rows:
    """`candidates` of one model, with what they drop and pad: (on the calibration, on test
    prompts)."""
    return [
        {
            "plan": CANDIDATES[name].format(slack),
            "tiers of layer 0": ", ".join(map(str, plan.layers[0].tiers.levels)),
            "launches a chunk": str(plan.launches),
            "rows a chunk": f"{plan.slots:,}",
            "dropped: calibration": f"{accounts[name][0].drop_rate:.1%}",
            "test": f"{accounts[name][1].drop_rate:.1%}",
            "padded: test": f"{accounts[name][1].padded_fraction:.1%}",
        }
        for name, plan in of.items()
    ]


def cards(of: Mapping[str, ANEPlan]) -> Rows:
    """What fits of each model."""
    return [
        {
            "model": name,
            "L × E, top-K": f"{plan.spec.L} × {plan.spec.E}, {plan.spec.K}",
            "an expert, MB": f"{2 * plan.spec.expert_params / 1e6:.1f}",
            "fit one graph: fp16": str(int(MAX_GRAPH_BYTES // (2 * plan.spec.expert_params))),
            "int8": str(int(MAX_GRAPH_BYTES // plan.spec.expert_params)),
            "launches a chunk": str(plan.launches),
            "largest graph, MB": f"{plan.largest_graph_bytes / 1e6:,.0f}",
            "experts on the CPU": f"{plan.cpu_share:.0%}",
            "what does not fit": "; ".join(plan.problems) or "–",
        }
        for name, plan in of.items()
    ]


def packages(conversion: Conversion) -> Rows:
    """The written packages by kind, with the linter's verdict."""
    rows = []
    for kind, of in conversion.kinds().items():
        sizes, differences = (
            [one.report.weight_bytes / 1e3 for one in of],
            [one.difference for one in of],
        )
        rows.append(
            {
                "graph (G×C)": kind,
                "packages": str(len(of)),
                "weights each, kB": span(min(sizes), max(sizes)),
                "operations": ", ".join(f"{op.count} {op.type}" for op in of[0].report.ops),
                "lint": _clean(all(one.report.clean for one in of)),
                "largest difference to torch": "by parity, below"
                if None in differences
                else f"{max(differences):g}",
            }
        )
    return rows


def findings(good: Report, bad: Mapping[str, Report]) -> Rows:
    """What the linter says of each graph, each rule once."""
    rows = [
        {
            "graph": "as converted above",
            "rule": "–",
            "severity": _clean(good.clean),
            "what it says": "",
            "source": "",
        }
    ]
    for name, report in bad.items():
        rows += [
            {
                "graph": name,
                "rule": found.rule,
                "severity": found.severity,
                "what it says": found.text,
                "source": found.source,
            }
            for found in {one.rule: one for one in report.findings}.values()
        ]
    return rows


def parity(found: Mapping[str, Parity], chunks: Sequence[int], shaken: Sequence[Any]) -> Rows:
    """Logits of the packages beside the model's, by the evaluator's mode, and those of the model
    with noise.

    chunks : of each prompt. shaken : differences [S] of each prompt
    (`moelab.bench.ane_conversion.shaken`)."""
    rows = [
        {
            "evaluator": mode,
            "prompts": str(len(of.same)),
            "chunks each": span(min(chunks), max(chunks)),
            "expert graphs run": str(of.counts.launches),
            "same next token": f"{of.same.mean():.0%}",
            "logits of the next token": f"{of.last.max():.1e}",
            "logits of any token": f"{of.worst.max():.1e}",
            f"next token within {LOGITS:g}": f"{(of.last <= LOGITS).mean():.0%}",
            "alarms": str(len(of.alarms)),
        }
        for mode, of in found.items()
    ]
    return [
        *rows,
        {
            "evaluator": "*no packages, noise on experts*",
            "prompts": str(len(shaken)),
            "chunks each": "1",
            "logits of the next token": f"{max(float(one[-1]) for one in shaken):.1e}",
            "logits of any token": f"{max(float(one.max()) for one in shaken):.1e}",
        },
    ]


def answers(found: Answers) -> Rows:
    """Right answers, dense and pruned, with the paper's Table 3 below."""
    rows = []
    for task, dense in found.dense.items():
        pruned, count = found.pruned[task], found.counts[task]
        low, high = (100 * side for side in pruned["interval"])
        rows.append(
            {
                "task": f"{task} (measured)",
                "prompts": str(dense["n"]),
                "dropped": f"{count.drop_rate:.1%}",
                "padded": f"{count.padded_fraction:.1%}",
                "dense": f"{dense['score']:.1%} ± {dense['error']:.1%}",
                "pruned": f"{pruned['score']:.1%} ± {pruned['error']:.1%}",
                "difference, points": f"{found.points(task):+.1f}",
                "95 %": f"{low:+.1f} to {high:+.1f}",
                "lost, gained": f"{pruned['lost']}, {pruned['gained']}",
            }
        )
    for task, (dropped, padded) in TABLE_3.items():
        before, after = TABLE_3_ACCURACY[task]
        rows.append(
            {
                "task": f"*{task} (paper, PhiMoE)*",
                "dropped": f"{dropped:.1%}",
                "padded": f"{padded:.1%}",
                "dense": f"{before:.1f} %",
                "pruned": f"{after:.1f} %",
                "difference, points": f"{after - before:+.1f}",
            }
        )
    return rows


def achieved(device: DeviceModel) -> tuple[float, float]:
    """(TFLOPS, GB/s) of a graph, as the fitted rates of rows and weights say."""
    return (
        2 * REFERENCE_PARAMS / device.rates.row / 1e9,
        REFERENCE_BYTES / device.rates.expert / 1e6,
    )


def parameters(device: DeviceModel) -> Rows:
    """The fitted rates beside what is published of the machine."""
    rates, card, (tflops, gbs) = device.rates, load_device(device.device), achieved(device)
    rows = (
        ("a, a launch", f"{rates.launch:.2f} ms", "for each graph, whatever is in it"),
        (
            "b, an expert's weights",
            f"{rates.expert:.2f} ms",
            f"{gbs:.0f} GB/s; the memory's {card['memory_bandwidth_gbs']:g} are published",
        ),
        (
            "c, a row",
            f"{rates.row:.3f} ms",
            f"{tflops:.1f} TFLOPS; {card['npu_tops']:g} TOPS are published",
        ),
        ("s, a row beyond 1024", f"{rates.spill:.3f} ms", "on top of c"),
    )
    return [dict(zip(("fitted parameter", "value", "that is"), row)) for row in rows]


def slots(grid: Mapping[tuple[int, int], float]) -> Rows:
    """ms an expert slot by G and C, modelled, serial, with Table 5's in brackets."""

    def told(at: tuple[int, int]) -> str:
        return f"{grid[at]:.3f}" + (
            f" ({SLOTS['serial'][at]:.2f})" if at in SLOTS["serial"] else ""
        )

    return [
        {
            "ms a slot, serial: modelled (Table 5)": f"G = {G}"
            + (", too large for one graph" if G * REFERENCE_BYTES > MAX_GRAPH_BYTES else "")
        }
        | {f"C = {C}": told((G, C)) for G_, C in grid if G_ == G}
        for G in dict.fromkeys(G for G, _ in grid)
    ]


def contradictions(found: Sequence[Inconsistency]) -> Rows:
    """What the source says, and what else it says."""
    return [
        {"inconsistency of the source": one.where, "it says": one.says, "but": one.but}
        for one in found
    ]


def systems(found: Study) -> Rows:
    """The four systems' modelled figures in the first and the last run."""
    return [
        {
            "PhiMoE, modelled": f"{SYSTEMS[system].title}, {label(run)}",
            "TTFT, s": f"{p.ttft_s:.1f}",
            "mJ a prompt token": f"{p.mj_per_token:.0f}",
            "mean power, W": f"{p.total.mj / p.total.ms:.1f}",
            "whole CPU busy, s": f"{p.cpu_s:.1f}",
            "rows computed a prompt token and layer": f"{p.slots_per_token:.2f}",
        }
        for run in (RUNS[0], RUNS[-1])
        for system in TABLE_2
        for p in [found[run][system]]
    ]


def ablation(found: dict[str, Prefill]) -> Rows:
    """The ablation's steps in one run."""
    least = found["base+TG"].total.mj
    time = {"base": SAID["ablation-base"], "base+TG": SAID["ablation-tg"], "npumoe": 1}
    energy = {
        "base": SAID["ablation-energy-base"],
        "base+T": SAID["ablation-energy-t"],
        "base+TG": 1,
        "npumoe": "> 1",
    }
    return [
        {
            f"ablation, {label(RUNS[0])}": SYSTEMS[system].title,
            "TTFT over Ours-all, modelled": f"{ratio(found, 'ttft', system):.2f}",
            "TTFT: paper, Fig. 17": str(time.get(system, "–")),
            "energy over Ours-TG, modelled": f"{found[system].total.mj / least:.2f}",
            "energy: paper, Fig. 17": str(energy[system]),
        }
        for system in ABLATION
    ]


def sensitivity(rows: Sequence[Answered]) -> Rows:
    """What agrees by our choices, and what it is by each other choice: a cross where it does not
    agree any more.

    What was fitted, or follows from what was, is left out where no choice changes it.
    """
    return [
        {
            "published": f"{row.claim.where}: {row.claim.text}",
            "it says": row.claim.said,
            "verdict": row.verdict,
            "modelled": f"{row.ours:.3g}",
        }
        | {name: f"{value:.3g}" + " ✗" * (name in row.lost) for name, value in row.readings.items()}
        for row in rows
        if row.readings and (row.lost or row.verdict in (REPRODUCED, DIRECTION))
    ]


def settings(found: Mapping[Setting, Outcome], best: Mapping[int, Setting]) -> Rows:
    """The fastest setting of each chunk, and the default below it."""
    return [
        {
            "chunk": str(chunk),
            "setting": f"*{setting}*" if usual else str(setting),
            "dropped": f"{of.dropped:.1%}",
            "padded": f"{of.padded:.1%}",
            "graphs a chunk": str(of.plan.launches),
            "experts on the CPU": f"{of.plan.cpu_share:.0%}",
            "TTFT, s": f"{of.ttft_s:.1f}",
            "mJ a token": f"{of.mj_per_token:.0f}",
        }
        for chunk, fastest in best.items()
        for usual, setting in enumerate((fastest, Setting(chunk=chunk)))
        for of in [found[setting]]
    ]


def caption(card: str, setting: Setting, of: Outcome, device: DeviceModel) -> str:
    """One setting in a sentence."""
    errors = [f"{device.error(quantity):.0%}" for quantity in ("latency", "energy")]
    return (
        f"{card}, chunks of {setting.chunk}, {setting}: {of.dropped:.1%} of the choices "
        f"dropped, {of.padded:.1%} of the rows padded (exact, assumed popularity), "
        f"{of.plan.launches} graphs a chunk, the largest "
        f"{of.plan.largest_graph_bytes / 1e6:,.0f} MB; a prompt of 1024 takes {of.ttft_s:.1f} "
        f"s and {of.mj_per_token:.0f} mJ a token (modelled, out-of-sample error of graphs "
        f"{errors[0]} and {errors[1]}). " + "; ".join(of.plan.problems)
    )


def _clean(clean: bool) -> str:
    return "clean" if clean else "**not clean**"
