"""What recorded traces of real models are like, and what caches find in them.

The traces are other people's, and not all are here; `--traces DIR` has their files as .npz in the form of
`moelab.trace.arrays`, in folders named as in `RECORDED`. Sources:

    bigmoeonedge       github.com/Helldez/BigMoeOnEdge at 2d4f2b11 (Apache-2.0)
    esft-…             github.com/deepseek-ai/ESFT at 579a7711 (code MIT)
    gpt-oss-20b-…      github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting at 72b368f6 (Apache-2.0)
    moe-beyond-…       github.com/ngavhane/moe-beyond at 4dca2eac (no licence)
    olmoe-…            github.com/danielfang001/moe-profiler at 3123ae55 (no licence)
    qwen1.5-…          github.com/weiran0129/vLLM-MoE-Logger at 2c3c87c1 (no licence)
    speculative-moe-…  github.com/Mario928/speculative-moe at 216e26eb ("academic purposes")
    stratamoe-…        github.com/Labeeb2339/stratamoe-lab at 08bfd806 (Apache-2.0)

All that `moelab.trace.statistics` says of each whole trace, by its definitions. More policies, on parts of
the traces: `policies`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moelab.base.arguments import folder, number, one_of, several
from moelab.base.files import absolute
from moelab.base.progress import progress
from moelab.base.records import Record, Records
from moelab.trace import RoutingTrace, load
from moelab.trace.statistics import SHARES, statistics


class Folder:
    """A folder from a user, of which results keep the name only."""

    def __init__(self, path: str | Path) -> None:
        self.path = absolute(folder(str(path)))

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
MEASURES = ("moelab/trace",)
OPTIONS = {
    "traces": ({"type": Folder, "metavar": "DIR"}, "where the traces' files are"),
    "only": (several(one_of(RECORDED)), "names of traces"),
    "shares": (several(number(above=0, most=1)), "of all experts in memory"),
}


def run(
    traces: Folder | str,
    only: Sequence[str] = tuple(RECORDED),
    shares: Sequence[float] = SHARES,
) -> Records:
    root = traces.path if isinstance(traces, Folder) else Path(traces)
    rows = {}
    for name in progress(list(only), "traces", unit="trace"):
        trace, digest = read(root, RECORDED[name])
        rows[name] = {"sha256 begins": digest[:16]} | facts(trace, shares)
    return {"whole traces": rows}


def read(folder: Path, recorded: Recorded) -> tuple[RoutingTrace, str]:
    """(trace, sha256 of its file)."""
    path = folder / recorded.file
    trace = load(path, recorded.model)
    if recorded.task:
        with np.load(path) as arrays:
            mine = np.flatnonzero(arrays["sequence_task"] == recorded.task)
        trace = trace.select(torch.isin(trace.sequence, torch.from_numpy(mine)))
    return trace, sha256(path.read_bytes()).hexdigest()


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
