"""Draft tokens on real routing: the union of neighbours' experts, what it misses, and the
acceptance from which drafts pay.

From traces of routing, by `moelab.simulation.drafts`: experts of a layer in a pass over 1 + n
positions are exact counts; misses are of the default policy with a share of all experts in memory.
Speed-ups are modelled: a pass reads the weights that are not routed experts once, each expert of the
union from memory, and the missing ones from the disk meanwhile, at the given rates; sizes are of the
model's card."""

from __future__ import annotations

import warnings
from argparse import ArgumentTypeError
from contextlib import suppress
from hashlib import sha256
from statistics import fmean

import numpy as np

from moelab.advice.model import find_model
from moelab.base.arguments import folder, number, whole
from moelab.base.files import absolute
from moelab.base.records import Records
from moelab.simulation.drafts import ACCEPTANCES, COUNTS, PassCosts, passes, verified
from moelab.trace import RoutingTrace, load


class Folder:
    """The .npz files in a folder that are traces; as text, their names and digests. ValueError: none
    is."""

    def __init__(self, text: str) -> None:
        root, self.digests, self.traces = absolute(folder(text)), {}, {}
        for file in sorted(root.rglob("*.npz")):
            name = str(file.relative_to(root).with_suffix("")).removesuffix("/trace")
            with warnings.catch_warnings(), suppress(ValueError):  # logits, say, are no trace
                warnings.simplefilter("ignore")  # of columns beyond routing
                self.traces[name] = load(file)
                self.digests[name] = sha256(file.read_bytes()).hexdigest()[:12]
        if not self.traces:
            raise ArgumentTypeError(f"{text!r} has no trace: no .npz with ids [T, L, K]")

    def __str__(self) -> str:
        return "; ".join(f"{name} {digest}" for name, digest in self.digests.items())


KIND = "modelled"
MEASURES = ("notebooks/studies/draft_passes.py", "moelab/simulation/drafts.py", "moelab/cache")
OPTIONS = {
    "traces": (Folder, "folder of traces, which `moelab trace show` reads"),
    "tokens": (whole(64), "of a trace, in its first texts"),
    "memory": (number(0), "GB/s at which weights are read from memory"),
    "disk": (number(0), "GB/s at which experts are read"),
}
#: trace, by a part of its name → card of its model, for sizes
CARDS = {
    "bigmoeonedge/qwen": "Qwen3-30B-A3B",
    "bigmoeonedge/gptoss": "GPT-OSS-120B",
    "gpt-oss-20b": "GPT-OSS-20B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "olmoe": "OLMoE-1B-7B",
    "mixtral": "Mixtral-8x7B",
    "qwen1.5": "Qwen1.5-MoE-A2.7B",
}
SHARES = 0.25, 1.0


def texts(trace: RoutingTrace) -> list[np.ndarray]:
    """Ids [T, L, K] of each sequence of a trace."""
    sequence = trace.sequence.numpy()
    order = sequence.argsort(kind="stable")
    return np.split(trace.ids.numpy()[order], np.diff(sequence[order]).nonzero()[0] + 1)


def union(trace: RoutingTrace, drafts: int) -> float:
    """Distinct experts of a layer over 1 + `drafts` consecutive tokens of a text, mean."""
    found = [layers for _, layers in verified(texts(trace), trace.spec.E, drafts)]
    return fmean(len(experts) for layers in found for experts in layers)


def costs_of(card: str, memory: float, disk: float) -> PassCosts:
    """Of a model as its checkpoint is, by its bytes alone."""
    model = find_model(card)
    spec, rate = model.spec, memory * 1e9
    expert = spec.expert_bytes
    return PassCosts(spec.L, model.dense / rate, 0.0, expert / rate, expert / (disk * 1e9))


def row_of(trace: RoutingTrace, tokens: int, share: float, costs: PassCosts | None) -> dict:
    """Unions, misses a token by drafts, speed-ups by acceptance with the best number of drafts."""
    ids, left = [], tokens
    for text in texts(trace):
        if left >= 2 * max(COUNTS) and len(text) > max(COUNTS):
            ids.append(text[:left])
            left -= len(ids[-1])
    E = trace.spec.E
    plain = passes(ids, E, 0, 1.0, share)
    row: dict = {"tokens": sum(map(len, ids)), "union of 1": plain.union}
    row |= {f"union of {n + 1}": union(trace, n) for n in COUNTS}
    row["misses a token"] = plain.misses
    for right in ACCEPTANCES:
        drafted = [passes(ids, E, n, right, share) for n in COUNTS]
        row[f"misses a token, 8 drafts, {right:.0%} right"] = (
            drafted[-1].misses / drafted[-1].tokens
        )
        if costs is not None:
            gain, n = max((costs.speedup(of, plain), of.drafts) for of in drafted)
            row |= {f"speed-up, {right:.0%} right": gain, f"drafts, {right:.0%} right": n}
    return row


def run(
    traces: Folder, tokens: int = 400, memory: float = 40.0, disk: float = 3.0
) -> dict[str, Records]:
    """Section → trace and share in memory → metric → value."""
    rows = {}
    for name, trace in traces.traces.items():
        card = next((card for part, card in CARDS.items() if part in name), None)
        costs = card and costs_of(card, memory, disk)
        for share in SHARES:
            rows[f"{name}, {share:.0%} in memory"] = row_of(trace, tokens, share, costs)
    return {"passes": rows}
