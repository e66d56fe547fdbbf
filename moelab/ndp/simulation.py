"""A prompt and its answer on one machine under one system: prefill, the intermediate step and
decode, layer by layer.

A system plans each layer of each forward, and the closed form (or another clock, as
`notebooks/studies/ndp_events.py`) times the plan; everything else runs on the GPU before it.
Between prefill and decode, and after each plan, a system may load experts. Tokenizer and sampling
are not modelled; layers do not overlap, as each needs the one before."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.hardware import Hardware
from moelab.ndp.plans import LayerStep, Plan, problem
from moelab.ndp.prefetch import experts_that_fit
from moelab.ndp.routing import PromptRouting, looked_up
from moelab.ndp.systems import System


@dataclass(frozen=True)
class Result:
    """Simulated seconds of one prompt and its answer.

    moe_… : of the experts alone. dense_… : of all else, on the GPU. intermediate : loading the
        prefetched experts.
    prefetched : experts of each layer on the GPU when decoding begins (x). hit_rate : share of
        decode's that it has; None if it never has any.
    """

    moe_prefill: float
    moe_decode: float
    dense_prefill: float
    dense_decode: float
    intermediate: float
    prefetched: int
    hit_rate: float | None

    @property
    def prefill(self) -> float:  # TTFT without sampling
        """Seconds of the prompt: TTFT without sampling."""
        return self.moe_prefill + self.dense_prefill

    @property
    def decode(self) -> float:
        """Seconds of the answer."""
        return self.moe_decode + self.dense_decode

    @property
    def end_to_end(self) -> float:
        """Seconds of prompt, prefetching and answer."""
        return self.prefill + self.intermediate + self.decode


class NDPRun:
    """One machine and system under the routing of one model: its steps, by phase and layer.

    system : a copy, whose state is this run's. now : seconds since the run began.
    most : experts of each layer that fit the GPU. cached, resident : bool [L, E], which it has
        during the prompt and
    during the answer. home : int [L, E], the units.
    timeless : whether equal situations take equally long, so that steps need not be planned one by
    one."""

    def __init__(self, hardware: Hardware, system: System, routing: PromptRouting) -> None:
        spec = routing.spec
        tokens = len(routing.prefill) + len(routing.decode)
        self.costs, self.system, self.routing = Costs(spec, hardware), deepcopy(system), routing
        self.home = system.place(routing.history, hardware.units)
        self.costs.check(
            tokens, system.home, np.bincount(self.home.ravel()).max() if system.whole else 0
        )
        self.most = experts_that_fit(self.costs, tokens)
        self.room = int(self.costs.free_gpu_bytes(tokens) // spec.expert_bytes)
        told = system.alike or type(system).situations is not System.situations
        self.timeless = told and type(system).after is System.after
        self.now = 0.0
        self.hits = 0  # of experts of decode steps
        self.cached = self._fitting(self.system.resident(self))

    @cached_property
    def resident(self) -> np.ndarray:
        """Experts in GPU memory during the answer, bool [L, E]: what was prefetched after the
        prompt."""
        return self._fitting(self.system.prefetched(self))

    @property
    def x(self) -> int:
        """Experts of a layer on the GPU when decoding begins, the most of any."""
        return int(self.resident.sum(1).max())

    def _fitting(self, mask: np.ndarray) -> np.ndarray:
        """A copy of a mask of experts in GPU memory; ValueError unless it is [L, E] and they
        fit."""
        mask = np.array(mask)
        if mask.shape != self.home.shape or mask.dtype != bool or mask.sum() > self.room:
            raise ValueError(
                f"{type(self.system).__name__} has {mask.sum()} experts in GPU memory, as "
                f"{mask.dtype} {list(mask.shape)}; it must be a mask, bool {list(self.home.shape)}, "
                f"and {self.room} fit beside everything else"
            )
        return mask

    def plan(self, step: LayerStep) -> Plan:
        """The system's plan of a step. ValueError, saying what is wrong, unless it computes every
        expert once."""
        plan = self.system.plan(step, self.costs)
        N = self.costs.hardware.units
        if wrong := problem(plan, step, N, self.system.held):
            raise ValueError(
                f"{type(self.system).__name__}.plan of a step of {len(step)} experts and "
                f"{step.S} tokens is wrong: {wrong}"
            )
        return plan

    def prefill_step(self, layer: int, counts: np.ndarray) -> LayerStep:
        """The prompt's step in a layer, of the tokens [E] that each expert gets; experts by tokens,
        then by popularity."""
        experts = np.lexsort((-self.routing.history[layer], -counts))[: int((counts > 0).sum())]
        held = self.cached[layer, experts]
        S = len(self.routing.prefill)
        return self._step(layer, experts, counts[experts], held, S, False)

    def _step(self, layer: int, experts: np.ndarray, tokens: np.ndarray, *how: Any) -> LayerStep:
        return LayerStep(experts, tokens, self.home[layer, experts], *how, layer, self.now)

    def decode_step(
        self, layer: int, ids: np.ndarray, resident: np.ndarray | None = None
    ) -> LayerStep:
        """Of one token with experts ids [K], E for none.

        resident : bool [K], which are on the GPU; None: those that it has now.
        """
        held = np.append(self.resident[layer], False)[ids] if resident is None else resident
        there = np.flatnonzero(ids < self.costs.spec.E)
        by = there[np.argsort(-self.routing.history[layer, ids[there]], kind="stable")]
        return self._step(layer, ids[by].astype(int), np.ones(len(by), int), held[by], 1, True)

    def forward(self, number: int, seconds: Callable[[Plan, Costs], float]) -> float:
        """Seconds of the experts of a forward, 0 being the prompt, by `seconds` of each plan; `now`
        moves on."""
        counts = self.routing.counts() if not number else None
        dense = self.dense(number) / self.costs.spec.L
        took = 0.0
        for layer in range(self.costs.spec.L):
            self.now += dense
            plan = self.plan(
                self.decode_step(layer, self.routing.decode[number - 1, layer])
                if number
                else self.prefill_step(layer, counts[layer])
            )
            if number:
                self.hits += int(plan.step.resident.sum())
            layer_took = seconds(plan, self.costs)
            self.now += layer_took
            took += layer_took + self._keep(plan)
        return took

    def dense(self, number: int) -> float:
        """Seconds of everything but the experts in a forward, 0 being the prompt."""
        S = len(self.routing.prefill)
        costs = self.costs
        return float(costs.dense_decode(S + number - 1) if number else costs.dense_prefill(S))

    def _keep(self, plan: Plan) -> float:
        """Seconds of loading what the system wants in GPU memory after a plan, and did not send
        there in it."""
        step = plan.step
        held = self.resident if step.decode else self.cached
        if (stays := self.system.after(plan, self.costs)) is None:
            return 0.0
        new = stays & ~held[step.layer]
        new[step.experts[plan.moved > 1 - 1e-9]] = False
        held[step.layer] = stays
        self._fitting(held)
        return self._load(step.layer, new)

    def _load(self, layer: int, new: np.ndarray) -> float:
        """Seconds of loading experts `new`, bool [E], one after the other."""
        took = int(new.sum()) * self.costs.transfer()
        self.now += took
        return took

    def begin_decode(self) -> float:
        """Seconds of loading what the system prefetches."""
        return sum(map(self._load, range(len(self.home)), self.resident & ~self.cached))

    def decode_seconds(
        self,
        ids: np.ndarray,
        resident: np.ndarray,
        seconds: Callable[[Plan, Costs], float] = layer_seconds,
    ) -> np.ndarray:
        """[T, L] of tokens with experts ids [T, L, K] that are decoded one by one by a timeless system;
        each distinct situation is planned once. resident : bool [L, E], in GPU memory."""
        T, L, K = ids.shape
        popular = looked_up(self.routing.history, ids, -1)  # on other prompts; "no expert" is last
        ids = np.take_along_axis(ids, np.argsort(-popular, axis=-1, kind="stable"), -1)
        here, homes = looked_up(resident, ids, False), looked_up(self.home, ids, -1)
        rows = self.system.situations(homes.reshape(-1, K), here.reshape(-1, K), self.costs)
        _, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        steps = (self.decode_step(at[1], ids[at], here[at]) for at in zip(*divmod(first, L)))
        times = [seconds(self.plan(step), self.costs) for step in steps]
        return np.array(times)[which].reshape(T, L)

    def pays(self, counts: np.ndarray) -> np.ndarray:
        """Which experts are worth loading for the answer, bool [L, E]: one that the same share of its
        tokens use as of the prompt's, of which there are int [L, E], less a standard error, saves more
        than its transfer takes. A use saves the time of a decode step less that of the same step with
        one expert in GPU memory."""
        ids = np.arange(self.costs.spec.K)
        steps = (self.decode_step(0, ids, ids < here) for here in (0, 1))
        without, there = (layer_seconds(self.plan(step), self.costs) for step in steps)
        uses = (counts - counts**0.5) * len(self.routing.decode) / len(self.routing.prefill)
        return uses * (without - there) > self.costs.transfer()


def simulate(
    hardware: Hardware,
    system: System,
    routing: PromptRouting,
    *,
    seconds: Callable[[Plan, Costs], float] = layer_seconds,
) -> Result:
    """Time a prompt and its answer by the model that the routing is of.

    seconds : the clock, of a plan.

    Raises NotSupported: the experts do not fit where the system keeps them, or the rest not the
    GPU. ValueError: the system plans a step wrongly, or keeps more than fits."""
    run = NDPRun(hardware, system, routing)
    forwards = range(1, len(routing.decode) + 1)
    prefill = run.forward(0, seconds)
    x = run.x
    loading = run.begin_decode()
    if run.timeless:
        decode = float(run.decode_seconds(routing.decode, run.resident, seconds).sum())
        run.hits = int(looked_up(run.resident, routing.decode, False).sum())
    else:
        decode = sum(run.forward(number, seconds) for number in forwards)
    asked = int((routing.decode < routing.spec.E).sum())
    return Result(
        prefill,
        decode,
        run.dense(0),
        sum(map(run.dense, forwards)),
        loading,
        x,
        run.hits / asked if asked and (x or run.hits) else None,
    )
