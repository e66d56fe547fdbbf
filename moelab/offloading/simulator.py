"""The simulator: a recorded run, played through the same cache, scheduler and pools as the engine, in simulated time.

`Residency` decides from the sequence of steps alone, so whatever the engine hits, evicts and reads on these steps, the
simulator does too; only the clock differs. A layer costs what comes before its experts (attention, norms, router), then
the schedule of its reads, decompression and computation under given delays (`schedule.simulated_pipeline`); the delays
are measured on this machine, or follow from the figures of a device card. Experts that are announced for the next layer
are fetched ahead as by the engine, if the engine's own `Foresight` finds it worth a read. Numbers that come out are
*simulated*.

    steps     forwards, each a list of (layer, {expert: tokens}) in the order of execution: `model.moelab.steps`
    forwards  tokens and phase ("prefill", "decode") of each of them: `model.moelab.forwards`
    guesses   forwards, each a list of (layer, experts that are announced for it, in this order)

`guesses=steps` is a run that executes what it has predicted, or one whose guesses are all right.

What is left out: contention of disk, decompression and compute for the same memory, sampling between two forwards, and
padding tokens of a batch, which a trace doesn't have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moelab.cache.residency import CacheCounters, Residency
from moelab.progress import progress
from moelab.offloading.prefetch_gate import Foresight
from moelab.offloading.limits import Rates, Steps
from moelab.offloading.loads import Fetched
from moelab.offloading.metrics import Forward, metrics
from moelab.schedule.affinity import Order, given_order, scheduler_for
from moelab.schedule.simulated_pipeline import SimulatedPipeline
from moelab.schedule.requests import Delays
from moelab.specs import DeviceSpec, Event, MoESpec
from moelab.trace import PREFILL, RoutingTrace

#: seconds as base + per token
Linear = tuple[float, float]
#: for each forward, (layer, experts announced for it) of the layers that there are guesses for
Guesses = Sequence[Iterable[tuple[int, Iterable[int]]]]


@dataclass
class Simulation:
    """A simulated run: the same records as the engine's.

    Attributes
    ----------
    events, forwards : the timeline and the forward passes.
    counters : hits, misses, evictions of this run.
    fetched : what became of the experts fetched ahead.
    """

    events: list[Event]
    forwards: list[Forward]
    counters: CacheCounters
    fetched: Fetched = field(default_factory=Fetched)
    kind: str = "simulated"

    def metrics(self) -> dict[str, Any]:
        """TTFT, TPOT, hit rates, bytes …, by the definitions of the real run: see `moelab.offloading.metrics`."""
        return metrics(self.events, self.forwards, asdict(self.counters) | {"fetched_ahead": asdict(self.fetched)})


def simulate(steps: Steps, forwards: Iterable[tuple], residency: Residency, delays: Delays, *, workers: int = 1,
             staging: int | None = None, other: Linear = (0.0, 0.0), head: Linear = (0.0, 0.0), start: float = 0.0,
             scheduler: Callable[[Sequence[Any], Delays, int], Order] | None = None, guesses: Guesses | None = None,
             ahead: int = 0, distance: int = 1, foresight: Foresight | None = None) -> Simulation:
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
    guesses : of every forward; they change when experts are read, never what is kept or computed.
    ahead : experts that may be fetched ahead, in memory beyond `staging`; without guesses there is none of it.
    distance : how many layers before its own an expert is announced.
    foresight : decides whether guesses are worth fetching, and learns; None for a new one.

    Raises
    ------
    ValueError : as many forwards and guesses as steps are needed; or a layer or an expert that the residency doesn't
        have; or a distance below 1.
    """
    kinds = [(tokens, phase) for *_, tokens, phase in forwards]
    if len(kinds) != len(steps):
        raise ValueError(f"{len(steps)} forwards are to be played, but tokens and phase are given of {len(kinds)}")
    if guesses is not None and len(guesses) != len(steps):
        raise ValueError(f"{len(steps)} forwards are to be played, but there are guesses for {len(guesses)}")
    if distance < 1:
        raise ValueError(f"the distance is {distance} layers; experts are announced at least 1 layer before their own")
    residency.reset_counters()
    choose, foresight, done = scheduler or scheduler_for(delays), foresight or Foresight(), []
    machine = SimulatedPipeline(delays, workers, staging, ahead if guesses is not None else 0, start)

    def spend(layer: int, cost: Linear, tokens: int) -> None:
        begun, end = machine.now, machine.now + cost[0] + cost[1] * tokens
        foresight.pause(end - begun)
        machine.spend(layer, end)

    for forward, (tokens, phase), guessed in progress(list(zip(steps, kinds, guesses or [()] * len(steps))),
                                                      "simulating"):
        begun, announced = machine.now, dict(guessed) if ahead else {}
        for layer, experts in forward:
            spend(layer, other, tokens)
            step = residency.begin(layer, experts)
            foresight.came(layer, experts)
            left = machine.start(layer, step.requests, (key for key, _ in step.evicted))
            machine.load(left, choose(left, delays, workers))
            fetch = foresight.requests(residency, layer + distance, announced.get(layer + distance, ()),
                                       machine.read_s / max(1, machine.reads))
            machine.fetch(layer + distance, fetch, given_order(fetch))
            machine.run()
        spend(-1, head, tokens)
        machine.drop_ahead()
        done.append(Forward(begun, machine.now, tokens, phase))
    return Simulation(machine.timeline(), done, residency.counters, Fetched(**machine.fetched))


