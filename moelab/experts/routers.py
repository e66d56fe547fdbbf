"""Routers: from logits to the experts of every token and their weights, as the architectures define them.

Sources: Neuron MoE guide, "Router" and "Router execution in sequence parallel mode"; the group limits are DeepSeek-V3
§2.1.2 (arXiv 2412.19437) and DeepSeek-V2 §2.1.3 (2405.04434), sparsemixer is GRIN's (2409.12136), top-1 with capacity
Switch's (2101.03961, §2.2). A *rule* is a pure function of the logits (and of a correction bias that acts on the
choice alone); `LinearRouter` is a rule with a router's weights in front. `router_for` reads the rule of an architecture
off its config, and the arithmetic, dtypes included, is transformers' own, so that results are bit-equal.

    x [..., H]  →  logits [..., E]  →  ids [T, K], E means "no expert"    weights [T, K]

Ties: which of two experts with the same score is chosen is left to `torch.topk`, which promises nothing (argmax, in
`Top1` and `Sparsemixer`, takes the lowest id on CPUs). It depends on the token's own scores only, and without a
correction bias the weights do not depend on it. Left out: training (jitter, sampling, auxiliary losses) and Sinkhorn,
whose inference is a plain top-1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.specs import MoESpec


class Routing(NamedTuple):
    """ids int64 [T, K] and weights [T, K]; the id E means "no expert"."""

    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Groups:
    """Only experts of the `best` of `n` groups can be chosen; a group is E/n neighbouring experts.

    score : what a group is worth: "two best" (DeepSeek-V3: the sum of its two best scores) or "max" (DeepSeek-V2).
    mask : the score that experts of other groups get. −inf bars them (transformers). 0.0 (the Neuron SDK's
        `GroupLimitedRouter`) does not where scores can be negative: with a correction bias below −1 every barred
        expert is better than any of the chosen groups. `outside_groups` tells which tokens left.
    """

    n: int
    best: int
    score: str = "two best"
    mask: float = -math.inf

    def __post_init__(self) -> None:
        if self.score not in ("two best", "max"):
            raise ValueError(f"a group's score is 'two best' or 'max', not {self.score!r}")
        if not 1 <= self.best <= self.n:
            raise ValueError(f"{self.best} of {self.n} groups cannot be chosen; choose 1 to {self.n}")

    def chosen(self, scores: Tensor) -> Tensor:
        """bool [T, E], whether the expert's group is among the best; scores [T, E]."""
        T, E = scores.shape
        if E % self.n or self.score == "two best" and E // self.n < 2:
            raise ValueError(f"{E} experts cannot be split into {self.n} equal groups" +
                             (" of at least two" if self.score == "two best" else ""))
        grouped = scores.view(T, self.n, E // self.n)
        worth = grouped.amax(-1) if self.score == "max" else grouped.topk(2).values.sum(-1)             # [T, n]
        best = worth.topk(self.best, sorted=False).indices
        chosen = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        return chosen.repeat_interleave(E // self.n, dim=1)


@dataclass(frozen=True)
class TopK:
    """The K experts of the highest score, weighted with their affinities.

    Attributes
    ----------
    K : experts a token.
    activation : "softmax" or "sigmoid", from logits to affinities.
    before : activation before selection, over all E logits; False applies it to the K chosen logits.
    normalise : divide a token's weights by their sum (L1).
    scale : routed scaling factor, after normalisation.
    groups : None, or the limit to groups.
    dtype : of the affinities; None is the logits' own. The Neuron SDK's is float64, transformers' mostly float32.
    narrow : return weights in the logits' dtype; False leaves them in `dtype`.
    ordered : choices stand from the best down; False in any order, as DeepSeek's, which rounds their sum differently.
    """

    K: int
    activation: str = "softmax"
    before: bool = True
    normalise: bool = False
    scale: float = 1.0
    groups: Groups | None = None
    dtype: torch.dtype | None = torch.float32
    narrow: bool = True
    ordered: bool = True

    def __post_init__(self) -> None:
        if self.activation not in ("softmax", "sigmoid"):
            raise ValueError(f"affinities are 'softmax' or 'sigmoid', not {self.activation!r}")
        if self.groups is not None and not self.before:
            raise ValueError("groups are chosen by affinities, which before=False computes only for the chosen experts")

    def affinities(self, logits: Tensor) -> Tensor:
        """Softmax or sigmoid of the last axis."""
        logits = logits if self.dtype is None else logits.to(self.dtype)
        return logits.softmax(-1) if self.activation == "softmax" else logits.sigmoid()

    def __call__(self, logits: Tensor, correction: Tensor | None = None) -> Routing:
        """Route logits [..., E]; correction [E] is added to the affinities for the choice alone (DeepSeek-V3)."""
        logits = logits.reshape(-1, logits.shape[-1])
        E = logits.shape[1]
        if self.K > E or self.groups is not None and self.K > self.groups.best * (E // self.groups.n):
            raise ValueError(f"{self.K} experts a token cannot be chosen: there are {E}, limited to {self.groups}")
        if not self.before:
            if correction is not None:
                raise ValueError("a correction bias is added to affinities, which before=False computes too late")
            top, ids = logits.topk(self.K)
            # A sigmoid needs no other logits; over all of them, as Llama 4 takes it, it also rounds as Llama 4's does.
            weights = self.affinities(top) if self.activation == "softmax" else self.affinities(logits).gather(1, ids)
        else:
            affinities = self.affinities(logits)
            scores = affinities if correction is None else affinities + correction
            if self.groups is not None:
                scores = scores.masked_fill(~self.groups.chosen(scores), self.groups.mask)
                if self.groups.score == "max":
                    affinities = scores             # DeepSeek-V2 masks the weights too
            ids = scores.topk(self.K, sorted=self.ordered).indices
            weights = affinities.gather(1, ids)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.scale != 1.0:
            weights = weights * self.scale
        return Routing(ids, weights.to(logits.dtype) if self.narrow else weights)


@dataclass(frozen=True)
class Sparsemixer:
    """Phi-3.5-MoE at inference: the two highest logits, each weighted by a softmax over the logits near it.

    Near is within 2·jitter of it, relative to the larger of |logit| and it; the second is weighed without the first.
    The weights do not sum to one.
    """

    jitter: float = 0.01
    K: int = 2

    def __post_init__(self) -> None:
        if self.K != 2:
            raise ValueError(f"sparsemixer chooses two experts a token, not {self.K}")

    def __call__(self, logits: Tensor, correction: Tensor | None = None) -> Routing:
        """Route logits [..., E]."""
        _no_correction(correction)
        logits = logits.reshape(-1, logits.shape[-1])
        remaining, ids, weights = logits, [], []
        for _ in range(self.K):
            best, expert = remaining.max(-1, keepdim=True)
            far = (best - logits) / logits.abs().clamp(min=best) > 2 * self.jitter
            near = remaining.masked_fill(far, -math.inf).softmax(-1)
            ids.append(expert)
            weights.append(near.gather(-1, expert))
            remaining = remaining.scatter(-1, expert, -math.inf)
        return Routing(torch.cat(ids, -1), torch.cat(weights, -1))


@dataclass(frozen=True)
class Top1:
    """Switch: the most probable expert, unless `capacity` earlier tokens of the sequence have chosen it already.

    dtype : of the softmax; rounded : what its result is rounded to before the choice, None for no rounding.
    """

    capacity: int
    dtype: torch.dtype = torch.float32
    rounded: torch.dtype | None = None
    K: int = 1

    def __call__(self, logits: Tensor, correction: Tensor | None = None) -> Routing:
        """Route logits [..., S, E], each sequence of S tokens by itself; a dropped token's id is E."""
        _no_correction(correction)
        E = logits.shape[-1]
        probabilities = logits.softmax(-1, dtype=self.dtype).to(self.rounded or self.dtype)
        best = probabilities.argmax(-1)                                                     # [..., S]
        place = F.one_hot(best, E).cumsum(-2).gather(-1, best[..., None])                   # 1 for an expert's first
        ids = torch.where(place > self.capacity, E, best[..., None])
        return Routing(ids.reshape(-1, 1), probabilities.amax(-1).reshape(-1, 1))


def _no_correction(correction: Tensor | None) -> None:
    if correction is not None:
        raise ValueError("this router has no correction bias")


def outside_groups(rule: TopK, logits: Tensor, correction: Tensor | None = None) -> Tensor:
    """bool [T], which tokens chose an expert that is in none of their best groups; see `Groups.mask`."""
    if rule.groups is None:
        raise ValueError("this router has no groups")
    affinities = rule.affinities(logits.reshape(-1, logits.shape[-1]))
    allowed = rule.groups.chosen(affinities if correction is None else affinities + correction)
    return ~allowed.gather(1, rule(logits, correction).ids).all(-1)


# ------------------------------------------------------------------------------------------------------ architectures

Rule = TopK | Sparsemixer | Top1

#: `MoESpec.router` → its rule
ROUTERS: dict[str, Callable[..., Rule]] = {
    "softmax": partial(TopK, activation="softmax"),
    "sigmoid": partial(TopK, activation="sigmoid"),
    "topk-softmax": partial(TopK, activation="softmax", before=False),
    "softmax-group": partial(TopK, activation="softmax", ordered=False),
    "sigmoid-group": partial(TopK, activation="sigmoid", ordered=False),
    "sparsemixer": Sparsemixer,
    "top1": Top1,
}

#: what a rule must be told, beyond its kind and K
NEEDS: dict[str, tuple[str, ...]] = {
    "softmax": ("normalise",), "sigmoid": ("normalise",), "softmax-group": ("groups",),
    "sigmoid-group": ("groups", "normalise"), "top1": ("capacity",)}

#: model_type → what its code does and its config does not say
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"normalise": True, "narrow": False},
    "gpt_oss": {"dtype": None},
    "llama4_text": {"normalise": False, "before": False},
    "deepseek": {"normalise": False, "ordered": False},
    "deepseek_v2": {"normalise": False, "ordered": False},          # its config's norm_topk_prob is not used
}

#: model types whose router computes logits in float32 whatever the model's dtype
FLOAT32_LOGITS = ("deepseek", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite")


def router_for(source: Any, **facts: Any) -> Rule:
    """The rule by which an architecture routes.

    Parameters
    ----------
    source : a transformers config, or a `MoESpec`.
    facts : fields of the rule that the source does not tell, or that are to differ: a spec knows neither `normalise`
        nor `groups` nor `capacity`.

    Raises
    ------
    ValueError : the router is of a kind unknown here, or a fact is missing; the message names it.
    """
    spec = source if isinstance(source, MoESpec) else MoESpec.from_config(source)
    if spec.router not in ROUTERS:
        raise ValueError(f"{spec.name}: no rule for a router of the kind {spec.router!r}; there are "
                         f"{', '.join(ROUTERS)}")
    known = {"K": spec.K} | ({} if source is spec else _stated(source, spec.router))
    known |= ARCHITECTURES.get(spec.model_type, {}) | facts
    if missing := [fact for fact in NEEDS.get(spec.router, ()) if fact not in known]:
        raise ValueError(f"{spec.name}: its {spec.router} router depends on {' and '.join(missing)}, which is not "
                         f"known here; give the model's config, or {', '.join(fact + '=…' for fact in missing)}")
    return ROUTERS[spec.router](**known)


def _stated(config: Any, kind: str) -> dict[str, Any]:
    """The rule's fields as far as a config states them."""
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()           # of a multimodal model
    if kind == "sparsemixer":
        return {"jitter": config.router_jitter_noise}
    if kind == "top1":
        return {"capacity": config.expert_capacity, "dtype": getattr(torch, config.router_dtype),
                "rounded": getattr(config, "dtype", None)}
    stated: dict[str, Any] = {}
    if getattr(config, "norm_topk_prob", None) is not None:
        stated["normalise"] = config.norm_topk_prob
    if getattr(config, "routed_scaling_factor", None) is not None:
        stated["scale"] = config.routed_scaling_factor
    if kind == "softmax-group":
        stated["groups"] = Groups(config.n_group, config.topk_group, score="max", mask=0.0)
    if kind == "sigmoid-group":
        stated["groups"] = Groups(config.n_group, config.topk_group)
    return stated


@dataclass(frozen=True, eq=False)
class LinearRouter:
    """A router: its weight [E, H], the bias [E] of its logits, the correction bias [E] of its choice, and its rule.

    dtype : of the logits; None is that of x.
    """

    weight: Tensor
    rule: Rule
    bias: Tensor | None = None
    correction: Tensor | None = None
    dtype: torch.dtype | None = None

    def logits(self, x: Tensor) -> Tensor:
        """[..., E] of x [..., H]."""
        dtype = self.dtype or x.dtype
        return F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def __call__(self, x: Tensor) -> Routing:
        """Route x [..., H]; where a rule counts along sequences, x is [..., S, H]."""
        return self.rule(self.logits(x), self.correction)

    @classmethod
    def of(cls, module: nn.Module, source: Any, **facts: Any) -> LinearRouter:
        """The same router as a live model's module (`MoELayer.router`); `source` and `facts` as of `router_for`."""
        rule = router_for(source, **facts)
        spec = source if isinstance(source, MoESpec) else MoESpec.from_config(source)
        linear = getattr(module, "classifier", module)                  # Switch keeps a linear layer inside
        dtype = rule.dtype if isinstance(rule, Top1) else torch.float32 if spec.model_type in FLOAT32_LOGITS else None
        return cls(linear.weight.detach(), rule, getattr(linear, "bias", None),
                   getattr(module, "e_score_correction_bias", None), dtype)
