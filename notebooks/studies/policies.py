"""Which cache policy has the fewest misses on real routing?

    moelab bench policies --traces DIR

replays every trace under DIR that `moelab.trace.load` reads, through the same objects that decide
in the engine (`Residency` and its policies): one pool for all layers ("model"), or one for each
("layer"), empty at the start, one text after another, token by token; and once more with each
prompt's prefill as a single step, as an engine takes it. "lru", "lfu" and "static" (the most
popular experts of the trace itself, loaded before) are `moelab.trace.statistics`'; "belady" is the
most hits of any policy, bypass allowed (`most_hits.py`). Of a long trace every nth text is
taken, so that about `tokens` remain; 0 takes all.

"gap closed" is what `next-use` gains over `lrfu`, as a share of what Belady gains, if anything.

The constants of `next-use` were chosen on the first half of gpt-oss-20b's texts, on
DeepSeek-V2-Lite's law and summaries and on the first half of Qwen3-30B-A3B's generation. All other
traces were then run once. A trace of such a part is named so. Records name traces and their
digests, not where they lie.
"""

from __future__ import annotations

import warnings
from argparse import ArgumentTypeError
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from moelab.base.arguments import folder, number, one_of, several, whole
from moelab.base.files import absolute
from moelab.base.progress import progress
from moelab.base.records import Numbers, Records
from moelab.base.specs import ExpertKey
from moelab.cache.policies import LRFU
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.trace import PREFILL, RoutingTrace, load
from moelab.trace.reading import READERS
from moelab.trace.statistics import hit_rates

from .most_hits import belady_hits, request_count

KIND = "exact"
MEASURES = ("moelab/cache",)
#: counted in one pass over the accesses, for all shares
COUNTED = ("lru", "lfu", "static")
HALF_LIVES = (4, 64, 256)


class LeastStale:
    """Stale experts first, then those of the layers whose next turn is furthest away.

    After SpecMD (Hoang et al. 2026, arXiv 2602.03921). An expert is stale if it was not used the
    last time that its layer ran. Among the stale, and then among the rest, the layer that ran last
    goes first; within a layer, the least recently used. The paper's prefetching and its exact order
    among the stale are left out."""

    def __init__(self) -> None:
        #: layer → key → last step, oldest first
        self._layers: dict[int, dict[ExpertKey, int]] = {}
        self._ran: dict[int, int] = {}
        self._latest = 0

    def touch(self, key: ExpertKey, step: int) -> None:
        order = self._layers.setdefault(key.layer, {})
        order.pop(key, None)
        order[key] = self._ran[key.layer] = step
        self._latest = key.layer

    def victim(self, resident: Collection[ExpertKey]) -> ExpertKey:
        fresh = None
        for layer in sorted(
            self._layers, key=lambda layer: (layer <= self._latest, layer), reverse=True
        ):
            order = self._layers[layer]
            key = next((key for key in order if key in resident), None)
            if key is not None and order[key] < self._ran[layer]:
                return key
            fresh = fresh or key
        return fresh

    def forget(self, key: ExpertKey) -> None:
        self._layers.get(key.layer, {}).pop(key, None)


#: name → (policy, scope)
ARMS = {name: (name, "model") for name in ("lrfu", "next-use", "marking", "zipmoe")}
ARMS |= {"least-stale": (LeastStale, "model")}
ARMS |= {f"{name}, layer": (name, "layer") for name in ("lru", "lfu", "lrfu", "next-use")}
ARMS |= {
    f"lrfu {turns}": (type(f"LRFU{turns}", (LRFU,), {"half_life": turns}), "model")
    for turns in HALF_LIVES
}
#: those that are compared with a prefill as one step
IN_STEPS = ("lrfu", "next-use", "next-use, layer")

#: (layer, {expert: tokens}) in the order of a run
Steps = list[tuple[int, dict[int, int]]]


