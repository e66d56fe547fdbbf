"""A model whose experts are spread over the ranks of a run: opened, routed in sequence parallel,
told about.

Every rank reads and holds the model without its routed experts, and its share of those. All ranks
compute attention and shared experts for all tokens, and the experts where they are. Source: AWS
Neuron's MoE guide, "Configuring TP and EP" and "Router execution in sequence parallel mode"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moelab.calibration import Calibration
from moelab.checkpoint.opening import open_checkpoint
from moelab.models import MoELayer, discover, eager, plug
from moelab.models.dialects import ROUTING, SEQUENCES
from moelab.models.identity import identity
from moelab.models.patches import Patches
from moelab.parallel import VARIANTS, Exchange, Grid, ShardedExperts, degree
from moelab.parallel.advice import Advice, advise
from moelab.parallel.eplb import balance, measure
from moelab.parallel.exchange import FEW, gather_rows

#: what a run on several ranks does if it is not told: the only way that is exact to the bit
DEFAULT = "ep-a2a"


def open_parallel(
    name_or_path: str | None = None,
    parallel: str = DEFAULT,
    tp: int | None = None,
    inner: Any = eager,
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
    inner : the executor of what is on this rank.
    calibration, spare : place experts so that these counts load all ranks alike, with so many
        replicas more (`moelab.parallel.eplb`); by default consecutive ones, none twice. For
        "blocks" all are on each rank.

    Raises ValueError: unknown variant, or a `tp` that does not fit it or the number of ranks;
    another model's calibration, or `spare` places that do not fill the ranks equally. RuntimeError:
    no connected ranks."""
    if not dist.is_initialized():
        raise RuntimeError("this process is alone; see moelab.parallel.connect and launch")
    W, reasons = dist.get_world_size(), []
    if parallel != "auto":
        degree(parallel, W, tp)  # before anything is read
    elif tp is not None:
        raise ValueError(
            f"tp is {tp}, and with auto the advice says how many ranks share an expert: leave it out"
        )
    if spare and (calibration is None or parallel in ("tp", "hidden", "blocks")):
        raise ValueError(
            f"{spare} spare places are for experts that a calibration counted, spread over ranks: "
            f"--calibration FILE, with ep, ep-a2a, ep-dedup, tp-ep or auto"
        )
    model = open_checkpoint(name_or_path, experts="external", dtype=dtype, device=device)
    counts = (
        None
        if calibration is None
        else calibration.require(identity(model), model.spec).counts().double()
    )
    if parallel == "auto":
        skewed = (
            None
            if counts is None
            else counts[calibration.imbalance().nan_to_num().argmax()].tolist()
        )
        advice = advise(model.spec, W, skewed)
        parallel, tp = _variant(advice, inner)
        reasons.append(f"{parallel}: {advice}")
    grid, way = Grid(degree(parallel, W, tp)), VARIANTS[parallel]
    layers = [layer.seam for layer in discover(model)]
    placements = [way.place(experts.num_experts, grid.ep.size) for experts in layers]
    if counts is not None and grid.ep.size > 1 and parallel != "blocks":
        before = max(measure(load, of).ratio for load, of in zip(counts.tolist(), placements))
        balanced = [balance(load, grid.ep.size, spare) for load in counts.tolist()]
        placements = [layer.placement for layer in balanced]
        reasons.append(
            f"EPLB, {spare} spare: by the calibration the fullest rank of the worst layer gets "
            f"{max(layer.ratio for layer in balanced):.2f} times the mean load, {before:.2f} in order"
        )
    executor = way(grid, placements, inner)
    model.grid, model.parallel, model.reasons = grid, parallel, reasons
    model.shards = ShardedExperts(
        layers, layers[0].source, placements, grid.ep.rank, grid.tp.rank, grid.tp.size, way.cut
    )
    plug(model, executor=executor, source=model.shards)
    return model


def _variant(advice: Advice, inner: Any) -> tuple[str, int]:
    """What does as advised, and its tp; of the ways of spreading whole experts the exact one, or
    else the one that sends the fewest rows."""
    if advice.tp == 1:
        return (DEFAULT if inner is eager else "ep-dedup"), 1
    return ("tp" if advice.ep == 1 else "tp-ep"), advice.tp


def route_in_sequence(model: Any) -> Patches:
    """Let each rank ask the routers about its share of a prompt's tokens, and gather their choices,
    until it is closed.

    Source: AWS Neuron's MoE guide, "Router execution in sequence parallel mode". Ranks need no
    longer agree about which of two equal experts is chosen. Routers that need more than hidden
    states, or return more than a choice, stay."""
    world, text = model.grid.world, model.config.get_text_config()
    probe = torch.zeros(1, model.spec.H, dtype=model.dtype, device=model.device)
    with Patches() as patches, torch.no_grad():
        for layer in discover(model) if not getattr(text, "output_router_logits", False) else ():
            try:
                fits = (
                    type(layer.router).__name__ not in {*ROUTING, *SEQUENCES}
                    and len(layer.ask(probe)) == 3
                )
            except ValueError:
                fits = False
            if fits:
                patches.wrap(layer.router, "forward", partial(_routing, layer, world))
        return patches.pop_all()


def _routing(layer: MoELayer, world: Exchange, below: Callable[..., Any]) -> Callable[..., Any]:
    def routed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= FEW:
            return below(x, *args, **kwargs)
        ids, weights = gather_rows(lambda own: layer.routing(layer.ask(own)), rows, world)
        return None, weights, ids  # nothing reads the logits

    return routed


def first_ranks(scores: torch.Tensor, world: Exchange) -> torch.Tensor:
    """Scores [B, V] of nothing but rank 0's choices, so that 8 bytes a sequence are sent in place
    of all its scores."""
    best = world.broadcast(scores.argmax(-1, keepdim=True), "tokens")
    return torch.full_like(scores, -torch.inf).scatter_(1, best, 0.0)


def spread(model: Any) -> dict[str, Any]:
    """The ranks, the bytes of experts that each holds, and what each has sent by label; every rank
    must call it."""
    W = dist.get_world_size()
    told: list[Any] = [None] * W
    dist.all_gather_object(
        told, (model.shards.nbytes, {label: t.bytes for label, t in model.grid.traffic().items()})
    )
    labels = sorted({label for _, sent in told for label in sent})
    return {
        "ranks": W,
        "expert_bytes": [held for held, _ in told],
        "sent": {label: [sent.get(label, 0) for _, sent in told] for label in labels},
    }
