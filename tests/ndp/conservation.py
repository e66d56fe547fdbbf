"""A check of the simulation: every activated expert once, bytes as formulas, no overlap.

The steps of random models of one layer, machines, systems and routings are planned and simulated,
and their events compared with the routing itself. The closed form is compared too, plans for which
it is exact apart from the others."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.event_simulation import simulate_layer
from moelab.ndp.hardware import MAPPINGS, PCIE, Hardware, hardware
from moelab.ndp.plans import Plan
from moelab.ndp.routing import PromptRouting, simulated_routing
from moelab.ndp.simulation import NDPRun
from moelab.ndp.systems import SYSTEMS, System
from moelab.specs import Event, MoESpec


def check(ids: np.ndarray, plan: Plan, costs: Costs, events: Sequence[Event]) -> list[str]:
    """What is wrong with a simulated layer, in words; ids [S, K] are the routing that it had to
    serve, E for none."""
    spec, step = costs.spec, plan.step
    tokens = Counter(e for row in ids.tolist() for e in row if e < spec.E)
    found = []
    if tokens != Counter(dict(zip(step.experts.tolist(), step.tokens.tolist()))):
        found.append(f"the plan has tokens {step.tokens.tolist()}, the routing {dict(tokens)}")

    done: dict[int, float] = defaultdict(float)
    sent: Counter[str] = Counter()
    busy: dict[str, list[Event]] = defaultdict(list)
    whole = {"gpu": costs.gpu, "host": costs.cpu}
    for event in events:
        busy[event.resource].append(event)
        sent[event.kind] += event.bytes
        if event.kind == "expert":
            time = float(whole.get(event.resource, costs.unit)(tokens[event.expert]))
            done[event.expert] += (event.end - event.start) / time if time else float("inf")
    found += [
        f"expert {e} was computed {done[e]:.6f} times"
        for e in tokens | done
        if abs(done[e] - 1) > 1e-6
    ]
    for resource, its in busy.items():
        its.sort(key=lambda event: (event.start, event.end))
        found += [
            f"{resource} does two things at once: {a} and {b}"
            for a, b in pairwise(its)
            if b.start < a.end - 1e-12
        ]

    moved = sum(plan.moved.tolist()) * spec.expert_bytes
    if abs(sent["read weights"] - moved) > len(step):  # a byte of rounding an expert
        found.append(
            f"{sent['read weights']} bytes of weights crossed the link, {moved:.0f} were planned"
        )
    held = [
        {e for e, share in zip(step.experts.tolist(), column.tolist()) if share > 0}
        for column in (*plan.units.T, plan.host)
    ]  # experts of which each unit and the host has a part
    messages = [sum(not its.isdisjoint(row) for row in ids.tolist()) for its in held]
    least = (max(messages) if plan.broadcast else sum(messages)) + sum(messages)
    crossed = sent["read activations"] / costs.activation_bytes
    if (
        crossed < least
        or crossed > least
        and (len(ids) == 1 or plan.broadcast and (plan.units > 0).all())
    ):
        found.append(f"{crossed} hidden states crossed the link, {least} are needed")
    return found


def random_configuration(
    rng: random.Random,
) -> tuple[str, MoESpec, Hardware, System, PromptRouting]:
    """A small model of one layer, a machine, a system by name, and a routing."""
    E = rng.randint(1, 24)
    spec = MoESpec(
        "random",
        "random",
        1,
        (0,),
        E,
        rng.randint(1, min(E, 8)),
        64 * rng.randint(1, 64),
        32 * rng.randint(1, 200),
        gated=rng.random() < 0.8,
        heads=8,
        kv_heads=2,
        head_dim=64,
        vocab=1000,
    )
    machine = hardware(
        rng.randint(1, 16),
        unit=rng.choice(("ndp-dimm-ddr4", "lpddr-ndp", "hbm-pim")),
        pcie=rng.choice(list(PCIE)),
        mapping=rng.choice(MAPPINGS),
        shared_dram=rng.random() < 0.5,
        latency_us=rng.choice((0, 3)),
    )
    name = rng.choice(list(SYSTEMS))
    routing = simulated_routing(
        spec,
        rng.randrange(1 << 30),
        rng.randint(2, 40),
        rng.randint(1, 4),
        zipf=rng.choice((0, 0.5, 1.5)),
        bias=rng.choice((0, 0.5)),
    )
    routing.decode[rng.random() < 0.1] = E  # now and then a token without experts
    return name, spec, machine, SYSTEMS[name], routing


def conserve(configurations: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Check random configurations: the problems found, and the ratio of event simulation to closed
    form."""
    rng, found, layers, ratios = random.Random(seed), [], 0, {True: [], False: []}
    for i in range(configurations):
        name, _, machine, system, routing = random_configuration(rng)
        run = NDPRun(machine, system, routing)
        steps = [(routing.prefill[:, 0], run.prefill_step(0, routing.counts()[0]))]
        steps += [(ids, run.decode_step(0, ids[0])) for ids in routing.decode]
        for ids, step in steps:
            plan = run.plan(step)
            seconds, events = simulate_layer(plan, run.costs)
            layers += 1
            found += [
                f"configuration {i} ({name}): {text}"
                for text in check(ids, plan, run.costs, events)
            ]
            if len(step):
                # Exact: one side alone, or one token and no weights on the link. A prompt's outputs
                # but the last are taken to be hidden, which those of small experts on fast units
                # are not.
                exact = not (plan.receivers.any() and (plan.moved.any() or plan.step.S > 1))
                ratios[exact].append(seconds / layer_seconds(plan, run.costs))
    mixed = ratios[False]
    return {
        "configurations": configurations,
        "layers": layers,
        "problems": found,
        "largest difference, exact plans": float(max(abs(r - 1) for r in ratios[True])),
        "mixed plans": len(mixed),
        "mean ratio, mixed plans": float(np.mean(mixed)),
        "smallest, mixed": float(min(mixed)),
        "largest, mixed": float(max(mixed)),
    }
