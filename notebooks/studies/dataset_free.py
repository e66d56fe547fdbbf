"""Dataset-free prefetching in the offloading engine: utilisation of prefetched experts, beside
calibration.

Source: GPU-NDP §III-D, Fig. 6 and 7. After the prefill, the x most used experts of each layer are
made resident, and nothing else is kept while the answer is decoded: `cache="prompt"` with a pool for
each layer. Popularity comes from the prompt itself (dataset-free), from other prompts of the same
source, or from other sources, of which the policy is told in the prompt's place.
Utilisation is the share of resident experts that a decode step uses (hits counted by the engine,
exact); intervals are of 95 %, over prompts. Loading is not overlapped with anything.

    counts [L, E]   resident bool [L, E]   wanted bool [D, L, E]: what each of D decode steps uses
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moelab.base.library import token_count
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.base.specs import ExpertKey, MoESpec
from moelab.cache.policies import Prompt
from moelab.cache.pools import Pools
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointStore
from moelab.evaluation.intervals import Interval, interval
from moelab.evaluation.questions import prompts
from moelab.ndp.prefetch import most_used
from moelab.offloading.offload import offload
from moelab.offloading.slots import Sizes
from moelab.recording import record
from moelab.store.layout import ExpertStore
from moelab.trace import DECODE, PREFILL, RoutingTrace

#: arithmetic and knowledge stand for Fig. 6's GSM8K and MMLU
SOURCES = ("arithmetic", "knowledge", "code")
WAYS = ("dataset-free", "calibrated, same source", "calibrated, other sources")


class Chosen(Prompt):
    """As `Prompt`, but what is to be resident may be said: a mask [L, E] of all its instances."""

    resident: np.ndarray | None = None

    def turn(self, phase: str, counts: Mapping[ExpertKey, int], n: int) -> Collection[ExpertKey]:
        if self.resident is not None:
            layer = min(counts).layer
            counts = Counter(ExpertKey(layer, int(e)) for e in np.flatnonzero(self.resident[layer]))
        return super().turn(phase, counts, n)


class Answer(NamedTuple):
    """One greedy answer [D + 1] under one choice of resident experts; counts, resident, wanted :
    see the file's top;
    hits, requests, read_bytes : counted by the engine while decoding."""

    tokens: np.ndarray
    counts: np.ndarray
    resident: np.ndarray
    wanted: np.ndarray
    hits: int
    requests: int
    read_bytes: int

    @property
    def utilisation(self) -> float:
        """Share of the resident experts that a decode step uses, on average."""
        return self.hits / (int(self.resident.sum()) * len(self.wanted))

    @property
    def hit_rate(self) -> float:
        """Share of the experts that a decode step uses that are resident."""
        return self.hits / self.requests


class Prefetcher:
    """A model that keeps x chosen experts of each layer, 1 to E (0: K); a context manager.

    source : as of `open_model`.
    """

    def __init__(self, source: ExpertStore | str | Path | None, x: int) -> None:
        checkpoint = Checkpoint.at(source)
        store = checkpoint.store or CheckpointStore(checkpoint, checkpoint.dtype())
        self.spec, self.x, self.policy = (
            store.spec,
            (x := x or store.spec.K),
            type("Own", (Chosen,), {}),
        )
        if not 1 <= x <= self.spec.E:
            raise ValueError(
                f"x is {x}; 1 to {self.spec.E} experts of each layer can be prefetched"
            )
        sizes, staging = Sizes.of(store, False if store.few_bits else None), self.spec.K + 2
        room = self.spec.L * x * sizes.full + staging * sizes.in_flight + store.scratch
        self.model = offload(
            checkpoint, room, cache=self.policy, plan=Pools(F=x), scope="layer", staging=staging
        )

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.moelab.close()

    def answers(
        self,
        ids: Sequence[int],
        steps: int,
        choose: Mapping[str, Callable[[np.ndarray], np.ndarray]],
    ) -> dict[str, Answer]:
        """Run a prompt once, and answer it in `steps` decode steps for each way of choosing: name →
        counts [L, E] of the prompt's tokens → resident [L, E], x experts a layer."""
        if steps < 1:
            raise ValueError(f"{steps} decode steps use no expert; ask for at least 1")
        offloading = self.model.moelab
        self.policy.resident = None
        offloading.reset()
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([list(ids)]), use_cache=True)
            counts = self._by_expert(offloading.steps)[0]
            found = {}
            for name, way in choose.items():
                resident = way(counts)
                self.policy.resident = resident
                offloading.residency.begin_forward("chosen")  # so that an answer begins anew
                offloading.reset()
                tokens = self._decode(out.logits, copy.deepcopy(out.past_key_values), steps)
                counters, begin = offloading.residency.counters, offloading.forwards[0].start
                found[name] = Answer(
                    tokens,
                    counts,
                    resident,
                    self._by_expert(offloading.steps) > 0,
                    sum(counters.hits.values()),
                    counters.requests,
                    sum(event.bytes for event in offloading.timeline if event.start >= begin),
                )
        return found

    def _decode(self, logits: torch.Tensor, past: Any, steps: int) -> np.ndarray:
        ends, tokens = self.model.generation_config.eos_token_id, []
        ends = [] if ends is None else ends
        while True:
            last = logits[:, -1].clone()
            last[:, ends] = -torch.inf
            tokens.append(last.argmax(-1, keepdim=True))
            if len(tokens) > steps:
                return torch.cat(tokens).reshape(-1).numpy()
            logits = self.model(input_ids=tokens[-1], past_key_values=past, use_cache=True).logits

    def _by_expert(self, steps: Sequence[Sequence[tuple[int, Mapping[int, int]]]]) -> np.ndarray:
        """Tokens of each expert in the engine's forwards, int64 [forwards, L, E]."""
        found = np.zeros((len(steps), self.spec.L, self.spec.E), np.int64)
        for forward, layers in enumerate(steps):
            for layer, tokens in layers:
                found[forward, layer, list(tokens)] = list(tokens.values())
        return found


