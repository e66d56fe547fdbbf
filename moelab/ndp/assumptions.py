"""What GPU-NDP's text leaves open, as one choice of each: the paper's machine and routing (§IV), and
readings of its systems. `CHOICES` has the others, by which notebook 07 and `moelab ndp` tell how far
a result depends on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from moelab.base.files import beside
from moelab.base.registry import require
from moelab.base.specs import MoESpec
from moelab.cards import load_model
from moelab.ndp.hardware import Hardware, hardware
from moelab.ndp.routing import PromptRouting, simulated_routing
from moelab.ndp.systems import GPUNDP, SYSTEMS, MoNDE, System

#: what is open of the machine, of the prompts' routing, of the systems → what else it could be
MACHINE, ROUTING, READINGS = beside(__file__).values()
CHOICES = ROUTING | MACHINE | READINGS


@dataclass(frozen=True)
class Assumptions:
    """What the paper leaves open.

    The defaults are one of the combinations that fit six of the paper's numbers, found by a descent
    that saw those only.
    mapping, clock_ghz, gpu_ghz, efficiency, gpu_gb : see `hardware`. zipf, bias : see
        `simulated_routing`.
    shared_dram : see `hardware`; not the paper's.
    monde_… : see `MoNDE`.
    rounding, eq2_tokens, limit : of the literal versions, see `GPUNDP`.
    cached : who keeps popular experts in GPU memory: "none", a system's name, or "all": equal means,
        everyone fills it."""

    zipf: float = 0.2
    bias: float = 0.3
    mapping: str = "RoBaRaCoCh"
    clock_ghz: float | None = 0.8
    gpu_ghz: float | None = None
    efficiency: tuple[float, float] = (0.85, 0.8)
    gpu_gb: float | None = 16.0
    shared_dram: bool = False
    monde_placement: str = "id"
    monde_correction: str = "none"
    rounding: str = "floor"
    eq2_tokens: str = "mean"
    limit: str = "K"
    cached: str = "none"

    def hardware(self, N: int, **changes: Any) -> Hardware:
        """The paper's machine under these assumptions; `changes` are other arguments of
        `hardware`."""
        own = {name: getattr(self, name) for name in (*MACHINE, "shared_dram")}
        return hardware(N, **own | changes)

    def system(self, name: str) -> System:
        """The system of that name, of `SYSTEMS`, by these readings."""
        require("system", name, SYSTEMS)
        system = replace(SYSTEMS[name], cached=self.cached in ("all", name))
        if isinstance(system, MoNDE):
            return MoNDE(system.cached, self.monde_placement, self.monde_correction)
        if isinstance(system, GPUNDP):
            own = {name: getattr(self, name) for name in ("limit", "rounding", "eq2_tokens")}
            return replace(system, **own)
        return system

    def routing(
        self, model: str | MoESpec, seed: int = 0, prompt: int = 512, answer: int = 512
    ) -> PromptRouting:
        """A prompt and its answer in tokens, routed by the popularity that is assumed."""
        spec = load_model(model) if isinstance(model, str) else model
        return _routing(spec, seed, prompt, answer, self.zipf, self.bias)


_routing = lru_cache(maxsize=16)(simulated_routing)
