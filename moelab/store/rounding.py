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

from collections.abc import Callable

import torch
from torch import Tensor

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 of a code is the sign
FACTORS = (1.0, 1.5, 1.14, 1.07, 0.95, 0.9, 0.85, 0.8, 0.7)  # of the naive scale, that are tried
DAMPING = 0.01  # of H's mean diagonal, added to all of it
COLUMNS = 128  # are rounded before their errors reach all that are behind them
TINY = 2.0**-126


def _integers(low: int, high: int) -> Callable[[Tensor], Tensor]:
    return lambda w: w.round().clamp(low, high)


def _e4m3(w: Tensor) -> Tensor:
    return w.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _e2m1(w: Tensor) -> Tensor:
    values = torch.tensor(E2M1)
    return values[torch.bucketize(w.abs(), (values[1:] + values[:-1]) / 2)].copysign(w)


def _bf16(scales: Tensor) -> Tensor:
    return scales.bfloat16().float()


def _fp16(scales: Tensor) -> Tensor:
    return scales.half().float()


def _power(scales: Tensor) -> Tensor:
    return scales.abs().clamp_min(TINY).log2().round().exp2()


#: kind → (the nearest values of codes, scales as they are stored); None: scales are not searched
KINDS: dict[str, tuple[Callable, Callable | None]] = {
    "int8": (_integers(-127, 127), _bf16),
    "fp8": (_e4m3, None),
    "mxfp4": (_e2m1, _power),
    "int4": (_integers(-8, 7), _bf16),
    "Q8_0": (_integers(-127, 127), _fp16),
    "Q4_0": (_integers(-8, 7), _fp16),
}


def fit(kind: str, w: Tensor, naive: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """(values, scales) of finite fp32 weights; no row's error is larger than that of rounding to
    nearest with the `naive` scales."""
    nearest, stored = KINDS[kind]
    full = moments.dim() > 1
    size = moments.diagonal() if full else moments
    moments = moments / size.mean().clamp_min(TINY)
    scales, inverse = naive, None
    if full:
        inverse = torch.cholesky_inverse(
            torch.linalg.cholesky(moments + DAMPING * torch.eye(len(size)))
        )
    if stored:
        scales = _search(w, naive, 1 / inverse.diagonal() if full else size, nearest, stored)
    plain = nearest(_scaled(w, spread(naive)))
    values = (
        _feed_back(w, spread(scales), size, inverse, nearest)
        if full
        else nearest(_scaled(w, spread(scales)))
    )
    better = (_error(w, values, scales, moments) <= _error(w, plain, naive, moments))[:, None]
    return torch.where(better, values, plain), torch.where(better, scales, naive)


def spread(scales: Tensor) -> Tensor:
    """Scales, one for each weight [R, n]."""
    return scales.repeat_interleave(GROUP, 1)


def _scaled(w: Tensor, scales: Tensor) -> Tensor:
    return w / scales.masked_fill(scales == 0, torch.inf)


def _error(w: Tensor, values: Tensor, scales: Tensor, moments: Tensor) -> Tensor:
    d = values * spread(scales) - w
    return ((d @ moments if moments.dim() > 1 else d * moments) * d).sum(1)


def _search(
    w: Tensor, naive: Tensor, weight: Tensor, nearest: Callable, stored: Callable
) -> Tensor:
    """The scale of each group that makes Σ weight · (w − ŵ)² least, of those that are tried."""
    groups, weight = w.unflatten(1, (-1, GROUP)), weight.view(-1, GROUP)
    best, least = naive, torch.full_like(naive, torch.inf)
    fitted = naive  # least squares for the codes of the best

    def attempt(scales: Tensor) -> None:
        nonlocal best, least, fitted
        values = nearest(_scaled(groups, scales[..., None]))
        error = ((values * scales[..., None] - groups).square() * weight).sum(2)
        square = (values.square() * weight).sum(2).clamp_min(TINY)
        better = error < least
        fitted = torch.where(better, (values * groups * weight).sum(2) / square, fitted)
        least, best = torch.where(better, error, least), torch.where(better, scales, best)

    for factor in FACTORS:
        attempt(stored(naive * factor))
        attempt(stored(naive * -factor))
    for _ in range(2):
        attempt(stored(fitted))
    return best


def _feed_back(
    w: Tensor, scales: Tensor, size: Tensor, inverse: Tensor, nearest: Callable
) -> Tensor:
    """Values of columns that are rounded one by one, those of the largest inputs first; scales [R, n]."""
    order = size.argsort(descending=True, stable=True)
    factor = torch.linalg.cholesky(inverse[order][:, order], upper=True)
    left, scales = w[:, order], scales[:, order]
    values = torch.empty_like(left)
    for begin in range(0, len(size), COLUMNS):
        end = min(begin + COLUMNS, len(size))
        for j in range(begin, end):
            values[:, j] = nearest(_scaled(left[:, j], scales[:, j]))
            left[:, j] = (left[:, j] - values[:, j] * scales[:, j]) / factor[
                j, j
            ]  # becomes its error
            left[:, j + 1 : end] -= left[:, j, None] * factor[j, j + 1 : end]
        left[:, end:] -= left[:, begin:end] @ factor[begin:end, end:]
    return values[:, order.argsort()]
