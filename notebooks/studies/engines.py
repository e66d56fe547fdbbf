"""Engines that are not ours, replayed: what a cache that counts bytes holds, and the seconds of a
token that follow from a few rates.

    a mapped file     `SizedCache` of pages: experts and, as expert −1, a layer's other weights
    --n-cpu-moe       `StaticSet` of all experts of the layers that are in fast memory
    a hot set         `StaticSet` of the experts that were popular elsewhere
    a GPU cache       `SizedCache`, and `Costs.miss` for the CPU that computes what it lacks

Ours is `moelab.simulation.simulator`, with its threads, states and prefetching. What an engine
costs is stated or fitted where it was measured; left out is all that varies from token to token."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from moelab.base.schema import Amount, Must
from moelab.base.specs import ExpertKey
from moelab.cache.policies import make_policy
from moelab.cache.pools import Candidates, Pool

#: bytes of an expert; of the layer's other weights as its expert −1
SizeOf = Callable[[ExpertKey], float]
#: tokens or batches, each a list of (layer, experts in the order in which tokens ask for them)
Batches = Iterable[Sequence[tuple[int, Sequence[int]]]]


class Holder(Protocol):
    """Which experts are in fast memory."""

    def ask(self, layer: int, experts: Sequence[int]) -> list[ExpertKey]:
        """What is not there of a layer's batch, each expert once."""


class SizedCache:
    """So many bytes of experts of different sizes, under a policy of `moelab.cache.policies`.

    A batch asks for each of its experts once, and reads what is missing. Only then leaves what is
    too much, and nothing that the batch itself asked for. So did the engine whose 64,512 recorded
    hits and misses `moelab bench published` replays. Every newcomer is admitted.

    layers : into how many equal parts, one a layer, the budget is divided; 0: one for all.
    """

    def __init__(self, budget: float, size: SizeOf, policy: Any = "lru", layers: int = 0) -> None:
        self._budget, self._size, self._layers = budget // max(layers, 1), size, layers
        self._make = make_policy(policy)
        self._parts: dict[int, Pool] = {}
        self._used: dict[int, float] = {}
        self._step = 0

    def has(self, layer: int, expert: int) -> bool:
        """Whether an expert is there."""
        part = self._parts.get(layer if self._layers else 0)
        return part is not None and (layer, expert) in part.keys

    def ask(self, layer: int, experts: Sequence[int]) -> list[ExpertKey]:
        place = layer if self._layers else 0
        if place not in self._parts:
            self._parts[place], self._used[place] = Pool(0, self._make()), 0.0
        part, used = self._parts[place], self._used[place]
        batch = dict.fromkeys(ExpertKey(layer, expert) for expert in experts)
        missed = [key for key in batch if key not in part.keys]
        for expert in reversed(dict.fromkeys(reversed(experts))):  # in order of their last use
            part.policy.touch(ExpertKey(layer, expert), self._step)
        self._step += 1
        part.keys |= dict.fromkeys(missed)
        used += sum(map(self._size, missed))
        others = Candidates(part.keys, batch.keys())
        while used > self._budget and others:
            victim = part.policy.victim(others)
            part.leave(victim)
            used -= self._size(victim)
        self._used[place] = used
        return missed


@dataclass(frozen=True)
class StaticSet:
    """Experts that are there for ever, and no others."""

    keys: Container[ExpertKey]

    def ask(self, layer: int, experts: Sequence[int]) -> list[ExpertKey]:
        batch = (ExpertKey(layer, expert) for expert in dict.fromkeys(experts))
        return [key for key in batch if key not in self.keys]


@dataclass(frozen=True)
class Costs:
    """Seconds of an engine.

    token : of everything but experts, for a batch.
    hit, miss : of an expert that is there, of one that is not, beside reading it.
    byte : of reading a byte.
    hidden : the share of a layer's other time during which its reads go on.
    """

    token: Amount
    hit: Amount = 0.0
    miss: Amount = 0.0
    byte: Amount = 0.0
    hidden: Annotated[float, Must(lambda share: 0 <= share <= 1, "from 0 to 1")] = 0.0


@dataclass(frozen=True)
class Replay:
    """What an engine did.

    requests, misses : experts, each once a batch.    read : bytes.
    computing, waiting : seconds of computing, and of reads that it did not hide.
    """

    batches: int
    requests: int
    misses: int
    read: float
    computing: float
    waiting: float

    @property
    def hit_rate(self) -> float:
        return 1 - self.misses / self.requests

    @property
    def pace(self) -> float:
        """Batches, which in decode are tokens, per second."""
        return self.batches / (self.computing + self.waiting)


def played(batches: Batches, holder: Holder, costs: Costs, size: SizeOf) -> Replay:
    """Play batches in time. ValueError without any."""
    n = requests = misses = 0
    read = computing = waiting = 0.0
    for batch in batches:
        n += 1
        for layer, experts in batch:
            missing = holder.ask(layer, experts)
            asked = len(dict.fromkeys(experts)) - (-1 in experts)
            absent = sum(key.expert >= 0 for key in missing)
            own = costs.token / len(batch) + costs.hit * (asked - absent) + costs.miss * absent
            nbytes = sum(map(size, missing))
            requests, misses, read = requests + asked, misses + absent, read + nbytes
            computing += own
            waiting += max(nbytes * costs.byte - costs.hidden * own, 0.0)
    if not requests:
        raise ValueError("there are no experts to play: give at least one batch of a layer")
    return Replay(n, requests, misses, read, computing, waiting)
