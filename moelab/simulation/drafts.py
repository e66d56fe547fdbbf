"""What draft tokens give where experts are loaded: acceptance, union, misses, seconds.

Source: speculative decoding (Leviathan et al. 2023, §3.3), but for a pass over several positions that
takes longer than one over one: it computes the union of their experts, and loads what of it is not
in memory. A right draft's experts would have been loaded anyway, a pass later; so drafts save
reading other weights and computing, hardly any loading, and a wrong one loads for nothing. What is in
memory follows from replaying the passes with the default policy, in one pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from moelab.base.specs import State
from moelab.cache.pools import Pools
from moelab.cache.residency import SPARE, CacheCounters, Residency

COUNTS = 1, 2, 4, 8  # drafts of a pass that are tried
ACCEPTANCES = 0.5, 0.7, 0.9, 1.0


class Passes(NamedTuple):
    """Means over passes that verify so many drafts.

    tokens : that the text goes on by: 1, and the right drafts.
    union : distinct experts that a layer computes.
    misses : of these, not in memory.
    """

    drafts: int
    tokens: float
    union: float
    misses: float


@dataclass(frozen=True)
class PassCosts:
    """Seconds of what a decode pass through L layers does.

    fixed : once, whatever it is over: reading all weights but the routed experts.
    position : of each token or draft.
    expert, load : of each expert of the union; of each of those that are not in memory, meanwhile.
    """

    L: int
    fixed: float
    position: float
    expert: float
    load: float

    def seconds(self, of: Passes) -> float:
        """Of a pass."""
        layer = max(of.union * self.expert, of.misses * self.load)
        return self.fixed + (1 + of.drafts) * self.position + self.L * layer

    def speedup(self, drafted: Passes, plain: Passes) -> float:
        """Tokens a second with drafts over those without."""
        return drafted.tokens * self.seconds(plain) / (plain.tokens * self.seconds(drafted))


def passes(
    ids: Sequence[np.ndarray], E: int, drafts: int, acceptance: float, share: float
) -> Passes:
    """Replay texts, ids [T, L, K] each, in passes; the first half of these fills the cache.

    share : of all experts, in memory.

    Raises ValueError: no text has so many tokens."""
    found = list(verified(ids, E, drafts, acceptance))
    if not found:
        raise ValueError(f"no text has {drafts + 1} tokens, for a pass with {drafts} drafts")
    half = len(found) // 2
    counted = second_half([[*enumerate(layers)] for _, layers in found], E, share)
    steps = ids[0].shape[1] * (len(found) - half)
    tokens = fmean(tokens for tokens, _ in found[half:])
    return Passes(drafts, tokens, counted.requests / steps, counted.misses / steps)


def second_half(
    steps: Sequence[Sequence[tuple[int, Mapping[int, int]]]],
    E: int,
    share: float,
    sent: tuple[int, ...] | None = None,
) -> CacheCounters:
    """What the second half of forwards' steps, {expert: tokens} of each layer, finds in memory for a
    share of all experts, after the first half; sent : if a GPU runs them alone
    (`moelab.cache.residency`), how many of a layer's m missing experts come: the others are computed
    where they lie. The first half is then as a prompt's, of which all come."""
    L = len(steps[0])
    pools = Pools(F=round(share * L * E))
    spare = min(-(-pools.F // SPARE), L * (len(sent) - 1)) if sent else 0
    residency = Residency(L, E, pools, spare=spare)
    residency.fill()
    alone = False
    for n, step in enumerate(steps):
        if n == len(steps) // 2:
            residency.reset_counters()
            alone = sent is not None
        residency.begin_forward("decode", alone)
        for layer, experts in step:
            states = ((e, residency.state((layer, e))) for e in sorted(experts))
            missing = [e for e, state in states if alone and state is not State.FULL]
            residency.begin(layer, experts, {*missing[sent[len(missing)] :]} if alone else set())
        residency.end_forward()
    return residency.counters


def verified(
    ids: Sequence[np.ndarray], E: int, drafts: int, acceptance: float = 1.0, seed: int = 0
) -> Iterator[tuple[int, list[dict[int, int]]]]:
    """(tokens that the text goes on by, {expert: 1} of each layer) of each pass over 1 + `drafts`
    positions.

    acceptance : of a draft behind right ones. All drafts from the first wrong one on are any
        tokens of the same text."""
    rng = np.random.default_rng(seed)
    for text in ids:
        at = 0
        while at + drafts < len(text):
            wrong = rng.random(drafts) >= acceptance
            right = int(wrong.argmax()) if wrong.any() else drafts
            others = text[rng.integers(0, len(text), drafts - right)]
            seen = np.concatenate([text[at : at + 1 + right], others])
            layers = (np.unique(layer[layer < E]).tolist() for layer in seen.swapaxes(0, 1))
            yield 1 + right, [dict.fromkeys(layer, 1) for layer in layers]
            at += 1 + right


def advised(ids: Sequence[np.ndarray], E: int, share: float, costs: PassCosts) -> str:
    """From which acceptance on drafts pay, and how many then, in words."""
    plain = passes(ids, E, 0, 1.0, share)
    best = {}
    for right in ACCEPTANCES:
        drafted = [passes(ids, E, n, right, share) for n in COUNTS]
        best[right] = max((costs.speedup(of, plain), of.drafts) for of in drafted)
    paying = [right for right, (gain, _) in best.items() if gain > 1.05 and right < 1]
    if not paying:
        return (
            f"Draft tokens (--drafts) hardly pay: {best[1.0][0]:.2f}× at most, if all are right; "
            "modelled."
        )
    gain, n = best[paying[0]]
    return (
        f"Draft tokens (--drafts auto) pay from about {paying[0]:.0%} of them right on: {gain:.2f}× "
        f"with {n} a pass, {best[1.0][0]:.2f}× with {best[1.0][1]} if all are; modelled."
    )
