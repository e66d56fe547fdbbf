"""A prompt and its answer on one machine under one system: prefill, the intermediate step and decode, layer by layer.

A system plans each layer of each forward, and the closed form or the event simulation times the plan; everything else
runs on the GPU before it. A prefetching system loads its experts between prefill and decode. Tokenizer and sampling are
not modelled; layers do not overlap, as each needs the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.event_simulation import simulate_layer
from moelab.ndp.hardware import Hardware
from moelab.ndp.plans import LayerStep, Plan, problems
from moelab.ndp.prefetch import experts_that_fit, hit_rate, hits, most_used
from moelab.ndp.routing import PromptRouting
from moelab.ndp.systems import System
from moelab.specs import Event

PLACEMENTS = ("id", "popularity")


@dataclass(frozen=True)
class Result:
    """Simulated seconds of one prompt and its answer.

    moe_… : of the experts alone. dense_… : of all else, on the GPU. intermediate : loading the prefetched experts.
    prefetched : experts of each layer on the GPU while decoding (x). hit_rate : share of decode's that are among them;
        nan without any.
    """

    moe_prefill: float
    moe_decode: float
    dense_prefill: float
    dense_decode: float
    intermediate: float
    prefetched: int
    hit_rate: float

    @property
    def prefill(self) -> float:                         # TTFT without sampling
        return self.moe_prefill + self.dense_prefill

    @property
    def decode(self) -> float:
        return self.moe_decode + self.dense_decode

    @property
    def end_to_end(self) -> float:
        return self.prefill + self.intermediate + self.decode


class NDPRun:
    """One machine and system under the routing of one model: its steps, by phase and layer.

    x : experts of each layer on the GPU while decoding. resident, cached : bool [L, E], which while decoding, and which
    all along. home : int [L, E], the units.
    """

    def __init__(self, hardware: Hardware, system: System, routing: PromptRouting, placement: str = "id") -> None:
        spec, tokens = routing.spec, len(routing.prefill) + len(routing.decode)
        self.costs, self.system, self.routing = Costs(spec, hardware), system, routing
        self.home = place(routing.history, hardware.units, placement)
        self.costs.check(tokens, system.home, np.bincount(self.home.ravel()).max() if system.whole else 0)
        self.plans: dict[tuple[int, ...], Plan] = {}                    # situation of a decode step → its plan
        most = experts_that_fit(self.costs, tokens)
        self.cached = most_used(routing.history, most * system.cached)
        if system.prefetches == "none":
            self.x, self.resident = most * system.cached, self.cached
        else:
            self.x = experts_that_fit(self.costs, tokens, {"K": spec.K}.get(system.prefetches))
            if system.prefetches == "pay":
                self.x = self.experts_that_pay(min(spec.K, most), most)
            self.resident = most_used(routing.counts(), self.x)

    def plan(self, step: LayerStep) -> Plan:
        """The system's plan of a step. ValueError, saying what is wrong, unless it computes every expert once."""
        plan, N = self.system.plan(step, self.costs), self.costs.hardware.units
        if found := problems(plan, step, N, self.system.held(getattr(plan, "step", step), N)):
            more = f"; and {len(found) - 3} more" if found[3:] else ""
            raise ValueError(f"{type(self.system).__name__}.plan of a step of {len(step)} experts and {step.S} tokens "
                             f"is wrong: {'; '.join(found[:3])}{more}")
        return plan

    def prefill_step(self, layer: int, counts: np.ndarray) -> LayerStep:
        experts = np.lexsort((-self.routing.history[layer], -counts))[:int((counts > 0).sum())]
        return LayerStep(experts, counts[experts], self.home[layer, experts], self.cached[layer, experts],
                         len(self.routing.prefill))

    def decode_step(self, layer: int, ids: np.ndarray, resident: np.ndarray | None = None) -> LayerStep:
        """Of one token with experts ids [K], E for none. resident : bool [K], on the GPU; None: the prefetched."""
        if resident is None:
            resident = hits(self.resident[layer:layer + 1], ids[None, None])[0, 0]
        ids, resident = ids[ids < self.costs.spec.E].astype(int), resident[ids < self.costs.spec.E]
        by = np.argsort(-self.routing.history[layer, ids], kind="stable")
        return LayerStep(ids[by], np.ones(len(ids), int), self.home[layer, ids[by]], resident[by], 1)

    def decode_seconds(self, ids: np.ndarray, resident: np.ndarray,
                       seconds: Callable[[Plan, Costs], float] = layer_seconds) -> np.ndarray:
        """[T, L] of tokens that are decoded one by one; each distinct situation is planned once.

        ids : [T, L, K], a token's experts from most to least popular on other prompts. resident : bool [T, L, K].
        """
        T, L, K = ids.shape
        homes = np.pad(self.home, ((0, 0), (0, 1)), constant_values=-1)[np.arange(L)[:, None], ids]
        rows = self.system.situations(homes.reshape(-1, K), resident.reshape(-1, K), self.costs)
        _, first, which = np.unique(numbered(rows), return_index=True, return_inverse=True)
        times = []
        for i in first.tolist():
            at, situation = divmod(i, L), tuple(rows[i].tolist())
            if situation not in self.plans:
                self.plans[situation] = self.plan(self.decode_step(at[1], ids[at], resident[at]))
            times.append(seconds(self.plans[situation], self.costs))
        return np.array(times)[which].reshape(T, L)

    def loading(self, x: int) -> float:
        """Seconds of bringing x experts of each layer to the GPU."""
        return x * self.costs.spec.L * self.costs.transfer()

    def experts_that_pay(self, usual: int, most: int) -> int:
        """x from 0 to `most` that is predicted to gain most over the `usual` x, which stays if none gains for sure.

        Each of the prompt's S tokens is decoded with those experts resident that its others use most; D such tokens
        gain D times the mean, less two standard errors of that prediction.
        """
        ids, place, D = self.routing.prefill_by_popularity, self.routing.prefill_places, len(self.routing.decode)
        as_usual = self.decode_seconds(ids, place < usual).sum(1)                           # [S]

        def gain(x: int) -> float:
            a_token = as_usual - self.decode_seconds(ids, place < x).sum(1)
            sure = D * a_token.mean() - 2 * a_token.std() * (D + D * D / len(ids)) ** 0.5
            return self.loading(usual) - self.loading(x) + sure
        return max((usual, *range(most + 1)), key=gain)


