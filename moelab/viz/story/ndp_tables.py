"""The tables of GPU-NDP, as rows for `moelab.viz.notebook.table`; "N.S.", not supported: the
experts do not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moelab.bench.ndp import OneLayer
from moelab.cards import load_model
from moelab.ndp.costs import Costs
from moelab.ndp.fit import CHOICES, CLAIMS, HALVES, INCREMENTS, MISSES, SOURCES, error, nulls
from moelab.ndp.readings import Readings
from moelab.ndp.simulation import Result
from moelab.ndp.sweep import MODELS, SHORT, UNITS, Assumptions, Spread, modules_needed
from moelab.records import Rows
from moelab.specs import MoESpec
from moelab.table import ms
from moelab.viz.charts import Values


def times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def assumed(chosen: Assumptions, found: Readings) -> Rows:
    """What the paper leaves open, as chosen, with where the choices come from and how many that fit
    make each."""
    every, left = max(1, int(found.fits.sum())), found.left()
    return [
        {
            "assumption": name,
            "chosen": str(getattr(chosen, name)),
            "source": SOURCES[name],
            "of the combinations that fit": ", ".join(
                f"{choice} {n / every:.0%}" for choice, n in left[name].items() if n
            ),
        }
        for name in CHOICES
    ]


def costs(of: Mapping[str, Costs], assumptions: Assumptions) -> Rows:
    """What an expert costs in each place; costs on six modules."""
    return [
        {
            "model": SHORT[name],
            "an expert, MB (exact)": f"{c.spec.expert_bytes / 1e6:.1f}",
            "T_w, ms": ms(c.transfer()),
            "T_g, ms": ms(c.gpu(1)),
            "T_n at N = 1, ms": ms(c.unit(1)),
            "T_n at N = 6, ms": ms(c.unit(1) / 6),
            "T_n, 32 tokens, N = 6": ms(c.unit(32) / 6),
            "T_a, µs": f"{1e6 * c.activation:.2f}",
            "all experts, GB (exact)": f"{c.spec.experts_bytes / 1e9:.1f}",
            "modules needed (exact)": modules_needed(name, assumptions),
            "paper": CLAIMS[f"modules needed, {name}"].value,
        }
        for name, c in of.items()
    ]


def answers(found: Mapping[tuple[str, int], float]) -> Rows:
    """E_g of Eq. 1 by model and modules, with the whole experts below it."""
    return [
        {"model": SHORT[name], "K": load_model(name).K}
        | {
            f"E_g of Eq. 1, N = {N}": f"{found[name, N]:.2f} → {int(found[name, N])}"
            if (name, N) in found
            else "N.S."
            for N in UNITS
        }
        for name in MODELS
    ]


def steps(figures: Mapping[str, Values]) -> Rows:
    """One decode step under each schedule: time and utilisation."""
    heads = {
        "gpu": "GPU busy",
        "link": "link busy",
        "modules": "modules busy, mean",
        "least": "least busy module",
    }
    return [
        {"schedule": label, "the step, ms (simulated)": ms(of["seconds"])}
        | {head: f"{of[name]:.0%}" for name, head in heads.items()}
        for label, of in figures.items()
    ]


def end_to_end(gains: Mapping[str, Mapping[tuple[str, int], float]]) -> Rows:
    """Speedups over each other system: over → (model, units) → ×."""
    rows = []
    for over, of in gains.items():
        model, N = max(of, key=of.get)
        rows.append(
            {
                "end to end over": over,
                "mean of all cells": times(sum(of.values()) / len(of)),
                "largest": times(of[model, N]),
                "where": f"{SHORT[model]}, N = {N}",
                "paper: largest": times(CLAIMS[f"end to end ÷ {over}"].value),
            }
        )
    return rows


def published(found: Mapping[str, Spread], combined: Readings) -> Rows:
    """Each published figure, ours over the seeds, the band of all readings that fit, and a
    predictor of ratios."""
    null = nulls()
    return [
        {"published figure": name, "where": CLAIMS[name].where, "paper": CLAIMS[name].said}
        | {
            head: f"{value:.3f}"
            for head, value in zip(("ours, mean", "least", "most"), found[name])
        }
        | {
            "used to": half,
            "agrees": "yes" if CLAIMS[name].agrees(found[name][0]) else "**no**",
            "all that fit": "{:.2f} to {:.2f}".format(*combined.band(name)).replace(
                "nan to nan", "–"
            ),
            "no simulator": f"{null[name]:.2f}" if name in null else "",
            "it agrees": "" if name not in null else "yes" if CLAIMS[name].predicted else "**no**",
        }
        for half, names in HALVES.items()
        for name in names
    ]


def increments(found: Mapping[str, Spread]) -> Rows:
    """What each technique adds to another, as ratios of the published levels and of ours."""
    return [
        {
            "what a technique adds": name,
            "paper": f"{CLAIMS[after].value / CLAIMS[before].value - 1:+.1%}",
            "ours": f"{found[after][0] / found[before][0] - 1:+.1%}",
        }
        for name, (after, before) in INCREMENTS.items()
    ]


def recorded(seconds: Mapping[str, Values], over: str) -> Rows:
    """Decode of each schedule under each routing: source of the routing → schedule → seconds;
    speedups over one."""
    return [
        {"schedule": name}
        | {f"{source}, over {over}": times(of[over] / of[name]) for source, of in seconds.items()}
        for name in next(iter(seconds.values()))
    ]


def misses(found: Mapping[str, Spread], seen: Mapping[str, str], unknown: str) -> Rows:
    """The figures that disagree, and why: what is known in general, and `seen` in this run; else
    `unknown`."""
    return [
        {
            "miss": CLAIMS[name].text,
            "paper": CLAIMS[name].said,
            "ours": f"{found[name][0]:.2f}",
            "likely reason": f"{MISSES[name]} {seen.get(name, '')}" if name in MISSES else unknown,
        }
        for names in HALVES.values()
        for name in names
        if not CLAIMS[name].agrees(found[name][0])
    ]


def sensitivity(table: Mapping[str, Values], names: Sequence[str]) -> Rows:
    """What each changed assumption does to those figures: the three that it moves most, from "as
    chosen" to it."""
    rows, usual = [], table["as chosen"]
    for what, row in table.items():
        most = sorted(
            (name for name in names if row[name] != usual[name]),
            key=lambda name: -abs(row[name] / usual[name] - 1),
        )[:3]
        rows.append(
            {
                "changed": what,
                "moves most": "; ".join(
                    f"{name}: {usual[name]:.2f} → {row[name]:.2f}" for name in most
                )
                or "–",
                "error, all these": f"{error(row, names):.3f}",
            }
        )
    return rows


