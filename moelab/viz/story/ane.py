"""The sections of notebook 06: figures, tables, metrics and takeaways of the Neural Engine.

`run` is the notebook's `moelab.lab.results.Run`; plans, conversions and times come from
`moelab.ane`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets

from moelab.ane.coreml.linter import lint_examples
from moelab.ane.coreml.package import coremltools
from moelab.ane.device import comparison, published
from moelab.ane.device.comparison import (
    GROUPS,
    LEVELS,
    RIVALS,
    SLACKS,
    Setting,
    fastest,
    order,
    ratio,
)
from moelab.ane.device.device_model import DeviceModel
from moelab.ane.device.published import REFERENCE_BYTES
from moelab.ane.parity import LOGITS, parity
from moelab.ane.plan import MAX_GRAPH_BYTES, ANEPlan, count, make_plan
from moelab.ane.popularity import assumed_counts
from moelab.ane.systems import OPERATORS, SYSTEMS, why_no_graph
from moelab.bench import ane_accuracy, ane_conversion
from moelab.bench.ane import plan_card
from moelab.calibration import calibrate
from moelab.cards import MODELS
from moelab.claims import NOT_REPRODUCED
from moelab.evaluation import questions
from moelab.models import plug
from moelab.table import span
from moelab.trace import PREFILL, RoutingTrace
from moelab.viz.figures import load_distribution
from moelab.viz.notebook import interact, say, show
from moelab.viz.story import ane_figures as figures
from moelab.viz.story import ane_tables as tables

if TYPE_CHECKING:
    from moelab.lab.results import Run

SHOWN = (
    "Phi-3.5-MoE",
    "Phi-tiny-MoE",
    "Qwen3-30B-A3B",
    "Mixtral-8x7B",
    "Llama4-Scout",
)  # of what fits
ALLOWED = 0.18  # share of the choices that a setting may drop
SWEEP = {
    "serial": "Falling curves, one a group size, through the published points; larger groups lie "
    "lower at equal capacity, and that of eight turns up beyond a capacity of 128.",
    "parallel": "Falling curves through the published points; here larger groups lie higher at "
    "equal capacity, and that of eight jumps up beyond a capacity of 128.",
}


def operators(run: Run) -> None:
    """What runs on the Neural Engine, and what does not."""
    there = [op.name for op in OPERATORS if op.unit == "ane"]
    run.table("Who runs what", tables.operators(OPERATORS))
    run.metric("operators_on_ane", len(there), f"of {len(OPERATORS)}", "exact")
    run.takeaway(
        "{n} of {all} operators go to the ANE: {names}.",
        n=len(there),
        all=len(OPERATORS),
        names=", ".join(there),
    )


def plan(
    run: Run, train: RoutingTrace, test: RoutingTrace, chunk: int, drop: float, group_size: int
) -> ANEPlan:
    """Plans from a calibration, what they drop and pad on prompts they were made from and on
    others; the chosen one."""
    spec = train.spec
    seen, unseen = (ane_accuracy.prompt_loads(trace, chunk) for trace in (train, test))  # [n, L, E]
    plans, slack = ane_accuracy.candidates(train, chunk, drop, group_size)
    accounts, chosen = (
        {name: (count(one, seen), count(one, unseen)) for name, one in plans.items()},
        plans["plan"],
    )
    run.table("Four plans", tables.plans(plans, slack, accounts))
    imbalance = calibrate(train).imbalance(PREFILL)
    _load_figure(run, seen, imbalance, chunk, spec)
    _placement_figure(run, chosen, group_size, slack)
    run.metrics_of(
        {f"dropped_{name}": account.drop_rate for name, (_, account) in accounts.items()},
        "of routings, test prompts",
        "measured",
    )
    run.metrics_of(
        {f"padded_{name}": account.padded_fraction for name, (_, account) in accounts.items()},
        "of rows, test prompts",
        "measured",
    )
    run.metric("slack", slack, "× expected loads", "measured")
    _plan_takeaway(run, accounts, chosen, slack, imbalance)
    return chosen


def _load_figure(run: Run, seen: Any, imbalance: Any, chunk: int, spec: Any) -> None:
    """Loads of the experts of the layer that is most out of balance; seen [n, L, E], imbalance
    [L]."""
    E, K = spec.E, spec.K
    skewed, r = int(imbalance.argmax()), float(imbalance.max())
    levels = {
        "r·B/E (printed)": r * chunk / E,
        "K·B/E": K * chunk / E,
        "r·K·B/E": r * K * chunk / E,
    }
    run.figure(
        "loads",
        load_distribution(seen[:, skewed], levels),
        caption=f"Tokens that each expert of layer {skewed} gets in a chunk of up to {chunk} "
        f"tokens, and the estimates of mean and busiest load (exact counts; {spec.name}, "
        f"{len(seen)} calibration prompts).",
        alt="A median line over the experts by popularity within a band of what chunks vary by, "
        "and horizontal lines at "
        + ", ".join(f"{tokens:.0f} ({name})" for name, tokens in levels.items())
        + ".",
    )


def _placement_figure(run: Run, chosen: ANEPlan, group_size: int, slack: float) -> None:
    spec, chunk = chosen.spec, chosen.chunk
    run.figure(
        "placement",
        figures.placement(chosen),
        caption=f"Our plan of {spec.name}: each bar is a graph, as wide as it has experts; grey: "
        f"experts on the CPU (exact; G at most {group_size}, B = {chunk}, slack {slack:g}).",
        alt="One row a layer, its graphs from the hottest experts to the coldest; "
        f"{chosen.cpu_experts} of {spec.L * spec.E} experts, grey at the ends of the rows, "
        "are on the CPU.",
    )


def _plan_takeaway(
    run: Run, accounts: dict[str, Any], chosen: ANEPlan, slack: float, imbalance: Any
) -> None:
    levels = sorted({len(layer.tiers.levels) for layer in chosen.layers})
    run.takeaway(
        "As the paper prints it, r·B/E drops **{printed:.0%}** of the routings; with the "
        "factor K {factor_k:.1%}, and at slack {slack:g} **{ours:.1%}** on unseen "
        "prompts ({seen:.1%} on the calibration's), with {padded:.0%} of the rows "
        "padding. The busiest expert's capacity for all would pad {worst:.0%}. Of three "
        "tiers {levels} are left after rounding to 16: this model was trained to balance "
        "its load (r is {least:.2f} to {most:.2f}).",
        printed=accounts["printed"][1].drop_rate,
        factor_k=accounts["factor_k"][1].drop_rate,
        slack=slack,
        ours=accounts["plan"][1].drop_rate,
        seen=accounts["plan"][0].drop_rate,
        padded=accounts["plan"][1].padded_fraction,
        worst=accounts["one_capacity"][1].padded_fraction,
        levels=" or ".join(map(str, levels)),
        least=float(imbalance.min()),
        most=float(imbalance.max()),
    )


def cards(run: Run, group_size: int, seed: int) -> None:
    """A plan for every model card: what fits one graph, and what has no graph."""
    planned, took = {}, {}
    for name in MODELS:
        planned[name], took[name] = plan_card(name, group_size=group_size, seed=seed)
    run.metrics_of(
        {f"planning_{name}": took[name] for name in ("Phi-3.5-MoE", "Qwen3-30B-A3B")},
        "s of CPU time",
        "measured",
    )
    run.metrics_of(
        {f"launches_{name}": planned[name].launches for name in SHOWN[:4]},
        "graphs a chunk",
        "exact",
    )
    run.table("What fits", tables.cards(planned))
    run.figure(
        "graph_weights",
        figures.graph_weights(
            {
                name: {G: 2 * G * planned[name].spec.expert_params / 1e9 for G in (1, 2, 4, 8, 16)}
                for name in SHOWN
            },
            MAX_GRAPH_BYTES / 1e9,
        ),
        caption="Weights of one fp16 graph by group size, and the limit of an M2 Ultra (exact; the "
        "limit is the paper's, read as 1200 MiB).",
        alt="Straight rising lines on two logarithmic axes. PhiMoE meets the limit exactly at "
        "eight experts, Llama 4 Scout and Mixtral cross it between two and eight; Phi-tiny "
        "and Qwen3 stay below it.",
    )
    phimoe = planned["Phi-3.5-MoE"].spec
    literal = make_plan(phimoe, *assumed_counts(phimoe, 256, seed=seed), max_graph_bytes=1.2e9)
    run.metric("eight_phimoe_experts", published.EIGHT_EXPERTS, "MiB", "exact")
    smaller = [
        name
        for name, one in planned.items()
        if any("instead of" in problem for problem in one.problems)
    ]
    lacks = {
        block: [name for name, one in planned.items() if why_no_graph(block, one.spec.model_type)]
        for block in ("attention", "experts")
    }
    idle = [
        name for name, one in planned.items() if not one.launches and name not in lacks["experts"]
    ]
    run.takeaway(
        "Read as 1200 MiB the limit holds eight experts of PhiMoE, as 1.2·10⁹ bytes only "
        "{fit} (*{problem}*). Smaller groups than requested: {smaller}. {idle} would "
        "be without a group that expects enough of 256 tokens to amortize its launch. There "
        "is no graph here for the attention of {attention}, nor for the experts of "
        "{experts}: plans leave those parts on the CPU and say why.",
        fit=int(1.2e9 // REFERENCE_BYTES),
        problem="; ".join(literal.problems),
        smaller=", ".join(smaller) or "none",
        idle=", ".join(idle) or "No model",
        attention=", ".join(lacks["attention"]) or "none",
        experts=", ".join(lacks["experts"]) or "none",
    )


def conversion(
    run: Run,
    lm: Any,
    source: str | None,
    plan: ANEPlan,
    n_layers: int,
    n: int,
    tokens: int,
    seed: int,
) -> None:
    """Convert the first layers, lint and evaluate the packages, and send n prompts through them.

    Without coremltools it says so and leaves out its metrics.
    """
    try:
        coremltools()
    except ImportError as reason:
        return say(
            f"**This section is skipped on this machine.** {reason}. Everything else in this "
            "notebook works without; `moelab check` will miss this section's metrics."
        )
    chunk, layers = plan.chunk, min(n_layers, plan.spec.L)
    with tempfile.TemporaryDirectory(prefix="moelab-ane-") as folder:
        made = ane_conversion.convert(
            source,
            f"{folder}/converted",
            ane_conversion.on_first_layers(plan, n_layers),
            max(tokens, chunk),
        )
        good, bad = lint_examples(plug(lm)[0].seam, lm.spec, folder)
        context = made.model.manifest["settings"]["context"]
        ids = [
            lm.tokenizer(prompt.text)["input_ids"][:context]
            for prompt in questions.prompts("needle", n, tokens=tokens, seed=seed + 1)
        ]
        same = {mode: parity(made.model, lm, ids, mode) for mode in ("double", "fp16")}
        rms = ane_conversion.fp16_error(made.model, seed)
        shaken = ane_conversion.shaken(
            lm, ids, rms, seed
        )  # a control: no graphs, noise of that size
    caught = [name for name, report in bad.items() if not report.clean]
    run.table("Packages", tables.packages(made))
    run.table(
        "What the linter finds, also in graphs that were not written for the ANE",
        tables.findings(good, bad),
    )
    run.table(
        "Whole prompts through the packages",
        tables.parity(same, [-(-len(one) // chunk) for one in ids], shaken),
    )
    _parity_figure(run, same, plan, layers, tokens)
    _conversion_metrics(run, made, caught, bad, same, rms)
    _conversion_takeaway(run, made, layers, plan.spec.L, (len(caught), len(bad)), same, rms, shaken)


def _parity_figure(run: Run, same: dict[str, Any], plan: ANEPlan, layers: int, tokens: int) -> None:
    run.figure(
        "parity",
        figures.parity({mode: p.last for mode, p in same.items()}, LOGITS),
        caption="Largest difference of a logit of the next token between the packages and the "
        f"model, prompts of about {tokens} tokens in chunks of {plan.chunk} (measured "
        f"with the evaluator; {layers} of {plan.spec.L} layers converted). The line is "
        f"the tolerance, {LOGITS:g}.",
        alt="Points on a logarithmic axis beside the line of the tolerance: "
        + "; ".join(
            f"{mode} from {p.last.min():.0e} to {p.last.max():.0e}" for mode, p in same.items()
        )
        + ".",
    )


def _conversion_metrics(
    run: Run, made: Any, caught: list[str], bad: dict[str, Any], same: dict[str, Any], rms: float
) -> None:
    over = made.weight_bytes / made.expected_bytes
    run.metric("ffn_difference_double", made.difference, "of the largest output", "exact")
    run.metric("all_graphs_lint_clean", made.clean, "", "exact")
    run.metric("packages", len(made.packages), "", "measured")
    run.metric("weights_written_over_estimate", over, "×", "measured")
    run.metric("converting", made.seconds, "s of CPU time", "measured")
    run.metric("bad_graphs_caught", len(caught), f"of {len(bad)}", "exact")
    for mode, p in same.items():
        run.metric(
            f"logits_{mode}", float(p.last.max()), "largest difference, next token", "measured"
        )
        run.metric(f"same_token_{mode}", float(p.same.mean()), "of prompts", "measured")
    run.metric("ffn_rms_fp16", rms, "relative", "measured")


def _conversion_takeaway(
    run: Run,
    made: Any,
    layers: int,
    L: int,
    flagged: tuple[int, int],
    same: dict[str, Any],
    rms: float,
    shaken: Any,
) -> None:
    """flagged : bad examples that the linter caught, of how many."""
    caught, bad = flagged
    double, half = same["double"], same["fp16"]
    run.takeaway(
        "{layers} of {L} layers became {packages} packages of {over:.3f} times the "
        "expected size, every expert graph equal to torch to **{difference:g}** in double "
        "precision, {clean} of them clean by the linter, which flags {caught} of the "
        "{bad} bad examples. Whole prompts: the next token's logits within "
        "**{double:.1e}** (double) and **{half:.1e}** (fp16), the same next token on "
        "{same_double:.0%} and {same_half:.0%}; {beyond} of {n} in fp16 exceed "
        "{limit:g}. One graph's fp16 error is {rms:.1e}, but where two experts are "
        "nearly tied, rounding routes a token to the other one. **The control** has no "
        "graphs, only noise of that size on what the experts put out: its logits are off by "
        "up to **{control:.2g}**, so rounding and near ties alone cause that much.",
        layers=layers,
        L=L,
        packages=len(made.packages),
        over=made.weight_bytes / made.expected_bytes,
        difference=made.difference,
        clean="all" if made.clean else "NOT all",
        caught=caught,
        bad=bad,
        double=double.last.max(),
        half=half.last.max(),
        same_double=double.same.mean(),
        same_half=half.same.mean(),
        beyond=int((half.last > LOGITS).sum()),
        n=len(half.last),
        limit=LOGITS,
        rms=rms,
        control=max(float(one.max()) for one in shaken),
    )


def answers(run: Run, found: ane_accuracy.Answers) -> None:
    """Right answers with the plan's drops beside dense ones."""
    run.table("Right answers, dense and with drops", tables.answers(found))
    for task, of in found.counts.items():
        run.metric(f"accuracy_dense_{task}", found.dense[task]["score"], "of prompts", "measured")
        run.metric(f"accuracy_pruned_{task}", found.pruned[task]["score"], "of prompts", "measured")
        run.metric(f"dropped_{task}", of.drop_rate, "of routings", "measured")
        run.metric(f"padded_{task}", of.padded_fraction, "of rows", "measured")
    run.takeaway(
        "With {least:.0%} to {most:.0%} dropped, retrieval changes by "
        "**{multikey:+.1f}** points, and the worst task is {worst} with "
        "**{lost:+.1f}**; the 95 % intervals say what that can mean.",
        **dict(zip(("least", "most"), found.spread("drop_rate"))),
        multikey=found.points("needle_multikey"),
        worst=found.worst,
        lost=found.points(found.worst),
    )