class Traces:
    """The traces under a folder; as text, their names and digests.

    Raises ValueError: there is none."""

    def __init__(self, text: str) -> None:
        root = absolute(folder(text))
        files = [file for file in sorted(root.rglob("*")) if file.suffix in READERS]
        self._files = {self._name(file.relative_to(root)): file for file in files}
        if not files:
            raise ArgumentTypeError(
                f"{text!r} has no trace: no file that ends in {', '.join(READERS)}"
            )

    def __iter__(self) -> Iterator[tuple[str, RoutingTrace]]:
        for name, file in self._files.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of columns beyond routing
                yield name, load(file)

    def __str__(self) -> str:
        digests = (sha256(file.read_bytes()).hexdigest()[:12] for file in self._files.values())
        return "; ".join(f"{name} {digest}" for name, digest in zip(self._files, digests))

    @staticmethod
    def _name(file: Path) -> str:
        return str(
            file.parent if file.stem == "trace" and file.parent.name else file.with_suffix("")
        )


def part(trace: RoutingTrace, tokens: int) -> RoutingTrace:
    """Every nth text of a trace, so that about `tokens` remain; 0: all of it."""
    every = max(1, len(trace) // tokens) if tokens else 1
    return trace.select(trace.sequence % min(every, trace.sequences) == 0)


def steps(trace: RoutingTrace, prefill_at_once: bool = False) -> Steps:
    """One text after another, token by token or with a prompt's prefill as one step a layer."""
    E = trace.spec.E
    order = trace.sequence.numpy().argsort(kind="stable")
    ids, sequence = trace.ids.numpy()[order], trace.sequence.numpy()[order]
    phase = trace.phase.numpy()[order]
    together = prefill_at_once & (phase[1:] == PREFILL) & (phase[:-1] == PREFILL)
    new = np.flatnonzero(~(together & (sequence[1:] == sequence[:-1]))) + 1
    found = []
    for rows in np.split(ids, new):
        for layer in range(trace.spec.L):
            experts, counts = np.unique(rows[:, layer], return_counts=True)
            ran = experts < E
            if ran.any():
                found.append((layer, dict(zip(experts[ran].tolist(), counts[ran].tolist()))))
    return found


def hit_rate(trace: RoutingTrace, run: Steps, arm: str, share: float) -> float:
    """Of a policy of `ARMS`, with memory for a share of the experts."""
    policy, scope = ARMS[arm]
    L, E = trace.spec.L, trace.spec.E
    held = max(1, round(share * (E if scope == "layer" else L * E)))
    residency = Residency(L, E, Pools(F=held), policy, scope)
    for layer, tokens in run:
        residency.begin(layer, tokens)
    return residency.counters.hit_rate()


def with_ceiling(trace: RoutingTrace, run: Steps, arms: Iterable[str], share: float) -> Numbers:
    """Hit rates of `arms` and of Belady's policy, and the gap that next-use closes."""
    rates = {arm: hit_rate(trace, run, arm, share) for arm in arms}
    held = max(1, round(share * trace.spec.L * trace.spec.E))
    rates["belady"] = best = belady_hits(run, held) / request_count(run)
    if gap := best - rates["lrfu"]:
        rates["gap closed"] = (rates["next-use"] - rates["lrfu"]) / gap
    return rates | {"requests": request_count(run)}


def run(
    traces: Traces,
    tokens: int = 1000,
    shares: Sequence[float] = (0.1, 0.25, 0.5, 0.75),
    arms: Sequence[str] = tuple(ARMS),
) -> Records:
    sections: Records = {}
    how = "about " + f"{tokens:,} tokens" if tokens else "whole traces"
    for name, trace in progress(list(traces), "replaying", unit="trace"):
        trace = part(trace, tokens)
        one = steps(trace)
        counted = hit_rates(trace, shares, COUNTED)
        for at, share in enumerate(shares):
            rates = {policy: counted[policy][at] for policy in COUNTED}
            row = rates | with_ceiling(trace, one, arms, share) | {"tokens": len(trace)}
            sections.setdefault(f"{share:.0%} of the experts, {how}", {})[name] = row
            if (trace.phase == PREFILL).any():
                kept = [arm for arm in arms if arm in IN_STEPS]
                title = f"{share:.0%} of the experts, {how}, a prompt's prefill in one step"
                at_once = with_ceiling(trace, steps(trace, True), kept, share)
                sections.setdefault(title, {})[name] = at_once
    return sections


OPTIONS = {
    "traces": ({"type": Traces, "metavar": "DIR"}, "a folder with traces"),
    "tokens": (whole(0), "of a trace, about; 0: all"),
    "shares": (several(number(above=0)), "of all experts that a cache has memory for"),
    "arms": (several(one_of(ARMS)), "policies to replay; lrfu and next-use must be among them"),
}
