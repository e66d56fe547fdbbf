"""What caches and predictors live on, of any trace: one definition for all that records, fits or
compares routing.

Hit rates are of one pool for all layers, cold at the start, one sequence after the other without
clearing it; accesses in the order token, layer, slot; every expert takes one slot. Prefill is taken
token by token, too, although an engine asks once for a layer's distinct experts. LRU, LFU (all
accesses since the start; ties by recency) and Belady (who must admit) each order the experts in a
way that does not depend on the capacity, so one pass gives the hits at every capacity: Mattson et
al. 1970, "Evaluation techniques for storage hierarchies". "static" has the most popular experts of
the trace itself, loaded before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from moelab.kernels.compile import kernel
from moelab.store.codecs import entropy
from moelab.trace.routing_trace import RoutingTrace

SHARES = (0.1, 0.25, 0.5, 0.75)
POLICIES = ("lru", "lfu", "belady", "static")


@dataclass(frozen=True)
class Statistics:
    """What `statistics` finds; shares are of 1, entropy is in bits.

    hits : policy → hit rate at each of `shares` of all experts in memory.
    reuse : share of a token's experts that the token before it in its sequence had in that layer.
    entropy : of a layer's popularity, mean over layers; log2(E) is uniform.
    top_quarter : share of a layer's routings that go to its most popular quarter of experts, mean.
    next_layer : share of the next layer's experts that this layer's tell (`next_layer`).
    """

    tokens: int
    shares: tuple[float, ...]
    hits: dict[str, tuple[float, ...]]
    reuse: float
    entropy: float
    top_quarter: float
    next_layer: float


def statistics(trace: RoutingTrace, shares: Iterable[float] = SHARES) -> Statistics:
    """All of them. ValueError: a trace without routing."""
    shares = tuple(shares)
    hits = hit_rates(trace, shares)
    told = next_token_reuse(trace), *popularity(trace), next_layer(trace)
    return Statistics(len(trace), shares, hits, *told)


def accesses(trace: RoutingTrace) -> np.ndarray:
    """layer · E + expert of every access, in the order of a replay: int64 [N]. ValueError: none."""
    ids = in_sequence(trace).astype(np.int64)
    E = trace.spec.E
    keys = (ids + np.arange(ids.shape[1])[:, None] * E)[ids < E]
    if not len(keys):
        raise ValueError(f"the trace of {trace.spec.name} has no routing: no expert ran in it")
    return keys


def in_sequence(trace: RoutingTrace) -> np.ndarray:
    """`ids` [T, L, K], one sequence after the other."""
    return trace.ids.numpy()[trace.sequence.numpy().argsort(kind="stable")]


def capacity(trace: RoutingTrace, share: float) -> int:
    """Experts that a share of all is; ValueError unless it is from 0 to 1."""
    if not 0 <= share <= 1:
        raise ValueError(f"a share is {share}; it must be from 0 to 1")
    return round(share * trace.spec.L * trace.spec.E)


def hit_rates(
    trace: RoutingTrace, shares: Iterable[float] = SHARES, policies: Sequence[str] = POLICIES
) -> dict[str, tuple[float, ...]]:
    """Policy → hit rate at each share of all experts in memory."""
    keys = accesses(trace)
    places = [capacity(trace, share) for share in shares]
    found = {}
    for policy in policies:
        hits = np.concatenate([[0], hits_by_capacity(keys, trace.spec.L * trace.spec.E, policy)])
        found[policy] = tuple(float(hits[n] / len(keys)) for n in places)
    return found


def hits_by_capacity(keys: np.ndarray, n: int, policy: str) -> np.ndarray:
    """Hits of a policy with 1, 2, …, n slots: int64 [n], of accesses [N] to keys below n."""
    if policy == "static":
        return np.sort(np.bincount(keys, minlength=n))[::-1].cumsum()
    N = len(keys)
    time = np.arange(N)
    by_key = keys.argsort(kind="stable")
    again = keys[by_key][1:] == keys[by_key][:-1]  # whether an access is followed by one to its key
    if policy == "lru":
        priority = time
    elif policy == "lfu":
        first = np.flatnonzero(np.concatenate([[True], ~again]))
        uses = np.empty(N, np.int64)
        uses[by_key] = time - np.repeat(first, np.diff(first, append=N))
        priority = uses * N + time
    elif policy == "belady":
        priority = np.full(N, -N)
        priority[by_key[:-1][again]] = -by_key[1:][again]
    else:
        raise ValueError(f"there is no policy {policy!r} here; there are {', '.join(POLICIES)}")
    return _stack_hits(keys, priority.astype(np.int64), n).cumsum()


@kernel
def _stack_hits(keys, priority, n):
    """How many accesses find their key at each depth of Mattson's stack: int64 [n].

    priority : int64 [N], of an access's key until its next access: the lowest leaves first."""
    found = np.zeros(n, np.int64)
    stack = np.empty(n + 1, np.int64)
    of = np.empty(n, np.int64)  # key → its priority
    size = 0
    for access in range(len(keys)):
        key = keys[access]
        carried = stack[0] if size else key
        stack[0] = key
        depth = 0
        while carried != key:
            depth += 1
            if depth == size:  # never seen
                stack[depth] = carried
                break
            here = stack[depth]
            if here == key or of[here] < of[carried]:
                stack[depth] = carried
                carried = here
        if carried == key and size:
            found[depth] += 1
        else:
            size += 1
        of[key] = priority[access]
    return found