def ways(
    history: Mapping[str, np.ndarray], source: str, x: int
) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """The choosers of `WAYS` for a prompt of that source."""
    same = most_used(history[source], x)
    others = most_used(sum(counts for name, counts in history.items() if name != source), x)
    return dict(zip(WAYS, (lambda counts: most_used(counts, x), lambda _: same, lambda _: others)))


def popularity(model: Any, calibrated: int = 48, seed: int = 0) -> dict[str, np.ndarray]:
    """Source → counts [L, E] of so many prompts of its train split."""
    how = asked_by(model.tokenizer, seed)
    return {
        source: record(model, prompts(source, calibrated, split="train", **how), batch_size=16)
        .counts()
        .numpy()
        for source in SOURCES
    }


def asked_by(tokenizer: Any, seed: int) -> Record:
    """How prompts of any source are drawn."""
    return {"tokens": 256, "seed": seed, "count": token_count(tokenizer)}


def measure(
    history: Mapping[str, np.ndarray],
    opened_from: ExpertStore | str | Path | None = None,
    x: int = 0,
    n: int = 8,
    steps: int = 16,
    seed: int = 0,
) -> dict[str, list[dict[str, Answer]]]:
    """Source → for each of n prompts of its test split an `Answer` by each of `WAYS`.

    history : what calibrates, of `popularity`; close its model first, or its memory is taken beside
        this one's.
    opened_from : as of `open_model`.   x : experts prefetched a layer; 0 for K.
    """
    found = {}
    with Prefetcher(opened_from, x) as prefetcher:
        tokenizer = prefetcher.model.tokenizer
        for source in SOURCES:
            asked = [
                tokenizer(p.text)["input_ids"]
                for p in prompts(source, n, split="test", **asked_by(tokenizer, seed))
            ]
            choose = ways(history, source, prefetcher.x)
            found[source] = [
                prefetcher.answers(ids, steps, choose)
                for ids in progress(asked, f"prefetching for {source}", unit="prompt")
            ]
    return found


