"""GPU-NDP beside its published figures, what notebook 07 counts: speedups, the improved schedules,
both engines.

Speedups are modelled by the closed form under one combination of assumptions, their spread over
seeds of the simulated routing; `moelab.ndp.readings` tries every combination."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

import torch

from moelab import open_model
from moelab.models import plug
from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import NotSupported
from moelab.ndp.event_simulation import event_seconds, simulate_layer
from moelab.ndp.fit import CLAIMS, FIT, HALVES, JUDGED
from moelab.ndp.hardware import VARIANTS, Hardware
from moelab.ndp.readings import Readings
from moelab.ndp.routing import PromptRouting
from moelab.ndp.simulation import NDPRun, simulate
from moelab.ndp.sweep import MODELS, UNITS, Assumptions, Spread, Sweep, modules_needed, paper_sweep
from moelab.ndp.systems import PAPER, System
from moelab.ndp.tensor_parallel import NDPTensorParallel
from moelab.offloading.metrics import metrics
from moelab.progress import progress
from moelab.records import Numbers, Records
from moelab.specs import Event

OURS = PAPER[4:]  # the systems that have an improved version
TIMES = ("moe_prefill", "moe_decode", "end_to_end")


def physical(assumptions: Assumptions) -> Assumptions:
    """With modules whose DRAM the link shares, as it must: what is beyond the paper is judged on
    those."""
    return replace(assumptions, shared_dram=True)


def sensitivity(found: Readings, base: Assumptions) -> dict[str, Numbers]:
    """ "assumption = choice" → every figure with only that assumption changed; "as chosen"
    first."""
    return {"as chosen": found.at(base)} | {
        f"{name} = {option}": found.at(replace(base, **{name: option}))
        for name, options in found.choices.items()
        for option in options
        if option != getattr(base, name)
    }


def moved(table: dict[str, Numbers], names: Sequence[str] = (*FIT, *JUDGED)) -> Numbers:
    """Changed assumption of `sensitivity` → largest relative change of any of those figures; the
    largest first."""
    chosen = table["as chosen"]
    found = {
        what: math.expm1(max(abs(math.log(row[n] / chosen[n])) for n in names))
        for what, row in table.items()
    }
    return {what: found[what] for what in sorted(found, key=found.get, reverse=True) if found[what]}


def completed(sweep: Sweep, systems: Sequence[str], seed: int, **sizes: Any) -> Sweep:
    """The sweep with those systems that it lacks for that seed; `sizes` are its units, prompt and
    answer."""
    there = {name for *_, name, of in sweep.cells if of == seed}
    missing = [name for name in systems if name not in there]
    return (
        sweep.joined(paper_sweep(sweep.assumptions, systems=missing, seeds=(seed,), **sizes))
        if missing
        else sweep
    )


def dram(free: Sweep, shared: Sweep, seed: int = 0, **sizes: Any) -> dict[str, Numbers]:
    """System → decode over MoNDE where the link's reads cost a module's DRAM nothing (the paper),
    and where they do; the sweeps are of the former's assumptions and of `physical` ones, on which
    alone the improved ones are judged."""
    better = [f"{name}, improved" for name in (OURS[0], OURS[-1])]
    swept = {
        "free": (completed(free, PAPER[2:], seed, **sizes), PAPER[3:]),
        "shared": (completed(shared, (*PAPER[2:], *better), seed, **sizes), (*PAPER[3:], *better)),
    }
    found: dict[str, Numbers] = {}
    for how, (of, names) in swept.items():
        for name in names:
            found.setdefault(name, {})[how] = mean(
                of.speedups(name, "MoNDE", "moe_decode", seed).values()
            )
    return found


def means(sweep: Sweep, seed: int = 0, **sizes: Any) -> dict[str, Numbers]:
    """Other system → the framework's end to end over it, mean and most, as the paper's sweep has it
    and with equal memory."""
    found: dict[str, Numbers] = {name: {} for name in PAPER[:3]}
    for how, of in (
        ("the paper", sweep),
        ("equal memory", Sweep(replace(sweep.assumptions, cached="all"))),
    ):
        swept = completed(of, (*PAPER[:3], OURS[-1]), seed, **sizes)
        for name in found:
            gained = swept.speedups(OURS[-1], name, "end_to_end", seed).values()
            found[name] |= {f"{how}: mean": mean(gained), f"{how}: most": max(gained)}
    return found


def agreeing(found: dict[str, Spread]) -> dict[str, int]:
    """Of each half of the claims, how many the means over seeds agree with."""
    return {
        half: sum(CLAIMS[name].agrees(found[name][0]) for name in names)
        for half, names in HALVES.items()
    }


def gains(sweep: Sweep, name: str = OURS[-1]) -> dict[str, list[float]]:
    """Gains of the improved version of a system over the literal one, in every cell that the sweep
    has both of."""
    return {
        what: [
            getattr(old, what) / getattr(new, what)
            for (model, N, system, seed), old in sweep.cells.items()
            if system == name and old
            for new in [sweep.cells[model, N, name + ", improved", seed]]
            if new
        ]
        for what in TIMES
    }


def engines(assumptions: Assumptions, tokens: int, layers: int = 4) -> Records:
    """Simulated ÷ closed-form seconds of the experts, every model, fewest and most units, some of
    the layers."""
    rows = {}
    for name in progress(
        [*PAPER, *(f"{name}, improved" for name in OURS)], "both engines", unit="system"
    ):
        ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
        for model in MODELS:
            routing, system = assumptions.routing(model), assumptions.system(name)
            counts, L = routing.counts(), routing.spec.L
            for N in (modules_needed(model, assumptions), UNITS[-1]):
                run = NDPRun(assumptions.hardware(N), system, routing, assumptions.placement)
                picked = range(0, L, L // layers)
                for phase, steps in (
                    ("prefill", [run.prefill_step(layer, counts[layer]) for layer in picked]),
                    (
                        "decode",
                        [
                            run.decode_step(layer, routing.decode[t, layer])
                            for layer in picked
                            for t in range(tokens)
                        ],
                    ),
                ):
                    plans = [run.plan(step) for step in steps]
                    event, closed = (
                        sum(seconds(plan, run.costs) for plan in plans)
                        for seconds in (event_seconds, layer_seconds)
                    )
                    ratios[phase].append(float(event / closed))
        rows[name] = {
            f"{phase}: {what}": of(ratios[phase])
            for phase in ratios
            for what, of in (("least", min), ("mean", mean), ("most", max))
        }
    return rows


def step_figures(events: Sequence[Event], forwards: Sequence[Any], N: int) -> Numbers:
    """A decode step of `timeline` on N modules: seconds, busy shares of GPU, link, modules (mean,
    and the least)."""
    found = metrics(events, forwards)
    gpu, link, *shares = (
        found.utilisation.get(of, 0.0) for of in ("gpu", "link", *(f"unit {u}" for u in range(N)))
    )
    return {
        "seconds": found.tpot,
        "gpu": gpu,
        "link": link,
        "modules": mean(shares),
        "least": min(shares),
    }


def distances(rows: dict[str, Numbers]) -> dict[str, dict[str, Spread]]:
    """Of `engines`: phase → system → per cent that the simulation is longer than the formula,
    (mean, least, most)."""
    return {
        phase: {
            name: tuple(100 * (row[f"{phase}: {what}"] - 1) for what in ("mean", "least", "most"))
            for name, row in rows.items()
        }
        for phase in ("prefill", "decode")
    }


def prefill_seconds(
    model: str,
    systems: dict[str, str],
    lengths: Sequence[int],
    assumptions: Assumptions,
    seed: int = 0,
) -> dict[str, list[tuple[int, float]]]:
    """Label → (prompt length, seconds of the experts) on 6 modules; `systems` are label → name."""
    found = {label: [] for label in systems}
    for S in lengths:
        routing = assumptions.routing(model, seed, S, 1)
        for label, name in systems.items():
            found[label].append(
                (
                    S,
                    simulate(
                        assumptions.hardware(6), assumptions.system(name), routing
                    ).moe_prefill,
                )
            )
    return found


def never_slower(found: dict[str, list[tuple[int, float]]], label: str) -> bool:
    """Whether one series is at or below all others everywhere, but for rounding."""
    return all(
        own * (1 - 1e-9) <= other
        for points in found.values()
        for (_, own), (_, other) in zip(found[label], points, strict=True)
    )


def filling(sweep: Sweep, seed: int, prompt: int, answer: int) -> float:
    """Mean gain of the experts' decode if the literal rules filled the GPU's memory (§III-D)."""
    assumed, name = replace(sweep.assumptions, limit="memory"), OURS[-1]
    filled = paper_sweep(assumed, sweep.models, sweep.units, (name,), (seed,), prompt, answer)
    return mean(
        sweep.result(model, N, name, seed).moe_decode / result.moe_decode
        for (model, N, *_), result in filled.cells.items()
        if result
    )


def design_space(
    units: Sequence[int], assumptions: Assumptions, system: str = OURS[-1], seed: int = 0
) -> dict[str, dict[str, dict[int, float]]]:
    """Model → machine of `VARIANTS` → units → seconds of a decode step in a short context; nan
    where not supported."""
    found = {
        model: {variant: dict.fromkeys(units, math.nan) for variant in VARIANTS} for model in MODELS
    }
    for model in progress(MODELS, "machines", unit="model"):
        routing = assumptions.routing(model, seed, 16, 8)
        for variant, N in product(VARIANTS, units):
            with suppress(NotSupported):
                found[model][variant][N] = (
                    simulate(
                        assumptions.variant(variant, N), assumptions.system(system), routing
                    ).decode
                    / 8
                )
    return found


def decode_times(
    routing: PromptRouting, systems: dict[str, str], assumptions: Assumptions, N: int
) -> Numbers:
    """Label → seconds of an answer's experts, with loading the prefetched, on N modules; `systems`
    are label → name."""
    found = {
        label: simulate(
            assumptions.hardware(N),
            assumptions.system(name),
            routing,
            placement=assumptions.placement,
        )
        for label, name in systems.items()
    }
    return {label: result.intermediate + result.moe_decode for label, result in found.items()}


def tensor_parallel_error(
    source: Any,
    prompt: str | Sequence[int],
    units: Sequence[int] = (1, 3, 6),
    experts: str = "resident",
) -> dict[int, float]:
    """Modules → largest difference of a logit, relative to the largest, if experts are cut; in
    float32.

    source, experts : as of `open_model`. prompt : its text, or its tokens.
    """
    whole = open_model(source, dtype=torch.float32, experts=experts)
    ids = torch.tensor(
        [whole.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)]
    )
    with torch.inference_mode():
        expected, found = whole(input_ids=ids).logits, {}
        for N in units:
            plug(whole, executor=NDPTensorParallel(N))
            found[N] = float(
                (whole(input_ids=ids).logits - expected).abs().max() / expected.abs().max()
            )
    del whole
    gc.collect()  # a model and what is plugged into it refer to each other
    return found


class OneLayer(NamedTuple):
    """One MoE layer of a decode step: seconds and events, simulated; closed : of some layers and
    tokens, modelled."""

    seconds: float
    events: list[Event]
    closed: list[float]


def one_layer(machine: Hardware, system: System, routing: PromptRouting) -> OneLayer:
    """The first layer and token by the event simulation, and two layers of four tokens by the
    closed form; NotSupported if the experts do not fit."""
    run = NDPRun(machine, system, routing, "id")
    plans = [run.plan(run.decode_step(l, routing.decode[t, l])) for l in range(2) for t in range(4)]
    return OneLayer(
        *simulate_layer(plans[0], run.costs), [layer_seconds(plan, run.costs) for plan in plans]
    )
