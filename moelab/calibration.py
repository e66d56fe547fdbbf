"""Calibration: expert popularity, counted offline from a trace (NPUMoE §3.3, §4.1, §5.8; ZipMoE
§3.4).

`calibrate(trace)` keeps the counts and the identity of their model; what needs the order of the
tokens (loads of a prefill chunk, experts activated together by a batch) is a function of the trace.
The value E in a trace's ids ("no expert ran") is counted nowhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from moelab.files import load_tensors, save_tensors
from moelab.models.identity import same_source
from moelab.schema import Count, checked
from moelab.specs import MoESpec
from moelab.table import html_table
from moelab.trace import DECODE, PREFILL, RoutingTrace

FORMAT = "moelab.calibration/1"


def calibrate(trace: RoutingTrace, source: str = "") -> Calibration:
    """Count the experts that `trace` visited (NPUMoE §3.3); `source` : in words. ValueError without
    tokens."""
    if not len(trace):
        raise ValueError(
            "the trace has no tokens, so there is nothing to count; record at least one prompt"
        )
    counts = torch.stack(list(_counts_by_layer(trace.phase, 2, trace.ids, trace.spec.E)), 1)
    tokens = tuple(int((trace.phase == phase).sum()) for phase in (PREFILL, DECODE))
    return Calibration(counts, tokens, trace.spec, trace.model_id, source)


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """Expert counts of one model, and what follows from them; a `phase` is `PREFILL`, `DECODE` or
    None for both.

    counts_by_phase : int64 [2, L, E], routings to each expert in prefill and in decode.
    tokens : tokens seen in prefill and in decode.
    source : what it was calibrated on, in words.
    """

    counts_by_phase: torch.Tensor
    tokens: tuple[int, int]
    spec: MoESpec
    model_id: str
    source: str = ""

    def counts(self, phase: int | None = None) -> torch.Tensor:
        """Routings to each expert: int64 [L, E]."""
        return self.counts_by_phase.sum(0) if phase is None else self.counts_by_phase[phase]

    def imbalance(self, phase: int | None = None) -> torch.Tensor:
        """r_l, the busiest expert's load over the mean load (NPUMoE §4.1): float64 [L]; nan without
        tokens."""
        counts = self.counts(phase).double()
        return counts.amax(1) / counts.mean(1)

    def busiest_load(self, B: int, top_k: bool = False) -> torch.Tensor:
        """Estimated tokens of the busiest expert in a prefill chunk of B tokens: float64 [L].

        NPUMoE §4.1 literally: r_l · B/E. But a token visits K experts, so with `top_k` it is r_l ·
        K·B/E. Neither is a bound: single chunks are more skewed than the whole calibration
        (`capacity_needed`)."""
        return self.imbalance(PREFILL) * B / self.spec.E * (self.spec.K if top_k else 1)

    def require(self, model_id: str, spec: MoESpec) -> Calibration:
        """This calibration; ValueError if it is another model's."""
        if same_source(model_id, self.model_id) and spec.fingerprint() == self.spec.fingerprint():
            return self
        raise ValueError(
            f"this calibration belongs to {self.spec.name} (model id {self.model_id}, geometry "
            f"{self.spec.fingerprint()}), not to {spec.name} (model id {model_id}, geometry {spec.fingerprint()}). "
            f"Expert numbers mean nothing in another model: record and calibrate {spec.name} itself."
        )

    def __add__(self, other: Calibration) -> Calibration:
        """The calibration of both sets of prompts; ValueError if they are of different models."""
        other.require(self.model_id, self.spec)
        return Calibration(
            self.counts_by_phase + other.counts_by_phase,
            tuple(a + b for a, b in zip(self.tokens, other.tokens)),
            self.spec,
            self.model_id,
            " + ".join(source for source in (self.source, other.source) if source),
        )

    def save(self, path: str | Path) -> Path:
        """Write to `path` atomically (a .safetensors file); returns the path."""
        return save_tensors(
            path,
            FORMAT,
            {"counts": self.counts_by_phase},
            spec=self.spec.to_dict(),
            model_id=self.model_id,
            tokens=self.tokens,
            source=self.source,
        )

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a calibration. Raises FileNotFoundError, ValueError: not a whole and readable
        calibration."""
        return load_tensors(
            path,
            FORMAT,
            "calibration",
            "moelab.calibrate(trace).save(path)",
            {"tokens": tuple[Count, Count], "spec": MoESpec, "model_id": str, "source": str},
            cls._loaded,
        )

    @classmethod
    def _loaded(
        cls,
        tensors: dict[str, torch.Tensor],
        tokens: tuple[int, int],
        spec: MoESpec,
        model_id: str,
        source: str,
    ) -> Calibration:
        counts = checked(tensors, "counts", ("int64",), (2, spec.L, spec.E), 0)
        most = torch.tensor(tokens, dtype=torch.float64)[:, None] * spec.K
        if not counts.any() or (counts.double().sum(2) > most).any():
            raise ValueError(f"its counts are all zero, or more than {spec.K} a token and layer")
        return cls(counts, tokens, spec, model_id, source)

    def summary(self) -> dict[str, str]:
        lines = {
            "model": f"{self.spec.name} ({self.spec.L} MoE layers, {self.spec.E} experts, top-{self.spec.K})",
            "calibrated on": self.source or "not said",
        }
        for name, phase in (("prefill", PREFILL), ("decode", DECODE)):
            r, dead = self.imbalance(phase), int((self.counts(phase) == 0).sum())
            r = r[~r.isnan()]  # layers that these tokens do not pass
            skew = f"{r.min():.2f} to {r.max():.2f} over layers" if len(r) else "unknown"
            lines[name] = (
                f"{self.tokens[phase]:,} tokens; busiest expert ÷ mean {skew}; "
                f"{dead} of {self.spec.L * self.spec.E} experts unused"
            )
        return lines

    def __repr__(self) -> str:
        return "Calibration(" + "; ".join(f"{k}: {v}" for k, v in self.summary().items()) + ")"

    def _repr_html_(self) -> str:
        return html_table("Calibration", self.summary())


def ranking(counts: torch.Tensor) -> torch.Tensor:
    """Expert ids from most to least popular, equal counts in order of their ids: [..., E] → int64
    [..., E]."""
    return counts.argsort(dim=-1, descending=True, stable=True)


def overlap_at_k(offline: torch.Tensor, runtime: torch.Tensor, k: int) -> torch.Tensor:
    """Overlap@K: the share of the k most popular experts that two sets of counts [L, E] agree on:
    float64 [L].

    nan where either side has no token; random rankings overlap in k/E. NPUMoE §5.1 takes the median
    over layers, `overlap_at_k(…).nanquantile(0.5)`. ValueError for counts of different models, or k
    outside 1 … E."""
    if offline.shape != runtime.shape:
        raise ValueError(
            f"counts of different models cannot overlap: {list(offline.shape)}, {list(runtime.shape)}"
        )
    E = offline.shape[-1]
    if not 1 <= k <= E:
        raise ValueError(f"k is {k}; with {E} experts a layer it must be 1 to {E}")
    in_top = [
        torch.zeros(counts.shape, dtype=torch.bool).scatter_(1, ranking(counts)[:, :k], True)
        for counts in (offline, runtime)
    ]
    overlap = (in_top[0] & in_top[1]).sum(1).double() / k
    return overlap.masked_fill((offline.sum(1) == 0) | (runtime.sum(1) == 0), torch.nan)


def chunk_loads(trace: RoutingTrace, B: int) -> torch.Tensor:
    """Tokens of each expert in each whole chunk of B consecutive prefill tokens, prompts packed:
    int64 [n, L, E]."""
    ids = trace.ids[trace.phase == PREFILL]
    n = len(ids) // B if B > 0 else 0
    if n == 0:
        raise ValueError(
            f"a chunk of B={B} tokens cannot be cut from {len(ids)} prefill tokens; "
            f"choose B between 1 and that, or record more prompts"
        )
    return loads_of_ids(ids[: n * B], B, trace.spec.E)


def loads_of_ids(ids: torch.Tensor, B: int, E: int) -> torch.Tensor:
    """The same of ids [T, L, K], the last chunk with what is left: int64 [⌈T/B⌉, L, E]."""
    return torch.stack(
        list(_counts_by_layer(torch.arange(len(ids)) // B, -(-len(ids) // B), ids, E)), 1
    )


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
    sequence, position, ids = (
        trace.sequence[decode].long(),
        trace.position[decode].long(),
        trace.ids[decode],
    )
    groups = trace.sequences // batch if batch > 0 else 0
    # the i-th decode token of a sequence, however long its prompt was: position less the sequence's
    # first one
    first = torch.full((trace.sequences,), torch.iinfo(torch.int64).max).scatter_reduce_(
        0, sequence, position, "amin"
    )
    group, step = sequence // max(batch, 1), position - first[sequence]
    steps = int(step.max()) + 1 if len(step) else 0
    kept = group < groups
    where, ids = (group * steps + step)[kept], ids[kept]
    full = torch.bincount(where, minlength=groups * steps) == batch  # every sequence still decodes
    if not full.any():
        raise ValueError(
            f"no {batch} sequences decode together in this trace of {trace.sequences} sequences and "
            f"{len(sequence)} decode tokens; choose a smaller batch of at least 1, or record more"
        )
    layers = _counts_by_layer(where, groups * steps, ids, trace.spec.E)
    f = torch.stack([(counts[full] > 0).double().mean(0) for counts in layers])
    return f.sort(1, descending=True).values


def _counts_by_layer(
    bins: torch.Tensor, n: int, ids: torch.Tensor, E: int
) -> Iterator[torch.Tensor]:
    """Routings per bin and expert, one layer at a time: bins [T] in 0 … n−1, ids [T, L, K] → L ×
    int64 [n, E]."""
    base = bins.long()[:, None] * (E + 1)  # id E is "none"
    for layer in ids.unbind(1):
        yield torch.bincount((base + layer).reshape(-1), minlength=n * (E + 1)).view(n, E + 1)[
            :, :E
        ]