def steps_of(trace: RoutingTrace, batch: int = 1) -> tuple[list[list[tuple[int, dict[int, int]]]],
                                                          list[tuple[int, str]]]:
    """What the engine would be asked for: steps, and tokens and phase of each forward.

    Sequences run in groups of `batch`, in order: one forward for the prompts of a group, then one for each further
    token of all its sequences in lockstep; one that has ended drops out.

    Raises
    ------
    ValueError : a batch below 1.
    """
    E, ids, steps, forwards = trace.spec.E, trace.ids.tolist(), [], []
    for members, phase in _passes(trace, batch):
        counts = [Counter(e for row in members for e in ids[row][layer] if e != E) for layer in range(trace.spec.L)]
        steps.append([(layer, dict(sorted(count.items()))) for layer, count in enumerate(counts) if count])
        forwards.append((len(members), phase))
    return steps, forwards


def guesses_of(trace: RoutingTrace, batch: int = 1) -> list[list[tuple[int, list[int]]]]:
    """Guesses from a trace whose ids are those predicted for each layer, E for none, in the engine's order: all
    tokens' first choices first. The forwards are those of `steps_of`."""
    E, found = trace.spec.E, []
    for members, _ in _passes(trace, batch):
        first = trace.ids[members].permute(1, 2, 0).flatten(1).tolist()                 # [L, K · tokens]
        found.append([(layer, experts) for layer, ids in enumerate(first)
                      if (experts := [e for e in dict.fromkeys(ids) if e != E])])
    return found


def _passes(trace: RoutingTrace, batch: int) -> Iterator[tuple[list[int], str]]:
    """Rows of the trace, and phase, of each forward."""
    if batch < 1:
        raise ValueError(f"the batch is {batch} sequences; it must be at least 1")
    rows: dict[int, tuple[list[int], list[int]]] = {}           # sequence → its prompt's rows, its decoded rows
    for row, (sequence, phase) in enumerate(zip(trace.sequence.tolist(), trace.phase.tolist())):
        rows.setdefault(sequence, ([], []))[phase != PREFILL].append(row)
    order_of = sorted(rows)
    for first in range(0, len(order_of), batch):
        group = [rows[sequence] for sequence in order_of[first:first + batch]]
        passes = [([row for prompt, _ in group for row in prompt], "prefill")]
        passes += [([decoded[n] for _, decoded in group if n < len(decoded)], "decode")
                   for n in range(max(len(decoded) for _, decoded in group))]
        yield from ((members, phase) for members, phase in passes if members)


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
    device : a card with a disk or a host link, a memory bandwidth and TFLOPS (`moelab.offloading.limits.Rates.of`).
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
