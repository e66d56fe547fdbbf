"""Expert parallelism: rows sent beside the formulas, and imbalance with and without EPLB.

One layer of 64 experts, 8 of them chosen uniformly at random, on 2 and 4 gloo processes; rows a
token as counted, and as `expected_rows` has them.

EPLB is DeepSeek's Expert Parallelism Load Balancer, as published with DeepSeek-V3 and announced in
AWS Neuron's MoE guide, "Future Optimizations": spare places go to replicas (`replicate`), then
replicas are packed onto devices (`pack`). Left out: the hierarchical form, which first packs groups
of experts onto nodes.

    load [E], tokens or shares of them     devices · places = E + spare     placement: the experts of each device
"""

from __future__ import annotations

import random
from math import comb

import torch

from moelab import open_model
from moelab.base.arguments import whole
from moelab.base.records import Numbers, Record, Records
from moelab.experts.sharding import share
from moelab.parallel import VARIANTS, degree, launch
from moelab.parallel.exchange import Grid
from moelab.parallel.opening import open_parallel, spread
from moelab.parallel.sharding import ShardedExperts

from .eplb import balance, consecutive, imbalance
from .layers import Layers

KIND = "exact"
MEASURES = ("moelab/parallel", "moelab/static")
E = 64
K = 8
H = 512
I = 256


def run(tokens: int = 512, ranks: tuple[int, ...] = (2, 4), seed: int = 0) -> Records:
    sections = {}
    for W in ranks:
        made = launch(on_a_rank, W, W, tokens, seed, threads=1)
        sections[f"volume on {W} ranks, {tokens} tokens (exact)"] = {
            variant: {
                "expected rows a token": expected_rows(variant, E, K, W, degree(variant, W)),
                "dispatched": sum(rank[variant]["dispatch"].rows for rank in made) / tokens,
                "combined": sum(rank[variant]["combine"].rows for rank in made) / tokens,
                "MB sent": sum(t.bytes for rank in made for t in rank[variant].values()) / 1e6,
            }
            for variant in made[0]
        }
    sections["EPLB, 64 experts on 8 ranks, max/mean (exact)"] = {
        f"Zipf {s}": eplb(s, seed) for s in (0.2, 0.6, 1.0, 1.4)
    }
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


def on_a_rank(W: int, tokens: int, seed: int) -> Records:
    """variant → what this rank sent for tokens that are spread over the ranks."""
    made, (ids, weights, x) = {}, routing(tokens, seed)
    experts = Layers(E, K, H, I, torch.float32, 0).seam[0]  # the same on every rank
    for variant, kind in VARIANTS.items():
        if variant == "tp-ep" and W < 4:  # two ranks are one or the other
            continue
        grid = Grid(degree(variant, W))
        parts = grid.ep.rank, grid.ep.size, grid.tp.rank, grid.tp.size
        experts.source = ShardedExperts([experts], lambda _, e, of=experts: of.own(e), *parts)
        world = grid.world
        own = slice(world.rank * tokens // world.size, (world.rank + 1) * tokens // world.size)
        kind(grid).run_own(x[own], ids[own], weights[own], experts)
        made[variant] = dict(grid.traffic)
    return made


def routing(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [T, K], weights [T, K], x [T, H]), uniform."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.rand(tokens, E, generator=generator).argsort(-1)[:, :K],
        torch.rand(tokens, K, generator=generator),
        torch.randn(tokens, H, generator=generator),
    )


def held(tokens: int, ranks: int = 2) -> Records:
    """way → bytes of fp32 weights that a rank of the small model holds, bytes of routing that all ranks
    gather of a prompt's token, and whether the prompt's choices of tokens are one process's."""
    model = open_model(dtype="float32")
    alone = choices(model, tokens)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    others = sum(p.nbytes for p in model.parameters()) - experts
    found = {"one process": {"experts": experts, "others": others}}
    ways = "ep-a2a", "tp"
    for way, made in zip(ways, zip(*launch(_held, ranks, ways, tokens, threads=1))):
        found[way] = {
            "experts": made[0]["expert_bytes"][0],
            "others": made[0]["other_bytes"][0],
            "routing": sum(made[0]["sent"]["routing"]) / tokens / model.spec.L,
            "same": all(torch.equal(of["choices"], alone) for of in made),
        }
    return found


def _held(ways: tuple[str, ...], tokens: int) -> list[Record]:
    found = []
    for way in ways:
        model = open_parallel(parallel=way, sequence_router=True, dtype="float32")
        found.append({"choices": choices(model, tokens)} | spread(model))
    return found


def choices(model: torch.nn.Module, tokens: int) -> torch.Tensor:
    """The most likely token after each of a prompt."""
    ids = torch.arange(3, 3 + tokens)[None] % 90 + 3
    with torch.inference_mode():
        return model(input_ids=ids).logits.argmax(-1)


def eplb(s: float, seed: int) -> Numbers:
    """max/mean load of devices for Zipf popularity rank^−s, ranks assigned to experts at random."""
    load = [1 / rank**s for rank in range(1, E + 1)]
    random.Random(seed).shuffle(load)
    return {"in order": imbalance(load, consecutive(E, 8))} | {
        f"EPLB, {spare} spare": imbalance(load, balance(load, 8, spare)) for spare in (0, 8, 16, 64)
    }


OPTIONS = {"tokens": (whole(1), "of the prefill"), "seed": (whole(), "of the routing")}
