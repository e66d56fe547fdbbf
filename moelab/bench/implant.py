"""Routing that is implanted: a synthetic model that routes a sequence of tokens as a trace says, in
every engine that runs it.

Each position of the trace has a vocabulary id of its own. Attention writes so little into the
residual stream that a token's router inputs depend on the token alone, so they are the same
whatever comes before it, in prefill and in decode, and in batches. Experts do change the stream.
Layer by layer, in one pass of the model itself, each router is solved for by ridge regression on the
inputs that it really sees, so that the K experts of the trace are on top; targets that are exceeded
are moved along (Ho and Kashyap 1965), which finds a margin where an exact solution cannot be. Asked
a layer early, on the input of the layer before, a router is right as often as in a real model
(`AHEAD`): that, too, is a target. The head says the next token, so greedy decoding follows the
sequence.

Limits: about as many tokens as the stream is wide (H), more where all layers have fewer experts than
that together (L · E ≤ H); always fewer than the vocabulary. What is not found is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.base.specs import MoESpec
from moelab.models import compat
from moelab.models.patches import Patches
from moelab.models.seam import ROUTERS, MoELayer, leave_out, plug
from moelab.trace import RoutingTrace

#: architectures whose tensors have these names
MODELS = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v2")
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: attention's output and the embeddings are so many times larger than drawn
QUIET, LOUD = 2**-6, 4
#: slots that the next layer's router tells right from this layer's input: Qwen3-30B-A3B Q4_K_M,
#: Helldez/BigMoeOnEdge docs/expert-prediction.md
AHEAD = 0.886
#: a chosen expert's logit is above all others by at least this; weights fall by e^SPREAD from a
#: token's first expert to its last, where the trace does not say them
GAP, SPREAD = 2.0, 1.5
RIGHT = 0.99  # of all slots, at least
TOKENS = 512  # of a name's routing
FIRST = 1024  # vocabulary ids before are the tokenizer's
ROW = 128  # tokens of a sequence in the pass that solves
EARLY = 0.5  # weight of a token's input a layer early beside its own
TOKENS_FILE = "tokens.json"
#: a card's name, a trace, its path, or ids [T, L, K]
Routing = str | Path | RoutingTrace | np.ndarray


def implant(routing: Routing, spec: MoESpec, config: Any, weights: Any) -> str:
    """Change the `moelab.bench.synthesize.Weights` of a model so that it routes as wanted; returns
    what its `TOKENS_FILE` says: the tokens, a row a sequence. ValueError: see `wanted`; another
    architecture than `MODELS`; more tokens than the vocabulary, or than routers can be found for."""
    if spec.model_type not in MODELS:
        raise ValueError(
            f"routing is not implanted into {spec.model_type}; known are {', '.join(MODELS)}"
        )
    ids, logits, lengths, words = wanted(routing, spec, weights.seed)
    first = min(FIRST, spec.vocab - len(ids))
    if first < 1:
        raise ValueError(
            f"the routing has {len(ids)} tokens, each a word of its own; the vocabulary has {spec.vocab}"
        )
    weights.factors = {"embed_tokens": LOUD, "o_proj": QUIET}
    made = Implant(spec, ids, logits, first, weights.seed)
    made.embed(weights.whole(EMBEDDINGS))
    weights.given = made.found
    model = compat.meta_twin(config)
    leave_out(model)
    compat.fill(model, config, {key: weights.whole(key) for key in weights.others})
    made.solve(model.eval(), plug(model, source=weights.expert))
    tokens = [row.tolist() for row in made.tokens.split(lengths)]
    return json.dumps({"routing": words, "tokens": tokens})


def wanted(routing: Routing, spec: MoESpec, seed: int = 0) -> tuple[Tensor, Tensor, list[int], str]:
    """(ids int64 [T, L, K], logits above the others' [T, L, K], tokens of each sequence, what it is
    in words) of a model card's name, a trace, its path, or ids [T, L, K].

    Raises ValueError: a trace of fewer layers, or another E or K; tokens that visit no expert, or
    one twice."""
    words = "ids that were given"
    if isinstance(routing, str | Path):
        words = str(Path(routing).name)
        routing = _named(routing, spec, seed)
    weights = None
    lengths = [len(routing)]
    if isinstance(routing, RoutingTrace):
        counts = torch.unique_consecutive(routing.sequence, return_counts=True)[1]
        weights, lengths, E = routing.weights, counts.tolist(), routing.spec.E
        ids = routing.ids.long()
        _require("E", E, spec.E)
    else:
        ids = torch.from_numpy(np.ascontiguousarray(routing)).long()
    _require("K", ids.shape[2], spec.K)
    if ids.shape[1] < spec.L:
        raise ValueError(f"the routing has {ids.shape[1]} layers; {spec.name} has {spec.L}")
    ids = ids[:, : spec.L]
    ordered = ids.sort().values
    if not len(ids) or ids.min() < 0 or ids.max() >= spec.E:
        raise ValueError(f"the routing needs expert ids from 0 to {spec.E - 1} in every slot")
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("the routing has tokens with the same expert twice in a layer")
    if weights is None or (weights <= 0).any():
        above = torch.linspace(SPREAD, 0, spec.K).expand(ids.shape)
    else:
        above = weights[:, : spec.L].float().log()
        above = above - above.amin(-1, keepdim=True)
    return ids, GAP + above, lengths, words


def _require(name: str, found: int, needed: int) -> None:
    if found != needed:
        raise ValueError(f"the routing has {name} = {found}; the model has {name} = {needed}")


def _named(routing: str | Path, spec: MoESpec, seed: int) -> RoutingTrace | np.ndarray:
    """A trace from its file, or `TOKENS` tokens of a card's routing."""
    return RoutingTrace.load(routing)


