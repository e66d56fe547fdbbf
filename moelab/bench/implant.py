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

from moelab.base import registry
from moelab.base.specs import MoESpec
from moelab.cards import load_model
from moelab.models import compat
from moelab.models.patches import Patches
from moelab.models.seam import ROUTERS, MoELayer, leave_out, plug
from moelab.simulation.routing import routing_of
from moelab.trace import RoutingTrace, load

#: architectures whose tensors have these names
ARCHITECTURES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v2")
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUIET = 2**-10  # attention's output is so many times what is drawn
#: slots that the next layer's router tells right from this layer's input: Qwen3-30B-A3B Q4_K_M,
#: Helldez/BigMoeOnEdge docs/expert-prediction.md
AHEAD = 0.886
#: a chosen expert's logit is above all others by at least this; weights fall by e^SPREAD from a
#: token's first expert to its last, where the trace does not say them
GAP, SPREAD = 2.0, 1.5
RIGHT = 0.99  # of all slots, at least
TOKENS = 512  # of a name's routing, and of a bench's at least
FIRST = 1024  # vocabulary ids before are the tokenizer's
ROW = 128  # tokens of a sequence in the pass that solves
EARLY = 1.0  # weight of a token's input a layer early beside its own
CHANGE = 0.5  # of the stream, by the first layer's experts
RIDGE, ROUNDS = 1e-2, 20
TOKENS_FILE = "tokens.json"
#: a card's name, a trace, its path, or ids [T, L, K]
Routing = str | Path | RoutingTrace | np.ndarray


def implant(routing: Routing, spec: MoESpec, config: Any, weights: Any) -> str:
    """Change the `moelab.bench.synthesize.Weights` of a model so that it routes as wanted; returns
    what its `TOKENS_FILE` says: the tokens, a row a sequence. ValueError: see `wanted`; another
    architecture than `ARCHITECTURES`; more tokens than the vocabulary, or than routers can be found for."""
    if spec.model_type not in ARCHITECTURES:
        raise ValueError(
            f"routing is not implanted into {spec.model_type}; known are {', '.join(ARCHITECTURES)}"
        )
    ids, logits, lengths, words = wanted(routing, spec, weights.seed)
    first = min(FIRST, spec.vocab - len(ids))
    if first < 1:
        raise ValueError(
            f"the routing has {len(ids)} tokens, each a word of its own; the vocabulary has {spec.vocab}"
        )
    weights.factors = {"o_proj": QUIET}
    made = Implant(spec, ids, logits, first, weights.seed)
    model = compat.meta_twin(config)
    leave_out(model)
    compat.fill(model, config, {key: weights.whole(key) for key in weights.others})
    made.solve(model.eval(), plug(model, source=weights.expert))
    weights.given = made.found
    tokens = [row.tolist() for row in made.tokens.split(lengths)]
    return json.dumps({"routing": words, "tokens": tokens})


def wanted(routing: Routing, spec: MoESpec, seed: int = 0) -> tuple[Tensor, Tensor, list[int], str]:
    """(ids int64 [T, L, K], logits above the others' [T, L, K], tokens of each sequence, what it is
    in words). Tokens that skip a layer are left out.

    Raises ValueError: a trace of fewer layers, or another E or K; tokens that visit an expert
    twice."""
    words = "ids that were given"
    if isinstance(routing, str | Path):
        routing, words = _named(routing, spec, seed)
    E = spec.E
    if isinstance(routing, RoutingTrace):
        E = routing.spec.E if routing.spec.H else E  # else it is the largest id and one, not a fact
        ids, weights, sequence = routing.ids.long(), routing.weights.float(), routing.sequence
    else:
        ids = torch.from_numpy(np.ascontiguousarray(routing)).long()
        weights, sequence = torch.ones_like(ids).float(), torch.zeros_like(ids[:, 0, 0])
    L, K = ids.shape[1:]
    if L < spec.L or (E, K) != (spec.E, spec.K):
        raise ValueError(
            f"the routing has {L} layers of E = {E} experts, K = {K} a token; {spec.name} has "
            f"{spec.L}, E = {spec.E}, K = {spec.K}"
        )
    whole = ((ids >= 0) & (ids < spec.E))[:, : spec.L].all(2).all(1)
    ids, weights = ids[whole, : spec.L], weights[whole, : spec.L]
    if not len(ids):
        raise ValueError(f"the routing has no token with expert ids from 0 to {spec.E - 1}")
    ordered = ids.sort().values
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("the routing has tokens with the same expert twice in a layer")
    above = weights.clamp(min=1e-6).log()
    above = (above - above.amin(-1, keepdim=True)).clamp(max=2 * GAP)
    if not above.any():  # no weights are known
        above = torch.linspace(SPREAD, 0, spec.K, dtype=torch.float32).expand(ids.shape)
    lengths = torch.unique_consecutive(sequence[whole], return_counts=True)[1]
    return ids, GAP + above, lengths.tolist(), words


def _named(routing: str | Path, spec: MoESpec, seed: int) -> tuple[RoutingTrace | np.ndarray, str]:
    """`TOKENS` tokens of a card's routing, or a trace from its file; and its name in words."""
    if (card := registry.like("model", routing)) is None:
        return load(routing), f"the trace {Path(routing).name}"
    return drawn(spec, TOKENS, seed, load_model(card))


