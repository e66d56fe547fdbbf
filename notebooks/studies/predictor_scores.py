"""How well predictors predict routing, from a trace that was recorded with `hidden=True`.

Source: Speculating Experts §3.3: recall@K (Fig. 4) and rank alignment (Fig. 5). Entry l of a result, [L − ahead], is about what layer l says of layer
l + ahead; what executing a prediction does to later layers is not seen here
(`moelab.speculate.execution`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.evaluation.intervals import t95
from moelab.speculate import Predictor
from moelab.speculate.execution import found as is_among
from moelab.trace import RoutingTrace

from .passes import walk


@dataclass(frozen=True)
class Score:
    """What a predictor got right, by prompt (P of them) and predicting layer.

    requests, hits : int64 [P, L − ahead], experts chosen where there was a prediction; those that
        were predicted.
    aligned : int64 [L − ahead, K], tokens whose expert of each rank, by weight, was predicted at
        that very rank.
    tokens : int64 [L − ahead, K], tokens that had an expert of that rank.
    """

    requests: Tensor
    hits: Tensor
    aligned: Tensor
    tokens: Tensor

    @property
    def recall(self) -> Tensor:
        """Recall@K, float64 [L − ahead] (Fig. 4); NaN where nothing was predicted."""
        return self.hits.sum(0).double() / self.requests.sum(0)

    @property
    def standard_error(self) -> Tensor:
        """Of `recall`, float64 [L − ahead]: prompts are the independent samples (ratio estimator);
        NaN for one."""
        P = len(self.hits)
        rest = self.hits - self.recall * self.requests  # [P, L − ahead]
        variance = rest.square().sum(0) * P / (P - 1 or torch.nan)
        return variance.sqrt() / self.requests.sum(0)

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
    """Walk a trace with a predictor and count, in one phase (`PREFILL`, `DECODE`) or, if None, in
    both."""
    n = trace.spec.L - predictor.ahead
    E = trace.spec.E
    K = trace.spec.K
    requests, hits = torch.zeros(2, trace.sequences, n, dtype=torch.long)
    aligned, tokens = torch.zeros(2, n, K, dtype=torch.long)
    learns = type(predictor).observe is not Predictor.observe
    for prompt, passes in walk(trace, token_by_token=learns):
        predictor.begin()
        for one, layer in [(step, layer) for step in passes for layer in step.layers]:
            s, r, ids, weights = one.at(layer, predictor.device)
            predictor.observe(layer, ids, weights)
            if (target := predictor.targets.get(layer)) is None:
                continue
            prediction = predictor.predict(layer, s, r, ids, weights)
            if prediction is None or phase not in (None, one.phase):
                continue
            _, _, true, true_weights = one.at(target.index, predictor.device)
            there = true != E
            by_rank = ranked(true, true_weights, E)
            requests[prompt, layer] += int(there.sum())
            hits[prompt, layer] += int((is_among(prediction[0], true) & there).sum())
            aligned[layer] += ((ranked(*prediction, E) == by_rank) & (by_rank != E)).sum(0).cpu()
            tokens[layer] += (by_rank != E).sum(0).cpu()
    return Score(requests, hits, aligned, tokens)


def ranked(ids: Tensor, weights: Tensor, E: int) -> Tensor:
    """ids [T, K] in order of falling weight, those without an expert (E) last."""
    order = (
        weights.float()
        .masked_fill(ids == E, -torch.inf)
        .argsort(dim=-1, descending=True, stable=True)
    )
    return ids.gather(-1, order)
