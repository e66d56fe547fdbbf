"""Does the prompt say which experts its answer needs better than the past does?

    moelab bench answers --traces DIR

replays recorded texts, prompt by prompt, through the objects that decide in the engine: the prefill
of each in one step, its answer token by token, the cache going on from text to text. `cache="prompt"`
(GPU-NDP §III-D) holds what the prompt used most: "prompt, layer" x experts of each layer, as the paper
does, "prompt" the most used of the model in the same memory. Beside it are policies that go by the
past. Hits are of answers alone; "loads a token" are experts loaded a token of them, with those that
"prompt" loads in between.

Where a trace does not tell prompts from answers, the first half of each text stands for its prompt,
which its row says. Of long traces, every nth text is taken (`policies`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moelab.base.arguments import number, several, whole
from moelab.base.progress import progress
from moelab.base.records import Numbers, Records
from moelab.base.specs import State
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.simulation.traced import forwards_of
from moelab.trace import DECODE, PREFILL, RoutingTrace

from .policies import Traces, part

KIND = "exact"
MEASURES = ("moelab/cache",)
#: name → (policy, scope)
ARMS = {
    name: (name.partition(",")[0], "layer" if "," in name else "model")
    for name in ("lru", "lrfu", "next-use", "prompt", "lrfu, layer", "prompt, layer")
}


def with_prompts(trace: RoutingTrace) -> RoutingTrace:
    """A trace whose texts have prompts and answers: as it is, or with the first half of each text as
    its prompt."""
    if (trace.phase == PREFILL).any() and (trace.phase == DECODE).any():
        return trace
    own = [trace.sequence == text for text in trace.sequence.unique()]
    half = sum(mine * (trace.position[mine].max() // 2) for mine in own)
    phase = torch.where(trace.position <= half, PREFILL, DECODE).to(trace.phase)
    return replace(trace, phase=phase)


def answers(trace: RoutingTrace, share: float) -> Numbers:
    """Hit rates of `ARMS` while answers are decoded, and experts loaded a token."""
    L, E = trace.spec.L, trace.spec.E
    found: Numbers = {}
    for arm, (policy, scope) in ARMS.items():
        held = max(1, round(share * (E if scope == "layer" else L * E)))
        residency = Residency(L, E, Pools(F=held), policy, scope)
        hits = requests = loads = tokens = 0
        for layers, forward in zip(*forwards_of(trace), strict=True):
            loads += sum(len(step.loads) for step in residency.begin_forward(forward.phase))
            asked = [of for step in layers for of in residency.begin(*step).requests]
            if forward.phase == "decode":
                missed = sum(of.state is State.MISSED for of in asked)
                tokens, requests = tokens + forward.tokens, requests + len(asked)
                hits, loads = hits + len(asked) - missed, loads + missed
        found |= {arm: hits / requests, f"{arm}, loads a token": loads / tokens}
    return found | {"requests": requests, "tokens": tokens}


def run(
    traces: Traces, tokens: int = 2000, shares: Sequence[float] = (0.1, 0.25, 0.5, 0.75)
) -> Records:
    sections: Records = {}
    for name, trace in progress(list(traces), "replaying", unit="trace"):
        asked = with_prompts(trace := part(trace, tokens))
        row = name if asked is trace else f"{name}, half a text as prompt"
        for share in shares:
            sections.setdefault(f"{share:.0%} of the experts", {})[row] = answers(asked, share)
    return sections


OPTIONS = {
    "traces": ({"type": Traces, "metavar": "DIR"}, "a folder with traces"),
    "tokens": (whole(0), "of a trace, about; 0: all"),
    "shares": (several(number(above=0)), "of all experts that a cache has memory for"),
}
