"""The offloading engine beside other engines and its limits: one interleaved run on a synthetic
model of 5 GB.

24 layers of 64 experts, 8 a token, H 1024, I 512, bf16, batch size 1, CPU. Every engine runs in a
process of its own, with the same memory limit, file system and random tokens; see
`moelab.bench.grid` and `moelab.bench.peers`. "The limit" is `on_demand_limit`: Σ over layers of
(attention and router + max(read, decompress, expert compute)), from the run's own bytes and times
and the best rate at which the same process read whole experts, before, during or after it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

from moelab.arguments import one_of, several, whole
from moelab.bench import ENGINE
from moelab.bench.grid import (
    PROCESS,
    PYTHON,
    Arm,
    Experiment,
    against_limit,
    interpreters,
    place_of,
    replayed,
)
from moelab.bench.peers import FOUND
from moelab.files import folder_bytes
from moelab.records import Record
from moelab.specs import MoESpec

SPEC = MoESpec(
    "synthetic-5GB",
    "qwen3_moe",
    24,
    tuple(range(24)),
    64,
    8,
    1024,
    512,
    vocab=8192,
    heads=16,
    kv_heads=4,
    head_dim=64,
)
SHARES = (0.613, 0.371)  # of the checkpoint, memory limits of `peers`: 3.06 and 1.85 GB
SLOW = 500e6  # bytes a second of `throttled`
BUDGETS = (0.15, 0.25, 0.4, 0.5, 0.75)  # of `simulated`
FEW_BITS = (("int8", "Q8_0"), ("int4", "Q4_0"))  # our format, llama.cpp's
DEFAULT = "moelab, as it opens"  # a store of bf12, exact, prefetching while that is faster
SIMULATED = ("raw", "bf12", "huffman", "int4", "bf12, fast", "int4, fast")


def resident(bench: Experiment) -> Record:
    """Everything in memory."""
    arms: dict[str, Arm] = {
        "moelab": bench.moelab("raw", 1.0),
        "eager": ("eager", {}, None),
        "moelab fast": bench.moelab("raw", 1.0, executor="fast"),
        "moelab fast, bf12": bench.moelab("bf12", 1.0, executor="fast", dense="bf12"),
        "llama.cpp": bench.llama("BF16"),
    }
    rows, reports = bench.compare("resident", arms, "eager")
    bench.aim("everything resident: TPOT ÷ eager", rows["moelab"].get("÷ eager"), 1.0)
    bench.aim(
        "resident, fast: TPOT of bf12 ÷ bf16",
        bench.ratio(reports, "moelab fast, bf12", "moelab fast"),
        0.85,
    )
    bench.aim(
        "resident: TPOT of bf12, fast ÷ llama.cpp",
        bench.ratio(reports, "moelab fast, bf12", "llama.cpp"),
        0.95,
    )
    bench.aim(
        "resident: TPOT of fast ÷ llama.cpp", bench.ratio(reports, "moelab fast", "llama.cpp"), 1.05
    )
    for (name, ours), (what, aim) in product(
        (("fast", "moelab fast"), ("exact", "moelab")), (("TTFT", 1.2), ("2nd TTFT", 0.9))
    ):
        own, *others = (rows[arm].get(f"{what} s") for arm in (ours, "eager", "llama.cpp"))
        if own and all(others):
            bench.aim(f"resident: {what} of {name} ÷ the better of both", own / min(others), aim)
    return {"everything resident": rows}


def few_bits(bench: Experiment) -> Record:
    """Everything in memory in eight and four bits: the experts alone, then attention and head too,
    as llama.cpp has it. All formats have a scale of 16 bits for 32 weights."""
    arms: dict[str, Arm] = {"moelab fast": bench.moelab("raw", 1.0, executor="fast")}
    for ours, theirs in FEW_BITS:
        arms |= {
            f"moelab fast, {ours}": bench.moelab(ours, 1.0, executor="fast"),
            f"moelab fast, {ours}, dense too": bench.moelab(ours, 1.0, executor="fast", dense=ours),
            f"llama.cpp {theirs}": bench.llama(theirs),
        }
    rows, reports = bench.compare("few bits", arms, "moelab fast")
    for (ours, theirs), aim in zip(FEW_BITS, (0.75, 0.6)):
        bench.aim(
            f"few bits: TPOT of {ours} experts ÷ bf16",
            rows[f"moelab fast, {ours}"].get("÷ moelab fast"),
            aim,
        )
        bench.aim(
            f"few bits: TPOT of {ours} ÷ llama.cpp {theirs}",
            bench.ratio(reports, f"moelab fast, {ours}, dense too", f"llama.cpp {theirs}"),
            1.3,
        )
    return {"everything resident in few bits": rows}


def limit(bench: Experiment) -> Record:
    """Budgets of 25 % and 50 % against the on-demand limit; TTFT against reading the experts
    once."""
    arms = {
        f"{codec}, {share:.0%}": bench.moelab(codec, share)
        for share, codec in product((0.25, 0.5), ("huffman", "bf12", "raw"))
    }
    (rows, reports), against = bench.compare("limit", arms, "huffman, 50%"), {}
    for name, found in reports.items():
        if bench.failed(reports, name):
            continue
        row = against[name] = against_limit(found)
        bench.aim(f"{name}: TPOT ÷ on-demand limit", row["÷ limit"], 1.2)
        if name.endswith("50%"):
            bench.aim(f"{name}: TTFT ÷ reading the experts once", row["TTFT ÷ raw"], 1.2)
    return {"budgets": rows, "against the limit": against}


def peers(bench: Experiment) -> Record:
    """All engines in the same memory, page cache included: about 60 % and 37 % of the
    checkpoint."""
    whole = folder_bytes(bench.folder / "model")
    sections: Record = {}
    for share in SHARES:
        memory = round(share * whole)
        budget = int(memory - bench.dense_bytes - PROCESS)
        if budget <= 0:
            raise ValueError(
                f"{share:.0%} of the checkpoint are {memory / 1e6:,.0f} MB, not enough for a "
                "process alone; compare peers on a larger model"
            )
        arms: dict[str, Arm] = {
            "moelab": bench.moelab("raw", budget, memory),
            DEFAULT: bench.moelab("bf12", budget, memory, predictor="auto"),
            "moelab, huffman": bench.moelab("huffman", budget, memory),
            "moelab, prefetching": bench.moelab("raw", budget, memory, predictor="router"),
            **{
                f"moelab, {codec}, fast, prefetching": bench.moelab(
                    codec, budget, memory, predictor="router", executor="fast"
                )
                for codec in ("raw", "bf12")
            },
            "moelab, int4, dense too": bench.moelab(
                "int4", budget + bench.rounded_bytes("int4"), memory, executor="fast", dense="int4"
            ),
            **bench.others(budget, memory, ("BF16", "Q4_0")),
        }
        title = f"peers in {memory / 1e9:.2f} GB"
        rows, reports = bench.compare(title, arms, "moelab")
        sections[title], (plain, packed) = rows, [name for name in arms if "fast" in name]
        bench.aim(
            f"{title}: TPOT of bf12 ÷ raw, fast, prefetching",
            bench.ratio(reports, packed, plain),
            0.65 if share == SHARES[0] else 0.75,
        )
        bench.aim(
            f"{title}: TPOT of int4 ÷ llama.cpp Q4_0",
            bench.ratio(reports, "moelab, int4, dense too", "llama.cpp Q4_0 mmap"),
            1.3,
        )
        if share == SHARES[1]:
            bench.aim(
                f"{title}: TPOT of int4, s", rows["moelab, int4, dense too"].get("TPOT s"), 0.05
            )
        for name, aim in (
            ("llama.cpp BF16 mmap", 2.5),
            ("accelerate disk", 6),
            ("ftllm", 1.3),
            ("LRU baseline", 1),
        ):
            bench.aim(
                f"{title}: TPOT of {name} ÷ moelab", rows[name].get("÷ moelab"), aim, below=False
            )
        default = bench.ratio(reports, DEFAULT, "LRU baseline")
        bench.aim(f"{title}: TPOT of {DEFAULT} ÷ LRU baseline", default, 1)
    return sections


def throttled(bench: Experiment) -> Record:
    """Reads throttled to 500 MB/s, so that time follows the bytes that are read; the same memory
    for every form, a share of what all experts take in bf16."""
    sections = {}
    for share in (0.25, 0.5):
        budget = int(share * bench.spec.experts_bytes)
        arms = {
            "raw": bench.moelab("raw", budget, bandwidth=SLOW),
            "bf12, fast": bench.moelab("bf12", budget, bandwidth=SLOW, executor="fast"),
            "huffman, kept compressed": bench.moelab(
                "huffman", budget, compressed=True, bandwidth=SLOW, staging=3
            ),
            "huffman, kept compressed, fast": bench.moelab(
                "huffman",
                budget,
                compressed=True,
                bandwidth=SLOW,
                staging=4,
                workers=2,
                executor="fast",
            ),
        }
        arms |= {
            f"{name}, prefetching": bench.moelab(name, budget, predictor="router", bandwidth=SLOW)
            for name in ("raw", "huffman")
        }
        title = f"reads of {SLOW / 1e6:.0f} MB/s, budget {share:.0%}"
        rows = sections[title] = bench.compare(title, arms, "raw")[0]
        lossless = [
            row["÷ raw"]
            for name, row in rows.items()
            if "prefetching" not in name and row.get("÷ raw")
        ]
        bench.aim(
            f"{title}: TPOT of the best lossless ÷ raw",
            min(lossless, default=None),
            0.5 if share == 0.25 else 0.3,
        )
        raw, coded = (rows[f"{name}, prefetching"].get("÷ raw") for name in ("raw", "huffman"))
        if raw and coded:
            bench.aim(f"{title}: both prefetching, TPOT of huffman ÷ raw", coded / raw, 0.72)
    return sections


def memory(bench: Experiment, tokens: int = 64) -> Record:
    """Peak memory of a long run: VmHWM of the process, mapped libraries included; and anonymous
    memory at the end."""
    report = bench.report(bench.moelab("huffman", 0.25), tokens)
    title = f"memory over {tokens:,} tokens"
    if "result" in report:
        return {title: report}
    parts = {key: report[key] for key in ("budget_bytes", "others_bytes", "kv_bytes")}
    above = report["peak_rss_bytes"] - sum(parts.values())
    bench.aim(f"{title}: MB above budget, other weights and KV cache", above / 1e6, 300)
    own = report["anonymous_bytes"] - sum(parts.values())
    bench.aim(f"{title}: the same without mapped files, which are libraries", own / 1e6, 300)
    return {
        title: parts
        | {
            "peak_rss_bytes": report["peak_rss_bytes"],
            "above_bytes": above,
            "anonymous_bytes": report["anonymous_bytes"],
            "imports_alone_rss_bytes": report["imports_rss_bytes"],
            "TPOT seconds": median(report["tpot_s"]),
            "major faults while decoding": report["decode_major_faults"],
        }
    }


def simulated(bench: Experiment) -> Record:
    """The simulator on the engine's own steps: equal decisions, and its time beside the measured.
    Packed experts also by the executor that multiplies them as they lie. The machine is profiled
    before an arm's runs and after them, since its rates drift; the faster profile counts. All read
    past the page cache: a small store would lie in it when it runs, and not when it is profiled."""
    from moelab.bench.profile import profile
    from moelab.store.layout import ExpertStore
    from moelab.store.reader import modes

    rows: Record = {}
    reading = {"mode": "direct"} if "direct" in modes() else {}
    for arm in SIMULATED:
        codec = arm.partition(", ")[0]
        executor = "fast" if arm.endswith("fast") else "exact"
        store = ExpertStore(bench.folder / codec)
        profiled = partial(profile, store, executor=executor, **reading)
        with tempfile.TemporaryDirectory() as temporary:
            before = profiled()
            reports = {}
            for share in BUDGETS:
                trace = Path(temporary) / f"{share}.json"
                made = bench.moelab(codec, share, trace=trace, executor=executor, **reading)
                reports[f"{arm}, {share:.0%}"] = trace, bench.report(made)
            calm = min((before, profiled()), key=lambda one: one.tpot)
            for name, (trace, report) in reports.items():
                if "result" in report:
                    rows[name] = report
                    continue
                said, equal = replayed(trace, store.spec, calm)
                measured = median(report["tpot_s"])
                rows[name] = {
                    "measured TPOT s": measured,
                    "simulated TPOT s": said.tpot,
                    "simulated ÷ measured": said.tpot / measured,
                    "measured TTFT s": report["metrics"]["ttft"],
                    "simulated TTFT s": said.ttft,
                    "hit rate": report["decode_hit_rate"],
                    "equal": ", ".join(equal) or "nothing",
                }
                off = abs(said.tpot / measured - 1)
                bench.aim(f"simulator, {name}: off the measured TPOT", off, 0.1)
                bench.aim(f"simulator, {name}: decisions that differ", len(FOUND) - len(equal), 0)
    return {"simulated": rows}


SECTIONS: dict[str, Callable[..., Record]] = {
    section.__name__: section
    for section in (resident, few_bits, limit, peers, throttled, memory, simulated)
}


def run(
    only: Iterable[str] = tuple(SECTIONS),
    folder: str | Path | None = None,
    rounds: int = 3,
    prompt: int = 128,
    decode: int = 32,
    quick: bool = False,
    long: bool = False,
    python: Sequence[str] = (),
    spec: MoESpec = SPEC,
) -> Record:
    if unknown := [name for name in only if name not in SECTIONS]:
        raise ValueError(
            f"there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}"
        )
    engines = interpreters(python)
    if quick:
        rounds = 1
        decode = 8
    with place_of(folder, spec) as (place, words):
        bench = Experiment(spec, place, prompt, decode, rounds, engines)
        bench.prepare(external=bool({"resident", "few_bits", "peers"} & set(only)))
        bench.warm()
        found: Record = {
            "conditions": {
                "file system": words,
                "tokens": f"random and given; prompts of {prompt}, then {decode} more, batch 1",
                "rounds": rounds,
            }
        }
        for name in only:
            try:
                more = {"tokens": 1000} if name == "memory" and long else {}
                found |= SECTIONS[name](bench, **more)
            except KeyboardInterrupt:  # sections take minutes: what is done is kept
                found["conditions"]["stopped in"] = name
                break
    return found | {"aims": bench.aims}


MEASURES = ENGINE
OPTIONS = {
    "only": (several(one_of(SECTIONS)), "sections"),
    "folder": (None, "where the model is kept, 40 GB, for the next time; else it is temporary"),
    "rounds": (whole(1), "of every engine"),
    "prompt": (whole(1), "tokens of a prompt"),
    "decode": (whole(1), "tokens after it"),
    "quick": ({"action": "store_true"}, "one round of 8 tokens: whether all of it runs"),
    "long": ({"action": "store_true"}, "watch the memory over 1,000 tokens instead of 64"),
    "python": PYTHON,
}
