"""Everything against everything: techniques alone and together, and other engines, at several
budgets and disk rates.

All take the same tokens on the same model, for each context (tokens of the prompt) and batch
(sequences at a time). A configuration is opened anew for each disk rate, in a process of its own
with a budget's memory, in interleaved rounds (`moelab.bench.harness`); other engines have the same
memory limit, page cache included, but only our reader can be throttled, so they run at the disk's
own rate. No speed is shown before the output is: what computes as transformers does must agree with
its eager experts bit for bit, and what does not says the Kullback-Leibler divergence of its
next-token distribution from theirs, in nats a token. Ratios are of the same tokens, their intervals
over tokens: another run, on another day's disk, may differ by more. Limits follow from a run's own
bytes and times and the best rate at which it read whole experts: Σ over layers of (attention,
router + max(read, decode, compute)) on demand, the longest of these sums when prefetching; Belady's
hits; the bytes that must be in memory. `prefetch` does so in every token: what the technique gives.
An engine finds out where it pays, and leaves it where it does not
(`moelab.offloading.prefetch_gate`)."""

from __future__ import annotations

import os
import random
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from moelab import intervals
from moelab.arguments import number, several, whole
from moelab.bench import ENGINE, measure
from moelab.bench.engine import replayed
from moelab.bench.harness import GGUF, PROCESS, Arm, EngineBenchmark, interpreters, mean
from moelab.bench.machine import disk
from moelab.bench.peers import RAPL, joules
from moelab.offloading.budget import kv_bytes, parse_budget
from moelab.records import Numbers, Record, Records
from moelab.results import load_average
from moelab.specs import MoESpec
from moelab.store import fewbit

SPEC = MoESpec(
    "synthetic-0.5GB",
    "qwen3_moe",
    5,
    tuple(range(5)),
    32,
    4,
    1024,
    512,
    vocab=8192,
    heads=16,
    kv_heads=4,
    head_dim=64,
)
BASE, RESIDENT = "on demand", "transformers resident"
EXTERNAL = (
    *(f"llama.cpp {kind} mmap" for kind in GGUF),
    "ftllm",
)  # of Qwen3-MoE, one sequence at a time
LOSSLESS = 1e-3  # nats a token, below which rounding is no loss: fast ≠ eager in the last bits
PROBE = 8  # experts read to measure the disk, each time
BUDGETED = "LRU baseline", "ftllm"  # keep to a number of bytes themselves
NORMALISES = (
    "llama.cpp BF16 mmap"  # routing weights, whatever the model does: other logits at the same cost
)
Rows = Records  # configuration → figures
Sections = Mapping[str, Rows]  # "25 % of experts, 250 MB/s" → its rows


class Technique(NamedTuple):
    """One thing that a configuration does: whose it is (a key of the ledger's sources, or
    "moelab"), and how."""

    source: str
    options: Record


TECHNIQUES = {
    "huffman": Technique("zipmoe", {"codec": "huffman"}),
    "kept compressed": Technique("zipmoe", {"codec": "huffman", "compressed": True, "staging": 3}),
    "prefetch": Technique("speculating-experts", {"predictor": "router"}),
    "mxfp4": Technique("neuron-moe", {"codec": "mxfp4"}),
    "blockwise": Technique("neuron-moe", {"executor": "blockwise"}),
    "static": Technique("npumoe", {"executor": "tiered"}),
    "bf12": Technique("moelab", {"codec": "bf12"}),
    "fast": Technique("moelab", {"executor": "fast"}),
}
#: what is run: BASE, or techniques with " + " between them
ARMS = (
    BASE,
    "huffman",
    "prefetch",
    "huffman + prefetch",
    "bf12",
    "fast",
    "bf12 + fast",
    "bf12 + prefetch",
    "fast + prefetch",
    "bf12 + fast + prefetch",
    "mxfp4 + fast",
)


