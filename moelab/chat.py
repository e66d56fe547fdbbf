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
from functools import partial
from typing import Any

import torch

import moelab
from moelab.advice.advise import advise
from moelab.advice.model import find_model
from moelab.api import OpenOptions
from moelab.base.errors import error_text
from moelab.base.files import beside, writable
from moelab.base.records import Record
from moelab.base.registry import make, require
from moelab.base.table import duration, size
from moelab.conversation import Conversation
from moelab.generate import OPENING, add_opening, given, notes
from moelab.offloading.metrics import metrics, summary_line
from moelab.offloading.session import LONGEST
from moelab.simulation.simulator import Prefetching

#: command → what it takes and does
COMMANDS = beside(__file__)
#: of /replay, the first of an offloaded model only
SETTINGS = ("memory", "cache", "prefetch", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_opening(parser, 1024)


def main(args: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        warnings.showwarning = lambda told, *_: _tell(told)
        _announce(args.model, args.memory)
        _tell(f"opening {args.model or 'the small model'} …")
        options = given(args, *OPENING)
        lm = moelab.open_model(args.model, **options)
        for note in notes(lm):
            _tell(note)
        Chat(lm, args.max_new_tokens, options).run(_lines())
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
    """A conversation with an opened model, and the commands: methods that take words.

    options : how it was opened, and may be again.
    tell, write : where words go that are no answer, and pieces of one."""

    tell = staticmethod(_tell)
    write = staticmethod(partial(print, end="", flush=True))

    def __init__(self, lm: Any, max_new_tokens: int, options: Record) -> None:
        self.lm, self.most, self.options = lm, max_new_tokens, options
        self.new()
        self.begin()

    def begin(self) -> None:
        """From here on is a turn, of which `status` tells."""
        session = self.lm.moelab
        if len(session.forwards) > LONGEST:
            session.reset()  # of each token kilobytes are kept for /replay
        counters = session.run.counters
        self.before = (
            len(session.forwards),
            len(session.timeline),
            counters.requests,
            counters.misses,
        )

    def status(self) -> str:
        """What the turn took until now; "" before a pass is over."""
        import psutil

        first, events, requests, misses = self.before
        session, used = self.lm.moelab, psutil.Process().memory_info().rss
        if not (forwards := session.forwards[first:]):
            return ""
        found = metrics([*session.timeline.since(events)], forwards)
        one, now = forwards[0], session.run.counters
        said = f"{found.throughput or 0:.1f} tokens/s, the first after {one.seconds:.2f} s"
        if asked := now.requests - requests:
            hits = 1 - (now.misses - misses) / asked
            read = size(found.read_bytes_per_token or 0)
            said += f"; {hits:.0%} of experts found in memory, {read} read a token"
        return f"[{said}; {size(used)} of memory]"

    def run(self, lines: Iterable[str]) -> None:
        """Answer lines, and obey commands, until one says quit."""
        for line in map(str.strip, lines):
            if line == "/quit":
                break
            self.obey(line)
        self.lm.moelab.close()

    def obey(self, line: str) -> None:
        """One line; what goes wrong is told."""
        name, *words = line[1:].split() or ["help"]
        try:
            if line.startswith("/"):
                require("command", name, COMMANDS)
                getattr(self, name)(*words)
            elif line:
                self.answer(line)
        except KeyboardInterrupt:
            self.tell("stopped")
        except Exception as error:  # the conversation goes on
            self.tell(error_text(error))

    def answer(self, text: str) -> None:
        """One turn."""
        self.begin()
        try:
            with closing(self.talk.say(text)) as pieces:
                for piece in pieces:
                    self.write(piece)
        finally:
            self.write("\n")
            if told := self.status():
                self.tell(told)

    def memory(self, amount: str = "") -> None:
        self.lm.moelab.resize(amount)
        self.options["memory"] = amount
        self.tell(self.lm.moelab)

    def cache(self, name: str = "") -> None:
        options = self.options | {"cache": name}
        OpenOptions(**options)  # before the model is closed
        make("cache", name)
        self.lm.moelab.close()
        self.lm = self.talk.lm = moelab.open_model(self.lm.name_or_path, **options)
        self.options = options

    def prefetch(self, name: str = "") -> None:
        name = "none" if name == "off" else name
        self.lm.moelab.enter(moelab.using(self.lm, prefetch=name))
        self.options["prefetch"] = name

    def replay(self, *changes: str) -> None:
        how: Record = dict(change.partition("=")[::2] for change in changes)
        session = self.lm.moelab
        for name in how:
            require("setting", name, SETTINGS[session.divided is None :])
        with session.turn:  # between two passes
            run = session.run.since()
        steps, asked = run.steps, how.pop("memory", None)
        how["pools"] = (session.divided(asked) if asked else run.settings).pools
        if name := how.pop("prefetch", ""):
            # of each pass nothing is announced, what the one before has chosen, or what it will
            told = {"none": [()] * len(steps), "previous": [(), *steps[:-1]], "perfect": steps}
            require("predictor to replay by", name, told)
            how["prefetching"] = Prefetching(told[name], run.settings.spec.K)
        for of in (run, moelab.simulate(run, **how)):
            self.tell(
                f"{of.kind}: {duration(sum(one.seconds for one in of.forwards))} in all, "
                f"{summary_line(of.metrics())}"
            )

    def save(self, file: str = "") -> None:
        path = writable(file)
        trace = moelab.record(self.lm, [self.talk.ids])
        phase = torch.tensor(self.talk.phases, dtype=torch.uint8)
        self.tell(f"saved {replace(trace, phase=phase).save(path)}")

    def new(self) -> None:
        self.talk = Conversation(self.lm, self.most)

    def help(self) -> None:
        for name, told in COMMANDS.items():
            self.tell(f"/{name}{told}")
