"""The least time in which any schedule could run a prompt's experts: what GPU-NDP's systems are
held against.

Everything that costs a real schedule something is given away: experts are divisible without end,
all units end together, hidden states travel for nothing, and the GPU holds from the start whichever
experts fit. What is left are the rates: of the units (or of the host, if faster, as no system has
experts in both), of the link that moves weights, of the GPU.

With y_a the share of expert a on the GPU, of which x experts may be resident, T seconds are enough
only if

    Σ y_a ≤ x + T ÷ T_w      Σ y_a · gpu_a ≤ T      Σ (1 − y_a) · far_a ≤ T

The bound is the least T for which each of the first two alone leaves the third a solution: a
relaxation, and convex in x, so decode steps are bounded by their mean number of residents (Jensen).
"""

from __future__ import annotations

import numpy as np

from moelab.ndp.costs import Costs
from moelab.ndp.hardware import Hardware
from moelab.ndp.prefetch import experts_that_fit
from moelab.ndp.routing import PromptRouting


def layer_bound(tokens: np.ndarray, resident: float, costs: Costs) -> float:
    """Seconds of a layer whose experts get so many tokens each, int [A], of which `resident` may be
    on the GPU."""
    tokens = np.asarray(tokens)[np.asarray(tokens) > 0]
    return (
        min(
            _bound(far, costs.gpu(tokens), resident, costs.transfer())
            for far in (costs.unit(tokens) / costs.hardware.units, costs.cpu(tokens))
        )
        if len(tokens)
        else 0.0
    )


def _bound(far: np.ndarray, gpu: np.ndarray, resident: float, transfer: float) -> float:
    by_far = np.argsort(-far)
    by_ratio = np.argsort(-far / gpu)
    saved = np.append(0, far[by_far].cumsum())  # by the first experts that leave
    spent = np.append(0, gpu[by_ratio].cumsum())
    gained = np.append(0, far[by_ratio].cumsum())
    low = 0.0
    high = float(far.sum())
    while high - low > 1e-9 * far.sum():
        T = (low + high) / 2
        off = min(
            np.interp(resident + T / transfer, np.arange(len(saved)), saved),
            np.interp(T, spent, gained),
        )
        low, high = (T, high) if far.sum() - off > T else (low, T)
    return low


def prompt_bound(hardware: Hardware, routing: PromptRouting) -> tuple[float, float]:
    """Seconds of all experts of the prompt and of its answer, of any schedule; loading what is
    resident is free."""
    costs = Costs(routing.spec, hardware)
    D = len(routing.decode)
    K = routing.spec.K
    x = experts_that_fit(costs, len(routing.prefill) + D)
    prefill = sum(layer_bound(counts, x, costs) for counts in routing.counts())
    used = np.zeros((len(routing.history), routing.spec.E + 1))
    for layer, ids in enumerate(routing.decode.transpose(1, 0, 2)):
        used[layer] = np.bincount(ids.ravel(), minlength=routing.spec.E + 1)
    best = -np.sort(-used[:, :-1], axis=1)[:, :x].sum(1)  # uses that any x experts can serve
    routed = used[:, :-1].sum(1)
    # of layers where some token has no expert, K experts a step for as many steps as that makes: a
    # bound, too
    decode = sum(
        n / K * layer_bound(np.ones(K), K * hits / n, costs) for n, hits in zip(routed, best) if n
    )
    return float(prefill), float(decode)
