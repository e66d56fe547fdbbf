"""Bring your own: a cache policy (touch and victim) on kinds of text or on traces, token by token,
against all others and Belady's ceiling.

It is a class that can be made without further arguments, or an object. Whatever it raises ends its
own part only, and is told with its traceback. Predictors are compared in notebook 04
(`notebooks/studies/recall_and_misses.py`), NDP schedules beside notebook 07
(`notebooks/studies/schedules.py`)."""

from __future__ import annotations

import copy
import traceback
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from moelab.base.library import token_count
from moelab.base.progress import progress
from moelab.base.specs import ExpertKey, State
from moelab.bench.limits import belady_hits, request_count, steps
from moelab.cache.policies import POLICIES
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.evaluation.questions import prompts
from moelab.models.identity import identity
from moelab.recording import record
from moelab.trace import RoutingTrace
from moelab.trace.statistics import capacity

TEXTS = ("prose", "code", "lookup")
#: tokens that are generated after a text
DECODED = 24


class Wrong(NamedTuple):
    """One choice that another would have beaten, in words, and what it cost in the unit of the
    contest."""

    where: str
    chose: str
    better: str
    cost: float


Played = tuple[float, list[Wrong]]  # a score, and what was chosen wrongly, costliest first


@dataclass(frozen=True)
class Standing:
    """A contestant's score on each trace; `error` is the traceback that ended it."""

    name: str
    own: bool
    scores: Mapping[str, float]
    error: str = ""


@dataclass(frozen=True)
class Contest:
    """unit : of the scores. ceiling : the best possible score of each trace.

    standings : best first. wrong : trace → what the own one chose wrongly, costliest first.
    lower : whether a lower score is better.
    """

    unit: str
    ceiling: Mapping[str, float]
    standings: list[Standing]
    wrong: Mapping[str, list[Wrong]] = field(default_factory=dict)
    lower: bool = False

    def share(self, standing: Standing, trace: str) -> float:
        """What was reached of the ceiling, 0 to 1; 0 where it raised."""
        reached = standing.scores.get(trace)
        best = self.ceiling[trace]
        if reached is None:
            return 0.0
        return best / reached if self.lower else reached / best

    @property
    def own(self) -> Standing:
        """The standing of what was entered."""
        return next(standing for standing in self.standings if standing.own)

    @property
    def place(self) -> int:
        """Of the own one, 1 for the first."""
        return 1 + self.standings.index(self.own)


def arena(
    mine: Any, of: Any = None, share: float = 0.5, tokens: int = 256, each: int = 2
) -> Contest:
    """Rank a cache policy against all others.

    of : whose routing policies see: an opened model, a trace of whatever program, or {name: trace};
        None opens the shipped small model.
    share : of the experts that fit in memory, for policies. tokens, each : length and number of
        prompts a kind of text, for a model.

    Raises TypeError: it is no policy.
    """
    made = mine if isinstance(mine, type) else type(mine)
    name = made.__name__
    require_policy(made)
    if isinstance(of, RoutingTrace):
        of = {of.spec.name: of}
    if not isinstance(of, Mapping):
        if of is None:
            from moelab import open_model

            of = open_model()
        of = texts(of, tokens, each)
    ceiling = {}
    for text, trace in of.items():
        asked = [step[1:] for step in steps(trace)]
        ceiling[text] = 100 * belady_hits(asked, capacity(trace, share)) / request_count(asked)
    others = {
        other: {
            # the trace is kept, too, or another one could be given its number
            text: once((id(trace), other, share), lambda: (play(trace, other, share)[0], trace))[0]
            for text, trace in of.items()
        }
        for other in progress([n for n in POLICIES if n != "belady"], "policies", unit="policy")
    }
    own, wrong = guarded(
        list(of), lambda text: play(of[text], fresh(mine), share, judge=True), name
    )
    return ranked("hit rate (%)", ceiling, others, own, wrong)


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


def ranked(
    unit: str,
    ceiling: Mapping[str, float],
    others: Mapping[str, Mapping[str, float]],
    own: Standing,
    wrong: Mapping[str, list[Wrong]],
    lower: bool = False,
) -> Contest:
    standings = [own, *(Standing(name, False, of) for name, of in others.items())]
    contest = Contest(unit, ceiling, standings, wrong, lower)
    contest.standings.sort(
        key=lambda of: -sum(contest.share(of, trace) for trace in ceiling)
    )  # ties: own first
    return contest


def guarded(
    traces: Sequence[str], play: Callable[[str], Played], name: str
) -> tuple[Standing, dict[str, list[Wrong]]]:
    """What is brought, on one trace after the other until it raises."""
    scores = {}
    wrong = {}
    try:
        for trace in traces:
            scores[trace], wrong[trace] = play(trace)
    except Exception:
        return Standing(name, True, scores, traceback.format_exc()), wrong
    return Standing(name, True, scores), wrong


def fresh(mine: Any) -> Any:
    """A new object of a class; a copy of an object, so that one trace teaches it nothing about the
    next."""
    return mine() if isinstance(mine, type) else copy.deepcopy(mine)


def costliest(wrong: list[Wrong]) -> list[Wrong]:
    return sorted(wrong, key=lambda one: -one.cost)


def play(trace: RoutingTrace, policy: Any, share: float, judge: bool = False) -> Played:
    """(hit rate in %, wrong evictions) of a policy with memory for a share of the experts, token by
    token.

    An eviction is wrong if the expert was used again, and another that could have left only later
    or never; it costs as many steps as that would have been later."""
    L = trace.spec.L
    E = trace.spec.E
    residency = Residency(L, E, Pools(F=capacity(trace, share)), policy, "model")
    asked = steps(trace)
    uses: dict[ExpertKey, list[int]] = {}
    for n, (_, layer, experts) in enumerate(asked):
        for expert in experts:
            uses.setdefault(ExpertKey(layer, expert), []).append(n)

    def following(key: ExpertKey, n: int) -> float:
        of = uses.get(key, [])
        return of[after] if (after := bisect_right(of, n)) < len(of) else inf

    wrong = []
    for n, (_, layer, experts) in enumerate(asked):
        left = set(residency.resident(State.FULL)) if judge else set()
        for victim in residency.begin(layer, experts).evicted:
            if not judge:
                continue
            best = max(
                (key for key in left if key.layer != layer or key.expert not in experts),
                key=lambda key: following(key, n),
            )
            left.discard(victim)
            again = following(victim, n)
            later = following(best, n)
            if again < later:
                wrong.append(
                    Wrong(
                        f"token {n // L}, layer {layer}",
                        f"{_said(victim)}, used again {again - n} steps later",
                        f"{_said(best)}, "
                        + ("never used again" if later == inf else f"{later - n} steps later"),
                        float(min(later, len(asked)) - again),
                    )
                )
    return 100 * residency.counters.hit_rate(), costliest(wrong)


def _said(key: ExpertKey) -> str:
    return f"expert {key.expert} of layer {key.layer}"
