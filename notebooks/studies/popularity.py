"""Which experts are popular, and whether they still are on unseen prompts and on those of another
source.

NPUMoE §4.1, §5.1 and §5.8. Prompts of the train split calibrate, those of the test split are
unseen; the two share no library file, no manual page and no key. The overlap is NPUMoE's Overlap@K,
of which it does not say whether popularity at run time is that of all unseen prompts together
(`pooled`) or of each by itself (`per_prompt`).

`moelab bench popularity` asks whether overlap across data sets is low because calibrations are
small: it calibrates on disjoint groups of ever more prompts, each against all unseen prompts of
another source, in prefill. How many the paper takes it does not say. Intervals, 95 %, are over
groups. Models differ in their number of experts, so "above chance" is (overlap − k/E) / (1 − k/E).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelab import open_model
from moelab.base.arguments import several, whole
from moelab.base.library import token_count
from moelab.base.records import Numbers, Records
from moelab.calibration import Calibration, calibrate
from moelab.evaluation.intervals import interval
from moelab.evaluation.questions import prompts
from moelab.recording import record
from moelab.trace import DECODE, PREFILL, RoutingTrace, counted

from .chunks import chunk_loads

#: two forms of one question, as different as two question-answering data sets: a buried fact, a
#: claim about one
RELATED = ("needle", "yesno")


def overlap(offline: Calibration, seen: Calibration, k: int, phase: int = PREFILL) -> Tensor:
    """Overlap@K of two calibrations, [L]."""
    return overlap_at_k(offline.counts(phase), seen.counts(phase), k)


def overlap_at_k(offline: Tensor, runtime: Tensor, k: int) -> Tensor:
    """Overlap@K: the share of the k most popular experts that two sets of counts [L, E] agree on:
    float64 [L]; equal counts in order of their ids.

    nan where either side has no token; random rankings overlap in k/E. NPUMoE §5.1 takes the median
    over layers, `overlap_at_k(…).nanquantile(0.5)`. ValueError for k outside 1 … E."""
    E = offline.shape[-1]
    if not 1 <= k <= E:
        raise ValueError(f"k is {k}; with {E} experts a layer it must be 1 to {E}")
    ranks = (counts.argsort(dim=1, descending=True, stable=True) for counts in (offline, runtime))
    in_top = [torch.zeros(offline.shape).scatter(1, ranked[:, :k], 1.0) for ranked in ranks]
    shared = (in_top[0] * in_top[1]).sum(1).double() / k
    return shared.masked_fill((offline.sum(1) == 0) | (runtime.sum(1) == 0), torch.nan)


class Popularity(NamedTuple):
    """Traces and calibrations of a model: of each source, to calibrate on (offline) and unseen."""

    names: list[str]
    traces: dict[tuple[str, str], RoutingTrace]  # (source, split)
    offline: dict[str, Calibration]
    unseen: dict[str, Calibration]

    @classmethod
    def of(
        cls,
        model: Any,
        names: Sequence[str],
        n: int,
        tokens: int,
        new_tokens: int,
        batch_size: int,
        seed: int,
    ) -> Popularity:
        """`n` prompts of each source and split, and of `RELATED`. ValueError: fewer than two
        sources or new tokens."""
        if len(names) < 2 or new_tokens < 2:
            raise ValueError(
                f"sources {', '.join(names)} and {new_tokens} new tokens: both must be at "
                "least two, to compare data sets and to have a decode step"
            )
        every = dict.fromkeys((*names, *RELATED))
        how = {"tokens": tokens, "seed": seed, "max_new_tokens": new_tokens}
        by_split = {
            split: recorded(model, every, n, split, batch_size=batch_size, **how)
            for split in ("train", "test")
        }
        offline, unseen = (
            {name: calibrate(of, source=name) for name, of in traces.items()}
            for traces in by_split.values()
        )
        traces = {(name, split): of[name] for split, of in by_split.items() for name in every}
        return cls(list(names), traces, offline, unseen)

    @classmethod
    def of_traces(cls, given: Mapping[str, RoutingTrace]) -> Popularity:
        """Of traces that others recorded, name → trace: every other sequence is unseen, of a single
        one the second half."""
        halves = {name: halved(trace) for name, trace in given.items()}
        traces = {
            (name, split): of
            for name, pair in halves.items()
            for split, of in zip(("train", "test"), pair)
        }
        offline, unseen = (
            {name: calibrate(pair[i], source=name) for name, pair in halves.items()} for i in (0, 1)
        )
        return cls(list(given), traces, offline, unseen)

    @property
    def phases(self) -> dict[str, int]:
        """Those of which every calibration has tokens."""
        every = [*self.offline.values(), *self.unseen.values()]
        named = {"prefill": PREFILL, "decode": DECODE}
        return {name: at for name, at in named.items() if all(of.tokens[at] for of in every)}

    @property
    def main(self) -> str:
        """The phase that has more of the tokens."""
        return max(self.phases, key=lambda name: self.calibration.tokens[self.phases[name]])

    @property
    def calibration(self) -> Calibration:
        """Of all sources together: those of one model add up."""
        every = [self.offline[name] for name in self.names]
        for of in every:
            of.require(every[0].model_id, every[0].spec)
        counts = sum(of.counts_by_phase for of in every)
        tokens = tuple(map(sum, zip(*(of.tokens for of in every))))
        source = " + ".join(filter(None, (of.source for of in every)))
        return replace(every[0], counts_by_phase=counts, tokens=tokens, source=source)

    def pooled(self, k: int) -> Tensor:
        """Overlap@K of a source's unseen prompts together with its calibration, [sources, L]."""
        phase = self.phases[self.main]
        return torch.stack(
            [overlap(self.offline[name], self.unseen[name], k, phase) for name in self.names]
        )

    def per_prompt(self, k: int) -> Tensor:
        """Of each unseen prompt by itself, the median over prompts, [sources, L]."""
        found, phase = [], self.phases[self.main]
        for name in self.names:
            trace = self.traces[name, "test"]
            each = [calibrate(trace.select(trace.sequence == s)) for s in range(trace.sequences)]
            by_prompt = torch.stack([overlap(self.offline[name], one, k, phase) for one in each])
            found.append(by_prompt.nanquantile(0.5, 0))
        return torch.stack(found)

    def across(self, k: int, phase: int) -> Tensor:
        """Median over layers, [calibrated on, run on]; the last row is calibrated on all sources
        together."""
        every = [*(self.offline[name] for name in self.names), self.calibration]
        return torch.tensor(
            [
                [overlap(of, self.unseen[name], k, phase).nanquantile(0.5) for name in self.names]
                for of in every
            ]
        )

    def between(self, names: Sequence[str], k: int, phase: int) -> Tensor:
        """Calibrated on one and run on another of these sources, [ordered pairs, L]."""
        return torch.stack(
            [overlap(self.offline[a], self.unseen[b], k, phase) for a, b in permutations(names, 2)]
        )

    def loads(self, split: str, size: int) -> Tensor:
        """Tokens of each expert in chunks of prefill, [chunks, L, E]."""
        traces = (self.traces[name, split].in_phase(PREFILL, size) for name in self.names)
        return torch.cat([chunk_loads(trace, size) for trace in traces])