def dropping(
    run: Run, found: ane_accuracy.LossByOrder, slacks: Sequence[float], windows: int
) -> None:
    """Language loss by the share dropped and the order of dropping."""
    run.figure(
        "dropping",
        figures.dropping(
            {mode: list(of.values()) for mode, of in found.cost.items()},
            "language loss beside dense (%)",
        ),
        caption=f"Language loss of {windows} windows of unseen library text, by share of choices "
        "dropped and order of dropping (measured; bars: standard error of the paired "
        "difference; capacities × " + ", ".join(f"{s:g}" for s in slacks) + ").",
        alt="A line an order of dropping, loss against the share dropped; at the tightest "
        "capacities from the lowest to the highest: " + ", ".join(found.at(min(slacks))) + ".",
    )
    for s in slacks:
        run.metrics_of(
            {f"loss_{key}_{s:g}": loss for key, (_, loss, _) in found.at(s).items()},
            "% beside dense",
            "measured",
        )
    hardest, gentlest = found.at(min(slacks)), found.at(max(slacks))  # the cheapest order first
    difference, low, high = found.beside_random[min(slacks)]
    run.metric("saliency_minus_random", difference, "nats a token", "measured")
    mode_of, (cheapest, *_, dearest) = (
        {key: mode for mode, key in ane_accuracy.MODES.items()},
        hardest,
    )
    run.takeaway(
        "**The loss shows what answers don't:** at {share:.0%} dropped by saliency it is "
        "already {more:+.1f} %, and at {hard:.0%}, from the cheapest order to the "
        "costliest: {orders}. Saliency is {verdict} than chance there (paired difference "
        "{low:+.3f} to {high:+.3f} nats a token), dropping the strongest is "
        "{dearest}the costliest, and the router's own weight, which is free, is {best} "
        "of the five.",
        share=gentlest["saliency"][0],
        more=gentlest["saliency"][1],
        hard=hardest["saliency"][0],
        low=low,
        high=high,
        orders=", ".join(f"{mode_of[key]} {loss:+.1f} %" for key, (_, loss, _) in hardest.items()),
        verdict="better" if high < 0 else "worse" if low > 0 else "no better and no worse",
        dearest="" if dearest == "strongest" else "not ",
        best="the best" if cheapest == "router" else "not the best",
    )


