"""Is a cache that ZipMoE's planner divides faster than one of a single state? Measured warm, at
several budgets.

ZipMoE §3.2 to 3.4 and §5 (Figs. 8 to 10). `Bench` is one model on a slow disk: popularity is learned
from prompts of the train split, everything is simulated and run on prompts of the test split. Engine
and simulator share cache, policy and scheduler, so they must make the same decisions, or nothing is
measured; so a plan that loses in both loses by its division, and one that loses in measurement only
by what the clock leaves out.

`stationary`: each division has an engine of its own with the same memory and the rule "zipmoe". A
stretch of prompts only fills their caches, read as fast as the disk can; then, from a slowed-down
disk and in turn, prompt by prompt, others are timed; where memory is limited, one engine after the
other. "plan" is the paper's (Algorithms 2–4), "auto" the fastest in simulation of its ten best and of
the single states; of these, the ones that take more than `WITHIN` times the fastest there are not
run. The best single state is the one that came out best, so a lead of 1 or more is against
hindsight. Ratios have 95 % intervals over prompts. `--ablation` instead takes one thing away after
the other (Fig. 10): Algorithm 1's order, the plan, compression, the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from moelab import open_model
from moelab.base.arguments import number, several, whole
from moelab.base.records import Numbers, Record, Records
from moelab.bench.profile import profile
from moelab.cache.policies import POLICIES, Belady
from moelab.cache.pools import HIERARCHY, Pools
from moelab.cache.residency import Residency
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.convert import kept_store
from moelab.evaluation.intervals import Interval
from moelab.evaluation.questions import prompts
from moelab.offloading.budget import parse_budget
from moelab.offloading.offload import Offloading, offload
from moelab.offloading.slots import Sizes
from moelab.recording import record
from moelab.simulation.costs import Machine
from moelab.simulation.fit import fitted
from moelab.simulation.simulator import Simulation, flat, simulate
from moelab.trace import PREFILL, RoutingTrace
from moelab.zipmoe import selection
from moelab.zipmoe.planner import best_pools
from moelab.zipmoe.planning import CachePlan, plans

from .popularity import inclusion_probabilities
from .ratios import ratio
from .timing import torch_threads, turns

SOURCES = ("code", "prose", "needle", "lookup")
STATES = "FCSE"
POLICY = "zipmoe"  # eviction policy of plans, and of the single states beside them
WITHIN = 1.3
#: of an ablation: what is taken away → without it, with it
ABLATION = {
    "Algorithm 1's order": ("plan, naive order", "plan, Algorithm 1"),
    "our default order": ("plan, Algorithm 1", "plan"),
    "the plan": ("C", "plan"),
    "compression": ("F", "C"),
    "ZipMoE's rule": ("F, LRU", "F"),
    "all of it": ("F, LRU", "plan"),
}


class Arm(NamedTuple):
    """What an engine keeps, by which rule, and in which order it reads."""

    pools: Pools
    policy: str = POLICY
    order: str = "default"


def steps_of(trace: RoutingTrace) -> tuple[list[Any], list[tuple[int, str]]]:
    """What an engine that runs a trace's sequences one after another is asked for: of each forward,
    (layer, {expert: tokens}) of its layers; its tokens and phase."""
    ids, steps, forwards = trace.ids.tolist(), [], []
    for sequence in trace.sequence.unique():
        mine, prompt = trace.sequence == sequence, trace.phase == PREFILL
        passes = [((mine & prompt).nonzero().flatten().tolist(), "prefill")]
        passes += [(row, "decode") for row in (mine & ~prompt).nonzero().tolist()]
        for rows, phase in passes:
            counts = [
                Counter(e for row in rows for e in ids[row][n] if e != trace.spec.E)
                for n in range(trace.spec.L)
            ]
            steps.append([(n, dict(sorted(of.items()))) for n, of in enumerate(counts) if of])
            forwards.append((len(rows), phase))
    return steps, forwards


def tpot(found: Simulation) -> float:
    """Mean over decode steps, seconds: means add up, so expectations, limits and simulations can be
    compared."""
    return float(np.mean([of.end - of.start for of in found.forwards if of.phase == "decode"]))


class Bench:
    """What is measured once: the store, this machine's delays, the traces, and eager's own output.

    memory : of the experts, "700MB" or "50%"; empty: all of them at once. Budgets are shares of the
        smaller of both.
    disk : bytes a second to which reading is limited, or None. length : new tokens after a prompt.
    pools : that there can be, as letters: experts in few bits are whole (C, as they lie, or F, decoded).
    smallest : of the budgets, of which half at most is for loads in flight. sequences : of the
        largest batch. rounds : identical runs, of which a step's least time counts. One thread
        decodes."""

    def __init__(
        self,
        model: str,
        memory: str,
        disk: float | None,
        prompt_tokens: int,
        length: int,
        sequences: int,
        smallest: float,
        rounds: int,
        seconds: float,
        seed: int,
    ) -> None:
        self.disk, self.rounds = disk, rounds
        checkpoint = Checkpoint.at(model or None)
        store = checkpoint.store or Offloading().experts_of(checkpoint)
        self.pools = "FC" if store.few_bits else STATES
        self.source = checkpoint if store.few_bits else kept_store(checkpoint, codec="huffman")
        if not store.few_bits:
            store = self.source
        self.spec, self.sizes = store.spec, Sizes.of(store, in_place=False)
        self.L, self.E, self.K = self.spec.L, self.spec.E, self.spec.K
        every = self.L * self.E * self.sizes.full
        self.everything = min(every, parse_budget(memory, every, 0)) if memory else every
        self.limited = bool(memory)  # then no two engines are open at once
        self.length = {"max_new_tokens": length, "min_new_tokens": length}
        # Algorithm 1 reads and decodes an expert in parts, so that each is known.
        how = {"workers": 1, "bandwidth": disk, "scheduler": "affinity"}
        measured = profile(self.source, seconds, seed=seed, **how).machine
        with open_model(model or None, memory=memory or None) as lm:

            def cut(split: str) -> list[list[int]]:
                how = {"tokens": 4 * prompt_tokens + 64, "seed": seed, "split": split}
                n = max(2, -(-sequences // 4))
                texts = [prompt.text for source in SOURCES for prompt in prompts(source, n, **how)]
                return [lm.tokenizer(text)["input_ids"][:prompt_tokens] for text in texts]

            self.train = record(lm, cut("train"), batch_size=16, **self.length)
            self.unseen = torch.tensor(cut("test"))
            # two prompts of different sources
            self.singly = list(self.unseen[:: len(self.unseen) // 2][:2].split(1))
            one_by_one = [ids[0].tolist() for ids in self.singly]
            test = record(lm, one_by_one, batch_size=1, **self.length)
            self.eager = self.text(lm, self.singly[0])
        self.machine = replace(measured, workers=1)
        self.delays = self.machine.delays
        self.steps, self.forwards = steps_of(test)  # what an engine will be asked for
        self.staging = max(1, min(3, int(smallest * self.everything / self.sizes.in_flight / 2)))
        self.measured: dict[tuple[Pools, str], list[Any]] = {}

    def text(self, model: Any, ids: torch.Tensor, **how: Any) -> Any:
        """A model's output for prompts [B, S]."""
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **self.length | how,
        )

    @cached_property
    def states(self) -> dict[str, Record]:
        """Of each state of an expert: bytes held, seconds of reading and decoding that are left, and
        of reading that a byte saves."""
        delays, sizes = self.delays, self.sizes
        held = {"M": 0, "E": sizes.e, "S": sizes.sm, "C": sizes.e + sizes.sm, "F": sizes.full}
        reads = {"M": delays.miss_read, "E": delays.sm_read, "S": delays.e_read, "C": 0.0, "F": 0.0}
        return {
            state: {
                "bytes": held[state],
                "read": reads[state],
                "decode": delays.decode * (state != "F"),
                "saved": (reads["M"] - reads[state]) / max(held[state], 1),
            }
            for state in ("M", *self.pools)
        }

    # ---- plans, simulated

    @cached_property
    def by_layer(self) -> np.ndarray:
        """[L, E]: share of decode steps that need the expert of each popularity rank, by the
        training prompts."""
        return inclusion_probabilities(self.train).numpy()

    @cached_property
    def f(self) -> np.ndarray:
        """[E]: the mean of these; its sum is K."""
        return self.by_layer.mean(0) * self.K / self.by_layer.mean(0).sum()

    def selection_error(self) -> float:
        """The largest error of f from the selection probabilities that are fitted to it."""
        found, _ = selection.inclusion(*selection.selection_probabilities(self.f))
        return float(np.abs(found - self.f).max())

    def room(self, share: float) -> int:
        """Bytes that the pools may take, of a share of the memory."""
        return int(share * self.everything) - self.staging * self.sizes.in_flight

    def plan(self, share: float, pools: str = "", batch: int = 1) -> CachePlan:
        """The planner's division (Algorithms 2–4), of the pools given or all, for a batch of sequences."""
        f = self.f
        if batch > 1:
            f = inclusion_probabilities(self.train, batch).numpy().mean(0)
        sizes = (self.sizes.full, self.sizes.sm, self.sizes.e)
        pools = pools or self.pools
        return plans(f, self.room(share), sizes, self.delays, 1, pools, layers=self.L)[0]

    def expected(self, found: CachePlan) -> float:
        """TPOT that a plan expects, seconds."""
        return self.L * (found.seconds + sum(self.machine.other)) + sum(self.machine.head)

    def play(self, pools: Pools, policy: Any = POLICY) -> Simulation:
        """The test prompts, simulated."""
        policy = Belady(flat(self.steps)) if policy == "belady" else policy
        residency = Residency(self.L, self.E, pools, policy)
        return self.simulated(self.steps, self.forwards, residency, "default", self.machine)

    def simulated(
        self, steps: Any, forwards: Any, residency: Residency, order: str, machine: Machine
    ) -> Simulation:
        """Steps on a machine, with what is in the cache."""
        how = {"staging": self.staging, "scheduler": order}
        return simulate(steps, forwards, residency, machine, **how)

    # ---- run

    def open(self, pools: Pools, policy: str = POLICY, order: str = "default") -> Any:
        """The model within the pools' memory, an empty cache."""
        sizes = self.sizes
        memory = pools.nbytes(sizes.full, sizes.sm, sizes.e) + self.staging * sizes.in_flight
        how = {"delays": self.delays, "staging": self.staging, "workers": 1}
        how |= {"plan": pools, "cache": policy, "scheduler": order, "bandwidth": self.disk}
        return offload(self.source, memory, **how)

    def generate(
        self, pools: Pools, policy: str, ids: Sequence[torch.Tensor], **how: Any
    ) -> tuple[Any, list[Any]]:
        """(session, output of each batch) of prompts run within the pools' memory, from an empty
        cache."""
        model = self.open(pools, policy)
        with closing(model.moelab) as session:
            return session, [self.text(model, one, **how) for one in ids]

    def identical(self, pools: Pools) -> bool:
        """Whether logits and tokens of the first prompt are transformers' own, bit for bit."""
        _, (ours,) = self.generate(pools, POLICY, self.singly[:1])
        return torch.equal(ours.sequences, self.eager.sequences) and all(
            map(torch.equal, ours.logits, self.eager.logits)
        )

    def pace(self, pools: Pools, policy: str = POLICY) -> np.ndarray:
        """Seconds of each decode step of the test prompts, the least of the rounds; run when it is
        first asked for. RuntimeError unless every run made the simulation's decisions: all hits,
        evictions and bytes read."""
        if (pools, policy) not in self.measured:
            runs = [self.generate(pools, policy, self.singly)[0] for _ in range(self.rounds)]
            self.check(runs, self.play(pools, policy))
            self.measured[pools, policy] = runs
        took = [
            [x.end - x.start for x in session.forwards] for session in self.measured[pools, policy]
        ]
        return np.min(took, 0).reshape(len(self.singly), -1)[:, 1:].ravel()

    def check(self, runs: Sequence[Any], played: Simulation) -> None:
        """RuntimeError unless sessions decided as a simulation did."""
        for session in runs:
            agree("the experts that tokens need", session.steps, self.steps)
            agree("hits and evictions", session.residency.counters, played.counters)
            agree("bytes read", session.metrics().read_bytes, played.metrics().read_bytes)

    def batch(self, b: int, arms: Mapping[str, tuple[Pools, str]], tokens: int) -> Any:
        """Of each, in turn: seconds of the decode steps of b sequences together, the least of the
        rounds."""
        took: dict[str, list[Any]] = {name: [] for name in arms}
        how = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        for _, name in turns(list(arms), self.rounds, f"batch {b}"):
            session, _ = self.generate(*arms[name], [self.unseen[:b]], **how)
            took[name].append([x.end - x.start for x in session.forwards[1:]])
        return {name: np.min(of, 0) for name, of in took.items()}


