"""Eviction policies: which expert leaves when a pool is full.

A policy is told which experts are used and is asked for a victim; it never sees bytes, threads or
time, so the same object decides in the engine and in the simulator. The classics are those of
ZipMoE's ablation (Fig. 10). All are deterministic, and none but "marking" walks the whole pool for a victim.

A policy of your own is a class with the two methods of `CachePolicy` and a line in `POLICIES`. It
may also have

    forget(key)      told that a key left the cache or was not kept
    shape(L, E)      told once, before all else, how many layers and experts of each there are
    follow(scores)   given once, a live int64 [L, E] that orders experts by the tokens they got (ties: lower key first)
    turn(phase, counts, n)  told when a prompt begins ("prefill") and before its answer ("decode"), with a live Counter:
                     tokens of the prompt by key, which stands still meanwhile; then returns which of its keys, n at
                     most, are to be in memory before the answer, else nothing: ()
    selective=True   the newcomer is a candidate too: choosing it means that it is not kept ("bypass")
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from moelab.base.registry import Entry, find
from moelab.base.specs import ExpertKey


@runtime_checkable
class CachePolicy(Protocol):
    """The two methods of a policy."""

    def touch(self, key: ExpertKey, step: int) -> None:
        """`key` is used in `step` (0, 1, …: one layer of one forward; below 0: it is there before). All experts of a step are
        touched, in ascending order, before a victim is asked for."""

    def victim(self, resident: Collection[ExpertKey]) -> ExpertKey:
        """One of `resident`, to be evicted; experts that the step uses are not in it."""


class FIFO:
    """First in, first out."""

    def __init__(self) -> None:
        self._order: dict[ExpertKey, None] = {}

    def touch(self, key: ExpertKey, step: int) -> None:
        self._order.setdefault(key)

    def victim(self, resident: Collection[ExpertKey]) -> ExpertKey:
        return next(key for key in self._order if key in resident)

    def forget(self, key: ExpertKey) -> None:
        self._order.pop(key, None)


class LRU(FIFO):
    """Least recently used."""

    def touch(self, key: ExpertKey, step: int) -> None:
        self._order.pop(key, None)
        self._order[key] = None


class _ByPriority:
    """Evicts the key of the smallest priority, ties by key: a heap whose outdated entries are
    skipped when met."""

    def __init__(self) -> None:
        self._priority: dict[ExpertKey, Any] = {}
        self._heap: list[tuple[Any, ExpertKey]] = []

    def put(self, key: ExpertKey, priority: Any) -> None:
        self._priority[key] = priority
        heapq.heappush(self._heap, (priority, key))
        if len(self._heap) > 4 * len(self._priority) + 64:
            self._heap = [(priority, key) for key, priority in self._priority.items()]
            heapq.heapify(self._heap)

    def victim(self, resident: Collection[ExpertKey]) -> ExpertKey:
        aside = []
        while True:
            priority, key = self._heap[0]
            if self._priority.get(key) != priority:
                heapq.heappop(self._heap)
            elif key in resident:
                break
            else:
                aside.append(heapq.heappop(self._heap))
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return key

    def forget(self, key: ExpertKey) -> None:
        self._priority.pop(key, None)


class LFU(_ByPriority):
    """Least frequently used: fewest steps that used the expert since the start, then least recently
    used."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[ExpertKey] = Counter()

    def touch(self, key: ExpertKey, step: int) -> None:
        self._uses[key] += 1
        self.put(key, (self._uses[key], step))


class LRFU(_ByPriority):
    """Between LRU and LFU: fewest uses, of which each counts half as much after every `half_life`
    turns of its layer.

    Source: Lee et al. 2001, "LRFU: A spectrum of policies that subsumes the LRU and LFU policies".
    The order of two experts that are not used does not change with time, so the priority is log₂ of
    the count plus the time."""

    half_life = 16

    def __init__(self) -> None:
        super().__init__()
        self._turns: dict[int, tuple[int, int]] = {}  # layer → (its turns, step of the latest)
        self._uses: dict[ExpertKey, float] = {}  # log₂ of the uses, as counted at turn 0

    def touch(self, key: ExpertKey, step: int) -> None:
        turns, latest = self._turns.get(key.layer, (0, -1))
        self._turns[key.layer] = turns, _ = turns + (latest != step), step
        now = turns / self.half_life
        self._uses[key] = now + math.log2(1 + 2 ** (self._uses.get(key, -math.inf) - now))
        self.put(key, self._uses[key])


