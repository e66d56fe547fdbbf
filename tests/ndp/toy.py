"""Small models, machines and routings for tests of the GPU-NDP simulation."""

from __future__ import annotations

import numpy as np

from moelab.base.specs import MoESpec
from moelab.ndp.costs import Costs
from moelab.ndp.hardware import Hardware
from moelab.ndp.plans import LayerStep
from moelab.ndp.routing import PromptRouting


def spec(L: int = 2, E: int = 8, K: int = 2, H: int = 512, I: int = 1024, **changes) -> MoESpec:
    return MoESpec(
        "toy",
        "toy",
        L,
        tuple(range(L)),
        E,
        K,
        H,
        I,
        heads=4,
        kv_heads=2,
        head_dim=64,
        vocab=1000,
        **changes,
    )


def machine(units: int = 2, **changes) -> Hardware:
    """Round rates: link 10 GB/s, units 10 GB/s and 5 G multiplications/s, host 20 GB/s, GPU 100
    GB/s."""
    figures = {
        "gpu_memory": 1e9,
        "gpu_bandwidth": 1e11,
        "gpu_flops": 1e13,
        "link": 1e10,
        "host_memory": 1e10,
        "host_bandwidth": 2e10,
        "host_flops": 1e11,
        "unit_memory": 1e9,
        "unit_bandwidth": 1e10,
        "unit_macs": 5e9,
    }
    return Hardware("toy machine", units, **(figures | changes))


def costs(units: int = 2, **changes) -> Costs:
    return Costs(spec(**changes), machine(units))


def step(tokens, homes=None, resident=None, S: int = 1) -> LayerStep:
    n = len(tokens)
    return LayerStep(
        np.arange(n),
        np.array(tokens),
        np.array(homes if homes is not None else [0] * n),
        np.array(resident if resident is not None else [False] * n, bool),
        S,
        S == 1,
    )


def routing(prefill, decode, history=None, **changes) -> PromptRouting:
    """From nested lists [S][L][K] and [D][L][K]."""
    prefill, decode = np.array(prefill, np.int16), np.array(decode, np.int16)
    its = spec(L=prefill.shape[1], K=prefill.shape[2], **changes)
    history = np.ones((its.L, its.E)) if history is None else np.array(history, float)
    return PromptRouting(its, prefill, decode, history)
