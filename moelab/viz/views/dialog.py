"""A conversation with an opened model, as of `moelab chat`, in a notebook: what is said, the experts
of its latest token, its memory to be moved, and what all of it would take otherwise.

Answers come from a thread, so the kernel is free to stop them and to move memory meanwhile. What is
seen is drawn by `chat.js`, whose controls write commands."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import anywidget
import traitlets
from IPython.display import display

from moelab.base.registry import names
from moelab.base.specs import State
from moelab.chat import Chat


class Page(anywidget.AnyWidget):
    """What is `shown` of a conversation; it sends lines, "" to stop."""

    _esm = Path(__file__).with_name("chat.js")
    shown = traitlets.Dict().tag(sync=True)


class Dialog(Chat):
    """`log` is what was said: [who, text]."""

    _due = 0.0
    _answered: Future | None = None  # or not yet

    def __init__(self, lm: Any, max_new_tokens: int = 256) -> None:
        self.page, self.log = Page(), []
        self._thread = ThreadPoolExecutor(1)
        super().__init__(lm, max_new_tokens, {})
        self.page.on_msg(lambda _, line, __: self.say(line) if line else self.stop())
        self.show()

    def say(self, line: str) -> Any:
        """Obey a command, or have a text answered by a thread: a future."""
        if line.startswith("/"):
            return self.obey(line)
        self._answer = ["model", ""]
        self.log += [["you", line], self._answer]
        self._answered = self._thread.submit(self.obey, line)
        return self._answered

    def stop(self) -> None:
        """End the answer that is asked for, if it has not come."""
        if self._answered and not self._answered.done():
            self.talk.stop()

    def tell(self, what: Any) -> None:
        self.log.append(["", str(what)])
        self.show()

    def write(self, piece: str) -> None:
        self._answer[1] += piece
        if (begun := monotonic()) > self._due:
            self.show()
            self._due = 3 * monotonic() - 2 * begun + 0.4  # what is shown takes a third at most

    def show(self) -> None:
        """Tell the page what is, and of experts (layer, expert): those in memory, those that the latest
        pass visits, and those that were read in it."""
        session = self.lm.moelab
        spec = self.lm.spec
        with session.turn:  # between two passes
            here = session.residency.resident(State.FULL)
            routed = [(layer, e) for step in session.steps[-1:] for layer, of in step for e in of]
            read = [
                of[2:4]
                for one in session.forwards[-1:]
                for of in session.timeline.since(self.before[1])
                if of.start >= one.start and of.kind[:4] == "read"
            ]
        self.page.shown = {
            "log": [*map(tuple, self.log)],  # a copy, or no change would be seen
            "status": self.status(),
            "shape": (spec.L, spec.E),
            "experts": (here, routed, read),
            "memory": session.budget,
            "whole": session.divided and session.divided("100%").budget,
            "cache": names("cache"),
            "device": names("device"),
        }

    def _ipython_display_(self) -> None:
        os.environ.get("MOELAB_HEADLESS") or display(self.page)


chat = Dialog
