"""The simulator: a recorded run, played with the engine's own cache, scheduler, load queue and
slots in simulated time.

`Residency` decides from the sequence of steps alone, so whatever the engine hits, evicts and reads
on these steps, the simulator does too; only the clock differs. Delays are measured on this machine,
or follow from the figures of a device card. Contention of disk, decompression and compute is in
`Delays.beside` where `profile` measured it, what the engine takes itself where a run did
(`moelab.simulation.observed`). Left out: sampling between two forwards, and padding tokens of a
batch, which a trace doesn't have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moelab.cache.policies import Belady
from moelab.cache.pools import HIERARCHY, Pools
from moelab.cache.residency import CacheCounters, Residency
from moelab.cards import load_device
from moelab.offloading import perfetto
from moelab.offloading.load_queue import Order, PrefetchCounts
from moelab.offloading.metrics import Forward, Metrics, metrics, told
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.requests import Delays
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.offloading.slots import slot_counts
from moelab.offloading.step import StepController
from moelab.progress import progress
from moelab.registry import make
from moelab.simulation.costs import MachineRates
from moelab.simulation.execution import SimulatedMachine
from moelab.simulation.observed import Linear, observed
from moelab.specs import DeviceSpec, Event, MoESpec
from moelab.store.codecs import SHARDS, shard_count
from moelab.trace import PREFILL, RoutingTrace
from moelab.zipmoe.affinity import default_order

#: forwards, each a list of (layer, {expert: tokens})
Steps = Sequence[Sequence[tuple[int, Mapping[int, int]]]]
#: compressed over raw size of bf16 exponents: 2.65 of 8 bits, the entropy that ZipMoE found (Fig.
#: 2)
RHO = 2.65 / 8
#: for each forward, (layer, experts announced for it) of the layers that there are predictions for
Predictions = Sequence[Iterable[tuple[int, Iterable[int]]]]


@dataclass(repr=False)
class Simulation:
    """A simulated run: the same records as an `EngineRun`'s."""

    events: list[Event]
    forwards: list[Forward]
    counters: CacheCounters
    fetched: PrefetchCounts = field(default_factory=PrefetchCounts)
    kind: str = "simulated"

    #: median seconds of a decode forward; of a prefill; share of the requests found whole in memory
    tpot = property(lambda self: self.metrics().tpot)
    ttft = property(lambda self: self.metrics().ttft)
    hit_rate = property(lambda self: self.metrics().hit_rate)

    def __repr__(self) -> str:
        return f"<Simulation of {len(self.forwards)} forward passes: {told(self.metrics())}>"

    def metrics(self) -> Metrics:
        """TTFT, TPOT, hit rates, bytes …, by the definitions of the real run: see
        `moelab.offloading.metrics`."""
        return metrics(self.events, self.forwards, self.counters, asdict(self.fetched))

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the timeline as a file for https://ui.perfetto.dev: see
        `moelab.offloading.perfetto`."""
        return perfetto.save(path, self.events, self.forwards, self.kind)


def simulate(
    steps: Steps,
    forwards: Iterable[tuple],
    residency: Residency,
    delays: Delays,
    *,
    workers: int = 1,
    staging: int | None = None,
    other: Linear = (0.0, 0.0),
    head: Linear = (0.0, 0.0),
    start: float = 0.0,
    scheduler: Callable[[Sequence[Any], Delays, int], Order] = default_order,
    predictions: Predictions | None = None,
    ahead: int = 0,
    distance: int = 1,
    gate: PrefetchGate | None = None,
    predict: float = 0.0,
    awake: float | None = None,
    quiet: bool = False,
) -> Simulation:
    """Play a run in simulated time; `replay` does it for an `EngineRun`.

    steps : a run's, or those of a trace (`steps_of`).
    forwards : (…, tokens, phase) of each forward.
    residency : the cache; the run goes on from what is in it, and its counters start anew.
    delays : what the parts of an expert cost; with `e_bytes` and `sm_bytes`, the timeline says what
        is read.
    staging : loads in flight beyond what is kept (None: any number).
    other, head : seconds per layer before its experts can be read; per forward after the last
        layer.
    scheduler : one of `moelab.zipmoe.affinity.SCHEDULERS` or your own; by default the engine's.
    predictions : of every forward; they change when experts are read, never what is kept or
        computed; `steps` if all are right.
    ahead : experts that may be prefetched, into what of `staging` nothing demanded needs, but for
        one slot.
    distance : how many layers before its own an expert is announced.
    gate : decides which tokens prefetch; None for all, as a recorded run's tokens have predictions
        if it was their turn.
    predict : seconds that a prediction takes.
    awake : seconds in place of `other`'s base where the layer before has loaded nothing: nobody
        reads, and no thread has slept. None for the same.
    quiet : without a progress bar.

    Raises ValueError for other numbers of forwards or predictions than of steps, a layer or expert
    that the residency doesn't have, and a distance or staging below 1."""
    kinds = [(tokens, phase) for *_, tokens, phase in forwards]
    if len(kinds) != len(steps):
        raise ValueError(
            f"{len(steps)} forwards are to be played, but tokens and phase are given of {len(kinds)}"
        )
    if predictions is not None and len(predictions) != len(steps):
        raise ValueError(
            f"{len(steps)} forwards are to be played, but there are predictions for {len(predictions)}"
        )
    if distance < 1:
        raise ValueError(
            f"the distance is {distance} layers; experts are announced at least 1 layer before their own"
        )
    residency.reset_counters()
    gate, done, loads = gate or PrefetchGate(trials=False), [], 1
    ahead = ahead if predictions is not None else 0
    if staging is None:
        staging = residency.E + ahead + 1  # a layer's demand at most
    elif staging < 1:
        raise ValueError(
            f"staging is {staging}; at least one expert must have slots to be loaded into"
        )
    slots = slot_counts(residency.pools, residency.L if residency.scope == "layer" else 1, staging)
    resident = ((key, state) for state in HIERARCHY for key in residency.resident(state))
    machine = SimulatedMachine(delays, workers, slots, resident, ahead, start)

    controller = StepController(
        residency, machine.queue, gate, lambda requests: scheduler(requests, delays, workers)
    )

    passes = list(zip(steps, kinds, predictions or [()] * len(steps)))
    for forward, (tokens, phase), predicted in passes if quiet else progress(passes, "simulating"):
        begun, announced = machine.now, dict(predicted) if ahead else {}
        controller.begin_forward(phase)
        for layer, experts in forward:
            base = other[0] if loads or awake is None else min(awake, other[0])
            target, seconds = layer + distance, base + other[1] * tokens
            if target in announced and gate.opens:
                controller.announce(target, announced[target])
                machine.spend(layer, machine.now + predict)
            machine.spend(layer, machine.now + seconds)
            step = controller.decide(layer, experts)
            loads = len(step.loads)
            machine.spend(layer, machine.now + delays.deciding(loads))
            controller.load(step, machine.begin(layer, step.requests))
            machine.run()
        machine.spend(-1, machine.now + head[0] + head[1] * tokens)
        controller.end_forward(machine.now - begun)
        done.append(Forward(begun, machine.now, tokens, phase))
    machine.finish()
    return Simulation(machine.timeline(), done, residency.counters, machine.queue.counts)


