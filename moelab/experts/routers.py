"""Routers: from logits to the experts of every token and their weights, as the architectures define them.

Sources: Neuron MoE guide, "Router" and "Router execution in sequence parallel mode"; the group limits are DeepSeek-V3
§2.1.2 (arXiv 2412.19437) and DeepSeek-V2 §2.1.3 (2405.04434), sparsemixer is GRIN's (2409.12136), top-1 with capacity
Switch's (2101.03961, §2.2). A *rule* is a pure function of the logits and of a correction bias that acts on the choice
alone; `LinearRouter` has a router's weights in front. Arithmetic and dtypes are transformers' own. Which of two experts
with equal scores is chosen is undefined (`torch.topk`). Left out: training (jitter, sampling, auxiliary losses).

    x [..., H]  →  logits [..., E]  →  ids [T, K], E means "no expert"    weights [T, K]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moelab.configs import spec_from_config
from moelab.specs import MoESpec

#: names of the bias that acts on the choice alone
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
#: hidden states on which a rule is compared with the live router
PROBE = 64


class Routing(NamedTuple):
    ids: Tensor             # int64 [T, K]; E means "no expert"
    weights: Tensor         # [T, K]


@dataclass(frozen=True)
class Groups:
    """Only experts of the `best` of `n` groups can be chosen; a group is E/n neighbouring experts.

    score : a group's score: "two best" (DeepSeek-V3: the sum of its two best scores) or "max" (DeepSeek-V2).
    mask : the score of experts in other groups. −inf excludes them (transformers); 0.0 (the Neuron SDK's
        `GroupLimitedRouter`) does not where a correction bias makes scores negative.
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
        """Whether the expert's group is among the best: scores [T, E] → bool [T, E]."""
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
    """The K experts of the highest score, weighted with their affinities."""

    K: int
    activation: str = "softmax"                 # or "sigmoid": from logits to affinities
    before: bool = True                         # activation before selection, of all E logits; else of the K chosen
    normalise: bool = False                     # divide a token's weights by their sum (L1) plus `eps`
    scale: float = 1.0                          # routed scaling factor, after normalisation
    groups: Groups | None = None
    dtype: torch.dtype | None = torch.float32   # of the affinities; None is the logits' own; the SDK's is float64
    narrow: bool = True                         # return weights in the logits' dtype; else in `dtype`
    ordered: bool = True                        # from the best down; else in any order, summed so (DeepSeek)
    whole: bool = False                         # with before=False, the sigmoid is still of all E logits
    eps: float = 1e-20

    def __post_init__(self) -> None:
        if self.activation not in ("softmax", "sigmoid"):
            raise ValueError(f"affinities are 'softmax' or 'sigmoid', not {self.activation!r}")
        if self.groups is not None and not self.before:
            raise ValueError("groups are chosen by affinities, which before=False computes only for the chosen experts")

    def affinities(self, logits: Tensor) -> Tensor:
        logits = logits if self.dtype is None else logits.to(self.dtype)
        return logits.softmax(-1) if self.activation == "softmax" else logits.sigmoid()

    def __call__(self, logits: Tensor, correction: Tensor | None = None, favour: Tensor | None = None) -> Routing:
        """Route logits [..., E]; for the choice alone, correction [E] is added to what is compared, favour [E] to the
        logits."""
        logits = logits.reshape(-1, logits.shape[-1])
        E = logits.shape[1]
        if self.K > E or self.groups is not None and self.K > self.groups.best * (E // self.groups.n):
            raise ValueError(f"{self.K} experts a token cannot be chosen: there are {E}, limited to {self.groups}")
        favoured = logits if favour is None else logits + favour
        if not self.before:
            ids = (favoured if correction is None else favoured + correction).topk(self.K).indices
            weights = self.affinities(logits).gather(1, ids) if self.whole else self.affinities(logits.gather(1, ids))
        else:
            affinities = self.affinities(logits)
            scores = affinities if favour is None else self.affinities(favoured)
            scores = scores if correction is None else scores + correction
            if self.groups is not None:
                scores = scores.masked_fill(~self.groups.chosen(scores), self.groups.mask)
                if self.groups.score == "max":
                    affinities = scores             # DeepSeek-V2 masks the weights too
            ids = scores.topk(self.K, sorted=self.ordered).indices
            weights = affinities.gather(1, ids)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        if self.scale != 1.0:
            weights = weights * self.scale
        return Routing(ids, weights.to(logits.dtype) if self.narrow else weights)


@dataclass(frozen=True)
class Sparsemixer:
    """Phi-3.5-MoE at inference: the two highest logits, each weighted by a softmax over the logits near it.

    Near is within 2·jitter of it, relative to the larger of |logit| and it; the second is weighted without the first.
    """

    jitter: float = 0.01
    K: int = 2

    def __post_init__(self) -> None:
        if self.K != 2:
            raise ValueError(f"sparsemixer chooses two experts a token, not {self.K}")

    def __call__(self, logits: Tensor, correction: Tensor | None = None) -> Routing:
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
    """Switch: the most probable expert, unless `capacity` earlier tokens of the sequence have chosen it already."""

    capacity: int
    dtype: torch.dtype = torch.float32          # of the softmax
    rounded: torch.dtype | None = None          # what its result is rounded to before the choice
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


def router_for(source: Any, **facts: Any) -> Rule:
    """The rule of a transformers config or `MoESpec`, with `facts` that it does not tell (`NEEDS`) or that differ."""
    if isinstance(source, MoESpec):
        if source.router not in ROUTERS:
            raise ValueError(f"{source.name}: no rule for a router of the kind {source.router!r}; there are "
                             f"{', '.join(ROUTERS)}")
        if missing := [fact for fact in NEEDS.get(source.router, ()) if fact not in facts]:
            raise ValueError(f"{source.name}: its {source.router} router depends on {' and '.join(missing)}, which a "
                             f"spec does not know; give the model's config, or "
                             f"{', '.join(fact + '=…' for fact in missing)}")
        return ROUTERS[source.router](**{"K": source.K} | facts)
    config = source.get_text_config() if hasattr(source, "get_text_config") else source
    return replace(_architecture(config).rule(config, spec_from_config(source).K), **facts)


@dataclass(frozen=True)
class Architecture:
    rule: Callable[[Any, int], Rule]            # (config, K) → its rule
    dtype: torch.dtype | None = None            # in what its logits are computed; None is the router weight's
    wide: bool = False                          # the logits are float32 from then on
    back: bool = False                          # the weights are rounded to the hidden states' dtype


def _deepseek_v2(c: Any, K: int) -> TopK:           # its config's norm_topk_prob is not used
    groups = Groups(c.n_group, c.topk_group, "max", 0.0) if c.topk_method == "group_limited_greedy" else None
    return TopK(K, groups=groups, scale=c.routed_scaling_factor, ordered=False)


def _deepseek_v3(c: Any, K: int, mask: float = -math.inf, **facts: Any) -> TopK:
    groups = None if c.n_group is None else Groups(c.n_group, c.topk_group, mask=mask)
    return TopK(K, **{"activation": "sigmoid", "groups": groups, "normalise": getattr(c, "norm_topk_prob", True),
                      "ordered": False, "scale": c.routed_scaling_factor} | facts)


def _cohere(c: Any, K: int) -> TopK:
    if c.expert_selection_fn == "softmax":
        return TopK(K, before=False)
    return TopK(K, "sigmoid", before=False, normalise=c.norm_topk_prob, dtype=None)


def _laguna(c: Any, K: int) -> TopK:
    if c.moe_router_logit_softcapping > 0:
        raise ValueError("laguna with moe_router_logit_softcapping caps its logits by tanh, which no rule here does")
    return TopK(K, "sigmoid", normalise=True)


_v3 = Architecture(_deepseek_v3, torch.float32)
_qwen = Architecture(lambda c, K: TopK(K, normalise=c.norm_topk_prob))
_renormalised = Architecture(lambda c, K: TopK(K, normalise=True))
_topk_softmax = Architecture(lambda c, K: TopK(K, before=False), wide=True, back=True)
_minimax_m2 = Architecture(lambda c, K: TopK(K, "sigmoid", normalise=True, narrow=False, ordered=False))

#: model_type → how it routes
ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(("axk1", "bailing_hybrid", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note_text", "exaone_moe",
                     "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm5_next_text", "glm_moe_dsa", "hy_v4",
                     "kimi_linear", "mimo_v2_flash", "nemotron_h", "solar_open"), _v3),
    "axk2": Architecture(partial(_deepseek_v3, mask=0.0), torch.float32),
    "beam": Architecture(partial(_deepseek_v3, scale=1.0, ordered=True), torch.float32),    # its block scales
    **dict.fromkeys(("deepseek", "deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text"),
                    Architecture(_deepseek_v2, torch.float32)),
    **dict.fromkeys(("flex_olmo", "mellum", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen4_exp_text",
                     "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text"), _qwen),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_vl_moe_text", "hunyuan_v1_moe"), _renormalised),
    "jamba": Architecture(lambda c, K: TopK(K), back=True),
    **dict.fromkeys(("mixtral", "minimax"), Architecture(lambda c, K: TopK(K, normalise=True, narrow=False))),
    "ernie4_5_moe": Architecture(lambda c, K: TopK(K, normalise=True), torch.float32, back=True),
    "mistral4": Architecture(partial(_deepseek_v3, activation="softmax", mask=0.0, dtype=None)),
    "mistral_large4_text": Architecture(partial(_deepseek_v3, activation="softmax", mask=0.0), torch.float32),
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), _topk_softmax),
    **dict.fromkeys(("aria_text", "gpt_oss"), Architecture(lambda c, K: TopK(K, before=False, dtype=None))),
    # its router divides by K, which a factor does to the bit where K is a power of two
    "openai_privacy_filter": Architecture(lambda c, K: TopK(K, before=False, scale=1 / K), torch.float32),
    "llama4_text": Architecture(lambda c, K: TopK(K, "sigmoid", before=False, whole=True)),
    "cohere2_moe": Architecture(_cohere, back=True),
    "kolibri1": Architecture(lambda c, K: TopK(K, "sigmoid", before=False, normalise=c.norm_topk_prob), torch.float32),
    "flint": Architecture(lambda c, K: TopK(K, "sigmoid", normalise=c.norm_topk_prob), torch.float32),
    "lfm2_moe": Architecture(lambda c, K: TopK(K, "sigmoid", normalise=c.norm_topk_prob, eps=1e-6, dtype=None,
                                               scale=c.routed_scaling_factor)),
    "afmoe": Architecture(lambda c, K: TopK(K, "sigmoid", normalise=True, scale=c.route_scale, narrow=False)),
    "hy_v3": Architecture(lambda c, K: TopK(K, "sigmoid", normalise=True, scale=c.router_scaling_factor, ordered=False),
                          torch.float32),
    "laguna": Architecture(_laguna, wide=True, back=True),
    **dict.fromkeys(("minimax_m2", "minimax_m3_vl_text", "step3p7_text"), _minimax_m2),
    "phimoe": Architecture(lambda c, K: Sparsemixer(c.router_jitter_noise, K)),
    "switch_transformers": Architecture(lambda c, K: Top1(c.expert_capacity, getattr(torch, c.router_dtype),
                                                          getattr(c, "dtype", None))),
}

