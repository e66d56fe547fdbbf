"""*Run it for real*: the same prompt and tokens through an engine of its own, with progress and a
stop.

A thread opens the model within the budget, generates and closes it. Stopping cancels the
generation, which ends before the next expert is computed, and the engine lets go of threads, files
and memory; only while a model is being opened must that first come to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from statistics import fmean
from typing import Any

from moelab import open_model
from moelab.models.greedy import greedy
from moelab.offloading.engine import Cancelled


class RealRun(threading.Thread):
    """One run, which `start` begins and `stop` ends.

    explorer : whose recorded run is repeated.    policy, memory : with which cache, in so many
    bytes.
    tick : told how many tokens there are.    done : told what `measure` returned or raised; None
    after a stop.
    """

    def __init__(
        self,
        explorer: Any,
        policy: str,
        memory: int,
        tick: Callable[[int], None],
        done: Callable[[Any], None],
    ) -> None:
        super().__init__(name="moelab real run", daemon=True)
        self.explorer, self.policy, self.memory = explorer, policy, memory
        self.tick, self.done = tick, done
        self.stopped, self.lm = threading.Event(), None

    def stop(self) -> None:
        """End it as soon as it can be."""
        self.stopped.set()
        if (lm := self.lm) is not None:
            lm.moelab.cancel()

    def run(self) -> None:
        try:
            found: Any = self.measure()
        except Cancelled:
            found = None
        except Exception as error:  # a thread's error would be lost
            found = error
        self.done(found)

    def measure(self) -> tuple[float, float]:
        """(mean seconds of the decode steps that the explorer times, share of their experts found
        in memory)."""
        import torch

        found = self.explorer.found

        def after(_: Any, scores: torch.Tensor) -> torch.Tensor:
            """Of every forward pass: let the stop through, and begin to count when the cache is
            warm."""
            if self.stopped.is_set():
                raise Cancelled
            self.tick(len(session.forwards))
            if len(session.forwards) == self.explorer.warm:
                session.residency.reset_counters()
            return scores

        with open_model(found.source, memory=self.memory, cache=self.policy) as self.lm:
            session = self.lm.moelab
            if self.stopped.is_set():
                raise Cancelled
            ids, n = torch.tensor([found.ids]), len(found.new)
            with torch.inference_mode():
                self.lm.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=n,
                    min_new_tokens=n,
                    logits_processor=[after],
                    **greedy(self.lm),
                )
            steps = (session.forwards[i] for i in self.explorer.decode)
            took, hit_rate = (
                fmean(of.end - of.start for of in steps),
                session.run.counters.hit_rate(),
            )
        self.lm = None
        return took, hit_rate


def button(view: Any, explorer: Any) -> list[Any]:
    """The buttons that run the budget explorer's setting for real, and stop it; a bar shows
    tokens."""
    import ipywidgets

    start, stop = (
        ipywidgets.Button(description=text, layout={"width": "auto"})
        for text in ("run it for real", "stop")
    )
    bar = ipywidgets.IntProgress(layout={"width": "30%"})
    told = ipywidgets.Label()
    stop.disabled = True

    def begin(_: Any) -> None:
        if explorer is None or not explorer.found.new or explorer.found.source is None:
            told.value = "only an opened model can be run"
            return
        of = view.data
        policy = min(view.values["policies"] or ["lru"], key=lambda name: of.at[name].tpot)
        bar.value, bar.max = 0, len(explorer.forwards)
        told.value = f"opening, {policy} …"
        start.disabled, stop.disabled = True, False

        def done(found: Any) -> None:
            def show() -> None:
                start.disabled, stop.disabled = False, True
                told.value = "stopped" if found is None else "it failed"
                if isinstance(found, Exception):
                    raise found
                if found is not None:
                    point = type(of.at[policy])(of.memory, *found, "measured")
                    explorer.measured.append((policy, point))
                    told.value = f"{policy}: {1e3 * found[0]:.2f} ms a token, measured"
                    view.refresh()

            view.guarded(show)

        def tick(n: int) -> None:
            bar.value, told.value = n, f"{policy}, {n} of {bar.max} steps"

        view.real = RealRun(explorer, policy, of.memory, tick, done)
        view.real.start()

    def end(_: Any) -> None:
        if not stop.disabled:  # unless it ended in the meantime
            told.value = "stopping …"
            view.real.stop()

    start.on_click(begin)
    stop.on_click(lambda button: view.guarded(lambda: end(button)))
    return [ipywidgets.HBox([start, stop, bar, told])]
