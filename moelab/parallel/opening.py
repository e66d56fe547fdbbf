"""A model whose experts are spread over the ranks of a run.

Every rank reads the model without its routed experts, and its share of those. Ranks that share experts
share attention, shared experts and dense layers, too (`moelab.parallel.dense`); all else every rank
holds, and computes for all tokens.
Source: AWS Neuron's MoE guide, "Configuring TP and EP"."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moelab.checkpoint.opening import open_checkpoint
from moelab.experts.executor import Executor
from moelab.models import discover, plug
from moelab.parallel import VARIANTS, degree
from moelab.parallel.dense import cut_dense
from moelab.parallel.exchange import Exchange, Grid
from moelab.parallel.router import route_in_sequence
from moelab.parallel.sharding import ShardedExperts
from moelab.static.parallelism import choose

#: the default of a run on several ranks: the only way that is exact to the bit
DEFAULT = "ep-a2a"


def variant_of(tp: int | None) -> str:
    """The variant in which so many of all ranks share an expert."""
    if tp in (None, 1):
        return DEFAULT
    return "tp" if tp == dist.get_world_size() else "tp-ep"


def open_parallel(
    name_or_path: str | None = None,
    parallel: str = DEFAULT,
    tp: int | None = None,
    inner: Executor | None = None,
    dtype: Any = "auto",
    device: torch.device | str | None = None,
    sequence_router: bool = False,
) -> Any:
    """Open a model with this rank's share of the experts, `.shards`, of the ranks `.grid`; every
    rank must call it.

    parallel : a key of `moelab.parallel.VARIANTS`, or "auto": what `moelab.static.parallelism` says
        for these ranks. The model's `.parallel` is the key.
    tp : ranks that share an expert: all for "tp", by default 2 for "tp-ep", 1 for the others.
    inner : the executor of what is on this rank; None computes as transformers does.
    sequence_router : each rank routes its share of a prompt's tokens (`moelab.parallel.router`).

    Raises ValueError: unknown variant, or a `tp` that does not fit it, the number of ranks or of
    attention's heads.
    RuntimeError: no connected ranks."""
    if not dist.is_initialized():
        raise RuntimeError("this process is alone; see moelab.parallel.connect and launch")
    W = dist.get_world_size()
    if parallel != "auto":
        degree(parallel, W, tp)  # before anything is read
    elif tp is not None:
        raise ValueError(
            f"tp is {tp}, and with auto the advice says how many ranks share an expert: leave it out"
        )
    model = open_checkpoint(name_or_path, experts="external", dtype=dtype, device=device)
    if parallel == "auto":
        tp = choose(model.spec, W).tp
        # of the ways of spreading whole experts the exact one, or else that of the fewest rows
        parallel = "ep-dedup" if inner and tp == 1 else variant_of(tp)
    grid = Grid(degree(parallel, W, tp))
    if sequence_router:
        route_in_sequence(discover(model), grid.world)
    layers = [layer.seam for layer in discover(model)]
    if grid.tp.size > 1:
        cut_dense(model, grid.tp)
    model.grid = grid
    model.parallel = parallel
    model.shards = ShardedExperts(
        layers, layers[0].source, grid.ep.rank, grid.ep.size, grid.tp.rank, grid.tp.size
    )
    plug(model, executor=VARIANTS[parallel](grid, inner), source=model.shards)
    return model


def first_ranks(scores: torch.Tensor, world: Exchange) -> torch.Tensor:
    """Scores [B, V] of nothing but rank 0's choices, so that 8 bytes a sequence are sent in place
    of all its scores."""
    best = scores.argmax(-1, keepdim=True)
    best = world.all_gather(best, [len(best)] * world.size, "tokens")[: len(best)]
    return torch.full_like(scores, -torch.inf).scatter_(1, best, 0.0)


def spread(model: Any) -> dict[str, Any]:
    """The ranks, the bytes of experts and of all else that each holds, and what each has sent by
    label; every rank must call it."""
    others = sum(p.nbytes for p in model.parameters())
    sent = {label: t.bytes for label, t in model.grid.traffic.items()}
    mine = model.shards.nbytes, others, sent
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    held, others, sent = zip(*ranks)
    labels = sorted({label for of in sent for label in of})
    return {
        "ranks": len(ranks),
        "expert_bytes": [*held],
        "other_bytes": [*others],
        "sent": {label: [of.get(label, 0) for of in sent] for label in labels},
    }
