"""Everything against everything: techniques alone and together, and other engines, at several
budgets and disk rates.

All take the same tokens on the same model, for each context (tokens of the prompt) and batch
(sequences at a time). A configuration runs in a process of its own with a budget's memory, in
interleaved rounds (`grid`); other engines have the same memory limit, page cache
included, but for llama.cpp, which needs no torch and has less by that. Only our reader can be
throttled, so they run at the disk's own rate. No speed is shown before the output is: what computes
as transformers does must agree with its eager experts bit for bit, and what does not says the
Kullback-Leibler divergence of its next-token distribution from theirs, in nats a token. Ratios are
of the same tokens, their intervals over tokens: another run, on another day's disk, may differ by
more. `prefetch` does so in every token: what the technique gives.
An engine finds out where it pays, and leaves it where it does not
(`moelab.offloading.prefetch_gate`)."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from moelab.base.arguments import number, several, whole
from moelab.base.records import Numbers, Record, Records
from moelab.base.specs import MoESpec
from moelab.offloading.budget import kv_bytes, parse_budget

from .grid import (
    PROCESS,
    PYTHON,
    ROUTING,
    Experiment,
    Tables,
    measured,
    place_of,
    synthetic,
)
from .ratios import median
from .timing import ENGINE

SPEC = synthetic("synthetic-0.5GB", 5, 32, 4, 1024, 512)
BASE = "on demand"
RESIDENT = "transformers resident"
#: options of `peers.Moelab` among a technique's; all others are of `open_model`
MOELAB = ("predictor", "compressed", "serial")
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
    "speculate": Technique("speculating-experts", {"speculate": "router"}),
    "serial": Technique("speculating-experts", {"serial": True}),
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
    """A configuration's store, and its options of `open_model` and of `peers.Moelab`."""
    given = {"codec": "raw"}
    for name in parts(arm):
        given |= TECHNIQUES[name].options
    return given


def over(row: Mapping[str, Any], base: Mapping[str, Any], name: str) -> Numbers:
    """TPOT of a row over another's, median over the tokens, which are the same, and its 95 %
    interval: three cells."""
    ratios = [a / b for a, b in zip(row["each token s"], base["each token s"], strict=True)]
    return dict(zip((name, "95 % from", "to"), median(ratios)))


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
                alone = [rows[name] for name in names]
                both = rows[arm]
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


def titled(results: Mapping[str, Any]) -> dict[str, Rows]:
    """The tables of budgets and rates among a bench's results."""
    return {title: rows for title, rows in results.items() if " of experts, " in title}


def names_us(name: str) -> bool:
    """Whether a row is a configuration of ours, not another engine."""
    return name == BASE or all(part.strip() in TECHNIQUES for part in name.split("+"))


def run(
    arms: Iterable[str] = ARMS,
    budgets: Sequence[float | str] = (0.25, 0.5, 0.75),
    rates: Sequence[float] = (250, 1000, 0),
    rounds: int = 1,
    contexts: Sequence[int] = (16,),
    decode: int = 16,
    batches: Sequence[int] = (1,),
    seed: int = 0,
    routing: str = "fitted",
    model: str | None = None,
    folder: str | Path | None = None,
    alone: bool = False,
    here: bool = False,
    python: str | None = None,
    spec: MoESpec = SPEC,
) -> Record:
    arms = list(dict.fromkeys([BASE, *arms]))
    forms = {options_of(arm)["codec"] for arm in arms}
    count = max(batches) * (max(contexts) + decode)
    source = None
    tokens = None
    if model:
        source, spec, tokens = text_for(model, count, seed)
    how = {"loss": True, "simulated": True, "here": here}
    how |= {"routing": routing, "tokens": tokens and [tokens]}
    with place_of(folder, spec, here) as (place, file_system):
        if source:
            _use_model(place, source, folder)
        bench = Experiment(spec, place, count - decode, decode, rounds, python, **how)
        bench.prepare(sorted(forms), external=not alone)
        (tokens,) = bench.tokens

        def tables() -> Tables:
            for context, batch in product(contexts, batches):
                axes = [f"context {context}"] * (len(contexts) > 1)
                axes += [f"batch {batch}"] * (len(batches) > 1)
                n = context + decode
                given = [tokens[i * n :][:n] for i in range(batch)]
                one = replace(bench, prompt=context, tokens=given)
                if batch > 1:
                    one.missing = {"llama.cpp": "takes one sequence at a time here"}
                yield from tables_of(one, arms, budgets, rates, alone, axes)

        conditions = {
            "model": f"{spec.name}, {spec.experts_bytes / 1e9:.2f} GB of experts",
            "tokens": f"{'of a text' if model else bench.routed}, given; contexts of "
            f"{_words(contexts)}, then {decode} more; batches of {_words(batches)}",
            "processes": "one for all" if here else "one for each configuration, budget and rate",
            "rounds": rounds,
            "file system": file_system,
        }
        found = measured(tables(), conditions)
    return found | {"together (two sources)": together(titled(found))}


