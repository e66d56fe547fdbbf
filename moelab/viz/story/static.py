"""The sections of notebook 05: figures, tables, metrics and takeaways of experts in static shapes.

`run` is the notebook's `moelab.lab.results.Run`; what is counted, scored and timed comes from
`moelab.bench`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets

from moelab.ane.device.published import TABLE_3, TABLE_3_ACCURACY
from moelab.bench import experts, neuron_examples, parallel, static
from moelab.bench.quantization import compare_formats, layer_errors
from moelab.calibration import Calibration
from moelab.evaluation.questions import REMEMBERED
from moelab.models import discover, plugged
from moelab.static import blocks, volumes
from moelab.static.loads import chunk_loads
from moelab.static.neuron import expected_unique
from moelab.static.quantization import FORMATS, Quantized
from moelab.static.static import ORDERS
from moelab.table import ms, percent
from moelab.trace import PREFILL, RoutingTrace
from moelab.viz.notebook import interact, show
from moelab.viz.story import static_figures as figures
from moelab.viz.story import static_tables as tables

if TYPE_CHECKING:
    from moelab.lab.results import Run

ANSWERED = [task for task in static.TASKS if task != "loss"]
LOWEST, *_, HIGHEST = sorted(TABLE_3, key=TABLE_3.get)  # of NPUMoE's tasks, by what they drop
LABELS = {"ep": "all-gather", "ep-a2a": "all-to-all-v", "ep-dedup": "deduplicated"}


def guide(run: Run) -> None:
    """The worked examples of AWS's guide, recomputed from their own inputs."""
    found, worst = neuron_examples.figures(), neuron_examples.worst_padding()
    for name, (value, unit) in found.items():
        run.metric(name, value, unit, "exact")
    mapped = neuron_examples.six_tokens()  # its T0 … T5, B = 4
    told = mapped.tokens.tolist() == [[0, 2, 5, -1], [1, 4, -1, -1], [3, -1, -1, -1]]
    run.metric("six_tokens_as_in_the_guide", told, "", "exact")
    run.table("Its six tokens of three experts, in blocks of four", tables.block_map(mapped))
    run.verdicts(found)
    run.takeaway(
        "The router is ten times larger than stated, and still small: {share:.2%} of a "
        "logical core's memory, so the *advice* to replicate it stands. The padding formulas "
        "are right; their 'worst case' isn't one: a possible routing needs all {needed} "
        "provisioned blocks, and pads {padded:.0%}. Its bandwidth estimates are too "
        "favourable: a decode step of 32 has {intensity:.0f} FLOPs for a byte of a *dense* "
        "layer and about 2 in an MoE layer.",
        share=neuron_examples.router_bytes()[-1],
        needed=worst.needed,
        padded=worst.algorithmic,
        intensity=neuron_examples.intensity(32, 2),
    )


