"""Experts in parallel: bytes sent beside the formulas, time of a layer, and imbalance with and without EPLB.

One layer of 64 experts, 8 of them chosen uniformly at random, on 2 and 4 gloo processes of this machine. Rows a token
are counted where they are sent; "as predicted" says whether the bytes of every rank are exactly those of
`moelab.parallel.volumes`. Times are medians of interleaved rounds, of the slowest rank; on a machine with fewer
cores than ranks they show what exchange costs and not what parallelism brings.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch

from moelab.arguments import whole
from moelab.parallel import VARIANTS, Grid, Placement, ShardedExperts, degree, launch, volumes
from moelab.parallel.eplb import Balance, balance, measure
from moelab.models import eager, plug

E, K, H, I = 64, 8, 512, 256
ROUNDS = 7
#: ways without a formula of what they send
LEFT_OUT = ("hidden", "blocks")


def run(tokens: int = 512, ranks: tuple[int, ...] = (2, 4), seed: int = 0) -> dict[str, dict[str, Any]]:
    """Every figure: rows and bytes exact, times measured, EPLB exact for its loads."""
    sections, times = {}, {"one process": alone(tokens, seed)}
    for W in ranks:
        made = launch(on_a_rank, W, W, tokens, seed, threads=1)
        rows = {}
        for variant in made[0]:
            tp = degree(variant, W)
            ids, weights, x = routing(tokens, seed)
            to = Placement.consecutive(E, W // tp).assign(ids)
            predicted = volumes.exact(variant, to, W, H, x.dtype, weights.dtype, tp)
            sent = [rank[variant]["sent"] for rank in made]
            agree = all(s[label].bytes == predicted[label][rank] for rank, s in enumerate(sent) for label in s)
            rows[variant] = {
                "expected rows a token": volumes.expected(variant, E, K, W, tp),
                "dispatched": sum(s["dispatch"].rows for s in sent) / tokens,
                "combined": sum(s["combine"].rows for s in sent) / tokens,
                "MB sent": sum(t.bytes for s in sent for t in s.values()) / 1e6,
                "as predicted": agree}
            times[f"{variant} on {W}"] = {name: max(rank[variant][name] for rank in made)
                                          for name in times["one process"]}
        sections[f"volume on {W} ranks, {tokens} tokens (exact)"] = rows
    sections["one layer (measured)"] = times
    sections["EPLB, 64 experts on 8 ranks, max/mean (exact)"] = eplb(seed)
    return sections


def on_a_rank(W: int, tokens: int, seed: int) -> dict[str, dict[str, Any]]:
    """variant → what this rank sent for tokens that are spread, and milliseconds of a layer on tokens that all have."""
    runs = {}
    for variant, kind in VARIANTS.items():
        if variant in LEFT_OUT or variant == "tp-ep" and W < 4:         # two ranks are one or the other
            continue
        grid, experts = Grid(degree(variant, W)), layer(seed)
        placement = Placement.consecutive(E, grid.ep.size)
        experts.source = ShardedExperts([experts], lambda _, e: experts.own(e), placement, grid.ep.rank, grid.tp.rank,
                                        grid.tp.size)
        runs[variant] = kind(grid, placement, eager), experts
    made: dict[str, dict[str, Any]] = {}
    ids, weights, x = routing(tokens, seed)
    for variant, (executor, experts) in runs.items():
        world = executor.grid.world
        own = slice(world.rank * tokens // world.size, (world.rank + 1) * tokens // world.size)
        executor.run_own(x[own], ids[own], weights[own], experts)
        made[variant] = {"sent": executor.grid.traffic()}
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for variant, (executor, experts) in runs.items():
            for name, T in (("prefill, ms", tokens), ("decode, ms", 1)):
                executor.grid.world.sizes(0, x.device)                  # all begin together
                start = time.perf_counter()
                executor.run(x[:T], ids[:T], weights[:T], experts)
                samples.setdefault((variant, name), []).append(1e3 * (time.perf_counter() - start))
    for (variant, name), values in samples.items():
        made[variant][name] = statistics.median(values)
    return made


def alone(tokens: int, seed: int) -> dict[str, float]:
    """The same layer in one process, one thread, as each rank has."""
    threads, experts = torch.get_num_threads(), layer(seed)
    ids, weights, x = routing(tokens, seed)
    try:
        torch.set_num_threads(1)
        made = {}
        for name, T in (("prefill, ms", tokens), ("decode, ms", 1)):
            values = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                eager(x[:T], ids[:T], weights[:T], experts)
                values.append(1e3 * (time.perf_counter() - start))
            made[name] = statistics.median(values)
        return made
    finally:
        torch.set_num_threads(threads)


def layer(seed: int) -> Any:
    """The experts of one layer behind the seam, the same on every rank."""
    import transformers
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=H, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_experts=E, num_experts_per_tok=K, moe_intermediate_size=I, intermediate_size=I, decoder_sparse_step=1,
        mlp_only_layers=[])
    return plug(transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False))[0].experts


def routing(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [T, K], weights [T, K], x [T, H]), uniform."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :K]
    return ids, torch.rand(tokens, K, generator=generator), torch.randn(tokens, H, generator=generator)


def eplb(seed: int) -> dict[str, dict[str, float]]:
    """Popularity that falls like rank^−s, ranks dealt to experts at random."""
    rows = {}
    for s in (0.2, 0.6, 1.0, 1.4):
        load = [1 / rank ** s for rank in range(1, 65)]
        random.Random(seed).shuffle(load)
        rows[f"Zipf {s}"] = {"in order": measure(load, Placement.consecutive(64, 8)).ratio,
                             **{f"EPLB, {spare} spare": balance(load, 8, spare).ratio for spare in (0, 8, 16, 64)}}
    return rows


def placed(known: torch.Tensor, seen: torch.Tensor, devices: int = 8, spare: int = 8) -> dict[str, list[Balance]]:
    """How even devices are under counts `seen` [L, E] if experts are placed by counts `known`: way → layer by layer."""
    L, E = known.shape
    ways = {"in order": lambda load: Placement.consecutive(E, devices),
            "EPLB, none spare": lambda load: balance(load, devices).placement,
            f"EPLB, {spare} spare": lambda load: balance(load, devices, spare).placement}
    return {name: [measure(seen[l].double().tolist(), way(known[l].double().tolist())) for l in range(L)]
            for name, way in ways.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=whole(1), default=512, help="of the prefill (default: %(default)s)")
    parser.add_argument("--seed", type=whole(), default=0)
