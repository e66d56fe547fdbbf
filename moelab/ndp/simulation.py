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

import numpy as np

from moelab.base.specs import Event
from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.hardware import Hardware
from moelab.ndp.plans import LayerStep, Plan, problem
from moelab.ndp.prefetch import experts_that_fit, hits
from moelab.ndp.routing import PromptRouting
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
    during the answer. home : int [L, E], the units. loads : what was brought to the GPU between
        plans.
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
        self.plans: dict[tuple[int, ...], Plan] = {}  # situation of a decode step → its plan
        self.most = experts_that_fit(self.costs, tokens)
        self.room = int(self.costs.free_gpu_bytes(tokens) // spec.expert_bytes)
        self.timeless = (
            type(system).situations is not System.situations and type(system).after is System.after
        )
        self.now = 0.0
        self.loads = []
        self.hits = self.asked = 0  # experts of decode steps
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
        return LayerStep(
            experts,
            counts[experts],
            self.home[layer, experts],
            self.cached[layer, experts],
            len(self.routing.prefill),
            False,
            layer,
            self.now,
        )

    def decode_step(
        self, layer: int, ids: np.ndarray, resident: np.ndarray | None = None
    ) -> LayerStep:
        """Of one token with experts ids [K], E for none.

        resident : bool [K], which are on the GPU; None: those that it has now.
        """
        held = np.pad(self.resident, ((0, 0), (0, 1)))[layer, ids] if resident is None else resident
        there = np.flatnonzero(ids < self.costs.spec.E)
        by = there[np.argsort(-self.routing.history[layer, ids[there]], kind="stable")]
        return LayerStep(
            ids[by].astype(int),
            np.ones(len(by), int),
            self.home[layer, ids[by]],
            held[by],
            1,
            True,
            layer,
            self.now,
        )

    def forward(self, number: int, seconds: Callable[[Plan], float]) -> float:
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
                self.asked += len(plan.step)
            layer_took = seconds(plan)
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
        took, size = self.costs.transfer(), self.costs.spec.expert_bytes
        for expert in np.flatnonzero(new).tolist():
            end = self.now + took
            self.loads.append(Event("link", "read weights", layer, expert, self.now, end, size))
            self.now = end
        return int(new.sum()) * took

    def begin_decode(self) -> float:
        """Seconds of loading what the system prefetches."""
        return sum(map(self._load, range(len(self.home)), self.resident & ~self.cached))

    def decode_seconds(
        self,
        ids: np.ndarray,
        resident: np.ndarray,
        seconds: Callable[[Plan, Costs], float] = layer_seconds,
    ) -> np.ndarray:
        """[T, L] of tokens that are decoded one by one by a timeless system; each distinct
        situation is planned once.

        ids : [T, L, K], a token's experts from most to least popular on other prompts. resident :
        bool [T, L, K]."""
        T, L, K = ids.shape
        homes = np.pad(self.home, ((0, 0), (0, 1)), constant_values=-1)[np.arange(L)[:, None], ids]
        rows = self.system.situations(homes.reshape(-1, K), resident.reshape(-1, K), self.costs)
        _, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        times = []
        for i in first.tolist():
            at = divmod(i, L)
            situation = tuple(rows[i].tolist())
            if situation not in self.plans:
                self.plans[situation] = self.plan(self.decode_step(at[1], ids[at], resident[at]))
            times.append(seconds(self.plans[situation], self.costs))
        return np.array(times)[which].reshape(T, L)

    def experts_that_pay(self, usual: int) -> int:
        """x, as many as fit at most, that is predicted to gain most over the `usual` x, which stays
        if none gains for sure.

        Each of the prompt's S tokens is decoded with those experts resident that its others use
        most; D such tokens gain D times the mean, less two standard errors of that prediction.

        Raises ValueError: the system is not timeless.
        """
        if not self.timeless:
            raise ValueError(
                f"{type(self.system).__name__} prefetches what pays, which is predicted by "
                "planning the prompt's tokens again: it needs `situations` and cannot have "
                "`after`"
            )
        ids = self.routing.prefill_by_popularity
        place = self.routing.prefill_places
        D = len(self.routing.decode)
        as_usual = self.decode_seconds(ids, place < usual).sum(1)  # [S]

        def gain(x: int) -> float:
            a_token = as_usual - self.decode_seconds(ids, place < x).sum(1)
            sure = D * a_token.mean() - 2 * a_token.std() * (D + D * D / len(ids)) ** 0.5
            return (usual - x) * self.costs.spec.L * self.costs.transfer() + sure

        return max((usual, *range(self.most + 1)), key=gain)


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
    prefill = run.forward(0, lambda plan: seconds(plan, run.costs))
    x = run.x
    loading = run.begin_decode()
    if run.timeless:
        ids = routing.decode_by_popularity
        found = hits(run.resident, ids)
        decode = float(run.decode_seconds(ids, found, seconds).sum())
        run.hits, run.asked = int(found.sum()), int((ids < routing.spec.E).sum())
    else:
        decode = sum(
            run.forward(number, lambda plan: seconds(plan, run.costs)) for number in forwards
        )
    used = run.asked and (x or run.hits)
    return Result(
        prefill,
        decode,
        run.dense(0),
        sum(map(run.dense, forwards)),
        loading,
        x,
        run.hits / run.asked if used else None,
    )
