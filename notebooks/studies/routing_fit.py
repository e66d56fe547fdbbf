"""The model of routing on real traces: fitted to one part of each, judged on another.

`moelab.simulation.routing` has eight numbers. They are fitted to every other text of a trace and
judged on the texts between; of a trace of fewer than ten texts, to every other layer and judged on
the layers between, which says less: the text is the same. `--by texts` divides those, too, by their
few texts, or the tokens of a single one, whose halves differ much by themselves. A draw has the lengths of the judged
texts; the mean of several draws is compared, in points of a percent. What the two parts of the
trace differ by is shown beside it: less than that is luck.

The traces are other people's, and not all are here: `--traces DIR` has their files as .npz in the
arrays' form (`moelab.trace.arrays`), in folders named as in `TRACES`. `--cards DIR` writes the fit to
the whole trace as [routing] into the cards in DIR."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moelab.base.arguments import folder, one_of, several
from moelab.base.files import write_text
from moelab.base.progress import progress
from moelab.simulation.routing import Routing, fit
from moelab.trace import RoutingTrace, load
from moelab.trace.statistics import statistics

#: texts from which on they are divided; fewer: layers are
TEXTS = 10
#: points that a statistic may be off
BAR = 3


class Trace(NamedTuple):
    """file, in DIR; task: of its `sequence_task`, "" for all; card: the model's, if its [routing] is
    fitted to the whole of this trace; source: where the trace comes from, and its licence."""

    file: str
    source: str
    task: str = ""
    card: str = ""


EDGE = (
    "github.com/Helldez/BigMoeOnEdge at 2d4f2b11, docs/bench-data/2026-07-15-route-trace "
    "(Apache-2.0): one chat answer, K lowered to "
)
ESFT = "github.com/deepseek-ai/ESFT at 579a7711, results/expert_scores (code MIT), prefill of "
TRACES = {
    "Qwen3-30B-A3B": Trace("bigmoeonedge/qwen.npz", EDGE + "6", card="Qwen3-30B-A3B"),
    "Gemma-4-26B-A4B": Trace("bigmoeonedge/gemma.npz", EDGE + "6", card="Gemma-4-26B-A4B"),
    "gpt-oss-120b": Trace("bigmoeonedge/gptoss.npz", EDGE + "2", card="GPT-OSS-120B"),
    "gpt-oss-20b": Trace(
        "gpt-oss-20b-fingerprinting/trace.npz",
        "github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting at 72b368f6, data "
        "(Apache-2.0): answers to questions of eleven benchmarks",
        card="GPT-OSS-20B",
    ),
    "DeepSeek-V2-Lite": Trace(
        "esft-deepseek-v2-lite/trace.npz",
        ESFT + "intent, law, summary, translation",
        card="DeepSeek-V2-Lite",
    ),
    **{
        f"DeepSeek-V2-Lite {task}": Trace("esft-deepseek-v2-lite/trace.npz", ESFT + task, task)
        for task in ("intent", "law", "summary", "translation")
    },
    "DeepSeek-V2-Lite-Chat": Trace(
        "moe-beyond-deepseek-v2-lite/trace.npz",
        "github.com/ngavhane/moe-beyond at 4dca2eac, training_data_eamc (no licence): chat prompts",
        card="DeepSeek-V2-Lite-Chat",
    ),
    "Mixtral-8x7B": Trace(
        "speculative-moe-mixtral/trace.npz",
        "github.com/Mario928/speculative-moe at 216e26eb, routing_data_collected (academic "
        "purposes): answers to four tasks of code and mathematics",
        card="Mixtral-8x7B",
    ),
    "OLMoE-1B-7B": Trace(
        "olmoe-mmlu-logits/trace.npz",
        "github.com/danielfang001/moe-profiler at 3123ae55, logit_analysis (no licence): five "
        "questions of MMLU, prefill",
        card="OLMoE-1B-7B",
    ),
    "Switch-Base-8": Trace(
        "stratamoe-switch-base-8/trace.npz",
        "github.com/Labeeb2339/stratamoe-lab at 08bfd806, evidence/switch-base-8 (Apache-2.0): ten "
        "prompts, encoder",
    ),
    "Qwen1.5-MoE-A2.7B": Trace(
        "qwen1.5-moe-five-layers/trace.npz",
        "github.com/weiran0129/vLLM-MoE-Logger at 2c3c87c1, Logs (no licence): five layers, rows "
        "of a batch of 25 in the order of the batch",
    ),
}

OPTIONS = {
    "traces": ({"type": folder, "metavar": "DIR"}, "where the files of traces are"),
    "only": (several(one_of(TRACES)), "names of traces"),
    "by": ({"choices": ("layers", "texts")}, "how a trace of few texts is divided"),
    "cards": ({"metavar": "DIR"}, "cards to write the fits to"),
}
KIND = "simulated"
MEASURES = ("moelab/simulation", "moelab/trace")


def run(
    traces: str | Path, only: Sequence[str] = tuple(TRACES), by: str = "layers", cards: str = ""
) -> dict[str, Any]:
    """Sections "held out", its two sides, and, of what is on cards, "fits"; of a trace divided
    `by` texts, its row alone."""
    found: dict[str, Any] = {
        "held out": {},
        "trace (exact)": {},
        "drawn (simulated)": {},
        "fits": {},
    }
    for name in progress(only, "fitting", unit="trace"):
        about = TRACES[name]
        trace, digest = read(Path(traces) / about.file, about.task)
        known, unseen, divided = parts(trace, by)
        name += f", by {by}" * (by != "layers")
        there, drawn = told(unseen), mean_told(fit(known), unseen)
        apart = {what: drawn[what] - there[what] for what in there}
        halves = told(known)
        worst = max(apart, key=lambda what: abs(apart[what]))
        found["held out"][name] = {
            "divided by": divided,
            "tokens": len(unseen),
            f"of {len(apart)} within {BAR}": sum(bool(abs(off) <= BAR) for off in apart.values()),
            "worst": worst,
            "off %": float(apart[worst]),
            "parts differ %": max(abs(halves[what] - there[what]) for what in there),
        }
        found["trace (exact)"][name] = there
        found["drawn (simulated)"][name] = drawn
        if not about.card or by != "layers":
            continue
        whole = fit(trace)
        found["fits"][name] = asdict(whole) | {"tokens": len(trace), "sha256": digest[:16]}
        if cards:
            off = abs(apart[worst])
            write_card(Path(cards) / f"{about.card}.toml", whole, about, len(trace), divided, off)
    return found


def read(path: Path, task: str = "") -> tuple[RoutingTrace, str]:
    """(the trace, or the sequences of a task of it; the file's digest)."""
    trace = load(path)
    if task:
        tasks = np.load(path)["sequence_task"]
        trace = trace.select(torch.from_numpy(tasks == task)[trace.sequence.long()])
    return trace, hashlib.sha256(path.read_bytes()).hexdigest()


def parts(trace: RoutingTrace, by: str = "layers") -> tuple[RoutingTrace, RoutingTrace, str]:
    """(to fit, to judge, what was divided)."""
    texts, of = trace.sequence.unique(return_inverse=True)
    if len(texts) >= TEXTS or by == "texts" and len(texts) > 1:
        return trace.select(of % 2 == 0), trace.select(of % 2 == 1), "texts"
    if by == "texts":
        first = torch.arange(len(trace)) < len(trace) // 2
        return trace.select(first), trace.select(~first), "tokens"
    return layers(trace, 0), layers(trace, 1), "layers"


def layers(trace: RoutingTrace, first: int) -> RoutingTrace:
    """Every other layer."""
    spec = replace(trace.spec, moe_layers=trace.spec.moe_layers[first::2])
    ids, weights = trace.ids[:, first::2], trace.weights[:, first::2]
    return replace(trace, ids=ids, weights=weights, spec=spec)


def told(trace: RoutingTrace) -> dict[str, float]:
    """The statistics that are judged, in percent; entropy of what is possible."""
    found = statistics(trace)
    hits = {
        f"{policy} at {100 * share:.0f} %": 100 * rate
        for policy in ("lru", "lfu", "belady")
        for share, rate in zip(found.shares, found.hits[policy])
    }
    entropy = found.entropy / log2(trace.spec.E)
    others = {"reuse": found.reuse, "entropy": entropy, "next layer": found.next_layer}
    hits |= {f"{what} %": 100 * value for what, value in others.items()}
    return {what: float(value) for what, value in hits.items()}


def mean_told(routing: Routing, like: RoutingTrace) -> dict[str, float]:
    """`told`, the mean of draws of the same texts, of twelve layers at most: they are drawn alike."""
    lengths = [n for n in like.sequence.bincount().tolist() if n]
    spec = replace(like.spec, moe_layers=like.spec.moe_layers[:12])
    seeds = range(100, 100 + min(max(6000 // len(like), 3), 40))
    draws = [told(routing.trace(spec, lengths, seed)) for seed in seeds]
    return {what: float(np.mean([draw[what] for draw in draws])) for what in draws[0]}


def write_card(
    path: Path, routing: Routing, about: Trace, tokens: int, by: str, off: float
) -> None:
    """[routing] of a card, in place of one that it has."""
    card = re.sub(r"\n*\[routing\].*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    figures = "\n".join(f"{name} = {value:.4g}" for name, value in asdict(routing).items())
    source = (
        f"moelab bench routing_fit --cards, on {tokens:,} tokens of {about.source}; on {by} held out "
        f"no statistic is off by more than {off:.1f} points"
    )
    write_text(
        path, f'{card.rstrip()}\n\n[routing]\n{figures}\nkind = "fitted"\nsource = "{source}"\n'
    )