def rates(run: Run) -> DeviceModel:
    """The device model's four terms, fitted to Table 5."""
    device = DeviceModel.of()
    errors, grid = device.fit_table(), comparison.slot_grid(device)
    run.table("The four terms", tables.parameters(device))
    for mode, alt in SWEEP.items():
        run.figure(
            f"sweep_{mode}",
            figures.sweep(device.rates, published.TABLE_5, mode),
            caption=f"Latency of an expert slot by group size and capacity, {mode}: points are "
            "Table 5 (paper), lines the fit (modelled; RMS error "
            f"{errors[f'latency, {mode}']['RMS']:.1%}).",
            alt=alt,
        )
    run.table("A slot by group size and capacity", tables.slots(grid))
    for name, of in errors.items():
        run.metrics_of(
            {
                f"fit_{name.replace(', ', '_')}_{what.replace(' ', '_')}": of[what]
                for what in ("RMS", "worst", "leave-one-out RMS")
            },
            "relative",
            "modelled",
        )
    run.metric("table_4_ours_sum", published.table_4_sums()[published.OURS], "ms", "paper")
    run.metric("table_4_ffn_as_slots", published.expert_ffn()[0], "ms", "paper")
    serial, (G, C), (tflops, gbs) = (
        errors["latency, serial"],
        comparison.cheapest_slot(grid),
        tables.achieved(device),
    )
    run.takeaway(
        "Four terms reproduce Table 5's serial latencies to **{rms:.1%}** RMS ({out:.1%} "
        "leaving one out), the parallel ones to {parallel:.1%}. A graph reaches "
        "{tflops:.1f} TFLOPS and {gbs:.0f} GB/s, far below the published peak rates, and "
        "weights and rows add up rather than overlap. The cheapest slot of what fits one "
        "graph is **{G}×{C}** ({slot:.3f} ms): grouping shares launches, capacity "
        "shares weights, and both stop at 1024 rows.",
        rms=serial["RMS"],
        out=serial["leave-one-out RMS"],
        parallel=errors["latency, parallel"]["RMS"],
        tflops=tflops,
        gbs=gbs,
        G=G,
        C=C,
        slot=grid[G, C],
    )
    return device


