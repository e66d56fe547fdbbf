"""*Run it for real*: the same prompt and tokens through an engine of its own.

The button opens the model within the budget, generates and closes it. Jupyter's own interrupt ends
it, and the engine lets go of threads, files and memory."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from moelab import open_model
from moelab.models.greedy import greedy


def measure(explorer: Any, policy: str, memory: int) -> tuple[float, float]:
    """(mean seconds of the decode steps that the explorer times, share of their experts found in
    memory) of its recorded run, with a cache policy and so many bytes."""
    import torch

    found = explorer.found

    def after(_: Any, scores: torch.Tensor) -> torch.Tensor:
        """Of every forward pass: begin to count when the cache is warm."""
        if len(session.forwards) == explorer.warm:
            session.residency.reset_counters()
        return scores

    with open_model(found.source, memory=memory, cache=policy) as lm:
        session = lm.moelab
        ids = torch.tensor([found.ids])
        with torch.inference_mode():
            lm.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(found.new),
                min_new_tokens=len(found.new),
                logits_processor=[after],
                **greedy(lm),
            )
        steps = (session.forwards[i] for i in explorer.decode)
        return fmean(of.end - of.start for of in steps), session.run.counters.hit_rate()


def button(view: Any, explorer: Any) -> list[Any]:
    """The button that runs the budget explorer's setting for real; a model that cannot be opened
    again has none."""
    import ipywidgets

    if explorer is None or not explorer.found.new or explorer.found.source is None:
        return []
    start = ipywidgets.Button(description="run it for real", layout={"width": "auto"})

    def run() -> None:
        policy, memory = view.data.best, view.data.memory
        start.disabled = True
        try:
            found = measure(explorer, policy, memory)
        finally:
            start.disabled = False
        explorer.measured.append((policy, type(view.data.at[policy])(memory, *found, "measured")))
        view.refresh()

    start.on_click(lambda _: view.guarded(run))
    return [start]