def replay(
    run: EngineRun,
    *,
    cache: Any = None,
    device: str | Path | DeviceSpec | None = None,
    pools: Pools | None = None,
    workers: int | None = None,
    staging: int | None = None,
    scheduler: Any = None,
    decompress_gbs: float | None = None,
) -> Simulation:
    """A recorded run in simulated time, from a cache as it is opened: empty or, where all fit, with
    all experts in it. As it was, or with another cache or on another machine.

    run : `lm.moelab.run`; that of a model in memory needs a device.
    cache : another policy: a name of `moelab.names("cache")`, or your own; "belady" knows the run's
        future.
    device : a card, its name or the path of your own, whose figures replace what was measured
        (`delays_of`).
    pools, workers, staging, scheduler : in place of the run's; the last is what orders reads and
        decoding: a name of `moelab.names("scheduler")`, or a function of your own.
    decompress_gbs : see `delays_of`; without the card's figure, what was measured where the run was
        recorded.

    Raises TypeError for what is no run; ValueError for an unknown policy or scheduler, a card
    without the figures that are needed, a run whose policy is an instance, and, without a device,
    the run of a model in memory or on a GPU."""
    if not isinstance(run, EngineRun):
        raise TypeError(
            f"this is a {type(run).__name__}; what is simulated is a run, such as lm.moelab.run"
        )
    settings = run.settings
    policy = cache or settings.policy
    if cache is None and not isinstance(policy, (str, type)):
        raise ValueError(
            f"the run's policy is a {type(policy).__name__} that has learnt from it; give cache=, a name "
            "or a new instance"
        )
    delays, other, head = machine_of(run, device, decompress_gbs)
    if policy == "belady":
        policy = Belady(flat(run.steps))
    residency = Residency(
        settings.spec.L,
        settings.spec.E,
        pools or settings.pools,
        policy,
        settings.scope,
        settings.margin,
    )
    residency.fill()
    scheduler = (
        make("scheduler", order)
        if isinstance(order := scheduler or settings.scheduler, str)
        else order
    )
    return simulate(
        run.steps,
        run.forwards,
        residency,
        delays,
        workers=workers or settings.workers,
        staging=staging or settings.staging,
        other=other,
        head=head,
        scheduler=scheduler,
        predictions=run.predictions if settings.ahead else None,
        ahead=settings.ahead,
        predict=0.0 if device else observed(run).predict,
    )


