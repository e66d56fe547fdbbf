"""How often a decode step needs the expert of each rank (ZipMoE §3.4, App. D)."""

from __future__ import annotations

import torch

from moelab.trace import DECODE, RoutingTrace, counted


def inclusion_probabilities(trace: RoutingTrace, batch: int = 1) -> torch.Tensor:
    """f_r, the share of decode steps that need the expert of rank r, for `batch` sequences (ZipMoE
    §3.4, App. D).

    Sequences 0 … b−1 decode together, then b … 2b−1, and so on; a step is the union of the experts
    that their i-th decode tokens activate, and counts while all b still decode. float64 [L, E],
    falling along the ranks; summed over ranks, the mean number of distinct experts a step.
    ValueError: no `batch` sequences decode together in the trace."""
    decode = trace.phase == DECODE
    sequence = trace.sequence[decode].long()
    position = trace.position[decode].long()
    ids = trace.ids[decode]
    groups = trace.sequences // batch if batch > 0 else 0
    # the i-th decode token of a sequence, however long its prompt was: position less the sequence's
    # first one
    first = torch.full((trace.sequences,), torch.iinfo(torch.int64).max).scatter_reduce_(
        0, sequence, position, "amin"
    )
    group = sequence // max(batch, 1)
    step = position - first[sequence]
    steps = int(step.max()) + 1 if len(step) else 0
    kept = group < groups
    where = (group * steps + step)[kept]
    ids = ids[kept]
    full = torch.bincount(where, minlength=groups * steps) == batch  # every sequence still decodes
    if not full.any():
        raise ValueError(
            f"no {batch} sequences decode together in this trace of {trace.sequences} sequences and "
            f"{len(sequence)} decode tokens; choose a smaller batch of at least 1, or record more"
        )
    layers = (
        counted(ids[:, l : l + 1], trace.spec.E, where, groups * steps)[full, 0]
        for l in range(trace.spec.L)
    )
    f = torch.stack([(counts > 0).double().mean(0) for counts in layers])
    return f.sort(1, descending=True).values