def halved(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace]:
    """Every other sequence, and the rest, numbered anew; of one sequence the first and the second
    half of each phase's tokens."""
    known, number = trace.sequence.unique(return_inverse=True)
    later = number % 2 == 1
    if len(known) == 1:
        for phase in trace.phase.unique():
            mine = torch.nonzero(trace.phase == phase).flatten()
            later[mine[len(mine) // 2 :]] = True
    parts = (trace.select(mask) for mask in (~later, later))
    first, second = (
        replace(part, sequence=part.sequence.unique(return_inverse=True)[1].int()) for part in parts
    )
    return first, second


def recorded(
    model: Any,
    names: Iterable[str],
    n: int,
    split: str,
    *,
    tokens: int,
    seed: int,
    **how: Any,
) -> dict[str, RoutingTrace]:
    """The routing of n prompts of each source."""
    asked = {"tokens": tokens, "seed": seed, "count": token_count(model.tokenizer)}
    return {
        name: record(model, [p.text for p in prompts(name, n, split=split, **asked)], **how)
        for name in names
    }


def by_size(
    offline: dict[str, RoutingTrace],
    unseen: dict[str, RoutingTrace],
    pairs: Sequence[tuple[str, str]],
    sizes: Sequence[int],
    k: int,
    most: int = 8,
) -> dict[int, Numbers]:
    """Prompts calibrated on → Overlap@K of (calibrated on, run on), median over layers, mean over
    the pairs; with the 95 % interval over at most so many disjoint groups of prompts. Sizes of
    which there are not two groups are left out."""
    seen = {name: calibrate(unseen[name]) for _, name in pairs}
    rows = {}
    for n in sizes:
        groups = min(most, min(offline[name].sequences for name, _ in pairs) // n)
        if groups < 2:
            continue
        found, tokens = [], 0
        for group in range(groups):
            of = {}
            for name in dict.fromkeys(name for name, _ in pairs):
                trace = offline[name]
                of[name] = calibrate(trace.select(trace.sequence // n == group))
                tokens += of[name].tokens[PREFILL]
            agreed = [overlap(of[a], seen[b], k).nanquantile(0.5) for a, b in pairs]
            found.append(torch.stack(agreed).mean().item())
        chance = k / offline[pairs[0][0]].spec.E
        mean, low, high = interval(found)
        rows[n] = {
            "tokens": tokens / groups / len(of),
            "overlap": mean,
            "from": low,
            "to": high,
            "groups": groups,
            "above chance": (mean - chance) / (1 - chance),
        }
    return rows


def run(
    prompts_each: int = 256,
    unseen: int = 48,
    sizes: Sequence[int] = (1, 4, 16, 64),
    tokens: int = 256,
    ks: Sequence[int] = (4, 8),
    seed: int = 0,
) -> Records:
    model = open_model()
    others = ("code", "prose", "lookup", RELATED[0])
    how = {"tokens": tokens, "seed": seed, "batch_size": 32}
    traces = [
        recorded(model, (*others, RELATED[1]), n, split, **how)
        for split, n in (("train", prompts_each), ("test", unseen))
    ]
    kinds = {
        "the same source": [(name, name) for name in others],
        "another source": list(permutations(others, 2)),
        "two forms of one question": list(permutations(RELATED, 2)),
    }
    E = traces[0]["code"].spec.E
    return {
        f"Overlap@{k} of {E} experts, chance {k / E:.1%}, prefill (measured)": {
            f"{kind}, {n} prompts": row
            for kind, pairs in kinds.items()
            for n, row in by_size(*traces, pairs, sizes, k).items()
        }
        for k in ks
    }


def capacity_needed(loads: torch.Tensor, quantile: float = 1.0) -> torch.Tensor:
    """The capacity that would have held every expert's tokens in a share `quantile` of the chunks:
    [L, E].

    loads : int64 [n, L, E] from `chunk_loads`. The answer is a load that occurred, never
    interpolated."""
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile is {quantile}; it must lie between 0 and 1")
    return loads.sort(0).values[max(math.ceil(quantile * len(loads)), 1) - 1]


def overflow(loads: torch.Tensor, capacity: torch.Tensor | float) -> torch.Tensor:
    """Share of a layer's routings beyond the experts' capacity, d_e = max(0, n_e − C) (NPUMoE
    §4.1): [L].

    `loads` is int64 [n, L, E]; `capacity` one number, or one per layer [L, 1] or per expert [L, E].
    """
    return (loads.double() - capacity).clamp(min=0).sum((0, 2)) / loads.sum((0, 2))


def inclusion_probabilities(trace: RoutingTrace, batch: int = 1) -> torch.Tensor:
    """f_r, the share of decode steps that need the expert of rank r, for `batch` sequences (ZipMoE
    §3.4, App. D).

    Sequences 0 … b−1 decode together, then b … 2b−1, and so on; a step is the union of the experts
    that their i-th decode tokens activate, and counts while all b still decode. float64 [L, E],
    falling along the ranks; summed over ranks, the mean number of distinct experts a step.
    ValueError: no `batch` sequences decode together in the trace."""
    decode = trace.phase == DECODE
    sequence = trace.sequence[decode].long()
    position = trace.position[decode].long()
    ids = trace.ids[decode]
    groups = trace.sequences // batch if batch > 0 else 0
    # the i-th decode token of a sequence, however long its prompt was: position less the sequence's
    # first one
    first = torch.full((trace.sequences,), torch.iinfo(torch.int64).max).scatter_reduce_(
        0, sequence, position, "amin"
    )
    group = sequence // max(batch, 1)
    step = position - first[sequence]
    steps = int(step.max()) + 1 if len(step) else 0
    kept = group < groups
    where = (group * steps + step)[kept]
    ids = ids[kept]
    full = torch.bincount(where, minlength=groups * steps) == batch  # every sequence still decodes
    if not full.any():
        raise ValueError(
            f"no {batch} sequences decode together in this trace of {trace.sequences} sequences and "
            f"{len(sequence)} decode tokens; choose a smaller batch of at least 1, or record more"
        )
    layers = (
        counted(ids[:, l : l + 1], trace.spec.E, where, groups * steps)[full, 0]
        for l in range(trace.spec.L)
    )
    f = torch.stack([(counts > 0).double().mean(0) for counts in layers])
    return f.sort(1, descending=True).values


OPTIONS = {
    "prompts_each": (whole(4), "of each source, to calibrate on"),
    "unseen": (whole(2), "of each, to run"),
    "sizes": (several(whole(1)), "prompts of a calibration"),
    "tokens": (whole(64), "of a prompt, about"),
    "ks": (several(whole(1)), "top experts that are compared"),
    "seed": (whole(), "picks the prompts"),
}
