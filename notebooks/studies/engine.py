"""The offloading engine beside other engines: one interleaved run on a synthetic model of 5 GB.

24 layers of 64 experts, 8 a token, H 1024, I 512, bf16, batch size 1, CPU. Every engine runs in a
process of its own, with the same memory limit, file system and tokens, routed as in a real
model; see
`grid` and `peers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from moelab.base.arguments import one_of, several, whole
from moelab.base.files import folder_bytes
from moelab.base.records import Record
from moelab.base.specs import MoESpec
from moelab.store import fewbit

from .grid import (
    PROCESS,
    PYTHON,
    ROUTING,
    Arm,
    Experiment,
    measured,
    place_of,
    synthetic,
)
from .timing import ENGINE

SPEC = synthetic("synthetic-5GB", 24, 64, 8, 1024, 512)
SHARES = (0.613, 0.371)  # of the checkpoint, memory limits of `peers`: 3.06 and 1.85 GB
DEFAULT = "moelab, as it opens"  # a store of bf12, exact, prefetching while that is faster
FORMS = ("raw", "bf12", "huffman", "int8", "int4")
Table = tuple[str, str, dict[str, Arm]]  # title, base, arms


def resident(bench: Experiment) -> Iterator[Table]:
    """Everything in memory; in eight and four bits the experts alone, then attention and head too,
    as llama.cpp has it. All formats have a scale of 16 bits for 32 weights."""
    fast = bench.moelab("raw", 1.0, executor="fast")
    yield (
        "everything resident",
        "eager",
        {
            "moelab": bench.moelab("raw", 1.0),
            "eager": ("eager", {}, None),
            "moelab fast": fast,
            "moelab fast, bf12": bench.moelab("bf12", 1.0, executor="fast", dense="bf12"),
            "llama.cpp": bench.llama("BF16"),
        },
    )
    few: dict[str, Arm] = {"moelab fast": fast}
    for ours, theirs in (("int8", "Q8_0"), ("int4", "Q4_0")):
        few |= {
            f"moelab fast, {ours}": bench.moelab(ours, 1.0, executor="fast"),
            f"moelab fast, {ours}, dense too": bench.moelab(ours, 1.0, executor="fast", dense=ours),
            f"llama.cpp {theirs}": bench.llama(theirs),
        }
    yield "everything resident in few bits", "moelab fast", few


def peers(bench: Experiment) -> Iterator[Table]:
    """All engines in the same memory, page cache included: about 60 % and 37 % of the checkpoint.
    By how much attention and head in four bits take less, experts have more."""
    spec = bench.spec
    rows = spec.num_layers * spec.head_dim * 2 * (spec.heads + spec.kv_heads) + spec.vocab
    less = 2 * rows * spec.H - fewbit.find_format("int4").nbytes((rows, spec.H))
    for share in SHARES:
        memory = round(share * folder_bytes(bench.folder / "model"))
        budget = int(memory - bench.dense_bytes - PROCESS)
        ahead, auto = {"predictor": "router"}, {"predictor": "auto"}
        yield (
            f"peers in {memory / 1e9:.2f} GB",
            "moelab",
            {
                "moelab": bench.moelab("raw", budget, memory),
                DEFAULT: bench.moelab("bf12", budget, memory, options=auto),
                "moelab, huffman": bench.moelab("huffman", budget, memory),
                "moelab, bf12, fast, prefetching": bench.moelab(
                    "bf12", budget, memory, options=ahead, executor="fast"
                ),
                "moelab, int4, dense too": bench.moelab(
                    "int4", budget + less, memory, executor="fast", dense="int4"
                ),
                **bench.others(budget, memory, ("BF16", "Q4_0")),
            },
        )


SECTIONS = {"resident": resident, "peers": peers}


def run(
    only: Iterable[str] = tuple(SECTIONS),
    folder: str | Path | None = None,
    rounds: int = 3,
    prompt: int = 128,
    decode: int = 32,
    python: str | None = None,
    routing: str = "fitted",
    spec: MoESpec = SPEC,
    here: bool = False,
) -> Record:
    with place_of(folder, spec, here) as (place, words):
        bench = Experiment(spec, place, prompt, decode, rounds, python, routing=routing, here=here)
        bench.prepare(FORMS, external=True)
        tables = (
            (title, bench, base, arms)
            for name in only
            for title, base, arms in SECTIONS[name](bench)
        )
        tokens = f"given; {bench.routed}; prompts of {prompt}, then {decode} more, batch 1"
        return measured(tables, {"file system": words, "tokens": tokens, "rounds": rounds})


MEASURES = ENGINE
OPTIONS = {
    "only": (several(one_of(SECTIONS)), "sections"),
    "folder": (None, "where the model is kept, 40 GB, for the next time; else it is temporary"),
    "rounds": (whole(1), "of every engine"),
    "prompt": (whole(1), "tokens of a prompt"),
    "decode": (whole(1), "tokens after it"),
    "routing": ROUTING,
    "python": PYTHON,
}
