"""Planning and scheduling: Algorithm 1 beside the exact optimum, and the time of ordering and planning.

Random small instances are solved exactly and by Algorithm 1, whose makespan Theorem 3.1 bounds by (3 − 1/L) times the
optimum. Timed: orders of eight experts of mixed states, and a plan for 128 experts with popularity ~ 1/rank.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import numpy as np

from moelab.arguments import whole
from moelab.bench.measure import seconds
from moelab.cache.planning import plan
from moelab.cache.residency import Request
from moelab.cache.selection import inclusion, selection_probabilities
from moelab.schedule.affinity import order, schedule
from moelab.schedule.optimum import ratio_study
from moelab.schedule.requests import Delays
from moelab.specs import ExpertKey, State

E, K, MB = 128, 8, 1_000_000
#: of an expert of 9.4 MB: a disk of 2 GB/s, one thread that decodes 3 GB/s; only proportions matter here
DELAYS = Delays(e_read=8e-4, sm_read=2.4e-3, decompress=1.8e-3, recover=1.4e-3, expert_base=1e-3, expert_token=1e-4,
                K=4, N=3)


def run(instances: int = 10_000, repeats: int = 300, seed: int = 0) -> dict[str, dict[str, Any]]:
    study, rng = ratio_study(instances, seed), random.Random(seed)
    steps = [[Request(ExpertKey(0, e), 1, State(rng.choice("MESC")), State.MISSED) for e in range(K)]
             for _ in range(repeats)]
    tasks = [[task for request in step for task in DELAYS.tasks(request)] for step in steps]
    f = inclusion_of_ranks()
    q = selection_probabilities(f, K)
    sizes = round(9.4 * MB), round(4.7 * MB), round(1.6 * MB)
    return {
        "Algorithm 1 ÷ optimum (simulated)": {
            "instances": study["n"], "mean": study["mean"], "worst": study["worst"], "optimal in": study["optimal"],
            "largest share of (3 − 1/L)": study["largest_share"], "above the bound": study["violations"]},
        "ordering a layer (measured)": {
            "8 experts, ms": 1e3 * median(seconds(order, step, DELAYS, 2) for step in steps),
            "8 experts of 3 tensors, ms": 1e3 * median(seconds(schedule, step, 2) for step in tasks)},
        "planning (measured)": {
            "E=128, K=8, four pools, δ=0.05, seconds": median(
                seconds(lambda: plan(f, budget, sizes, K, DELAYS, 2, step=0.05))
                for budget in (300 * MB, 500 * MB, 800 * MB)),
            "error of the fitted inclusion": f"{abs(inclusion(q, K)[0] - f).max():.1e}"}}


def inclusion_of_ranks(E: int = E, K: int = K) -> np.ndarray:
    """Inclusion probabilities [E] ~ 1/rank, none above 0.95, of K experts a step."""
    f = 1 / np.arange(1, E + 1)
    for _ in range(100):                                    # scaling up meets the ceiling, so repeatedly
        f = np.minimum(f * K / f.sum(), 0.95)
    return f * (K / f.sum())


OPTIONS = {"instances": (whole(1), "random small instances"), "seed": (whole(), "of the instances")}
