"""Hit rates of every cache policy on recorded traces of real models, and what the traces are like.

The traces are other people's and are not here; `--traces DIR` has their files, by the names below.
Two sections: what `moelab.trace.statistics` says of whole traces, with LRU, LFU, Belady's rule and
the best fixed set by its definitions (one pool, cold, token by token); and all policies that a name
makes, as the engine decides with them, on the first whole texts of each. All numbers are counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moelab.base.arguments import number, several, whole
from moelab.base.files import absolute
from moelab.base.progress import progress
from moelab.base.records import Record, Records
from moelab.bench.arena import play
from moelab.cache.policies import NEEDS, POLICIES
from moelab.trace import RoutingTrace, load
from moelab.trace.statistics import SHARES, hit_rates, statistics


class Folder:
    """A folder from a user, of which results keep the name only."""

    def __init__(self, path: str | Path) -> None:
        self.path = absolute(path)

    def __str__(self) -> str:
        return self.path.name


class Recorded(NamedTuple):
    """file, in DIR; model: a card, where there is one; task: of its `sequence_task`, "" for all."""

    file: str
    model: str | None = None
    task: str = ""


ESFT = "esft-deepseek-v2-lite/trace.npz", "DeepSeek-V2-Lite"
RECORDED = {
    "Qwen3-30B-A3B, K = 6": Recorded("bigmoeonedge/qwen.npz", "Qwen3-30B-A3B"),
    "Gemma-4-26B-A4B, K = 6": Recorded("bigmoeonedge/gemma.npz"),
    "gpt-oss-120b, K = 2": Recorded("bigmoeonedge/gptoss.npz", "GPT-OSS-120B"),
    "gpt-oss-20b": Recorded("gpt-oss-20b-fingerprinting/trace.npz", "GPT-OSS-20B"),
    **{
        f"DeepSeek-V2-Lite, {task}": Recorded(*ESFT, task)
        for task in ("law", "summary", "intent", "translation")
    },
    "DeepSeek-V2-Lite-Chat": Recorded("moe-beyond-deepseek-v2-lite/trace.npz", "DeepSeek-V2-Lite"),
    "Mixtral-8x7B": Recorded("speculative-moe-mixtral/trace.npz", "Mixtral-8x7B"),
    "OLMoE-1B-7B": Recorded("olmoe-mmlu-logits/trace.npz", "OLMoE-1B-7B"),
    "Qwen1.5-MoE-A2.7B, five layers": Recorded(
        "qwen1.5-moe-five-layers/trace.npz", "Qwen1.5-MoE-A2.7B"
    ),
    "Switch-Base-8, encoder": Recorded("stratamoe-switch-base-8/trace.npz"),
}
KIND = "exact"
MEASURES = ("moelab/trace", "moelab/cache")
OPTIONS = {
    "traces": ({"type": Folder, "required": True, "metavar": "DIR"}, "where the traces' files are"),
    "only": (several(), "names of traces"),
    "policies": (several(), "cache policies"),
    "shares": (several(number(above=0, most=1)), "of all experts in memory"),
    "tokens": (whole(1), "of each trace for all policies, about: whole texts"),
}


def run(
    traces: Folder | str = "",
    only: Sequence[str] = tuple(RECORDED),
    policies: Sequence[str] = tuple(name for name in POLICIES if name not in NEEDS),
    shares: Sequence[float] = SHARES,
    tokens: int = 2000,
) -> Records:
    folder = traces.path if isinstance(traces, Folder) else Path(traces)
    whole_traces, of_policies = {}, {}
    for name in progress(list(only), "traces", unit="trace"):
        trace, digest = read(folder, RECORDED[name])
        whole_traces[name] = {"sha256 of the file": digest} | facts(trace, shares)
        of_policies[name] = replayed(beginning(trace, tokens), policies, shares)
    return {"whole traces": whole_traces, "all policies": of_policies}


def read(folder: Path, recorded: Recorded) -> tuple[RoutingTrace, str]:
    """(trace, sha256 of its file)."""
    path = folder / recorded.file
    trace = load(path, recorded.model)
    if recorded.task:
        with np.load(path) as arrays:
            mine = np.flatnonzero(arrays["sequence_task"] == recorded.task)
        trace = trace.select(torch.isin(trace.sequence, torch.from_numpy(mine)))
    return trace, sha256(path.read_bytes()).hexdigest()


def beginning(trace: RoutingTrace, tokens: int) -> RoutingTrace:
    """Whole sequences until there are so many tokens; of a single longer one, its beginning."""
    order = trace.sequence.long().argsort(stable=True)
    ends = torch.cumsum(torch.bincount(trace.sequence), 0)
    n = min(len(trace), int(ends[ends >= min(tokens, len(trace))][0]))
    n = min(n, 2 * tokens)
    kept = torch.zeros(len(trace), dtype=torch.bool)
    kept[order[:n]] = True
    return replace(trace.select(kept), router_inputs=None, residuals=None)


def facts(trace: RoutingTrace, shares: Sequence[float]) -> Record:
    """What `statistics` says of a whole trace."""
    found = statistics(trace, shares)
    rates = {
        f"{policy} at {share:.0%}": rate
        for policy, of in found.hits.items()
        for share, rate in zip(found.shares, of)
    }
    return {
        "tokens": found.tokens,
        "reuse": found.reuse,
        "entropy bits": found.entropy,
        "top quarter": found.top_quarter,
        "next layer": found.next_layer,
    } | rates


def replayed(trace: RoutingTrace, policies: Sequence[str], shares: Sequence[float]) -> Record:
    """Hit rates of policies as the engine plays them, beside Belady's rule, who must admit."""
    rates = {
        f"{policy} at {share:.0%}": play(trace, policy, share)[0] / 100
        for share in shares
        for policy in policies
    }
    best = hit_rates(trace, shares, ("belady",))["belady"]
    return {"tokens": len(trace)} | rates | {f"belady at {s:.0%}": r for s, r in zip(shares, best)}
