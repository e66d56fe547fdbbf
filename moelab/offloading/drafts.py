"""Draft tokens: several positions in one forward pass, while that has been seen to be faster.

Source: speculative decoding (Leviathan et al. 2023), with drafts of an assistant model or of the text
itself (prompt lookup, Saxena 2023), as transformers' assisted generation verifies them. Of an
offloaded model, a pass over n + 1 positions needs the union of their experts, so drafts may well be
slower (`moelab.speculate.drafts`). So passes are timed. How many drafts would have been right is
known of the text's own without verifying any, and these are tried only where they mostly are."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import eq
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from moelab.models import compat

COUNTS = 1, 2, 4, 8  # drafts of a pass that a gate chooses from
GRAM = 2  # tokens by which text is found again
KEPT = 16  # passes, and guesses, that a gate looks back on
PLAIN, TRIAL = 4, 3  # passes without drafts, and with, before their seconds are believed
COST = 0.5  # of a token's time, that a draft is taken to cost before it is timed
GAIN = 0.03  # by which drafts must be faster
STAKE, RICH = 4.0, 32.0  # tokens that may be lost by drafts: at first, and of what they have won
SHARE = 0.005  # of all tokens, which are put to a stake below the first
ROW = 64  # passes with drafts after which one goes without; without, until all is timed anew


class DraftGate:
    """How many drafts a pass verifies; one for a model and a source of drafts.

    It is a gambler with a small income: drafts that make the text slower, be it to learn what they
    cost, are paid from a stake, and without one there are none.

    free : whether the source costs nothing, so that it can be judged while it is not followed.
    """

    def __init__(self, free: bool) -> None:
        self.free = free
        self._stake = STAKE
        self._row = 0
        #: of the drafts in a place, how many were right
        self._right: deque[int] = deque(maxlen=KEPT)
        #: drafts of a pass → its seconds
        self._seconds: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=KEPT))

    def choose(self, most: int) -> int:
        """How many of at most so many drafts to verify."""
        known = len(self._seconds[0]) >= PLAIN and (not self.free or len(self._right) >= PLAIN)
        if not known or self._stake < 0 or self._row == ROW:
            return 0
        best = max((n for n in COUNTS if n <= most), key=self.speedup, default=0)
        if best and self.speedup(best) > 1 + GAIN:
            return best
        if self._row <= -ROW and self._stake >= STAKE:
            self._row = 0
            self._seconds = defaultdict(self._seconds.default_factory, {0: self._seconds[0]})
            if not self.free:
                self._right.clear()
        return 0

    def speedup(self, drafts: int) -> float:
        """Tokens a second with so many drafts over those with none, as far as known."""
        right = float(drafts)
        judged = self._right
        if self.free or len(judged) >= PLAIN:
            right = fmean(min(n, drafts) for n in judged)
        timed = [n for n in COUNTS if len(self._seconds[n]) >= TRIAL]
        if not timed:
            return (1 + right) / (1 + COST * drafts)
        # Positions share experts, so each further one costs less: fewer drafts cost at least their
        # part of what more do. It is a low guess, so that they are tried if they can pay.
        near = min(timed, key=lambda n: abs(n - drafts))
        extra = median(self._seconds[near]) / median(self._seconds[0]) - 1
        return (1 + right) / (1 + extra * min(1, drafts / near))

    def verified(self, drafts: int, right: int, seconds: float) -> None:
        """A pass took so long; of its drafts, so many were right."""
        self._seconds[drafts].append(seconds)
        if drafts:
            self._row = max(self._row, 0) + 1
            took = median(self._seconds[drafts]) / median(self._seconds[0])  # whatever disturbed it
            self._stake = min(self._stake + 1 + right - took, RICH)
        else:
            self._row = min(self._row, 0) - 1
            self._stake = max(self._stake, min(self._stake + SHARE, STAKE))

    def guessed(self, right: int, drafts: int) -> None:
        """So many of the drafts in one place were right; where all were, as many more might be."""
        self._right.append(right if right < drafts else 2 * right)


class PromptLookup:
    """Drafts what followed the latest tokens where they occurred the last time before.

    transformers' own searches the whole text for every token, too long for one that is free."""

    requires_model_outputs = False
    num_assistant_tokens = 0

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # tokens → where they went on the last time

    def get_candidates(self, ids: Tensor) -> tuple[Tensor, None]:
        """ids [1, S], which go on from those of the last call → ids [1, S + n]."""
        tokens = self._tokens
        for token in ids[0, len(tokens) :].tolist():
            self._after[tuple(tokens[-GRAM:])] = len(tokens)
            tokens.append(token)
        at = self._after.get(tuple(tokens[-GRAM:]), len(tokens))
        drafts = tokens[at : at + self.num_assistant_tokens]
        return (torch.cat([ids, ids.new_tensor([drafts])], 1) if drafts else ids), None

    def update_candidate_strategy(self, *_: Any) -> None:
        """Nothing is learnt."""


