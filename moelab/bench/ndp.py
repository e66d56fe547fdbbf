"""GPU-NDP beside its published figures: modelled speedups, the improved schedules, both engines, conservation.

Speedups are modelled by the closed form under one set of assumptions, which `--fit` searches again by half of the
published numbers (marked "fit"; the others only judge); their spread is over seeds of the simulated routing. The event
simulation is compared with the closed form on the paper's models, and random configurations are checked for anything
computed twice, lost or overlapping (exact). `--sensitivity` changes one assumption at a time.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np

from moelab.cards import load_model
from moelab.ndp.balance import balance
from moelab.ndp.claims import CLAIMS, FIT, JUDGED
from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.conservation import conserve
from moelab.ndp.costs import Costs
from moelab.ndp.fit import error, fit, sensitivity
from moelab.ndp.plans import Step, make_plan
from moelab.ndp.simulation import Run, event_seconds, simulate
from moelab.ndp.sweep import MODELS, UNITS, Assumptions, Sweep, modules_needed, paper_sweep, quantities
from moelab.ndp.systems import PAPER
from moelab.progress import progress

OURS = PAPER[4:]                                # the systems that have an improved version


def run(configurations: int = 10_000, seeds: int = 3, engine_tokens: int = 16, search: bool = False,
        sensitive: bool = False) -> dict[str, dict[str, Any]]:
    """Every figure, each section with its kind."""
    searched = {}
    assumptions = Assumptions()
    if search:
        assumptions, trials = fit()
        searched["the fit's best trials (modelled)"] = {
            f"{i}. {trial['assumption']}": {"choice": str(trial["choice"]), "error": trial["error"]}
            for i, trial in enumerate(sorted(trials, key=lambda trial: trial["error"])[:10], 1)}
    began = time.process_time()
    sweep = paper_sweep(assumptions, seeds=range(seeds))
    took = time.process_time() - began
    found = [quantities(sweep, seed) for seed in range(seeds)]
    results = {
        "assumptions": {name: str(value) for name, value in vars(assumptions).items()}, **searched,
        "published figures (paper, modelled)": published(found) | modules(assumptions),
        "agreement": agreement(found),
        "improved over literal (modelled)": improved(sweep),
        "room beyond the paper, gain over literal NDP+TP+LB+PRE (modelled)": room(assumptions),
        "Eq. 1's promise and the event simulation (modelled, simulated)": promises(assumptions),
        "event simulation ÷ closed form, experts only (simulated)": engines(assumptions, engine_tokens),
        "the paper's sweep (measured)": {"runs": len(sweep.cells), "CPU seconds": took},
    }
    if configurations:
        checks = conserve(configurations)
        problems = checks.pop("problems")
        results["conservation (exact)"] = {**checks, "problems": len(problems),
                                           **({"first problem": problems[0]} if problems else {})}
    if sensitive:
        table = sensitivity(assumptions)
        results["sensitivity (modelled)"] = {
            name: {"error on fit": error(row), "error on judged": error(row, JUDGED), **row}
            for name, row in table.items()}
    return results


def published(found: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Each published figure beside the modelled one: mean over seeds and spread."""
    rows = {}
    for name in [*FIT, *JUDGED]:
        values, claim = [one[name] for one in found], CLAIMS[name]
        middle = mean(values)
        words = isinstance(claim.value, tuple)
        paper = f"{claim.value[0]}–{claim.value[1]}: {claim.text}" if words else claim.value
        rows[name] = {"paper": paper, "modelled": middle, "least": min(values), "most": max(values),
                      "error": claim.error(middle), "agrees": claim.agrees(middle),
                      "used to": "fit" if name in FIT else "judge"}
    return rows


def modules(assumptions: Assumptions) -> dict[str, dict[str, Any]]:
    """Where "not supported" ends; from capacities alone."""
    rows = {}
    for model in MODELS:
        claim, needed = CLAIMS[f"modules needed, {model}"], modules_needed(model, assumptions)
        rows[f"modules needed, {model}"] = {"paper": claim.value, "modelled": needed, "agrees": claim.agrees(needed),
                                            "used to": "judge"}
    return rows


def agreement(found: list[dict[str, float]]) -> dict[str, Any]:
    """How many figures agree, those that were fitted and those that judge apart."""
    middle = {name: mean(one[name] for one in found) for name in found[0]}
    return {f"{kind}: within 10 % or as described": f"{sum(CLAIMS[n].agrees(middle[n]) for n in names)} of {len(names)}"
            for kind, names in (("fitted", FIT), ("judged", JUDGED))} | {
        "error on fitted": error(middle, FIT), "error on judged": error(middle, JUDGED)}


