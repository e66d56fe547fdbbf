"""How well signals and predictors foresee routing, from a trace that was recorded with `hidden=True`.

Source: Speculating Experts §3.3: cosine similarity to the true router input (Fig. 3), recall@K (Fig. 4) and rank
alignment (Fig. 5), per layer. A trace is walked as a run would be, prompt by prompt, a prefill at once and, for those
that remember, decode token by token, so that they see what they would have seen; every number is an exact count.

Entry l of a result is about what layer l says of layer l + ahead: [L − ahead]. Left out: what executing a prediction
does to the layers after it, see `moelab.speculate.execution`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.intervals import t95
from moelab.progress import progress
from moelab.speculate.execution import found
from moelab.speculate.predictors import Estimate, Predictor, Quasi, make, of_model
from moelab.speculate.signals import DefaultVectors
from moelab.trace import DECODE, PREFILL, RoutingTrace


@dataclass(frozen=True)
class Score:
    """What a predictor got right, by prompt (P of them) and predicting layer.

    Attributes
    ----------
    requests : int64 [P, L − ahead], experts that were chosen where there was a prediction.
    hits : int64 [P, L − ahead], how many of them were among the predicted ones.
    aligned : int64 [L − ahead, K], tokens whose expert of each rank, by weight, was predicted at that very rank.
    tokens : int64 [L − ahead, K], tokens that had an expert of that rank.
    """

    requests: Tensor
    hits: Tensor
    aligned: Tensor
    tokens: Tensor

    @property
    def recall(self) -> Tensor:
        """Recall@K, float64 [L − ahead]  (Fig. 4); NaN where nothing was predicted."""
        return self.hits.sum(0).double() / self.requests.sum(0)

    @property
    def standard_error(self) -> Tensor:
        """Of `recall`, float64 [L − ahead]: prompts are the independent samples (ratio estimator)."""
        P, n = len(self.hits), self.requests.sum(0)
        rest = self.hits - self.recall * self.requests                                  # [P, L − ahead]
        return (rest.square().sum(0) * P / (P - 1)).sqrt() / n if P > 1 else torch.full_like(self.recall, torch.nan)

    @property
    def margin(self) -> Tensor:
        """Of `recall`, half its 95 % interval (Student's, over prompts), float64 [L − ahead]."""
        return self.standard_error * t95(len(self.hits) - 1)

    @property
    def rank_alignment(self) -> Tensor:
        """Share of tokens whose expert of a rank was predicted at that rank, float64 [L − ahead, K]  (Fig. 5)."""
        return self.aligned.double() / self.tokens


@torch.no_grad()
def score(trace: RoutingTrace, predictor: Predictor, phase: int | None = None) -> Score:
    """Walk a trace with a predictor and count.

    phase : `PREFILL`, `DECODE`, or None for both. What is not counted is walked all the same.

    Raises
    ------
    ValueError : a trace without hidden states.
    """
    n, E, K = trace.spec.L - predictor.ahead, trace.spec.E, trace.spec.K
    requests, hits = torch.zeros(2, trace.sequences, n, dtype=torch.long).unbind(0)
    aligned, tokens = torch.zeros(2, n, K, dtype=torch.long).unbind(0)
    remembers = type(predictor).observe is not Predictor.observe
    for prompt, forwards in walk(trace, token_by_token=remembers):
        predictor.begin()
        for forward in forwards:
            counted = phase is None or forward.phase == phase
            for layer in forward.layers:
                s, r, ids, weights = forward.at(layer, predictor.device)
                predictor.observe(layer, ids, weights)
                prediction = predictor.predict(layer, s, r, ids, weights)
                if prediction is None or not counted:
                    continue
                _, _, true, true_weights = forward.at(layer + predictor.ahead, predictor.device)
                there = true != E
                requests[prompt, layer] += int(there.sum())
                hits[prompt, layer] += int((found(prediction[0], true) & there).sum())
                by_rank, there = ranked(true, true_weights, E), there.sort(-1, descending=True).values
                aligned[layer] += ((ranked(*prediction, E) == by_rank) & there).sum(0).cpu()
                tokens[layer] += there.sum(0).cpu()
    return Score(requests, hits, aligned, tokens)


@torch.no_grad()
def similarity(trace: RoutingTrace, model: nn.Module, vectors: DefaultVectors, phase: int | None = None,
               ahead: int = 1) -> dict[str, Tensor]:
    """Mean cosine similarity of "s" and "q" of layer l to the true router input of l + ahead, float64 [L − ahead] each.

    phase : as for `score`. Layers without a successor, such as an encoder's last, are NaN  (§3.3, Fig. 3).
    """
    quasi = Quasi(model, vectors=vectors, ahead=ahead)
    total = {name: torch.zeros(trace.spec.L - ahead, dtype=torch.double) for name in ("s", "q")}
    count = torch.zeros(trace.spec.L - ahead, dtype=torch.long)
    of_model(trace, model)
    for _, forwards in walk(trace):
        for forward in forwards:
            if phase is not None and forward.phase != phase:
                continue
            for layer in forward.layers:
                if (target := quasi.targets.get(layer)) is None:
                    continue
                s, r, ids, weights = forward.at(layer, quasi.device)
                true = forward.at(target.index, quasi.device)[0].float()
                q = quasi.quasi(layer, target, r, ids, weights)
                for name, signal in (("s", s), ("q", q)):
                    total[name][layer] += F.cosine_similarity(signal.float(), true, dim=-1).sum().double().cpu()
                count[layer] += len(s)
    return {name: value / count for name, value in total.items()}


def choose(trace: RoutingTrace, model: nn.Module, vectors: DefaultVectors, estimator: Estimate) -> tuple[bool, ...]:
    """For each of the L layers, whether the estimator has the better recall@K on a validation trace  (§6.3)."""
    bag = {"vectors": vectors, "estimator": estimator}
    by_estimator, by_router = (score(trace, make(name, model, **bag)).recall for name in ("estimator", "quasi"))
    return (*(by_estimator > by_router).tolist(), False)            # the last layer predicts nothing


def as_decode(trace: RoutingTrace, after: int) -> RoutingTrace:
    """The trace of a text as if all of it but the first `after` tokens had been generated: what predictors that learn
    from the prefill, or from the previous token, can be scored on."""
    return replace(trace, phase=torch.where(trace.position < after, PREFILL, DECODE).to(torch.uint8))


def ranked(ids: Tensor, weights: Tensor, E: int) -> Tensor:
    """ids [T, K] in order of falling weight, those without an expert (E) last."""
    order = weights.float().masked_fill(ids == E, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order)


# --------------------------------------------------------------------------------------------------- walking a trace

@dataclass(frozen=True)
class Forward:
    """One forward pass of one prompt: the rows of a trace that it computed, and the layers that they passed."""

    trace: RoutingTrace
    rows: Tensor            # [T]
    phase: int
    layers: list[int]

    def at(self, layer: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """s [T, H], r [T, H], ids [T, K], weights [T, K] of a layer."""
        t = self.trace
        columns = t.router_inputs, t.residuals, t.ids, t.weights
        s, r, ids, weights = (column[self.rows, layer].to(device) for column in columns)
        return s, r, ids.long(), weights


def walk(trace: RoutingTrace, token_by_token: bool = False) -> Iterator[tuple[int, list[Forward]]]:
    """(prompt, its forward passes in order): the prefill at once, an encoder's before its decoder's, then the decode
    steps, one by one or, where tokens do not depend on each other, all at once.

    Raises
    ------
    ValueError : a trace without hidden states.
    """
    if trace.router_inputs is None or trace.residuals is None:
        raise ValueError("this trace has no hidden states, so signals cannot be computed from it; "
                         "moelab.record(model, prompts, hidden=True) records them")
    for prompt in progress(range(trace.sequences), "scoring", unit="prompt"):
        rows = torch.nonzero(trace.sequence == prompt).flatten()
        phase, passed = trace.phase[rows], trace.router_inputs[rows].ne(0).any(-1)      # [T], [T, L]: a stack's layers
        new = torch.ones(len(rows), dtype=torch.bool)
        new[1:] = (phase[1:] != phase[:-1]) | (passed[1:] != passed[:-1]).any(-1)
        if token_by_token:
            new |= phase == DECODE
        starts = [*torch.nonzero(new).flatten().tolist(), len(rows)]
        yield prompt, [Forward(trace, rows[a:b], int(phase[a]), torch.nonzero(passed[a]).flatten().tolist())
                       for a, b in zip(starts, starts[1:])]