def padding(run: Run, test: RoutingTrace, step: int, seed: int) -> None:
    """Padding by block size: the model's own routing in steps of so many tokens, and made ones;
    counted as it runs."""
    spec, loads = test.spec, chunk_loads(test, step)  # [n, L, E]
    curves = static.padding_curves(loads, step, spec.K, spec.name, seed)
    real, every, uniform = (
        dict(curves[name]) for name in (f"{spec.name}: real", static.ALL_BLOCKS, "uniform")
    )
    run.figure(
        "padding",
        figures.padding(curves),
        caption=f"Padding against block size: {step} tokens, top-{spec.K} of {spec.E} (exact "
        "counts; the last line is what a static graph computes if it skips no block). "
        f"Real: {len(loads) * spec.L} steps and layers of test prompts.",
        alt=f"Five lines over the block size. The model's own routing pads {percent(real[8], 0)} "
        f"at blocks of 8 and {percent(real[512], 0)} at 512; uniform routing "
        f"{percent(uniform[8], 0)} and {percent(uniform[512], 0)}. All N blocks of the "
        "model's routing lie above its filled ones.",
    )
    counted = static.count_blocks(test.ids[test.phase == PREFILL][:step], spec.E)
    run.table("Blocks of one step, counted while they ran", tables.blocks(counted))
    if not all(one.as_formula for one in counted):
        raise AssertionError("the executor computed other slots than the formula's")
    run.metric("blockwise_slots_equal_the_formula", True, "", "exact")
    run.metrics_of(
        {f"padding_real_{B}": real[B] for B in (16, 64, 256)}, "of slots, filled blocks", "measured"
    )
    run.metrics_of({f"padding_all_{B}": every[B] for B in (16, 64, 256)}, "of slots", "exact")
    spread, at = static.apart(curves, "Zipf 1.2", "uniform")
    run.takeaway(
        "What the executor computes equals the formulas slot by slot. At $B=64$ the model's "
        "own routing pads **{real:.1%}** of the filled blocks and {every:.1%} of all "
        "that are provided. Skew changes padding by {skew:.0f} points at most (Zipf 1.2 "
        "beside uniform, at $B={at}$): it depends on $B$ relative to $TK/E$ ({mean:.0f} "
        "here), and hardly on balance. It is *capacities* that depend on balance.",
        real=real[64],
        every=every[64],
        skew=100 * spread,
        at=at,
        mean=step * spec.K / spec.E,
    )


def block_size(run: Run, bench: experts.ExpertBenchmark, T: int, rounds: int) -> None:
    """The block size that the guide's factor advises, on its devices and here, for T tokens."""
    machine, seam = bench.machine(rounds), bench.layers.config
    mine = blocks.advise_block_size(
        machine,
        T,
        seam.num_experts_per_tok,
        seam.num_experts,
        reuse=False,
        sizes=(8, 16, 32, 64, 128),
    )
    asked = neuron_examples.block_sizes()
    once, again = asked[0].advice, asked[1].advice  # weights read once, and for each block
    run.table("Advised block sizes", tables.block_sizes(asked))
    run.metric("advised_block_trn2_bf16_gptoss_4096_tokens", once.block_size, "tokens", "modelled")
    run.metric("advised_block_here", mine.block_size, "tokens", "measured")
    run.metric("bandwidth", machine["memory_bandwidth_gbs"], "GB/s", "measured")
    run.metric("gemm_rate", 1e3 * machine["bf16_tflops"], "GFLOP/s", "measured")
    run.takeaway(
        "For GPT-OSS-120B and 4096 tokens the factor advises $B={advised}$ on TRN2 in "
        "bf16, but real tokens give {real:.0f} FLOPs a byte, of {target:.0f} "
        "wanted{why}. Where weights are reloaded for every block it is a sound guide: then "
        "$B\\ge{again:.0f}$. This machine needs {here:.0f} FLOPs a byte, and blocks of "
        "about {mine}.",
        advised=once.block_size,
        real=asked[0].real,
        target=once.target,
        again=again.target,
        here=mine.target,
        mine=mine.block_size,
        why=": padding makes the layer look compute-bound, and only a bigger $T$ could change that"
        if asked[0].real < once.target
        else "",
    )


