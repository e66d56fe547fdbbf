"""A model whose experts are spread over the ranks of a run.

Every rank reads and holds the model without its routed experts, and its share of those. All ranks
compute attention, routers and shared experts for all tokens, and the experts where they are.
Source: AWS Neuron's MoE guide, "Configuring TP and EP"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moelab.calibration import Calibration
from moelab.checkpoint.opening import open_checkpoint
from moelab.experts.executor import Executor
from moelab.models import discover, plug
from moelab.models.identity import identity
from moelab.parallel import VARIANTS, Exchange, Grid, Placement, ShardedExperts, degree
from moelab.parallel.advice import Advice, advise
from moelab.parallel.eplb import balance, measure

#: what a run on several ranks does if it is not told: the only way that is exact to the bit
DEFAULT = "ep-a2a"


def open_parallel(
    name_or_path: str | None = None,
    parallel: str = DEFAULT,
    tp: int | None = None,
    inner: Executor | None = None,
    dtype: Any = "auto",
    device: torch.device | str | None = None,
    calibration: Calibration | None = None,
    spare: int = 0,
) -> Any:
    """Open a model with this rank's share of the experts, `.shards`, of the ranks `.grid`; every
    rank must call it.

    parallel : a key of `moelab.parallel.VARIANTS`, or "auto": what `moelab.parallel.advice` says
        for these ranks. The model's `.parallel` is the key, `.reasons` are lines that say why.
    tp : ranks that share an expert: all for "tp", by default 2 for "tp-ep", 1 for the others.
    inner : the executor of what is on this rank; None computes as transformers does.
    calibration, spare : place experts so that these counts load all ranks alike, with so many
        replicas more (`moelab.parallel.eplb`); by default consecutive ones, none twice.

    Raises ValueError: unknown variant, or a `tp` that does not fit it or the number of ranks;
    another model's calibration, or `spare` places that do not fill the ranks equally. RuntimeError:
    no connected ranks."""
    if not dist.is_initialized():
        raise RuntimeError("this process is alone; see moelab.parallel.connect and launch")
    W, counts, reasons = dist.get_world_size(), None, []
    _check(parallel, W, tp, calibration, spare)  # before anything is read
    model = open_checkpoint(name_or_path, experts="external", dtype=dtype, device=device)
    if calibration is not None:
        counts = calibration.require(identity(model), model.spec).counts().double().tolist()
    if parallel == "auto":
        skewed = counts and counts[calibration.imbalance().nan_to_num().argmax()]
        advice = advise(model.spec, W, skewed)
        parallel, tp = _variant(advice, inner)
        reasons.append(f"{parallel}: {advice}")
    grid = Grid(degree(parallel, W, tp))
    layers = [layer.seam for layer in discover(model)]
    placements = [Placement.consecutive(of.num_experts, grid.ep.size) for of in layers]
    if counts is not None and grid.ep.size > 1:
        placements, reason = _balanced(counts, placements, spare)
        reasons.append(reason)
    model.grid, model.parallel, model.reasons = grid, parallel, reasons
    model.shards = ShardedExperts(
        layers, layers[0].source, placements, grid.ep.rank, grid.tp.rank, grid.tp.size
    )
    plug(model, executor=VARIANTS[parallel](grid, placements, inner), source=model.shards)
    return model


def _check(
    parallel: str, W: int, tp: int | None, calibration: Calibration | None, spare: int
) -> None:
    if parallel != "auto":
        degree(parallel, W, tp)
    elif tp is not None:
        raise ValueError(
            f"tp is {tp}, and with auto the advice says how many ranks share an expert: leave it out"
        )
    if spare and (calibration is None or parallel == "tp"):
        raise ValueError(
            f"{spare} spare places are for experts that a calibration counted, spread over ranks: "
            f"--calibration FILE, with ep, ep-a2a, ep-dedup, tp-ep or auto"
        )


def _variant(advice: Advice, inner: Executor | None) -> tuple[str, int]:
    """What does as advised, and its tp; of the ways of spreading whole experts the exact one, or
    else the one that sends the fewest rows."""
    if advice.tp == 1:
        return ("ep-dedup" if inner else DEFAULT), 1
    return ("tp" if advice.ep == 1 else "tp-ep"), advice.tp


def _balanced(
    counts: list[list[float]], placements: Sequence[Placement], spare: int
) -> tuple[list[Placement], str]:
    """EPLB's placement of each layer by counts [L, E], and a line that says what it gains."""
    before = max(measure(load, of).ratio for load, of in zip(counts, placements))
    balanced = [balance(load, len(of.devices), spare) for load, of in zip(counts, placements)]
    return [layer.placement for layer in balanced], (
        f"EPLB, {spare} spare: by the calibration the fullest rank of the worst layer gets "
        f"{max(layer.ratio for layer in balanced):.2f} times the mean load, {before:.2f} in order"
    )


def first_ranks(scores: torch.Tensor, world: Exchange) -> torch.Tensor:
    """Scores [B, V] of nothing but rank 0's choices, so that 8 bytes a sequence are sent in place
    of all its scores."""
    best = world.broadcast(scores.argmax(-1, keepdim=True), "tokens")
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