def systems(run: Run, studies: dict[str, comparison.Study], device: DeviceModel) -> None:
    """Time, energy and CPU cycles of the four systems beside the paper's."""
    phi, first, error = studies["Phi-3.5-MoE"], comparison.RUNS[0], kind_of(device)
    for metric, name, source in (
        ("ttft", "TTFT", "14"),
        ("energy", "Energy", "15"),
        ("cpu cycles", "CPU cycles", "16"),
    ):
        reach = "; ".join(
            f"{SYSTEMS[s].title} {span(*comparison.baselines(phi, metric, (s,)))}" for s in RIVALS
        )
        run.figure(
            f"systems_{metric.replace(' ', '_')}",
            figures.systems(phi, metric, f"{name} over NPUMoE's"),
            caption=f"{name} of each system over NPUMoE's, PhiMoE on an M2 Ultra ({error}; "
            f"popularity assumed). Open diamonds: Fig. {source} (paper; joined where it "
            "gives a range of all systems).",
            alt=f"Groups of three bars for {len(phi)} runs, the paper's values beside them, where "
            f"it has any: {reach}.",
        )
    run.figure(
        "breakdown",
        figures.parts(phi[first]),
        caption=f"Breakdown of TTFT, PhiMoE, {tables.label(first)}, M2 Ultra ({error}). After "
        "Fig. 14.",
        alt="Stacked bars of all systems, from the shortest to the longest: "
        + ", ".join(SYSTEMS[s].title for s in order(phi[first], "ttft", SYSTEMS))
        + ".",
    )
    run.figure(
        "trade_off",
        figures.time_and_energy(studies, first),
        caption=f"Time and energy of the four systems, {tables.label(first)} ({error}). After "
        "Fig. 13 and 19.",
        alt="Three panels, a model each: a point a system, time to the right, energy upwards.",
    )
    run.table("The four systems", tables.systems(phi))
    run.table("Built up step by step", tables.ablation(phi[first]))