@dataclass(eq=False)
class Drafting:
    """What transformers' assisted generation asks for candidates, and tells what became of them.

    inner : the source of drafts: one of transformers', or `PromptLookup`.
    asked : drafts in a pass, at most; None for as many as the source gives.
    gate : decides how many of them; None for all.
    cache : told how many positions of a pass are drafts, for `moelab.models.forward`.
    accepted : told how many of a pass were right.
    longest : tokens of the whole text, at most.
    """

    inner: Any
    asked: int | None
    gate: DraftGate | None
    cache: Any
    accepted: Callable[[int], None]
    longest: int
    requires_model_outputs = False
    _prompt = True  # not yet computed
    _start = None  # of the pass before, in seconds, if it is to be counted

    def __post_init__(self) -> None:
        self._guesses: deque[tuple[int, list[int]]] = deque()  # where, which tokens

    def get_candidates(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """ids [1, S] → (ids with n drafts [1, S + n], their logits [1, n, V] if they have any)."""
        now = time.perf_counter()
        S = ids.shape[1]
        if self.gate and self._start is not None:
            self.gate.verified(*self._drafted, now - self._start)
        self._start = None if self._prompt else now
        found = ids
        logits = None
        if self.asked is None:
            found, logits = self.inner.get_candidates(ids)
        elif most := max(min(self.asked, self.longest - S - 1), 0):
            found, logits = self._drafts(ids, most)
        self.cache.drafts = found.shape[1] - S
        return found, logits

    def _drafts(self, ids: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        gate = self.gate
        S = ids.shape[1]
        if gate and not gate.free and not self._prompt:  # which an assistant computes, too
            most = gate.choose(most)
        if not most:
            return ids, None
        self.inner.num_assistant_tokens = most
        found, logits = self.inner.get_candidates(ids)
        if gate and found.shape[1] > S:
            self._guesses.append((S, found[0, S:].tolist()))
            if gate.free:
                found = found[:, : S + gate.choose(found.shape[1] - S)]
        return found, logits

    def update_candidate_strategy(self, ids: Tensor, scores: Tensor, right: int) -> None:
        """So many drafts were right; ids [1, S] end with them and one token more."""
        drafts, self.cache.drafts, right = self.cache.drafts, 0, int(right)
        self.accepted(right)
        if drafts:
            self.inner.update_candidate_strategy(ids, scores, right)
        self._drafted = (drafts, right)
        self._prompt = False
        while self._guesses and self._guesses[0][0] + COUNTS[-1] <= ids.shape[1]:
            at, guess = self._guesses.popleft()
            same = map(eq, guess, ids[0, at : at + len(guess)].tolist())
            self.gate.guessed([*same, False].index(False), len(guess))


#: drafts that the generation of this thread was asked for
ASKED: ContextVar[int | str] = ContextVar("drafts", default=0)


@contextmanager
def drafting(model: Any, drafts: int | str, ids: Any, options: dict[str, Any]) -> Iterator[dict]:
    """Within the block `model.generate(ids, **options)` drafts; gives its options for that.

    drafts : a number for each pass, "auto" for a gate's choice, 0 for what `options` say.
    """
    if drafts != "auto" and (not isinstance(drafts, int) or drafts < 0):
        raise ValueError(f"drafts is {drafts!r}; it must be a number of tokens from 0 on, or auto")
    if drafts == "auto" and (ids is None or len(ids) != 1 or compat.is_stateful(model)):
        drafts = 0  # as transformers can verify none
    source = {} if options.get("assistant_model") is not None else {"prompt_lookup_num_tokens": 1}
    token = ASKED.set(drafts)
    try:
        yield options | (source if drafts else {})
    finally:
        ASKED.reset(token)