def space(found: Mapping[str, Mapping[str, Mapping[int, float]]], N: int) -> Rows:
    """ms of a decode step on N units, by model and machine."""
    return [
        {f"model, {N} units": SHORT[model]}
        | {
            variant: "N.S." if math.isnan(of[N]) else f"{1e3 * of[N]:.1f} ms"
            for variant, of in by_machine.items()
        }
        for model, by_machine in found.items()
    ]


def caption(model: str, N: int, machine: str, system: str, found: OneLayer) -> str:
    """One layer in a sentence."""
    return (
        f"{system}, {SHORT[model]} on {N} units ({machine}): this layer "
        f"{1e3 * found.seconds:.3f} ms (simulated); mean of {len(found.closed)} layers "
        f"{1e3 * sum(found.closed) / len(found.closed):.3f} ms (closed form, modelled)."
    )


def hit_rates(simulated: Mapping[str, Result], spec: MoESpec, hit_rate: float) -> Rows:
    """Hit rates of the popularity model, model by model, and that of the engine, beside chance."""
    rows = [
        (
            f"{SHORT[name]}, popularity model (simulated)",
            of.prefetched,
            of.hit_rate,
            load_model(name).E,
        )
        for name, of in simulated.items()
    ]
    return [
        {"": what, "x": x, "hit rate": f"{rate:.1%}", "chance": f"{x / E:.1%}"}
        for what, x, rate, E in [*rows, (f"{spec.name}, engine (exact)", spec.K, hit_rate, spec.E)]
    ]
