"""What reading, decoding and computing an expert costs on this machine, as the engine does it.

A model is opened within half of the memory that its experts take, and given random tokens; what its
run says of the machine is a `Machine` (`moelab.simulation.fit`). Its experts' reads find the
system's cache dropped, so they are the disk's. Left out: attention to a
long past; devices but the CPU."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch

from moelab.api import open_model
from moelab.base.arguments import described
from moelab.base.files import write_json
from moelab.base.progress import progress
from moelab.base.schema import Amount, Count, Must, Positive, Size
from moelab.bench.memory_limit import drop_cached
from moelab.bench.results import environment
from moelab.offloading.metrics import metrics
from moelab.offloading.run import EngineRun
from moelab.simulation.costs import Machine
from moelab.simulation.fit import fitted

FORMAT = "moelab.profile/6"
#: of what experts take
MEMORY = "50%"
#: tokens of a prompt, and decoded after it; rounds of both, however long they take
PROMPT = 32
DECODED = 8
MINIMUM = 2


@dataclass(frozen=True)
class Profile:
    """What was measured; `profile` makes one.

    machine : costs, of a run with half of the experts in memory.
    tpot : median seconds of a token in that run.    full : bytes of an expert in memory.
    dtype, mode, threads : computed in, how it was read, threads of torch.
    others : the cores that other processes kept busy meanwhile; None where that is not known.
    resident : seconds of a token with all experts in memory, where that was measured.
    """

    machine: Annotated[Machine, Must(lambda of: of.delays.miss_read > 0, "one that reads")]
    tpot: Positive
    full: Count
    model: str
    codec: str
    dtype: str
    mode: str
    threads: Size
    others: Amount | None = None
    resident: Positive | None = None

    def table(self) -> list[tuple[str, str]]:
        """What was measured, in words."""
        costs = self.machine
        delays = self.machine.delays
        rows = [
            (f"reading an expert, {self.mode}", delays.miss_read),
            ("decompressing it", delays.decompress),
            ("recovering it", delays.recover),
            ("computing it, one token", delays.expert(1)),
            ("further tokens of it, each", delays.expert_token),
            ("before a layer's experts", costs.other[0] + costs.other[1]),
            ("further tokens, each", costs.other[1]),
            ("deciding, with a load", sum(costs.decide)),
            ("waking up for a loaded one", costs.handover),
            ("after the last layer", costs.head[0] + costs.head[1]),
            ("a token, half in memory", self.tpot),
        ]
        return [(what, f"{1e3 * seconds:.3f} ms") for what, seconds in rows]


def profile(
    source: Any, seconds: float = 10.0, memory: str | int = MEMORY, seed: int = 0, **options: Any
) -> Profile:
    """Measure this machine with a model's experts and its other weights, for about so many seconds
    after a first round that does not count; at least `MINIMUM` rounds are made.

    source, memory, options : of `moelab.open_model`; ValueError where all experts fit into the
        memory, as then none is read.
    """
    with open_model(source, memory=memory, **options) as lm:
        session = lm.moelab
        draw = torch.Generator().manual_seed(seed)
        with torch.inference_mode(), progress(desc="profiling", unit="rounds") as bar:
            from transformers import DynamicCache

            done = -1
            start = time.perf_counter()
            while done < MINIMUM or time.perf_counter() - start < seconds:
                cache = DynamicCache(config=lm.config)
                for tokens in (PROMPT, *[1] * DECODED):
                    drop_cached(session.store.folder)
                    ids = torch.randint(lm.config.vocab_size, (1, tokens), generator=draw)
                    lm(input_ids=ids, past_key_values=cache, use_cache=True)
                done += 1
                if not done:  # it has compiled, and touched memory
                    session.reset()
                    start = time.perf_counter()
                bar.update()
            return measured(lm, session.run)


def measured(lm: Any, run: EngineRun) -> Profile:
    """What a run of an open model says of this machine."""
    engine = lm.moelab.engine
    return Profile(
        fitted(run),
        tpot=metrics(list(run.timeline), run.forwards).tpot,
        full=engine.loader.slots.sizes.full,
        model=lm.moelab.store.spec.name,
        codec=lm.moelab.store.codec,
        dtype=str(lm.dtype).removeprefix("torch."),
        mode=engine.loader.reader.mode,
        threads=torch.get_num_threads(),
    )


add_arguments = described(__file__)


def main(args: argparse.Namespace) -> int:
    found = profile(args.store, args.seconds, workers=args.workers)
    for what, seconds in found.table():
        print(f"{what:<30}{seconds:>14}")
    if args.output:
        kept = {"format": FORMAT} | asdict(found) | {"run": environment()}
        print(f"saved as {write_json(args.output, kept)}")
    return 0