class Implant:
    """Finds the tensors with which a model routes T tokens as wanted.

    ids, logits : as of `wanted`. first : the vocabulary id of the first token; the others follow.
    found : names → tensors, when `solve` has run."""

    def __init__(self, spec: MoESpec, ids: Tensor, logits: Tensor, first: int, seed: int) -> None:
        self.spec, self.ids = spec, ids
        T, L, K = ids.shape
        #: [T, L, E]: 0 where an expert is not chosen
        self.targets = torch.zeros(T, L, spec.E).scatter_(2, ids, logits)
        self.tokens = first + torch.arange(T)
        self.draw = torch.Generator().manual_seed(seed)
        #: tokens in the pass, [B, S]: whole rows, the last filled with the first tokens
        S = min(T, ROW)
        self.rows = (torch.arange(-(-T // S) * S) % T).view(-1, S)
        self.before: Tensor | None = None  # router inputs of the layer before [T, H]
        self.found: dict[str, Tensor] = {}

    def embed(self, drawn: Tensor) -> Tensor:
        """The embeddings [V, H], those of the sequence's tokens being what they route to, in random
        directions, and as much that is a token's own while the stream has room for it."""
        T, H = len(self.ids), drawn.shape[1]
        routed = (self.targets > 0).float().view(T, -1)
        routed -= routed.mean(0)
        codes = routed @ torch.randn(routed.shape[1], H, generator=self.draw)
        own = torch.randn(T, H, generator=self.draw) * min(1.0, H / T)
        codes = codes / codes.std(1, keepdim=True).clamp(min=1e-6) + own
        embeddings = drawn.clone()
        embeddings[self.tokens] = (codes * (drawn.float().std() / codes.std())).to(drawn.dtype)
        self.found[EMBEDDINGS] = embeddings
        return embeddings

    def solve(self, model: nn.Module, layers: list[MoELayer]) -> None:
        """One pass of the model, which has the embeddings, finding router after router, then the
        head. ValueError where routers cannot be found."""
        with Patches() as patches, torch.inference_mode():
            for layer in layers:
                patches.hook(layer.router.register_forward_pre_hook, partial(self.route, layer))
            patches.hook(model.lm_head.register_forward_pre_hook, self.say_next)
            model(input_ids=self.tokens[self.rows], use_cache=False)

    def route(self, layer: MoELayer, router: nn.Module, args: tuple) -> None:
        """Give a router its weights before it runs; args : its inputs."""
        x = args[0].reshape(-1, args[0].shape[-1])[: len(self.ids)]
        target = self.targets[:, layer.index]
        inputs, targets = x, target
        if self.before is not None:
            inputs = torch.cat([x, EARLY * self.before])
            targets = torch.cat([target, EARLY * self.early(target)])
        solved = regress(inputs, targets).to(router.weight.dtype)
        chosen = F.linear(x, solved.to(x.dtype)).topk(self.spec.K).indices
        right = (target.gather(1, chosen) > 0).float().mean().item()
        if right < RIGHT:
            raise ValueError(
                f"{len(x)} tokens are too many for this model: a router of layer {layer.index} would "
                f"choose {right:.1%} of the experts that the routing says; give about "
                f"{self.spec.H} tokens, or a wider model"
            )
        router.weight.data = solved
        self.found[
            f"{layer.name}.{next(name for name in ROUTERS if hasattr(layer.block, name))}.weight"
        ] = solved
        self.before = x

    def early(self, target: Tensor) -> Tensor:
        """What a router is to say a layer early: the logits [T, E] with each chosen expert exchanged
        for another with probability 1 − `AHEAD`, by how often the layer chooses them."""
        chosen = target > 0
        score = torch.rand(target.shape, generator=self.draw)
        lost = chosen & (score > AHEAD)
        race = chosen.float().mean(0) / -torch.rand(target.shape, generator=self.draw).log()
        order = race.masked_fill(chosen, -1).argsort(1, descending=True)
        place = order.argsort(1)  # of each expert among the newcomers
        new = place < lost.sum(1, keepdim=True)
        return torch.where(new, GAP, target.masked_fill(lost, 0))

    def say_next(self, head: nn.Linear, args: tuple) -> None:
        """Have the head say the next token of the sequence after each."""
        x = args[0].reshape(-1, args[0].shape[-1])[: len(self.ids) - 1].float()
        rows = x / x.norm(dim=1, keepdim=True) * head.weight.float().norm(dim=1).max()
        weight = head.weight.clone()
        weight[self.tokens[1:]] = rows.to(weight.dtype)
        self.found[HEAD] = head.weight.data = weight


def regress(x: Tensor, targets: Tensor, rounds: int = 30) -> Tensor:
    """W [E, H] with x [n, H] · Wᵀ as near as can be to the targets [n, E], which a logit may exceed
    where it is above 0, and be below elsewhere."""
    x = x.double()
    wanted = targets > 0
    least = targets = targets.double()
    gram = x.T @ x
    gram.diagonal().add_(1e-4 * gram.diagonal().mean())
    factor = torch.linalg.cholesky(gram)
    for _ in range(rounds):
        weight = torch.cholesky_solve(x.T @ targets, factor)
        logits = x @ weight
        if (torch.where(wanted, least - logits, logits).max() < GAP / 4).item():
            break
        targets = torch.where(wanted, torch.maximum(logits, least), logits.clamp(max=0))
    return weight.T.contiguous()
