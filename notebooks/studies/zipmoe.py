"""ZipMoE's models on its boards: TPOT, TTFT and throughput beside what its rivals must read, all
simulated.

Source: ZipMoE §5, Figs. 7 and 8; `caching` is section 6 of notebook 03. "Planned" is the plan of
Algorithm 4 with its rule, and nothing else. In its rivals' place stand what their bytes allow: an
LRU cache of whole experts that reads while it computes, experts read from a share that never changes
and then computed ("on demand"), and all experts of every layer streamed past. So a gain here is one
of compression, planning and caching; what the published systems lose otherwise is not in it. They
themselves, MoE-Infinity and DeepSpeed, need an NVIDIA GPU: `PEERS` says what it would take.

Routing is drawn as it was fitted to traces (`moelab.simulation.routing`): of the model itself or of
the most alike one that has a fit. A plan knows the popularity of other texts than it is timed on.
Caches are filled until they are stationary: until in each of them the hit rate of the last two
windows of `WINDOW` tokens is less than `STILL` above that of the two before. Every number is of
`SEEDS` models and texts; gains are ratios of sums. For comparison with earlier results, "1/rank,
drawn" has independent draws of that popularity: the bounds over all rows leave it out.

What the paper leaves open is tried: whether a budget is for experts or for all weights, at the two
budgets that it names, where plans are also beside single states and Algorithm 3's; the others of Fig.
7 are in the drawing alone, so `BUDGETS` are ours. Boards are
their cards, without latency of a read and contention. A thread decompresses 1.2 GB/s of exponents,
which is Fig. 4's crossing at three threads; exponents take 2.65 of 8 bits (Fig. 2). Of Switch's
experts, only the decoder's are in a decode step; its encoder reads the prompt.

With `store`, a folder that `moelab convert --codec huffman` has made, recovery beside copies is
measured instead, end to end, on a CUDA GPU (`on_gpu`): nothing of it is simulated."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from moelab.base.arguments import number, whole
from moelab.base.progress import progress
from moelab.base.records import Numbers, Record, Records
from moelab.base.specs import Event, MoESpec
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.calibration import calibrate
from moelab.cards import load_card, load_device, load_model
from moelab.offloading.slots import Sizes, divide
from moelab.simulation import costs
from moelab.simulation.costs import RHO, Delays, Linear, delays_in_place, delays_of
from moelab.simulation.routing import routing_of
from moelab.simulation.simulator import Steps, flat, simulate
from moelab.trace import PREFILL, RoutingTrace
from moelab.trace import load as load_trace
from moelab.zipmoe.measure import quick_delays
from moelab.zipmoe.planner import drawn, own_steps, shares_of
from moelab.zipmoe.planning import makespan, plans, reading
from moelab.zipmoe.selection import inclusion, selection_probabilities
from moelab.zipmoe.selection import whole as nearest

from .gpu import opened, row

KIND = "simulated"
#: what `on_gpu` measures: which orders, with how much of the experts in the GPU's memory
ORDERS = ("affinity", "expert")
SHARES = (0.25, 0.5)
DECODED = 32
ROUNDS = 3
MODELS = ("DeepSeek-V2-Lite", "Qwen1.5-MoE-A2.7B", "Switch-Large-128")
#: board → its budget in GB (§5.1), and others
BOARDS = {"jetson-agx-orin-64gb": 20, "jetson-agx-orin-32gb": 10}
BUDGETS = {"jetson-agx-orin-64gb": (10, 15, 20), "jetson-agx-orin-32gb": (5, 10)}
#: the routing, and what the budget is for; but the first at the budgets of §5.1 alone
READINGS = (("as fitted", "experts"), ("as fitted", "all weights"), ("1/rank, drawn", "experts"))
OURS = "zipmoe"  # the eviction policy
BATCHES = (1, 4, 16)
SEEDS = 5
#: decode steps that are timed; a cache is stationary once its hit rate rises by less than this from
#: two windows of so many tokens to the next two; most tokens of all sequences before that
TIMED = 32
WINDOW = 64
STILL = 0.01
MOST = 512
#: tokens of a drawn text, and texts that the plan has seen
TEXT = 256
SEEN = 4
#: the published rivals, which serve from a GPU → what a measurement of them would take
PEERS = {
    "MoE-Infinity": "pip install moe-infinity; its offload_path on the disk, device_memory_ratio for "
    "the same bytes",
    "DeepSpeed": "pip install deepspeed; ZeRO-3 with offload_param to nvme",
    "Accelerate": "is measured: `moelab bench gpu --only peers`, and without a GPU `moelab bench engine`",
}


def algorithm_3(hits: np.ndarray, k: int, delays: Delays, workers: int) -> np.ndarray:
    """The paper's estimate, which lets workers read E-chunks, too, and leaves out recovery,
    computing and all waiting: [n, 4] → seconds [n]."""
    F, C, _, E = hits.T
    work = (k - F - C - E) * delays.e_read + (k - F) * delays.decompress
    return np.maximum(reading(hits, k, delays), work / workers)


def overlaps(events: Iterable[Event]) -> dict[str, float]:
    """{what loads: 1 − stall ÷ its busy time}: a disk, a link, a GPU that recovers, all workers. As
    of `Metrics.overlap_efficiency`; all stall counts against each."""
    stall, busy = 0.0, defaultdict(float)
    for event in events:
        took = event.end - event.start
        stall += took if event.kind == "wait" else 0.0
        if event.resource not in ("compute", "host"):
            busy[event.resource.split()[0]] += took
    return {name: 1 - stall / seconds for name, seconds in busy.items() if seconds}


def inclusion_of_ranks(E: int, K: int) -> np.ndarray:
    """Inclusion probabilities [E] ~ 1/rank, none above 0.95, of K experts a step."""
    f = 1 / np.arange(1, E + 1)
    for _ in range(100):  # scaling up meets the ceiling, so repeatedly
        f = np.minimum(f * K / f.sum(), 0.95)
    return f * (K / f.sum())


@dataclass(frozen=True)
class Machine:
    """One model on one board: `spec` has the layers of a decode step only, the last ones of `every`,
    of which the prompt alone runs the others; compressed, raw: delays and the rest of a layer;
    workers: threads that decompress."""

    every: MoESpec
    spec: MoESpec
    dense_bytes: float
    compressed: tuple[Delays, Linear]
    raw: tuple[Delays, Linear]
    workers: int

    @classmethod
    def of(cls, model: str, board: str, decompress_gbs: float, workers: int) -> Machine:
        """A model's card on a device's. Of Switch, an encoder-decoder, the decoder alone: half of
        the layers."""
        every, device = load_model(model), load_device(board)
        total = load_card(model)["figures"]["total_params"]["value"]
        dense = 2.0 * (total - every.L * every.E * every.expert_params)
        encoder = every.L // 2 if model.startswith("Switch") else 0
        spec = replace(every, moe_layers=every.moe_layers[encoder:])
        part = dense * spec.L / every.L
        compressed = delays_of(device, spec, RHO, part, decompress_gbs)
        raw = delays_in_place(device, spec, spec.expert_bytes, spec.expert_bytes, part)
        return cls(every, spec, dense, compressed, raw, workers)

    def routed(self, routing: str, batch: int, seed: int) -> tuple[np.ndarray, Steps]:
        """(popularity by rank [E], decode steps of so many sequences in lockstep)."""
        return routed(self.spec, routing, batch, seed, MOST // batch + TIMED)

    @property
    def encoder(self) -> int:
        """Layers that only a prompt runs."""
        return self.every.L - self.spec.L

    @property
    def sizes(self) -> Sizes:
        """Bytes of an expert in memory: whole, its exponents, its sign-mantissas."""
        delays = self.compressed[0]
        return Sizes(self.spec.expert_bytes, delays.e_bytes, delays.sm_bytes)

    def divided(self, room: int, sizes: Sizes) -> tuple[Pools, int]:
        """(pools of whole experts, experts that are read and decoded at a time) in so many bytes."""
        return divide(room, sizes, self.spec.L, self.spec.E, None, "model", self.workers, None)

    def plan(
        self, f: np.ndarray, room: int, estimate: Callable[..., np.ndarray] = makespan
    ) -> Pools:
        """The planner's, for popularity f [E] by rank, by its own or Algorithm 3's estimate."""
        sizes = (self.sizes.full, self.sizes.sm, self.sizes.e)
        delays = self.compressed[0]
        how = {"layers": self.spec.L, "estimate": estimate}
        return plans(f, room, sizes, delays, self.workers, **how)[0].pools

    def left(self, room: int) -> tuple[int, int]:
        """(bytes for pools, loads in flight) of so many bytes for experts."""
        staging = self.divided(room, self.sizes)[1]
        return room - staging * self.sizes.in_flight, staging

    def ways(self, f: np.ndarray, room: int) -> dict[str, Way]:
        """The plans, single states, and the LRU cache of whole uncompressed experts."""
        sizes, every = self.sizes, self.spec.L * self.spec.E
        left, staging = self.left(room)
        lru, beside = self.divided(room, Sizes(sizes.full, 0, 0, True))
        ours = {
            "planned": self.plan(f, left),
            "by Algorithm 3": self.plan(f, left, algorithm_3),
            "whole": Pools(F=min(every, left // sizes.full)),
            "compressed": Pools(C=min(every, left // (sizes.sm + sizes.e))),
        }
        found = {name: Way(self.compressed, pools, OURS, staging) for name, pools in ours.items()}
        return found | {"LRU": Way(self.raw, lru, "lru", beside)}

    def stationary(
        self, ways: Mapping[str, Way], steps: Steps, batch: int = 1
    ) -> tuple[dict[str, float], Steps]:
        """(name → mean seconds of the steps that are timed, those steps): the first ones after all
        caches have become stationary."""
        kept = {
            way: Residency(self.spec.L, self.spec.E, way.pools, way.policy) for way in ways.values()
        }
        at = fill([*kept.values()], steps[:-TIMED], max(WINDOW // batch, 8))
        timed = steps[at : at + TIMED]
        phases = [(batch, "decode")] * TIMED
        took = {
            way: fmean(self._run(way.clock, timed, phases, residency, way.staging))
            for way, residency in kept.items()
        }
        return {name: took[way] for name, way in ways.items()}, timed

    def seconds(
        self,
        clock: tuple[Delays, Linear],
        pools: Pools,
        policy: str,
        steps: Steps,
        staging: int,
        batch: int = 1,
        timed: int = TIMED,
    ) -> float:
        """Mean of the last `timed` steps of a batch; those before fill the cache."""
        residency = Residency(self.spec.L, self.spec.E, pools, policy)
        for step in flat(steps[:-timed]):
            residency.begin(*step)
        phases = [(batch, "decode")] * timed
        return fmean(self._run(clock, steps[-timed:], phases, residency, staging))

    def _run(
        self,
        clock: tuple[Delays, Linear],
        steps: Steps,
        phases: Sequence[tuple[int, str]],
        residency: Residency,
        staging: int,
    ) -> list[float]:
        """Seconds of each forward."""
        machine = costs.Machine(clock[0], self.workers, clock[1])
        how = {"staging": staging, "scheduler": "default"}
        run = simulate(steps, phases, residency, machine, **how)
        return [forward.end - forward.start for forward in run.forwards]

    def without_cache(self, pools: Pools, steps: Steps, batch: int) -> Numbers:
        """Mean seconds of a step of the rivals that have no cache, of which "on demand" keeps the
        pools' share for ever."""
        (delays, _), spec = self.raw, self.spec
        held = pools.F / (spec.L * spec.E)
        layers = [tokens for step in steps for _, tokens in step]
        busy = self._busy(layers, batch)
        needed = fmean(map(len, layers))
        return {
            "on demand": spec.L * (fmean(busy) + needed * (1 - held) * delays.e_read),
            "streamed": spec.L * fmean(max(seconds, spec.E * delays.e_read) for seconds in busy),
        }

    def _busy(self, layers: Sequence[dict[int, int]], tokens: int) -> list[float]:
        """Seconds that each layer computes for so many tokens, expert → its tokens."""
        delays, (other, token) = self.raw
        return [other + token * tokens + sum(map(delays.expert, of.values())) for of in layers]

    def ttft(self, pools: Pools, alone: Steps) -> Numbers:
        """Seconds of a prompt of these tokens from an empty cache: "planned", and each rival (the LRU
        cache reads as "on demand" does, but while it computes). A decoder that has an encoder runs
        one token."""
        prompt = len(alone)
        layers = [counts for _, counts in union(alone)]
        if self.encoder:
            layers = layers[: self.encoder] + [counts for _, counts in alone[0]]
        found = {}
        for name, kept, clock in (
            ("planned", pools, self.compressed),
            ("LRU", Pools(F=1), self.raw),
        ):
            residency = Residency(len(layers), self.spec.E, kept, "lru")
            phases = [(prompt, "prefill")]
            step = [list(enumerate(layers))]
            (found[name],) = self._run(clock, step, phases, residency, self.workers + 2)
        read, busy = self.raw[0].e_read, self._busy(layers, prompt)
        found["on demand"] = sum(busy) + sum(map(len, layers)) * read
        found["streamed"] = sum(max(seconds, self.spec.E * read) for seconds in busy)
        return found