def capacity(run: Run, costs: static.DropCosts, model: str) -> None:
    """What a capacity factor drops, pads and costs; `costs` are of `static.capacity_factors`."""
    n = {task: of[static.BASELINE]["n"] for task, of in costs.scores.items()}
    run.figure(
        "capacity",
        figures.capacity(costs),
        caption="Dropping, padding (exact, on the loss's windows) and their cost (measured, "
        f"paired; bars: 95 %) against the capacity factor. {model}, {n['loss']} windows, "
        f"{n['needle_multikey']} prompts a task, one text a pass.",
        alt="Three panels over the capacity factor: shares dropped and padded, language loss, "
        "right answers. "
        + "; ".join(
            f"at {way} {percent(of['loss'].drop_rate, 0)} dropped, loss "
            f"{costs.loss(way)[0]:+.1f} %, multi-key retrieval {costs.told('needle_multikey', way)}"
            for way, of in costs.tallies.items()
        )
        + ".",
    )
    run.table("Capacity factors", tables.capacity(costs))
    for way in costs.tallies:
        run.metric(f"dropped_cf_{way}", costs.tally(way).drop_rate, "of choices", "measured")
        run.metric(f"padded_cf_{way}", costs.tally(way).padded_fraction, "of slots", "measured")
        run.metric(f"loss_more_cf_{way}", costs.loss(way)[0], "%", "measured")
        run.metrics_of(
            {f"{task}_difference_cf_{way}": costs.points(task, way)[0] for task in ANSWERED},
            "points",
            "measured",
        )
    gentle = costs.nearest(0.14)  # about as much as Table 3 drops
    loss, tally = costs.scores["loss"][gentle], costs.tally(gentle)
    _, low, high = costs.points("needle_multikey", gentle)
    worst = min(REMEMBERED, key=lambda task: costs.points(task, gentle)[0])
    run.takeaway(
        "With $cf={cf}$, **{dropped:.1%}** is dropped and {padded:.1%} of the slots "
        "are padding, beside the paper's {least:.1%} to {most:.1%} dropped. Multi-key "
        "retrieval moves by {answers}, where the paper's goes from {paper}: {n} "
        "questions {shown}. The language loss moves by **{loss:+.1f} % ± "
        "{error:.1f}**, which the paper doesn't report; of what weights must hold, "
        "{worst} suffers most: {held}.",
        cf=gentle,
        dropped=tally.drop_rate,
        padded=tally.padded_fraction,
        least=TABLE_3[LOWEST][0],
        most=TABLE_3[HIGHEST][0],
        answers=costs.told("needle_multikey", gentle),
        n=n["needle_multikey"],
        paper="{:g} to {:g} %".format(*TABLE_3_ACCURACY["RULER niah_multikey_1"]),
        loss=loss["relative"],
        error=loss["relative error"],
        worst=worst,
        held=costs.told(worst, gentle),
        shown="show no significant change, and can't exclude one of the interval's size"
        if low < 0 < high
        else "do show a change",
    )


def tiers(
    run: Run,
    lm: Any,
    plan: static.TierPlan,
    calibration: Calibration,
    train: RoutingTrace,
    n: int,
    tokens: int,
    seed: int,
) -> None:
    """Plans run on n test prompts a source, a chunk of `tokens` each: what each drops and pads."""
    texts = static.chunk_texts(lm.tokenizer, n, tokens, seed)
    ran = static.run_ways(lm, plan.ways(), texts)
    _tiers_figure(run, ran, lm.spec, len(texts), tokens)
    run.table(
        "Tiers",
        tables.tiers(plan, calibration.imbalance(PREFILL), static.chunk_imbalance(train, tokens)),
    )
    run.metrics_of(
        {f"dropped_{slug(name)}": of.total.drop_rate for name, of in ran.items()},
        "of choices",
        "measured",
    )
    run.metrics_of(
        {f"padded_{slug(name)}": of.total.padded_fraction for name, of in ran.items()},
        "of slots",
        "measured",
    )
    pad, prune = ran["tiers, pad"], ran["tiers, prune"]
    if pad.total.dropped:
        raise AssertionError("padding lost a token")
    same = (
        pad.agree >= prune.agree
    )  # in bf16 rounding alone moves ties, of a model of noise at many places
    run.metric("pad_is_lossless", same, "", "exact")
    run.metric("pad_logits_largest_change", pad.changed, "logits, bf16", "measured")
    _tiers_takeaway(run, ran, plan.launches, lm.spec.E, same)


