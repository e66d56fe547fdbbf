"""`moelab chat [MODEL]`: a conversation with a model, on a terminal or from a pipe, a turn a line.

    moelab chat Qwen/Qwen3-30B-A3B --memory 8GB --executor fast

Below an answer stand its tokens a second, the share of its experts that were found in memory (the hit
rate), what was read, and the memory of the process. Ctrl-C ends an answer, whose words stay. Lines that
begin with / are commands, which /help tells."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import torch

import moelab
from moelab.advice.advise import advise
from moelab.advice.model import find_model
from moelab.api import OpenOptions
from moelab.base.errors import error_text
from moelab.base.files import beside, writable
from moelab.base.registry import make, require
from moelab.base.table import duration, size
from moelab.conversation import Conversation
from moelab.generate import OPENING, add_opening, given, notes
from moelab.offloading.metrics import summary_line
from moelab.offloading.offload import Memory
from moelab.offloading.session import LONGEST

#: command → what it takes and does
COMMANDS = beside(__file__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_opening(parser, 1024)


def main(args: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        warnings.showwarning = lambda told, *_: _tell(told)
        _announce(args.model, args.memory)
        Chat(args.model, given(args, *OPENING), args.max_new_tokens).run(_lines())
    return 0


def _tell(what: Any) -> None:
    """What is no answer."""
    print(what, file=sys.stderr, flush=True)


def _announce(model: str | None, memory: str | None) -> None:
    """Of a model that is not here: what is downloaded, where to, how long, what that will give."""
    found = find_model(model) if model and model.count("/") == 1 else None
    if found and found.download:
        from huggingface_hub.constants import HF_HUB_CACHE

        took = duration(8 * found.download / 100e6)
        _tell(f"{size(found.download)} to download to {HF_HUB_CACHE}: {took} at 100 Mbit/s")
        _tell(advise(model, memory or "auto", simulate=False).words)


def _lines() -> Iterator[str]:
    """What is typed, until Ctrl-D, or a Ctrl-C while there is no answer to end."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        importlib.import_module("readline")  # edits lines, where there is one
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")


class Chat:
    """A model, the conversation with it, and the commands: methods that take words."""

    def __init__(self, model: str | None, options: dict[str, Any], max_new_tokens: int) -> None:
        self.model, self.options, self.most = model, options, max_new_tokens
        _tell(f"opening {model or 'the small model'} …")
        self.lm = moelab.open_model(model, **options)
        for note in notes(self.lm):
            _tell(note)
        self.new()

    def run(self, lines: Iterable[str]) -> None:
        """Answer lines, and obey commands, until one says quit."""
        for line in map(str.strip, lines):
            name, *words = line[1:].split() or ["help"]
            try:
                if line == "/quit":
                    break
                if line.startswith("/"):
                    require("command", name, COMMANDS)
                    getattr(self, name)(*words)
                elif line:
                    self.answer(line)
            except KeyboardInterrupt:
                _tell("stopped")
            except Exception as error:  # the conversation goes on
                _tell(error_text(error))
        self.lm.moelab.close()

    def answer(self, text: str) -> None:
        """One turn."""
        session = self.lm.moelab
        if len(session.forwards) > LONGEST:
            session.reset()  # of each token kilobytes are kept for /replay
        first, counters = len(session.forwards), session.run.counters
        before = counters.requests, counters.misses
        try:
            with closing(self.talk.say(text)) as pieces:
                for piece in pieces:
                    print(piece, end="", flush=True)
        finally:
            print(flush=True)
            if len(session.forwards) > first:
                _tell(self._status(first, *before))

    def _status(self, first: int, requests: int, misses: int) -> str:
        """What forward passes took, from the first on, before which there were these."""
        import psutil

        session, used = self.lm.moelab, psutil.Process().memory_info().rss
        run, now = session.run.since(first), session.run.counters
        found, one = run.metrics(), run.forwards[0]
        said = f"{found.throughput or 0:.1f} tokens/s, the first after {one.end - one.start:.2f} s"
        if asked := now.requests - requests:
            hits = 1 - (now.misses - misses) / asked
            read = size(found.read_bytes_per_token or 0)
            said += f"; {hits:.0%} of experts found in memory, {read} read a token"
        return f"[{said}; {size(used)} of memory]"

    def memory(self, amount: str = "") -> None:
        self.lm.moelab.resize(amount)
        self.options["memory"] = amount
        _tell(self.lm.moelab)

    def cache(self, name: str = "") -> None:
        options = self.options | {"cache": name}
        OpenOptions(**options)  # before the model is closed
        make("cache", name)
        self.lm.moelab.close()
        self.lm = self.talk.lm = moelab.open_model(self.model, **options)
        self.options = options

    def prefetch(self, name: str = "") -> None:
        name = "none" if name == "off" else name
        self.lm.moelab.enter(moelab.using(self.lm, prefetch=name))
        self.options["prefetch"] = name

    def replay(self, *changes: str) -> None:
        how: dict[str, Any] = dict(change.partition("=")[::2] for change in changes)
        for name in how:
            require("setting", name, ("memory", "cache", "device"))
        session = self.lm.moelab
        if "memory" in how:
            asked = OpenOptions(**self.options).completed()
            how["pools"] = Memory.divided(session.store, how.pop("memory"), asked).pools
        for run in (session.run, moelab.simulate(session.run, **how)):
            took = sum(one.end - one.start for one in run.forwards)
            _tell(f"{run.kind}: {duration(took)} in all, {summary_line(run.metrics())}")

    def save(self, file: str = "") -> None:
        path = writable(file)
        trace = moelab.record(self.lm, [self.talk.ids])
        phase = torch.tensor(self.talk.phases, dtype=torch.uint8)
        _tell(f"saved {replace(trace, phase=phase).save(path)}")

    def new(self) -> None:
        self.talk = Conversation(self.lm, self.most)

    def help(self) -> None:
        for name, told in COMMANDS.items():
            _tell(f"/{name}{told}")
