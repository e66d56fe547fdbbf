"""A model whose experts are spread over the ranks of a run.

Every rank reads and holds the model without its routed experts, and its share of those. All ranks
compute attention, routers and shared experts for all tokens, and the experts where they are.
Source: AWS Neuron's MoE guide, "Configuring TP and EP"."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moelab.checkpoint.opening import open_checkpoint
from moelab.experts.executor import Executor
from moelab.models import discover, plug
from moelab.parallel import VARIANTS, degree
from moelab.parallel.exchange import Exchange, Grid
from moelab.parallel.sharding import ShardedExperts
from moelab.static.parallelism import Parallelism, choose

#: the default of a run on several ranks: the only way that is exact to the bit
DEFAULT = "ep-a2a"


def open_parallel(
    name_or_path: str | None = None,
    parallel: str = DEFAULT,
    tp: int | None = None,
    inner: Executor | None = None,
    dtype: Any = "auto",
    device: torch.device | str | None = None,
) -> Any:
    """Open a model with this rank's share of the experts, `.shards`, of the ranks `.grid`; every
    rank must call it.

    parallel : a key of `moelab.parallel.VARIANTS`, or "auto": what `moelab.static.parallelism` says
        for these ranks. The model's `.parallel` is the key.
    tp : ranks that share an expert: all for "tp", by default 2 for "tp-ep", 1 for the others.
    inner : the executor of what is on this rank; None computes as transformers does.

    Raises ValueError: unknown variant, or a `tp` that does not fit it or the number of ranks.
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
        parallel, tp = _variant(choose(model.spec, W), inner)
    grid = Grid(degree(parallel, W, tp))
    layers = [layer.seam for layer in discover(model)]
    model.grid = grid
    model.parallel = parallel
    model.shards = ShardedExperts(
        layers, layers[0].source, grid.ep.rank, grid.ep.size, grid.tp.rank, grid.tp.size
    )
    plug(model, executor=VARIANTS[parallel](grid, inner), source=model.shards)
    return model


def _variant(advice: Parallelism, inner: Executor | None) -> tuple[str, int]:
    """What does as advised, and its tp; of the ways of spreading whole experts the exact one, or
    else the one that sends the fewest rows."""
    if advice.tp == 1:
        return ("ep-dedup" if inner else DEFAULT), 1
    return ("tp" if advice.ep == 1 else "tp-ep"), advice.tp


def first_ranks(scores: torch.Tensor, world: Exchange) -> torch.Tensor:
    """Scores [B, V] of nothing but rank 0's choices, so that 8 bytes a sequence are sent in place
    of all its scores."""
    best = scores.argmax(-1, keepdim=True)
    best = world.all_gather(best, [len(best)] * world.size, "tokens")[: len(best)]
    return torch.full_like(scores, -torch.inf).scatter_(1, best, 0.0)


def spread(model: Any) -> dict[str, Any]:
    """The ranks, the bytes of experts that each holds, and what each has sent by label; every rank
    must call it."""
    mine = model.shards.nbytes, {label: t.bytes for label, t in model.grid.traffic.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    labels = sorted({label for _, sent in ranks for label in sent})
    return {
        "ranks": len(ranks),
        "expert_bytes": [held for held, _ in ranks],
        "sent": {label: [sent.get(label, 0) for _, sent in ranks] for label in labels},
    }
