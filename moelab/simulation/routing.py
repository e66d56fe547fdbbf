"""Routing as real models do it: a model of eight numbers, drawn in place of a trace.

A router reads a state of few dimensions that all layers share and that moves through the text. An
expert's score at a token is

    score[t, l, e] = b[l, e] + v[l, e] · x[t]        the K highest are chosen
    x[t] = text's own + passage's (slow) + neighbours' (fast) + the token's own

and the score's variance, 1, is divided among the five. So three things that traces show are parts
of one sum: a layer's popularity b, a text's preference, and neighbourhood in time, at two rates.
Layers agree because they read the same x: the fewer its dimensions, the more one layer's experts
tell the next one's. b is Laplace (few experts are loved, few shunned) with sides of two widths, v
a random direction, each part of x Gaussian; passages and neighbours are autoregressive of order one.

Scores do not depend on E and K, so what was fitted at one K can be drawn at another. Left out:
layers that differ in all this, words that return, positions, and the router's weights.

Shapes: x [T, D], v [L, E, D], b [L, E], ids [T, L, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, exp, inf, log, log2
from typing import TYPE_CHECKING

import numpy as np

from moelab.base.schema import typed
from moelab.base.specs import MoESpec
from moelab.cards import MODELS, load_card, load_model

if TYPE_CHECKING:  # drawing does without torch
    from moelab.trace import RoutingTrace

#: tokens whose scores are in memory at once
CHUNK = 128
PARTS = ("popularity", "text", "passage", "neighbours")


@dataclass(frozen=True)
class Routing:
    """What routing is like; the first four are shares of a score's variance, the rest of it is the
    token's own.

    popularity : how much a layer prefers some experts, whatever the text.
    text : how much a text does.
    passage, passage_tokens : how much a stretch of text does, and tokens until that has faded to 1/e.
    neighbours, neighbour_tokens : the same of the nearest tokens.
    width : dimensions of the state that routers read; the part of one counts as part of one.
    skew : above 0, popularity is of a few loved experts; below 0, of a few shunned ones.

    Raises ValueError for shares below 0 or above 1 in sum, lengths that are not above 0, a width
    below 1, a skew beyond ±9."""

    popularity: float
    text: float
    passage: float
    passage_tokens: float
    neighbours: float
    neighbour_tokens: float
    width: float
    skew: float = 0.0

    def __post_init__(self) -> None:
        shares = [getattr(self, part) for part in PARTS]
        lengths = self.passage_tokens, self.neighbour_tokens
        right = all(share >= 0 for share in shares) and sum(shares) <= 1 + 1e-9
        right = right and all(0 < n < inf for n in lengths) and 1 <= self.width < inf
        if not (right and abs(self.skew) < 9):
            raise ValueError(
                f"{self}: {', '.join(PARTS)} are shares, 0 or more and 1 at most in sum; "
                "passage_tokens and neighbour_tokens are above 0; width is at least 1, skew within ±9"
            )

    def draw(self, L: int, E: int, K: int, lengths: Sequence[int], seed: int = 0) -> np.ndarray:
        """Experts of sequences of so many tokens, one after the other: int16 [T, L, K], the highest
        score first. Another seed is another model and another text."""
        popularity, readers = self.routers(L, E, seed)
        flat = readers.reshape(L * E, -1).T
        states = self.states(lengths, seed)
        ids = np.empty((len(states), L, K), np.int16)
        for at in range(0, len(states), CHUNK):
            scores = (states[at : at + CHUNK] @ flat).reshape(-1, L, E) + popularity
            best = np.argpartition(scores, E - K, axis=2)[..., E - K :]
            order = np.take_along_axis(scores, best, 2).argsort(2)[..., ::-1]
            ids[at : at + CHUNK] = np.take_along_axis(best, order, 2)
        return ids

    def trace(self, spec: MoESpec, lengths: Sequence[int], seed: int = 0) -> RoutingTrace:
        """The same as a trace of such a model, all of it decoding; weights are 1/K, and words are
        unknown."""
        import torch

        from moelab.trace import RoutingTrace

        ids = torch.from_numpy(self.draw(spec.L, spec.E, spec.K, lengths, seed))
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        sequence = numbers.repeat_interleave(torch.tensor(lengths))
        return RoutingTrace.of_ids(ids, spec, f"drawn from {self}", sequence=sequence)

    def routers(self, L: int, E: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """What each expert has by itself and what it reads: b float32 [L, E], v float32 [L, E, D],
        directions of length 1."""
        biases, directions = np.random.default_rng([seed, 0]).spawn(2)
        v = directions.standard_normal((ceil(self.width), L, E), np.float32)
        v[-1] *= (self.width - len(v) + 1) ** 0.5
        v /= np.linalg.norm(v, axis=0)
        b = biases.laplace(size=(L, E))
        loved = exp(self.skew)
        shunned = exp(-self.skew)
        b *= np.where(b > 0, loved, shunned)
        b *= (self.popularity / (loved**2 + shunned**2 - (loved - shunned) ** 2 / 4)) ** 0.5
        return b.astype(np.float32), np.ascontiguousarray(v.transpose(1, 2, 0))

    def states(self, lengths: Sequence[int], seed: int = 0) -> np.ndarray:
        """What routers read, sequence after sequence: x float32 [T, D]."""
        rngs = np.random.default_rng([seed, 1]).spawn(4)
        shares = [self.text, self.passage, self.neighbours]
        shares.append(max(0.0, 1.0 - self.popularity - sum(shares)))
        kept = [1.0, exp(-1 / self.passage_tokens), exp(-1 / self.neighbour_tokens), 0.0]
        shape = ceil(self.width), sum(lengths)
        x = np.zeros(shape, np.float32)
        for rng, share, keep in zip(rngs, shares, kept):
            x += share**0.5 * _wandering(rng.standard_normal(shape, np.float32), keep, lengths)
        return x.T


def _wandering(noise: np.ndarray, keep: float, lengths: Sequence[int]) -> np.ndarray:
    """Noise [D, T] as a process of variance 1 whose neighbours correlate by `keep`, anew in every
    sequence."""
    from scipy.signal import lfilter

    new = (1 - keep**2) ** 0.5
    parts = np.split(noise, np.cumsum(lengths)[:-1], axis=1)
    if not new:
        return np.concatenate([np.repeat(part[:, :1], part.shape[1], 1) for part in parts], 1)
    for part in parts:
        part[:, :1] /= new
    return np.concatenate([lfilter([new], [1.0, -keep], part) for part in parts], 1)


def routing_of(spec: MoESpec) -> tuple[Routing, str]:
    """This model's routing as fitted to a trace of it, or else that of the most alike of the models
    that have one; and words that say which."""
    fitted = families()
    own = [name for name in fitted if load_model(name).fingerprint() == spec.fingerprint()]
    if own:  # of one geometry, a fine-tune may have its own
        name = max(own, key=spec.name.endswith)
        return fitted[name], f"fitted to a trace of {name}"

    def unlike(name: str) -> tuple[bool, float]:
        other = load_model(name)
        apart = abs(log(spec.E / other.E)) + abs(log(spec.K / other.K))
        return spec.model_type != other.model_type, apart

    nearest = min(fitted, key=unlike)
    return fitted[
        nearest
    ], f"fitted to a trace of {nearest}, the most like {spec.name} that has one"


@cache
def families() -> dict[str, Routing]:
    """Model card → the routing on it, of all that have one."""
    cards = {name: load_card(name).get("routing", {}) for name in MODELS}
    about = "kind", "source"
    return {
        name: typed({what: of[what] for what in of if what not in about}, Routing, name)
        for name, of in cards.items()
        if of
    }


#: where fitting starts and what it keeps near where a trace does not say: about the mean of fits
TYPICAL = Routing(0.1, 0.05, 0.15, 30.0, 0.5, 1.0, 8.0)
#: distances in tokens at which a fit compares what tokens share
LAGS = (1, 2, 4, 8, 16, 32, 64)


def fit(trace: RoutingTrace, rounds: int = 8) -> Routing:
    """The routing whose draws have the statistics of a trace: hit rates of LRU, LFU and Belady,
    reuse at several distances, entropy, what a layer tells of the next.

    Least squares, in a trust region, of the differences in percent to the power of 1.5, so that the
    largest count most, with the same random numbers for all draws. ValueError: fewer than two tokens
    or layers.

    rounds : steps at most."""
    from scipy.optimize import least_squares

    lengths = trace.sequence.bincount().tolist()
    lengths = [n for n in lengths if n]
    spec = trace.spec
    if len(trace) < 2 or spec.L < 2:
        raise ValueError(
            f"the trace of {spec.name} has {len(trace)} tokens and {spec.L} layers; a fit needs two "
            "of each, and a thousand tokens to say much"
        )
    few = min(spec.L, 8, max(4, 64_000 // len(trace)))  # layers are drawn alike
    drawn = replace(spec, moe_layers=spec.moe_layers[:few])
    seeds = min(max(5000 // len(trace), 1), 30)
    wanted = _compared(trace)

    def residual(x: np.ndarray) -> np.ndarray:
        routing = _routing(x)
        found = [_compared(routing.trace(drawn, lengths, seed)) for seed in range(seeds)]
        apart = WEIGHTS * np.nan_to_num(np.mean(found, 0) - wanted)
        return np.concatenate([apart * abs(apart) ** 0.5, PRIOR * (x - start)])

    def slopes(x: np.ndarray) -> np.ndarray:
        here = residual(x)
        return np.stack([(residual(x + one) - here) / STEP for one in STEP * np.eye(len(x))], 1)

    start = _coordinates(TYPICAL)
    return _routing(least_squares(residual, start, slopes, max_nfev=rounds).x)


#: of what `_compared` finds: reuse from the second distance on counts less
WEIGHTS = np.array([1.0] * 13 + [0.3] * (len(LAGS) - 1) + [1.0] * 2)
#: how strongly a fit holds on to `TYPICAL`: a factor e counts as one percent of a statistic; and
#: how far it looks for a slope
PRIOR = 1.0
STEP = 0.25


def _coordinates(routing: Routing) -> np.ndarray:
    """Eight numbers without bounds: logarithms, of shares relative to the token's own."""
    shares = np.array([getattr(routing, part) for part in PARTS])
    rest = routing.passage_tokens, routing.neighbour_tokens, routing.width
    return np.concatenate([np.log(shares / (1 - shares.sum())), np.log(rest), [routing.skew]])


def _routing(x: np.ndarray) -> Routing:
    """Of `_coordinates`."""
    shares = np.exp(x[:4]) / (1 + np.exp(x[:4]).sum())
    popularity, text, passage, neighbours = shares.tolist()
    slow, fast, width = np.exp(x[4:7]).tolist()
    skew = float(x[7])
    return Routing(popularity, text, passage, slow, neighbours, fast, max(width, 1.0), skew)


def _compared(trace: RoutingTrace) -> np.ndarray:
    """What a fit compares, in percent; nan where a trace does not say it."""
    from moelab.trace.statistics import chosen, hit_rates, next_layer, popularity

    hits = hit_rates(trace, policies=("lru", "lfu", "belady")).values()
    had = chosen(trace)
    sequence = trace.sequence.sort().values.numpy()
    reuse = []
    for lag in LAGS:
        pairs = sequence[lag:] == sequence[:-lag]
        shared = had[:-lag][pairs] & had[lag:][pairs]
        reuse.append(shared.sum() / max(had[lag:][pairs].sum(), 1) if pairs.sum() > 50 else np.nan)
    entropy = popularity(trace)[0] / log2(trace.spec.E)
    return 100 * np.array([*sum(hits, ()), *reuse, entropy, next_layer(trace)])
