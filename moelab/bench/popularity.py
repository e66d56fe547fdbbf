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
from collections.abc import Sequence
from functools import reduce
from itertools import permutations
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelab import open_model
from moelab.arguments import several, whole
from moelab.calibration import Calibration, calibrate
from moelab.evaluation.intervals import interval
from moelab.evaluation.questions import prompts
from moelab.library import token_count
from moelab.recording import record
from moelab.records import Numbers, Records
from moelab.static.loads import capacity_needed, chunk_loads, overflow
from moelab.trace import DECODE, PREFILL, RoutingTrace
from moelab.zipmoe.inclusion import inclusion_probabilities

PHASES = {"prefill": PREFILL, "decode": DECODE}
#: two forms of one question, as different as two question-answering data sets: a buried fact, a
#: claim about one
RELATED = ("needle", "yesno")
#: NPUMoE §5.8, prefill: mean overlap of the top 4 and 8; across data sets, of PhiMoE, by phase
PAPER = {4: 0.86, 8: 0.94}
PAPER_ACROSS = {"prefill": 0.652, "decode": 0.770}


def fair_imbalance(tokens: int, E: int, K: int) -> float:
    """Busiest ÷ mean load if experts were chosen uniformly: balls in bins."""
    return 1 + math.sqrt(2 * math.log(E) * (E / K - 1) / tokens)


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
        how = {"tokens": tokens, "seed": seed, "count": token_count(model.tokenizer)}
        traces = {
            (name, split): record(
                model,
                [p.text for p in prompts(name, n, split=split, **how)],
                max_new_tokens=new_tokens,
                batch_size=batch_size,
            )
            for name in dict.fromkeys((*names, *RELATED))
            for split in ("train", "test")
        }
        return cls(
            list(names),
            traces,
            {
                name: calibrate(of, source=name)
                for (name, split), of in traces.items()
                if split == "train"
            },
            {
                name: calibrate(of, source=f"{name}, unseen")
                for (name, split), of in traces.items()
                if split == "test"
            },
        )

    @property
    def calibration(self) -> Calibration:
        """Of all sources together: those of one model add up."""
        return reduce(add, (self.offline[name] for name in self.names))

    @property
    def tokens(self) -> int:
        """Tokens of all sources, calibrated and unseen."""
        return sum(
            len(self.traces[name, split]) for name in self.names for split in ("train", "test")
        )

    def pooled(self, k: int) -> Tensor:
        """Of a source's unseen prompts together with its calibration, [sources, L]."""
        return torch.stack(
            [overlap(self.offline[name], self.unseen[name], k) for name in self.names]
        )

    def per_prompt(self, k: int) -> Tensor:
        """Of each unseen prompt by itself, the median over prompts, [sources, L]."""
        found = []
        for name in self.names:
            trace = self.traces[name, "test"]
            each = [calibrate(trace.select(trace.sequence == s)) for s in range(trace.sequences)]
            found.append(
                torch.stack([overlap(self.offline[name], one, k) for one in each]).nanquantile(
                    0.5, 0
                )
            )
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

    def across_layers(self, k: int) -> dict[str, Tensor]:
        """Mean over ordered pairs of sources by phase, [L]."""
        pairs = [(a, b) for a in self.names for b in self.names if a != b]
        return {
            name: torch.stack(
                [overlap(self.offline[a], self.unseen[b], k, phase) for a, b in pairs]
            ).nanmean(0)
            for name, phase in PHASES.items()
        }

    def same_domain(self, k: int) -> Numbers:
        """Between `RELATED`, median over layers, by phase."""
        first, second = RELATED
        return {
            name: torch.stack(
                [
                    overlap(self.offline[a], self.unseen[b], k, phase)
                    for a, b in ((first, second), (second, first))
                ]
            )
            .nanquantile(0.5, 1)
            .mean()
            .item()
            for name, phase in PHASES.items()
        }

    def loads(self, split: str, size: int) -> Tensor:
        """Tokens of each expert in chunks of prefill, [chunks, L, E]."""
        return torch.cat([chunk_loads(self.traces[name, split], size) for name in self.names])

    def chunk_sizes(self, *sizes: int) -> list[int]:
        """Those that every trace has a chunk of."""
        least = min(
            int((trace.phase == PREFILL).sum())
            for (name, _), trace in self.traces.items()
            if name in self.names
        )
        return sorted({size for size in sizes if size <= least})

    def inclusion(self, batches: Sequence[int]) -> dict[int, Tensor]:
        """Probability that a decode step of so many unseen sequences needs the expert of each rank,
        [E]."""
        return {
            b: torch.stack(
                [
                    inclusion_probabilities(self.traces[name, "test"], b).mean(0)
                    for name in self.names
                ]
            ).mean(0)
            for b in batches
        }


class Capacities(NamedTuple):
    """Capacities from calibration chunks, tried on unseen ones: name → [L, E], and the share that
    overflows [L]."""

    of: dict[str, Tensor]
    lost: dict[str, Tensor]
    busiest: Tensor  # of an unseen chunk, mean over chunks [L]

    @classmethod
    def tried(cls, found: Popularity, chunk: int) -> Capacities:
        """What capacities from the calibration drop and pad on unseen chunks of so many tokens."""
        calibration = found.calibration
        seen = found.loads("train", chunk)
        loads = found.loads("test", chunk)
        L, E = loads.shape[1:]
        # NPUMoE §4.1 literally; but a token visits K experts
        busiest = calibration.imbalance(PREFILL)[:, None] * chunk / E
        of = {
            "B/E (paper's base)": torch.full((L, E), chunk / E),
            "r·B/E (paper, literally)": busiest.expand(L, E),
            "r·K·B/E (with K routings a token)": (calibration.spec.K * busiest).expand(L, E),
            "each expert's own, 95 % of the chunks": capacity_needed(seen, 0.95),
            "each expert's own, all chunks": capacity_needed(seen),
        }
        return cls(
            of,
            {name: overflow(loads, capacity.ceil()) for name, capacity in of.items()},
            loads.amax(2).double().mean(0),
        )

    def rows(self, routings: int) -> list[list[str]]:
        """Room over the `routings` of a chunk, and overflow: mean of layers and worst layer."""
        return [
            [
                name,
                f"{capacity.ceil().sum(1).double().mean() / routings:.2f}",
                f"{self.lost[name].nanmean():.1%}",
                f"{self.lost[name].nan_to_num().max():.1%}",
            ]
            for name, capacity in self.of.items()
        ]


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
        found = []
        tokens = 0
        for group in range(groups):
            of = {}
            for name in dict.fromkeys(name for name, _ in pairs):
                trace = offline[name]
                of[name] = calibrate(
                    trace.select((trace.sequence >= group * n) & (trace.sequence < (group + 1) * n))
                )
                tokens += of[name].tokens[PREFILL]
            found.append(
                torch.stack([overlap(of[a], seen[b], k).nanquantile(0.5) for a, b in pairs])
                .mean()
                .item()
            )
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
    how = {"tokens": tokens, "seed": seed, "count": token_count(model.tokenizer)}
    traces = [
        {
            name: record(
                model, [p.text for p in prompts(name, n, split=split, **how)], batch_size=32
            )
            for name in (*others, RELATED[1])
        }
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


OPTIONS = {
    "prompts_each": (whole(4), "of each source, to calibrate on"),
    "unseen": (whole(2), "of each, to run"),
    "sizes": (several(whole(1)), "prompts of a calibration"),
    "tokens": (whole(64), "of a prompt, about"),
    "ks": (several(whole(1)), "top experts that are compared"),
    "seed": (whole(), "picks the prompts"),
}