def _tiers_figure(run: Run, ran: Mapping[str, Any], spec: Any, prompts: int, tokens: int) -> None:
    run.figure(
        "tiers",
        figures.plans(ran, {name: TABLE_3[name] for name in (LOWEST, HIGHEST)}),
        caption=f"Choices dropped and slots padded in each layer ({spec.name}, {prompts} test "
        f"prompts of about {tokens} tokens, a chunk each; exact counts). Across: the "
        "least and most that NPUMoE's Table 3 drops, with its padding (paper, PhiMoE).",
        alt=f"Two panels over {spec.L} layers, shares dropped and padded, a line a plan and two "
        "of the paper. All layers together: "
        + "; ".join(
            f"{name} {percent(of.total.drop_rate, 0)} and {percent(of.total.padded_fraction, 0)}"
            for name, of in ran.items()
        )
        + ".",
    )


def _tiers_takeaway(run: Run, ran: Mapping[str, Any], launches: float, E: int, same: bool) -> None:
    one, pad, prune, groups, printed = (
        ran[name]
        for name in (
            "one capacity, 1.25",
            "tiers, pad",
            "tiers, prune",
            "groups of 8, prune",
            "tiers, literal B/E",
        )
    )
    run.takeaway(
        "Calibrated tiers drop **{dropped:.1%}** and pad **{padded:.1%}**; one capacity "
        "of $cf=1.25$ drops {one:.1%} and pads {one_padded:.1%}. Groups drop the same "
        "and pad {groups:.1%}, in {launches:.1f} launches a layer instead of up to "
        "{E}. *Pad* drops nothing: the most likely token is the same at {agree:.1%} of "
        "the places, when pruning at {pruned_agree:.1%}; {rest}. It computes "
        "{rows:.2f} rows a choice, where pruning computes {pruned:.2f}. The base "
        "capacity as the paper prints it would drop {printed:.0%}: the factor $K$ is "
        "missing.",
        dropped=prune.total.drop_rate,
        padded=prune.total.padded_fraction,
        one=one.total.drop_rate,
        one_padded=one.total.padded_fraction,
        groups=groups.total.padded_fraction,
        launches=launches,
        E=E,
        agree=pad.agree,
        pruned_agree=prune.agree,
        rest="the rest is rounding in bf16" if same else "**that is more than rounding explains**",
        rows=pad.total.slots / pad.total.routed,
        pruned=prune.total.slots / prune.total.routed,
        printed=printed.total.drop_rate,
    )


def orders(run: Run, costs: static.DropCosts, model: str, slack: float) -> None:
    """What each order of dropping costs; `costs` are of `static.drop_orders`."""
    n = costs.scores["needle_multikey"][static.BASELINE]["n"]
    judge = min(
        REMEMBERED, key=lambda task: costs.points(task, "strongest")[0]
    )  # the most sensitive task
    _orders_figure(run, costs, f"{slack:g} × the calibrated loads, {model}, {n} prompts a task")
    run.table("Orders of dropping", tables.orders(costs))
    run.metrics_of(
        {f"loss_more_order_{slug(way)}": costs.loss(way)[0] for way in costs.tallies},
        "%",
        "measured",
    )
    for task in ANSWERED:
        run.metrics_of(
            {f"{task}_order_{slug(way)}": costs.points(task, way)[0] for way in costs.tallies},
            "points",
            "measured",
        )
    run.metrics_of(
        {
            f"{order}_against_random": costs.against("random", order)[0]
            for order in ORDERS
            if order != "random"
        },
        "nats a token",
        "measured",
    )
    best = min(ORDERS, key=lambda order: costs.loss(order)[0])
    run.takeaway(
        "Saliency is **{saliency}** in language loss ({said}), and its opposite is "
        "{opposite}. Router weight is **{router}**. Best of all: *{best}*, "
        "{least:+.1f} % of loss, where saliency costs {salient:+.1f} %. Of the "
        "questions, {judge} judge best: by saliency they move by {least_salient}, by "
        "router weight by {routed}, and by {strongest} if the *strongest* are dropped. "
        "Multi-key retrieval moves by {none} without any expert at all ({n} questions a "
        "task).",
        saliency=costs.verdict("saliency"),
        opposite=costs.verdict("strongest"),
        router=costs.verdict("router"),
        best=best,
        least=costs.loss(best)[0],
        salient=costs.loss("saliency")[0],
        n=n,
        said="{:+.4f} nats, 95 % {:+.4f} to {:+.4f}".format(*costs.against("random", "saliency")),
        judge=judge,
        least_salient=costs.told(judge, "saliency"),
        routed=costs.told(judge, "router"),
        strongest=costs.told(judge, "strongest"),
        none=costs.told("needle_multikey", static.NO_EXPERTS),
    )


