"""Expert parallelism: bytes sent beside the formulas, time of a layer, and imbalance with and
without EPLB.

One layer of 64 experts, 8 of them chosen uniformly at random, on 2 and 4 gloo processes; rows a
token as counted, and as `expected_rows` has them. "As predicted" says whether a loop
over tokens counts as many (`rows_by_loop`). Times are medians over rounds, of the slowest rank; with fewer cores than ranks they show what
exchange costs and not what parallelism gains."""

from __future__ import annotations

import random
from math import comb
from statistics import median
from typing import Any

import torch

from moelab.arguments import whole
from moelab.bench.experts import Layers
from moelab.bench.measure import seconds, torch_threads
from moelab.experts.sharding import share
from moelab.models import eager
from moelab.parallel import VARIANTS, degree, launch
from moelab.parallel.exchange import Grid
from moelab.parallel.sharding import ShardedExperts, owners
from moelab.records import Numbers, Records
from moelab.static.eplb import balance, consecutive, device_loads, imbalance

E = 64
K = 8
H = 512
I = 256
ROUNDS = 7
PHASES = ("prefill, ms", "decode, ms")


def run(
    tokens: int = 512, ranks: tuple[int, ...] = (2, 4), seed: int = 0, rounds: int = ROUNDS
) -> Records:
    """Without rounds nothing is timed."""
    sections = {}
    times = {"one process": alone(tokens, seed, rounds)} if rounds else {}
    for W in ranks:
        made = launch(on_a_rank, W, W, tokens, seed, rounds, threads=1)
        rows, (ids, _, _) = {}, routing(tokens, seed)
        for variant in made[0]:
            tp = degree(variant, W)
            to = owners(E, W // tp)[ids]
            by_loop = rows_by_loop(variant, to.tolist(), W, tp)
            sent = [rank[variant]["sent"] for rank in made]
            rows[variant] = {
                "expected rows a token": expected_rows(variant, E, K, W, tp),
                "dispatched": sum(s["dispatch"].rows for s in sent) / tokens,
                "combined": sum(s["combine"].rows for s in sent) / tokens,
                "MB sent": sum(t.bytes for s in sent for t in s.values()) / 1e6,
                "as predicted": all(
                    sum(s[way].rows for s in sent) == by_loop for way in ("dispatch", "combine")
                ),
            }
            if rounds:
                times[f"{variant} on {W}"] = {
                    name: max(rank[variant][name] for rank in made) for name in PHASES
                }
        sections[f"volume on {W} ranks, {tokens} tokens (exact)"] = rows
    if rounds:
        sections["one layer (measured)"] = times
    sections["EPLB, 64 experts on 8 ranks, max/mean (exact)"] = eplb(seed)
    return sections


def expected_rows(variant: str, E: int, K: int, W: int, tp: int = 1) -> float:
    """Rows a token, one way, under uniform routing: to the experts (dispatch), and as many back
    (combine). The guide ("Communication Optimization for Expert Parallelism with All-to-All-v") has
    no formulas. An all-gather sends W − 1, all-to-all-v K·(1 − 1/W), which is more if K > W;
    deduplicated, a token goes once to each other rank that holds any of its experts."""

    def deduplicated(W: int) -> float:
        return (1 - 1 / W) * sum(1 - comb(E - held, K) / comb(E, K) for held in share(E, W))

    return {
        "ep": W - 1.0,
        "tp": W - 1.0,
        "ep-a2a": K * (1 - 1 / W),
        "ep-dedup": deduplicated(W),
        # gathered in the row of tp ranks, each of which sends its copy to its peers
        "tp-ep": tp - 1.0 + tp * deduplicated(W // tp),
    }[variant]


def rows_by_loop(variant: str, to: list[list[int]], W: int, tp: int) -> int:
    """Rows that all ranks send, one way, from the ep rank of each token's choices (W/tp: none)."""
    total = 0
    for t, chosen in enumerate(to):
        owner = next(r for r in range(W) if t < (r + 1) * len(to) // W)
        away = [r for r in chosen if r < W // tp and r != owner // tp]
        if variant in ("ep", "tp"):
            total += W - 1
        else:
            total += tp - 1 + tp * (len(away) if variant == "ep-a2a" else len(set(away)))
    return total


def on_a_rank(W: int, tokens: int, seed: int, rounds: int) -> Records:
    """variant → what this rank sent for tokens that are spread, and milliseconds of a layer on
    tokens that all have."""
    runs = {}
    for variant, kind in VARIANTS.items():
        if variant == "tp-ep" and W < 4:  # two ranks are one or the other
            continue
        grid = Grid(degree(variant, W))
        experts = layer()
        experts.source = ShardedExperts(
            [experts],
            lambda _, e: experts.own(e),
            grid.ep.rank,
            grid.ep.size,
            grid.tp.rank,
            grid.tp.size,
        )
        runs[variant] = kind(grid), experts
    made, (ids, weights, x) = {}, routing(tokens, seed)
    for variant, (executor, experts) in runs.items():
        world = executor.grid.world
        own = slice(world.rank * tokens // world.size, (world.rank + 1) * tokens // world.size)
        executor.run_own(x[own], ids[own], weights[own], experts)
        made[variant] = {"sent": dict(executor.grid.traffic)}
    samples = {(variant, name): [] for variant in runs for name in PHASES}
    for _ in range(rounds):
        for variant, name in samples:
            (executor, experts), T = runs[variant], tokens if name == PHASES[0] else 1
            executor.grid.world.sizes(0, x.device)  # all begin together
            samples[variant, name].append(
                seconds(executor.run, x[:T], ids[:T], weights[:T], experts)
            )
    for (variant, name), values in samples.items():
        if values:
            made[variant][name] = 1e3 * median(values)
    return made


def alone(tokens: int, seed: int, rounds: int = ROUNDS) -> Numbers:
    """The same layer in one process of one thread."""
    experts, (ids, weights, x) = layer(), routing(tokens, seed)
    with torch_threads(1):
        return {
            name: 1e3
            * median(seconds(eager, x[:T], ids[:T], weights[:T], experts) for _ in range(rounds))
            for name, T in zip(PHASES, (tokens, 1))
        }


def layer() -> Any:
    """The experts of one layer behind the seam, the same on every rank."""
    return Layers(E, K, H, I, torch.float32, 0).seam[0]


def routing(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [T, K], weights [T, K], x [T, H]), uniform."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :K]
    return (
        ids,
        torch.rand(tokens, K, generator=generator),
        torch.randn(tokens, H, generator=generator),
    )


def eplb(seed: int) -> dict[str, Numbers]:
    """max/mean load of devices for Zipf popularity rank^−s, ranks assigned to experts at random."""
    rows = {}
    for s in (0.2, 0.6, 1.0, 1.4):
        load = [1 / rank**s for rank in range(1, 65)]
        random.Random(seed).shuffle(load)
        rows[f"Zipf {s}"] = {
            "in order": imbalance(load, consecutive(64, 8)),
            **{
                f"EPLB, {spare} spare": imbalance(load, balance(load, 8, spare))
                for spare in (0, 8, 16, 64)
            },
        }
    return rows


def placed(
    known: torch.Tensor, seen: torch.Tensor, devices: int = 8, spare: int = 8
) -> dict[str, list[list[float]]]:
    """Loads of devices under counts `seen` [L, E] if experts are placed by counts `known`: way →
    those of each layer."""
    E = known.shape[1]
    ways = {
        "in order": lambda load: consecutive(E, devices),
        "EPLB, none spare": lambda load: balance(load, devices),
        f"EPLB, {spare} spare": lambda load: balance(load, devices, spare),
    }
    layers = list(zip(known.double().tolist(), seen.double().tolist()))
    return {name: [device_loads(of, way(by)) for by, of in layers] for name, way in ways.items()}


OPTIONS = {"tokens": (whole(1), "of the prefill"), "seed": (whole(), "of the routing")}
