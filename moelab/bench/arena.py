"""Bring your own: a cache policy (touch and victim) on kinds of text or on traces, token by token,
against all others and Belady's ceiling.

It is a class that can be made without further arguments, or an object. Whatever it raises ends its
own part only, and is told with its traceback. Predictors are compared in notebook 04
(`notebooks/studies/recall_and_misses.py`), NDP schedules beside notebook 07
(`notebooks/studies/schedules.py`)."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moelab.base.library import token_count
from moelab.base.progress import progress
from moelab.cache.policies import POLICIES, Belady
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.evaluation.questions import prompts
from moelab.models.identity import identity
from moelab.recording import record
from moelab.trace import DECODE, PREFILL, RoutingTrace
from moelab.trace.statistics import capacity

TEXTS = ("prose", "code", "lookup")
#: tokens that are generated after a text
DECODED = 24


@dataclass(frozen=True)
class Standing:
    """A contestant's score on each trace; `error` is the traceback that ended it."""

    name: str
    own: bool
    scores: Mapping[str, float]
    error: str = ""


@dataclass(frozen=True)
class Contest:
    """ceiling : the best possible hit rate of each trace, or of each in each memory, %.
    standings : best first, of the same."""

    ceiling: Mapping[str, float]
    standings: list[Standing]

    def share(self, standing: Standing, trace: str) -> float:
        """What was reached of the ceiling, 0 to 1; 0 where it raised."""
        return standing.scores.get(trace, 0.0) / self.ceiling[trace]

    @property
    def own(self) -> Standing:
        """The standing of what was entered."""
        return next(standing for standing in self.standings if standing.own)

    @property
    def place(self) -> int:
        """Of the own one, 1 for the first."""
        return 1 + self.standings.index(self.own)


def arena(
    mine: Any,
    of: Any = None,
    share: float | Sequence[float] = 0.5,
    tokens: int = 256,
    each: int = 2,
) -> Contest:
    """Rank a cache policy against all others.

    of : whose routing policies see: an opened model, a trace of whatever program, or {name: trace};
        None opens the shipped small model.
    share : of the experts that fit in memory, for policies; or several.
    tokens, each : length and number of prompts a kind of text, for a model.

    Raises TypeError: it is no policy.
    """
    made = mine if isinstance(mine, type) else type(mine)
    require_policy(made)
    if isinstance(of, RoutingTrace):
        of = {of.spec.name: of}
    if not isinstance(of, Mapping):
        if of is None:
            from moelab import open_model

            of = open_model()
        of = texts(of, tokens, each)
    shares = share if isinstance(share, Sequence) else [share]
    games = {
        f"{text}, {100 * one:g} %" if shares is share else text: (trace, one)
        for text, trace in of.items()
        for one in shares
    }
    ceiling = {
        text: play(trace, Belady(step[1:] for step in steps(trace)), share)
        for text, (trace, share) in games.items()
    }
    others = {
        other: {
            # the trace is kept, too, or another one could be given its number
            text: once((id(trace), other, share), lambda: (play(trace, other, share), trace))[0]
            for text, (trace, share) in games.items()
        }
        for other in progress([n for n in POLICIES if n != "belady"], "policies", unit="policy")
    }
    scores: dict[str, float] = {}
    error = ""
    try:
        for text, (trace, share) in games.items():
            # a new object of a class; a copy of an object, which one trace shall not teach for the next
            policy = mine() if isinstance(mine, type) else copy.deepcopy(mine)
            scores[text] = play(trace, policy, share)
    except Exception:
        error = traceback.format_exc()
    standings = [Standing(name, False, found) for name, found in others.items()]
    contest = Contest(ceiling, [Standing(made.__name__, True, scores, error), *standings])
    contest.standings.sort(key=lambda one: -sum(contest.share(one, text) for text in games))
    return contest  # ties: own first


def require_policy(made: type) -> None:
    """TypeError for a class that is no cache policy."""
    if not all(callable(getattr(made, method, None)) for method in ("touch", "victim")):
        raise TypeError(
            f"{made.__name__} is no cache policy: it needs the methods touch and victim"
        )


_MEMO: dict[Any, Any] = {}


def once(key: Any, make: Callable[[], Any]) -> Any:
    """What was made under this key; another contest does not record, nor play the others, again."""
    if key not in _MEMO:
        _MEMO[key] = make()
    return _MEMO[key]


def texts(model: Any, tokens: int, each: int) -> dict[str, RoutingTrace]:
    """A trace of every kind of text and of what the model answers; recorded once a model."""
    count = token_count(model.tokenizer)
    return {
        source: once(
            (identity(model), source, tokens, each),
            lambda: record(model, prompts(source, each, tokens=tokens, count=count), DECODED),
        )
        for source in TEXTS
    }


def steps(trace: RoutingTrace) -> list[tuple[int, int, dict[int, int]]]:
    """(row of the trace, layer, {expert: 1}), token by token, prompt after prompt; no prefill."""
    ids = trace.ids.tolist()
    E = trace.spec.E
    return [
        (row, layer, dict.fromkeys((e for e in chosen if e != E), 1))
        for row in trace.sequence.long().argsort(stable=True).tolist()
        for layer, chosen in enumerate(ids[row])
        if chosen[0] != E
    ]


def play(trace: RoutingTrace, policy: Any, share: float) -> float:
    """Hit rate in % of a policy with memory for a share of the experts, token by token."""
    pools = Pools(F=capacity(trace, share))
    residency = Residency(trace.spec.L, trace.spec.E, pools, policy, "model")
    names, phases = {PREFILL: "prefill", DECODE: "decode"}, trace.phase.tolist()
    for row, layer, experts in steps(trace):
        residency.begin_forward(names[phases[row]])
        residency.begin(layer, experts)
    return 100 * residency.counters.hit_rate()
