"""ZipMoE's models on its boards: TPOT, TTFT and throughput beside what its rivals must read, all
simulated.

Source: ZipMoE §5, Figs. 7 and 8; `caching` is section 6 of notebook 03. Ours is the faster of its
plan and of caches of whole and of compressed experts, with its rule; in its rivals' place stand what
their bytes allow: an LRU cache of whole experts that reads while it computes, experts read from a
share that never changes and then computed ("on demand"), and all experts of every layer streamed
past. So a gain here is one of compression, planning and caching; what the published systems lose
otherwise is not in it.

What the paper leaves open is tried: popularity (1/rank, or all experts alike), and whether a budget
is for experts or for all weights. Tokens choose independently, in the stationary state. Boards are
their cards, without latency of a read and contention. A thread decompresses 1.2 GB/s of exponents,
which is Fig. 4's crossing at three threads; exponents take 2.65 of 8 bits (Fig. 2). Of Switch's
experts, only the decoder's are in a decode step; its encoder reads the prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import numpy as np

from moelab.base.arguments import number, whole
from moelab.base.progress import progress
from moelab.base.records import Numbers, Records
from moelab.base.specs import MoESpec
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.calibration import calibrate
from moelab.cards import load_card, load_device, load_model
from moelab.offloading.slots import Sizes, divide
from moelab.simulation import costs
from moelab.simulation.costs import RHO, Delays, Linear, delays_in_place, delays_of
from moelab.simulation.simulator import Steps, flat, ordered, simulate
from moelab.trace import RoutingTrace
from moelab.zipmoe.planner import drawn, own_steps, shares_of
from moelab.zipmoe.planning import plans

KIND = "simulated"
MODELS = ("DeepSeek-V2-Lite", "Qwen1.5-MoE-A2.7B", "Switch-Large-128")
#: board → its budget in GB (§5.1); those of Fig. 7 are in the drawing alone
BOARDS = {"jetson-agx-orin-64gb": 20, "jetson-agx-orin-32gb": 10}
#: how popular experts are, and what the budget is for
READINGS = (("1/rank", "experts"), ("1/rank", "all weights"), ("alike", "experts"))
OURS = "zipmoe"  # the eviction policy
BATCHES = (1, 4, 16)
#: decode steps that are timed; before them, each expert is chosen so often on average, to fill the
#: cache
TIMED = 8
FILLED = 5


def inclusion_of_ranks(E: int, K: int) -> np.ndarray:
    """Inclusion probabilities [E] ~ 1/rank, none above 0.95, of K experts a step."""
    f = 1 / np.arange(1, E + 1)
    for _ in range(100):  # scaling up meets the ceiling, so repeatedly
        f = np.minimum(f * K / f.sum(), 0.95)
    return f * (K / f.sum())


@dataclass(frozen=True)
class Machine:
    """One model on one board: `spec` has the layers of a decode step only, `encoder` those that the
    prompt alone runs; compressed, raw: delays and the rest of a layer; workers: threads that
    decompress."""

    spec: MoESpec
    encoder: int
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
        return cls(spec, encoder, dense, compressed, raw, workers)

    def shares(self, popularity: str) -> np.ndarray:
        """Share of tokens that need each expert: [L, E]."""
        E, K = self.spec.E, self.spec.K
        f = inclusion_of_ranks(E, K) if popularity == "1/rank" else np.full(E, K / E)
        return np.tile(f, (self.spec.L, 1))

    def steps(self, popularity: str, batch: int, seed: int) -> Steps:
        """Decode steps of so many sequences in lockstep."""
        warm = math.ceil(FILLED * self.spec.E / self.spec.K / batch)
        alone = drawn(self.shares(popularity), batch * (warm + TIMED), seed)
        return [union(alone[at : at + batch]) for at in range(0, len(alone), batch)]

    @property
    def sizes(self) -> Sizes:
        """Bytes of an expert in memory: whole, its exponents, its sign-mantissas."""
        delays = self.compressed[0]
        return Sizes(self.spec.expert_bytes, delays.e_bytes, delays.sm_bytes)

    def divided(self, room: int, sizes: Sizes) -> tuple[Pools, int]:
        """(pools of whole experts, experts that are read and decoded at a time) in so many bytes."""
        return divide(room, sizes, self.spec.L, self.spec.E, None, "model", self.workers, None)

    def plan(self, f: np.ndarray, room: int) -> Pools:
        """The planner's, for popularity f [E] by rank."""
        sizes = (self.sizes.full, self.sizes.sm, self.sizes.e)
        delays = self.compressed[0]
        found = plans(f, room, sizes, self.spec.K, delays, self.workers, layers=self.spec.L)
        return found[0].pools

    def best(self, room: int, popularity: str, steps: Steps) -> tuple[Pools, float]:
        """(pools, mean seconds of a step) of the fastest of the plan, whole experts and compressed
        ones."""
        sizes, every = self.sizes, self.spec.L * self.spec.E
        staging = self.divided(room, sizes)[1]
        left = room - staging * sizes.in_flight
        tried = (
            self.plan(self.shares(popularity)[0], left),
            Pools(F=min(every, left // sizes.full)),
            Pools(C=min(every, left // (sizes.sm + sizes.e))),
        )
        took = {of: self.seconds(self.compressed, of, OURS, steps, staging) for of in tried}
        return min(took.items(), key=lambda item: item[1])

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
        order = ordered("default", machine)
        run = simulate(steps, phases, residency, machine, staging=staging, order=order)
        return [forward.end - forward.start for forward in run.forwards]

    def rivals(self, room: int, steps: Steps, batch: int) -> Numbers:
        """Mean seconds of a step of each rival."""
        (delays, _), spec = self.raw, self.spec
        pools, staging = self.divided(room, Sizes(spec.expert_bytes, 0, 0, True))
        held = pools.F / (spec.L * spec.E)
        layers = [tokens for step in steps[-TIMED:] for _, tokens in step]
        busy = self._busy(layers, batch)
        needed = fmean(map(len, layers))
        return {
            "LRU": self.seconds(self.raw, pools, "lru", steps, staging, batch),
            "on demand": spec.L * (fmean(busy) + needed * (1 - held) * delays.e_read),
            "streamed": spec.L * fmean(max(seconds, spec.E * delays.e_read) for seconds in busy),
        }

    def _busy(self, layers: Sequence[dict[int, int]], tokens: int) -> list[float]:
        """Seconds that each layer computes for so many tokens, expert → its tokens."""
        delays, (other, token) = self.raw
        return [other + token * tokens + sum(map(delays.expert, of.values())) for of in layers]

    def ttft(self, pools: Pools, popularity: str, prompt: int, seed: int) -> Numbers:
        """Seconds of a prompt from an empty cache: "ours", and each rival (the LRU cache reads as
        "on demand" does, but while it computes). A decoder that has an encoder runs one token."""
        alone = drawn(self.shares(popularity), prompt, seed)
        layers = [counts for _, counts in union(alone)]
        if self.encoder:
            layers = layers[: self.encoder] + [counts for _, counts in alone[0]]
        found = {}
        for name, kept, clock in (
            ("ours", pools, self.compressed),
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


def less(own: float, rivals: Numbers) -> Numbers:
    """How much less than each rival's time."""
    return {f"less than {rival}": 1 - own / rivals[rival] for rival in rivals}


def run(prompt: int = 128, workers: int = 6, decompress_gbs: float = 1.2, seed: int = 0) -> Records:
    tables: dict[str, Records] = {"TPOT": {}, "TTFT": {}, "throughput": {}}
    gains: dict[str, list[float]] = {}

    def add(table: str, row: str, own: Numbers, beside: Numbers) -> None:
        kind = "encoder-decoder" if machine.encoder else "decoders"
        tables[table][row] = own | beside
        gains.setdefault(f"{table}, {kind}", []).extend(beside.values())

    cells = list(product(MODELS, BOARDS.items(), READINGS))
    for model, (board, budget), (popularity, of) in progress(cells, "Figs. 7 and 8", unit="cell"):
        machine = Machine.of(model, board, decompress_gbs, workers)
        room = round(budget * 1e9 - machine.dense_bytes * (of == "all weights"))
        name = f"{model}, {load_device(board).name}, {budget} GB for {of}, popularity {popularity}"
        steps = machine.steps(popularity, 1, seed)
        pools, own = machine.best(room, popularity, steps)
        rivals = machine.rivals(room, steps, 1)
        add("TPOT", name, {"ms": 1e3 * own}, less(own, rivals))
        first = machine.ttft(pools, popularity, prompt, seed)
        prefill = first.pop("ours")
        add("TTFT", name, {"s": prefill}, less(prefill, first))
        for batch in BATCHES if (popularity, of) == READINGS[0] else ():
            if batch > 1:  # with the pools that were planned for one
                steps = machine.steps(popularity, batch, seed)
                staging = machine.divided(room, machine.sizes)[1]
                own = machine.seconds(machine.compressed, pools, OURS, steps, staging, batch)
                rivals = machine.rivals(room, steps, batch)
            times = {f"÷ {rival}": seconds / own for rival, seconds in rivals.items()}
            add("throughput", f"{name}, batch {batch}", {"tokens a second": batch / own}, times)
    return {
        "TPOT (simulated)": tables["TPOT"],
        "TTFT from an empty cache (simulated)": tables["TTFT"],
        "throughput (simulated)": tables["throughput"],
        "least and most over all of them (simulated)": {
            name: {"least": min(values), "most": max(values)}
            for name, values in sorted(gains.items())
        },
    }


OPTIONS = {
    "prompt": (whole(1), "tokens of a prompt"),
    "workers": (whole(1), "decompression threads"),
    "decompress_gbs": (number(above=0), "GB/s of exponents of a thread"),
    "seed": (whole(), "of the routing"),
}
