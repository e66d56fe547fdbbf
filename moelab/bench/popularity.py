"""Which experts are popular, and whether they still are on unseen prompts and on those of another source.

NPUMoE §4.1, §5.1 and §5.8. Prompts of the train split calibrate, those of the test split are unseen; the two share no
library file, no manual page and no key. The overlap is NPUMoE's Overlap@K, of which it does not say whether popularity
at run time is that of all unseen prompts together (`pooled`) or of each by itself (`per_prompt`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from moelab.calibration import (Calibration, calibrate, capacity_needed, chunk_loads, inclusion_probabilities, overflow,
                                overlap_at_k)
from moelab.datasets import prompts, token_count
from moelab.recording import record
from moelab.trace import DECODE, PREFILL, RoutingTrace

PHASES = {"prefill": PREFILL, "decode": DECODE}
#: two forms of one question, as different as two question-answering data sets: a buried fact, a claim about one
RELATED = ("needle", "yesno")
#: NPUMoE §5.8, prefill: mean overlap of the top 4 and 8; across data sets, of PhiMoE, by phase
PAPER, PAPER_ACROSS = {4: 0.86, 8: 0.94}, {"prefill": 0.652, "decode": 0.770}


def fair_imbalance(tokens: int, E: int, K: int) -> float:
    """Busiest ÷ mean load if experts were chosen uniformly: balls in bins."""
    return 1 + math.sqrt(2 * math.log(E) * (E / K - 1) / tokens)


def overlap(offline: Calibration, seen: Calibration, k: int, phase: int = PREFILL) -> Tensor:
    """Overlap@K of two calibrations, [L]."""
    return overlap_at_k(offline.counts(phase), seen.counts(phase), k)


@dataclass(frozen=True, eq=False)
class Popularity:
    """Traces and calibrations of a model: of each source, to calibrate on (offline) and unseen."""

    names: list[str]
    traces: dict[tuple[str, str], RoutingTrace]         # (source, split)
    offline: dict[str, Calibration]
    unseen: dict[str, Calibration]

    @classmethod
    def of(cls, model: Any, names: Sequence[str], n: int, tokens: int, new_tokens: int, batch_size: int, seed: int
           ) -> Popularity:
        """`n` prompts of each source and split, and of `RELATED`. ValueError: fewer than two sources or new tokens."""
        if len(names) < 2 or new_tokens < 2:
            raise ValueError(f"sources {', '.join(names)} and {new_tokens} new tokens: both must be at least two, to "
                             "compare data sets and to have a decode step")
        how = {"tokens": tokens, "seed": seed, "count": token_count(model.tokenizer)}
        traces = {(name, split): record(model, [p.text for p in prompts(name, n, split=split, **how)],
                                        max_new_tokens=new_tokens, batch_size=batch_size)
                  for name in dict.fromkeys((*names, *RELATED)) for split in ("train", "test")}
        return cls(list(names), traces,
                   {name: calibrate(of, source=name) for (name, split), of in traces.items() if split == "train"},
                   {name: calibrate(of, source=f"{name}, unseen") for (name, split), of in traces.items()
                    if split == "test"})

    @property
    def calibration(self) -> Calibration:
        """Of all sources together: those of one model add up."""
        return reduce(add, (self.offline[name] for name in self.names))

    @property
    def tokens(self) -> int:
        return sum(len(self.traces[name, split]) for name in self.names for split in ("train", "test"))

    def pooled(self, k: int) -> Tensor:
        """Of a source's unseen prompts together with its calibration, [sources, L]."""
        return torch.stack([overlap(self.offline[name], self.unseen[name], k) for name in self.names])

    def per_prompt(self, k: int) -> Tensor:
        """Of each unseen prompt by itself, the median over prompts, [sources, L]."""
        found = []
        for name in self.names:
            trace = self.traces[name, "test"]
            each = [calibrate(trace.select(trace.sequence == s)) for s in range(trace.sequences)]
            found.append(torch.stack([overlap(self.offline[name], one, k) for one in each]).nanquantile(0.5, 0))
        return torch.stack(found)

    def across(self, k: int, phase: int) -> Tensor:
        """Median over layers, [calibrated on, run on]; the last row is calibrated on all sources together."""
        every = [*(self.offline[name] for name in self.names), self.calibration]
        return torch.tensor([[overlap(of, self.unseen[name], k, phase).nanquantile(0.5) for name in self.names]
                             for of in every])

    def across_layers(self, k: int) -> dict[str, Tensor]:
        """Mean over ordered pairs of sources by phase, [L]."""
        pairs = [(a, b) for a in self.names for b in self.names if a != b]
        return {name: torch.stack([overlap(self.offline[a], self.unseen[b], k, phase) for a, b in pairs]).nanmean(0)
                for name, phase in PHASES.items()}

    def same_domain(self, k: int) -> dict[str, float]:
        """Between `RELATED`, median over layers, by phase."""
        first, second = RELATED
        return {name: torch.stack([overlap(self.offline[a], self.unseen[b], k, phase)
                                   for a, b in ((first, second), (second, first))]).nanquantile(0.5, 1).mean().item()
                for name, phase in PHASES.items()}

    def loads(self, split: str, size: int) -> Tensor:
        """Tokens of each expert in chunks of prefill, [chunks, L, E]."""
        return torch.cat([chunk_loads(self.traces[name, split], size) for name in self.names])

    def chunk_sizes(self, *sizes: int) -> list[int]:
        """Those that every trace has a chunk of."""
        least = min(len(trace.prefill) for (name, _), trace in self.traces.items() if name in self.names)
        return sorted({size for size in sizes if size <= least})

    def inclusion(self, batches: Sequence[int]) -> dict[int, Tensor]:
        """Probability that a decode step of so many unseen sequences needs the expert of each rank, [E]."""
        return {b: torch.stack([inclusion_probabilities(self.traces[name, "test"], b).mean(0)
                                for name in self.names]).mean(0) for b in batches}


@dataclass(frozen=True, eq=False)
class Capacities:
    """Capacities from calibration chunks, tried on unseen ones: name → [L, E], and the share that overflows [L]."""

    of: dict[str, Tensor]
    lost: dict[str, Tensor]
    busiest: Tensor                         # of an unseen chunk, mean over chunks [L]

    @classmethod
    def tried(cls, found: Popularity, chunk: int) -> Capacities:
        calibration, seen, loads = found.calibration, found.loads("train", chunk), found.loads("test", chunk)
        L, E = loads.shape[1:]
        of = {"B/E (paper's base)": torch.full((L, E), chunk / E),
              "r·B/E (paper, literally)": calibration.busiest_load(chunk)[:, None].expand(L, E),
              "r·K·B/E (with K routings a token)": calibration.busiest_load(chunk, top_k=True)[:, None].expand(L, E),
              "each expert's own, 95 % of the chunks": capacity_needed(seen, 0.95),
              "each expert's own, all chunks": capacity_needed(seen)}
        return cls(of, {name: overflow(loads, capacity.ceil()) for name, capacity in of.items()},
                   loads.amax(2).double().mean(0))

    def rows(self, routings: int) -> list[list[str]]:
        """Room over the `routings` of a chunk, and overflow: mean of layers and worst layer."""
        return [[name, f"{capacity.ceil().sum(1).double().mean() / routings:.2f}", f"{self.lost[name].nanmean():.1%}",
                 f"{self.lost[name].nan_to_num().max():.1%}"] for name, capacity in self.of.items()]
