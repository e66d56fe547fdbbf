"""A prompt and its answer on one machine under one system: prefill, the intermediate step and
decode, layer by layer.

A system plans each layer of each forward, and the closed form or the event simulation times the
plan; everything else runs on the GPU before it. Between prefill and decode, and after each plan, a
system may load experts. Tokenizer and sampling are not modelled; layers do not overlap, as each
needs the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.event_simulation import simulate_layer
from moelab.ndp.hardware import Hardware
from moelab.ndp.plans import LayerStep, Plan, problems
from moelab.ndp.prefetch import experts_that_fit, hit_rate, hits
from moelab.ndp.routing import PromptRouting
from moelab.ndp.systems import System
from moelab.registry import require
from moelab.specs import Event

PLACEMENTS = ("id", "popularity")


@dataclass(frozen=True)
class Result:
    """Simulated seconds of one prompt and its answer.

    moe_… : of the experts alone. dense_… : of all else, on the GPU. intermediate : loading the
        prefetched experts.
    prefetched : experts of each layer on the GPU when decoding begins (x). hit_rate : share of
        decode's that it has; nan if it never has any.
    """

    moe_prefill: float
    moe_decode: float
    dense_prefill: float
    dense_decode: float
    intermediate: float
    prefetched: int
    hit_rate: float

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

    def __init__(
        self, hardware: Hardware, system: System, routing: PromptRouting, placement: str = "id"
    ) -> None:
        spec = routing.spec
        tokens = len(routing.prefill) + len(routing.decode)
        self.costs, self.system, self.routing = Costs(spec, hardware), deepcopy(system), routing
        self.home = place(routing.history, hardware.units, placement)
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
        L, E = self.home.shape
        if np.shape(mask) != (L, E) or np.asarray(mask).dtype != bool or np.sum(mask) > self.room:
            raise ValueError(
                f"{type(self.system).__name__} has {np.sum(mask)} experts in GPU memory, as "
                f"{np.asarray(mask).dtype} {list(np.shape(mask))}; it must be a mask, "
                f"bool [{L}, {E}], and {self.room} fit beside everything else"
            )
        return np.array(mask)

    def plan(self, step: LayerStep) -> Plan:
        """The system's plan of a step. ValueError, saying what is wrong, unless it computes every
        expert once."""
        plan = self.system.plan(step, self.costs)
        N = self.costs.hardware.units
        if found := problems(plan, step, N, self.system.held(getattr(plan, "step", step), N)):
            more = f"; and {len(found) - 3} more" if found[3:] else ""
            raise ValueError(
                f"{type(self.system).__name__}.plan of a step of {len(step)} experts and "
                f"{step.S} tokens is wrong: {'; '.join(found[:3])}{more}"
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
        """Of one token, or one of each sequence, with experts ids [K] or [B, K], E for none.

        resident : bool [K], which of one token's are on the GPU; None: those that it has now.
        """
        there = np.flatnonzero(ids.ravel() < self.costs.spec.E)
        experts, first, tokens = np.unique(
            ids.ravel()[there].astype(int), return_index=True, return_counts=True
        )
        by = np.lexsort((first, -self.routing.history[layer, experts], -tokens))
        held = self.resident[layer, experts] if resident is None else resident[there[first]]
        return LayerStep(
            experts[by],
            tokens[by],
            self.home[layer, experts[by]],
            held[by],
            ids.size // ids.shape[-1],
            True,
            layer,
            self.now,
        )

    def forward(self, number: int, seconds: Callable[[Plan], float]) -> float:
        """Seconds of the experts of a forward, 0 being the prompt, by `seconds` of each plan; `now`
        moves on."""
        counts = self.routing.counts() if not number else None
        ids = self.routing.token(number) if number else None
        dense = self.dense(number) / self.costs.spec.L
        took = 0.0
        for layer in range(self.costs.spec.L):
            self.now += dense
            plan = self.plan(
                self.decode_step(layer, ids[:, layer])
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
        B = self.routing.batch
        return float(
            self.costs.dense_decode(np.array(S // B + number - 1), B)
            if number
            else self.costs.dense_prefill(S, B)
        )

    def _keep(self, plan: Plan) -> float:
        """Seconds of loading what the system wants in GPU memory after a plan, and did not send
        there in it."""
        step = plan.step
        held = self.resident if plan.step.decode else self.cached
        if (stays := self.system.after(plan, self.costs)) is None:
            return 0.0
        new = stays & ~held[step.layer]
        new[step.experts[plan.moved > 1 - 1e-9]] = False
        held[step.layer] = stays
        self._fitting(held)
        return self._load(step.layer, np.flatnonzero(new))

    def _load(self, layer: int, experts: np.ndarray) -> float:
        for expert in experts.tolist():
            before = self.now
            self.now = self.now + self.costs.transfer()
            self.loads.append(
                Event(
                    "link",
                    "read weights",
                    layer,
                    expert,
                    before,
                    self.now,
                    self.costs.spec.expert_bytes,
                )
            )
        return len(experts) * self.costs.transfer()

    def begin_decode(self) -> float:
        """Seconds of loading what the system prefetches."""
        new = self.resident & ~self.cached
        for layer, mask in enumerate(new):
            self._load(layer, np.flatnonzero(mask))
        return int(new.sum()) * self.costs.transfer()

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
        _, first, which = np.unique(numbered(rows), return_index=True, return_inverse=True)
        times = []
        for i in first.tolist():
            at = divmod(i, L)
            situation = tuple(rows[i].tolist())
            if situation not in self.plans:
                self.plans[situation] = self.plan(self.decode_step(at[1], ids[at], resident[at]))
            times.append(seconds(self.plans[situation], self.costs))
        return np.array(times)[which].reshape(T, L)

    def loading(self, x: int) -> float:
        """Seconds of bringing x experts of each layer to the GPU."""
        return x * self.costs.spec.L * self.costs.transfer()

    def experts_that_pay(self, usual: int) -> int:
        """x, as many as fit at most, that is predicted to gain most over the `usual` x, which stays
        if none gains for sure.

        Each of the prompt's S tokens is decoded with those experts resident that its others use
        most; D such tokens gain D times the mean, less two standard errors of that prediction.
        Tokens of a batch count one by one.

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
            return self.loading(usual) - self.loading(x) + sure

        return max((usual, *range(self.most + 1)), key=gain)