class Marking:
    """A random victim among the experts not used in this phase (Fiat et al. 1991, "Competitive
    paging algorithms").

    Used experts are marked. When all are, a new phase begins: all marks but those of the current
    step are removed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._unmarked: dict[ExpertKey, None] = {}

    def touch(self, key: ExpertKey, step: int) -> None:
        self.forget(key)

    def victim(self, resident: Collection[ExpertKey]) -> ExpertKey:
        if not (candidates := [key for key in self._unmarked if key in resident]):
            candidates = list(resident)
            self._unmarked |= dict.fromkeys(candidates)
        return self._random.choice(candidates)

    def forget(self, key: ExpertKey) -> None:
        self._unmarked.pop(key, None)


class FewestTokens(_ByPriority):
    """ZipMoE's own (§3.4): the expert that got the fewest tokens since the start goes, the newcomer
    included."""

    selective = True

    def follow(self, scores: np.ndarray) -> None:
        self._scores = scores

    def touch(self, key: ExpertKey, step: int) -> None:
        self.put(key, int(self._scores[key]))


class Prompt(_ByPriority):
    """The experts that got the most tokens of the prompt stay while it is answered.

    Source: GPU-NDP §III-D, Fig. 7 (dataset-free prefetching). (1) The prefill counts. (2) Before the
    answer, the most used are loaded, as many as there is memory for: of the model or, with a pool for
    each layer, x of each, as in the paper. (3) Nothing that the prompt used less takes their place.
    The paper has no cache during the prefill; here it keeps those that lead so far, so hardly any is
    left to be loaded. Steps without phases are one prompt."""

    selective = True

    def turn(self, phase: str, counts: Mapping[ExpertKey, int], n: int) -> Collection[ExpertKey]:
        self._counts = counts
        for key in [*self._priority]:
            self.touch(key, 0)
        return heapq.nlargest(n, counts, key=self._rank) if phase == "decode" else ()

    def touch(self, key: ExpertKey, step: int) -> None:
        self.put(key, self._rank(key))

    def _rank(self, key: ExpertKey) -> tuple[int, int, int]:
        return self._counts[key], -key.layer, -key.expert


class Belady(_ByPriority):
    """Belady's optimum (1966): the expert whose next use is furthest away goes, the newcomer
    included.

    Experts that a step uses are pinned, as for every policy; `notebooks/studies/most_hits.py`
    has the ceiling without that rule.

    steps : the steps that will be asked for, in order: (layer, {expert: tokens}).
    """

    selective = True

    def __init__(self, steps: Iterable[tuple[int, Mapping[int, int]]]) -> None:
        super().__init__()
        self._uses: dict[ExpertKey, list[int]] = {}
        for step, (layer, tokens) in enumerate(steps):
            for expert in tokens:
                self._uses.setdefault(ExpertKey(layer, expert), []).append(step)

    def touch(self, key: ExpertKey, step: int) -> None:
        uses = self._uses.get(key, [])
        after = bisect_right(uses, step)
        if step >= 0 and (not after or uses[after - 1] != step):
            raise ValueError(
                f"step {step} uses expert {key.expert} of layer {key.layer}, which the steps given to "
                "Belady do not say; give it the steps of this very run, from the first"
            )
        self.put(key, -uses[after] if after < len(uses) else -float("inf"))


#: more hits than LRU at every budget on the small model, and on most real traces. "next-use" has more
#: than it on every real trace at 10 and 25 % of the experts, but does not win everywhere: with more
#: memory LFU with pools for each layer beats it on one, by up to 1.4 points (`bench policies`)
DEFAULT_POLICY = "lrfu"
#: name → policy, a class or an `Entry`; another one is a class and a line here
POLICIES: dict[str, type | Entry] = {
    "fifo": FIFO,
    "lru": LRU,
    "lfu": LFU,
    "lrfu": LRFU,
    "marking": Marking,
    "zipmoe": FewestTokens,
    "next-use": Entry(
        "moelab.cache.next_use:NextUse",
        "evicts what will be used last, by an estimate that learns while it runs",
    ),
    "prompt": Prompt,
    "belady": Entry(
        Belady, "Belady's optimum, which knows the future: for simulate(run, cache='belady')", True
    ),
}


def make_policy(policy: str | type | CachePolicy) -> Callable[[], CachePolicy]:
    """A maker of policies, one for each pool: of a name of `POLICIES`, a class, or an instance
    (shared by all)."""
    if isinstance(policy, str):
        policy = find("cache", policy)
    if policy is Belady:
        raise ValueError(
            '"belady" needs the future, so it is for a run that has been: '
            'moelab.simulate(run, cache="belady"), or Belady(steps) with the steps of a run'
        )
    if not isinstance(policy, CachePolicy):
        raise ValueError(
            f"{policy!r} is no cache policy: it needs the methods touch(key, step) and victim(resident)"
        )
    return policy if isinstance(policy, type) else lambda: policy
