"""Many tokens on a GPU: one product for up and one for down over all experts that are hit.

Source: MegaBlocks (Gale et al. 2023); transformers' "grouped_mm", whose sums these are.

    choices sorted by group, on the GPU    x [n, H]  →  up [n, 2I]  →  gate  →  down [n, H]  →  Σ over K

The gate and the weighing are the architecture's own. The host launches and never waits: it does not
know how many rows an expert has. Where weights lie at equal distances (a module's own, or an
engine's slots), torch multiplies them; where they do not, are packed, or torch's kernel is not for
this GPU, Triton's kernels do, from addresses. Left out: experts that are not `plain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.experts.executor import names, plain
from moelab.experts.located import banks, locate
from moelab.kernels.products import KINDS, Matrices

#: of torch's kernel: groups at most; bytes, of which addresses, rows and steps are multiples
GROUPS = 1023
ALIGN = 16
#: compute capabilities that torch has a kernel for; on others it waits for the GPU and loops
HOPPER_AND_BLACKWELL = (9, 10)
TOKENS = 4096  # at a time, so that what is between the products stays small

grouped_mm = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))


def feed_forward(x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor | None:
    """x [T, H], ids and weights [T, K] → [T, H]; None where torch has no kernel for these experts.

    An id that is no expert's, 0 to E, makes its token's result NaN: a GPU cannot raise an error
    without being waited for."""
    source = experts.source
    hit = range(experts.num_experts) if source is None else getattr(source, "computing", ())
    if not plain(experts) or not len(hit):
        return None
    found = locate(experts, np.array(hit, np.int64), x.dtype, x.device.type)
    together = found and _multiplies(found, x) and _together(experts, found, hit, x)
    if not together:
        return None
    wrong = (ids < 0) | (ids > experts.num_experts)
    given = x, ids.masked_fill(wrong, 0), weights.masked_fill(wrong, torch.nan)
    parts = zip(*(of.split(TOKENS) for of in given))
    return torch.cat([_compute(*part, experts, *together) for part in parts])


def _compute(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Any,
    banks: list[Tensor],
    group: Tensor | None,
) -> Tensor:
    (T, K), G = ids.shape, len(banks[0])
    flat = ids.flatten() if group is None else group[ids.flatten()]
    flat, order = torch.sort(flat, stable=True)  # those of no group come last, and are not computed
    groups = torch.arange(G, device=x.device)
    ends = torch.searchsorted(flat, groups, right=True, out_int32=True)
    there, flat = flat < G, flat.clamp(max=G - 1)

    def product(rows: Tensor, bank: Tensor, bias: Tensor | None = None) -> Tensor:
        y = grouped_mm(rows, bank if experts.is_transposed else bank.mT, offs=ends)
        return y if bias is None else y + bias[flat]

    h = experts.activate(product(x[order // K], *banks[::2]))
    y = product(h.contiguous(), *banks[1::2])
    y = torch.where(there[:, None], y * weights.flatten()[order, None], 0)
    return torch.empty_like(y).index_copy_(0, order, y).view(T, K, -1).sum(1).to(x.dtype)


def _multiplies(found: tuple[Matrices, Matrices], x: Tensor) -> bool:
    """Whether torch has a kernel for matrices of this type on this device."""
    known = grouped_mm is not None and all(of.kind is KINDS.get(x.dtype) for of in found)
    if not known or x.is_cpu:
        return known
    newer = torch.cuda.get_device_capability(x.device)[0] in HOPPER_AND_BLACKWELL
    return newer and x.dtype == torch.bfloat16


def _together(
    experts: Any, found: tuple[Matrices, Matrices], hit: Sequence[int], x: Tensor
) -> tuple[list[Tensor], Tensor | None] | None:
    """Up, down and their biases [G, …], at equal distances, and each expert's group, int64 [E + 1]: G
    of one that is not there, None for its own number. None where they lie otherwise, or not as
    torch's kernel reads them."""
    parts = [name + suffix for suffix in ("", "_bias") for name in names(experts)]
    parts, group = parts[: 4 if experts.has_bias else 2], None
    if experts.source is None:
        seen = [banks(experts, part) for part in parts]
    else:
        memory, step = experts.source.memory
        at = np.stack([of.rows[:, column] for column in (0, 2) for of in found])[: len(parts)]
        first = at[:, at[0].argmin()]
        groups, off = np.divmod(at - first[:, None], step)
        G = int(groups.max()) + 1
        if off.any() or (groups != groups[0]).any() or (first % ALIGN).any() or step % ALIGN:
            return None
        table = np.full(experts.num_experts + 1, G)
        table[list(hit)] = groups[0]
        group = _sent(torch.from_numpy(table), x.device)
        seen = []
        for part, begin in zip(parts, (first - memory.data_ptr()).tolist()):
            shape = experts.shapes[part]
            strides = step // x.itemsize, *torch.empty(shape, device="meta").stride()
            seen.append(memory[begin:].view(x.dtype).as_strided((G, *shape), strides))
    return (seen, group) if all(map(_aligned, seen[:2])) else None


def _sent(table: Tensor, device: torch.device) -> Tensor:
    """On the GPU, in order with what it computes: from pageable memory the copy might wait for it."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def _aligned(bank: Tensor) -> bool:
    """Whether torch's kernel takes matrices [G, rows, columns], in either direction."""
    whole = ALIGN // bank.itemsize
    steps = *bank.shape[1:], *bank.stride()[:2]
    fits = bank.stride(2) == 1 and not any(n % whole for n in steps)
    return fits and len(bank) <= GROUPS and bank.data_ptr() % ALIGN == 0