def parts(arm: str) -> list[str]:
    """The techniques of a configuration. ValueError for one that there is not, and two that exclude
    each other."""
    names = [] if arm == BASE else [name.strip() for name in arm.split("+")]
    if unknown := [name for name in names if name not in TECHNIQUES]:
        raise ValueError(
            f"{arm!r} names {', '.join(unknown)}; a configuration is {BASE!r} or, with + "
            f"between them, some of {', '.join(TECHNIQUES)}"
        )
    for one, other in combinations(names, 2):
        if both := TECHNIQUES[one].options.keys() & TECHNIQUES[other].options.keys():
            raise ValueError(
                f"{one} and {other} exclude each other: both decide on the {', '.join(both)}"
            )
    return names


def options_of(arm: str) -> Record:
    """A configuration's arguments of `EngineBenchmark.moelab`."""
    given = {"codec": "raw"}
    for name in parts(arm):
        given |= TECHNIQUES[name].options
    return given


def own(bench: EngineBenchmark, arm: str, share: float, limit: int, rates: Sequence[float]) -> Arm:
    """A configuration of ours with a budget, opened once for each disk rate; 0: the disk's own."""
    given = options_of(arm)
    name, options, limit = bench.moelab(
        budget=int(share * bench.spec.experts_bytes), limit=limit, **given
    )
    options["ungated"] = "predictor" in given
    each = [
        {"options": options["options"] | ({"bandwidth": rate} if rate else {})} for rate in rates
    ]
    each[0]["logits"] = str(bench.folder / "logits.npy")
    for i, of in enumerate(each):
        of["trace"] = str(trace(bench, arm, share, i))
    return name, options | {"each": each, "probe": PROBE}, limit


def trace(bench: EngineBenchmark, arm: str, share: float, rate: int) -> Path:
    """Where a configuration leaves its steps."""
    return (
        bench.folder / f"steps of {arm}, {share}, {rate}, {bench.prompt}, {len(bench.tokens)}.json"
    )


def absent(external: bool, batch: int = 1) -> dict[str, str]:
    """Engines that are not run at all, and why."""
    why = (
        "takes one sequence at a time here"
        if batch > 1
        else "needs a Qwen3-MoE checkpoint and a process of its own"
    )
    return dict.fromkeys(
        ("MoE-Infinity", "DeepSpeed ZeRO-3"), "needs an NVIDIA GPU; this bench runs on the CPU"
    ) | ({} if external and batch == 1 else dict.fromkeys(EXTERNAL, why))


def divergence(logits: np.ndarray, reference: np.ndarray) -> float:
    """Mean over steps of KL(reference ‖ found) in nats, of logits [steps, V]: 0 where both predict
    alike."""
    p, q = (of.astype(np.float64) - of.max(1, keepdims=True) for of in (reference, logits))
    p, q = (of - np.log(np.exp(of).sum(1, keepdims=True)) for of in (p, q))
    return max(float((np.exp(p) * (p - q)).sum(1).mean()), 0.0)


def collect(bench: EngineBenchmark, plan: Mapping[str, Arm]) -> dict[str, list[list[Record]]]:
    """Reports of every configuration: [rounds][rates]. What cannot run is not tried again."""
    reports: dict[str, list[list[Record]]] = {name: [] for name in plan}
    kept = bench.folder / "logits.npy"
    for _, name in measure.turns(list(plan), bench.rounds, "end to end"):
        if any("result" in one for found in reports[name] for one in found):
            continue
        kept.unlink(missing_ok=True)
        found = bench.report(plan[name])
        found = found if isinstance(found, list) else [found]
        if kept.exists():
            found[0]["kl"] = divergence(np.load(kept), bench.reference["logits"])
        reports[name].append(found)
    return reports