class Way(NamedTuple):
    """A cache: what everything costs, pools, eviction policy, loads in flight."""

    clock: tuple[Delays, Linear]
    pools: Pools
    policy: str
    staging: int


def fill(caches: Sequence[Residency], steps: Steps, window: int = WINDOW) -> int:
    """Play windows of so many steps until the hit rates of all caches stand still; returns how many
    steps that were."""
    rates: list[list[float]] = []
    for at in range(0, len(steps), window):
        for cache in caches:
            cache.reset_counters()
            for step in flat(steps[at : at + window]):
                cache.begin(*step)
        rates.append([cache.counters.hit_rate() for cache in caches])
        if len(rates) >= 4:
            before, now = np.reshape(rates[-4:], (2, 2, -1)).mean(1)
            if (now - before).max() < STILL:
                return at + window
    return len(steps)


@lru_cache(16)
def routed(
    spec: MoESpec, routing: str, batch: int, seed: int, length: int
) -> tuple[np.ndarray, Steps]:
    """What `Machine.routed` gives, of so many steps."""
    if routing != "as fitted":
        alone = tokens(spec, routing, [batch * length], seed)
        return inclusion_of_ranks(spec.E, spec.K), in_lockstep(alone, batch)
    texts = math.ceil(length / TEXT)
    alone = tokens(spec, routing, [TEXT] * (SEEN + texts * batch), seed)
    f = by_rank(spec, alone[: SEEN * TEXT])
    lanes = [alone[at : at + length] for at in range(SEEN * TEXT, len(alone), texts * TEXT)]
    return f, [union(together) for together in zip(*lanes, strict=True)]


