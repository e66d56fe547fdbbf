"""A prompt and its answer on one machine under one system: prefill, the intermediate step and decode, layer by layer.

Each layer of each forward is a `Step`, its system plans it and an engine times the plan; attention and everything else
runs on the GPU before it, from the geometry. A prefetching system loads its experts between prefill and decode.
`simulate` adds up seconds, planning each distinct situation once; `timeline` emits the events of chosen forwards.

    result.prefill, .decode, .end_to_end   seconds      .moe_prefill, .moe_decode   those of the experts alone

Left out: tokenizer, sampling, and overlap between layers (each needs the one before).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.hardware import Hardware
from moelab.ndp.plans import Plan, Step
from moelab.ndp.prefetch import dataset_free, experts_that_fit, hit_rate, hits, utilisation
from moelab.ndp.routing import Routing
from moelab.ndp.systems import System
from moelab.specs import Event, MoESpec

PLACEMENTS = ("id", "popularity")


@dataclass(frozen=True, eq=False)
class Result:
    """Simulated seconds of one prompt and its answer.

    Attributes
    ----------
    moe_prefill_layers : [L], of the experts of each layer during prefill.
    moe_decode_steps : [D], of the experts of each decode step.
    dense_prefill, dense_decode_steps : scalar and [D], everything else, on the GPU.
    intermediate : loading the prefetched experts, between the two.
    prefetched : experts of each layer that were loaded (x); hit_rate : share of decode's experts found among them;
    utilisation : share of them that a decode step uses. nan without prefetching.
    """

    moe_prefill_layers: np.ndarray
    moe_decode_steps: np.ndarray
    dense_prefill: float
    dense_decode_steps: np.ndarray
    intermediate: float = 0.0
    prefetched: int = 0
    hit_rate: float = float("nan")
    utilisation: float = float("nan")

    @property
    def moe_prefill(self) -> float:
        return float(self.moe_prefill_layers.sum())

    @property
    def moe_decode(self) -> float:
        return float(self.moe_decode_steps.sum())

    @property
    def prefill(self) -> float:
        """TTFT without sampling, seconds."""
        return self.moe_prefill + self.dense_prefill

    @property
    def decode(self) -> float:
        return self.moe_decode + float(self.dense_decode_steps.sum())

    @property
    def end_to_end(self) -> float:
        return self.prefill + self.intermediate + self.decode


class Run:
    """One model, machine, system and routing: its steps, by phase and layer.

    Raises
    ------
    NotSupported : the experts do not fit where the system keeps them.
    """

    def __init__(self, spec: MoESpec, hardware: Hardware, system: System, routing: Routing, placement: str = "id",
                 chooser: Callable[[Routing, int], np.ndarray] = dataset_free) -> None:
        self.costs, self.system, self.routing = Costs(spec, hardware), system, routing
        self.tokens = len(routing.prefill) + len(routing.decode)
        self.costs.check(self.tokens, system.home)
        self.home = place(routing.history, hardware.units, placement)
        limit = system.prefetched(spec.K, spec.E)
        self.x = experts_that_fit(self.costs, self.tokens, limit) if system.prefetches else 0
        self.resident = chooser(routing, self.x)                                            # [L, E]

    def prefill_step(self, layer: int, counts: np.ndarray) -> Step:
        experts = np.lexsort((-self.routing.history[layer], -counts))
        experts = experts[:int((counts > 0).sum())]
        return Step(experts, counts[experts], self.home[layer, experts], np.zeros(len(experts), bool),
                    len(self.routing.prefill))

    def decode_step(self, layer: int, ids: np.ndarray) -> Step:
        """ids : [K] experts of one token, E for none."""
        ids = ids[ids < self.costs.spec.E].astype(int)
        experts = ids[np.argsort(-self.routing.history[layer, ids], kind="stable")]
        return Step(experts, np.ones(len(experts), int), self.home[layer, experts], self.resident[layer, experts], 1)

    def decode_situations(self) -> np.ndarray:
        """Rows [D · L, c] that name the decode steps' situations, in order of time."""
        ids = self.routing.decode_by_popularity                                             # [D, L, K]
        homes = np.pad(self.home, ((0, 0), (0, 1)), constant_values=-1)[np.arange(ids.shape[1])[:, None], ids]
        K = ids.shape[2]
        found = hits(self.resident, ids)
        return self.system.situations(homes.reshape(-1, K), found.reshape(-1, K), self.costs)

    def intermediate(self) -> float:
        return self.x * self.costs.spec.L * self.costs.transfer()


