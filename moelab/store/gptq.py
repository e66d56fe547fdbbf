"""Rounding that looks at data: codes and scales that keep a matrix's products, not its weights.

Sources: Frantar et al. 2023, GPTQ (algorithm 1, with scales fixed beforehand and columns in order of
their inputs' size); llama.cpp's `make_qx_quants` (scales tried around the naive one, then those of
least squares for the best one's codes).

Of inputs x with second moments H = Σ xxᵀ a row's error is (w − ŵ)ᵀ H (w − ŵ). First each group's
scale is searched, a column weighted by 1 / (H⁻¹)ⱼⱼ: what is left of its error when the others make
up for it. Then columns are rounded one by one, and each one's error is fed back into those that
are still to come, by the Cholesky factor of H⁻¹.

Shapes: weights [R, n]; H [n, n], or [n] where only its diagonal is known; scales [R, n/32]; values
[R, n] in units of their scales."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 of a code is the sign
INTEGERS = {"int8": (-127, 127), "int4": (-8, 7)}
#: of the naive scale, that are tried; below zero, int4's widest weight gets 7
FACTORS = (1.0, 1.5, 1.07, 0.95, 0.9, 0.85, 0.8, 0.7, -1.14, -1.07, -1.0, -0.95, -0.9, -0.85, -0.8)
DAMPING = 0.03  # of H's mean diagonal, added to all of it
COLUMNS = 128  # are rounded before their errors reach all that are behind them
TINY = 2.0**-126


def fit(
    kind: str, w: Tensor, naive: Tensor, moments: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """(values, scales) of finite fp32 weights; no row's error is larger than that of rounding to
    nearest with the `naive` scales. Scales are numbers of a dtype; those of fp8, which rows share, are
    kept."""
    full = moments.dim() > 1
    size = moments.diagonal() if full else moments
    moments = moments / size.mean().clamp_min(TINY)
    scales = naive
    inverse = None
    weight = size
    if full:
        damped = moments + DAMPING * torch.eye(len(size), dtype=moments.dtype)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        weight = 1 / inverse.diagonal()
    if kind != "fp8":
        scales = _search(kind, w, naive, weight, dtype)
    plain = rounded(kind, w, spread(naive))
    if full:
        values = _feed_back(kind, w, spread(scales), size, inverse)
    else:
        values = rounded(kind, w, spread(scales))
    better = (_error(w, values, scales, moments) <= _error(w, plain, naive, moments))[:, None]
    return torch.where(better, values, plain), torch.where(better, scales, naive)


def naive_scales(kind: str, w: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The scales [R, n/32] that give each group's widest weight, int4's first one of several, its
    widest code."""
    groups = w.unflatten(1, (-1, GROUP))
    sizes = groups.abs()
    widest = sizes.amax(2)
    if kind == "mxfp4":
        return (_power(widest) / 4).clamp_min(TINY / 2)
    if kind == "int4":
        widest = groups.gather(2, sizes.argmax(2, keepdim=True))[..., 0]
    return (widest / (-8 if kind == "int4" else 127)).to(dtype).float()


def rounded(kind: str, w: Tensor, scales: Tensor) -> Tensor:
    """Of weights, each with its scale, the nearest values of a kind's codes, of two the even code's."""
    w = w / scales.masked_fill(scales == 0, torch.inf)
    if kind == "fp8":
        return w.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    if kind == "mxfp4":
        step = _power(w).clamp_min(1) / 2
        return ((w / step).round() * step).clamp(-6, 6)
    return w.round().clamp(*INTEGERS[kind])


def _power(w: Tensor) -> Tensor:
    """The largest power of two that is at most |w|; 0 below `TINY`."""
    return (w.view(torch.int32) & 0x7F800000).view(torch.float32)


def spread(scales: Tensor) -> Tensor:
    """Scales, one for each weight [R, n]."""
    return scales.repeat_interleave(GROUP, 1)


def _error(w: Tensor, values: Tensor, scales: Tensor, moments: Tensor) -> Tensor:
    d = values * spread(scales) - w
    return ((d @ moments if moments.dim() > 1 else d * moments) * d).sum(1)


def _search(kind: str, w: Tensor, naive: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each group that makes Σ weight · (w − ŵ)² least, of those that are tried."""
    groups = w.unflatten(1, (-1, GROUP))
    weight = weight.view(-1, GROUP)
    best = fitted = naive  # least squares for the codes of the best
    least = torch.full_like(naive, torch.inf)
    for factor in (*FACTORS, None, None):
        scales = fitted if factor is None else naive * factor
        if kind == "mxfp4":
            scales = scales.abs().clamp_min(TINY).log2().round().exp2()
        scales = scales.to(dtype).float()
        values = rounded(kind, groups, scales[..., None])
        error = ((values * scales[..., None] - groups).square() * weight).sum(2)
        better = error < least
        square = (values.square() * weight).sum(2).clamp_min(TINY)
        fitted = torch.where(better, (values * groups * weight).sum(2) / square, fitted)
        least = torch.where(better, error, least)
        best = torch.where(better, scales, best)
    return best


def _feed_back(kind: str, w: Tensor, scales: Tensor, size: Tensor, inverse: Tensor) -> Tensor:
    """Values of columns that are rounded one by one, those of the largest inputs first; scales [R, n]."""
    order = size.argsort(descending=True, stable=True)
    factor = torch.linalg.cholesky(inverse[order][:, order], upper=True)
    left = w[:, order]
    scales = scales[:, order]
    values = torch.empty_like(left)
    for begin in range(0, len(size), COLUMNS):
        end = min(begin + COLUMNS, len(size))
        for j in range(begin, end):
            values[:, j] = rounded(kind, left[:, j], scales[:, j])
            # what is left becomes its error
            left[:, j] = (left[:, j] - values[:, j] * scales[:, j]) / factor[j, j]
            left[:, j + 1 : end] -= left[:, j, None] * factor[j, j + 1 : end]
        left[:, end:] -= left[:, begin:end] @ factor[begin:end, end:]
    return values[:, order.argsort()]