def machine_of(
    run: EngineRun,
    device: str | Path | DeviceSpec | None = None,
    decompress_gbs: float | None = None,
) -> tuple[Delays, Linear, Linear]:
    """Delays of an expert, seconds before each layer's experts, and after the last layer's: as
    measured where the run was, or as the card of a device has them; parameters and errors as of
    `replay`."""
    if device is not None:
        device = device if isinstance(device, DeviceSpec) else load_device(device)
        return *_on_device(device, run.settings, decompress_gbs), (0.0, 0.0)
    if run.settings.delays is None:
        raise ValueError(
            "this run's model was in memory, so nothing was read and no delay is known: give device=, or "
            "record a run of open_model(…, memory=…)"
        )
    if run.settings.device != "cpu":
        raise ValueError(
            f"this run's experts were computed on {run.settings.device}, and only a CPU's delays are "
            f'measured: give device=, one of moelab.names("device") or a card of your own'
        )
    found = observed(run)
    return found.delays(run.settings.delays), found.other, found.head


def _on_device(
    device: DeviceSpec, settings: EngineSettings, decompress_gbs: float | None
) -> tuple[Delays, Linear]:
    """`delays_of` for experts as the run's store has them, compressed or not."""
    spec, half = settings.spec, settings.spec.expert_bytes / 2
    here = settings.delays or Delays(
        0, 0, 0, 0, 0, 0, e_bytes=spec.expert_bytes
    )  # of a resident run: raw experts
    if spec.dtype == "bfloat16" and here.sm_bytes and here.e_bytes < half:
        if decompress_gbs is None and "decompress_gbs" not in device.figures:
            decompress_gbs = half / here.decompress / 1e9
        delays, other = delays_of(
            device, spec, here.e_bytes / half, settings.dense_bytes, decompress_gbs
        )
        return replace(delays, experts_bytes=here.experts_bytes), other
    delays, other = delays_of(
        device, spec.with_dtype("bfloat16"), 1.0, settings.dense_bytes, math.inf
    )
    rates, stored = MachineRates.of(device), here.e_bytes + here.sm_bytes
    return replace(
        delays,
        e_read=stored / rates.read,
        sm_read=0.0,
        recover=0.0,
        e_bytes=stored,
        sm_bytes=0,
        expert_base=spec.expert_bytes / rates.memory,
        experts_bytes=here.experts_bytes,
    ), other


