"""What GPU-NDP's text leaves open, as one choice of each: the paper's machine and routing (§IV). Notebook
07 tries the other choices, and other readings of the systems."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from moelab.base.registry import require
from moelab.base.specs import MoESpec
from moelab.cards import load_model
from moelab.ndp.hardware import Hardware, hardware
from moelab.ndp.routing import PromptRouting, simulated_routing
from moelab.ndp.systems import SYSTEMS, System


@dataclass(frozen=True)
class Assumptions:
    """What the paper leaves open of its machine and of its prompts' routing.

    The defaults are one of the combinations that fit six of the paper's numbers, found by a descent
    that saw those only.
    mapping, clock_ghz, efficiency, gpu_gb : see `hardware`. zipf, bias : see `simulated_routing`.
    shared_dram : see `hardware`; not the paper's."""

    zipf: float = 0.2
    bias: float = 0.3
    mapping: str = "RoBaRaCoCh"
    clock_ghz: float = 0.8
    efficiency: tuple[float, float] = (0.85, 0.8)
    gpu_gb: float = 16.0
    shared_dram: bool = False

    def hardware(self, N: int, **changes: Any) -> Hardware:
        """The paper's machine under these assumptions; `changes` are other arguments of
        `hardware`."""
        names = ("mapping", "clock_ghz", "efficiency", "gpu_gb", "shared_dram")
        return hardware(N, **{name: getattr(self, name) for name in names} | changes)

    def system(self, name: str) -> System:
        """The system of that name, of `SYSTEMS`."""
        require("system", name, SYSTEMS)
        return SYSTEMS[name]

    def routing(
        self, model: str | MoESpec, seed: int = 0, prompt: int = 512, answer: int = 512
    ) -> PromptRouting:
        """A prompt and its answer in tokens, routed by the popularity that is assumed."""
        spec = load_model(model) if isinstance(model, str) else model
        return _routing(spec, seed, prompt, answer, self.zipf, self.bias)


_routing = lru_cache(maxsize=16)(simulated_routing)
