"""Residency: which experts are in memory in which state, and who is admitted and evicted (ZipMoE
§3.2, §3.4).

An expert that is used goes to the first pool whose threshold its rank passes, where the rank counts
the experts that got more tokens so far; a full pool evicts the victim of its policy; beyond all
thresholds an expert leaves as soon as it has run. All is decided when a layer's step begins, never
from timing, so engine and simulator decide the same.

A GPU that runs a whole token without asking the host decides by a rule that it can follow alone, and
this follows it behind: what misses is kept while a slot is free, layer by layer, by ascending id, and
nothing leaves; when the token is over, the policy evicts until as many slots are free again as tokens
lately took, and some more. Of free slots, few keep what was just fetched from staying, and many hold
nothing: on decoded tokens of gpt-oss-20b, DeepSeek-V2-Lite and Qwen3-30B-A3B, with 25 and 50 % of the
experts, this was the best of those tried. Where a CPU computes most of what misses, little is fetched,
and hardly anybody would come: so some of what a token has missed is copied beside the next one.

A newcomer that its pool refuses is offered to the next one. §3.4 does not say so: there it leaves,
so the δ ranks past the first pool, which are that pool's by their threshold, are in none.

    tokens   {expert: tokens routed to it}, one layer of one forward
    scores   int64 [L, E], tokens·L·E + (L·E − 1 − index): orders experts by tokens, ties by key, no two alike
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from moelab.base.specs import ExpertKey, State
from moelab.cache.policies import DEFAULT_POLICY, CachePolicy, make_policy
from moelab.cache.pools import HIERARCHY, Pool, Pools

SCOPES = ("model", "layer")
SPARE = (
    4  # of a token's experts, one in so many may be kept: the most slots that are left free for it
)
LEAST = 4  # of these slots, one in so many is left free at least
MORE = 1.5  # times the slots that tokens lately took
LATELY = 8  # tokens
LONGEST = 64  # tokens


class Request(NamedTuple):
    """One expert that a step needs: its state before, and the state in which it stays afterwards
    (MISSED: not kept)."""

    key: ExpertKey
    tokens: int
    state: State
    keep: State


@dataclass
class Step:
    """What a layer's step needs, by ascending expert id; the experts that leave memory first; those
    that are computed away from it."""

    layer: int
    requests: list[Request]
    evicted: list[ExpertKey]
    away: list[Request] = field(default_factory=list)

    @cached_property
    def loads(self) -> list[Request]:
        """Those that are not whole in memory."""
        return [request for request in self.requests if request.state is not State.FULL]


@dataclass
class CacheCounters:
    """Exact counts of what the steps found.

    hits : requests by the state they were found in.
    evictions : residents that left.
    admissions : experts that came and stayed: of the misses, when their step was over.
    away : of the misses and hits, those that were computed where they lie.
    """

    hits: dict[State, int] = field(default_factory=lambda: dict.fromkeys(HIERARCHY, 0))
    misses: int = 0
    evictions: int = 0
    admissions: int = 0
    away: int = 0

    @property
    def requests(self) -> int:
        return self.misses + sum(self.hits.values())

    def hit_rate(self) -> float:
        """Share of the requests found in any state; nan without requests."""
        return sum(self.hits.values()) / self.requests if self.requests else math.nan


class Residency:
    """Which experts are in memory, and in which state.

    holds_all : whether no expert that is in memory ever leaves.
    pools : capacities, of the whole model or of each layer.
    policy : a name of `POLICIES`, a class (one instance a pool), or an instance (shared by all
        pools).
    scope : "model", one set of pools, or "layer", one for each layer; ranks count within the scope.
    margin : δ of §3.4, in experts. Default: 5 % of the experts in the scope when ranks matter
        (several pools, or the policy "zipmoe"), and infinite for a single pool under another
        policy, which then admits everything.
    spare : slots of the pool that are left free, at most, when a token's pass ends (`end_forward`).
    free : slots that are left in a token's pass; None in any other.
    coming : what is copied into free slots beside the next token's pass; from its end on it is there,
        as if it had come when it was missed. Another pass gives it up.

    Raises ValueError for settings that there are not, and spare slots of anything but one pool of
    whole experts.
    """

    def __init__(
        self,
        L: int,
        E: int,
        pools: Pools,
        policy: str | type | CachePolicy = DEFAULT_POLICY,
        scope: str = "model",
        margin: float | None = None,
        spare: int = 0,
    ) -> None:
        if scope not in SCOPES:
            raise ValueError(
                f"unknown scope {scope!r}; pools are either of the whole 'model' or of each 'layer'"
            )
        if margin is not None and not margin >= 0:
            raise ValueError(f"the margin is {margin}; it is a number of experts, 0 or more")
        self.L = L
        self.E = E
        self.scope = scope
        if spare and not (scope == "model" and 0 < spare <= pools.F == pools.capacity):
            raise ValueError(
                f"{spare} spare slots of {pools} of each {scope!r}; they are slots of one pool F of the "
                "whole 'model', at most as many as it has"
            )
        self.spare = spare
        self._margin = margin
        self.free: int | None = None
        self.counters = CacheCounters()
        self._keys = [[ExpertKey(layer, expert) for expert in range(E)] for layer in range(L)]
        self._now = 0
        self._scores = np.arange(L * E - 1, -1, -1, dtype=np.int64).reshape(L, E)
        self._make = make_policy(policy)
        self.pools = pools
        self.clear()

    def begin_forward(self, phase: str, token: bool = False) -> list[Step]:
        """A forward pass begins, of a prompt ("prefill") or of its answer ("decode"); of a `token`
        that a GPU runs alone, if so. Returns steps without tokens, one a layer: what a policy with
        `turn` wants to be loaded first."""
        steps = []
        for group, counts in zip(self._groups, self._prompts) if phase != self._phase else ():
            if phase == "prefill":
                counts.clear()
            for pool in group.values():
                if hasattr(pool.policy, "turn"):
                    wanted = pool.policy.turn(phase, counts, pool.size)
                    steps += self._refill(pool, wanted) if [*group] == [State.FULL] else []
        self._phase = phase
        for key in self._left.union(() if token else self.coming):
            self._pools[key.layer][State.FULL].forget(key)
        self.coming = self.coming if token else []
        room = self.pools.F - len(self) - len(self.coming)
        self.free = self.spare and room if token else None
        self._found, self._came, self._left = set(), set(), set()
        return steps

    @property
    def left(self) -> list[ExpertKey]:
        """What this token's pass has missed and not kept; what was missed most often comes first."""
        return sorted(self._left, key=lambda key: (-self._lacked[key], key))

    def end_forward(self, wished: Iterable[ExpertKey] = ()) -> list[ExpertKey]:
        """The forward pass is over. Returns who leaves: after a token's pass until there is room for
        the next, nobody after another. A selective policy may choose who came in this pass; of all
        others, those that were used leave only when nobody else is left.

        wished : who shall come of what is `left`, as far as half of the free slots go."""
        if self.free is None:
            return []
        self.free = None
        self._came.update(self.coming)
        self._taken += (len(self._came) - self._taken) / LATELY
        room = min(self.spare, max(self.spare // LEAST, math.ceil(MORE * self._taken)))
        evicted = []
        for pool in self._groups[0].values():
            pool.size = self.pools.F - room
            self.counters.admissions += len(set(self.coming) - pool.keys.keys())
            pool.keys |= dict.fromkeys(self.coming)
            evicted = pool.shrink(self._found, self._came)
        self.counters.evictions += len(evicted)
        wanted = [key for key in dict.fromkeys(wished) if key in self._left]
        self.coming = wanted[: (self.pools.F - len(self)) // 2 if self.spare else 0]
        self._left.difference_update(self.coming)
        return evicted

    def _refill(self, pool: Pool, wanted: Collection[ExpertKey]) -> list[Step]:
        """Let a pool of whole experts hold the wanted ones; who is there stays if there is room."""
        lacking = sorted({*wanted} - pool.keys.keys())
        others = [key for key in pool.keys if key not in wanted]
        evicted = others[: max(0, len(pool.keys) + len(lacking) - pool.size)]
        for key in evicted:
            pool.leave(key)
        for key in lacking:
            pool.keys[key] = None
            pool.policy.touch(key, self._now)
        self.counters.evictions += len(evicted)
        steps = []
        for layer, of in groupby(lacking, attrgetter("layer")):
            loads = [Request(key, 0, State.MISSED, State.FULL) for key in of]
            steps.append(Step(layer, loads, [] if steps else evicted))
        return steps

    def begin(self, layer: int, tokens: Mapping[int, int], away: Set[int] = frozenset()) -> Step:
        """Decide about one layer's step: in which states its experts are and stay, and which others
        are evicted. Those that are computed `away` from this memory are used, but do not come."""
        experts = sorted(tokens)
        try:
            keys = [self._keys[layer][expert] for expert in experts]
        except IndexError:
            raise ValueError(
                f"the step is {dict(tokens)} in layer {layer}; it is {{expert: tokens}}, of {self.L} "
                f"layers with {self.E} experts"
            ) from None
        full = State.FULL
        before = [self.state(key) for key in keys]
        if self.holds_all and before.count(full) == len(before):  # nobody ever leaves
            if not away:
                self.found(layer, tokens)
                return Step(
                    layer, [Request(key, tokens[key.expert], full, full) for key in keys], []
                )
            keep = dict(zip(keys, before))
            evicted = []
        else:
            if self._phase == "prefill":
                self._prompts[layer % len(self._prompts)].update(
                    {key: tokens[key.expert] for key in keys}
                )
            if self._scored:
                counts = np.array([tokens[expert] for expert in experts], np.int64)
                self._scores[layer, experts] += counts * self._scores.size
            place = self._place if self.free is None else self._admit
            keep, evicted = place(layer, keys, before, away)
        self._count(keys, before, keep, evicted)
        self._now += 1
        requests = [
            Request(key, tokens[key.expert], state, keep[key]) for key, state in zip(keys, before)
        ]
        apart = [[of for of in requests if (of.key.expert in away) is far] for far in (False, True)]
        self.counters.away += len(apart[1])
        return Step(layer, apart[0], evicted, apart[1])

    def found(self, layer: int, tokens: Mapping[int, int]) -> None:
        """Count a step whose experts are all there for good."""
        self._untold.append((layer, tokens))
        self.counters.hits[State.FULL] += len(tokens)
        self._now += 1

    def elsewhere(self, layer: int, tokens: Mapping[int, int]) -> None:
        """Tokens of a prompt whose experts are computed from another memory: a policy's `turn` counts
        them, too."""
        counts = {self._keys[layer][expert]: n for expert, n in tokens.items()}
        self._prompts[layer % len(self._prompts)].update(counts)

    def fill(self, order: Iterable[ExpertKey] = ()) -> list[ExpertKey]:
        """Mark as FULL what an engine opens with: every expert if all fit, else as many of `order`, the
        most wanted first, as fit. Returns them."""
        found = []
        for key in chain(*self._keys) if self.holds_all else order:
            pool = self._pools[key.layer].get(State.FULL)
            if pool is not None and len(pool.keys) < pool.size:
                pool.keys[key] = None
                found.append(key)
        # as if each layer had chosen them once, before the first step
        for key in sorted(reversed(found), key=attrgetter("layer")):
            self._pools[key.layer][State.FULL].policy.touch(key, key.layer - self.L - 1)
        return found

    def clear(self) -> None:
        """Mark every expert as missed; policies that were not given as instances start anew, token
        counts stay."""
        #: the latest steps in which nobody could leave, so that no policy was told of them
        self._untold: deque[tuple[int, Mapping[int, int]]] = deque(maxlen=LONGEST * self.L)
        self._groups: list[dict[State, Pool]] = [
            {} for _ in range(self.L if self.scope == "layer" else 1)
        ]
        self.resize(self.pools)
        #: of each group, tokens of the latest prompt by expert
        self._prompts: list[Counter[ExpertKey]] = [Counter() for _ in self._groups]
        self._phase, self.free, self._taken = "", None, float(self.spare)
        self.coming: list[ExpertKey] = []
        self._left: set[ExpertKey] = set()
        self._lacked: Counter[ExpertKey] = Counter()
        self.begin_forward("prefill")

    def resize(self, pools: Pools) -> list[ExpertKey]:
        """Between two forward passes, let pools hold more or fewer. Returns who leaves, as the
        policies choose, which know what they knew."""
        counters = self.counters
        self.counters = CacheCounters()
        self.holds_all = False
        while self._untold:
            self.begin(*self._untold.popleft())
        self.counters = counters
        self.pools = pools
        everyone = self.E if self.scope == "layer" else self.L * self.E  # who share pools
        self.holds_all = pools.F == pools.capacity >= everyone
        self.spare *= not self.holds_all
        evicted = []
        for group in self._groups:
            states = [state for state in HIERARCHY if pools[state] or state in group]
            for state in states:  # in this order
                pool = group.pop(state, None) or self._pool()
                pool.size = pools[state] - self.spare
                evicted += pool.shrink(frozenset(), frozenset())
                group |= {state: pool} if pools[state] else {}
        self.counters.evictions += len(evicted)
        #: layer → state → pool
        self._pools = self._groups if self.scope == "layer" else self._groups * self.L
        group = self._groups[0]
        follows = any(hasattr(pool.policy, "follow") for pool in group.values())
        self.margin = math.ceil(0.05 * everyone) if len(group) > 1 or follows else math.inf
        self.margin = self.margin if self._margin is None else self._margin
        self._scored = follows or not math.isinf(self.margin)  # whether anybody asks for scores
        places = accumulate(pool.size for pool in group.values())
        self._thresholds = [(of, n + self.margin) for of, n in zip(group, places)]  # τ of §3.4
        return evicted

    def _pool(self) -> Pool:
        """A new one, for nobody yet."""
        pool = Pool(0, self._make())
        if hasattr(pool.policy, "shape"):
            pool.policy.shape(self.L, self.E)
        if hasattr(pool.policy, "follow"):
            pool.policy.follow(self._scores)
        return pool

    def state(self, key: tuple[int, int]) -> State:
        """What of the expert (layer, expert) is in memory."""
        for state, pool in self._pools[key[0]].items():
            if key in pool.keys:
                return state
        return State.MISSED

    def __len__(self) -> int:
        return sum(len(pool.keys) for group in self._groups for pool in group.values())

    def full(self, layer: int) -> list[int]:
        """The experts of a layer that are FULL, in ascending order."""
        return [key.expert for key in self._keys[layer] if self.state(key) is State.FULL]

    def resident(self, state: State) -> list[ExpertKey]:
        return [key for group in self._groups if state in group for key in group[state].keys]

    def reset_counters(self) -> None:
        """Start counting anew."""
        self.counters = CacheCounters()

    def _place(
        self, layer: int, keys: list[ExpertKey], before: list[State], away: Set[int]
    ) -> tuple[dict[ExpertKey, State], list[ExpertKey]]:
        """Pool dispatching (§3.4): the state in which each expert of the step stays, and who was
        evicted for it."""
        group = self._pools[layer]
        keep = dict(zip(keys, before))
        evicted = []
        found = {key for key, state in keep.items() if state is not State.MISSED}
        moves = deque()  # who shall enter which better pool
        for key, state, goal in zip(keys, before, self._goals(keys)):
            if goal is State.MISSED:
                keep[key] = goal
                continue
            comes = state is State.MISSED or HIERARCHY.index(goal) < HIERARCHY.index(state)
            goal = goal if comes else state
            group[goal].policy.touch(key, self._now)
            if comes and key.expert in away:
                group[goal].forget(key)
            elif comes:  # only upward
                moves.append((key, goal))
        if not math.isinf(self.margin):  # the best ranks choose first
            moves = deque(sorted(moves, key=lambda move: -self._scores[move[0]]))
        below = dict(zip(group, [*group][1:]))
        while moves:
            key, goal = moves.popleft()
            pool = group[goal]
            refused = pool.make_room(key, found, keep.keys())
            if refused is key:  # no room, or the policy refused it
                pool.forget(key)
            else:
                if refused in keep:  # a newcomer of this step after all
                    keep[refused] = State.MISSED
                elif refused is not None:
                    evicted.append(refused)
                pool.keys[key] = None
                keep[key] = goal
            if refused in keep:  # what of the next pool?
                lower = below.get(goal)
                stays = keep[refused]
                if lower not in (None, stays):
                    moves.appendleft((refused, lower))
                if (touched := lower or stays) is not State.MISSED:
                    group[touched].policy.touch(refused, self._now)
        self._leave(group, keep, before)
        return keep, evicted

    def _admit(
        self, layer: int, keys: list[ExpertKey], before: list[State], away: Set[int]
    ) -> tuple[dict[ExpertKey, State], list[ExpertKey]]:
        """As `_place`, in a token's pass: what comes stays while a slot is free."""
        keep = dict.fromkeys(keys, State.MISSED)
        for pool in self._pools[layer].values():  # one, of whole experts
            for key, state in zip(keys, before):
                keep[key] = State.FULL
                pool.policy.touch(key, self._now)
                if state is State.FULL:
                    self._found.add(key)
                elif self.free and key.expert not in away:
                    self.free -= 1
                    self._came.add(key)
                    pool.keys[key] = None
                else:
                    keep[key] = State.MISSED
                    self._lacked[key] += 1
                    self._left.add(key)
        self._left.difference_update(self.coming)
        return keep, []

    def _leave(
        self, group: dict[State, Pool], keep: Mapping[ExpertKey, State], before: list[State]
    ) -> None:
        """Take the step's experts out of the pools that they leave. It comes last, as their chunks
        are needed until they are decoded: these places are free for the next step only."""
        for (key, now), state in zip(keep.items(), before):
            if state is not State.MISSED and now is not state:
                new = group[now].policy if now in group else None
                group[state].leave(key, forget=group[state].policy is not new)

    def _goals(self, keys: list[ExpertKey]) -> list[State]:
        """The first pool whose threshold exceeds each expert's rank; MISSED beyond all of them."""
        if not self._thresholds:
            return [State.MISSED] * len(keys)
        if math.isinf(self.margin):
            return [self._thresholds[0][0]] * len(keys)
        scores = self._scores[keys[0].layer] if keys and self.scope == "layer" else self._scores
        own = self._scores[tuple(np.array(keys, np.intp).reshape(-1, 2).T)]
        ranks = scores.size - 1 - np.searchsorted(np.sort(scores, axis=None), own)
        return [
            next((state for state, threshold in self._thresholds if rank < threshold), State.MISSED)
            for rank in ranks.tolist()
        ]

    def _count(
        self,
        keys: list[ExpertKey],
        before: list[State],
        keep: Mapping[ExpertKey, State],
        evicted: list[ExpertKey],
    ) -> None:
        counters = self.counters
        counters.evictions += len(evicted)
        for key, state in zip(keys, before):
            if state is State.MISSED:
                counters.misses += 1
                counters.admissions += keep[key] is not State.MISSED
            else:
                counters.hits[state] += 1
                counters.evictions += keep[key] is State.MISSED