def kind_of(device: DeviceModel) -> str:
    """What its numbers are, with the error for graphs that the fit has not seen."""
    in_time, in_energy = (f"{device.error(quantity):.0%}" for quantity in ("latency", "energy"))
    return f"modelled; out-of-sample error of ANE graphs {in_time} in time, {in_energy} in energy"


def held_out(
    run: Run, studies: dict[str, comparison.Study], device: DeviceModel, seed: int
) -> None:
    """Published figures that were not fitted: which hold by every choice, by ours only, or come out
    reversed."""
    for name, of in comparison.modelled(studies, seed).items():
        run.metric(name, *of)
    rows = [row for row in run.answered() if row.readings]
    phi = studies["Phi-3.5-MoE"][comparison.RUNS[0]]
    judged = [
        row for row in rows if not (row.claim.fitted or row.claim.follows or row.claim.contradicted)
    ]
    hold = [row for row in judged if row.verdict != NOT_REPRODUCED]
    run.metric("held_out_claims_that_hold", len(hold), f"of {len(judged)}", "modelled")
    run.figure(
        "errors",
        figures.misses(rows),
        caption=f"Published numbers beside modelled ones, by verdict ({kind_of(device)}; orders, "
        "and what the source contradicts, are left out). Fitted ones, and what follows "
        "from them, judge nothing.",
        alt="Rows of points around a line at zero: TTFT near it, energy and CPU cycles further "
        "away, cycles of the naïve system furthest to the right.",
    )
    run.table("What holds, and by which choice it would not (✗)", tables.sensitivity(rows))
    orders = [row for row in rows if row.claim.above is not None or row.claim.below is not None]
    reversed_ = [row for row in orders if row.verdict == NOT_REPRODUCED and not row.lost]
    (overlap,) = (
        row.readings["CPU and ANE in turn"] for row in rows if row.claim.id == "ablation-tg"
    )
    run.table(
        "Trends and orders that come out reversed",
        [
            {
                "trend or order": f"{row.claim.where}: {row.claim.text}",
                "modelled": f"{row.ours:.3g}",
                "likely cause": row.why,
            }
            for row in reversed_
        ],
    )
    run.takeaway(
        "{judged} published figures, trends and orders were neither fitted nor follow from "
        "what was. **{hold} of them hold by every choice**; {lost} hold by ours only and "
        "count as not reproduced. Of {orders} trends and orders {reversed} come out "
        "reversed. That NPUMoE is first and the naïve system last is no finding: Table 4, "
        "which is fitted, has it so. Without groups and tiers it takes {base:.2f} times as "
        "long instead of 2.89. **The last step of the ablation needs CPU and ANE in "
        "parallel:** then placement gains a factor of {placed:.2f}; if one waits for the "
        "other, {waits:.2f}. The paper doesn't say that they do: it is an input here, "
        "chosen because of that step.",
        judged=len(judged),
        hold=len(hold),
        lost=sum(bool(row.lost) for row in judged),
        orders=len(orders),
        reversed=len(reversed_),
        base=ratio(phi, "ttft", "base"),
        placed=ratio(phi, "ttft", "base+TG"),
        waits=overlap,
    )


