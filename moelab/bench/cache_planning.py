"""One model on a slow disk: what its experts cost in each state, and caches and plans, simulated
and run.

ZipMoE §3.2–3.4 and §5 (Figs. 8–10). Popularity is learned from prompts of the train split,
everything is simulated and run on prompts of the test split. Engine and simulator share cache,
policy and scheduler, so they must make the same decisions (`check`). Identical runs do identical
work in every step, so a step's time is the least over the rounds; the excess is other load on the
same machine. Every run begins with an empty cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from moelab import open_model
from moelab.bench import limits, measure
from moelab.bench.limits import belady_hits, compulsory_misses, request_count, static_hits
from moelab.bench.profile import profile
from moelab.cache.policies import POLICIES, Belady
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.checkpoint.convert import kept_store
from moelab.evaluation.questions import prompts
from moelab.offloading.budget import parse_budget
from moelab.offloading.offload import offload
from moelab.offloading.slots import Sizes
from moelab.recording import record
from moelab.records import Numbers, Record
from moelab.simulation.costs import Machine
from moelab.simulation.simulator import Simulation, flat, ordered, simulate
from moelab.specs import State
from moelab.trace import PREFILL, RoutingTrace
from moelab.zipmoe.inclusion import inclusion_probabilities
from moelab.zipmoe.planner import Tried, best_pools
from moelab.zipmoe.planning import CachePlan, plan
from moelab.zipmoe.selection import inclusion, selection_probabilities, whole

SOURCES = ("code", "prose", "needle", "lookup")
#: pools, policy
How = tuple[Pools, str]
#: eviction policy of plans, and of the single states beside them
POLICY = "zipmoe"
#: of the curves by memory; a figure with more lines is not read
SHOWN = ("zipmoe", "lru", "mine")


def steps_of(
    trace: RoutingTrace,
) -> tuple[list[list[tuple[int, dict[int, int]]]], list[tuple[int, str]]]:
    """What an engine that runs a trace's sequences one after another is asked for: steps, and tokens
    and phase of each forward."""
    E = trace.spec.E
    ids = trace.ids.tolist()
    steps = []
    forwards = []
    for sequence in trace.sequence.unique():
        mine = trace.sequence == sequence
        prompt = trace.phase == PREFILL
        decoded = (mine & ~prompt).nonzero().tolist()
        passes = [((mine & prompt).nonzero().flatten().tolist(), "prefill")]
        for rows, phase in [*passes, *((row, "decode") for row in decoded)]:
            counts = (
                Counter(e for row in rows for e in ids[row][n] if e != E)
                for n in range(trace.spec.L)
            )
            steps.append(
                [(n, dict(sorted(count.items()))) for n, count in enumerate(counts) if count]
            )
            forwards.append((len(rows), phase))
    return steps, forwards


class Bench:
    """What is measured once: the store, this machine's delays, the traces, and eager's own output.

    memory : of the experts, "700MB" or "50%"; empty: all of them at once. Budgets are shares of the
        smaller of both.
    disk : bytes a second to which reading is limited, or None. length : new tokens after a prompt.
    smallest : of the budgets, of which half at most is for loads in flight. sequences : of the
    largest batch."""

    def __init__(
        self,
        model: str,
        memory: str,
        disk: float | None,
        prompt_tokens: int,
        length: int,
        sequences: int,
        smallest: float,
        workers: int,
        rounds: int,
        seconds: float,
        seed: int,
    ) -> None:
        self.store = kept_store(model or None, codec="huffman")
        self.disk = disk
        self.workers = workers
        self.rounds = rounds
        self.spec, self.sizes = self.store.spec, Sizes.of(self.store)
        self.L, self.E, self.K = self.spec.L, self.spec.E, self.spec.K
        everything = self.L * self.E * self.sizes.full
        self.everything = (
            min(everything, parse_budget(memory, everything, 0)) if memory else everything
        )
        self.limited = bool(memory)  # then no two engines are open at once
        self.length = {"max_new_tokens": length, "min_new_tokens": length}
        # Algorithm 1 reads and decodes an expert in parts, so that each is known.
        how = {"workers": workers, "bandwidth": disk, "scheduler": "affinity"}
        self.profile = profile(self.store, seconds, seed=seed, **how)
        with open_model(model or None, memory=memory or None) as lm:

            def cut(split: str) -> list[list[int]]:
                how = {"tokens": 4 * prompt_tokens + 64, "seed": seed, "split": split}
                texts = [
                    p.text for s in SOURCES for p in prompts(s, max(2, -(-sequences // 4)), **how)
                ]
                return [lm.tokenizer(text)["input_ids"][:prompt_tokens] for text in texts]

            self.train = record(lm, cut("train"), batch_size=16, **self.length)
            self.unseen = torch.tensor(cut("test"))
            self.singly = list(
                self.unseen[:: len(self.unseen) // 2][:2].split(1)
            )  # two prompts of different sources
            self.test = record(
                lm, [ids[0].tolist() for ids in self.singly], batch_size=1, **self.length
            )
            self.eager = self._generate(lm, self.singly[0])
        self.machine = replace(self.profile.machine, workers=workers)
        self.delays = self.machine.delays
        self.steps, self.forwards = steps_of(self.test)  # what an engine will be asked for
        room = int(smallest * self.everything / self.sizes.in_flight / 2)
        self.staging = max(1, min(workers + 2, room))
        self.measured = {}

    def _generate(self, model: Any, ids: torch.Tensor, **how: Any) -> Any:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **self.length | how,
        )

    # ---- states and ranks

    @cached_property
    def states(self) -> list[Record]:
        """Of each state of an expert: bytes held, and seconds of reading and decoding that are
        left."""
        delays = self.delays
        sizes = self.sizes
        held = {"M": 0, "E": sizes.e, "S": sizes.sm, "C": sizes.e + sizes.sm, "F": sizes.full}
        reads = {"M": delays.miss_read, "E": delays.sm_read, "S": delays.e_read, "C": 0.0, "F": 0.0}
        return [
            {
                "state": state,
                "bytes": held[state],
                "read": reads[state],
                "decode": delays.decode * (state != "F"),
                "saved": (reads["M"] - reads[state]) / held[state] if held[state] else None,
            }
            for state in held
        ]

    def delay_metrics(self) -> Numbers:
        """Milliseconds of an expert's parts, by the names of metrics."""
        of = self.delays
        parts = {
            "read_e": of.e_read,
            "read_sm": of.sm_read,
            "decompress": of.decompress,
            "read_both": of.miss_read,
            "recover": of.recover,
            "expert": of.expert(1),
        }
        return {f"delay_{name}": 1e3 * seconds for name, seconds in parts.items()}

    @cached_property
    def by_layer(self) -> np.ndarray:
        """[L, E]: share of decode steps that need the expert of each popularity rank, by the
        training prompts."""
        return inclusion_probabilities(self.train).numpy()

    @cached_property
    def f(self) -> np.ndarray:
        """[E]: the mean of these; its sum is K."""
        return self.by_layer.mean(0) * self.K / self.by_layer.mean(0).sum()

    def selection(self) -> tuple[np.ndarray, float]:
        """(q fitted to f, the largest error of f from q)."""
        q = selection_probabilities(self.f, self.K)
        return q, float(np.abs(inclusion(q, self.K)[0] - self.f).max())

    # ---- plans, simulated

    def room(self, share: float) -> int:
        """Bytes that the pools may take, of a share of the memory."""
        return int(share * self.everything) - self.staging * self.sizes.in_flight

    def plan(self, share: float, pools: str = "FCSE", batch: int = 1) -> CachePlan:
        """The planner's division (Algorithms 2–4), of the pools given, for a batch of sequences."""
        f, k = (
            (self.f, self.K)
            if batch == 1
            else whole(inclusion_probabilities(self.train, batch).numpy().mean(0))
        )
        sizes = self.sizes
        return plan(
            f,
            self.room(share),
            (sizes.full, sizes.sm, sizes.e),
            k,
            self.delays,
            self.workers,
            pools,
            layers=self.L,
        )

    def expected(self, found: CachePlan) -> float:
        """TPOT that a plan expects, seconds."""
        return self.L * (found.seconds + sum(self.machine.other)) + sum(self.machine.head)

    def tried(self, share: float) -> list[Tried]:
        """The ten best plans and the single states on the training prompts, simulated, fastest
        first (plan="auto")."""
        decoded = [step for step, (_, phase) in zip(*steps_of(self.train)) if phase == "decode"]
        return best_pools(
            self.by_layer,
            decoded,
            self.room(share),
            self.sizes,
            self.machine,
            staging=self.staging,
            policy=POLICY,
            warm=len(decoded) // 2,
        )

    def play(self, pools: Pools, policy: Any = "zipmoe") -> Simulation:
        """The test prompts, simulated."""
        policy = Belady(flat(self.steps)) if policy == "belady" else policy
        return self.simulated(self.steps, self.forwards, Residency(self.L, self.E, pools, policy))

    def simulated(
        self,
        steps: Any,
        forwards: Any,
        residency: Residency,
        order: str = "default",
        machine: Machine | None = None,
    ) -> Simulation:
        """Other steps, on this machine or as another run found it, with what is in the cache."""
        machine = machine or self.machine
        return simulate(
            steps,
            forwards,
            residency,
            machine,
            staging=self.staging,
            order=ordered(order, machine),
        )

    # ---- run

    def open(self, pools: Pools, policy: str = POLICY, scheduler: str = "default") -> Any:
        """The model within the pools' memory, an empty cache."""
        sizes = self.sizes
        memory = pools.nbytes(sizes.full, sizes.sm, sizes.e) + self.staging * sizes.in_flight
        return offload(
            self.store,
            memory,
            cache=policy,
            plan=pools,
            scheduler=scheduler,
            delays=self.delays,
            staging=self.staging,
            workers=self.workers,
            bandwidth=self.disk,
        )

    def text(self, model: Any, ids: torch.Tensor, new: int) -> Any:
        """Its output for prompts [B, S], with so many new tokens."""
        return self._generate(model, ids, max_new_tokens=new, min_new_tokens=new)

    def generate(
        self,
        pools: Pools,
        policy: str = POLICY,
        ids: Sequence[torch.Tensor] = (),
        scheduler: str = "default",
        **how: Any,
    ) -> tuple[Any, list[Any]]:
        """(session, output of each batch) of prompts run within the pools' memory, from an empty
        cache."""
        model = self.open(pools, policy, scheduler)
        with model.moelab as session:
            return session, [self._generate(model, one, **how) for one in ids or self.singly]

    def identical(self, pools: Pools) -> bool:
        """Whether logits and tokens of the first prompt are transformers' own, bit for bit."""
        _, (ours,) = self.generate(pools, ids=self.singly[:1])
        return torch.equal(ours.sequences, self.eager.sequences) and all(
            map(torch.equal, ours.logits, self.eager.logits)
        )

    def pace(self, pools: Pools, policy: str = "zipmoe") -> np.ndarray:
        """Seconds of each forward, [prompts, new tokens], the least of the rounds; run when it is
        first asked for."""
        if (pools, policy) not in self.measured:
            self.measured[pools, policy] = [
                self.generate(pools, policy)[0] for _ in range(self.rounds)
            ]
        took = [
            [x.end - x.start for x in session.forwards] for session in self.measured[pools, policy]
        ]
        return np.min(took, 0).reshape(len(self.singly), -1)

    def tpot(self, pools: Pools, policy: str = "zipmoe") -> float:
        """Mean seconds of a decoded token, simulated."""
        return float(self.pace(pools, policy)[:, 1:].mean())

    def check(self, how: How, simulation: Simulation) -> None:
        """RuntimeError unless every run made the simulation's decisions: all hits, evictions and
        bytes read."""
        for session in self.measured[how]:
            measure.agree(
                "the experts that the engine and the trace name", session.steps, self.steps
            )
            measure.agree(
                "hits and evictions of the engine and the simulation",
                session.residency.counters,
                simulation.counters,
            )
            measure.agree(
                "bytes read by the engine and the simulation",
                session.metrics().read_bytes,
                simulation.metrics().read_bytes,
            )

    def ordered(self, pools: Pools) -> Numbers:
        """TPOT by the order of reading, in turn."""
        took: dict[str, list[list[float]]] = {}
        for name in ("affinity", "expert", "naive") * self.rounds:
            took.setdefault(name, []).append(
                [x.end - x.start for x in self.generate(pools, scheduler=name)[0].forwards]
            )
        return {
            name: float(np.min(of, 0).reshape(len(self.singly), -1)[:, 1:].mean())
            for name, of in took.items()
        }

    def batch(
        self, b: int, arms: Mapping[str, How], tokens: int
    ) -> dict[str, tuple[np.ndarray, float]]:
        """Of each, in turn: seconds of the decode steps of b sequences together, the least of the
        rounds; MB read a token."""
        runs: dict[str, list[Any]] = {name: [] for name in arms}
        for _, name in measure.turns(list(arms), self.rounds, f"batch {b}"):
            runs[name].append(
                self.generate(
                    *arms[name], [self.unseen[:b]], max_new_tokens=tokens, min_new_tokens=tokens
                )[0]
            )
        return {
            name: (
                np.min([[x.end - x.start for x in session.forwards[1:]] for session in of], 0),
                of[0].metrics().read_bytes_per_token / 1e6,
            )
            for name, of in runs.items()
        }


