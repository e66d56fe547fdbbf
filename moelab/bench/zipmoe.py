"""ZipMoE's three models on its two boards: TPOT, TTFT and throughput beside what its rivals must
read, all simulated.

Source: ZipMoE §5, Figs. 4, 7 and 8. Ours is the faster of its plan and of caches of whole and of
compressed experts, with its rule; in its rivals' place stand what their bytes allow: an LRU cache
of whole experts that reads while it computes, experts read from a share that never changes and then
computed ("on demand"), and all experts of every layer streamed past. So a gain here is one of
compression, planning and caching; what the published systems lose otherwise is not in it.

What the paper leaves open is tried: popularity (1/rank, or all experts alike), and whether a budget
is for experts or for all weights. Tokens choose independently, in the stationary state. Boards are
their cards, a thread decompresses 1.2 GB/s of exponents, which is Fig. 4's crossing at three
threads; exponents take 2.65 of 8 bits. Of Switch's experts, only the decoder's are in a decode
step; its encoder reads the prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import numpy as np

from moelab.arguments import number, whole
from moelab.cache.pools import HIERARCHY, Pools
from moelab.cache.residency import Request, Residency
from moelab.cards import load_card, load_device, load_model
from moelab.offloading.slots import Sizes, divide
from moelab.progress import progress
from moelab.records import Numbers, Records
from moelab.simulation import costs
from moelab.simulation.costs import RHO, Delays, Linear, delays_in_place, delays_of
from moelab.simulation.simulator import Steps, flat, ordered, simulate
from moelab.specs import DeviceSpec, ExpertKey, MoESpec, State
from moelab.zipmoe.affinity import default_order
from moelab.zipmoe.planner import drawn
from moelab.zipmoe.planning import plan
from moelab.zipmoe.tasks import execute

KIND = "simulated"
MODELS = ("DeepSeek-V2-Lite", "Qwen1.5-MoE-A2.7B", "Switch-Large-128")
#: board → its budget in GB (§5.1); those of Fig. 7 are in the drawing alone
BOARDS = {"jetson-agx-orin-64gb": 20, "jetson-agx-orin-32gb": 10}
#: how popular experts are, and what the budget is for
READINGS = (("1/rank", "experts"), ("1/rank", "all weights"), ("alike", "experts"))
RIVALS = ("LRU", "on demand", "streamed")
OURS = "zipmoe"  # the eviction policy
BATCHES = (1, 4, 16)
#: decode steps that are timed; before them, each expert is chosen so often on average, to fill the
#: cache
TIMED = 8
FILLED = 5
THREADS = (1, 2, 3, 4, 6)


def inclusion_of_ranks(E: int, K: int) -> np.ndarray:
    """Inclusion probabilities [E] ~ 1/rank, none above 0.95, of K experts a step."""
    f = 1 / np.arange(1, E + 1)
    for _ in range(100):  # scaling up meets the ceiling, so repeatedly
        f = np.minimum(f * K / f.sum(), 0.95)
    return f * (K / f.sum())


@dataclass(frozen=True)
class Machine:
    """One model on one board: `spec` has the layers of a decode step only, `encoder` those that the
    prompt alone runs; compressed, raw: delays and the rest of a layer."""

    spec: MoESpec
    encoder: int
    dense_bytes: float
    compressed: tuple[Delays, Linear]
    raw: tuple[Delays, Linear]

    @classmethod
    def of(cls, model: str, device: DeviceSpec, decompress_gbs: float) -> Machine:
        """One of ZipMoE's models on a device. Of Switch, an encoder-decoder, the decoder alone:
        half of the layers."""
        every = load_model(model)
        total = load_card(model)["figures"]["total_params"]["value"]
        dense = 2.0 * (total - every.L * every.E * every.expert_params)
        encoder = every.L // 2 if model.startswith("Switch") else 0
        spec = replace(every, moe_layers=every.moe_layers[encoder:])
        part = dense * spec.L / every.L
        nbytes = spec.expert_bytes
        raw = delays_in_place(device, spec, nbytes, nbytes, part)
        return cls(spec, encoder, dense, delays_of(device, spec, RHO, part, decompress_gbs), raw)

    def shares(self, popularity: str) -> np.ndarray:
        """Share of tokens that need each expert: [L, E]."""
        E = self.spec.E
        K = self.spec.K
        f = inclusion_of_ranks(E, K) if popularity == "1/rank" else np.full(E, K / E)
        return np.tile(f, (self.spec.L, 1))

    def steps(self, popularity: str, batch: int, seed: int) -> Steps:
        """Decode steps of so many sequences in lockstep."""
        warm = math.ceil(FILLED * self.spec.E / self.spec.K / batch)
        alone = drawn(self.shares(popularity), batch * (warm + TIMED), seed)
        return [
            [
                (
                    layer,
                    dict(
                        sum(
                            (Counter(token[layer][1]) for token in alone[at : at + batch]),
                            Counter(),
                        )
                    ),
                )
                for layer in range(self.spec.L)
            ]
            for at in range(0, len(alone), batch)
        ]

    def best(self, room: int, popularity: str, steps: Steps, workers: int) -> tuple[Pools, float]:
        """(pools, mean seconds of a step) of the fastest of the plan, whole experts and compressed
        ones."""
        delays, sizes, (L, E) = self.compressed[0], self.sizes, self.shares(popularity).shape
        staging = self.staging(room, sizes, workers)
        left = room - staging * sizes.in_flight
        planned = plan(
            self.shares(popularity)[0],
            left,
            (sizes.full, sizes.sm, sizes.e),
            self.spec.K,
            delays,
            workers,
            layers=L,
        ).pools
        tried = {
            pools: self.seconds(self.compressed, pools, OURS, steps, 1, staging, workers)
            for pools in (
                planned,
                Pools(F=min(L * E, left // sizes.full)),
                Pools(C=min(L * E, left // (sizes.sm + sizes.e))),
            )
        }
        return min(tried.items(), key=lambda item: item[1])

    @property
    def sizes(self) -> Sizes:
        """Bytes of an expert in memory: whole, its exponents, its sign-mantissas."""
        delays = self.compressed[0]
        return Sizes(self.spec.expert_bytes, delays.e_bytes, delays.sm_bytes)

    def staging(self, room: int, sizes: Sizes, workers: int) -> int:
        """Experts that are read and decoded at a time, within so many bytes."""
        return divide(room, sizes, self.spec.L, self.spec.E, None, "model", workers, None)[1]

    def seconds(
        self,
        clock: tuple[Delays, Linear],
        pools: Pools,
        policy: str,
        steps: Steps,
        batch: int,
        staging: int,
        workers: int,
    ) -> float:
        """Mean of the timed steps of a batch."""
        (delays, other), residency = clock, Residency(self.spec.L, self.spec.E, pools, policy)
        machine = costs.Machine(delays, workers, other)
        for step in flat(steps[:-TIMED]):
            residency.begin(*step)
        run = simulate(
            steps[-TIMED:],
            [(batch, "decode")] * TIMED,
            residency,
            machine,
            staging=staging,
            order=ordered("default", machine),
        )
        return fmean(forward.end - forward.start for forward in run.forwards)

    def rivals(self, room: int, steps: Steps, batch: int, workers: int) -> Numbers:
        """Mean seconds of a step of each of `RIVALS`."""
        (delays, other), spec = self.raw, self.spec
        pools, staging = divide(
            room, Sizes(spec.expert_bytes, 0, 0, True), spec.L, spec.E, None, "model", workers, None
        )
        held = pools.F / (spec.L * spec.E)
        busy = [
            other[0] + other[1] * batch + sum(delays.expert(n) for n in tokens.values())
            for step in steps[-TIMED:]
            for _, tokens in step
        ]
        needed = fmean(len(tokens) for step in steps[-TIMED:] for _, tokens in step)
        return {
            "LRU": self.seconds(self.raw, pools, "lru", steps, batch, staging, workers),
            "on demand": spec.L * (fmean(busy) + needed * (1 - held) * delays.e_read),
            "streamed": spec.L * fmean(max(seconds, spec.E * delays.e_read) for seconds in busy),
        }

    def ttft(self, pools: Pools, popularity: str, prompt: int, workers: int, seed: int) -> Numbers:
        """Seconds of a prompt from an empty cache: "ours", and each of `RIVALS` (the LRU cache
        reads as "on demand" does, but while it computes). A decoder that has an encoder runs one
        token."""
        spec = self.spec
        found = {}
        alone = drawn(self.shares(popularity), prompt, seed)
        counts = [
            dict(sum((Counter(token[layer][1]) for token in alone), Counter()))
            for layer in range(spec.L)
        ]
        layers = (
            counts[: self.encoder] + [alone[0][layer][1] for layer in range(spec.L)]
            if self.encoder
            else counts
        )
        step = list(enumerate(layers))
        raw, (other, token) = self.raw
        for name, kept, (delays, _) in (
            ("ours", pools, self.compressed),
            ("LRU", Pools(F=1), self.raw),
        ):
            machine = costs.Machine(delays, workers, (other, token))
            run = simulate(
                [step],
                [(prompt, "prefill")],
                Residency(len(step), spec.E, kept, "lru"),
                machine,
                staging=workers + 2,
                order=ordered("default", machine),
            )
            found[name] = run.forwards[0].end - run.forwards[0].start
        busy = [
            other + token * prompt + sum(raw.expert(n) for n in tokens.values())
            for tokens in layers
        ]
        found["on demand"] = sum(busy) + sum(map(len, layers)) * raw.e_read
        return found | {"streamed": sum(max(seconds, spec.E * raw.e_read) for seconds in busy)}


def run(prompt: int = 128, workers: int = 6, decompress_gbs: float = 1.2, seed: int = 0) -> Records:
    tpot = {}
    ttft = {}
    throughput = {}
    less: dict[str, list[float]] = {}
    cells = list(product(MODELS, BOARDS.items(), READINGS))
    for model, (board, budget), (popularity, of) in progress(cells, "Figs. 7 and 8", unit="cell"):
        device = load_device(board)
        machine = Machine.of(model, device, decompress_gbs)
        room = round(budget * 1e9 - machine.dense_bytes * (of == "all weights"))
        name = f"{model}, {device.name}, {budget} GB for {of}, popularity {popularity}"
        kind = "encoder-decoder" if machine.encoder else "decoders"
        steps = machine.steps(popularity, 1, seed)
        pools, own = machine.best(room, popularity, steps, workers)
        rivals = machine.rivals(room, steps, 1, workers)
        tpot[name] = {
            "pools F/C/S/E": "/".join(str(pools[state]) for state in HIERARCHY),
            "ms": 1e3 * own,
        } | {f"less than {rival}": 1 - own / seconds for rival, seconds in rivals.items()}
        less.setdefault(f"TPOT, {kind}", []).extend(
            1 - own / seconds for seconds in rivals.values()
        )
        first = machine.ttft(pools, popularity, prompt, workers, seed)
        ttft[name] = {"s": first["ours"]} | {
            f"less than {rival}": 1 - first["ours"] / first[rival] for rival in RIVALS
        }
        less.setdefault(f"TTFT, {kind}", []).extend(
            1 - first["ours"] / first[rival] for rival in RIVALS
        )
        for batch in BATCHES if (popularity, of) == READINGS[0] else ():
            if batch > 1:  # with the pools that were planned for one
                steps = machine.steps(popularity, batch, seed)
                staging = machine.staging(room, machine.sizes, workers)
                own = machine.seconds(
                    machine.compressed, pools, OURS, steps, batch, staging, workers
                )
                rivals = machine.rivals(room, steps, batch, workers)
            throughput[f"{name}, batch {batch}"] = {"tokens a second": batch / own} | {
                f"÷ {rival}": seconds / own for rival, seconds in rivals.items()
            }
            less.setdefault(f"throughput, {kind}", []).extend(
                seconds / own for seconds in rivals.values()
            )
    return {
        "TPOT (simulated)": tpot,
        "TTFT from an empty cache (simulated)": ttft,
        "throughput (simulated)": throughput,
        "least and most over all of them (simulated)": {
            name: {"least": min(values), "most": max(values)}
            for name, values in sorted(less.items())
        },
        "threads (simulated)": threads(decompress_gbs),
    }


def threads(decompress_gbs: float, counts: Sequence[int] = THREADS) -> dict[str, Numbers]:
    """Fig. 4 for an expert of each model: decompressing its exponents over reading as many bytes
    (below 1, the disk is slower), and a lone miss over the same read uncompressed."""
    found = {}
    device = load_device("jetson-agx-orin-64gb")
    for model in MODELS:
        machine = Machine.of(model, device, decompress_gbs)
        delays = machine.compressed[0]
        raw = machine.raw[0]
        miss = [Request(ExpertKey(0, 0), 1, State.MISSED, State.MISSED)]
        lone = {n: execute(miss, default_order(miss, delays, n), delays, n)[1] for n in counts}
        whole_read = raw.e_read + raw.expert(1)
        found[model] = {
            f"decompression ÷ read, {n} threads": 2 * delays.decompress / n / raw.e_read
            for n in counts
        }
        found[model] |= {
            f"a miss ÷ uncompressed, {n} threads": lone[n] / whole_read for n in counts
        }
    return found


OPTIONS = {
    "prompt": (whole(1), "tokens of a prompt"),
    "workers": (whole(1), "decompression threads"),
    "decompress_gbs": (number(above=0), "GB/s of exponents of a thread"),
    "seed": (whole(), "of the routing"),
}