def tokens(spec: MoESpec, routing: str, lengths: Sequence[int], seed: int) -> Steps:
    """The steps of texts of so many tokens, one after the other."""
    if routing != "as fitted":
        f = inclusion_of_ranks(spec.E, spec.K)
        return drawn(np.tile(f, (spec.L, 1)), sum(lengths), seed)
    ids = routing_of(spec)[0].draw(spec.L, spec.E, spec.K, lengths, seed)
    return [
        [(layer, dict.fromkeys(experts, 1)) for layer, experts in enumerate(token)]
        for token in ids.tolist()
    ]


def by_rank(spec: MoESpec, alone: Steps) -> np.ndarray:
    """Share of these tokens that need the expert of each popularity rank, mean of the layers: [E]."""
    counts = np.zeros((spec.L, spec.E))
    for layer, experts in flat(alone):
        counts[layer, [*experts]] += 1
    return np.sort(counts / len(alone), 1)[:, ::-1].mean(0)


def in_lockstep(alone: Steps, batch: int) -> Steps:
    """Steps of so many sequences, of those of each, one sequence after the other."""
    return [union(alone[at : at + batch]) for at in range(0, len(alone), batch)]


def union(steps: Steps) -> list[tuple[int, dict[int, int]]]:
    """The step of sequences in lockstep, of a step of each: layer, expert → tokens."""
    return [
        (n, dict(sum((Counter(step[n][1]) for step in steps), Counter())))
        for n in range(len(steps[0]))
    ]