def agree(what: str, *found: Any) -> None:
    """RuntimeError unless all are equal: `what` then differs between the engine, the simulation, or
    ways of which none may change it."""
    if any(one != found[0] for one in found):
        raise RuntimeError(
            f"{what} differ between runs that must be alike; what was measured means nothing"
        )


# ---- the curve by memory


class Curves(NamedTuple):
    """Policies that keep whole experts in one pool, by its size, simulated on the test prompts.

    points : policy → (bytes, TPOT, hit rate). ceiling : Belady's. cliff : bytes below which LRU hits
        nothing. hit_rates : of every policy, with half of the experts in memory."""

    points: dict[str, list[tuple[float, float, float]]]
    ceiling: list[tuple[float, float, float]]
    cliff: int
    hit_rates: Numbers


def curves(bench: Bench, plans: Mapping[float, CachePlan], n: int, shown: Sequence[str]) -> Curves:
    """With `n` sizes, the cliff of LRU and half of the experts; "planned" are plans by share."""
    every = bench.L * bench.E
    half, cliff = every // 2, (bench.L - 1) * bench.K
    least = max(1, min(half, cliff) // 2)
    sizes = sorted({*np.linspace(least, every, n).astype(int).tolist(), cliff, half})
    memory = {
        held: held * bench.sizes.full + bench.staging * bench.sizes.in_flight for held in sizes
    }

    def point(nbytes: float, run: Simulation) -> tuple[float, float, float]:
        return nbytes, tpot(run), run.counters.hit_rate()

    points = {
        name: [point(memory[held], bench.play(Pools(F=held), name)) for held in sizes]
        for name in (*shown, "belady")
    }
    planned = [point(share * bench.everything, bench.play(of.pools)) for share, of in plans.items()]
    hit_rates = {name: bench.play(Pools(F=half), name).counters.hit_rate() for name in POLICIES}
    ceiling = points.pop("belady")
    return Curves({"planned": planned} | points, ceiling, memory[cliff], hit_rates)


# ---- warm


class Warm(NamedTuple):
    """One budget. By "plan", "auto", the single states and an ablation's: arms, of which some may
    be equal; mean seconds of a decode step of each prompt [P], measured; the mean of all,
    simulated: reads as profiled, all else as it was while its caches filled."""

    arms: dict[str, Arm]
    took: dict[str, np.ndarray]
    simulated: Numbers

    @property
    def best(self) -> str:
        """The single state that is fastest, measured."""
        return min(self.took.keys() & set(STATES), key=lambda state: self.took[state].sum())

    def lead(self, name: str = "plan") -> Interval:
        """Best single state ÷ this one, measured."""
        return ratio(self.took[self.best], self.took[name])

    def rows(self) -> Records:
        """Arm → its pools, its TPOT measured and simulated, and its lead, as a table has them."""
        return {
            name: {
                "pools F/C/S/E": "/".join(str(arm.pools[state]) for state in HIERARCHY),
                "TPOT ms": 1e3 * self.took[name].mean(),
                "simulated ms": 1e3 * self.simulated[name],
            }
            | dict(zip(("best single state ÷ it", "95 % from", "to"), self.lead(name)))
            for name, arm in self.arms.items()
        }

    def ablation(self) -> dict[str, Numbers]:
        """TPOT without a part over that with it; of `ABLATION`, those that ran."""
        return {
            part: dict(
                zip(
                    ("without ÷ with", "95 % from", "to"),
                    ratio(self.took[without], self.took[with_]),
                )
            )
            for part, (without, with_) in ABLATION.items()
            if {without, with_} <= self.took.keys()
        }


def arms_of(bench: Bench, share: float, ablation: bool) -> dict[str, Arm]:
    """The plan of a budget, and what it is compared with."""
    planned = bench.plan(share).pools
    alone = {state: bench.plan(share, state).pools for state in bench.pools}
    if ablation:
        return {
            "plan": Arm(planned),
            "plan, Algorithm 1": Arm(planned, order="affinity"),
            "plan, naive order": Arm(planned, order="naive"),
            "C": Arm(alone["C"]),
            "F": Arm(alone["F"]),
            "F, LRU": Arm(alone["F"], "lru"),
        }
    # plan="auto": the best plans and the single states on the training prompts, fastest first
    decoded = [step for step, (_, phase) in zip(*steps_of(bench.train)) if phase == "decode"]
    how = {"staging": bench.staging, "policy": POLICY, "warm": len(decoded) // 2}
    room, machine = bench.room(share), bench.machine
    tried = best_pools(bench.by_layer, decoded, room, bench.sizes, machine, **how)
    took = dict(tried)
    least = min(took[of] for of in alone.values())
    return {"plan": Arm(planned), "auto": Arm(tried[0].pools)} | {
        state: Arm(of) for state, of in alone.items() if took[of] <= WITHIN * least
    }


def stationary(
    bench: Bench, share: float, before: int, tokens: int, ablation: bool = False
) -> Warm:
    """One budget: every other test prompt, all at once, with `before` new tokens in all fills the
    caches, the others with `tokens` each are timed one by one. RuntimeError: an engine decided
    otherwise than another, or than the simulator."""
    arms = arms_of(bench, share, ablation)
    fill, timed = bench.unseen[::2], bench.unseen[1::2].split(1)
    took: dict[Arm, list[float]] = {of: [] for of in arms.values()}
    played: dict[Arm, Simulation] = {}
    first = []  # what the first engine was asked for
    for group in [[of] for of in took] if bench.limited else [list(took)]:
        with ExitStack() as stack:
            models = {of: stack.enter_context(bench.open(*of)) for of in group}
            filled = {of: _fill(bench, model, fill, before) for of, model in models.items()}
            for i, of in turns(group, len(timed), f"{share:.0%} of the memory", "prompt"):
                bench.text(models[of], timed[i], max_new_tokens=tokens, min_new_tokens=tokens)
                forwards = models[of].moelab.forwards[1 - tokens :]
                took[of].append(float(np.mean([x.end - x.start for x in forwards])))
            for of, (steps, machine) in filled.items():
                session = models[of].moelab
                first = first or [steps, session.steps]
                agree("the experts that tokens need", [steps, session.steps], first)
                residency = Residency(bench.L, bench.E, of.pools, of.policy)
                for step in flat(steps):
                    residency.begin(*step)
                run = session.steps, [of[2:] for of in session.forwards], residency
                played[of] = bench.simulated(*run, of.order, machine)
                agree("hits and evictions", session.run.counters, played[of].counters)
    return Warm(
        arms,
        {name: np.array(took[of]) for name, of in arms.items()},
        {name: tpot(played[of]) for name, of in arms.items()},
    )


def _fill(bench: Bench, model: Any, prompts: torch.Tensor, before: int) -> tuple[Any, Machine]:
    """Fill a model's cache by `before` new tokens after prompts, as fast as the disk is: (steps, the
    machine as it was then, but with the slowed-down disk's reads)."""
    session, n = model.moelab, max(2, before // len(prompts))
    reader = session.engine.loader.reader
    session.reset()
    reader.bandwidth = None
    bench.text(model, prompts, max_new_tokens=n, min_new_tokens=n)
    reader.bandwidth = bench.disk
    reads = {"e_read": bench.delays.e_read, "sm_read": bench.delays.sm_read}
    machine, steps = fitted(session.run), session.steps
    session.reset()
    return steps, replace(machine, delays=replace(machine.delays, **reads))


def run(
    budgets: Sequence[float] = (0.2, 0.35, 0.5, 0.65, 0.8),
    disk_mbs: float = 20.0,
    prompts: int = 8,
    before: int = 512,
    tokens: int = 6,
    ablation: bool = False,
    seed: int = 0,
) -> Records:
    sections = {}
    with torch_threads(1):  # tiny matrices; the other cores read and decompress
        bench = Bench("", "", disk_mbs * 1e6, 40, 24, 2 * prompts, min(budgets), 1, 2, seed)
        for share in budgets:
            found = stationary(bench, share, before, tokens, ablation)
            title = f"{share:.0%} of the experts' bytes, {disk_mbs:g} MB/s (measured)"
            if ablation:
                sections[f"ablation, {title}"] = found.ablation()
            else:
                sections[title] = found.rows()
    return sections


OPTIONS = {
    "budgets": (several(number(above=0)), "shares of the experts"),
    "disk_mbs": (number(above=0), "MB/s"),
    "prompts": (whole(4), "that are timed; as many fill the caches"),
    "before": (whole(2), "tokens that fill the caches"),
    "tokens": (whole(2), "new tokens of each timed prompt"),
    "ablation": ({"action": "store_true"}, "without order, plan, compression, rule"),
    "seed": (whole(), "picks the prompts"),
}
