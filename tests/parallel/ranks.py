"""What the ranks of a parallel test do: functions that other processes can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from moelab.base.registry import make
from moelab.models import discover
from moelab.parallel import VARIANTS, degree
from moelab.parallel.exchange import Exchange, Grid
from moelab.parallel.sharding import ShardedExperts
from tests.experts import toy


def tokens_and_logits(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy generation with a cache from two padded prompts."""
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    padded = slice(-4, None) if model.config.is_encoder_decoder else slice(0, 4)
    ids[0, padded], mask[0, padded] = 0, 0
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, torch.stack(out.logits)


def generate_all(cases):
    """[(folder, variant, dtype, executor)] → [(tokens, logits, bytes of experts, tally, bytes of all
    else)]."""
    from moelab.parallel.opening import open_parallel

    made = []
    for folder, variant, dtype, name in cases:
        inner = make("executor", name) if name else None
        model = open_parallel(folder, variant, inner=inner, dtype=dtype)
        tokens, logits = tokens_and_logits(model)
        tally = discover(model)[0].seam.executor.tally
        others = sum(p.nbytes for p in model.parameters())
        made.append((tokens, logits, model.shards.nbytes, tally, others))
    return made


def route_both_ways(folders):
    """[folder] → [((tokens, logits) by routers in sequence parallel, bytes gathered of a prompt, and of
    one token)]."""
    from moelab.parallel.opening import open_parallel

    made = []
    for folder in folders:
        model = open_parallel(folder, dtype=torch.float32, sequence_router=True)
        out = tokens_and_logits(model)
        sent = []
        for T in (20, 1):
            model.grid.traffic.clear()
            with torch.no_grad():
                model(input_ids=torch.full((1, T), 7))
            sent.append(model.grid.traffic["routing"].bytes)
        made.append((out, sent))
    return made


def open_with(folder, options):
    from moelab.parallel.opening import open_parallel

    open_parallel(folder, **options)


def run_all(cases):
    """[(experts, routing, way)] → [(output, output of own tokens, what was sent for those, choices
    computed)]."""
    made = []
    for experts_options, routing_options, way in cases:
        experts, (ids, weights), x = toy_layer(experts_options, routing_options)
        grid = Grid(degree(way, dist.get_world_size()))
        experts.source = ShardedExperts(
            [experts],
            lambda _, e: experts.own(e),
            grid.ep.rank,
            grid.ep.size,
            grid.tp.rank,
            grid.tp.size,
        )
        executor = VARIANTS[way](grid)
        y = executor.run(x, ids, weights, experts)
        computed = executor.tally.executed
        grid.traffic.clear()
        W = grid.world.size
        ends = [(r + 1) * len(x) // W for r in range(W - 1)]
        own = torch.arange(len(x)).tensor_split(ends)[grid.world.rank]
        y_own = executor.run_own(x[own], ids[own], weights[own], experts)
        made.append((y, y_own, dict(grid.traffic), computed))
    return made


def toy_layer(experts_options, routing_options):
    """(experts, (ids, weights), x), the same on every rank."""
    experts = toy.make_experts(**experts_options)
    ids, weights = toy.make_routing(**routing_options)
    if len(ids) > 2:
        ids[1, 0] = ids[2] = experts.num_experts  # a choice, and a token, without an expert
    x = torch.randn(len(ids), experts_options["H"], generator=torch.Generator().manual_seed(1))
    return experts, (ids, weights), x


def die_in_the_middle(note: Path):
    """Rank 1 is killed, rank 0 waits for it in an exchange, rank 2 computes on and on."""
    exchange = Exchange()
    for step in range(100):
        exchange.sizes(step, torch.device("cpu"))
        if step == 10 and exchange.rank == 1:
            note.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 10 and exchange.rank == 2:
            time.sleep(600)


def fail(rank: int):
    """One rank raises while the other waits for it."""
    exchange = Exchange()
    if exchange.rank == rank:
        raise ValueError("no such luck")
    exchange.sizes(0, torch.device("cpu"))