def stretched(
    f: np.ndarray, spec: MoESpec, tokens: int, seed: int
) -> tuple[np.ndarray, Steps, int]:
    """What `caching` takes, by a popularity curve f [ranks] that is stretched over a model's
    experts."""
    f = np.interp((np.arange(spec.E) + 0.5) / spec.E, (np.arange(len(f)) + 0.5) / len(f), f)
    f *= spec.K / f.sum()
    return f, drawn(np.tile(f, (spec.L, 1)), 6 * tokens, seed), tokens


def fitted(spec: MoESpec, timed: int, seed: int) -> tuple[np.ndarray, Steps, int]:
    """What `caching` takes, of a text that is drawn as the model's routing was fitted, and of the
    popularity in others."""
    texts = [TEXT] * SEEN + [6 * timed]
    drawn_texts = tokens(spec, "as fitted", texts, seed)
    return by_rank(spec, drawn_texts[: SEEN * TEXT]), drawn_texts[SEEN * TEXT :], timed


def traced(trace: RoutingTrace, tokens: int) -> tuple[np.ndarray, Steps, int]:
    """What `caching` takes, of a trace's own decode steps; fewer are timed where it is short."""
    shares, steps = shares_of(calibrate(trace)), own_steps(trace, 6 * tokens)
    return np.sort(shares, 1)[:, ::-1].mean(0), steps, min(tokens, len(steps) // 2)


def caching(
    machine: Machine, budgets: Sequence[int], f: np.ndarray, steps: Steps, tokens: int
) -> dict[str, dict[int, float]]:
    """Way of caching → GB → mean seconds of the last so many decode steps; the others warm the
    cache, f [E] is the experts' popularity by rank."""
    sizes = machine.sizes
    ways = {
        "uncompressed, LRU": (machine.raw, "lru", lambda n: Pools(F=n // sizes.full)),
        "compressed on disk, F, LRU": (
            machine.compressed,
            "lru",
            lambda n: Pools(F=n // sizes.full),
        ),
        "only C, LRU": (machine.compressed, "lru", lambda n: Pools(C=n // (sizes.sm + sizes.e))),
        "planned, ZipMoE's rule": (machine.compressed, OURS, lambda n: machine.plan(f, n)),
    }
    return {
        way: {
            gb: machine.seconds(
                clock, pools(gb * 10**9), policy, steps, machine.workers + 2, timed=tokens
            )
            for gb in budgets
        }
        for way, (clock, policy, pools) in ways.items()
    }


class Prompts:
    """The lengths of prompts in a file: numbers of tokens, one a line, or a routing trace, whose
    prompts are meant."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        try:
            self.lengths = [int(line) for line in self.path.read_text().split()]
        except ValueError:  # bytes, or something else than numbers
            trace = load_trace(self.path)
            prefill = trace.sequence[trace.phase == PREFILL]
            self.lengths = [n for n in prefill.bincount().tolist() if n]
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"{path} has no lengths of prompts, whole numbers of tokens above 0")

    def __str__(self) -> str:
        return self.path.name


def lengths_in(path: str) -> Prompts:
    """Reads `Prompts` on a command line."""
    try:
        return Prompts(path)
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(f"{path!r} has no lengths of prompts: {error}") from None


def ipf(f: np.ndarray, k: int, most: int = 3000) -> tuple[int, float]:
    """(rounds, error that is left) of the paper's iteration w ← w · f / f(w), with its misprint put
    right, until inclusion probabilities are right to 1e-9."""
    w = f / (1 - f)
    for rounds in range(most):  # noqa: B007
        found = inclusion(w / (1 + w), k)[0]
        if np.abs(found - f).max() < 1e-9:
            break
        w *= f / found
    return rounds, float(np.abs(found - f).max())


def selecting(models: Sequence[str]) -> Records:
    """The paper's iteration for selection probabilities, on the popularity of drawn texts."""
    found = {}
    for model in models:
        machine = Machine.of(model, "jetson-agx-orin-64gb", 1.2, 6)
        f, k = nearest(machine.routed("as fitted", 1, 0)[0])
        rounds, error = ipf(np.clip(f, 1e-6, 1 - 1e-6), k)
        ours = np.abs(inclusion(*selection_probabilities(f))[0] - f).max()
        found[model] = {"rounds of IPF": rounds, "its error": error, "error of ours": float(ours)}
    return found


def less(own: Sequence[float], rivals: Mapping[str, Sequence[float]]) -> Numbers:
    """How much less than each rival's time, over all seeds."""
    return {f"less than {name}": 1 - sum(own) / sum(of) for name, of in rivals.items()}


def by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Columns of rows."""
    return {name: [row[name] for row in rows] for name in rows[0]}


class Cell(NamedTuple):
    """A model on a board with so many bytes for experts, and the routing that it gets."""

    machine: Machine
    room: int
    routing: str

    def decode(self, batch: int, seed: int, every: bool = False) -> Numbers:
        """Seconds of a step by the plan for one sequence, and by each rival; or by every way."""
        f, steps = self.machine.routed(self.routing, batch, seed)
        ways = self.machine.ways(f, self.room)
        if not every:
            ways = {name: ways[name] for name in ("planned", "LRU")}
        took, timed = self.machine.stationary(ways, steps, batch)
        return took | self.machine.without_cache(ways["LRU"].pools, timed, batch)

    def prefill(self, prompt: int, seed: int) -> Numbers:
        """Seconds of a prompt by each way."""
        machine = self.machine
        pools = machine.plan(machine.routed(self.routing, 1, seed)[0], machine.left(self.room)[0])
        return machine.ttft(pools, tokens(machine.every, self.routing, [prompt], seed))


def on_gpu(store: str | Path, device: Any, prompt: int, workers: int) -> Records:
    """Prompts and tokens of a compressed store's model: medians of rounds after a first one, and of
    the last round how far disk, link, workers and recovery hide behind computing."""
    found = {}
    for share, order in product(SHARES, ORDERS):
        how = {"scheduler": order, "delays": quick_delays, "workers": workers}
        with opened(Path(store), device, memory=share, executor="fast", **how) as engine:
            session = engine.model.moelab
            ids = np.random.default_rng(0).integers(3, session.store.spec.vocab, prompt + DECODED)
            reports = []
            for _ in range(1 + ROUNDS):
                session.reset()
                reports.append(engine.measure([ids.tolist()], prompt))
            hidden = {
                f"overlap of {what}": of for what, of in overlaps(session.run.timeline).items()
            }
        found[f"{share:.0%} on the GPU, {order}"] = row(reports[1:], **hidden)
    return found


def run(
    prompt: int = 128,
    prompts: Prompts | None = None,
    workers: int = 6,
    decompress_gbs: float = 1.2,
    seed: int = 0,
    store: str | None = None,
) -> Records:
    if store is not None:
        if not torch.cuda.is_available():
            raise ValueError("store= is measured on a CUDA GPU, and torch finds none here")
        device = torch.device("cuda", 0)
        title = f"recovery beside copies on {torch.cuda.get_device_name(device)} (measured)"
        return {title: on_gpu(store, device, prompt, workers)}
    tables: dict[str, Records] = {"TPOT": {}, "TTFT": {}, "throughput": {}, "plans": {}}
    gains: dict[str, list[float]] = {}
    lengths = prompts.lengths if prompts else [prompt]
    seeds = range(seed, seed + SEEDS)
    rivals = ("LRU", "on demand", "streamed")

    def add(table: str, row: str, own: Record, beside: Numbers) -> None:
        kind = "encoder-decoder" if cell.machine.encoder else "decoders"
        tables[table][row] = own | beside
        if cell.routing == "as fitted":
            gains.setdefault(f"{table}, {kind}", []).extend(beside.values())

    grid = [
        (model, board, gb, reading)
        for model, reading, board in product(MODELS, READINGS, BOARDS)
        for gb in (BUDGETS[board] if reading == READINGS[0] else [BOARDS[board]])
    ]
    for model, board, gb, (routing, of) in progress(grid, "Figs. 7 and 8", unit="cell"):
        machine = Machine.of(model, board, decompress_gbs, workers)
        room = round(gb * 1e9 - machine.dense_bytes * (of == "all weights"))
        cell = Cell(machine, room, routing)
        name = f"{model}, {load_device(board).name}, {gb:g} GB for {of}, routing {routing}"
        named = gb == BOARDS[board]
        took = by_name([cell.decode(1, one, named) for one in seeds])
        ms = {way: [1e3 * one for one in times] for way, times in took.items()}
        beside = {way: took[way] for way in rivals}
        add("TPOT", name, {"ms": ms["planned"]}, less(took["planned"], beside))
        if named:
            tables["plans"][name] = {f"{way} ms": ms[way] for way in ms if way not in rivals}
        if (routing, of) == READINGS[0]:
            first = by_name(
                [
                    cell.prefill(int(one), at)
                    for at in seeds
                    for one in np.random.default_rng(at).choice(lengths, 1 + 3 * (len(lengths) > 1))
                ]
            )
            own = first.pop("planned")
            add("TTFT", name, {"s": own}, less(own, first))
        if named and (routing, of) == READINGS[0]:
            for batch in BATCHES:
                if batch > 1:
                    took = by_name([cell.decode(batch, one) for one in seeds])
                speed = {"tokens a second": [batch / one for one in took["planned"]]}
                own = sum(took["planned"])
                times = {f"÷ {rival}": sum(took[rival]) / own for rival in rivals}
                add("throughput", f"{name}, batch {batch}", speed, times)
    return {
        "TPOT (simulated)": tables["TPOT"],
        "TTFT from an empty cache (simulated)": tables["TTFT"],
        "throughput (simulated)": tables["throughput"],
        "plans and single states (simulated)": tables["plans"],
        "selection probabilities (exact)": selecting(MODELS),
        "least and most over all of them (simulated)": {
            name: {"least": min(values), "most": max(values)}
            for name, values in sorted(gains.items())
        },
        "published rivals": {
            name: {"what it takes": f"an NVIDIA GPU with an NVMe disk beside it; {how}"}
            for name, how in PEERS.items()
        },
    }


OPTIONS = {
    "prompt": (whole(1), "tokens of a prompt"),
    "prompts": (lengths_in, "file of the lengths of prompts, one a line, or a routing trace"),
    "workers": (whole(1), "decompression threads"),
    "decompress_gbs": (number(above=0), "GB/s of exponents of a thread"),
    "seed": (whole(), "of the first routing"),
    "store": (None, "folder of a compressed store: measure it on a CUDA GPU, and simulate nothing"),
}
