"""An NDP schedule of one's own, a `moelab.ndp.systems.System`, against the published ones and the
bound of `ndp_bound`, on three models, simulated: beside notebook 07."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from moelab.base.progress import progress
from moelab.bench.arena import Contest, fresh, guarded, once, ranked
from moelab.ndp.assumptions import Assumptions
from moelab.ndp.costs import NotSupported
from moelab.ndp.simulation import simulate
from moelab.ndp.systems import SYSTEMS, System

from .ndp_bound import prompt_bound

MODELS = ("DeepSeek-MoE-16B", "Qwen3-30B-A3B", "Phi-3.5-MoE")
#: units of the simulated machine, tokens of its prompts and answers
UNITS = 4
PROMPT = 128
ANSWER = 32


def rank(mine: Any) -> Contest:
    """Rank a schedule, a class or an object, by the time of the experts. TypeError: it is none."""
    made = mine if isinstance(mine, type) else type(mine)
    if not issubclass(made, System):
        raise TypeError(f"{made.__name__} is no schedule, a moelab.ndp.systems.System")
    assumed = Assumptions()
    machine = assumed.hardware(UNITS)
    routings = {model: assumed.routing(model, 0, PROMPT, ANSWER) for model in MODELS}
    bounds = {model: prompt_bound(machine, routing) for model, routing in routings.items()}

    def parts(system: System, model: str) -> float:
        """Milliseconds of the prompt's experts, and of the answer's with loading what it
        prefetches."""
        result = simulate(machine, system, routings[model])
        return 1e3 * (result.moe_prefill + (result.moe_decode + result.intermediate))

    def others() -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for other in progress(SYSTEMS, "schedules", unit="system"):
            found[other] = {}
            for model in MODELS:
                with suppress(NotSupported):  # it keeps experts where this model's do not fit
                    found[other][model] = parts(assumed.system(other), model)
        return found

    found = once(("schedules", PROMPT, ANSWER), others)

    own = guarded(MODELS, lambda model: parts(fresh(mine), model), made.__name__)
    return ranked(
        "time of the experts (ms)",
        {model: 1e3 * sum(of) for model, of in bounds.items()},
        found,
        own,
        lower=True,
    )
