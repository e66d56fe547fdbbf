"""Many tokens on a GPU: one product for up and one for down over all experts that are hit.

Source: MegaBlocks (Gale et al. 2023); transformers' "grouped_mm", whose sums these are.

    choices sorted by group, on the GPU    x [n, H]  →  up [n, 2I]  →  gate  →  down [n, H]  →  Σ over K

The gate and the weighing are the architecture's own. The host launches and never waits: it does not
know how many rows an expert has. For weights that a module holds together, on GPUs that torch has a
kernel for; elsewhere `moelab.experts.gemm_triton` multiplies, from addresses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelab.experts.located import banks, parts_of

#: of torch's kernel: groups at most; bytes, of which addresses, rows and steps are multiples
GROUPS = 1023
ALIGN = 16
#: compute capabilities that torch has a kernel for, of bf16; on others it waits for the GPU and loops
NEWER = (9, 10)
TOKENS = 4096  # at a time, so that what is between the products stays small

grouped_mm = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))


def feed_forward(x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor | None:
    """x [T, H], ids and weights [T, K] → [T, H] of plain experts of a module; None where torch has no
    kernel for them.

    An id that is no expert's, 0 to E, makes its token's result NaN: a GPU cannot raise an error
    without being waited for."""
    if grouped_mm is None:
        return None
    held = [banks(experts, part) for part in parts_of(experts)]
    if any(bank is None or bank.dtype != x.dtype or bank.device != x.device for bank in held):
        return None
    if not all(_multiplied(bank) for bank in held if bank.dim() == 3):
        return None
    wrong = (ids < 0) | (ids > experts.num_experts)
    given = x, ids.masked_fill(wrong, 0), weights.masked_fill(wrong, torch.nan)
    n = len(held) // 2
    parts = zip(*(of.split(TOKENS) for of in given))
    return torch.cat([_compute(*part, experts, held[:n], held[n:]) for part in parts])


def _compute(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Any,
    up: list[Tensor],
    down: list[Tensor],
) -> Tensor:
    (T, K), E = ids.shape, experts.num_experts
    found, order = torch.sort(ids.flatten(), stable=True)  # nobody's are last, and not computed
    each = torch.arange(E, device=x.device)
    ends = torch.searchsorted(found, each, right=True, out_int32=True)
    there, found = found < E, found.clamp(max=E - 1)

    def product(rows: Tensor, bank: Tensor, bias: Tensor | None = None) -> Tensor:
        y = grouped_mm(rows, bank if experts.is_transposed else bank.mT, offs=ends)
        return y if bias is None else y + bias[found]

    y = product(experts.activate(product(x[order // K], *up)).contiguous(), *down)
    y = torch.where(there[:, None], y * weights.flatten()[order, None], 0)
    return torch.empty_like(y).index_copy_(0, order, y).view(T, K, -1).sum(1).to(x.dtype)


def _multiplied(bank: Tensor) -> bool:
    """Whether torch has a kernel for matrices [E, rows, columns], in either direction."""
    whole = ALIGN // bank.itemsize
    steps = *bank.shape[1:], *bank.stride()[:2]
    fits = bank.stride(2) == 1 and not any(n % whole for n in steps)
    if not fits or len(bank) > GROUPS or bank.data_ptr() % ALIGN:
        return False
    newer = not bank.is_cuda or torch.cuda.get_device_capability(bank.device)[0] in NEWER
    return newer and (bank.dtype == torch.bfloat16 or not bank.is_cuda)
