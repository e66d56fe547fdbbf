"""The simulator: a recorded run, played in simulated time with the engine's own cache, step
controller, load queue and slots.

`StepController` decides from the sequence of steps alone, so whatever the engine hits, evicts and
reads on these steps, the simulator does too; only the clock differs. What takes how long is a
`Machine`: found in a recorded run (`moelab.simulation.fit`), or in the figures of a device card.
Left out: sampling between two forwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from moelab.base.specs import DeviceSpec, Event, ExpertKey
from moelab.cache.policies import Belady
from moelab.cache.pools import HIERARCHY, Pools
from moelab.cache.residency import CacheCounters, Residency
from moelab.cards import load_device
from moelab.offloading.hybrid import Balance, Rates
from moelab.offloading.load_queue import PrefetchCounts, order_of
from moelab.offloading.metrics import Forward, summary_line
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.run import EngineRun, EngineSettings, Recorded
from moelab.offloading.slots import slot_counts
from moelab.offloading.step import StepController
from moelab.simulation.costs import Machine, MachineRates, delays_in_place, delays_of
from moelab.simulation.fit import fitted
from moelab.simulation.machine import SimulatedMachine
from moelab.simulation.traced import as_opened, run_of
from moelab.trace import RoutingTrace

#: what is measured of a `Forward`
NOT_SIMULATED = {"cpu": None, "mj": None, "python": None}
#: forwards, each a list of (layer, {expert: tokens})
Steps = Sequence[Sequence[tuple[int, Mapping[int, int]]]]
#: for each forward, (layer, experts announced for it) of the layers that there are predictions for; of a
#: token that a GPU runs alone, who is to come beside it, or None where a controller says so
Predictions = Sequence[Iterable[tuple[int, Iterable[int]]] | None]


class Prefetching(NamedTuple):
    """How experts are read ahead: when they are read, never what is kept or computed.

    predictions : of every forward; the steps themselves if all are right.
    ahead : experts that may be prefetched, into what of the staging nothing demanded needs, but for
        one slot.
    distance : how many layers before its own an expert is announced.
    gate : says in which tokens; by default in each, as a recorded run's tokens have predictions if
        it was their turn.
    """

    predictions: Predictions
    ahead: int
    distance: int = 1
    gate: PrefetchGate | None = None


@dataclass(repr=False)
class Simulation(Recorded):
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
        return (
            f"<Simulation of {len(self.forwards)} forward passes: {summary_line(self.metrics())}>"
        )


def simulate(
    steps: Steps,
    forwards: Iterable[tuple],
    residency: Residency,
    machine: Machine,
    *,
    staging: int | None = None,
    scheduler: Any = None,
    prefetching: Prefetching | None = None,
    balance: Balance | None = None,
    resizes: Iterable[tuple[int, EngineSettings]] = (),
) -> Simulation:
    """Play a run in simulated time; `replay` does it for an `EngineRun`.

    steps : of each forward, the (layer, {expert: tokens}) of its layers.
    forwards : of each, what a `Forward` has from its tokens on: (tokens, phase, drafts, right …). One
        whose path is "token" is a GPU's that asks nobody: it fetches what is missing, by ascending id,
        then computes all that a layer has there, while the CPU computes its share.
    residency : the cache; the run goes on from what is in it, and its counters start anew.
    machine : what everything costs, and in `Delays.e_bytes` and `sm_bytes` how much is read.
    staging : loads in flight beyond what is kept (None: any number).
    scheduler : orders a step's reads and decoding, by its name or (requests, delays, workers) →
        `Order`; None: the experts with the most tokens first.
    prefetching : which experts are read ahead; None: none are.
    balance : says which experts are computed where they lie; None: none are.
    resizes : (forward, what memory is resized to before it).

    Raises ValueError for other numbers of forwards or predictions than of steps, and a layer or
    expert that the residency doesn't have."""
    prefetching = prefetching or Prefetching([()] * len(steps), 0)
    passes = [Forward(0.0, 0.0, *forward) for forward in forwards]
    alone = any(one.path == "token" for one in passes)
    residency.reset_counters()
    copies = residency.L if residency.scope == "layer" else 1
    if alone or not staging:
        staging = residency.E + prefetching.ahead + 1  # a layer's demand at most
    simulated = SimulatedMachine(
        machine,
        slot_counts(residency.pools, copies, staging),
        ((key, state) for state in HIERARCHY for key in residency.resident(state)),
        prefetching.ahead,
        source="link" if balance is not None or alone else "disk",
    )
    gate = prefetching.gate or PrefetchGate(trials=False)
    order = order_of(scheduler, machine.delays, machine.workers)
    controller = StepController(residency, simulated.queue, gate, order, balance=balance)
    done, predictions = list[Forward](), prefetching.predictions
    for at, (step, one, predicted) in enumerate(zip(steps, passes, predictions, strict=True)):
        for now in [of for before, of in resizes if before == at]:
            slots = slot_counts(now.pools, copies, max(now.staging, now.ahead + 1))
            simulated.resize(residency.resize(now.pools), slots, now.ahead)
        told = len(simulated.events)
        begun = _forward(simulated, controller, step, one, predicted, prefetching.distance)
        controller.wished = _wished(predictions[at + 1 :])
        took = None if one.drafts else simulated.now - begun
        if evicted := controller.end_forward(took, simulated.events[told:]):
            simulated.queue.begin(-1, [], evicted, simulated.loaded)
        done.append(one._replace(start=begun, end=simulated.now, **NOT_SIMULATED))
    simulated.finish()
    return Simulation(simulated.timeline(), done, residency.counters, simulated.queue.counts)


