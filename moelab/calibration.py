"""Calibration: expert popularity, counted offline from a trace (NPUMoE §3.3, §4.1).

`calibrate(trace)` keeps the counts and the identity of their model. What needs the order of the
tokens is computed from the trace: loads of prefill chunks (`notebooks/studies/chunks.py`), experts that a
batch activates together (`notebooks/studies/popularity.py`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from moelab.base.files import absolute, load_tensors, save_tensors
from moelab.base.schema import Count, checked, naming
from moelab.base.specs import MoESpec
from moelab.checkpoint.quantize import FORMAT, Inputs
from moelab.models.identity import same_source
from moelab.trace import DECODE, PREFILL, RoutingTrace, counted, popularity
from moelab.trace.foreign import model_of


def calibrate(trace: RoutingTrace, source: str = "", inputs: int = 0) -> Calibration:
    """Count the experts that `trace` visited (NPUMoE §3.3).

    source : in words.    inputs : tokens drawn from the trace, which then has hidden states, to keep
        what experts were given.

    Raises ValueError without tokens, or without their hidden states."""
    if not len(trace):
        raise ValueError(
            "the trace has no tokens, so there is nothing to count; record at least one prompt"
        )
    counts = counted(trace.ids, trace.spec.E, trace.phase, 2)
    tokens = tuple(int((trace.phase == phase).sum()) for phase in (PREFILL, DECODE))
    kept = None
    if inputs:
        if trace.router_inputs is None:
            raise ValueError("the trace has no hidden states: record(model, prompts, hidden=True)")
        order = torch.randperm(len(trace), generator=torch.Generator().manual_seed(0))
        drawn = order[:inputs].sort()[0]
        columns = (trace.router_inputs, trace.ids, trace.weights)
        by_layer = (of[drawn].transpose(0, 1).contiguous() for of in columns)
        stream = trace.residuals[drawn].float().square().sum(2).mean(0)
        kept = Inputs(*by_layer, 1 / stream, trace.model_id)
    return Calibration(counts, tokens, trace.spec, trace.model_id, source, kept)


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """Expert counts of one model, and what follows from them; a `phase` is `PREFILL`, `DECODE` or
    None for both.

    counts_by_phase : int64 [2, L, E], routings to each expert in prefill and in decode.
    tokens : tokens seen in prefill and in decode.
    source : what it was calibrated on, in words.
    inputs : what its experts were given, for rounding; None unless asked for.
    """

    counts_by_phase: torch.Tensor
    tokens: tuple[int, int]
    spec: MoESpec
    model_id: str
    source: str = ""
    inputs: Inputs | None = None

    def counts(self, phase: int | None = None) -> torch.Tensor:
        """Routings to each expert: int64 [L, E]."""
        return self.counts_by_phase.sum(0) if phase is None else self.counts_by_phase[phase]

    def imbalance(self, phase: int | None = None) -> torch.Tensor:
        """r_l, the busiest expert's load over the mean load (NPUMoE §4.1): float64 [L]; nan without
        tokens."""
        counts = self.counts(phase).double()
        return counts.amax(1) / counts.mean(1)

    def require(self, model_id: str, spec: MoESpec) -> Calibration:
        """This calibration; ValueError if it is another model's."""
        if same_source(model_id, self.model_id) and spec.fingerprint() == self.spec.fingerprint():
            return self
        raise ValueError(
            f"this calibration belongs to {self.spec.name} (model id {self.model_id}, geometry "
            f"{self.spec.fingerprint()}), not to {spec.name} (model id {model_id}, geometry {spec.fingerprint()}). "
            f"Expert numbers mean nothing in another model: record and calibrate {spec.name} itself."
        )

    def save(self, path: str | Path) -> Path:
        """Write to `path` atomically (a .safetensors file); returns the path."""
        return save_tensors(
            path,
            FORMAT,
            {"counts": self.counts_by_phase}
            | dict(zip(Inputs._fields, self.inputs[:-1] if self.inputs else ())),
            spec=asdict(self.spec),
            model_id=self.model_id,
            tokens=self.tokens,
            source=self.source,
        )

    @classmethod
    def load(cls, path: str | Path, model: str | Path | None = None) -> Calibration:
        """Read a calibration; or counts of another program (`moelab.trace.popularity`), which all
        count as of prefill.

        model : whose the counts are, as of `moelab.trace.load`.

        Raises FileNotFoundError, ValueError: not a whole and readable calibration."""
        path = absolute(path)
        if path.suffix.lower() in (".gguf", ".csv"):
            known = model_of(model)
            with naming(path, "list of experts' counts", "counting again"):
                counts, tokens, spec, model_id = popularity.read(path, *known)
            by_phase = torch.from_numpy(np.stack([counts, np.zeros_like(counts)]))
            return cls(by_phase, (tokens, 0), spec, model_id, path.name)
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
        return cls(counts, tokens, spec, model_id, source, Inputs.read(tensors, spec, model_id))

    def __repr__(self) -> str:
        prefill, decode = self.tokens
        return (
            f"Calibration({self.spec.name}, on {self.source or 'prompts that are not named'}: "
            f"{prefill:,} tokens in prefill, {decode:,} in decode)"
        )