def steps_of(
    trace: RoutingTrace, batch: int = 1
) -> tuple[list[list[tuple[int, dict[int, int]]]], list[tuple[int, str]]]:
    """What the engine would be asked for: steps, and tokens and phase of each forward.

    Sequences run in groups of `batch`, in order: one forward for the prompts of a group, then one
    for each further token of all its sequences in lockstep; one that has ended drops out.
    ValueError for a batch below 1."""
    if batch < 1:
        raise ValueError(f"the batch is {batch} sequences; it must be at least 1")
    rows: dict[
        int, tuple[list[int], list[int]]
    ] = {}  # sequence → its prompt's rows, its decoded rows
    for row, (sequence, phase) in enumerate(zip(trace.sequence.tolist(), trace.phase.tolist())):
        rows.setdefault(sequence, ([], []))[phase != PREFILL].append(row)
    passes: list[tuple[list[int], str]] = []  # rows and phase of each forward
    sequences = [rows[sequence] for sequence in sorted(rows)]
    for first in range(0, len(rows), batch):
        group = sequences[first : first + batch]
        passes.append(([row for prompt, _ in group for row in prompt], "prefill"))
        passes += [
            ([decoded[n] for _, decoded in group if n < len(decoded)], "decode")
            for n in range(max(len(decoded) for _, decoded in group))
        ]

    E, ids, steps, forwards = trace.spec.E, trace.ids.tolist(), [], []
    for members, phase in passes:
        if members:
            counts = [
                Counter(e for row in members for e in ids[row][layer] if e != E)
                for layer in range(trace.spec.L)
            ]
            steps.append(
                [
                    (layer, dict(sorted(count.items())))
                    for layer, count in enumerate(counts)
                    if count
                ]
            )
            forwards.append((len(members), phase))
    return steps, forwards


def flat(steps: Steps) -> list[tuple[int, dict[int, int]]]:
    """The steps of all forwards as one list, which `Belady` and `moelab.bench.limits` take."""
    return [step for forward in steps for step in forward]


def delays_of(
    device: DeviceSpec,
    spec: MoESpec,
    rho: float,
    dense_bytes: float,
    decompress_gbs: float | None = None,
) -> tuple[Delays, Linear]:
    """Delays of an expert and seconds of everything else in a layer, from the figures of a device
    card.

    An expert of B bytes is B/2 of signs and mantissas and ρ·B/2 of compressed exponents. Recovery
    reads and writes B; computing reads the weights once and then multiplies, without overlap, which
    is at most twice too slow.

    rho : compressed over raw size of the exponents: 1 if they are not compressed.
    dense_bytes : of all weights that every token uses, spread evenly over the L layers.
    decompress_gbs : GB/s of exponents that one thread puts out; an assumption to be stated, for a
        card without it.

    Raises ValueError: figures are missing, ρ is not in (0, 1], or the model is not in bf16.
    """
    if not 0 < rho <= 1:
        raise ValueError(
            f"rho is {rho}; it is compressed over raw size of the exponents, above 0 and at most 1"
        )
    if spec.dtype != "bfloat16":
        raise ValueError(
            f"{spec.name} is stored in {spec.dtype}; exponents are split off bfloat16 only. "
            "spec.with_dtype('bfloat16') is the same model in bf16"
        )
    rates = MachineRates.of(device)
    if decompress_gbs is None:
        if "decompress_gbs" not in device.figures:
            raise ValueError(
                f"the card of {device.name} doesn't say how fast a thread decompresses; give "
                "decompress_gbs, GB/s of exponents that come out, and state it as an assumption"
            )
        decompress_gbs = device["decompress_gbs"]
    half, flops = spec.expert_bytes / 2, 2 * spec.expert_params
    delays = Delays(
        e_read=rho * half / rates.read,
        sm_read=half / rates.read,
        decompress=half / (decompress_gbs * 1e9),
        recover=4 * half / rates.memory,
        expert_base=2 * half / rates.memory,
        expert_token=flops / rates.flops,
        K=shard_count(spec.H * spec.I, SHARDS),
        N=3 if spec.gated else 2,
        e_bytes=round(rho * half),
        sm_bytes=round(half),
    )
    dense = dense_bytes / spec.L
    return delays, (dense / rates.memory, dense / rates.flops)