def simulate(
    hardware: Hardware,
    system: System,
    routing: PromptRouting,
    *,
    placement: str = "id",
    seconds: Callable[[Plan, Costs], float] = layer_seconds,
) -> Result:
    """Time a prompt and its answer, or several in a batch (`routing.batched`), by the model that
    the routing is of.

    placement : see `place`. seconds : `closed_form.layer_seconds` or
        `event_simulation.event_seconds`.

    Raises NotSupported: the experts do not fit where the system keeps them, or the rest not the
    GPU. ValueError: the system plans a step wrongly, or keeps more than fits."""
    run = NDPRun(hardware, system, routing, placement)
    forwards = range(1, len(routing.decode) // routing.batch + 1)
    prefill = run.forward(0, lambda plan: seconds(plan, run.costs))
    x = run.x
    loading = run.begin_decode()
    if run.timeless and routing.batch == 1:
        ids = routing.decode_by_popularity
        decode = float(run.decode_seconds(ids, hits(run.resident, ids), seconds).sum())
        found = hit_rate(run.resident, routing.decode)
    else:
        decode = sum(
            run.forward(number, lambda plan: seconds(plan, run.costs)) for number in forwards
        )
        found = run.hits / run.asked if run.asked else float("nan")
    kept = x or run.hits
    return Result(
        prefill,
        decode,
        run.dense(0),
        sum(map(run.dense, forwards)),
        loading,
        x,
        found if kept else float("nan"),
    )


def numbered(rows: np.ndarray) -> np.ndarray:
    """Rows of small integers [n, c] as one integer each, int64 [n], equal for equal rows only: they
    sort fast."""
    names = np.zeros(len(rows), np.int64)
    size = 1
    for column in rows.T:
        width = int(column.max(initial=0)) + 1
        if size * width >= 2**63:  # so many columns that it would not fit: renumber
            names = np.unique(names, return_inverse=True)[1]
            size = int(names.max(initial=0)) + 1
        names = names * width + column
        size = size * width
    return names


def timeline(
    hardware: Hardware, system: System, routing: PromptRouting, forwards: Iterable[int] = (1,)
) -> tuple[list[Event], list[tuple[float, float, int, str]]]:
    """(events, forwards) of chosen forwards by the event simulation, one after the other from time
    0.

    forwards : 0 is the prefill, with loading the prefetched experts after it; 1, 2 … the decode
        steps; shown in this order. Returned as (start, end, tokens, "prefill" or "decode"), which
        `metrics` takes.

    Raises ValueError: a forward that the answer does not have. Others as `simulate`.
    """
    chosen = sorted(set(forwards))
    D = len(routing.decode) // routing.batch
    if any(not 0 <= number <= D for number in chosen):
        raise ValueError(f"forwards are {chosen}; there are 0, the prefill, and 1 to {D}, decode")
    run = NDPRun(hardware, system, routing)
    events = []
    done = []
    left_out = 0.0
    for number in chosen if run.timeless else range(max(chosen, default=-1) + 1):
        began = run.now
        first = len(run.loads)
        dense = run.dense(number) / routing.spec.L
        shown = []

        def seconds(plan: Plan) -> float:
            now = run.now - left_out
            shown.append(Event("gpu", "other", plan.step.layer, -1, now - dense, now))
            took, new = simulate_layer(plan, run.costs, plan.step.layer, now)
            shown.extend(new)
            return took

        run.forward(number, seconds)
        ended = run.now
        if not number:
            run.begin_decode()
        if number not in chosen:
            left_out += run.now - began
            continue
        events += shown + [
            load._replace(start=load.start - left_out, end=load.end - left_out)
            for load in run.loads[first:]
        ]
        done.append(
            (
                began - left_out,
                ended - left_out,
                routing.batch if number else len(routing.prefill),
                "decode" if number else "prefill",
            )
        )
    return events, done


def place(history: np.ndarray, N: int, placement: str = "id") -> np.ndarray:
    """The unit of each expert where units hold whole experts: int [L, E], round-robin by "id" or
    "popularity"."""
    require("placement", placement, PLACEMENTS)
    L, E = history.shape
    if placement == "id":
        return np.tile(np.arange(E) % N, (L, 1))
    return np.argsort(np.argsort(-history, axis=1, kind="stable"), axis=1, kind="stable") % N