def settings(run: Run, card: str, device: DeviceModel, smoke: bool, seed: int) -> None:
    """Every combination of tiers, slack, group size and chunk for a card, and controls to walk
    through them."""
    swept = comparison.settings(card, groups=(1, 8) if smoke else GROUPS, seed=seed)
    best = fastest(swept, ALLOWED)
    usual = {
        setting.chunk: of
        for setting, of in swept.items()
        if setting == Setting(chunk=setting.chunk)
    }
    run.table(
        f"The fastest setting that drops at most {ALLOWED:.0%}, and the default",
        tables.settings(swept, best),
    )
    run.metrics_of(
        {f"best_ttft_{card}_{B}": swept[setting].ttft_s for B, setting in best.items()},
        f"s, at most {ALLOWED:.0%} dropped",
        "modelled",
    )
    run.metrics_of({f"usual_ttft_{card}_{B}": usual[B].ttft_s for B in best}, "s", "modelled")
    run.takeaway(
        "For {card} the default takes {longer} longer than the fastest setting, at "
        "chunks of {chunks} (modelled). The chunk matters most: a prompt of 1024 takes "
        "{chunk:.1f} times as long in chunks of {small} as in one of {large}: every "
        "chunk reads all the weights again.",
        card=card,
        chunks=", ".join(map(str, best)),
        longer=", ".join(
            f"{usual[B].ttft_s / swept[setting].ttft_s - 1:.0%}" for B, setting in best.items()
        ),
        small=min(usual),
        large=max(usual),
        chunk=usual[min(usual)].ttft_s / usual[max(usual)].ttft_s,
    )

    def turned(tiers: int, slack: float, group_size: int, chunk: int) -> None:
        setting = Setting(tiers, slack, group_size, chunk)
        said = tables.caption(card, setting, swept[setting], device)
        show(figures.around(swept, setting), said, said)

    interact(
        turned,
        tiers=ipywidgets.Dropdown(options=LEVELS, value=3, description="capacity tiers a layer"),
        slack=ipywidgets.Dropdown(
            options=SLACKS, value=1.0, description="slack (× expected loads)"
        ),
        group_size=ipywidgets.Dropdown(
            options=sorted({setting.group_size for setting in swept}),
            value=8,
            description="group size G (experts a graph)",
        ),
        chunk=ipywidgets.Dropdown(options=list(usual), value=256, description="chunk B (tokens)"),
    )


def appendix(run: Run) -> None:
    """Where the paper contradicts itself."""
    run.table("Inconsistencies of the paper", tables.contradictions(published.inconsistencies()))