def _wished(predictions: Predictions) -> list[ExpertKey] | None:
    """Who is to come beside a token, by what was announced of it; None where nobody knows."""
    if not predictions or predictions[0] is None:
        return None
    return [ExpertKey(layer, expert) for layer, of in predictions[0] for expert in of]


def _forward(
    simulated: SimulatedMachine,
    controller: StepController,
    step: Sequence[tuple[int, Mapping[int, int]]],
    one: Forward,
    predictions: Iterable[tuple[int, Iterable[int]]] | None,
    distance: int,
) -> float:
    """One forward pass: the layers one after another, and the head; returns when it began."""
    machine, tokens = simulated.machine, one.tokens
    simulated.alone = one.path == "token"
    for before in controller.begin_forward(one.phase, simulated.alone):
        simulated.load(before)
        controller.load(before, simulated.loaded)
        simulated.run()
    begun = simulated.now
    ahead = simulated.queue.ahead and not simulated.alone
    predicted = dict(predictions) if ahead else {}
    simulated.beside(controller.residency.coming)
    for layer, experts in step:
        target = layer + distance
        if target in predicted and controller.gate.enabled:
            simulated.spend(layer, machine.predict)
            controller.announce(target, predicted[target])
        simulated.spend(layer, machine.other[0] + machine.other[1] * tokens)
        decided = controller.decide(layer, experts)
        if not simulated.alone:
            simulated.spend(layer, machine.decide[0] + machine.decide[1] * len(decided.loads))
        simulated.begin(decided)
        controller.load(decided, simulated.ready)
        simulated.run()
    simulated.spend(-1, machine.head[0] + machine.head[1] * tokens)
    simulated.settle()
    return begun


def replay(
    run: EngineRun | RoutingTrace,
    *,
    memory: str | float | None = None,
    hybrid: bool = False,
    cache: Any = None,
    device: str | Path | DeviceSpec | None = None,
    pools: Pools | None = None,
    scheduler: Any = None,
    prefetching: Prefetching | None = None,
) -> Simulation:
    """A recorded run in simulated time, from a cache as it is opened: empty or, where all fit, with
    all experts in it. As it was, or with another cache or on another machine.

    run : `lm.moelab.run`; that of a model in memory needs a device, as does, in less memory, one
        that has read nothing. Or a trace, as `run_of` plays it, which always needs a device; on one
        with a link, a GPU, which runs each decoded token alone.
    memory : of a trace's experts that are kept, "25%" or "8GB"; None: all. A run has its own.
    hybrid : whether the CPU beside a GPU computes its share of a trace's experts that are not kept.
    cache : another policy: a name of `moelab.names("cache")`, or your own; "belady" knows the run's
        future.
    device : a card, its name or the path of your own, whose figures replace what was measured
        (`delays_of`); one without `decompress_gbs` decompresses as fast as where the run was.
    pools : in place of the run's, and of all that it was resized to.
    scheduler : in place of the run's: a name of `moelab.names("scheduler")`, or your own function.
    prefetching : in place of what the run read ahead.

    Raises TypeError for what is no run; ValueError for an unknown policy or scheduler, a card without
    the figures that are needed, a run whose policy is an instance, a trace of experts whose sizes are not known, and, without a device, a trace, and
    the run of a model in memory or on a GPU, unless that ran whole tokens alone."""
    run = _run(run, memory, hybrid, device, pools)
    settings = run.set_up[0][1]
    resizes = [] if pools else run.set_up[1:]
    if prefetching is not None:
        resizes = [(at, replace(of, ahead=prefetching.ahead)) for at, of in resizes]
    policy = cache or settings.policy
    if cache is None and not isinstance(policy, (str, type)):
        raise ValueError(
            f"the run's policy is a {type(policy).__name__} that has learnt from it; give cache=, "
            "a name or a new instance"
        )
    if policy == "belady":
        policy = Belady(flat(run.steps))
    kept = pools or settings.pools
    spare = min(settings.spare, kept.F)
    residency = as_opened(replace(settings, pools=kept, policy=policy, spare=spare))
    machine = machine_of(run, device, reads=bool(resizes) or not residency.holds_all)
    machine = replace(machine, workers=settings.workers)
    prefetching = prefetching or Prefetching(run.predictions, settings.ahead)
    return simulate(
        run.steps,
        [forward[2:] for forward in run.forwards],
        residency,
        machine,
        staging=max(settings.staging, prefetching.ahead + 1),
        scheduler=scheduler or settings.scheduler,
        prefetching=prefetching,
        balance=_balance(run, device),
        resizes=resizes,
    )


