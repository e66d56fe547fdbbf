"""The routing that an advice assumes where the model has not run here: texts of this model's fit, of
the nearest family's, or of a trace or calibration that is given.

What a cache finds in memory depends on what follows what, so it is asked with tokens: `found` plays
a few layers of each text with the default policy. Texts differ, and so do families: the middle is
the advice's one number, the ends are its range."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moelab.base.specs import MoESpec
from moelab.cards import load_model
from moelab.simulation.drafts import second_half
from moelab.simulation.routing import Routing, families, routing_of

#: texts of the routing that is assumed; tokens and layers of each by which hits are counted, after
#: as many tokens that fill the cache
TEXTS, TOKENS, LAYERS = 5, 64, 4
#: layers of a trace, which differ
OF_TRACE = 24
#: shares of all experts in memory at which hits are counted; between them lies a straight line
SHARES = (0.05, 0.15, 0.3, 0.5, 0.75)
#: how far a fit's hit rates may be from its trace's (`moelab.simulation.routing`)
FIT = 0.03
#: (layers, tokens of each sequence, which text) → ids [T, layers, K], one sequence after the other
Draw = Callable[[int, Sequence[int], int], np.ndarray]


@dataclass(frozen=True, eq=False)
class Assumed:
    """Routing of a model.

    words : who says so.    draw : a text of it.    others : texts of what it might be as well.
    margin : by how much its hit rates may be off besides.
    layers : by which hits are counted.
    """

    spec: MoESpec
    words: str
    draw: Draw
    others: tuple[Draw, ...] = ()
    margin: float = 0.0
    batch: int = 1
    layers: int = LAYERS

    def texts(self, layers: int, lengths: Sequence[int]) -> list[np.ndarray]:
        """`TEXTS` of them, then one of each other."""
        own = [self.draw(layers, lengths, n) for n in range(TEXTS)]
        return own + [draw(layers, lengths, 0) for draw in self.others]

    @cached_property
    def _steps(self) -> list[Any]:
        """Of each text."""
        layers = min(self.layers, self.spec.L)
        drawn = self.texts(layers, [2 * TOKENS] * self.batch)
        return [steps_of(ids, self.batch, self.spec.E) for ids in drawn]

    @cached_property
    def curves(self) -> list[list[float]]:
        """Hit rates [texts, shares]."""
        return [
            [second_half(of, self.spec.E, share).hit_rate() for share in SHARES]
            for of in self._steps
        ]

    def found(
        self, share: float, sent: tuple[int, ...] | None = None
    ) -> tuple[float, float, float]:
        """Share of a step's experts that are in memory, with so large a share of all there: least,
        middle, most; sent : as of `second_half`."""
        if sent and 0 < share < 1:
            counted = (second_half(of, self.spec.E, share, sent) for of in self._steps)
            rates = [one.hit_rate() for one in counted]
        else:
            rates = [np.interp(share, (0, *SHARES, 1), (0, *of, 1)) for of in self.curves]
        off = self.margin * (0 < share < 1)
        low, high = max(min(rates) - off, 0.0), min(max(rates) + off, 1.0)
        return float(low), float(np.median(rates[:TEXTS])), float(high)

    @cached_property
    def distinct(self) -> float:
        """Experts that a layer's step needs."""
        return float(np.mean([len(experts) for step in self._steps[0] for _, experts in step]))


def steps_of(ids: np.ndarray, batch: int, E: int) -> list[list[tuple[int, dict[int, int]]]]:
    """Steps in which `batch` sequences of equal length, which stand one after the other in ids [T,
    L, K], take their tokens together; expert E is none."""
    together = ids.reshape(batch, -1, *ids.shape[1:]).transpose(1, 2, 0, 3)  # [S, L, batch, K]
    return [
        [
            (layer, {e: n for e, n in sorted(Counter(chosen.ravel().tolist()).items()) if e < E})
            for layer, chosen in enumerate(step)
        ]
        for step in together
    ]


def assumed(
    spec: MoESpec,
    batch: int = 1,
    trace: Any = None,
    calibration: str | Path | None = None,
    model: str | None = None,
) -> Assumed:
    """What is assumed of a model, `model` by its name. ValueError: a trace or calibration of another
    geometry, or both."""
    if trace is not None and calibration is not None:
        raise ValueError("a trace says which experts are popular, too: give no calibration with it")
    if trace is not None:
        return Assumed(spec, *of_trace(spec, trace, model), batch=batch, layers=OF_TRACE)
    if calibration is not None:
        return Assumed(spec, *of_calibration(spec, calibration), margin=FIT, batch=batch)

    def drawing(routing: Routing) -> Draw:
        return lambda layers, lengths, n: routing.draw(layers, spec.E, spec.K, lengths, seed=n)

    own, words = routing_of(spec)
    fitted = families()
    alike = [drawing(other) for other in fitted.values() if other != own]
    if any(load_model(name).fingerprint() == spec.fingerprint() for name in fitted):
        alike = []  # it is known: other models do not say more
    return Assumed(spec, words, drawing(own), tuple(alike), FIT, batch)


def of_trace(spec: MoESpec, path: Any, model: str | None) -> tuple[str, Draw]:
    """(Who says so, texts of a trace): its sequences, and then further parts of them; its layers
    and its number of experts a token."""
    from moelab.trace import RoutingTrace, load

    trace = path if isinstance(path, RoutingTrace) else load(path, model)
    if trace.spec.E != spec.E or trace.spec.K > spec.K:
        raise ValueError(
            f"the trace has {trace.spec.E} experts a layer and {trace.spec.K} a token, and "
            f"{spec.name} {spec.E} and {spec.K}; give one of this model"
        )
    ids = trace.ids[trace.sequence.argsort(stable=True)].numpy()

    def draw(layers: int, lengths: Sequence[int], n: int) -> np.ndarray:
        tokens = sum(lengths)
        first = n * (len(ids) - tokens) // max(TEXTS - 1, 1)  # spread over what there is
        at = np.arange(first, first + tokens) % len(ids)
        return ids[at][:, (2 * np.arange(layers) + 1) * trace.spec.L // (2 * layers)]

    name = "the trace" if path is trace else Path(path).name
    fewer = f", {trace.spec.K} a token" if trace.spec.K < spec.K else ""
    return f"as in {name} ({len(trace):,} tokens{fewer})", draw


def of_calibration(spec: MoESpec, file: str | Path) -> tuple[str, Draw]:
    """(Who says so, tokens drawn one by one by what was counted)."""
    from moelab.calibration import Calibration

    found = Calibration.load(file)
    if found.spec.fingerprint() != spec.fingerprint():
        raise ValueError(
            f"{file} was counted on {found.spec.name}, whose geometry is another than "
            f"{spec.name}'s; calibrate this model: moelab calibrate MODEL FILE"
        )
    counts = found.counts().numpy()

    def draw(layers: int, lengths: Sequence[int], n: int) -> np.ndarray:
        weights = np.log(np.maximum(counts[np.arange(layers) * spec.L // layers], 1e-9))
        noise = np.random.default_rng(n).gumbel(size=(sum(lengths), *weights.shape))
        return np.argsort(-(weights + noise), 2)[..., : spec.K].astype(np.int16)

    return "as the calibration counted, each token by itself", draw
