"""The sections of notebook 07 that model and simulate: figures, tables, metrics and takeaways of
GPU-NDP.

`run` is the notebook's `moelab.lab.results.Run`; times come from `moelab.ndp` and
`moelab.bench.ndp`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from statistics import mean
from typing import TYPE_CHECKING, Any

import ipywidgets

from moelab.bench import ndp as bench
from moelab.cards import load_model
from moelab.ndp import conditions
from moelab.ndp.costs import Costs, NotSupported
from moelab.ndp.fit import CHOICES, CLAIMS, FIT, HALVES, JUDGED, ODDITIES, error, off
from moelab.ndp.hardware import VARIANTS
from moelab.ndp.readings import Readings, readings
from moelab.ndp.simulation import timeline
from moelab.ndp.sweep import MODELS, SHORT, Assumptions, Spread, Sweep, modules_needed, over_seeds
from moelab.ndp.systems import PAPER, SYSTEMS
from moelab.viz.charts import bars, gantt, lines
from moelab.viz.notebook import interact, say, show
from moelab.viz.story import ndp_figures as figures
from moelab.viz.story import ndp_tables as tables
from moelab.viz.story.ndp_tables import times

if TYPE_CHECKING:
    from moelab.lab.results import Run

OURS, BEST, PAPERS = PAPER[-1], PAPER[-1] + ", improved", next(iter(VARIANTS))
_, QWEN, PHI, MIXTRAL = MODELS
BALANCED = {"+TP": "NDP+TP", "+TP+LB": "NDP+TP+LB"}
STEPS = {
    "MoE-OnDemand": "MoE-OnDemand",
    "MoNDE": "MoNDE",
    "+TP": "NDP+TP",
    "+TP+LB": "NDP+TP+LB",
    "+TP+LB+PRE": OURS,
    "+TP+LB+PRE, improved": BEST,
}
CHOSEN = Assumptions()  # the paper's machine, one reading of it
PHYSICAL = bench.physical(CHOSEN)  # modules whose DRAM the link shares


def costs(run: Run) -> None:
    """What an expert costs in each place, and how many modules hold a model."""
    six, needed = CHOSEN.hardware(6), {name: modules_needed(name, CHOSEN) for name in MODELS}
    found = {name: Costs(load_model(name), six) for name in MODELS}
    run.table("What an expert costs in each place", tables.costs(found, CHOSEN))
    for name, n in needed.items():
        run.metric(f"modules_needed_{name}", n, "modules of 32 GB", "exact")
        run.metric(
            f"expert_parameters_{name}",
            load_model(name).experts_bytes / 2e9,
            "billions, routed",
            "exact",
        )
        run.metric(f"transfer_{name}", 1e3 * found[name].transfer(), "ms an expert", "modelled")
    mixtral, phi, c = load_model(MIXTRAL), load_model(PHI), found[QWEN]
    run.metric(
        "active_mib_Mixtral-8x7B",
        mixtral.K * mixtral.expert_bytes / 2**20,
        "MiB a layer and token",
        "exact",
    )
    run.metric("activation_mib_Mixtral-8x7B", 2 * mixtral.H / 2**20, "MiB a token", "exact")
    run.metrics_of({"hidden_Phi-3.5-MoE": phi.H, "intermediate_Phi-3.5-MoE": phi.I}, "", "exact")
    run.takeaway(
        "An expert of Qwen3 takes {link:.2f} ms over the link and {modules:.2f} ms on "
        "six modules for one token, **{times:.1f} times** less; with 32 tokens the modules "
        "take {prompt:.1f} times as long as the transfer. The GPU computes it in "
        "{gpu:.2f} ms, once it is loaded.",
        link=1e3 * c.transfer(),
        modules=1e3 * float(c.unit(1) / 6),
        times=c.transfer() / float(c.unit(1) / 6),
        prompt=float(c.unit(32) / 6) / c.transfer(),
        gpu=1e3 * float(c.gpu(1)),
    )


def balance(run: Run, prompt: int) -> None:
    """The balance conditions, and where they have a whole expert for the GPU."""
    qwen = load_model(QWEN)
    decode = conditions.times(QWEN, 2, CHOSEN)
    asked = conditions.times(
        QWEN, 3, CHOSEN, prompt * qwen.K / qwen.E
    )  # an expert's tokens if routing is uniform
    panels = {
        "decode, N = 2 (Eq. 1)": (conditions.sides(decode), conditions.solutions(decode)),
        f"prompt of {prompt}, N = 3 (Eq. 2)": (
            conditions.sides(asked, prompt),
            conditions.solutions(asked, prompt),
        ),
        "on the GPU already, N = 6 (Eq. 3)": conditions.prefetched(
            conditions.times(QWEN, 6, CHOSEN)
        ),
    }
    run.figure(
        "balance",
        figures.balance(
            {name: sides for name, (sides, _) in panels.items()},
            {name: solutions for name, (_, solutions) in panels.items()},
        ),
        caption="Time of both sides over the number of experts on the GPU, Qwen3-30B-A3B "
        "(modelled).",
        alt="Three panels with a rising line for the GPU and a falling one for the modules that "
        "cross; markers at the crossing and at the whole number below it. In the third panel "
        "the rising line is flatter.",
    )
    found = conditions.answers(CHOSEN)  # (model, N) → E_g
    run.table("Experts for the GPU while decoding, and in whole experts", tables.answers(found))
    run.metrics_of(
        {f"balanced_{name}_{N}": E_g for (name, N), E_g in found.items()},
        "experts on the GPU, decode",
        "modelled",
    )
    idle = [key for key, E_g in found.items() if E_g < 1]
    always = [SHORT[name] for name in MODELS if all(key in idle for key in found if key[0] == name)]
    run.takeaway(
        "In **{idle} of {cells}** cells that fit, the balance has less than one whole "
        "expert for the GPU: there load balancing in whole experts changes nothing while "
        "decoding. It includes {always} at every N.",
        idle=len(idle),
        cells=len(found),
        always=" and ".join(always) or "no model",
    )


def decode_step(run: Run, seed: int, prompt: int, answer: int, N: int = 4) -> None:
    """One decode step of Qwen3 under each schedule, by the event simulation."""
    token = CHOSEN.routing(QWEN, seed, prompt, answer)
    acted = {
        label: timeline(
            (PHYSICAL if name == BEST else CHOSEN).hardware(N), CHOSEN.system(name), token
        )
        for label, name in STEPS.items()
    }  # label → (events, forwards)
    run.figure(
        "gantt",
        gantt(
            {
                label: [event for event in events if event.layer < 2]
                for label, (events, _) in acted.items()
            }
        ),
        caption="The first two MoE layers of one decode step of Qwen3-30B-A3B on four modules "
        "(simulated; 'other' is attention and the like; the last one on modules whose DRAM "
        "the link shares). After Fig. 3.",
        alt="Six Gantt charts on one time axis with rows for GPU, link and four modules. On "
        "demand, only the link is busy; under MoNDE one module is busy longer than the "
        "others; with tensor parallelism all four end together, with balancing or "
        "prefetching earlier, as the GPU has some of the experts.",
    )
    steps = {label: bench.step_figures(*of, N=N) for label, of in acted.items()}
    run.table("A decode step under each schedule", tables.steps(steps))
    run.metrics_of(
        {f"step_{label}": 1e3 * of["seconds"] for label, of in steps.items()},
        "ms, one decode step",
        "simulated",
    )
    first = steps["MoNDE"]
    run.takeaway(
        "MoNDE keeps its modules busy {whole:.0%} of the step, tensor parallelism "
        "**{cut:.0%}**, and the step is {tp:.2f} times as fast; all three techniques "
        "together {all:.2f} times.",
        whole=first["modules"],
        cut=steps["+TP"]["modules"],
        tp=first["seconds"] / steps["+TP"]["seconds"],
        all=first["seconds"] / steps["+TP+LB+PRE"]["seconds"],
    )


def evaluation(
    run: Run, sweep: Sweep, seed: int, seconds: float, sizes: Mapping[str, Any]
) -> dict[str, Spread]:
    """The paper's evaluation, answers and whole generations: what `over_seeds` finds, name of a
    claim → spread."""
    found = over_seeds(sweep)
    run.metric("sweep_cpu", seconds, "s", "measured")
    run.metrics_of({name: middle for name, (middle, *_) in found.items()}, "×", "modelled")
    _speedup_figures(run, sweep, found)
    ends = {over: sweep.mean_gains(OURS, over, "end_to_end") for over in PAPER[:3]}
    monde = ends["MoNDE"]
    run.table("End to end, over each of the others", tables.end_to_end(ends))
    run.metrics_of(
        {
            f"end_to_end_{name}": mean(gain for (of, _), gain in monde.items() if of == name)
            for name in MODELS
        },
        "× MoNDE",
        "modelled",
    )
    run.metric("end_to_end_mean_over_monde", mean(monde.values()), "×", "modelled")
    equal = bench.means(sweep, seed, **sizes)
    run.metrics_of(
        {f"equal_memory_over_{over}": of["equal memory: mean"] for over, of in equal.items()},
        "×, mean, equal GPU memory",
        "modelled",
    )
    run.takeaway(
        "While decoding, tensor parallelism alone gives **{tp:.2f}×** over MoNDE on "
        "average, the other two techniques raise that to **{all:.2f}×**; a prompt gains "
        "{prompt:.2f}×. Prompt and answer together it is {ends:.2f}× on average and "
        "{most:.2f}× at most. With equal GPU memory for all: {equal}, on average.",
        tp=found["decode NDP+TP"][0],
        all=found["decode NDP+TP+LB+PRE"][0],
        prompt=found["prefill NDP+TP+LB"][0],
        ends=mean(monde.values()),
        most=max(monde.values()),
        equal=", ".join(
            f"{times(of['equal memory: mean'])} over {over} ({times(of['the paper: mean'])} "
            "without)"
            for over, of in equal.items()
        ),
    )
    return found


def _speedup_figures(run: Run, sweep: Sweep, found: Mapping[str, Spread]) -> None:
    """Figures 11 and 9."""
    run.figure(
        "fig11",
        figures.speedups(
            sweep,
            BALANCED | {"+TP+PRE": "NDP+TP+PRE", "+TP+LB+PRE": OURS},
            "MoNDE",
            "moe_decode",
            means=found,
            columns=3,
        ),
        caption="Experts during decode: the techniques one by one (modelled; N.S.: not supported, "
        "the experts do not fit; diamonds: the paper's averages). After Fig. 11.",
        alt="Five panels of four bars a group. With the defaults speedups grow with N, from "
        "below 1 for tensor parallelism alone at two modules to three and four for Phi and "
        "Mixtral at six; the averages stand beside the paper's diamonds.",
    )
    run.figure(
        "fig9",
        figures.speedups(
            sweep,
            {"Fiddler": "Fiddler", "MoNDE": "MoNDE", "GPU-NDP (TP+LB+PRE)": OURS},
            "MoE-OnDemand",
            "end_to_end",
            title="speedup (×)",
        ),
        caption="Prompt and answer together, speedup over MoE-OnDemand (modelled; N.S.: not "
        "supported). After Fig. 9, which shows latency.",
        alt="Four panels. With the defaults Fiddler is at about 1.4 whatever N, MoNDE between 1 "
        "and 2.6 and grows slowly, the framework grows to between 4 and 5.4 at six modules.",
    )


def combinations(
    run: Run, found: Mapping[str, Spread], seed: int, prompt: int, answer: int, smoke: bool
) -> Readings:
    """Every combination of what the paper leaves open (of two choices each where it is `smoke`):
    the band that fits."""
    choices = {
        name: tuple(dict.fromkeys((getattr(CHOSEN, name), options[0]))) if smoke else options
        for name, options in CHOICES.items()
    }
    began = time.process_time()
    combined = readings(choices, seed, prompt, answer)
    run.metric("readings_cpu", time.process_time() - began, "s", "measured")
    _agreement_figure(run, found, combined)
    better = int((combined.errors < error(combined.at(CHOSEN)) * (1 - 1e-9)).sum())
    agree, null = bench.agreeing(found), [name for name in JUDGED if CLAIMS[name].predicted]
    alone = [name for name in JUDGED if CLAIMS[name].agrees(found[name][0]) and name not in null]
    for half, names in HALVES.items():
        run.metric(f"agree_{half}", agree[half], f"of {len(names)} published figures", "modelled")
        run.metric(
            f"error_{half}",
            float(error({n: values[0] for n, values in found.items()}, names)),
            "rms of log ratios",
            "modelled",
        )
    spread = max(high / low - 1 for _, low, high in found.values())
    run.metric("spread_over_seeds", spread, "largest, relative", "modelled")
    _reading_metrics(run, combined, better)
    run.metric(
        "agree_null", len(null), f"of {len(JUDGED)} judged figures, without a simulator", "modelled"
    )
    run.metric("agree_alone", len(alone), "judged figures that only the simulator gets", "modelled")
    run.takeaway(
        "**{fit:,}** of {every:,} readings fit all {fitted} figures, {better:,} of "
        "them better than the one chosen. Of the {judged} held out they get {shares}; "
        "the chosen one gets {agree}, ratios of published numbers alone **{null}**. What "
        "only the simulator gets: **{alone}**. Seeds move a figure by {spread:.1%} at "
        "most.",
        fit=int(combined.fits.sum()),
        every=combined.fits.size,
        fitted=len(FIT),
        judged=len(JUDGED),
        better=better,
        shares=", ".join(
            f"{n}: {count / combined.fits.sum():.0%}" for n, count in combined.agreement().items()
        )
        or "nothing",
        agree=agree["judge"],
        null=len(null),
        alone=", ".join(alone) or "nothing",
        spread=spread,
    )
    return combined


def _agreement_figure(run: Run, found: Mapping[str, Spread], combined: Readings) -> None:
    errors = {
        half: {name: tuple(off(name, value) for value in found[name]) for name in names}
        for half, names in HALVES.items()
    }
    run.figure(
        "agreement",
        figures.agreement(
            errors,
            {name: tuple(float(off(name, end)) for end in combined.band(name)) for name in found},
        ),
        caption="Modelled against published figures (modelled, paper): points are the reading "
        "chosen here, whiskers the seeds of the routing, open bars all readings that "
        "fit. 'fit' was fitted, 'judge' was held out. Inside a verbal range the error "
        "counts as 0.",
        alt="A row a figure, points left and right of zero, most of them inside a grey area of "
        "ten per cent; the misses are labelled. Open bars around the points stay inside the "
        "grey area for fitted figures and reach far beyond it for most of the others.",
    )


def _reading_metrics(run: Run, combined: Readings, better: int) -> None:
    """How many readings fit, are better than the chosen one, agree with how many held-out figures;
    the bands of all that fit."""
    run.metric(
        "readings_that_fit",
        int(combined.fits.sum()),
        f"of {combined.fits.size} combinations",
        "modelled",
    )
    run.metric("readings_with_less_error", better, "of those", "modelled")
    for n, count in combined.agreement().items():
        run.metric(
            f"readings_judged_{n}",
            count,
            f"combinations that fit agree with {n} of {len(JUDGED)}",
            "modelled",
        )
    for name in (*FIT, *JUDGED) if combined.fits.any() else ():
        run.metrics_of(
            {
                f"band_{name}_{end}": value
                for end, value in zip(("least", "most"), combined.band(name))
            },
            "×, over all that fit",
            "modelled",
        )


def clocks(run: Run, smoke: bool) -> None:
    """The closed form beside the event simulation."""
    rows = bench.engines(CHOSEN, tokens=1 if smoke else 2, layers=1 if smoke else 2)
    apart = bench.distances(rows)
    run.figure(
        "engines",
        bars(
            {
                "": {
                    phase: {name.replace("NDP+", "+"): of for name, of in by_system.items()}
                    for phase, by_system in apart.items()
                }
            },
            "longer than the formula (%)",
            upwards=False,
            columns=1,
            kind="simulated, modelled<br>whiskers: models, N",
        ),
        caption="Seconds of the experts by the event simulation against the closed form, every "
        "model, fewest and six modules (simulated against modelled).",
        alt="Pairs of bars for each system, at or near zero for those that move no weights "
        "beside busy modules, more for those with load balancing.",
    )
    run.metrics_of(
        {f"engines_{name}": row["decode: mean"] for name, row in rows.items()},
        "simulated ÷ closed form, decode",
        "simulated",
    )
    most = {
        name: max(abs(percent) for of in apart.values() for percent in of[name]) for name in rows
    }
    simple, worst = ("MoE-OnDemand", "NDP+TP", "NDP+TP+PRE"), max(most, key=most.get)
    run.takeaway(
        "Where one kind of transfer uses the link the two differ by {simple:.2f} % on the "
        "paper's models. The largest difference is **{worst:.1f} %**, for {of}: there "
        "weights, hidden states and outputs share the link.",
        simple=max(most[name] for name in simple),
        worst=most[worst],
        of=worst,
    )


def dram(run: Run, sweep: Sweep, shared: Sweep, seed: int, sizes: Mapping[str, Any]) -> None:
    """What load balancing gives where the link reads for free, and where it shares the modules'
    DRAM."""
    found = bench.dram(sweep, shared, seed, **sizes)
    run.figure(
        "dram",
        bars(
            {
                "": {
                    label: {
                        name.replace("NDP+", "+"): (of[how],) * 3
                        for name, of in found.items()
                        if how in of
                    }
                    for label, how in (
                        ("link reads for free", "free"),
                        ("link shares the DRAM", "shared"),
                    )
                }
            },
            "speedup over MoNDE (×)",
            columns=1,
            line=(found["NDP+TP"]["shared"], "+TP, DRAM shared"),
        ),
        caption="Experts during decode over MoNDE, means over models and modules, where what the "
        "link reads costs a module's DRAM nothing, as in the paper, and where it is shared "
        "(modelled).",
        alt="Pairs of bars. With shared DRAM the bars of tensor parallelism, of balancing with "
        "it and of its improved version are equally high, on the dashed line; those with "
        "prefetching lie above it.",
    )
    run.metrics_of(
        {f"dram_shared_{name}": of["shared"] for name, of in found.items()},
        "× MoNDE, decode, DRAM shared",
        "modelled",
    )
    adds = {how: found["NDP+TP+LB"][how] / found["NDP+TP"][how] for how in ("free", "shared")}
    run.metric(
        "dram_balancing_adds_nothing",
        abs(adds["shared"] - 1) < 1e-9,
        "decode, DRAM shared",
        "modelled",
    )
    run.takeaway(
        "Balancing adds {free:.1%} to tensor parallelism while decoding if the link reads "
        "for free, and **{shared:.1%}** if modules read for it; shares of experts, split "
        "as well as possible, give {improved:.2f}× = {tp:.2f}×.",
        free=adds["free"] - 1,
        shared=adds["shared"] - 1,
        improved=found["NDP+TP+LB, improved"]["shared"],
        tp=found["NDP+TP"]["shared"],
    )


def workflow(run: Run, seed: int, prompt: int, N: int = 3) -> None:
    """One MoE layer of a prompt of Mixtral, whose eight experts all have tokens, by the event
    simulation; Fig. 5."""
    routing = CHOSEN.routing(MIXTRAL, seed, prompt, 1)
    acted = {
        label: [
            event
            for event in timeline(CHOSEN.hardware(N), CHOSEN.system(name), routing, (0,))[0]
            if event.layer == 0 and event.kind != "other"
        ]
        for label, name in {"MoNDE": "MoNDE", **BALANCED}.items()
    }
    run.figure(
        "fig5",
        gantt(acted),
        caption=f"One MoE layer of a prompt of {prompt} tokens, Mixtral-8x7B on {N} modules "
        "(simulated). Numbers: experts. After Fig. 5.",
        alt="Three Gantt charts on one time axis. Under MoNDE modules end at different times; "
        "with tensor parallelism together; with balancing the link brings some experts to "
        "the GPU meanwhile, and the layer ends earlier.",
    )
    ends = {
        label: 1e3 * (max(e.end for e in events) - min(e.start for e in events))
        for label, events in acted.items()
    }
    run.metrics_of(
        {f"prompt_layer_{label}": ms for label, ms in ends.items()},
        "ms, one MoE layer",
        "simulated",
    )
    monde, tp, lb = ends.values()
    run.takeaway(
        "A prompt's layer takes {monde:.0f} ms under MoNDE, {tp:.0f} with tensor "
        "parallelism and **{lb:.0f}** with balancing; all its experts over the link and "
        "computed on the GPU take {gpu:.0f}.",
        monde=monde,
        tp=tp,
        lb=lb,
        gpu=1e3 * routing.spec.E * Costs(routing.spec, CHOSEN.hardware(N)).transfer(),
    )


def prompts(run: Run, seed: int, smoke: bool) -> None:
    """Prompts of growing length: from which on everything should go to the GPU."""
    lengths, systems = (
        (16, 128) if smoke else (16, 32, 64, 128, 256, 512),
        {
            "MoE-OnDemand": "MoE-OnDemand",
            "MoNDE": "MoNDE",
            **BALANCED,
            "+TP+LB, improved": "NDP+TP+LB, improved",
        },
    )
    found = {
        name: bench.prefill_seconds(name, systems, lengths, PHYSICAL, seed=seed)
        for name in (QWEN, MIXTRAL)
    }
    run.figure(
        "prompts",
        lines(
            {SHORT[name]: of for name, of in found.items()},
            "experts of the prompt (s)",
            "prompt length S (tokens)",
            log="xy",
        ),
        caption="Experts during prefill by prompt length on six modules (modelled). On demand "
        "sends every activated expert once.",
        alt="Two panels with logarithmic axes. The lines of the NDP schedules rise with the "
        "prompt and cross the flat line of MoE-OnDemand; the improved schedule stays at or "
        "below both.",
    )
    crossing = {name: conditions.crossing(name, CHOSEN.hardware(6)) for name in found}
    slower = {name: of["+TP+LB"][-1][1] / of["MoE-OnDemand"][-1][1] for name, of in found.items()}
    run.metrics_of(
        {f"prefill_crossing_{name}": S for name, S in crossing.items()},
        "tokens, N = 6, on paper",
        "modelled",
    )
    run.metrics_of(
        {f"prefill_over_ondemand_{name}": of for name, of in slower.items()},
        f"× MoE-OnDemand, S = {lengths[-1]}, N = 6",
        "modelled",
    )
    best = all(bench.never_slower(of, "+TP+LB, improved") for of in found.values())
    run.takeaway(
        "By the formula the lines cross at {crossing}. With {S} tokens the paper's best "
        "schedule takes {slower} as long as sending everything to the GPU; where that is "
        "above 1, NDP wins a whole generation only because the answer is long. The improved "
        "schedule {best} of the five at each length.",
        S=lengths[-1],
        crossing=" and ".join(f"{S:.0f} tokens ({SHORT[name]})" for name, S in crossing.items()),
        slower=" and ".join(
            f"**{ratio:.1f} times** ({SHORT[name]})" for name, ratio in slower.items()
        ),
        best="is the fastest" if best else "is NOT always the fastest",
    )


def improved(run: Run, sweep: Sweep, shared: Sweep, seed: int, sizes: Mapping[str, Any]) -> None:
    """What the improved version gains over the literal one, and what balancing and prefetching add
    by modules."""
    gains = bench.gains(shared)  # what → literal ÷ improved, a number a cell
    run.figure(
        "improved",
        figures.improvements(
            shared, (OURS, BEST), {"experts, decode": "moe_decode", "end to end": "end_to_end"}
        ),
        caption="What the improved version of the whole framework gains over the literal one "
        "(modelled; DRAM shared with the link; N.S.: not supported).",
        alt="Two panels of four bars a group. With the defaults all bars are above 1, DeepSeek "
        "and Qwen3 highest.",
    )
    run.figure(
        "fades",
        figures.additions(
            sweep, {"+LB": "NDP+TP+LB", "+PRE": "NDP+TP+PRE", "+LB+PRE": OURS}, "NDP+TP"
        ),
        caption="What load balancing and prefetching add to tensor parallelism while decoding, by "
        "number of modules (modelled; the paper's machine).",
        alt="Four panels. With the defaults the lines of load balancing fall to 1 for DeepSeek "
        "and Qwen3 and are 1 everywhere for Phi and Mixtral; prefetching is flat.",
    )
    prefetching = sweep.mean_gains(OURS, "NDP+TP+LB", "moe_decode", averaged=False)
    hurts = [f"{SHORT[name]} N = {N}" for (name, N), ratio in prefetching.items() if ratio < 1]
    run.metric(
        "prefetching_beside_balancing_least",
        min(prefetching.values()),
        "× NDP+TP+LB, decode",
        "modelled",
    )
    for name in MODELS:
        hybrid = list(sweep.mean_gains(OURS, "NDP+TP", "moe_decode", name, averaged=False).values())
        run.metric(f"hybrid_fewest_{name}", hybrid[0], "× NDP+TP, decode", "modelled")
        run.metric(f"hybrid_six_{name}", hybrid[-1], "× NDP+TP, decode", "modelled")
    by, never = {what: mean(of) for what, of in gains.items()}, min(gains["end_to_end"]) >= 1 - 1e-9
    run.metrics_of(
        {f"improved_{what}_mean": of for what, of in by.items()}, "× literal", "modelled"
    )
    run.metric("improved_never_slower", never, "", "modelled")
    run.takeaway(
        "The improved version is {never} end to end: on average {ends:.2f} times as "
        "fast, **{decode:.2f} times** while decoding (the literal rules with the memory "
        "filled: {filling:.2f}), {prompts:.1f} times in prompts. The literal rule makes "
        "prefetching a *loss* beside balancing in {hurts} of {cells} cells{where}: one "
        "hit switches balancing off.",
        never="never slower" if never else "NOT always as fast",
        decode=by["moe_decode"],
        filling=bench.filling(sweep, seed, sizes["prompt"], sizes["answer"]),
        ends=by["end_to_end"],
        prompts=by["moe_prefill"],
        hurts=len(hurts),
        cells=len(prefetching),
        where=f" ({', '.join(hurts)})" if hurts else "",
    )


def machines(run: Run, seed: int, smoke: bool) -> None:
    """The framework's decode step on other machines, and one layer of one of them to play with."""
    counts = (2, 6, 16) if smoke else (1, 2, 3, 4, 6, 8, 12, 16)
    space = bench.design_space(counts, CHOSEN, OURS, seed)
    run.figure(
        "space",
        figures.machines(
            {
                model: {name: of for name, of in by.items() if name != "PCIe 4"}
                for model, by in space.items()
            }
        ),
        caption="Time of a decode step of the framework (literal TP+LB+PRE) by machine, number of "
        "units and model (modelled; short context; lines begin where the experts fit; PCIe "
        "4, as PCIe 6, is in the table).",
        alt="Four panels with logarithmic axes. Most lines fall with N; PCIe 6 and the paper's "
        "lie together, the faster mapping below, LPDDR lower and flat, HBM-PIM lowest but "
        "begins at many units.",
    )
    run.table("A decode step on six units", tables.space(space, 6))
    effect = {
        other: mean(of[PAPERS][6] / of[other][6] for of in space.values())
        for other in ("PCIe 4", "PCIe 6", "two DDR4 channels", "faster address mapping")
    }
    run.metrics_of(
        {f"space_{other}": ratio for other, ratio in effect.items()},
        "× the paper's machine, decode, N = 6",
        "modelled",
    )
    few, many = counts[-2:]
    run.takeaway(
        "With six modules, against the paper's machine: {effect}. Going from {few} to "
        "{many} modules gains {more}: the rest is the GPU's time outside the experts.",
        few=few,
        many=many,
        effect=", ".join(f"{other} **{times(ratio)}**" for other, ratio in effect.items()),
        more=", ".join(
            f"{times(of[PAPERS][few] / of[PAPERS][many])} ({SHORT[name]})"
            for name, of in space.items()
        ),
    )