def row(
    bench: EngineBenchmark, arm: Arm, rounds: list[list[Record]], rate: int, base: float | None
) -> Record:
    """A configuration's figures at a rate, each beside its limit: medians over all tokens of all
    rounds."""
    found = [of[rate if len(of) > 1 else 0] for of in rounds]
    if "result" in found[-1]:
        return {"result": found[-1]["result"]}
    output = bench.judge(arm, found)
    if "≠" in output:
        return {"result": f"{output}: its speed does not count"}
    tpot, batch = [seconds for report in found for seconds in report["tpot_s"]], len(bench.tokens)
    middle, decode = median(tpot), bench.decode * batch
    ttft, energy = (
        median(report["ttft_s"][0] for report in found),
        mean(found, "decode_joules", decode),
    )
    figures = {
        "TTFT s": ttft,
        "TPOT s": middle,
        "each token s": tpot,
        f"÷ {BASE}": base and middle / base,
        "tokens/s": batch * len(tpot) / sum(tpot),
        "MB a token": mean(found, "decode_read_bytes", 1e6 * decode),
        "hit rate": mean(found, "decode_hit_rate"),
        "CPU s a token": mean(found, "decode_cpu_s", decode),
        "J a token": energy if (energy or 0) > 0 else None,
        "peak GB": None if bench.here else mean(found, "peak_rss_bytes", 1e9),
        "KL": mean([of[0] for of in rounds], "kl"),
        "output": output,
        "result": found[-1]["limit"],
    }
    if "metrics" in found[-1]:
        figures |= beside_limits(arm, found, ttft, middle)
    return {name: value for name, value in figures.items() if value is not None}


def beside_limits(arm: Arm, found: list[Record], ttft: float, tpot: float) -> Record:
    """What our own engine's reports say of limits, of what waits, and of what overlaps."""
    ran = [report["metrics"] for report in found]
    reading = median(
        (of["read_bytes_per_prefill_token"] or 0) * of["prefill_tokens"] / report["read_rate"]
        for of, report in zip(ran, found)
    )
    least = median(
        report["overlapped_s" if arm[1]["predictor"] else "on_demand_s"] for report in found
    )
    bytes_ = sum(found[-1][key] for key in ("budget_bytes", "others_bytes", "kv_bytes"))
    best = found[-1]["belady_hit_rate"]
    return {
        "MB a token": mean(ran, "read_bytes_per_token", 1e6),
        "TTFT limit s": reading,
        "TTFT ÷ limit": ttft / reading if reading else None,
        "TPOT limit s": least,
        "TPOT ÷ limit": measure.multiple(tpot, least),
        "hits ÷ Belady's": measure.share(mean(ran, "hit_rate") / best) if best else None,
        "stall ms": mean(ran, "stall_per_step", 1e-3),
        "overlap": mean(ran, "overlap_efficiency"),
        "least GB": bytes_ / 1e9,
    }


def predict(
    bench: EngineBenchmark,
    arms: Iterable[str],
    share: float,
    rates: Sequence[float],
    sections: Sections,
    axes: Sequence[str],
    profiles: dict[Any, Any],
) -> None:
    """Beside the measured TPOT, what the simulator says for the same steps and this machine's
    profile; of what reads on demand by the executors that the profile knows. `profiles` keeps what
    was profiled: no budget changes it."""
    from moelab.bench.profile import profile

    for arm in arms:
        given = options_of(arm)
        if given.keys() - {"codec", "executor"} or given.get("executor", "fast") != "fast":
            continue
        for i, rate in enumerate(rates):
            figures = sections[section(share, rate, axes)][arm]
            if "TPOT s" in figures:
                if (key := (*given.values(), rate)) not in profiles:
                    profiles[key] = profile(
                        bench.folder / given["codec"],
                        seconds=0.5,
                        executor=given.get("executor", "exact"),
                        **({"bandwidth": rate} if rate else {}),
                    )
                said, _ = replayed(trace(bench, arm, share, i), bench.spec, profiles[key])
                figures |= {
                    "simulated TPOT s": said.tpot,
                    "simulated ÷ measured": said.tpot / figures["TPOT s"],
                }


