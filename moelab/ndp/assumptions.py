"""What GPU-NDP's text leaves open, as one choice of each: the paper's machine, systems and routing
(§IV). Notebook 07 tries the other choices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from moelab.cards import load_model
from moelab.ndp.hardware import VARIANTS, Hardware, hardware
from moelab.ndp.routing import PromptRouting, simulated_routing
from moelab.ndp.systems import GPUNDP, SYSTEMS, MoNDE, System
from moelab.registry import require
from moelab.specs import MoESpec


@dataclass(frozen=True)
class Assumptions:
    """What the paper leaves open; notebook 07 says where each is, and what else it could be.

    The defaults are one of the combinations that fit six of the paper's numbers, found by a descent
    that saw those only.
    mapping, clock_ghz, efficiency, gpu_gb : see `hardware`. zipf, bias : see `simulated_routing`.
    monde_… : of MoNDE, see `systems.MoNDE`. placement : see `simulation.place`.
    rounding, eq2_tokens, limit : of the literal versions, see `systems.GPUNDP`.
    cached : who keeps popular experts in GPU memory: "none", "Fiddler", or "all": equal means,
        everyone fills it.
    averaged : numbers of units that the paper's averages run over. shared_dram : see `hardware`;
    not the paper's."""

    zipf: float = 0.2
    bias: float = 0.3
    mapping: str = "RoBaRaCoCh"
    clock_ghz: float = 0.8
    efficiency: tuple[float, float] = (0.85, 0.8)
    gpu_gb: float = 16.0
    placement: str = "id"
    monde_prefill: str = "none"
    monde_relieves: str = "popular"
    monde_rounding: str = "round"
    rounding: str = "floor"
    eq2_tokens: str = "mean"
    limit: str = "K"
    cached: str = "none"
    averaged: tuple[int, ...] = (2, 3, 4, 5, 6)
    shared_dram: bool = False

    def hardware(self, N: int, **changes: Any) -> Hardware:
        """The paper's machine under these assumptions; `changes` are other arguments of
        `hardware`."""
        own = {
            name: getattr(self, name)
            for name in ("mapping", "clock_ghz", "efficiency", "gpu_gb", "shared_dram")
        }
        return hardware(N, **own | changes)

    def variant(self, name: str, N: int) -> Hardware:
        """Another machine, of `moelab.ndp.hardware.VARIANTS`; its units have their own clock."""
        require("machine", name, VARIANTS)
        return self.hardware(N, **({"clock_ghz": None} | VARIANTS[name]))

    def system(self, name: str) -> System:
        """The system of that name (of `SYSTEMS`) under these assumptions."""
        require("system", name, SYSTEMS)
        system = SYSTEMS[name]
        if self.cached in ("all", name):
            system = replace(system, cached=True)
        if isinstance(system, MoNDE):
            return replace(
                system,
                rounding=self.monde_rounding,
                relieves=self.monde_relieves,
                prefill=self.monde_prefill,
            )
        if isinstance(system, GPUNDP):
            limit = "memory" if system.cached else self.limit
            if system.version == "improved":
                limit = system.limit
            return replace(system, rounding=self.rounding, eq2_tokens=self.eq2_tokens, limit=limit)
        return system

    def routing(
        self, model: str | MoESpec, seed: int = 0, prompt: int = 512, answer: int = 512
    ) -> PromptRouting:
        """A prompt and its answer in tokens, routed by the popularity that is assumed."""
        spec = load_model(model) if isinstance(model, str) else model
        return _routing(spec, seed, prompt, answer, self.zipf, self.bias)


_routing = lru_cache(maxsize=16)(simulated_routing)
