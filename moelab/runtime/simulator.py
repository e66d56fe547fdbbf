"""The simulator: a recorded run, played through the same cache, scheduler and pools as the engine, in simulated time.

`Residency` decides from the sequence of steps alone, so whatever the engine hits, evicts and reads on these steps, the
simulator does too; only the clock differs. A layer costs what comes before its experts (attention, norms, router), then
the schedule of its reads, decompression and expert computation under given delays (`schedule.execution`); the delays
are measured on this machine, or follow from the figures of a device card. Numbers that come out are *simulated*.

    steps     forwards, each a list of (layer, {expert: tokens}) in the order of execution: `model.moelab.steps`
    forwards  tokens and phase ("prefill", "decode") of each of them: `model.moelab.forwards`

What is left out: contention of disk, decompression and compute for the same memory, sampling between two forwards, and
padding tokens of a batch, which a trace doesn't have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moelab.cache.residency import Counters, Residency
from moelab.progress import progress
from moelab.runtime.limits import Rates, Steps
from moelab.runtime.metrics import Forward, metrics
from moelab.schedule.affinity import Order, scheduler_for
from moelab.schedule.execution import execute
from moelab.schedule.requests import Delays
from moelab.specs import DeviceSpec, Event, MoESpec
from moelab.trace import PREFILL, RoutingTrace

#: seconds as base + per token
Linear = tuple[float, float]


@dataclass
class Simulation:
    """A simulated run: the same records as the engine's.

    Attributes
    ----------
    events, forwards : the timeline and the forward passes.
    counters : hits, misses, evictions of this run.
    """

    events: list[Event]
    forwards: list[Forward]
    counters: Counters
    kind: str = "simulated"

    def metrics(self) -> dict[str, Any]:
        """TTFT, TPOT, hit rates, bytes …, by the definitions of the real run: see `moelab.runtime.metrics`."""
        return metrics(self.events, self.forwards, asdict(self.counters))


def simulate(steps: Steps, forwards: Iterable[tuple], residency: Residency, delays: Delays, *, workers: int = 1,
             staging: int | None = None, other: Linear = (0.0, 0.0), head: Linear = (0.0, 0.0), start: float = 0.0,
             scheduler: Callable[[Sequence[Any], Delays, int], Order] | None = None) -> Simulation:
    """Play a run in simulated time.

    Parameters
    ----------
    steps : a run's, or those of a trace (`steps_of`).
    forwards : (…, tokens, phase) of each forward.
    residency : the cache; the run goes on from what is in it, and its counters start anew. Made like the engine's, it
        decides like the engine's.
    delays : what the parts of an expert cost; with `e_bytes` and `sm_bytes`, the timeline says what is read.
    workers, staging : threads that decompress, experts that may be on their way (None: any number).
    other : seconds per layer before its experts can be read.
    head : seconds per forward after the last layer.
    scheduler : makes the order of reading from (requests, delays, workers); None takes `scheduler_for(delays)`, which
        is the engine's.

    Raises
    ------
    ValueError : as many forwards as steps are needed; or a layer or an expert that the residency doesn't have.
    """
    kinds = [(tokens, phase) for *_, tokens, phase in forwards]
    if len(kinds) != len(steps):
        raise ValueError(f"{len(steps)} forwards are to be played, but tokens and phase are given of {len(kinds)}")
    residency.reset_counters()
    choose, events, done, now = scheduler or scheduler_for(delays), [], [], start
    for forward, (tokens, phase) in progress(list(zip(steps, kinds)), "simulating"):
        begun = now
        for layer, experts in forward:
            now = _spend(events, layer, now, other, tokens)
            requests = residency.begin(layer, experts).requests
            plan = choose(requests, delays, workers)
            happened, now = execute(requests, plan, delays, workers, staging, now, layer)
            events += happened
        now = _spend(events, -1, now, head, tokens)
        done.append(Forward(begun, now, tokens, phase))
    return Simulation(events, done, residency.counters)


def steps_of(trace: RoutingTrace, batch: int = 1) -> tuple[list[list[tuple[int, dict[int, int]]]],
                                                          list[tuple[int, str]]]:
    """What the engine would be asked for: steps, and tokens and phase of each forward.

    Sequences run in groups of `batch`, in order: one forward for the prompts of a group, then one for each further
    token of all its sequences in lockstep; one that has ended drops out.

    Raises
    ------
    ValueError : a batch below 1.
    """
    if batch < 1:
        raise ValueError(f"the batch is {batch} sequences; it must be at least 1")
    E, layers = trace.spec.E, range(trace.spec.L)
    rows: dict[int, tuple[list[int], list[int]]] = {}           # sequence → its prompt's rows, its decoded rows
    for row, (sequence, phase) in enumerate(zip(trace.sequence.tolist(), trace.phase.tolist())):
        rows.setdefault(sequence, ([], []))[phase != PREFILL].append(row)
    ids, order_of = trace.ids.tolist(), sorted(rows)
    steps, forwards = [], []
    for first in range(0, len(order_of), batch):
        group = [rows[sequence] for sequence in order_of[first:first + batch]]
        passes = [([row for prompt, _ in group for row in prompt], "prefill")]
        passes += [([decoded[n] for _, decoded in group if n < len(decoded)], "decode")
                   for n in range(max(len(decoded) for _, decoded in group))]
        for members, phase in passes:
            if members:
                counts = [Counter(e for row in members for e in ids[row][layer] if e != E) for layer in layers]
                steps.append([(layer, dict(sorted(count.items()))) for layer, count in enumerate(counts) if count])
                forwards.append((len(members), phase))
    return steps, forwards


def flat(steps: Steps) -> list[tuple[int, dict[int, int]]]:
    """The steps of all forwards as one list, which `Belady` and `moelab.cache.optimum` take."""
    return [step for forward in steps for step in forward]


def delays_of(device: DeviceSpec, spec: MoESpec, rho: float, dense_bytes: float, decompress_gbs: float | None = None,
              dense_itemsize: float = 2.0) -> tuple[Delays, Linear]:
    """Delays of an expert and seconds of everything else in a layer, from the figures of a device card.

    An expert of B bytes is B/2 of signs and mantissas and ρ·B/2 of compressed exponents. Reading runs at the rate of
    the card's link or disk; recovery reads and writes B at the memory's rate; computing reads the weights once and
    then multiplies, without overlap of the two, which is at most twice too slow.

    Parameters
    ----------
    device : a card with a disk or a host link, a memory bandwidth and TFLOPS (`moelab.runtime.limits.Rates.of`).
    rho : compressed over raw size of the exponents: 1 if they are not compressed.
    dense_bytes : of all weights that every token uses, spread evenly over the L layers.
    decompress_gbs : GB/s of exponents that one thread puts out; an assumption to be stated, for a card that has no
        figure `decompress_gbs`.

    Raises
    ------
    ValueError : figures are missing, ρ is not in (0, 1], or the model is not in bf16.
    """
    if not 0 < rho <= 1:
        raise ValueError(f"rho is {rho}; it is compressed over raw size of the exponents, above 0 and at most 1")
    if spec.dtype != "bfloat16":
        raise ValueError(f"{spec.name} is stored in {spec.dtype}; exponents are split off bfloat16 only. "
                         "spec.with_dtype('bfloat16') is the same model in bf16")
    rates = Rates.of(device)
    if decompress_gbs is None:
        if "decompress_gbs" not in device.figures:
            raise ValueError(f"the card of {device.name} doesn't say how fast a thread decompresses; give "
                             "decompress_gbs, GB/s of exponents that come out, and state it as an assumption")
        decompress_gbs = device["decompress_gbs"]
    half, flops = spec.expert_bytes / 2, 2 * spec.expert_params
    delays = Delays(
        e_read=rho * half / rates.read, sm_read=half / rates.read, decompress=half / (decompress_gbs * 1e9),
        recover=4 * half / rates.memory, expert_base=2 * half / rates.memory, expert_token=flops / rates.flops,
        N=3 if spec.gated else 2, e_bytes=round(rho * half), sm_bytes=round(half))
    dense = dense_bytes / spec.L
    return delays, (dense / rates.memory, 2 * dense / dense_itemsize / rates.flops)


def _spend(events: list[Event], layer: int, now: float, cost: Linear, tokens: int) -> float:
    """Compute does something else than experts; returns when it is done."""
    end = now + cost[0] + cost[1] * tokens
    if end > now:
        events.append(Event("compute", "other", layer, -1, now, end))
    return end