def over(row: Mapping[str, Any], base: Mapping[str, Any], name: str, before: str = "") -> Numbers:
    """TPOT of a row over another's, median over the tokens, which are the same, and its 95 %
    interval: three cells."""
    ratios = [a / b for a, b in zip(row["each token s"], base["each token s"], strict=True)]
    return dict(zip((before + name, f"{before}95 % from", f"{before}to"), intervals.median(ratios)))


def together(sections: Sections) -> Rows:
    """Of two techniques of different sources, where both together are faster than each alone beyond
    the interval, and why: bytes read and time waited a token, of the two and of both."""
    found: Rows = {}
    for title, rows in sections.items():
        for arm in filter(names_us, rows):
            names = parts(arm)
            if len(names) == 2 == len({TECHNIQUES[name].source for name in names}) and all(
                "TPOT s" in rows.get(name, {}) for name in (*names, arm)
            ):
                alone, both = [rows[name] for name in names], rows[arm]
                gain = over(both, min(alone, key=lambda of: of["TPOT s"]), "÷ better of both")
                found[f"{title}: {arm}"] = (
                    gain
                    | {"beats each": gain["to"] < 1}
                    | {
                        f"{what}, {name}": of[what]
                        for what in ("MB a token", "stall ms")
                        for name, of in ((names[0], alone[0]), (names[1], alone[1]), ("both", both))
                    }
                )
    return found


def ablation(sections: Sections) -> Rows:
    """What the configuration of most techniques loses without each of them, and without all: TPOT ÷
    its own."""
    found: Rows = {}
    for title, rows in sections.items():
        there = {
            frozenset(parts(arm)): of
            for arm, of in rows.items()
            if names_us(arm) and "TPOT s" in of
        }
        whole_ = max(there, key=len, default=frozenset())
        less = {f"without {name}": whole_ - {name} for name in sorted(whole_)} | {
            "with none": frozenset()
        }
        found |= {
            f"{name}, {title}": over(there[of], there[whole_], f"÷ {' + '.join(sorted(whole_))}")
            for name, of in less.items()
            if of in there and of != whole_
        }
    return found


def titled(results: Mapping[str, Any]) -> dict[str, Rows]:
    """The tables of budgets and rates among a bench's results."""
    return {title: rows for title, rows in results.items() if " of experts, " in title}


def winners(sections: Sections) -> Rows:
    """Of each table the fastest of ours and of the other engines that fit the budget: lossless, and
    at any loss."""
    found: Rows = {}
    for title, rows in sections.items():
        ran = {
            name: of
            for name, of in rows.items()
            if "TPOT s" in of
            and name != RESIDENT
            and (names_us(name) or name in BUDGETED or "nothing was limited" not in of["result"])
        }
        found[title] = {}
        exact = {
            name: of
            for name, of in ran.items()
            if not rounds_weights(name) and (of.get("KL", 0) < LOSSLESS or name == NORMALISES)
        }
        for kind, among in (("lossless", exact), ("any", ran)):
            best = []
            for whose in ("ours", "others"):
                if of := [name for name in among if names_us(name) == (whose == "ours")]:
                    best.append(name := min(of, key=lambda name: among[name]["TPOT s"]))
                    found[title] |= {
                        f"{kind}, {whose}": name,
                        f"{kind}, {whose}, ms": 1e3 * among[name]["TPOT s"],
                    }
            if len(best) == 2:
                found[title] |= over(*(among[name] for name in best), "ours ÷ others", f"{kind}: ")
    return found


def foretold(sections: Sections) -> Rows:
    """What was simulated, beside what was measured."""
    return {
        f"{name}; {title}": {
            key: row[key] for key in ("TPOT s", "simulated TPOT s", "simulated ÷ measured")
        }
        for title, rows in sections.items()
        for name, row in rows.items()
        if "simulated ÷ measured" in row
    }


def tpots(sections: Sections) -> list[Record]:
    """Milliseconds a step of every configuration and engine that ran, a column for each table."""
    names = dict.fromkeys(
        name for rows in sections.values() for name, row in rows.items() if "TPOT s" in row
    )
    return [
        {"": name}
        | {
            title: 1e3 * rows[name]["TPOT s"] if "TPOT s" in rows.get(name, {}) else None
            for title, rows in sections.items()
        }
        for name in names
    ]


