"""Costs of static shapes: padding by block size, drops by capacity, and the accuracy that dropping
costs.

Padding and drops are exact counts, by formula and by running the executors; `costs` scores a model
that drops. Sources: AWS Neuron's MoE guide ("Blockwise Matrix Multiplication", "Dropping MoE",
"Future Optimizations"), NPUMoE §3.2, §4.1, §4.2, §5.6.

    counts [E] or loads [n, L, E]: tokens of each expert    ids [T, L, K]    capacity [L][E]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.bench.experts import Layers
from moelab.calibration import Calibration
from moelab.evaluation import questions
from moelab.evaluation.accuracy import compare_dropping, paired_means
from moelab.evaluation.calibrate import SOURCES
from moelab.evaluation.intervals import Interval, t95
from moelab.experts.executor import Tally
from moelab.library import token_count
from moelab.models import discover, plugged
from moelab.models.patches import Patches
from moelab.records import Record, Records
from moelab.static import blocks
from moelab.static.blockwise import Blockwise
from moelab.static.neuron import expected_unique
from moelab.static.static import ORDERS, CapacityFactor, Grouped, Saliency, Tiered
from moelab.static.tiers import Group, Tiers, capacity_tiers, form_groups
from moelab.trace import PREFILL, RoutingTrace
from moelab.zipmoe.inclusion import inclusion_probabilities

SIZES = (8, 16, 32, 64, 128, 256, 512)  # of blocks, tokens
TASKS = ("loss", "needle_multikey", *questions.REMEMBERED)
BASELINE = "nothing dropped"
NO_EXPERTS = "no experts at all"
ALL_BLOCKS = "all N blocks, any routing"  # the series of `padding_curves` that skips no block

Points = list[tuple[float, float]]
Ways = Mapping[str, Callable[[Saliency], Any]]  # name → what makes the executor that drops, or pads


def texts(tokenizer: Any, split: str, n: int, tokens: int, seed: int = 0) -> list[str]:
    """n prompts of each of `SOURCES`, source by source, of at most so many tokens of this
    tokenizer."""
    return [
        prompt.text
        for prompt in questions.prompts(
            SOURCES, n, tokens=tokens, seed=seed, split=split, count=token_count(tokenizer)
        )
    ]


def chunk_texts(tokenizer: Any, n: int, tokens: int, seed: int = 0) -> list[str]:
    """The first 2n test prompts, of n a source, that fill more than half a chunk of `tokens`."""
    return [
        text
        for text in texts(tokenizer, "test", n, tokens, seed)
        if len(tokenizer(text)["input_ids"]) > tokens // 2
    ][: 2 * n]


def routing(T: int, E: int, K: int, skew: float = 0.0, seed: int = 0) -> Tensor:
    """ids [T, K]: K distinct experts a token, popularity of expert e falling like (e + 1)^−skew."""
    generator = torch.Generator().manual_seed(seed)
    gumbel = -torch.log(
        -torch.log(
            torch.rand(T, E, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
        )
    )
    return (gumbel - skew * torch.arange(1, E + 1).double().log()).topk(K).indices


@lru_cache(maxsize=64)
def routed(T: int, E: int, K: int, skew: float = 0.0, seed: int = 0) -> tuple[int, ...]:
    """Tokens of each expert [E] under such a routing, cached for widgets."""
    return tuple(torch.bincount(routing(T, E, K, skew, seed).flatten(), minlength=E).tolist())


def block_paddings(
    T: int, E: int, K: int, skew: float = 0.0, seed: int = 0
) -> dict[int, blocks.Padding]:
    """Block size → the padding of T tokens routed to K of E experts with a Zipf exponent."""
    return {B: blocks.padding(routed(T, E, K, skew, seed), T, K, B) for B in SIZES}


def padded_share(
    counts: Iterable[Sequence[int]], T: int, K: int, B: int, skip: bool = True
) -> float:
    """Share of the slots that hold no token, over routings of T tokens; `skip`: of the filled
    blocks only."""
    found = [blocks.padding(of, T, K, B) for of in counts]
    return 1 - sum(p.pairs for p in found) / sum(
        B * (p.needed if skip else p.provisioned) for p in found
    )


def padding_curves(loads: Tensor, T: int, K: int, name: str, seed: int = 0) -> dict[str, Points]:
    """Padded share by block size of `SIZES`, a series a routing: uniform, two of Zipf popularity,
    and real loads [n, L, E] of steps of T tokens of the model `name`; the last series does not skip
    empty blocks."""
    real = loads.reshape(-1, loads.shape[-1]).tolist()
    zipf = {"uniform": 0.0, "Zipf 0.6": 0.6, "Zipf 1.2": 1.2}
    drawn = {
        title: [routed(T, loads.shape[-1], K, skew, seed + i) for i in range(8)]
        for title, skew in zipf.items()
    }
    curves = {
        title: [(B, padded_share(of, T, K, B)) for B in SIZES]
        for title, of in {**drawn, f"{name}: real": real}.items()
    }
    return curves | {ALL_BLOCKS: [(B, padded_share(real, T, K, B, skip=False)) for B in SIZES]}


def apart(curves: Mapping[str, Points], one: str, other: str) -> tuple[float, float]:
    """(largest distance, where) of two series over the same points."""
    return max((abs(a - b), x) for (x, a), (_, b) in zip(curves[one], curves[other], strict=True))


class BlockCount(NamedTuple):
    """Blocks of B slots in one step of all layers, counted while the executor ran.

    by_text, by_code : the two formulas' N of a layer. filled : blocks with a token, mean of layers.
    padded, padded_all : share of slots without a token, of the filled and of all N blocks.
    weights_skipped, rows_skipped : share of the loads that skipping saves.
    as_formula : whether the slots are those of `moelab.static.blocks.padding`, without drops.
    """

    B: int
    by_text: int
    by_code: int
    filled: float
    padded: float
    padded_all: float
    weights_skipped: float
    rows_skipped: float
    as_formula: bool


def count_blocks(ids: Tensor, E: int, sizes: Sequence[int] = SIZES) -> list[BlockCount]:
    """Run ids [T, L, K] through tiny experts in blocks of each size, with and without skipping
    empty blocks."""
    T, L, K = ids.shape
    x = torch.randn(T, 16)
    weights = torch.full((T, K), 1 / K)
    found = []
    experts = Layers(E, K, 16, 8, torch.float32, 0).seam[0]
    layers = ids.long().unbind(1)
    for B in sizes:
        skipping = Blockwise(B)
        whole = Blockwise(B, skip_blocks=False)
        for layer in layers:
            skipping(x, layer, weights, experts)
            whole(x, layer, weights, experts)
        formula = [
            blocks.padding(torch.bincount(layer.flatten(), minlength=E).tolist(), T, K, B)
            for layer in layers
        ]
        as_formula = (
            skipping.tally.slots == sum(B * p.needed for p in formula)
            and whole.tally.slots == sum(p.slots for p in formula)
            and skipping.tally.dropped == whole.tally.dropped == 0
        )
        found.append(
            BlockCount(
                B,
                blocks.blocks_by_text(T, K, E, B),
                blocks.blocks_by_code(T, K, E, B),
                skipping.live / L,
                skipping.tally.padded_fraction,
                whole.tally.padded_fraction,
                skipping.weight_loads.savings,
                skipping.row_loads.savings,
                as_formula,
            )
        )
    return found


def unique_experts(trace: RoutingTrace, batches: Sequence[int]) -> dict[str, Points]:
    """Distinct experts of a decode step by batch size, mean of layers: counted in sequences that
    decode together, for independent tokens (by the trace's own popularity or evenly), and the
    guide's worst case."""
    E, K, alone = trace.spec.E, trace.spec.K, inclusion_probabilities(trace, 1)  # [L, E]
    return {
        "counted": [(b, float(inclusion_probabilities(trace, b).sum(1).mean())) for b in batches],
        "independent, own popularity": [
            (b, float(np.mean([expected_unique(b, of.tolist()) for of in alone]))) for b in batches
        ],
        "independent, even": [(b, expected_unique(b, [K / E] * E)) for b in batches],
        "provisioned: min(bK, E)": [(b, min(b * K, E)) for b in batches],
    }


@contextmanager
def limited(model: Any, make: Callable[[Saliency], Any]) -> Iterator[Any]:
    """The model on a new executor `make(saliency)`, whose capacities are for each text of a batch
    by itself."""
    with (
        Patches() as patches,
        Saliency(model, discover(model)) as saliency,
        plugged(model, make(saliency)) as executor,
    ):

        def begin(_model: Any, args: tuple, kwargs: Record) -> None:
            executor.chunk = (args or [kwargs["input_ids"]])[0].shape[1]

        patches.hook(model.register_forward_pre_hook, begin, with_kwargs=True)
        yield executor


class DropCosts(NamedTuple):
    """Accuracy costs of ways of dropping, each against `BASELINE`: scores and samples of
    `accuracy.compare`, and
    tallies : way → task → its executor's counts."""

    scores: dict[str, Records]
    samples: dict[str, dict[str, list[float]]]
    tallies: dict[str, dict[str, Tally]]

    def only(self, ways: Iterable[str]) -> DropCosts:
        """Of these ways."""
        kept = [BASELINE, *ways]
        scores, samples = (
            {task: {way: of[way] for way in kept} for task, of in found.items()}
            for found in (self.scores, self.samples)
        )
        return DropCosts(scores, samples, {way: self.tallies[way] for way in kept[1:]})

    def tally(self, way: str, task: str = "loss") -> Tally:
        """What a way routed, dropped and padded in a task."""
        return self.tallies[way][task]

    def loss(self, way: str) -> Interval:
        """Language loss, per cent more than the baseline's."""
        row = self.scores["loss"][way]
        reach = t95(row["n"] - 1) * row["relative error"]
        return row["relative"], row["relative"] - reach, row["relative"] + reach

    def points(self, task: str, way: str) -> Interval:
        """Right answers, difference in points."""
        row = self.scores[task][way]
        return 100 * row["difference"], *(100 * side for side in row["interval"])

    def told(self, task: str, way: str) -> str:
        """A task's change in points and its interval, in words."""
        return "{:+.1f} points (95 % {:+.1f} to {:+.1f})".format(*self.points(task, way))

    def against(self, other: str, way: str) -> Interval:
        """Loss of a way less another's on the same windows, nats a token."""
        row = paired_means(*(np.array(self.samples["loss"][name]) for name in (other, way)))
        return row["difference"], *row["interval"]

    def verdict(self, way: str) -> str:
        """Whether the loss of a way differs at 95 % from that at random, in words."""
        _, low, high = self.against("random", way)
        if high < 0:
            return "better than random"
        return "worse than random" if low > 0 else "indistinguishable from random"

    def nearest(self, drop: float) -> str:
        """The way whose drop rate on the loss's windows is nearest to `drop`."""
        return min(self.tallies, key=lambda way: abs(self.tally(way).drop_rate - drop))


def costs(model: Any, ways: Ways, tasks: Sequence[str] = TASKS, **how: Any) -> DropCosts:
    """Score every way on the same windows and prompts; `how` are the sizes of
    `accuracy.compare`."""
    modes = {way: partial(limited, model, make) for way, make in ways.items()}
    found, ran = compare_dropping(model, modes, tasks, BASELINE, compete=False, **how)
    return DropCosts(
        found["scores"],
        found["samples"],
        {way: {task: executor.tally for task, executor in of.items()} for way, of in ran.items()},
    )


def capacity_factors(factors: Sequence[float]) -> Ways:
    """A way for each capacity factor, named by it."""
    return {f"{factor:g}": lambda _, factor=factor: CapacityFactor(factor) for factor in factors}


def drop_orders(tiers: Sequence[Tiers], seed: int = 0) -> Ways:
    """A way for each of `ORDERS` under the same capacities, and one that runs no expert."""
    capacity = [list(layer.capacity) for layer in tiers]
    ways = {
        order: lambda saliency, order=order: Tiered(
            capacity, order=order, saliency=saliency, seed=seed
        )
        for order in ORDERS
    }
    return ways | {NO_EXPERTS: lambda _: Tiered([[0] * len(of) for of in capacity], order="token")}


class TierPlan(NamedTuple):
    """Capacities of every layer from a calibration: with the factor K, as the paper prints them,
    and in groups."""

    tiers: tuple[Tiers, ...]
    printed: tuple[Tiers, ...]
    groups: tuple[tuple[Group, ...], ...]

    @classmethod
    def of(cls, calibration: Calibration, chunk: int, G: int = 8, slack: float = 1.0) -> TierPlan:
        """Tiers and groups of G experts for chunks of so many tokens, from a calibration of the
        prompt."""
        counts = calibration.counts(PREFILL)
        tokens = calibration.tokens[PREFILL]
        tiers = capacity_tiers(counts, tokens, chunk, slack=slack)
        groups = tuple(tuple(form_groups(layer, counts[l], G)) for l, layer in enumerate(tiers))
        return cls(tuple(tiers), tuple(capacity_tiers(counts, tokens, chunk, rule="paper")), groups)

    @property
    def launches(self) -> float:
        """Graphs of a layer and chunk, mean of layers."""
        return sum(map(len, self.groups)) / len(self.groups)

    def ways(self) -> Ways:
        """Name → the executor that drops or pads by this plan."""
        own, printed = ([layer.capacity for layer in tiers] for tiers in (self.tiers, self.printed))
        largest = [[max(of)] * len(of) for of in own]
        return {
            "one capacity, 1.25": lambda _: CapacityFactor(1.25),
            "tiers, prune": lambda s: Tiered(own, saliency=s),
            "groups of 8, prune": lambda s: Grouped(self.groups, saliency=s),
            "tiers, pad": lambda _: Tiered(own, "pad"),
            "largest tier for all": lambda s: Tiered(largest, saliency=s),
            "tiers, literal B/E": lambda s: Tiered(printed, saliency=s),
        }


def read_all(model: Any, texts: Iterable[str]) -> list[Tensor]:
    """Logits [S, V], float32, of each text in a forward pass of its own: prompts share no
    capacity."""
    with torch.no_grad():
        return [
            model(**model.tokenizer(text, return_tensors="pt"), use_cache=False).logits[0].float()
            for text in texts
        ]


class Ran(NamedTuple):
    """Counts of one way; the largest change of a logit; share of positions with the same best
    token, mean of texts."""

    total: Tally
    by_layer: list[Tally]
    changed: float
    agree: float


def run_ways(model: Any, ways: Ways, texts: Sequence[str]) -> dict[str, Ran]:
    """Read the texts in every way, beside the model as it is."""
    plain = read_all(model, texts)
    found = {}
    for name, make in ways.items():
        with limited(model, make) as executor:
            pairs = list(zip(plain, read_all(model, texts)))
        agree = [float((a.argmax(-1) == b.argmax(-1)).double().mean()) for a, b in pairs]
        found[name] = Ran(
            executor.tally,
            [executor.by_layer[l] for l in range(model.spec.L)],
            max(float((a - b).abs().max()) for a, b in pairs),
            float(np.mean(agree)),
        )
    return found
