"""*Run it for real*: the same prompt and tokens through an engine of its own, with progress and a
stop.

A thread opens the model within the budget, generates and closes it. Stopping cancels the
generation, which ends before the next expert is computed, and the engine lets go of threads, files
and memory; only while a model is being opened must that first come to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from moelab import open_model
from moelab.models.greedy import greedy
from moelab.offloading.engine import Cancelled


class RealRun:
    """One run in a thread of its own; made, started, perhaps stopped, and over when `done` was
    called.

    explorer : whose recorded run is repeated.
    policy, memory : with which cache, in so many bytes.
    tick : told how many tokens there are, from the thread.
    done : told what `measure` returned, or what it raised;
        None after a stop.    options : further ones of `open_model`.
    """

    def __init__(
        self,
        explorer: Any,
        policy: str,
        memory: int,
        tick: Callable[[int], None],
        done: Callable[[Any], None],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.explorer = explorer
        self.policy = policy
        self.memory = memory
        self.tick = tick
        self.done = done
        self.options, self.stopped, self.lm = dict(options or {}), threading.Event(), None
        self.thread = threading.Thread(target=self._run, name="moelab real run", daemon=True)

    def start(self) -> RealRun:
        self.thread.start()
        return self

    def stop(self) -> None:
        """End it as soon as it can be."""
        self.stopped.set()
        if (lm := self.lm) is not None:
            lm.moelab.cancel()

    def _run(self) -> None:
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
        explorer = self.explorer
        with open_model(
            found.source, memory=self.memory, cache=self.policy, **self.options
        ) as self.lm:
            session = self.lm.moelab
            ids = torch.tensor([found.ids])

            def after(_: Any, scores: torch.Tensor) -> torch.Tensor:
                """Of every forward pass: let the stop through, and begin to count when the cache is
                warm."""
                if self.stopped.is_set():
                    raise Cancelled
                self.tick(len(session.forwards))
                if len(session.forwards) == explorer.warm:
                    session.residency.reset_counters()
                return scores

            if self.stopped.is_set():
                raise Cancelled
            n = len(found.new)
            with torch.inference_mode():
                self.lm.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=n,
                    min_new_tokens=n,
                    logits_processor=[after],
                    **greedy(self.lm),
                )
            took = [session.forwards[i].end - session.forwards[i].start for i in explorer.decode]
            hit_rate = session.run.counters.hit_rate()
        self.lm = None
        return fmean(took), hit_rate


def button(view: Any, explorer: Callable[[], Any], options: Mapping[str, Any] | None) -> list[Any]:
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
    running = []

    def idle() -> None:
        start.disabled = False
        stop.disabled = True

    def begin(_: Any) -> None:
        at = explorer()
        if at.found.source is None or not at.found.ids or at.device is not None:
            told.value = "only an opened model, on this machine, can be run"
            return
        policy = min(view.data.at, key=lambda name: view.data.at[name].tpot)
        memory = view.data.memory
        bar.value, bar.max, told.value = 0, len(at.forwards), f"opening, {policy} …"
        start.disabled = True
        stop.disabled = False

        def done(found: Any) -> None:
            def show() -> None:
                idle()
                told.value = "stopped"
                if isinstance(found, Exception):
                    told.value = "it failed"
                    raise found
                if found is not None:
                    at.add(policy, memory, *found)
                    told.value = f"{policy}: {1e3 * found[0]:.2f} ms a token, measured"
                    view.refresh()

            view.guarded(show)

        def tick(n: int) -> None:
            bar.value, told.value = n, f"{policy}, {n} of {bar.max} steps"

        running[:] = [RealRun(at, policy, memory, tick, done, options).start()]

    def end(_: Any) -> None:
        def stopping() -> None:  # unless it ended in the meantime
            if not stop.disabled:
                told.value = "stopping …"
                running[0].stop()

        view.guarded(stopping)

    start.on_click(begin)
    stop.on_click(end)
    view.real = running
    return [ipywidgets.HBox([start, stop, bar, told])]
