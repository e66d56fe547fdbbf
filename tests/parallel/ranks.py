"""What the ranks of a parallel test do: functions that other processes can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from moelab.parallel import VARIANTS, Exchange, Grid, ShardedExperts, degree


def tokens_and_logits(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy generation with a cache from two left-padded prompts."""
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
    """[(folder, variant, dtype)] → [(tokens, logits, bytes of experts held)]."""
    from moelab.parallel.opening import open_parallel

    made = []
    for folder, variant, dtype in cases:
        model = open_parallel(folder, variant, dtype=dtype)
        made.append((*tokens_and_logits(model), model.shards.nbytes))
    return made


def generate_with(folder, ways):
    """[(variant, executor or None, options)] → [(tokens, logits, choices routed, executed,
    slots)]."""
    from moelab.models import discover, eager
    from moelab.parallel.opening import open_parallel
    from moelab.registry import make

    made = []
    for variant, name, options in ways:
        inner = make("executor", name) if name else eager
        model = open_parallel(folder, variant, inner=inner, dtype=torch.float32, **options)
        tokens, logits = tokens_and_logits(model)
        tally = discover(model)[0].seam.executor.tally
        made.append((tokens, logits, tally.routed, tally.executed, tally.slots))
    return made


def open_with(folder, options):
    from moelab.parallel.opening import open_parallel

    open_parallel(folder, **options)


def route_alone_and_in_sequence(folder):
    """(ids, weights) of a router for 18 and 2 tokens, the same in sequence parallel, and how many
    rows it saw then."""
    from moelab.models import discover
    from moelab.parallel.opening import open_parallel, route_in_sequence

    model = open_parallel(folder, "ep", dtype=torch.float32)
    layer = discover(model)[0]
    x = torch.randn(1, 20, model.spec.H, generator=torch.Generator().manual_seed(0)).split(
        (18, 2), 1
    )

    def routed():
        both = [layer.routing(layer.router(part.flatten(0, 1))) for part in x]
        return torch.cat([ids for ids, _ in both]), torch.cat([weights for _, weights in both])

    with torch.no_grad():
        alone, rows, linear = routed(), [], torch.nn.functional.linear
        with route_in_sequence(model):
            torch.nn.functional.linear = lambda y, *args: (rows.append(len(y)), linear(y, *args))[1]
            shared = routed()
            torch.nn.functional.linear = linear
    return alone, shared, rows


def run_all(cases):
    """[(experts, routing, way, options)] → [(output, output of own tokens, bytes sent, choices
    computed)]."""
    from moelab.models import eager
    from tests.experts import toy

    made = []
    for experts_options, routing_options, way, options in cases:
        experts, (ids, weights), x = toy_layer(toy, experts_options, routing_options)
        grid, kind = Grid(degree(way, dist.get_world_size())), VARIANTS[way]
        placement = options.get("placement") or kind.place(experts.num_experts, grid.ep.size)
        source = ShardedExperts(
            [experts],
            lambda _, e: experts.own(e),
            placement,
            grid.ep.rank,
            grid.tp.rank,
            grid.tp.size,
            kind.cut,
        )
        executor = kind(
            grid, placement, eager, **{key: of for key, of in options.items() if key != "placement"}
        )
        experts.source = source
        y = executor.run(x, ids, weights, experts)
        computed = executor.tally.executed
        own = sent = None
        if hasattr(executor, "run_own"):
            for exchange in (grid.world, grid.ep, grid.tp):
                exchange.traffic.clear()
            share = torch.arange(len(x)).tensor_split(
                [(r + 1) * len(x) // grid.world.size for r in range(grid.world.size - 1)]
            )[grid.world.rank]
            own = executor.run_own(x[share], ids[share], weights[share], experts)
            sent = {label: t.bytes for label, t in grid.traffic().items()}
        made.append((y, own, sent, computed))
    return made


def toy_layer(toy, experts_options, routing_options):
    """(experts, (ids, weights), x), the same on every rank."""
    experts = toy.make_experts(**experts_options)
    ids, weights = toy.make_routing(**routing_options)
    if len(ids) > 2:
        ids[1, 0] = ids[2] = experts.num_experts  # a choice, and a token, without an expert
    x = torch.randn(len(ids), experts_options["H"], generator=torch.Generator().manual_seed(1))
    return experts, (ids, weights), x.to(experts_options.get("dtype", torch.float32))


def die_in_the_middle(note: Path):
    """Rank 1 is killed, rank 0 waits for it in an exchange, rank 2 (if any) computes on and on."""
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