def drawn(
    spec: MoESpec, tokens: int, seed: int = 0, like: MoESpec | None = None
) -> tuple[np.ndarray, str]:
    """(ids [T, L, K] of one sequence for a model, what they are), as real models route: as this one
    does, or one that it is to be `like`."""
    routing, words = routing_of(like or spec)
    return routing.draw(spec.L, spec.E, spec.K, [tokens], seed), f"drawn, {words}"


def tokens_of(folder: Path) -> list[int]:
    """The tokens of a folder's sequences, one after the other; none without `TOKENS_FILE`."""
    file = folder / TOKENS_FILE
    return sum(json.loads(file.read_text())["tokens"], []) if file.exists() else []


class Implant:
    """Finds the tensors with which a model routes T tokens as wanted.

    ids, logits : as of `wanted`. first : the vocabulary id of the first token; the others follow.
    found : names → tensors, when `solve` has run."""

    def __init__(self, spec: MoESpec, ids: Tensor, logits: Tensor, first: int, seed: int) -> None:
        self.spec, self.ids = spec, ids
        T, L, K = ids.shape
        #: [T, L, E]: 0 where an expert is not chosen
        self.targets = logits.new_zeros(T, L, spec.E).scatter_(2, ids, logits)
        self.tokens = first + torch.arange(T)
        self.draw = torch.Generator().manual_seed(seed)
        #: tokens in the pass, [B, S]: whole rows, the last filled with the first tokens
        S = min(T, ROW)
        self.rows = (torch.arange(-(-T // S) * S) % T).view(-1, S)
        self.before: Tensor | None = None  # router inputs of the layer before [T, H]
        self.found: dict[str, Tensor] = {}

    def codes(self, H: int) -> Tensor:
        """The tokens' embeddings [T, H] but for their scale, of mean square 1: what a token routes
        to, in random directions, and as much that is its own while the stream has room for it."""
        T = len(self.ids)
        routed = (self.targets > 0).float().view(T, -1)
        routed -= routed.mean(0)
        drawn = partial(torch.randn, generator=self.draw, dtype=torch.float32)
        codes = routed @ drawn(routed.shape[1], H)
        own = drawn(T, H) * min(1.0, H / T)
        codes = codes / codes.std(1, keepdim=True).clamp(min=1e-6) + own
        return codes / codes.square().mean(1, keepdim=True).sqrt()

    def embed(self, model: nn.Module, layer: MoELayer) -> None:
        """Give the model's tokens embeddings so large that the first MoE layer, which is run on them
        alone, changes the stream by `CHANGE` of it."""
        table = model.get_input_embeddings().weight
        codes = self.codes(table.shape[1])
        x = codes.to(table.dtype)
        target = self.targets[:, layer.index]
        layer.router.weight.data = regress(x, target).to(layer.router.weight.dtype)
        with torch.inference_mode():
            out = layer.block(x[None])
        out = out[0] if isinstance(out, tuple) else out
        size = out.float().square().mean().sqrt() / CHANGE
        weight = table * (size / table.float().std())
        weight[self.tokens] = (codes * size).to(table.dtype)
        self.found[EMBEDDINGS] = table.data = weight

    def solve(self, model: nn.Module, layers: list[MoELayer]) -> None:
        """Find the embeddings, then, in one pass of the model, router after router, and the head.
        ValueError where routers cannot be found."""
        self.embed(model, layers[0])
        with Patches() as patches, torch.inference_mode():
            for layer in layers:
                patches.hook(layer.router.register_forward_pre_hook, partial(self.route, layer))
            patches.hook(model.lm_head.register_forward_pre_hook, self.say_next)
            model(input_ids=self.tokens[self.rows], use_cache=False)

    def route(self, layer: MoELayer, router: nn.Module, args: tuple) -> None:
        """Give a router its weights before it runs; args : its inputs."""
        x = args[0].reshape(-1, args[0].shape[-1])[: len(self.ids)]
        target = self.targets[:, layer.index]
        early = None if self.before is None else (self.before, self.early(target))
        solved = regress(x, target, early).to(router.weight.dtype)
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
        drawn = partial(torch.rand, target.shape, generator=self.draw, dtype=torch.float32)
        score = drawn()
        lost = chosen & (score > AHEAD)
        race = chosen.float().mean(0) / -drawn().log()
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


def regress(x: Tensor, targets: Tensor, early: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """W [E, H] with x [n, H] · Wᵀ as near as can be to the targets [n, E], which a logit may exceed
    where it is above 0, and be below elsewhere; with less weight also for early's x and targets."""
    n, H = x.shape
    x = x.double()
    goal = targets.double()
    if early is not None:
        weight = EARLY * min(1.0, H / 2 / n)
        x = torch.cat([x, weight * early[0].double()])
        goal = torch.cat([goal, weight * early[1].double()])
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram)) @ x.T  # [H, n]
    inverse, x, goal = inverse.float(), x.float(), goal.float()
    wanted = goal > 0
    moved = goal
    for _ in range(ROUNDS):
        solved = inverse @ moved
        logits = x @ solved
        short = torch.where(wanted, goal - logits, logits)  # of a target; none is below 0
        if short[:n].max() < GAP / 4:
            break
        moved = torch.where(wanted, torch.maximum(logits, goal), logits.clamp(max=0))
    return solved.T.contiguous()
