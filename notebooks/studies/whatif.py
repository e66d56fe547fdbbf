"""Are what-ifs true? A run is replayed as it would be otherwise, and then made so.

    moelab bench whatif [--model FOLDER]

decodes a text within a budget, and plays that run in simulated time under the settings of a model that is
opened otherwise: with half of the memory, twice as much, another cache policy, without prefetching, with
another number of threads that decode (experts are in a store whose experts are compressed). Then that
model decodes the same text. Base and changes take turns, each opened anew in every round; "predicted /
measured" is of the seconds of all forward passes, in pairs of a round.

A conversation's second turn: TTFT of a short question after a long text and its answer, over that of the
same tokens in a new conversation; in memory, and within the budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import moelab
from moelab.base.arguments import whole
from moelab.base.library import passages, token_count
from moelab.base.records import Record, Records
from moelab.conversation import Conversation
from moelab.offloading.run import EngineRun, EngineSettings

from .timing import ENGINE, turns, working

MEASURES = (*ENGINE, "moelab/simulation", "moelab/conversation.py")
MEMORY = "50%"
BASE = {"memory": MEMORY, "prefetch": "router"}
CHANGES: dict[str, dict[str, Any]] = {
    "half of the memory": {"memory": "25%"},
    "twice the memory": {"memory": "100%"},
    "cache lru": {"cache": "lru"},
    "no prefetching": {"prefetch": "none"},
    "two threads that decode": {"workers": 2},
}
TALKS = {
    "in memory, exact": {},
    "in memory, fast": {"executor": "fast"},
    f"exact, {MEMORY}": {"memory": MEMORY},
    f"fast, {MEMORY}": {"memory": MEMORY, "executor": "fast"},
}
QUESTION = "\nIn short?"


def run(
    model: str | None = None,
    tokens: int = 96,
    prompt: int = 32,
    text: int = 768,
    rounds: int = 5,
    work: str | Path | None = None,
) -> dict[str, Records]:
    with working(work) as folder:
        store = folder / "store"
        if not store.exists():
            moelab.convert(model, store)
        found = {f"what-ifs, from {MEMORY}": what_ifs(store, prompt, tokens, rounds)}
    return found | {"second turn": second_turns(model, text, rounds)}


def what_ifs(store: Path, prompt: int, tokens: int, rounds: int) -> Records:
    rows: Records = {}
    samples: dict[str, list[Record]] = {change: [] for change in CHANGES}
    arms = [None, *CHANGES]
    this: dict[str | None, tuple[EngineSettings, EngineRun]] = {}
    for at, arm in turns(arms, rounds + 1, "what-ifs"):
        this[arm] = decoded(store, BASE | CHANGES.get(arm, {}), prompt, tokens)
        if len(this) < len(arms):
            continue
        base = this.pop(None)[1]
        for change, (settings, real) in this.items():
            foretold = moelab.simulate(otherwise(base, settings))
            row = {"predicted s": seconds(foretold), "measured s": seconds(real)}
            row |= {"base s": seconds(base), "hits equal": foretold.counters == real.counters}
            if at:  # the first round compiles
                samples[change].append(row)
        this = {}
    for change, those in samples.items():
        rows[change] = {
            "predicted / measured": median(of["predicted s"] / of["measured s"] for of in those),
            "measured / base": median(of["measured s"] / of["base s"] for of in those),
            "hits equal": all(of["hits equal"] for of in those),
        } | {name: [of[name] for of in those] for name in ("predicted s", "measured s", "base s")}
    return rows


def decoded(
    store: Path, options: dict[str, Any], prompt: int, tokens: int
) -> tuple[EngineSettings, EngineRun]:
    """What a model that is opened so decodes, and the settings that it began with."""
    with moelab.open_model(store, warm=False, **options) as lm:
        (text,) = passages("prose", 1, prompt, token_count(lm.tokenizer))
        inputs = lm.tokenizer(text, return_tensors="pt")
        lm.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return lm.moelab.run.set_up[0][1], lm.moelab.run.since()


def otherwise(run: EngineRun, settings: EngineSettings) -> EngineRun:
    """A run, under the settings of another."""
    made = run.since()
    made.set_up = [(0, settings)]
    return made


def seconds(run: Any) -> float:
    return sum(one.end - one.start for one in run.forwards)


def second_turns(model: str | None, text: int, rounds: int) -> Records:
    rows: Records = {}
    for name, options in TALKS.items():
        with moelab.open_model(model, **options) as lm:
            taken = [*pairs(lm, text, rounds + 1)][1:]
            second, anew = ([pair[i] for pair in taken] for i in (0, 1))
        rows[name] = {
            "second turn / anew": median(a / b for a, b in taken),
            "second turn TTFT s": second,
            "anew TTFT s": anew,
        }
    return rows


def pairs(lm: Any, text: int, n: int) -> Iterator[tuple[float, float]]:
    """TTFT of a second turn, and of all of it anew."""
    forwards = lm.moelab.forwards
    for passage in passages("prose", n, text, token_count(lm.tokenizer)):
        talk = Conversation(lm, 16)
        "".join(talk.say(passage))
        begun = len(forwards)
        "".join(talk.say(QUESTION))
        ids = torch.tensor([talk.ids[: len(talk.ids) - (len(forwards) - begun)]])
        again = len(forwards)
        lm.generate(ids, max_new_tokens=1, do_sample=False)
        yield tuple(forwards[at].end - forwards[at].start for at in (begun, again))


OPTIONS = {
    "model": ({"metavar": "FOLDER"}, "the small model shipped by default"),
    "tokens": (whole(2), "that are decoded"),
    "prompt": (whole(1), "tokens of their prompt"),
    "text": (whole(2), "tokens of a conversation's first turn"),
    "rounds": (whole(1), "that are counted"),
    "work": ({"metavar": "FOLDER"}, "where the store is made, and kept"),
}