def names_us(name: str) -> bool:
    """Whether a row is a configuration of ours, not another engine."""
    return name == BASE or all(part.strip() in TECHNIQUES for part in name.split("+"))


def rounds_weights(name: str) -> bool:
    """Whether a configuration of ours stores weights in few bits: a random model's KL does not
    tell."""
    return names_us(name) and options_of(name)["codec"] in fewbit.FORMATS


def front(rows: Mapping[str, Mapping[str, Any]], x: str, y: str) -> list[str]:
    """The names of those that no other is at least as good as in both, and better in one; sorted by
    x. What lacks one of them is left out."""
    points = {
        name: (of[x], of[y])
        for name, of in rows.items()
        if of.get(x) is not None and of.get(y) is not None
    }
    best = [
        name
        for name, (a, b) in points.items()
        if not any(c <= a and d <= b and (c, d) != (a, b) for c, d in points.values())
    ]
    return sorted(best, key=points.__getitem__)


def trades(sections: Sections) -> dict[str, tuple[dict[str, tuple[float, float]], list[str]]]:
    """{axis: ({name: (x, TPOT s)}, names on the `front`)} at the first of the disks' rates: of the
    memory that is needed, at all budgets, and of the loss, at the first one. `RESIDENT` keeps to no
    budget and is left out."""
    rate = next(iter(sections)).split(", ")[1]
    there = {
        title.replace(f", {rate}", ""): rows
        for title, rows in sections.items()
        if title.split(", ")[1] == rate
    }
    memory = {
        f"{name}, {title.replace(' of experts', '')}": row
        for title, rows in there.items()
        for name, row in rows.items()
    }
    small = max((row.get("least GB") or 0 for row in memory.values()), default=0) < 0.1
    unit, scale, found = *(("MB", 1e3) if small else ("GB", 1)), {}
    for axis, x, times, every in (
        (f"memory needed ({unit})", "least GB", scale, memory),
        ("KL (nats a token)", "KL", 1, next(iter(there.values()))),
    ):
        rows = {name: row for name, row in every.items() if name != RESIDENT}
        points = {
            name: (times * row[x], row["TPOT s"])
            for name, row in rows.items()
            if row.get(x) is not None and "TPOT s" in row
        }
        found[axis] = points, front(rows, x, "TPOT s")
    return found


def run(
    arms: Iterable[str] = ARMS,
    budgets: Sequence[float | str] = (0.25, 0.5, 0.75),
    rates: Sequence[float] = (250, 1000, 0),
    rounds: int = 1,
    contexts: Sequence[int] = (16,),
    decode: int = 16,
    batches: Sequence[int] = (1,),
    seed: int = 0,
    model: str | None = None,
    folder: str | Path | None = None,
    alone: bool = False,
    here: bool = False,
    simulated: bool = True,
    python: Sequence[str] = (),
    spec: MoESpec = SPEC,
) -> Record:
    arms = list(dict.fromkeys([BASE, *arms]))
    forms = {options_of(arm)["codec"] for arm in arms}
    load, engines = load_average(), interpreters(python)
    sections, profiles = {}, {}
    with measure.working(folder) as place:
        count = max(batches) * (max(contexts) + decode)
        source, tokens = None, random.Random(seed).choices(range(spec.vocab), k=count)
        if model:
            source, spec, tokens = text_for(model, count, seed)
        conditions = {
            "model": f"{spec.name}, {spec.experts_bytes / 1e9:.2f} GB of experts",
            "tokens": f"{'of a text' if model else 'random'}, given; contexts of "
            f"{_words(contexts)}, then {decode} more; batches of {_words(batches)}",
            **_about(here, rounds),
            "load average before": load,
            "cores": os.cpu_count(),
        }
        place.mkdir(parents=True, exist_ok=True)
        with _disk(place, spec, here) as (place, conditions["file system"]):
            if source:
                _use_model(place, source, folder)
            bench = EngineBenchmark(spec, place, 0, decode, rounds, engines, here=here, prompts=1)
            qwen = spec.model_type == "qwen3_moe" and not here and not alone
            bench.prepare(external=qwen, forms=sorted(forms))
            try:
                for context, batch in product(contexts, batches):
                    axes = [f"context {context}"] * (len(contexts) > 1)
                    axes += [f"batch {batch}"] * (len(batches) > 1)
                    n = context + decode
                    rows = [tokens[i * n :][:n] for i in range(batch)]
                    one = replace(bench, prompt=context, tokens=rows)
                    given = (arms, budgets, [1e6 * rate for rate in rates], alone, qwen, simulated)
                    for found in tables(one, *given, axes, profiles):
                        sections |= found
            except KeyboardInterrupt:  # it takes minutes: what is done is kept
                of = len(budgets) * len(rates) * len(contexts) * len(batches)
                conditions["stopped"] = f"after {len(sections)} of {of} tables"
    return {
        "conditions": conditions,
        **sections,
        "together (two sources)": together(sections),
        "ablation (TPOT ÷ that of all)": ablation(sections),
    }