def simulate(spec: MoESpec, hardware: Hardware, system: System, routing: Routing, *, placement: str = "id",
             seconds: Callable[[Plan, Costs], float] = layer_seconds,
             chooser: Callable[[Routing, int], np.ndarray] = dataset_free) -> Result:
    """Time one prompt and its answer.

    Parameters
    ----------
    placement : which unit holds an expert where units hold whole experts: cyclic by "id" or by "popularity" on other
        data.
    seconds : the engine: `closed_form.layer_seconds`, or `event_seconds` for the event simulation.
    chooser : who is prefetched: `prefetch.dataset_free` or `prefetch.calibrated`.

    Raises
    ------
    NotSupported : the experts do not fit where the system keeps them, or the rest not the GPU.
    """
    run = Run(spec, hardware, system, routing, placement, chooser)
    costs, S, D = run.costs, len(routing.prefill), len(routing.decode)
    counts = routing.counts()
    prefill = np.array([seconds(system.plan(run.prefill_step(layer, counts[layer]), costs), costs)
                        for layer in range(spec.L)])
    rows = run.decode_situations()
    names = np.ravel_multi_index(tuple(rows.T), tuple(rows.max(0, initial=0) + 1))       # one integer a row: sorts fast
    _, first, which = np.unique(names, return_index=True, return_inverse=True)
    times = np.array([seconds(system.plan(run.decode_step(i % spec.L, routing.decode[i // spec.L, i % spec.L]), costs),
                              costs) for i in first.tolist()])
    decode = times[which].reshape(D, spec.L).sum(1)
    rates = (hit_rate(run.resident, routing.decode), utilisation(run.resident, routing.decode)) if run.x else ()
    return Result(prefill, decode, costs.dense_prefill(S), costs.dense_decode(S + np.arange(D)), run.intermediate(),
                  run.x, *rates)


def event_seconds(plan: Plan, costs: Costs) -> float:
    """A layer's seconds by the event simulation, for `simulate(…, seconds=event_seconds)`."""
    from moelab.ndp.event_simulation import simulate_layer
    return simulate_layer(plan, costs)[0]


def timeline(spec: MoESpec, hardware: Hardware, system: System, routing: Routing, forwards: Iterable[int] = (1,), *,
             placement: str = "id") -> tuple[list[Event], list[tuple[float, float, int, str]]]:
    """Events of chosen forwards by the event simulation, one after the other from time 0.

    forwards : 0 is the prefill, with loading the prefetched experts after it; 1, 2 … the decode steps.

    Returns (events, forwards), the latter as (start, end, tokens, "prefill" or "decode"): what `metrics` takes.
    """
    from moelab.ndp.event_simulation import simulate_layer
    run = Run(spec, hardware, system, routing, placement)
    costs, S = run.costs, len(routing.prefill)
    events, done, now = [], [], 0.0
    for forward in forwards:
        began, counts = now, routing.counts()
        dense = float(costs.dense_decode(np.array(S + forward - 1))) if forward else costs.dense_prefill(S)
        for layer in range(spec.L):
            step = run.decode_step(layer, routing.decode[forward - 1, layer]) if forward else \
                run.prefill_step(layer, counts[layer])
            before, now = now, now + dense / spec.L
            events.append(Event("gpu", "other", layer, -1, before, now))
            took, new = simulate_layer(system.plan(step, costs), costs, layer, now)
            events += new
            now += took
        done.append((began, now, 1 if forward else S, "decode" if forward else "prefill"))
        if not forward:
            for layer, expert in np.argwhere(run.resident).tolist():
                before, now = now, now + costs.transfer()
                events.append(Event("link", "read weights", layer, expert, before, now, spec.expert_bytes))
    return events, done


def place(history: np.ndarray, N: int, placement: str = "id") -> np.ndarray:
    """The unit of each expert where units hold whole experts: int [L, E], dealt out in turn.

    Raises
    ------
    ValueError : an unknown placement.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}; known are {', '.join(PLACEMENTS)}")
    L, E = history.shape
    if placement == "id":
        return np.tile(np.arange(E) % N, (L, 1))
    rank = np.argsort(np.argsort(-history, axis=1, kind="stable"), axis=1, kind="stable")
    return rank % N