def simulate(hardware: Hardware, system: System, routing: PromptRouting, *, placement: str = "id",
             seconds: Callable[[Plan, Costs], float] = layer_seconds) -> Result:
    """Time one prompt and its answer by the model that the routing is of.

    placement : see `place`. seconds : `closed_form.layer_seconds` or `event_simulation.event_seconds`.

    Raises NotSupported: the experts do not fit where the system keeps them, or the rest not the GPU.
    ValueError: the system plans a step wrongly.
    """
    run, ids = NDPRun(hardware, system, routing, placement), routing.decode_by_popularity
    costs, S, D = run.costs, len(routing.prefill), len(routing.decode)
    loading = int((run.resident & ~run.cached).sum()) * costs.transfer()
    prefill = np.array([seconds(run.plan(run.prefill_step(layer, counts)), costs)
                        for layer, counts in enumerate(routing.counts())])
    decode = run.decode_seconds(ids, hits(run.resident, ids), seconds).sum(1)
    return Result(float(prefill.sum()), float(decode.sum()), costs.dense_prefill(S),
                  float(costs.dense_decode(S + np.arange(D)).sum()), loading, run.x,
                  hit_rate(run.resident, routing.decode) if run.x else float("nan"))


def numbered(rows: np.ndarray) -> np.ndarray:
    """Rows of small integers [n, c] as one integer each, int64 [n], equal for equal rows only: they sort fast."""
    names, size = np.zeros(len(rows), np.int64), 1
    for column in rows.T:
        width = int(column.max(initial=0)) + 1
        if size * width >= 2**63:                               # so many columns that it would not fit: renumber
            names = np.unique(names, return_inverse=True)[1]
            size = int(names.max(initial=0)) + 1
        names, size = names * width + column, size * width
    return names


def timeline(hardware: Hardware, system: System, routing: PromptRouting, forwards: Iterable[int] = (1,)
             ) -> tuple[list[Event], list[tuple[float, float, int, str]]]:
    """(events, forwards) of chosen forwards by the event simulation, one after the other from time 0.

    forwards : 0 is the prefill, with loading the prefetched experts after it; 1, 2 … the decode steps. Returned as
        (start, end, tokens, "prefill" or "decode"), which `metrics` takes.

    Raises ValueError: a forward that the answer does not have. Others as `simulate`.
    """
    forwards = list(forwards)
    if any(not 0 <= forward <= len(routing.decode) for forward in forwards):
        raise ValueError(f"forwards are {forwards}; there are 0, the prefill, and 1 to {len(routing.decode)}, decode")
    run, spec = NDPRun(hardware, system, routing), routing.spec
    costs, S = run.costs, len(routing.prefill)
    events, done, now = [], [], 0.0
    for forward in forwards:
        began = now
        if forward:
            dense = float(costs.dense_decode(np.array(S + forward - 1)))
            steps = [run.decode_step(layer, ids) for layer, ids in enumerate(routing.decode[forward - 1])]
        else:
            dense = costs.dense_prefill(S)
            steps = [run.prefill_step(layer, counts) for layer, counts in enumerate(routing.counts())]
        for layer, step in enumerate(steps):
            before, now = now, now + dense / spec.L
            events.append(Event("gpu", "other", layer, -1, before, now))
            took, new = simulate_layer(run.plan(step), costs, layer, now)
            events += new
            now += took
        done.append((began, now, 1 if forward else S, "decode" if forward else "prefill"))
        if not forward:
            for layer, expert in np.argwhere(run.resident & ~run.cached).tolist():
                before, now = now, now + costs.transfer()
                events.append(Event("link", "read weights", layer, expert, before, now, spec.expert_bytes))
    return events, done


def place(history: np.ndarray, N: int, placement: str = "id") -> np.ndarray:
    """The unit of each expert where units hold whole experts: int [L, E], round-robin by "id" or "popularity"."""
    if placement not in PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}; known are {', '.join(PLACEMENTS)}")
    L, E = history.shape
    if placement == "id":
        return np.tile(np.arange(E) % N, (L, 1))
    return np.argsort(np.argsort(-history, axis=1, kind="stable"), axis=1, kind="stable") % N
