"""What the views look at: one generation of an opened model, a run, a routing trace of whatever
program, or one that is drawn for a card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moelab.base.registry import find, names
from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.residency import Residency
from moelab.cards import load_model
from moelab.evaluation.questions import prompts
from moelab.models.greedy import greedy
from moelab.offloading.metrics import Forward
from moelab.offloading.prefetch_gate import ungated
from moelab.offloading.run import EngineRun
from moelab.recording import token_ids
from moelab.simulation.costs import Machine
from moelab.simulation.routing import routing_of
from moelab.simulation.simulator import Simulation, flat, simulate
from moelab.simulation.traced import as_opened, run_of
from moelab.trace import DECODE, RoutingTrace

TOKENS = 16
#: decode steps of a trace that are looked at
TRACED = 64


@dataclass
class Recorded:
    """A run with what it was of.

    before : the residency as it was when the run began.
    ids, new : token ids of the prompt and generated ones, [] where they are not known.
    source, flags : what a command says of it: what it was of, and how it was opened and what was
        asked of it, {} if as by default.
    memory : bytes for experts of an opened model; None if all are there.
    trace : that it was made from.
    how : words for whose routing this is.
    """

    name: str
    run: EngineRun
    before: Residency
    ids: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    source: str = "TRACE"
    flags: dict[str, Any] = field(default_factory=dict)
    memory: int | None = None
    model: Any = field(default=None, repr=False)
    trace: RoutingTrace | None = None
    how: str = "of this text"

    @classmethod
    def of(
        cls,
        lm: Any,
        prompt: str | Sequence[int] | None,
        tokens: int,
        generate: Callable[[list[int]], list[int]],
    ) -> Recorded:
        """What an opened model does in `generate`, of a prompt's token ids to so many new ones.
        ValueError: a text, and no tokenizer."""
        session, given = lm.moelab, prompt
        if prompt is None:
            given = prompts("prose", 1, tokens=64)[0] if lm.tokenizer else [1, 2, 3, 4]
        (ids,) = token_ids([given], lm.tokenizer)
        before, first = deepcopy(session.residency), len(session.forwards)
        new = generate(ids)
        run = session.run.since(first)
        policy = run.settings.policy
        flags = {"memory": session.budget, "cache": policy if isinstance(policy, str) else None}
        if session.speculation is not None:
            known = {find("predictor", name): name for name in names("predictor")}
            flags["prefetch"] = known.get(type(session.speculation.predictor))
        flags |= {"prompt": prompt, "tokens": tokens}
        usual = None, DEFAULT_POLICY, TOKENS
        flags = {name: value for name, value in flags.items() if value not in usual}
        opened = lm.name_or_path, flags, session.budget
        return cls(run.settings.spec.name, run, before, ids, new, *opened, lm)

    def words(self, ids: Sequence[int]) -> list[str]:
        """Tokens as text, one by one; their numbers without a tokenizer."""
        tokenizer = getattr(self.model, "tokenizer", None)
        return [str(i) if tokenizer is None else tokenizer.decode([i]) for i in ids]


def replay(
    found: Recorded,
    residency: Residency,
    warm: int,
    machine: Machine,
    steps: Any = None,
    **how: Any,
) -> Simulation:
    """A run in simulated time on a machine, or other steps; the first `warm` only fill the cache.
    how : further arguments of `simulate`."""
    settings = found.run.settings
    steps = found.run.steps if steps is None else steps
    for step in flat(steps[:warm]):
        residency.begin(*step)
    return simulate(
        steps[warm:],
        [forward[2:] for forward in found.run.forwards[warm:]],
        residency,
        replace(machine, workers=settings.workers),
        scheduler=settings.scheduler,
        **how,
    )


def seconds_of(run: Simulation) -> list[float]:
    """Of each decode step."""
    return [of.seconds for of in decode_steps(run)]


def decode_steps(run: Simulation) -> list[Forward]:
    return [forward for forward in run.forwards if forward.phase == "decode"]


def recorded(
    source: Any,
    prompt: str | Sequence[int] | None = None,
    tokens: int | None = None,
    **kept: Any,
) -> Recorded:
    """What is looked at.

    source : a model that `moelab.open_model` has opened, which then generates greedily, and
        prefetches in every token if it was opened to prefetch; its run, `lm.moelab.run`; a
        `RoutingTrace`; or a card's name, whose routing is drawn as `routing_of` says.
    prompt : a text or token ids; by default a few words of a library.
    tokens : that are generated, by default `TOKENS`; of a trace, the first so many that are decoded,
        by default `TRACED`.
    kept : memory (by default "50%") and cache of a trace: see `moelab.simulation.traced.run_of`.

    Raises ValueError: a run without decode steps, no tokenizer for a text, a prompt for a trace, or
    memory for anything else; TypeError for anything else."""
    traced = isinstance(source, RoutingTrace)
    if prompt is not None if traced else kept:
        raise ValueError(
            "memory and cache are of a trace, a prompt is of a model; a model has its memory from "
            "moelab.open_model"
        )
    if isinstance(source, str) and source in names("model"):
        routing, how = routing_of(spec := load_model(source))
        found = replace(_of_trace(routing.trace(spec, [TRACED])), source=source, how=how)
    elif traced:
        found = _of_trace(source, tokens, **kept)
    elif isinstance(source, EngineRun):
        found = Recorded(source.settings.spec.name, source.since(), as_opened(source.settings))
    elif hasattr(source, "moelab"):
        found = _generate(source, prompt, tokens or TOKENS)
    else:
        raise TypeError(
            f"this is a {type(source).__name__}; a view is of a model that moelab.open_model "
            "has opened, of its run, of a moelab.RoutingTrace, or of a card: "
            f"{', '.join(names('model'))}"
        )
    if sum(forward.phase == "decode" for forward in found.run.forwards) < 2:
        raise ValueError(
            "this run has fewer than two decode steps, so nothing can be said about TPOT: "
            "generate at least three tokens, or give a trace that has tokens in decode"
        )
    return found


def _generate(lm: Any, prompt: str | Sequence[int] | None, tokens: int) -> Recorded:
    engine = lm.moelab.engine

    def generate(ids: list[int]) -> list[int]:
        given = torch.tensor([ids], device=lm.device)
        count = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        with torch.inference_mode(), ungated(engine) if engine else nullcontext():
            mask = torch.ones_like(given)
            out = lm.generate(given, attention_mask=mask, **greedy(lm), **count)
        return out[0, 0 if lm.config.is_encoder_decoder else len(ids) :].tolist()

    return Recorded.of(lm, prompt, tokens, generate)


def _of_trace(trace: RoutingTrace, tokens: int | None = None, **kept: Any) -> Recorded:
    """The tokens until so many are decoded, one sequence after another; of a trace that has none in
    decode, prompts are taken token by token."""
    decoded = trace.in_phase(DECODE)
    how = "recorded" if decoded is trace else "recorded, prompts taken token by token"
    trace, flags = decoded, kept | ({} if tokens is None else {"tokens": tokens})
    order = trace.sequence.long().argsort(stable=True)
    seen = torch.empty(len(trace), dtype=torch.long)
    seen[order] = (trace.phase[order] == DECODE).cumsum(0)
    trace = trace.select(seen <= (tokens or TRACED))
    run = run_of(trace, **{"memory": "50%"} | kept)
    before = as_opened(run.settings)
    return Recorded(trace.spec.name, run, before, flags=flags, trace=trace, how=how)
