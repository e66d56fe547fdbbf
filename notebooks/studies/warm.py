"""How many misses does a warm start take from the first tokens of a session?

Recorded sequences of a model are its sessions, `--traces DIR` as of `recorded_traces`. Each of the first
ones begins once with an empty cache (cold), and once with what all the others were hot for: as many
experts as fit, by what the others say in one of these ways:

    counts     tokens that went to each expert, all sessions alike: what `open_model(warm=True)` keeps,
               but that a count there is worth half after 4096 tokens
    recent     the same, worth half after 256 tokens
    residents  who was in memory at the end of the session before

Misses are counted in 32 tokens after a prompt, which is one forward pass and fills the cache itself, or
from the very beginning, with a prompt of eight tokens and its misses among them. The cache is moelab's
default policy, one pool for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from moelab.base.arguments import number, one_of, several, whole
from moelab.base.progress import progress
from moelab.base.records import Record, Records
from moelab.base.specs import ExpertKey, MoESpec, State
from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.simulation.traced import forwards_of
from moelab.trace import DECODE, PREFILL, RoutingTrace
from moelab.trace.statistics import SHARES, capacity

from .recorded_traces import OPTIONS as TRACES
from .recorded_traces import RECORDED, Folder, read

KIND = "exact"
MEASURES = ("moelab/cache", "moelab/offloading/heat.py")
#: of `RECORDED`, those with several sequences of a model that decodes
MODELS = (
    "gpt-oss-20b",
    "DeepSeek-V2-Lite, law",
    "DeepSeek-V2-Lite, translation",
    "DeepSeek-V2-Lite-Chat",
    "Mixtral-8x7B",
    "OLMoE-1B-7B",
)
OPTIONS = {
    "traces": TRACES["traces"],
    "only": (several(one_of(RECORDED)), "names of traces"),
    "shares": (several(number(above=0, most=1)), "of all experts in memory"),
    "sessions": (whole(1), "of a trace that are played"),
}
TOKENS, PROMPT, SHORT = 32, 64, 8


def run(
    traces: Folder | str,
    only: Sequence[str] = MODELS,
    shares: Sequence[float] = SHARES,
    sessions: int = 8,
) -> dict[str, Records]:
    root = traces.path if isinstance(traces, Folder) else Path(traces)
    after, whole_session = {}, {}
    for name in progress(list(only), "traces", unit="trace"):
        trace, _ = read(root, RECORDED[name])
        after[name] = changes(trace, shares, sessions, PROMPT, False)
        whole_session[name] = changes(trace, shares, sessions, SHORT, True)
    return {
        f"after a prompt of {PROMPT} tokens": after,
        f"from the beginning, {SHORT} tokens of a prompt among them": whole_session,
    }


def changes(
    trace: RoutingTrace, shares: Sequence[float], sessions: int, prompt: int, all_of_it: bool
) -> Record:
    """Of each share of the experts in memory, misses of a cold start, per cent of the requests, and by
    how many per cent others have more (below 0: fewer)."""
    rows = [torch.nonzero(trace.sequence == one).flatten() for one in trace.sequence.unique()]
    needed = TOKENS if all_of_it else prompt + TOKENS
    counts = torch.stack([counted(trace, of) for of in rows])
    lengths = [len(of) for of in rows]
    chosen = [at for at, of in enumerate(rows) if len(of) >= needed][:sessions]
    found: Record = {"sessions": len(chosen), "of": len(rows)}
    for share in shares:
        kept = capacity(trace, share)
        misses: dict[str, list[int]] = {}
        for at in chosen:
            others = [i for i in range(len(rows)) if i != at]
            recent = torch.zeros_like(counts[0])
            for i in others:
                recent = recent * 0.5 ** (lengths[i] / 256) + counts[i]
            ways = {"cold": [], "counts": hottest(counts[others].sum(0)), "recent": hottest(recent)}
            ways["residents"] = at_end(trace, rows[others[-1]], kept)
            steps = begun(trace, rows[at][:needed], prompt)
            for way, keys in ways.items():
                missed = play(trace.spec, kept, keys, steps, 0 if all_of_it else 1)
                misses.setdefault(way, []).append(missed)
        asked = (TOKENS if not all_of_it else needed) * trace.spec.L * trace.spec.K
        cold = fmean(misses.pop("cold"))
        found[f"cold at {share:.0%}"] = cold / asked
        for way, those in misses.items():
            found[f"{way} at {share:.0%}"] = fmean(those) / cold - 1
    return found


def counted(trace: RoutingTrace, rows: Tensor) -> Tensor:
    """Tokens of these rows that went to each expert [L, E]."""
    ids, E = trace.ids[rows].long(), trace.spec.E
    return torch.nn.functional.one_hot(ids, E + 1).sum((0, 2))[:, :E].float()


def hottest(counts: Tensor) -> list[ExpertKey]:
    keys = [ExpertKey(*key) for key in counts.nonzero().tolist()]
    return sorted(keys, key=lambda key: -counts[key].item())


def begun(trace: RoutingTrace, rows: Tensor, prompt: int) -> list:
    """Steps of a session: the prompt's in one pass, then token by token."""
    phase = torch.full((len(rows),), DECODE, dtype=torch.uint8)
    phase[:prompt] = PREFILL
    part = trace.select(rows)
    part.phase[:] = phase
    return forwards_of(part)[0]


def cache(spec: MoESpec, kept: int) -> Residency:
    return Residency(spec.L, spec.E, Pools(F=kept), DEFAULT_POLICY)


def at_end(trace: RoutingTrace, rows: Tensor, kept: int) -> list[ExpertKey]:
    """Who is in memory when these tokens are decoded."""
    residency = cache(trace.spec, kept)
    for step in begun(trace, rows, 1):
        for layer, tokens in step:
            residency.begin(layer, tokens)
    return residency.resident(State.FULL)


def play(spec: MoESpec, kept: int, keys: list[ExpertKey], steps: list, counted_from: int) -> int:
    """Misses from a pass on, of a session that begins with as many of these experts as fit."""
    residency = cache(spec, kept)
    residency.fill(keys)
    for at, step in enumerate(steps):
        if at == counted_from:
            residency.reset_counters()
        residency.begin_forward("decode" if at else "prefill")
        for layer, tokens in step:
            residency.begin(layer, tokens)
    return residency.counters.misses