def tpot(found: Simulation) -> float:
    """Mean over decode steps, seconds: means add up, so expectations, limits and simulations can be
    compared."""
    return float(
        np.mean([end - start for start, end, _, phase in found.forwards if phase == "decode"])
    )


# ---- whole sections


class Planned(NamedTuple):
    """One budget: the plan and the single states, their simulations, and what ran."""

    plan: CachePlan
    pools: dict[str, Pools]  # "plan", "F", "C", "S" and "E"
    simulated: dict[str, Simulation]
    best: str  # the single state that is fastest, simulated
    took: Numbers  # seconds a token, measured: of the plan and, at three budgets, of the best

    def bytes(self, bench: Bench) -> dict[str, int]:
        """Memory of each pool of the plan."""
        return {
            s["state"]: self.plan.pools[State(s["state"])] * s["bytes"] for s in bench.states[1:]
        }


def planned(bench: Bench, shares: Sequence[float]) -> dict[float, Planned]:
    """The plan beside caches of one state at every budget, from an empty cache."""
    found = {}
    for share in shares:
        division = bench.plan(share)
        pools = {"plan": division.pools} | {
            state: bench.plan(share, state).pools for state in "FCSE"
        }
        simulated = {name: bench.play(of) for name, of in pools.items()}
        best = min("FCSE", key=lambda state: tpot(simulated[state]))
        ran = ["plan"] + [best] * (share in (shares[0], shares[len(shares) // 2], shares[-1]))
        found[share] = Planned(
            division, pools, simulated, best, {name: bench.tpot(pools[name]) for name in ran}
        )
    return found


Curve = list[tuple[float, float, float]]  # bytes, TPOT, hit rate


@dataclass
class Curves:
    """Policies that keep whole experts in one pool, by its size, simulated on the test prompts."""

    bench: Bench
    memory: dict[int, int] = field(default_factory=dict)  # experts held → bytes
    points: dict[str, Curve] = field(default_factory=dict)
    ceiling: Curve = field(default_factory=list)  # Belady's
    limits: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # modelled
    half: dict[str, Simulation] = field(
        default_factory=dict
    )  # every policy with half of the experts in memory

    @classmethod
    def of(cls, bench: Bench, plans: Mapping[float, Planned], n: int) -> Curves:
        """With `n` sizes, the cliff of LRU, a token's demand and half of the experts."""
        L = bench.L
        E = bench.E
        K = bench.K
        found = cls(bench)
        marks = {limits.lru_cliff(bench.spec), L * K, L * E // 2}
        sizes = sorted(
            {*np.linspace(max(1, min(marks) // 2), L * E, n).astype(int).tolist(), *marks}
        )
        found.memory = {
            held: held * bench.sizes.full + bench.staging * bench.sizes.in_flight for held in sizes
        }
        runs = {
            name: {held: bench.play(Pools(F=held), name) for held in sizes}
            for name in (*SHOWN, "belady")
            if name in POLICIES
        }
        points = {
            name: [
                (found.memory[held], tpot(run), run.counters.hit_rate()) for held, run in of.items()
            ]
            for name, of in runs.items()
        }
        found.ceiling = points.pop("belady")
        found.points = {
            "planned": [
                (
                    share * bench.everything,
                    tpot(of.simulated["plan"]),
                    of.simulated["plan"].counters.hit_rate(),
                )
                for share, of in plans.items()
            ]
        } | points
        rate = (bench.delays.e_bytes + bench.delays.sm_bytes) / bench.delays.miss_read

        def floor(run: Simulation) -> float:
            records, tokens = limits.layer_records(run.events, run.forwards)
            return limits.on_demand_limit(records, rate, tokens, bench.workers)

        found.limits = {
            "on demand, Belady": [
                (found.memory[held], floor(run)) for held, run in runs["belady"].items()
            ]
        }
        # "next-token" is told what routers saw, which a trace of ids does not have
        found.half = {
            name: runs[name][L * E // 2] if name in runs else bench.play(Pools(F=L * E // 2), name)
            for name in POLICIES
            if name != "next-token"
        }
        return found

    def hit_rates(self) -> Numbers:
        """With half of the experts in memory, of every policy."""
        return {name: run.counters.hit_rate() for name, run in self.half.items()}

    def bounds(self) -> Numbers:
        """Hit rates with half of the experts in memory that need no simulation."""
        asked = flat(self.bench.steps)
        n = self.bench.L * self.bench.E // 2
        total = request_count(asked)
        return {
            "best fixed set": static_hits(asked, n) / total,
            "Belady without pinning": belady_hits(asked, n) / total,
            "uniform": limits.uniform_hit_rate(self.bench.spec, n),
            "all but compulsory misses": 1 - compulsory_misses(asked) / total,
        }

    @property
    def marks(self) -> Numbers:
        """What it is → bytes at which something changes."""
        L = self.bench.L
        K = self.bench.K
        return {
            "LRU cliff": self.memory[limits.lru_cliff(self.bench.spec)],
            "one token": self.memory[L * K],
        }

    def told(self, nbytes: float) -> str:
        """Each policy's TPOT with so many bytes, in words."""
        return ", ".join(
            f"{name} {1e3 * self.tpot_at(name, nbytes):.1f} ms" for name in self.points
        )

    def tpot_at(self, name: str, nbytes: float) -> float:
        """Interpolated."""
        return float(
            np.interp(nbytes, *np.array(sorted((m, t) for m, t, _ in self.points[name])).T)
        )


def variants(bench: Bench, share: float) -> dict[str, How]:
    """ZipMoE's ablation (Fig. 10): evictions of whole experts, and the plan."""
    only = Pools(F=bench.room(share) // bench.sizes.full)
    rules = {
        "FIFO": "fifo",
        "Marking": "marking",
        "LRU": "lru",
        "mine": "mine",
        "ZipMoE's rule": "zipmoe",
    }
    return {name: (only, rule) for name, rule in rules.items() if rule in POLICIES} | {
        "ZipMoE, planned": (bench.plan(share).pools, "zipmoe")
    }


def until(pace: np.ndarray) -> list[tuple[int, float, float, float]]:
    """(n, mean, p10, p90) of the seconds until the n-th token, prompt included, from [prompts, new
    tokens] seconds."""
    tokens = pace.shape[1]
    sums = pace.cumsum(1)
    return [
        (n, float(sums[:, n - 1].mean()), *np.quantile(sums[:, n - 1], (0.1, 0.9)))
        for n in sorted({max(1, tokens // 4), max(1, tokens // 2), 3 * tokens // 4, tokens})
    ]