def tables_of(
    bench: Experiment,
    arms: Sequence[str],
    budgets: Sequence[float | str],
    rates: Sequence[float],
    alone: bool,
    axes: Sequence[str],
) -> Tables:
    """A table for each budget and rate, MB/s or 0, of a context and a batch. Other engines read at
    the disk's own rate only."""
    spec = bench.spec
    more = kv_bytes(spec, len(bench.tokens) * (bench.prompt + bench.decode)) + PROCESS
    for budget, rate in product(budgets, rates):
        size = int(parse_budget(budget, spec.experts_bytes, bench.dense_bytes))
        limit = int(size + bench.dense_bytes + more)
        compared = {}
        for arm in arms:
            given = options_of(arm)
            form = given.pop("codec")
            how = {key: given.pop(key) for key in MOELAB if key in given}
            given |= {"bandwidth": 1e6 * rate} if rate else {}
            how["ungated"] = "predictor" in how
            compared[arm] = bench.moelab(form, size, limit, options=how, **given)
        if not alone and not rate:
            compared |= bench.others(size, limit)
            compared |= {} if bench.here else {RESIDENT: ("eager", {}, None)}
        disk = f"{rate:g} MB/s" if rate else "the disk as it is"
        share = f"{size / spec.experts_bytes:.0%} of experts"
        yield ", ".join([share, disk, *axes]), bench, BASE, compared


def _use_model(place: Path, source: Path, folder: str | Path | None) -> None:
    """Link a given checkpoint into the working folder; ValueError if another one is there."""
    link = place / "model"
    if source.is_file():  # GGUF: a folder of its own
        link.mkdir(exist_ok=True)
        link /= "model.gguf"
    if not link.exists():
        link.symlink_to(source.resolve())
    if not link.samefile(source):
        raise ValueError(f"{folder} has another model's forms; give another folder")


def _words(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def text_for(model: str, count: int, seed: int = 0) -> tuple[Path, MoESpec, list[int]]:
    """A checkpoint's folder and spec, and so many tokens of prose by its own tokenizer."""
    from moelab.checkpoint import opening
    from moelab.checkpoint.checkpoint import Checkpoint
    from moelab.evaluation.questions import prompts

    checkpoint = Checkpoint.at(model)
    opening.require_tokenizer(checkpoint)
    text = "\n".join(
        prompt.text for prompt in prompts("prose", 2 + count // 64, tokens=128, seed=seed)
    )
    ids = opening.load_tokenizer(checkpoint)(text)["input_ids"]
    if len(ids) < count:
        raise ValueError(
            f"{count} tokens are needed, and the text has {len(ids)}; ask for shorter prompts"
        )
    return checkpoint.folder, checkpoint.spec, ids[:count]


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
    "seed": (whole(), "picks the tokens of a text"),
    "routing": ROUTING,
    "model": (None, "your own: a checkpoint's folder or a hub id"),
    "folder": (
        None,
        "where the model's forms are kept for the next time, ten times its size; else they "
        "are temporary",
    ),
    "alone": ({"action": "store_true"}, "without the other engines"),
    "here": (
        {"action": "store_true"},
        "everything in one process: fast, without limits and peaks of memory",
    ),
    "python": PYTHON,
}
