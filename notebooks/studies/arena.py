"""How do the cache policies stand in the arena?

    moelab bench arena

plays every policy that has a name on the routing traces of real models that are shipped
(data/traces), in memory for some shares of their experts, as `moelab arena` plays yours: token by
token, one pool for all layers, empty at the start. The ceiling is Belady's rule, which knows what is
asked next. Policies are ranked by their mean share of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from moelab.base.arguments import number, several
from moelab.base.records import Records
from moelab.bench.arena import arena
from moelab.cache.policies import LRU
from moelab.viz.views.standings import SHARES, traces_of

KIND = "exact"
MEASURES = ("moelab/cache", "moelab/bench/arena.py", "data/traces")
OPTIONS = {"shares": (several(number(above=0, most=1)), "of the experts that fit in memory")}


def run(shares: Sequence[float] = SHARES) -> Records:
    contest = arena(LRU, traces_of("all"), shares)  # it must be given one; "lru" stands for it
    others = [one for one in contest.standings if not one.own]
    rows = {
        one.name: {"of the ceiling": fmean(contest.share(one, game) for game in contest.ceiling)}
        | {game: score / 100 for game, score in one.scores.items()}
        for one in others
    }
    ceiling = {game: most / 100 for game, most in contest.ceiling.items()}
    return {"standing": rows | {"belady": {"of the ceiling": 1.0} | ceiling}}
