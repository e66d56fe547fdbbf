"""An NDP schedule of one's own, a `moelab.ndp.systems.System`, against the published ones and the
bound of `ndp_bound`, on three models, simulated: beside notebook 07."""

from __future__ import annotations

import copy
import traceback
from contextlib import suppress
from typing import Any

from moelab.base.progress import progress
from moelab.bench.arena import Contest, Standing, once
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
    """Rank a schedule, a class or an object, by the speed of the experts, 1/s. TypeError: it is none."""
    made = mine if isinstance(mine, type) else type(mine)
    if not issubclass(made, System):
        raise TypeError(f"{made.__name__} is no schedule, a moelab.ndp.systems.System")
    assumed = Assumptions()
    machine = assumed.hardware(UNITS)
    routings = {model: assumed.routing(model, 0, PROMPT, ANSWER) for model in MODELS}
    bounds = {model: prompt_bound(machine, routing) for model, routing in routings.items()}

    def speed(system: System, model: str) -> float:
        """One over the seconds of the prompt's experts, and of the answer's with loading what it
        prefetches."""
        result = simulate(machine, system, routings[model])
        return 1 / (result.moe_prefill + (result.moe_decode + result.intermediate))

    def others() -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for other in progress(SYSTEMS, "schedules", unit="system"):
            found[other] = {}
            for model in MODELS:
                with suppress(NotSupported):  # it keeps experts where this model's do not fit
                    found[other][model] = speed(assumed.system(other), model)
        return found

    scores, error = {}, ""
    try:
        for model in MODELS:
            scores[model] = speed(mine() if isinstance(mine, type) else copy.deepcopy(mine), model)
    except Exception:
        error = traceback.format_exc()
    found = once(("schedules", PROMPT, ANSWER), others)
    standings = [Standing(name, False, of) for name, of in found.items()]
    standings.insert(0, Standing(made.__name__, True, scores, error))
    contest = Contest({model: 1 / sum(of) for model, of in bounds.items()}, standings)
    standings.sort(key=lambda one: -sum(contest.share(one, model) for model in MODELS))
    return contest  # ties: own first