def _orders_figure(run: Run, costs: static.DropCosts, tiers: str) -> None:
    run.figure(
        "who",
        figures.drop_orders(costs),
        caption="Cost of dropping by drop order, against nothing dropped (measured, paired; "
        f"bars: 95 %). Tiers at {tiers}, one text a pass. 'No experts at all' is off the scale of the loss: "
        f"{costs.loss(static.NO_EXPERTS)[0]:+.0f} %.",
        alt="Panels of points with intervals, a row for each order: language loss, retrieval, "
        "and what weights must hold. Loss: "
        + "; ".join(f"{order} {costs.loss(order)[0]:+.1f} %" for order in ORDERS)
        + ". Multi-key retrieval without experts: "
        f"{costs.told('needle_multikey', static.NO_EXPERTS)}.",
    )


def executors(
    run: Run, bench: experts.ExpertBenchmark, prefill: int, rounds: int
) -> experts.ExpertTimes:
    """All executors on a prompt and on single tokens beside transformers' own and the roofline;
    those of one token."""
    without = (*experts.LEFT_OUT, *experts.PACKED)  # few bits are another section's matter
    found = {
        "prefill": bench.executors(prefill, rounds, without),
        "decode": bench.executors(1, 3 * rounds, without),
    }
    timed = dict(zip((f"prefill, {prefill} tokens", "decode, 1 token"), found.values()))
    config = bench.layers.config
    run.figure(
        "executors",
        figures.executors(
            {phase: of.samples for phase, of in timed.items()},
            {phase: of.limits for phase, of in timed.items()},
        ),
        caption=f"Time of one layer's experts ({config.num_experts} experts, "
        f"top-{config.num_experts_per_tok}, H {config.hidden_size}, I "
        f"{config.moe_intermediate_size}, bf16, {bench.threads} thread(s); measured in turn, "
        "medians, whiskers p10 to p90; experts are cold). Lines: the weights read once, and "
        "the routed arithmetic, at the rates measured in the same rounds.",
        alt="Two panels of points on logarithmic axes, a row for each way. "
        + " ".join(
            f"In {phase} {of.ours[1]} is fastest with {ms(of.ours[0])} ms, all experts takes "
            f"{ms(of.medians['all_experts'])}, and the higher limit is "
            f"{ms(max(of.limits.values()))}."
            for phase, of in timed.items()
        ),
    )
    run.table("The fastest here and of transformers", tables.executors(timed))
    for phase, of in found.items():
        run.metric(f"{phase}_bandwidth", of.bandwidth / 1e9, "GB/s", "measured")
        run.metrics_of(
            {
                f"{phase}_{name.replace(' ', '_')}": 1e3 * seconds
                for name, seconds in of.medians.items()
            },
            "ms",
            "measured",
        )
        run.metric(f"{phase}_speedup_over_transformers", of.speedup, "×", "measured")
        if not isinstance(of.reached, str):  # or the limit was measured wrongly
            run.metric(f"{phase}_share_of_roofline", of.reached, "", "measured")
    _executors_takeaway(run, *found.values())
    return found["decode"]