#: model_type → why its router is none of these rules
REFUSED: dict[str, str] = {
    "dbrx": "has its choice in the block, not in the router",
    "deepseek_v4": "takes its experts from a table of token ids in some layers, and the root of a softplus in others",
    "inkling_text": "shares the softmax of its weights with the shared experts",
    "inkling2_text": "scores with an activation that is none of softmax and sigmoid",
    "jetmoe": "gathers tokens by expert, and routes attention too",
    "longcat_flash": "chooses among experts that compute nothing, with ids beyond the others",
    "muse_spark_text": "multiplies its logits and scores with an activation of its own",
    "nllb_moe": "drops the second expert by chance or by capacity over the whole batch",
    "zaya": "carries a state of its own from layer to layer",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text"),
                    "norms its input and has a factor for each expert"),
}


def _architecture(config: Any) -> Architecture:
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(f"no rule reproduces the router of {kind}: it " +
                         REFUSED.get(kind, "has not been compared with any; a line in moelab.experts.routers."
                                           "ARCHITECTURES would say how it routes"))
    return ARCHITECTURES[kind]


@dataclass(frozen=True, eq=False)
class LinearRouter:
    weight: Tensor                          # [E, H]
    rule: Rule
    bias: Tensor | None = None              # [E], of the logits
    correction: Tensor | None = None        # [E], of the choice alone
    dtype: torch.dtype | None = None        # these three as of `Architecture`
    wide: bool = False
    back: bool = False

    def logits(self, x: Tensor) -> Tensor:
        dtype = self.dtype or self.weight.dtype
        logits = F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
        return logits.float() if self.wide else logits

    def __call__(self, x: Tensor, favour: Tensor | None = None) -> Routing:
        """Route x [..., H]; for a rule that counts along sequences [..., S, H]. favour : see `TopK`."""
        how = {} if favour is None else {"favour": favour}
        ids, weights = self.rule(self.logits(x), self.correction, **how)
        return Routing(ids, weights.to(x.dtype) if self.back else weights)

    @classmethod
    @torch.no_grad()
    def of(cls, layer: Any, config: Any, **facts: Any) -> LinearRouter:
        """The router of a live model's `moelab.models.MoELayer`; `config` and `facts` as of `router_for`.

        ValueError : no rule for this architecture, or another id or bit of the weights for random hidden states.
        """
        inner = config.get_text_config() if hasattr(config, "get_text_config") else config
        known, rule, module = _architecture(inner), router_for(config, **facts), layer.router
        linear = next((getattr(module, name) for name in ("classifier", "gate", "wg") if hasattr(module, name)), module)
        holders = [module, layer.block, getattr(module, "moe_statics", None)]
        correction = next((found.detach().flatten() for holder in holders for name in CORRECTIONS
                           if (found := getattr(holder, name, None)) is not None), None)
        dtype = rule.dtype if isinstance(rule, Top1) else known.dtype
        router = cls(linear.weight.detach(), rule, getattr(linear, "bias", None), correction, dtype, known.wide,
                     known.back)
        if not facts:
            router._check(layer, getattr(inner, "dtype", None) or linear.weight.dtype)
        return router

    def _check(self, layer: Any, dtype: torch.dtype) -> None:
        x = torch.randn(PROBE, self.weight.shape[1], generator=torch.Generator().manual_seed(0))
        x = x.to(self.weight.device, dtype)
        ids, weights = layer.routing(layer.ask(x))
        mine = self(x[:, None] if isinstance(self.rule, Top1) else x)
        if torch.equal(mine.ids, ids) and mine.weights.dtype == weights.dtype and torch.equal(mine.weights, weights):
            return
        others = sum(a != b for a, b in zip(mine.ids.sort(-1).values.tolist(), ids.sort(-1).values.tolist()))
        raise ValueError(f"{layer.name}: the rule {self.rule} does not reproduce {type(layer.router).__name__}: of "
                         f"{PROBE} random hidden states {others} get other experts, the first weights "
                         f"{mine.weights[0].tolist()} ({mine.weights.dtype}) instead of {weights[0].tolist()} "
                         f"({weights.dtype})")
