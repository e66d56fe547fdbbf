"""Executors with experts on several ranks: all-gather, all-to-all-v, deduplicated; and cut on H or
by blocks.

Source: AWS Neuron's MoE guide, "Parallelism Strategies for Routed Experts", "Sharding strategies"
and "Communication Optimization for Expert Parallelism with All-to-All-v". Rank r owns the r-th of W
consecutive parts of the tokens. They are sent to where their experts are, computed by `inner`, and
the results come back to the owner. Of a few tokens that every rank has (a decode step) no row is
sent there: each rank computes its experts, and all gather all results.

`AllToAll` with `moelab.models.eager` inside is bit-identical to one process where a matrix product
does not depend on its number of rows, with one replica of each expert, uncut, for architectures
that sum in the type of their hidden states (not Nemotron-H and Inkling 2). The others add partial
sums: 1e-6 in fp32.

    x [T, H]    ids [T, K], E means "no expert"    weights [T, K]    W = ep × tp ranks, see `Grid`
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import Executor, activate, dispatch, names, plain, zeros
from moelab.experts.sharding import on_hidden, on_intermediate, share
from moelab.parallel.exchange import FEW, Exchange, Grid, pack, unpack
from moelab.parallel.sharding import Placement, turns


class Parallel(Executor):
    """Base: the ownership of tokens, and where experts are. The tally counts what this rank
    computed.

    placements : which experts each ep rank holds, for all layers or for each; see `eplb` for
        redundant ones.
    inner : runs this rank's rows: (x, ids, weights, experts) → [T, H].
    """

    cut = staticmethod(on_intermediate)  # how ranks that share an expert cut it

    def __init__(
        self, grid: Grid, placements: Placement | Sequence[Placement], inner: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.grid, self.placements, self.inner = grid, placements, inner
        self._calls = 0
        if isinstance(inner, Executor):
            self.tally, self.lossless = inner.tally, inner.lossless
        if not self.lossless and type(self) is not AllGather:
            raise ValueError(
                f"{type(inner).__name__} drops tokens by how many a whole step has, and here a rank sees "
                f"only those that are sent to it: spread the experts by ep or tp, or drop nothing"
            )

    @staticmethod
    def place(E: int, ep: int) -> Placement:
        return Placement.consecutive(E, ep)

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """For x, ids and weights that every rank has, as will the result."""
        return (self.run_few if len(x) <= FEW else self.run_many)(x, ids, weights, experts)

    def run_many(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """As `run`, each token by its owner."""
        world, sizes = self.grid.world, share(len(x), self.grid.world.size)
        own = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        return world.all_gather(
            self.run_own(x[own], ids[own], weights[own], experts), sizes, "result"
        )

    def run_few(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """As `run`, with all partial sums gathered at once."""
        world = self.grid.world
        parts = world.all_gather(
            self.partial(x, ids, weights, experts), [len(x)] * world.size, "result"
        )
        wide = torch.promote_types(x.dtype, torch.float32)
        return parts.view(world.size, *x.shape).to(wide).sum(0).to(x.dtype)

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """What this rank's experts add to tokens that all of its peers have."""
        mine = self.ranks(ids, experts) == self.grid.ep.rank
        return self.compute(x, torch.where(mine, ids, experts.num_experts), weights, experts)

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

    def ranks(self, ids: Tensor, experts: Any, start: int = 0) -> Tensor:
        """The ep rank of each choice [T, K]; replicas take turns."""
        placement = (
            self.placements
            if isinstance(self.placements, Placement)
            else self.placements[experts.layer]
        )
        self._calls += 1
        return placement.assign(ids, self._calls + start)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if not isinstance(self.inner, Executor):
            n = int((ids < experts.num_experts).sum())
            self.count(n, n, n)
        return self.inner(x, ids, weights, experts).to(x.dtype)