def _executors_takeaway(run: Run, many: experts.ExpertTimes, one: experts.ExpertTimes) -> None:
    run.takeaway(
        "In prefill *{many}* is {faster:.2f} times as fast as the best of transformers "
        "and reaches {reached} of the roofline; all experts with masks takes {all:.1f} "
        "times as long. In decode *{one}* is {decode:.2f} times as fast and at "
        "**{near}** of what {bound} allows. Blocks, the only static executor that drops "
        "nothing, take {blocks:.1f} times as long as the best in prefill and {block:.1f} "
        "in decode: static shapes are for devices that can't run any others.",
        many=many.ours[1],
        faster=many.speedup,
        reached=percent(many.reached, 0),
        all=many.medians["all_experts"] / many.ours[0],
        one=one.ours[1],
        decode=one.speedup,
        near=percent(one.reached, 0),
        bound=one.bound,
        blocks=many.medians["blockwise"] / many.ours[0],
        block=one.medians["blockwise"] / one.ours[0],
    )


def loading(
    run: Run,
    bench: experts.ExpertBenchmark,
    one: experts.ExpertTimes,
    test: RoutingTrace,
    rounds: int,
) -> None:
    """Distinct experts of a batch's decode step, and the batch from which on loading all of them is
    faster here."""
    spec, E, K = test.spec, bench.layers.config.num_experts, bench.layers.K
    batches = [b for b in (1, 2, 4, 8, 16, 32) if b <= test.sequences // 2]
    unique = static.unique_experts(test, batches)
    counted = unique.pop("counted")
    run.figure(
        "unique",
        figures.selective({f"{spec.name}, measured": counted}, unique, spec.E),
        caption=f"Unique experts of a decode step against the batch ({spec.name}, top-{spec.K} of "
        f"{spec.E}, mean of layers; points: counted on {test.sequences} sequences, exact; "
        "lines: formulas).",
        alt=f"Points: {counted[0][1]:.1f} of {spec.E} experts at batch {counted[0][0]} and "
        f"{counted[-1][1]:.1f} at {counted[-1][0]}, below the dashed line of all. Lines: "
        + "; ".join(f"{name} {of[-1][1]:.1f} there" for name, of in unique.items())
        + ".",
    )
    sizes = [b for b in (1, 2, 4, 8, 16, 32, 64) if b <= 4 * E // K]
    timed = {1: one.samples} | bench.loading(sizes[1:], rounds)
    ratios, rule = experts.all_over_selective(timed), E // K
    run.table("Selective loading beside all experts, here", tables.loading(timed, ratios, E, K))
    run.metrics_of(
        {f"unique_batch_{b}": value for b, value in counted}, f"experts of {spec.E}", "measured"
    )
    run.metrics_of(
        {f"all_over_selective_batch_{b}": ratio for b, ratio in ratios.items()}, "×", "measured"
    )
    needed, near = expected_unique(rule, [K / E] * E) / E, min(sizes, key=lambda b: abs(b - rule))
    run.metric("unique_at_the_rule_even", needed, "of E", "exact")
    first, (b, last) = experts.crossing(ratios), counted[-1]
    run.takeaway(
        "At the guide's threshold even routing still needs only {needed:.0%} of the "
        "experts; our model's sequences need {last:.1f} of {E} at batch {b}, "
        "independent ones would need {lone:.1f}. On this machine loading all is faster "
        "{crossed} (at batch {near}: {ratio:.2f} times selective's time). The rule is "
        "about *regular loads*, which suit an accelerator; on a CPU the arithmetic of masked "
        "tokens decides.",
        needed=needed,
        last=last,
        E=spec.E,
        b=b,
        lone=unique["independent, own popularity"][-1][1],
        near=near,
        ratio=ratios[near],
        crossed=f"from batch {first} on" if first else f"at no batch up to {sizes[-1]}",
    )


def formats(run: Run, lm: Any, tokens: int, windows: int, seed: int) -> None:
    """Rounded experts: errors of a layer's output, and bytes and language loss of what a store can
    hold."""
    with plugged(lm):
        layers = discover(lm)
        sources = {name: Quantized(layers, name) for name in FORMATS}
        errors = layer_errors(lm, layers, sources, 4, tokens, seed)
        own = sum(w.nbytes for w in layers[0].seam.weights(0).values())
    run.table("Error of a layer's routed output", tables.formats(errors, sources, own, lm.spec.L))
    error, size = (
        {name: errors[f"{name}, all"]["layer"] for name in FORMATS},
        {name: source.nbytes(0, 0) / own for name, source in sources.items()},
    )
    run.metrics_of(
        {f"error_{name}": of for name, of in error.items()},
        "% relative RMS of a layer's output",
        "measured",
    )
    run.metrics_of({f"bytes_{name}": of for name, of in size.items()}, "of bf16", "exact")
    kept = compare_formats(lm, tokens=tokens, windows=windows, seed=seed)
    run.table("What a store can hold", tables.stored(kept))
    run.metrics_of(
        {f"stored_bits_{name}": of["bits a weight"] for name, of in kept.items()},
        "bits a weight",
        "exact",
    )
    run.metrics_of(
        {f"stored_loss_{name}": of["loss: score"] for name, of in kept.items()},
        "nats a token",
        "measured",
    )
    run.takeaway(
        "Relative RMS error of a layer's routed output: {errors}.{outliers} In a store "
        "bf12 and Huffman change no bit; the loss rises by {losses}.",
        errors=", ".join(
            f"{name} **{error[name]:.2f} %** at {size[name]:.2f} of the bytes" for name in FORMATS
        ),
        outliers=" INT8 is more exact than FP8 with its larger blocks: these weights have few outliers, and FP8 "
        "spends bits on a range that they don't use."
        if error["int8"] < error["fp8"]
        else "",
        losses=", ".join(
            f"**{of['loss: difference']:+.4f}** ± {of['loss: difference error']:.4f} nats "
            f"with {name} ({of['bits a weight']:.2f} bits)"
            for name, of in kept.items()
            if "loss: difference" in of
        ),
    )


def exchange(run: Run, tokens: int, seed: int, W: int = 2) -> Mapping[str, Any]:
    """Rows that ranks send each other, counted on two processes beside the formulas; the bench's
    sections."""
    found = parallel.run(tokens, (W,), seed, rounds=0)
    rows = found[f"volume on {W} ranks, {tokens} tokens (exact)"]
    sent = {way: row["dispatched"] for way, row in rows.items()}
    as_formula = all(row["as predicted"] for row in rows.values())
    if not as_formula:
        raise AssertionError("the rows that were sent are not those that a loop counts")
    run.figure(
        "volumes",
        figures.volumes(
            {
                label: [
                    (w, volumes.expected(way, parallel.E, parallel.K, w))
                    for w in (2, 4, 8, 16, 32, 64)
                ]
                for way, label in LABELS.items()
            },
            {label: [(W, sent[way])] for way, label in LABELS.items()},
            "rows sent for a token, one way",
        ),
        caption=f"Rows of all ranks for a token against the number of ranks ({parallel.E} experts, "
        f"top-{parallel.K}, uniform routing, tokens spread over the ranks). Lines: formulas, exact "
        f"expectations. Points: counted on {W} gloo processes, {tokens} tokens (measured).",
        alt="All-gather rises in proportion to the ranks. All-to-all-v starts highest and levels "
        "off at eight rows; deduplicated lies below both everywhere. The three points are "
        "what was counted on two ranks, beside their lines.",
    )
    run.metrics_of(
        {f"rows_sent_{way}": of for way, of in sent.items()}, f"a token, {W} ranks", "measured"
    )
    run.metric("bytes_sent_equal_the_formulas", as_formula, "", "exact")
    run.takeaway(
        "Two processes send the rows that a loop over tokens counts, one by one. Plain "
        "all-to-all-v sends {plain:.2f} rows a token there, all-gather {gather:.2f} and "
        "deduplicated {dedup:.2f}: what the guide announces pays only with more than $K$ "
        "ranks (with $K$ it is a tie), or deduplicated.",
        plain=sent["ep-a2a"],
        gather=sent["ep"],
        dedup=sent["ep-dedup"],
    )
    return found


def balance(
    run: Run, found: Mapping[str, Any], calibration: Calibration, test: RoutingTrace
) -> None:
    """Load of 8 ranks by way of placing experts: placed by the calibration, counted on test
    prompts."""
    placed = parallel.placed(calibration.counts(PREFILL), test.counts())  # 8 ranks, 8 spare places
    ratios = {
        name: [max(loads) / (sum(loads) / len(loads)) for loads in of]
        for name, of in placed.items()
    }
    hardest = ratios["in order"].index(max(ratios["in order"]))
    run.figure(
        "balance",
        figures.balance({name: of[hardest] for name, of in placed.items()}),
        caption=f"Load of 8 ranks in layer {hardest}, the least even, of {test.spec.name} "
        f"({test.spec.E} experts): placed by the calibration, counted on test prompts (exact).",
        alt="Groups of three bars for each of eight ranks, one for each way of placing experts. "
        "The most loaded rank has "
        + ", ".join(f"{of[hardest]:.2f} times the mean {name}" for name, of in ratios.items())
        + ".",
    )
    zipf = found["EPLB, 64 experts on 8 ranks, max/mean (exact)"]
    advice, at = neuron_examples.parallel_ways(), zipf["Zipf 0.6"]
    run.table("64 experts on 8 ranks", tables.zipf(zipf))
    run.table("Tensor or expert parallelism", tables.parallel_ways(advice))
    run.metrics_of(
        {f"zipf_0.6_{slug(name)}": value for name, value in at.items()},
        "max/mean, 64 experts on 8",
        "exact",
    )
    run.metrics_of(
        {f"own_{slug(name)}": max(of) for name, of in ratios.items()},
        "max/mean, worst layer",
        "measured",
    )
    run.metric("advice_mixtral_8", advice["Mixtral-8x7B"][8].kind, "", "exact")
    run.metric("advice_deepseek_v3_64", advice["DeepSeek-V3"][64].kind, "", "exact")
    run.takeaway(
        "At Zipf 0.6 the most loaded of 8 ranks has {order:.2f} times the mean in order, "
        "**{packed:.3f}** packed and **{spare:.3f}** with 8 spare places; {model}, "
        "placed by its calibration and judged on other text, has {own} in the worst layer. "
        "The rest is what the calibration can't predict.",
        order=at["in order"],
        packed=at["EPLB, 0 spare"],
        spare=at["EPLB, 8 spare"],
        model=test.spec.name,
        own=" and ".join(f"{max(of):.2f} ({name})" for name, of in ratios.items()),
    )


def turning(E: int, K: int, seed: int) -> None:
    """Controls: padding by block size, skew and tokens."""

    def turned(B: int, skew: float, T: int) -> None:
        made = static.block_paddings(T, E, K, skew, seed)
        said = tables.caption(made[B], T, E, K, skew)
        show(figures.block_sizes(made), said, said)

    interact(
        turned,
        B=ipywidgets.SelectionSlider(
            options=static.SIZES, value=64, description="block size B (tokens)"
        ),
        skew=ipywidgets.FloatSlider(
            0.6, min=0, max=2, step=0.2, description="skew (Zipf exponent)", continuous_update=False
        ),
        T=ipywidgets.SelectionSlider(
            options=[1, 16, 128, 512, 2048, 4096], value=512, description="tokens of a step"
        ),
    )


def slug(name: str) -> str:
    """A name as part of a metric's: "groups of 8, prune" → "groups_of_8_prune"."""
    return "_".join(re.findall(r"[\w-]+", name))