def answered(trace: RoutingTrace) -> list[int]:
    """The sequences of a trace that have a prompt and an answer. ValueError: none has."""
    both = [set(trace.sequence[trace.phase == phase].tolist()) for phase in (PREFILL, DECODE)]
    if not (found := sorted(set.intersection(*both))):
        raise ValueError(
            f"no sequence of the trace of {trace.spec.name} has tokens in prefill and in decode: "
            "a prompt and its answer are needed"
        )
    return found


def of_traces(traces: Mapping[str, RoutingTrace], x: int = 0) -> dict[str, list[dict[str, Answer]]]:
    """The same counted on traces, source → one for each of its sequences with a prompt and an
    answer; without an engine, so nothing is read. What calibrates are a source's other sequences,
    and the other sources; `WAYS` of which some sequence has nothing are left out.

    Raises ValueError: no sequence of one has both."""
    every = {name: trace.counts().numpy() for name, trace in traces.items()}
    found: dict[str, list[dict[str, Answer]]] = {}
    for source, trace in traces.items():
        elsewhere = sum(counts for name, counts in every.items() if name != source)
        found[source] = []
        for sequence in answered(trace):
            mine = trace.sequence == sequence
            prompt, answer = (trace.select(mine & (trace.phase == p)) for p in (PREFILL, DECODE))
            counts = prompt.counts().numpy()
            same = every[source] - trace.select(mine).counts().numpy()
            known = {way: of for way, of in zip(WAYS, (counts, same, elsewhere)) if np.any(of)}
            found[source].append(
                {
                    way: _counted(answer, counts, most_used(of, x or trace.spec.K))
                    for way, of in known.items()
                }
            )
    known = set.intersection(*(set(one) for of in found.values() for one in of))
    return {
        source: [{way: one[way] for way in WAYS if way in known} for one in of]
        for source, of in found.items()
    }


def _counted(trace: RoutingTrace, counts: np.ndarray, resident: np.ndarray) -> Answer:
    wanted = np.zeros((len(trace), trace.spec.L, trace.spec.E + 1), bool)
    np.put_along_axis(wanted, trace.ids.numpy().astype(np.int64), True, axis=2)
    wanted = wanted[..., :-1]
    hits = int((wanted & resident).sum())
    return Answer(trace.tokens.numpy(), counts, resident, wanted, hits, int(wanted.sum()), 0)


def table(
    found: Mapping[str, Sequence[Mapping[str, Answer]]],
) -> dict[str, dict[str, dict[str, Interval]]]:
    """{source or "all": {way: {"utilisation", "hit rate", "lead"}}}; lead is the dataset-free
    utilisation less this."""
    rows = {}
    for source, answers in [
        *found.items(),
        ("all", [answer for of in found.values() for answer in of]),
    ]:
        of = {way: [answer[way] for answer in answers] for way in answers[0]}
        free = np.array([answer.utilisation for answer in of[WAYS[0]]])
        rows[source] = {
            way: {
                "utilisation": interval([answer.utilisation for answer in mine]),
                "hit rate": interval([answer.hit_rate for answer in mine]),
                "lead": interval(free - [answer.utilisation for answer in mine]),
            }
            for way, mine in of.items()
        }
    return rows


def hit_curve(answers: Sequence[Answer], spec: MoESpec) -> dict[str, list[tuple[int, float]]]:
    """Per cent of a step's experts that hit, by x experts prefetched a layer, mean over answers: by
    the prompt's counts, by the answer's own, and by chance. Computed from what each step wanted, as
    residency changes no token."""
    xs = sorted({1, 2, spec.K, *(x for x in (8, 12, 16, 24, 32, 48, 64, 128) if x <= spec.E)})

    def curve(counts: Callable[[Answer], np.ndarray]) -> list[tuple[int, float]]:
        return [
            (
                x,
                100
                * float(
                    np.mean(
                        [
                            answer.wanted[:, most_used(counts(answer), x)].sum()
                            / answer.wanted.sum()
                            for answer in answers
                        ]
                    )
                ),
            )
            for x in xs
        ]

    return {
        "dataset-free": curve(lambda answer: answer.counts),
        "its own future (ceiling)": curve(lambda answer: answer.wanted.sum(0)),
        "chance": [(x, 100 * x / spec.E) for x in xs],
    }