def improved(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """What the improved version gains over the literal one, over every model, number of units and seed."""
    better = paper_sweep(sweep.assumptions, systems=[name + ", improved" for name in OURS], seeds=sweep.seeds)
    rows = {}
    for name in OURS:
        pairs = [(cell.result, better.result(*key[:2], name + ", improved", key[3]))
                 for key, cell in sweep.cells.items() if cell.result and key[2] == name]
        rows[name] = {"cells": len(pairs)}
        for what in ("moe_prefill", "moe_decode", "end_to_end"):
            gains = [getattr(old, what) / getattr(new, what) for old, new in pairs]
            rows[name] |= {f"{what}: least": min(gains), f"{what}: mean": mean(gains)}
    return rows


def room(assumptions: Assumptions, seed: int = 0) -> dict[str, dict[str, Any]]:
    """What each step beyond the literal framework adds: mean gain over it, all models and numbers of units."""
    whole = assumptions.system("NDP+TP+LB+PRE")
    steps = {"literal": whole, "as many experts prefetched as fit": replace(whole, limit="memory"),
             "shares of experts, misses balanced": replace(whole, version="improved"),
             "both: improved": replace(whole, version="improved", limit="memory")}
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
    for model in progress(MODELS, "beyond the paper", unit="model"):
        routing = assumptions.routing(model, seed)
        for N in range(modules_needed(model, assumptions), UNITS[-1] + 1):
            for name, system in steps.items():
                result = simulate(routing.spec, assumptions.hardware(N), system, routing,
                                  placement=assumptions.placement)
                times[name].append((result.moe_prefill, result.moe_decode, result.end_to_end))
    return {name: {what: mean(first[i] / own[i] for first, own in zip(times["literal"], times[name]))
                   for i, what in enumerate(("moe_prefill", "moe_decode", "end_to_end"))} for name in steps}


def promises(assumptions: Assumptions) -> dict[str, dict[str, Any]]:
    """Eq. 1's E_g, the layer time it promises (its right side), and what the event simulation finds for it.

    With shares of experts, as the equation's real number says; and with the next lower whole number.
    """
    rows = {}
    for model in MODELS:
        for N in (modules_needed(model, assumptions), UNITS[-1]):
            spec = load_model(model)
            costs, K = Costs(spec, assumptions.hardware(N)), spec.K
            T_g, T_n, T_a = float(costs.gpu(1)), float(costs.unit(1)) / N, costs.activation
            E_g = balance(costs.transfer(), T_g, T_n, T_a, K, N)
            promised = (N + 1) * T_a + T_n * (K - E_g)
            step = Step(np.arange(K), np.ones(K, int), np.zeros(K, int), np.zeros(K, bool), 1)
            found = [event_seconds(make_plan(step, N, moved=np.clip(u - np.arange(K), 0, 1), split=True, pieces=N),
                                   costs) for u in (E_g, math.floor(E_g))]
            rows[f"{model}, N={N}"] = {"E_g": E_g, "promised, ms": 1e3 * promised,
                                       "shares ÷ promised": found[0] / promised,
                                       "whole ÷ promised": found[1] / promised}
    return rows


def engines(assumptions: Assumptions, tokens: int, layers: int = 4) -> dict[str, dict[str, Any]]:
    """Simulated over closed-form seconds of the experts, every model, fewest and most units, some of the layers."""
    rows = {}
    for name in progress([*PAPER, *(f"{name}, improved" for name in OURS)], "both engines", unit="system"):
        ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
        for model in MODELS:
            routing, system = assumptions.routing(model), assumptions.system(name)
            counts, L = routing.counts(), routing.spec.L
            for N in (modules_needed(model, assumptions), UNITS[-1]):
                run = Run(routing.spec, assumptions.hardware(N), system, routing, assumptions.placement)
                picked = range(0, L, L // layers)
                for phase, steps in (
                        ("prefill", [run.prefill_step(layer, counts[layer]) for layer in picked]),
                        ("decode", [run.decode_step(layer, routing.decode[t, layer]) for layer in picked
                                    for t in range(tokens)])):
                    plans = [system.plan(step, run.costs) for step in steps]
                    event, closed = (sum(seconds(plan, run.costs) for plan in plans)
                                     for seconds in (event_seconds, layer_seconds))
                    ratios[phase].append(float(event / closed))
        rows[name] = {f"{phase}: {what}": of(ratios[phase]) for phase in ratios
                      for what, of in (("least", min), ("mean", mean), ("most", max))}
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configurations", type=int, default=10_000, help="random configurations to check; 0 for none")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the routing (default: 3)")
    parser.add_argument("--engine-tokens", type=int, default=16, help="decode tokens on which engines are compared")
    parser.add_argument("--fit", dest="search", action="store_true", help="search the assumptions again (minutes)")
    parser.add_argument("--sensitivity", dest="sensitive", action="store_true",
                        help="change one assumption at a time (minutes)")