def chosen(trace: RoutingTrace) -> np.ndarray:
    """Which experts each token has, one sequence after the other: bool [T, L, E]."""
    ids = in_sequence(trace).astype(np.int64)
    T, L, _ = ids.shape
    found = np.zeros((T, L, trace.spec.E + 1), bool)
    np.put_along_axis(found, ids, True, 2)
    return found[..., :-1]


def next_token_reuse(trace: RoutingTrace) -> float:
    """Share of a token's experts of a layer that the token before it in its sequence had there; nan
    without such a pair."""
    had = chosen(trace)
    sequence = np.sort(trace.sequence.numpy(), kind="stable")
    pairs = sequence[1:] == sequence[:-1]
    before = had[:-1][pairs]
    now = had[1:][pairs]
    asked = now[before.any(2)].sum()  # a layer that skipped the token before tells nothing
    return float((before & now).sum() / asked) if asked else float("nan")


def popularity(trace: RoutingTrace) -> tuple[float, float]:
    """(entropy in bits, share of the most popular quarter) of a layer's routings, mean over
    layers."""
    counts = trace.counts().numpy()
    counts = np.sort(counts[counts.any(1)])
    quarter = counts[:, -max(trace.spec.E // 4, 1) :].sum(1) / counts.sum(1)
    return fmean(map(entropy, counts)), float(quarter.mean())


def next_layer(trace: RoutingTrace) -> float:
    """How far a layer's experts tell the next layer's: share of a token's experts that are among the
    K of most conditional probability, Σ over this layer's experts e of P(e′ | e).

    The probabilities are counted on one half of the tokens and tried on the other, both ways; nan
    for a single layer."""
    halves = np.array_split(chosen(trace), 2)
    right = asked = 0
    for layer in range(trace.spec.L - 1):
        here, there = (
            [half[:, at].astype(np.float32) for half in halves] for at in (layer, layer + 1)
        )
        for fit, tried in ((0, 1), (1, 0)):
            given = here[fit].T @ there[fit] / np.maximum(here[fit].sum(0), 1)[:, None]  # [E, E]
            best = np.argsort(-(here[tried] @ given), 1, kind="stable")[:, : trace.spec.K]
            right += np.take_along_axis(there[tried], best, 1).sum()
            asked += there[tried].sum()
    return float(right / asked) if asked else float("nan")