class AllGather(Parallel):
    """Rows to all ranks, partial sums back (reduce-scatter); with experts spread, cut, or both."""

    def run_many(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        sizes = share(
            len(x), self.grid.world.size
        )  # the rows are here already: nothing to dispatch
        partial = self.partial(x, ids, weights, experts)
        return self.grid.world.all_gather(
            self.grid.world.reduce_scatter(partial, sizes, "combine"), sizes, "result"
        )

    @property
    def peers(self) -> Exchange:
        return self.grid.world

    run_row = Parallel.partial


class Blocks(AllGather):
    """Every rank has all experts and computes every W-th block of an expert's tokens (the guide's
    "shard on block")."""

    def __init__(
        self,
        grid: Grid,
        placements: Placement | Sequence[Placement],
        inner: Callable[..., Tensor],
        block: int = 128,
    ) -> None:
        super().__init__(grid, placements, inner)
        self.block = block

    @staticmethod
    def place(E: int, ep: int) -> Placement:
        return Placement((tuple(range(E)),) * ep, E)

    def ranks(self, ids: Tensor, experts: Any, start: int = 0) -> Tensor:
        E, W = experts.num_experts, self.grid.ep.size
        blocks = -(-torch.bincount(ids.flatten(), minlength=E + 1) // self.block)  # [E + 1]
        block = (blocks.cumsum(0) - blocks)[ids] + turns(ids, E) // self.block
        return torch.where(ids < E, block % W, W)


class AllToAll(Parallel):
    """A row for each choice to the rank of its expert, its contribution back; summed by the owner
    in eager's order."""

    def run_row(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        ep, E = self.grid.ep, experts.num_experts
        to = self.ranks(ids, experts, ep.rank)
        order = torch.argsort(to.reshape(-1), stable=True)[
            : int((ids < E).sum())
        ]  # by rank, token, choice
        token, choice = order // ids.shape[1], order % ids.shape[1]
        expert = ids[token, choice]
        send = torch.bincount(to.reshape(-1), minlength=ep.size + 1)[: ep.size]
        receive, send = ep.counts(send).tolist(), send.tolist()
        parts = x[token], torch.stack([expert, choice], 1).int(), weights[token, choice, None]
        rows, what, w = unpack(ep.all_to_all(pack(*parts), send, receive, "dispatch"), parts)

        eager = torch.argsort(
            what[:, 1], stable=True
        )  # first choices of all tokens, then the second …
        y = torch.empty_like(rows)
        y[eager] = self.compute(rows[eager], what[eager, :1].long(), w[eager], experts)
        y = ep.all_to_all(y, receive, send, "combine")

        order = torch.argsort(choice, stable=True)
        return self._summed(x, expert[order], token[order], y[order], experts)

    def run_few(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """As `run`, with all contributions gathered at once, so that every rank sums them in
        eager's order."""
        ep, to = (
            self.grid.ep,
            self.ranks(ids, experts).T.reshape(-1),
        )  # all first choices, then the second …
        sizes = torch.bincount(to, minlength=ep.size + 1)[: ep.size].tolist()
        order = torch.argsort(to, stable=True)[: sum(sizes)]  # by rank, choice, token
        choice, token = order // len(x), order % len(x)
        expert, own = ids[token, choice], order.split(sizes)[ep.rank]
        choice, mine = own // len(x), own % len(x)
        y = self.compute(
            x[mine], ids[mine, choice][:, None], weights[mine, choice][:, None], experts
        )
        return self._summed(x, expert, token, ep.all_gather(y, sizes, "result"), experts)

    def _summed(self, x: Tensor, expert: Tensor, token: Tensor, y: Tensor, experts: Any) -> Tensor:
        """The contributions y [n, H] of experts [n] to tokens [n], those of an expert in eager's
        order."""
        counts = torch.bincount(expert, minlength=experts.num_experts).tolist()
        order = torch.argsort(expert, stable=True)
        groups = zip(range(len(counts)), token[order].split(counts), y[order].split(counts))
        return experts.accumulate(x, [group for group, n in zip(groups, counts) if n])


class Deduplicated(Parallel):
    """A row for each rank that has any of a token's experts, one partial sum back."""

    def run_row(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        ep, E = self.grid.ep, experts.num_experts
        to = self.ranks(ids, experts, ep.rank)
        wanted = to == torch.arange(ep.size, device=ids.device)[:, None, None]  # [W, T, K]
        rank, token = wanted.any(-1).nonzero(as_tuple=True)  # by rank, then token
        send = torch.bincount(rank, minlength=ep.size)
        receive, send = ep.counts(send).tolist(), send.tolist()
        parts = x[token], torch.where(wanted[rank, token], ids[token], E).int(), weights[token]
        rows, chosen, w = unpack(ep.all_to_all(pack(*parts), send, receive, "dispatch"), parts)
        y = ep.all_to_all(self.compute(rows, chosen.long(), w, experts), receive, send, "combine")
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.zeros_like(x, dtype=wide).index_add_(0, token, y.to(wide)).to(x.dtype)


class Hidden(Executor):
    """Plain experts cut along H: sums over H are completed before the activation, columns gathered
    after."""

    cut, place = staticmethod(on_hidden), Parallel.place

    def __init__(self, grid: Grid, placements: Any = None, inner: Any = None) -> None:
        super().__init__()
        if isinstance(inner, Executor):
            raise ValueError(
                f"experts that are cut along H are computed in two halves with an exchange between them, "
                f"which {type(inner).__name__} cannot do: leave the executor out"
            )
        self.grid = grid

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        if not plain(experts):
            raise ValueError(
                f"{type(experts).__name__} does more than up, gate, down and a weighted sum, which is all "
                f"that can be computed cut along H: use tp or ep"
            )
        world, d = self.grid.world, dispatch(ids, experts.num_experts)
        self.count(len(d), len(d), len(d))
        columns = share(x.shape[1], world.size)
        start = sum(columns[: world.rank])
        mine = x[:, start : start + columns[world.rank]]
        up, down = names(experts)
        hit = [(experts.weights(e), rows) for e, rows in d.hit()]
        parts = [
            experts.linear(mine[d.tokens[rows]], w, up) for w, rows in hit
        ]  # each [n, 2I], parts of sums
        h = torch.cat(parts) if parts else x.new_zeros(0, 1)
        sizes = share(len(h), world.size)
        h = world.all_gather(world.reduce_scatter(h, sizes, "reduce"), sizes, "reduce")
        out = zeros(mine, weights, experts)
        for w, rows in hit:
            y = experts.linear(activate(experts, h[rows]), w, down)
            token = d.tokens[rows]
            out.index_add_(0, token, (y * weights[token, d.choices[rows], None]).to(out.dtype))
        return world.all_gather(out.to(x.dtype).T, columns, "result").T
