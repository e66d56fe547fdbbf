"""Attention, shared experts and dense layers cut over the ranks that share experts.

Source: AWS Neuron's MoE guide, "Parallelism Strategies for Routed Experts"; Megatron-LM (Shoeybi et
al. 2019). Projections to heads, and to I, are cut by their outputs, so that each rank has whole
heads; those back to H by their inputs, and all ranks add up. Of fewer heads of keys and values than
ranks, each rank holds the one that its queries read. A module is cut if all of its parameters are
known by name; any other (state spaces, norms across heads) is on every rank, as are embeddings,
norms, routers and the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moelab.experts.sharding import share
from moelab.parallel.exchange import Exchange

#: parameters of attention that are cut by heads of queries, and of keys and values; those that each
#: rank needs whole, of a latent that all heads share
QUERIES = {"q_proj", "q_b_proj", "kv_b_proj", "sinks"}
KEYS = {"k_proj", "v_proj"}
LATENT = {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}
#: norms of heads
NORMS = {"q_norm", "k_norm"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}


def cut_dense(model: nn.Module, ranks: Exchange) -> None:
    """Keep this rank's part of a model's attention and feed-forward layers, in place.

    Raises ValueError: heads that cannot be shared out evenly."""
    for name, module in model.named_modules():
        if _attends(module):
            _cut_heads(name, module, ranks)
        elif _names(module) == FEED_FORWARD and isinstance(module.down_proj, nn.Linear):
            I = len(module.gate_proj.weight)
            sizes = share(I, ranks.size)
            part = sum(sizes[: ranks.rank]), sizes[ranks.rank], I
            _keep(module.gate_proj, *part)
            _keep(module.up_proj, *part)
            _add_up(module.down_proj, ranks, "feed-forward", *part)


def _names(module: nn.Module) -> set[str]:
    return {name.partition(".")[0] for name, _ in module.named_parameters()}


def _attends(module: nn.Module) -> bool:
    """Whether a module is attention that is known in all of its parts."""
    names = _names(module)
    if "o_proj" not in names or names - (QUERIES | KEYS | LATENT | NORMS | {"o_proj"}):
        return False
    size = getattr(module, "head_dim", None)
    said = size and hasattr(module, "num_key_value_groups")
    if not (said if "k_proj" in names else hasattr(module, "num_heads")):
        return False
    return all(len(getattr(module, norm).weight) == size for norm in names & NORMS)


def _cut_heads(name: str, module: Any, ranks: Exchange) -> None:
    names = _names(module)
    keys = len(module.k_proj.weight) // module.head_dim if "k_proj" in names else 0
    heads = keys * module.num_key_value_groups if keys else module.num_heads
    W = ranks.size
    if heads % W or keys % W and W % keys:
        raise ValueError(
            f"{name} has {heads} heads, {keys or heads} of keys and values, which {W} ranks cannot share "
            f"evenly: choose another --tp, or spread whole experts (--parallel ep-a2a)"
        )
    n = heads // W
    for own in names & QUERIES:
        _keep(getattr(module, own), ranks.rank * n, n, heads)
    for own in names & KEYS:
        _keep(getattr(module, own), ranks.rank * keys // W, max(keys // W, 1), keys)
    if keys:
        module.num_key_value_groups = n // max(keys // W, 1)
    _add_up(module.o_proj, ranks, "attention", ranks.rank * n, n, heads)


def _keep(part: Any, *which: int) -> None:
    """Of a layer's outputs, or of a parameter, `which` as of `_narrow`."""
    for p in part.parameters() if isinstance(part, nn.Module) else [part]:
        p.data = _narrow(p.data, 0, *which)


def _narrow(tensor: Tensor, dim: int, first: int, n: int, of: int) -> Tensor:
    """n of so many equal parts, from the first on."""
    size = tensor.shape[dim] // of
    return tensor.narrow(dim, first * size, n * size).clone(memory_format=torch.contiguous_format)


def _add_up(linear: Any, ranks: Exchange, label: str, *which: int) -> None:
    """Of a layer's inputs `which`; its outputs are summed over ranks, of which one has the bias."""
    linear.weight.data = _narrow(linear.weight.data, 1, *which)
    if linear.bias is not None and ranks.rank:
        linear.bias.data.zero_()
    linear.register_forward_hook(lambda _m, _args, y: ranks.all_reduce(y, label))
