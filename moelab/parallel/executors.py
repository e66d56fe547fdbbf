"""Executors with experts on several ranks: all-gather, all-to-all-v, and deduplicated.

Source: AWS Neuron's MoE guide, "Parallelism Strategies for Routed Experts" and "Communication
Optimization for Expert Parallelism with All-to-All-v". Rank r owns the r-th of W consecutive parts
of the tokens. They are sent to where their experts are, computed by `inner`, and the results come
back to the owner. Of a few tokens that every rank has (a decode step) no row is sent there: each
rank computes its experts, and all gather all results.

`AllToAll` with `Exact` inside is bit-identical to one process where a matrix product
does not depend on its number of rows, with experts uncut, for architectures
that sum in the type of their hidden states (not Nemotron-H and Inkling 2). The others add partial
sums: 1e-6 in fp32.

Left out: experts cut along H, and blocks of tokens shared out, which two cores do in
`moelab.static.blockwise`. Routers in sequence parallel are `moelab.parallel.router`.

    x [T, H]    ids [T, K], E means "no expert"    weights [T, K]    W = ep × tp ranks, see `Grid`
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import Exact, Executor
from moelab.experts.sharding import share
from moelab.parallel.exchange import FEW, Exchange, Grid, pack, unpack
from moelab.parallel.sharding import owners


class Parallel(Executor):
    """Base: the ownership of tokens, and where experts are. The tally counts what this rank
    computed.

    inner : runs this rank's rows; by default as transformers' eager does.
    """

    def __init__(self, grid: Grid, inner: Executor | None = None) -> None:
        super().__init__()
        inner = inner or Exact()
        self.grid = grid
        self.inner = inner
        self.tally = inner.tally
        self.lossless = inner.lossless
        if not self.lossless and type(self) is not AllGather:
            raise ValueError(
                f"{type(inner).__name__} drops tokens by how many a whole step has, and here a rank sees "
                f"only those that are sent to it: spread the experts by ep or tp, or drop nothing"
            )

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """For x, ids and weights that every rank has, as will the result."""
        return (self.run_few if len(x) <= FEW else self.run_many)(x, ids, weights, experts)

    def run_many(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """As `run`, each token by its owner."""
        world = self.grid.world
        sizes = share(len(x), world.size)
        own = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        y = self.run_own(x[own], ids[own], weights[own], experts)
        return world.all_gather(y, sizes, "result")

    def run_few(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """As `run`, with all partial sums gathered at once."""
        return self.grid.world.all_reduce(self.partial(x, ids, weights, experts), "result")

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """What this rank's experts add to tokens that all of its peers have."""
        mine = self.ranks(ids, experts) == self.grid.ep.rank
        return self.inner(x, torch.where(mine, ids, experts.num_experts), weights, experts)

    def run_own(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """For the tokens that this rank owns, each rank its own: [T_own, H]."""
        peers = self.peers
        sizes = peers.sizes(len(x), x.device) if peers.size > 1 else [len(x)]
        rows = peers.all_gather(pack(x, ids.int(), weights), sizes, "dispatch")
        x, ids, weights = unpack(rows, (x, ids.int(), weights))
        return peers.reduce_scatter(self.run_row(x, ids.long(), weights, experts), sizes, "combine")

    @property
    def peers(self) -> Exchange:
        """The ranks that gather each other's tokens before `run_row`."""
        return self.grid.tp

    @abstractmethod
    def run_row(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """For the tokens of all `peers`; parts of sums if they share experts."""

    def ranks(self, ids: Tensor, experts: Any) -> Tensor:
        """The ep rank of each choice [T, K], `ep.size` for the id E."""
        return owners(experts.num_experts, self.grid.ep.size).to(ids.device)[ids]


class AllGather(Parallel):
    """Rows to all ranks, partial sums back (reduce-scatter); with experts spread, cut, or both."""

    run = Parallel.run_few  # the rows are on all ranks already, so nothing is dispatched

    @property
    def peers(self) -> Exchange:
        return self.grid.world

    run_row = Parallel.partial


class AllToAll(Parallel):
    """A row for each choice to the rank of its expert, its contribution back; summed by the owner
    in eager's order."""

    def run_row(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        ep = self.grid.ep
        token, choice, send = by_rank(self.ranks(ids, experts), ep.size)
        expert = ids[token, choice]

        def compute(rows: Tensor, which: Tensor, w: Tensor) -> Tensor:
            eager = torch.argsort(which[:, 1], stable=True)  # all first choices, then the second …
            y = torch.empty_like(rows)
            y[eager] = self.inner(rows[eager], which[eager, :1].long(), w[eager], experts)
            return y

        which = torch.stack([expert, choice], 1).int()
        parts = x[token], which, weights[token, choice, None]
        y = there_and_back(ep, parts, send, compute)
        return _summed(x, expert, token, y, experts)

    def run_few(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """As `run`, with all contributions gathered at once, so that every rank sums them in
        eager's order."""
        ep = self.grid.ep
        token, choice, counts = by_rank(self.ranks(ids, experts), ep.size)
        sizes = counts.tolist()
        expert = ids[token, choice]
        t = token.split(sizes)[ep.rank]
        k = choice.split(sizes)[ep.rank]
        y = self.inner(x[t], ids[t, k, None], weights[t, k, None], experts)
        return _summed(x, expert, token, ep.all_gather(y, sizes, "result"), experts)


def there_and_back(
    ep: Exchange, parts: tuple[Tensor, ...], send: Tensor, compute: Callable[..., Tensor]
) -> Tensor:
    """`send[r]` rows of the parts go to rank r, and what it computes of them comes back."""
    receive = ep.counts(send).tolist()
    sent = send.tolist()
    arrived = unpack(ep.all_to_all(pack(*parts), sent, receive, "dispatch"), parts)
    return ep.all_to_all(compute(*arrived), receive, sent, "combine")


def by_rank(to: Tensor, W: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token, choice, how many of each rank [W]) of choices [T, K] that go to ranks, W for nowhere:
    those of each rank in eager's order, all first choices, then the second …"""
    flat = to.T.reshape(-1)
    T = max(len(to), 1)
    counts = torch.bincount(flat, minlength=W + 1)[:W]
    order = torch.argsort(flat, stable=True)[: int(counts.sum())]
    return order % T, order // T, counts


def _summed(x: Tensor, expert: Tensor, token: Tensor, y: Tensor, experts: Any) -> Tensor:
    """The contributions y [n, H] of experts [n] to tokens [n], those of an expert in eager's
    order."""
    counts = torch.bincount(expert, minlength=experts.num_experts).tolist()
    order = torch.argsort(expert, stable=True)
    groups = zip(range(len(counts)), token[order].split(counts), y[order].split(counts))
    return experts.accumulate(x, [group for group, n in zip(groups, counts) if n])


class Deduplicated(Parallel):
    """A row for each rank that has any of a token's experts, one partial sum back."""

    def run_row(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        ep = self.grid.ep
        E = experts.num_experts
        to = self.ranks(ids, experts)
        wanted = to == torch.arange(ep.size, device=ids.device)[:, None, None]  # [W, T, K]
        rank, token = wanted.any(-1).nonzero(as_tuple=True)  # by rank, then token
        send = torch.bincount(rank, minlength=ep.size)

        def compute(rows: Tensor, chosen: Tensor, w: Tensor) -> Tensor:
            return self.inner(rows, chosen.long(), w, experts)

        parts = x[token], torch.where(wanted[rank, token], ids[token], E).int(), weights[token]
        y = there_and_back(ep, parts, send, compute)
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.zeros_like(x, dtype=wide).index_add_(0, token, y.to(wide)).to(x.dtype)