def _about(here: bool, rounds: int) -> Record:
    """What is measured, and how."""
    return {
        "times": "TTFT, TPOT and stall of a step, which gives each sequence a token; tokens/s, and "
        "what is a token's, of all sequences",
        "processes": "one for all" if here else "one for each configuration and budget",
        "rounds": rounds,
        "energy": "processor packages (RAPL) and NVIDIA GPUs (NVML), as far as they can be read"
        if joules()
        else f"none can be read from {RAPL} or by NVML; Apple's is not read",
    }


def _use_model(place: Path, source: Path, folder: str | Path | None) -> None:
    """Link a given checkpoint into the working folder; ValueError if another one is there."""
    if not (place / "model").exists():
        (place / "model").symlink_to(source.resolve(), target_is_directory=True)
    if not (place / "model").samefile(source):
        raise ValueError(f"{folder} has another model's forms; give another folder")


def _disk(place: Path, spec: MoESpec, here: bool) -> AbstractContextManager[tuple[Path, str]]:
    if here:
        return nullcontext((place, "as it is"))
    return disk(place, 9 * spec.experts_bytes + 3e9)


def _words(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _reference(bench: EngineBenchmark, engine: str, options: Record) -> Record:
    """What transformers' own experts report."""
    reference = bench.report((engine, options, None))
    if "result" in reference:
        raise RuntimeError(
            f"transformers' eager experts could not be run to compare with: {reference['result']}"
        )
    return reference


def tables(
    bench: EngineBenchmark,
    arms: Sequence[str],
    budgets: Sequence[float | str],
    rates: Sequence[float],
    alone: bool,
    external: bool,
    simulated: bool,
    axes: Sequence[str],
    profiles: dict[Any, Any],
) -> Iterator[dict[str, Rows]]:
    """Everything of a context and a batch: the tables of all rates as soon as a budget has run;
    `axes` end titles."""
    spec, kept, batch = bench.spec, bench.folder / "logits.npy", len(bench.tokens)
    more = kv_bytes(spec, batch * (bench.prompt + bench.decode)) + PROCESS
    sizes = [parse_budget(budget, spec.experts_bytes, bench.dense_bytes) for budget in budgets]
    room = max(sizes) + PROCESS
    fits = not bench.here or spec.experts_bytes <= room
    engine, options = ("eager", {}) if fits else ("mapped", {"opened": "external"})
    reference = _reference(bench, engine, options | {"logits": str(kept)})
    bench.reference = reference | {"logits": np.load(kept)}
    why_not = {} if alone else absent(external, batch)
    gone = {name: {"result": why} for name, why in why_not.items()}
    resident = {RESIDENT: ("eager", {}, None)} if fits and not alone else {}
    unfit = {}
    if RESIDENT not in resident and not alone:
        why = (
            f"all experts take {spec.experts_bytes / 1e9:.2f} GB, and this process has "
            f"{room / 1e9:.2f} GB for them"
        )
        unfit = {RESIDENT: {"result": why}}
    for share in (size / spec.experts_bytes for size in sizes):
        budget = int(share * spec.experts_bytes)
        limit = int(budget + bench.dense_bytes + more)
        ours = {arm: own(bench, arm, share, limit, rates) for arm in arms}
        others = {} if alone else bench.others(budget, limit)
        others = {
            name: (engine, options | {"logits": str(kept)}, most)
            for name, (engine, options, most) in others.items()
            if name not in gone
        }
        reports, found = collect(bench, ours | others) | {RESIDENT: [[reference | {"kl": 0.0}]]}, {}
        for i, rate in enumerate(rates):
            base = row(bench, ours[BASE], reports[BASE], i, None).get("TPOT s")
            peers, missing = ({}, {}) if rate else (others, gone)  # they read at the disk's rate
            found[section(share, rate, axes)] = {
                name: row(bench, arm, reports[name], i, base)
                for name, arm in (ours | peers | resident).items()
            }
            found[section(share, rate, axes)] |= missing | unfit
        if simulated:
            predict(bench, arms, share, rates, found, axes, profiles)
        yield found


def section(share: float, rate: float, axes: Sequence[str] = ()) -> str:
    """The title of a table."""
    return ", ".join(
        [f"{share:.0%} of experts", f"{rate / 1e6:g} MB/s" if rate else "the disk as it is", *axes]
    )


def text_for(model: str, count: int, seed: int = 0) -> tuple[Path, MoESpec, list[int]]:
    """A checkpoint's folder and spec, and so many tokens of prose by its own tokenizer."""
    from moelab.checkpoint import opening
    from moelab.checkpoint.checkpoint import Checkpoint
    from moelab.datasets import prompts

    checkpoint = Checkpoint.at(model)
    opening.require_tokenizer(checkpoint)
    opened = opening.open_checkpoint(checkpoint, experts="external")
    text = "\n".join(
        prompt.text for prompt in prompts("prose", 2 + count // 64, tokens=128, seed=seed)
    )
    ids = opened.tokenizer(text)["input_ids"]
    if len(ids) < count:
        raise ValueError(
            f"{count} tokens are needed, and the text has {len(ids)}; ask for shorter prompts"
        )
    return checkpoint.folder, opened.spec, ids[:count]


def _arm(text: str) -> str:
    """A configuration, read from a command line."""
    try:
        parts(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


MEASURES = ENGINE
OPTIONS = {
    "arms": (
        several(_arm),
        "configurations: techniques, with + between those that go together: "
        + ", ".join(TECHNIQUES),
    ),
    "budgets": (
        several(number(above=0, most=1)),
        "memory for experts, shares of what all of them take",
    ),
    "rates": (several(number(0)), "of the disk, MB/s, by throttling our reader; 0: as it is"),
    "rounds": (whole(1), "of every configuration"),
    "contexts": (several(whole(2)), "tokens of a prompt"),
    "decode": (whole(1), "tokens after it"),
    "batches": (several(whole(1)), "sequences at a time"),
    "seed": (whole(), "picks the tokens"),
    "model": (None, "your own: a checkpoint's folder or a hub id"),
    "folder": (
        None,
        "where the model's forms are kept for the next time, ten times its size; else they "
        "are temporary",
    ),
    "alone": ({"action": "store_true"}, "without the other engines"),
    "simulated": (
        {"action": BooleanOptionalAction},
        "also what the simulator says, of what reads on demand",
    ),
    "here": (
        {"action": "store_true"},
        "everything in one process: fast, without limits and peaks of memory",
    ),
    "python": (
        {"action": "append", "metavar": "ENGINE=INTERPRETER"},
        "the Python that has an engine installed, such as llama.cpp=/opt/peers/bin/python",
    ),
}
