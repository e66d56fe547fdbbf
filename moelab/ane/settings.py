"""All combinations of tiers, slack, group size and chunk for a card: what each drops, pads and costs (NPUMoE §4).

More tiers waste fewer rows, more slack drops less and computes more, larger groups share launches, larger chunks share
weights. Drops and padding are exact for an assumed popularity, on chunks that the plan has not seen; time and energy of
a prompt of 1024 tokens are modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from moelab.cards import load_model
from moelab.ane.device.accounting import count
from moelab.ane.device.device_model import DeviceModel
from moelab.ane.plan import CHUNKS, Plan, make_plan
from moelab.ane.device.synthetic_popularity import assumed_counts, assumed_loads
from moelab.progress import progress

PROMPT = 1024
LEVELS, SLACKS, GROUPS = (1, 2, 3, 4), (0.75, 1.0, 1.25), (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Setting:
    """Tiers a layer, factor of the expected loads, experts a graph, tokens of a chunk."""

    levels: int = 3
    slack: float = 1.0
    group_size: int = 8
    chunk: int = 256

    def __str__(self) -> str:
        return f"{self.levels} tier{'s' * (self.levels > 1)}, slack {self.slack:g}, G = {self.group_size}"


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a setting does: shares dropped and padded, TTFT in seconds, mJ a prompt token."""

    plan: Plan
    dropped: float
    padded: float
    ttft_s: float
    mj_per_token: float

    @property
    def point(self) -> tuple[float, float, float, float]:
        return self.dropped, self.padded, self.ttft_s, self.mj_per_token


def settings(card: str, levels: Sequence[int] = LEVELS, slacks: Sequence[float] = SLACKS,
             groups: Sequence[int] = GROUPS, chunks: Sequence[int] = CHUNKS, seed: int = 0) -> dict[Setting, Outcome]:
    """Plan and cost every combination."""
    spec, device, found = load_model(card), DeviceModel.of(), {}
    for chunk in progress(chunks, "settings", unit="chunk size"):
        counts, tokens = assumed_counts(spec, chunk, seed=seed)
        unseen = assumed_loads(spec, chunk, 80, seed=seed)[64:]
        for t, slack, G in product(levels, slacks, groups):
            plan = make_plan(spec, counts, tokens, chunk, G, t, slack=slack, popularity="assumed")
            account, cost = count(plan, unseen), device.prefill(plan, PROMPT, unseen)
            found[Setting(t, slack, G, chunk)] = Outcome(plan, account.drop_rate, account.padded_fraction, cost.ttft_s,
                                                         cost.mj_per_token)
    return found


def fastest(found: dict[Setting, Outcome], dropped: float) -> dict[int, Setting]:
    """Chunk → the setting of least TTFT that drops at most that share; a chunk where none does is left out."""
    allowed = {setting: of for setting, of in found.items() if of.dropped <= dropped}
    return {chunk: min((s for s in allowed if s.chunk == chunk), key=lambda s: allowed[s].ttft_s)
            for chunk in dict.fromkeys(setting.chunk for setting in allowed)}