def one_layer(seed: int, answer: int) -> None:
    """Controls: one MoE layer of one decode step, by model, machine, units and system."""
    routing_of = lru_cache(lambda name: CHOSEN.routing(name, seed, 32, answer))

    def turned(name: str, N: int, machine: str, system: str) -> None:
        on = PHYSICAL if system.endswith("improved") else CHOSEN
        try:
            found = bench.one_layer(on.variant(machine, N), CHOSEN.system(system), routing_of(name))
        except NotSupported as why:
            return say(f"**N.S.** {why}")
        said = tables.caption(name, N, machine, system, found)
        show(gantt({system: found.events}), said, said)

    interact(
        turned,
        name=ipywidgets.Dropdown(
            options=[(SHORT[n], n) for n in MODELS], value=QWEN, description="model"
        ),
        N=ipywidgets.IntSlider(4, min=1, max=16, description="units N", continuous_update=False),
        machine=ipywidgets.Dropdown(options=list(VARIANTS), description="hardware"),
        system=ipywidgets.Dropdown(options=list(SYSTEMS), value=BEST, description="system"),
    )


def appendix(run: Run, sweep: Sweep, found: Mapping[str, Spread], combined: Readings) -> None:
    """The arguments with the paper: what it leaves open, what agrees, what misses and why, where it
    is inconsistent."""
    run.figure(
        "fig8",
        figures.by_phase(
            sweep,
            QWEN,
            "GPU-NDP (TP+LB+PRE)",
            OURS,
            {phase: found[f"Qwen3 {phase}"] for phase in ("prefill", "decode")},
        ),
        caption="Experts of Qwen3-30B-A3B, speedup of the framework over MoNDE (modelled; means "
        "over seeds; diamonds: the paper's averages). After Fig. 8.",
        alt="Two panels of bars by number of modules and their mean with the paper's diamond; "
        "with the defaults the prefill bars are all close to 1.2, the decode bars grow with "
        "N from about 1.2 to 2.2.",
    )
    run.figure(
        "fig10",
        figures.speedups(sweep, BALANCED, "MoNDE", "moe_prefill", means=found, columns=3),
        caption="Experts during prefill: tensor parallelism, and load balancing with it (modelled; "
        "N.S.: not supported; diamonds: the paper's averages). After Fig. 10.",
        alt="Five panels of bars, N.S. where the experts do not fit. With the defaults speedups "
        "are above 1 and highest for Mixtral, which passes 2 at six modules; the averages "
        "stand beside the paper's diamonds.",
    )
    run.table("What the paper leaves open", tables.assumed(CHOSEN, combined))
    run.table("Published figures", tables.published(found, combined))
    run.table("What each technique adds", tables.increments(found))
    ends = sweep.mean_gains(OURS, "MoNDE", "end_to_end")
    model, N = max(ends, key=ends.get)
    alone = mean(sweep.mean_gains("NDP+TP", "MoNDE", "moe_prefill", QWEN).values())
    run.table(
        "Misses",
        tables.misses(
            found,
            {
                "Qwen3 prefill": f"Tensor parallelism alone gives {times(alone)} here.",
                "end to end ÷ MoNDE": f"Ours is largest at {SHORT[model]}, N = {N}.",
            },
            "the paper's lengths are 512 + 512 tokens"
            if run.params["prompt_tokens"] != 512
            else "not understood",
        ),
    )
    changed = bench.sensitivity(combined, CHOSEN)  # one assumption at a time
    run.table(
        "One assumption changed, the ten largest effects",
        tables.sensitivity(
            {what: changed[what] for what in ["as chosen", *list(bench.moved(changed))[:10]]},
            (*FIT, *JUDGED),
        ),
    )
    run.table(
        "Inconsistencies of the paper",
        ({"#": i, "inconsistency": text} for i, text in enumerate(ODDITIES, 1)),
    )
