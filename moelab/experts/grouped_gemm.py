"""Many tokens on a GPU: one product for up and one for down over all experts that are hit.

Source: MegaBlocks (Gale et al. 2023); transformers' "grouped_mm", whose sums these are.

    choices sorted by group, on the GPU    x [n, H]  →  up [n, 2I]  →  gate  →  down [n, H]  →  Σ over K

The gate and the weighing are the architecture's own. The host launches and never waits: it does not
know how many rows an expert has. Where weights lie at equal distances (a module's own, or an
engine's slots), torch multiplies them; where they do not, are packed, or torch's kernel is not for
this GPU, Triton's kernels do, from addresses. Left out: experts that are not `plain`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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


class Stacked(NamedTuple):
    """Experts at equal distances: up and down [G, rows, columns], biases [G, rows] or None.

    group : int64 [E + 1], of each expert; G of one that is not there. None: its own number."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    group: Tensor | None


def feed_forward(x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor | None:
    """x [T, H], ids and weights [T, K] → [T, H]; None where no kernel is for these experts.

    An id that is no expert's, 0 to E, makes its token's result NaN: a GPU cannot raise an error
    without being waited for."""
    source = experts.source
    hit = range(experts.num_experts)
    if source is not None:
        hit = source.computing(experts.layer) if hasattr(source, "computing") else ()
    if not plain(experts) or not len(hit):
        return None
    chosen = np.array(hit, np.int64)
    found = locate(experts, chosen, x.dtype, x.device.type)
    if found is None:
        return None
    wrong = (ids < 0) | (ids > experts.num_experts)
    given = ids.masked_fill(wrong, 0), weights.masked_fill(wrong, torch.nan)
    stacked = _stacked(experts, found, chosen, x)
    if stacked is None:
        return None
    parts = (of.split(TOKENS) for of in (x, *given))
    return torch.cat([_by_torch(*part, experts, stacked) for part in zip(*parts)])


def _by_torch(x: Tensor, ids: Tensor, weights: Tensor, experts: Any, of: Stacked) -> Tensor:
    (T, K), G = ids.shape, len(of.up)
    flat = ids.flatten() if of.group is None else of.group[ids.flatten()]
    flat, order = torch.sort(flat, stable=True)  # those of no group come last, and are not computed
    groups = torch.arange(G, device=x.device)
    ends = torch.searchsorted(flat, groups, right=True, out_int32=True)
    there, flat = flat < G, flat.clamp(max=G - 1)

    def product(rows: Tensor, bank: Tensor, bias: Tensor | None) -> Tensor:
        y = grouped_mm(rows, bank if experts.is_transposed else bank.mT, offs=ends)
        return y if bias is None else y + bias[flat]

    h = product(x[order // K], of.up, of.up_bias)
    y = product(experts.activate(h).contiguous(), of.down, of.down_bias)
    y = torch.where(there[:, None], y * weights.flatten()[order, None], 0)
    return torch.empty_like(y).index_copy_(0, order, y).view(T, K, -1).sum(1).to(x.dtype)


def _stacked(
    experts: Any, found: tuple[Matrices, Matrices], chosen: np.ndarray, x: Tensor
) -> Stacked | None:
    """Located experts as torch's kernel takes them; None if it does not."""
    if grouped_mm is None or any(of.kind is not KINDS.get(x.dtype) for of in found):
        return None
    if x.is_cuda and (
        x.dtype != torch.bfloat16
        or torch.cuda.get_device_capability(x.device)[0] not in HOPPER_AND_BLACKWELL
    ):
        return None
    suffixes = ("", "_bias") if experts.has_bias else ("",)
    parts = [name + suffix for suffix in suffixes for name in names(experts)]
    group = None
    if experts.source is None:
        views = [banks(experts, part) for part in parts]
    else:
        addresses = [of.rows[:, column] for column in (0, 2)[: len(suffixes)] for of in found]
        shapes = [experts.shapes[part] for part in parts]
        memory, step = experts.source.memory
        seen = [_seen(memory, step, *of, x.dtype) for of in zip(addresses, shapes)]
        views, places = zip(*seen)
        if any(one is None or (one != places[0]).any() for one in places):
            return None
        table = np.full(experts.num_experts + 1, len(views[0]))
        table[chosen] = places[0]
        group = torch.from_numpy(table).to(x.device, non_blocking=True)
    if not all(map(_aligned, views[:2])):
        return None
    return Stacked(*views[:2], *(views[2:] or (None, None)), group)


def _seen(
    memory: Tensor, step: int, addresses: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor | None, np.ndarray | None]:
    """Memory, uint8, that has a tensor of this shape every `step` bytes: [G, *shape], from the first
    of the addresses to the last, and where each of them is; None where they lie otherwise."""
    first = int(addresses.min())
    places, off = np.divmod(addresses - first, step)
    if off.any() or places.max() >= GROUPS or first % ALIGN or step % ALIGN:
        return None, None
    begin, n = first - memory.data_ptr(), dtype.itemsize
    within = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    reached = memory[begin : begin + int(places.max()) * step + math.prod(shape) * n]
    strides = step // n, *within
    return reached.view(dtype).as_strided((int(places.max()) + 1, *shape), strides), places


def _aligned(bank: Tensor) -> bool:
    """Whether torch's kernel takes matrices [G, rows, columns], in either direction."""
    whole = ALIGN // bank.itemsize
    steps = *bank.shape[1:], *bank.stride()[:2]
    fits = bank.stride(2) == 1 and not any(n % whole for n in steps)
    return fits and len(bank) <= GROUPS and bank.data_ptr() % ALIGN == 0