def _run(
    run: EngineRun | RoutingTrace,
    memory: str | float | None,
    hybrid: bool,
    device: str | Path | DeviceSpec | None,
    pools: Pools | None,
) -> EngineRun:
    """What `replay` plays, of a trace as an engine would be asked for it."""
    if isinstance(run, RoutingTrace):
        alone = device is not None and "link_bandwidth_gbs" in load_device(device).figures
        return run_of(run, memory, pools=pools, alone=alone, hybrid=hybrid)
    if memory is not None or hybrid:
        raise ValueError("memory and hybrid are of a trace; a run has its own: give pools=")
    if not isinstance(run, EngineRun):
        raise TypeError(
            f"this is a {type(run).__name__}; what is simulated is a run, such as lm.moelab.run, or "
            "a moelab.RoutingTrace"
        )
    return run


def _balance(run: EngineRun, device: str | Path | DeviceSpec | None) -> Balance | None:
    """What decided in a run, or would on a card."""
    if not any(run.rates):
        return None
    rates = run.rates if device is None else repeat(_beside(load_device(device), run))
    return Balance(run.settings.experts_bytes, rates, run.settings.spec.K)


def machine_of(
    run: EngineRun,
    device: str | Path | DeviceSpec | None = None,
    reads: bool = True,
) -> Machine:
    """The machine where a run was, or what the card of a device says of another; parameters and
    errors as of `replay`. A run that has read nothing will do unless `reads`."""
    if any(event.kind == "launch" for event in run.events):
        raise ValueError(
            "a prompt of this run went through a Neural Engine's graphs, which are not simulated: give "
            "run.since(1), what came after it; `moelab ane plan` models prompts"
        )
    if device is not None:
        return _on_device(load_device(device), run)
    where = run.settings.device if run.settings.experts_bytes else "a model in memory"
    alone = any(forward.path == "token" for forward in run.forwards)  # which has told its own times
    if (where != "cpu" and not alone) or not len(run.timeline):
        raise ValueError(
            f"no delay is known of a run of {where} with {len(run.timeline)} events, and only the delays "
            "of a CPU, and of a GPU's whole tokens, are measured: give device=, one of "
            'moelab.names("device") or a card of your own, or record a run of open_model(…, memory=…)'
        )
    return fitted(run, reads)


def _on_device(device: DeviceSpec, run: EngineRun) -> Machine:
    """`delays_of` for experts as the run's store has them, compressed or not."""
    settings = run.settings
    spec = run.settings.spec
    (e_bytes, sm_bytes), half = settings.mean_bytes, spec.expert_bytes / 2
    if spec.dtype == "bfloat16" and sm_bytes and e_bytes < half:
        measured = None
        if "decompress_gbs" not in device.figures:
            measured = half / fitted(run).delays.decompress / 1e9
        delays, other = delays_of(device, spec, e_bytes / half, settings.dense_bytes, measured)
    else:
        stored = e_bytes + sm_bytes
        delays, other = delays_in_place(
            device, spec, stored, spec.expert_bytes, settings.dense_bytes
        )
    delays = replace(delays, experts_bytes=settings.experts_bytes)
    rates = MachineRates.of(device)
    beside = _beside(device, run) if any(run.rates) else Rates()
    return Machine(
        delays,
        other=other,
        head=(rates.launch, 0.0),
        decide=(rates.step, 0.0),
        far=beside.far,
        trip=beside.trip,
    )


def _beside(device: DeviceSpec, run: EngineRun) -> Rates:
    """By what a run that computes experts where they lie decides on a card. ValueError: nothing
    computes there."""
    rates = MachineRates.of(device)
    if not rates.host:
        raise ValueError(
            f"this run computed experts where they lie, and {device.name} has no memory beside it in "
            "which that could be done (host_memory_bandwidth_gbs): give another card"
        )
    return rates.beside(sum(run.settings.mean_bytes))


def flat(steps: Steps) -> list[tuple[int, dict[int, int]]]:
    """The steps of all forwards as one list, which `Belady` takes."""
    return [step for forward in steps for step in forward]
