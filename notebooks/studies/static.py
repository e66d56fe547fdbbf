"""Costs of static shapes: padding by block size, drops by capacity, and the accuracy that dropping
costs; what notebook 05 measures with, and the guide's own worked examples.

Padding and drops are exact counts, by formula and by running the executors; `costs` scores a model
that drops. Sources: AWS Neuron's MoE guide ("Blockwise Matrix Multiplication", "Dropping MoE",
"Future Optimizations"), NPUMoE §3.2, §4.1, §4.2, §5.6.

    counts [E] or loads [n, L, E]: tokens of each expert    ids [T, L, K]    capacity [L][E]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.base.library import token_count
from moelab.base.records import Record, Records
from moelab.calibration import Calibration
from moelab.cards import load_device, load_model
from moelab.evaluation import questions
from moelab.evaluation.accuracy import compare, paired
from moelab.evaluation.calibrate import SOURCES
from moelab.evaluation.intervals import Interval, t95
from moelab.experts.executor import Tally
from moelab.models import discover, plugged
from moelab.models.patches import Patches
from moelab.static.blockwise import Blockwise
from moelab.static.static import ORDERS, CapacityFactor, Grouped, Saliency, Tiered
from moelab.static.tiers import Group, Tiers, capacity_tiers, form_groups
from moelab.trace import PREFILL, RoutingTrace

from . import blocks
from .layers import Layers
from .popularity import inclusion_probabilities

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
    how = {"tokens": tokens, "seed": seed, "split": split, "count": token_count(tokenizer)}
    return [prompt.text for prompt in questions.prompts(SOURCES, n, **how)]


# ---- blocks


def routing(T: int, E: int, K: int, skew: float = 0.0, seed: int = 0) -> Tensor:
    """ids [T, K]: K distinct experts a token, popularity of expert e falling like (e + 1)^−skew."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(T, E, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    gumbel = -torch.log(-torch.log(uniform))
    return (gumbel - skew * torch.arange(1, E + 1).double().log()).topk(K).indices


@lru_cache(maxsize=64)
def routed(T: int, E: int, K: int, skew: float = 0.0, seed: int = 0) -> tuple[int, ...]:
    """Tokens of each expert [E] under such a routing, cached for widgets."""
    return tuple(torch.bincount(routing(T, E, K, skew, seed).flatten(), minlength=E).tolist())


def padded_share(
    counts: Iterable[Sequence[int]], T: int, K: int, B: int, skip: bool = True
) -> float:
    """Share of the slots that hold no token, over routings of T tokens; `skip`: of the filled
    blocks only."""
    found = [blocks.padding(of, T, K, B) for of in counts]
    slots = sum(B * (of.needed if skip else of.provisioned) for of in found)
    return 1 - sum(of.pairs for of in found) / slots


def padding_curves(loads: Tensor, T: int, K: int, name: str, seed: int = 0) -> dict[str, Points]:
    """Padded share by block size of `SIZES`, a series a routing: uniform, Zipf popularity, and real
    loads [n, L, E] of steps of T tokens of the model `name`; the last series does not skip empty
    blocks."""
    E = loads.shape[-1]
    real = loads.reshape(-1, E).tolist()
    drawn = {
        title: [routed(T, E, K, skew, seed + i) for i in range(8)]
        for title, skew in {"uniform": 0.0, "Zipf 1.2": 1.2}.items()
    }
    curves = {
        title: [(B, padded_share(of, T, K, B)) for B in SIZES]
        for title, of in {**drawn, f"{name}: real": real}.items()
    }
    return curves | {ALL_BLOCKS: [(B, padded_share(real, T, K, B, skip=False)) for B in SIZES]}


def slots_are_the_formulas(ids: Tensor, E: int, sizes: Sequence[int] = SIZES) -> bool:
    """Whether running ids [T, L, K] through tiny experts in blocks of each size, with and without
    skipping empty blocks, takes the slots that `blocks.padding` says, and drops
    none."""
    T, L, K = ids.shape
    x, weights = torch.randn(T, 16), torch.full((T, K), 1 / K)
    experts = Layers(E, K, 16, 8, torch.float32, 0).seam[0]
    for B in sizes:
        ways = Blockwise(B), Blockwise(B, skip_blocks=False)
        needed = slots = 0
        for layer in ids.long().unbind(1):
            for way in ways:
                way(x, layer, weights, experts)
            counts = torch.bincount(layer.flatten(), minlength=E).tolist()
            formula = blocks.padding(counts, T, K, B)
            needed, slots = needed + B * formula.needed, slots + formula.slots
        if [(way.tally.slots, way.tally.dropped) for way in ways] != [(needed, 0), (slots, 0)]:
            return False
    return True


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


# ---- dropping


@contextmanager
def limited(model: Any, make: Callable[[Saliency], Any]) -> Iterator[Any]:
    """The model on a new executor `make(saliency)`, whose capacities are for each text of a batch
    by itself."""
    with (
        Patches() as patches,
        Saliency(model, discover(model)) as saliency,
        plugged(model, make(saliency)) as executor,
    ):
        length, run = 1, executor.run

        def begin(_model: Any, args: tuple, kwargs: Record) -> None:
            nonlocal length
            length = (args or [kwargs["input_ids"]])[0].shape[1]

        def by_text(x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
            columns = x, ids, weights, saliency[experts.layer]
            out = []
            for *text, norms in zip(*(column.split(length) for column in columns)):
                executor.saliency = {experts.layer: norms}
                out.append(run(*text, experts))
            return torch.cat(out)

        executor.run = by_text
        patches.hook(model.register_forward_pre_hook, begin, with_kwargs=True)
        yield executor


class DropCosts(NamedTuple):
    """Accuracy costs of ways of dropping, each against `BASELINE`: scores and samples of
    `accuracy.compare`, and
    tallies : way → task → its executor's counts."""

    scores: dict[str, Records]
    samples: dict[str, dict[str, list[float]]]
    tallies: dict[str, dict[str, Tally]]

    def tally(self, way: str) -> Tally:
        """What a way routed, dropped and padded on the loss's windows."""
        return self.tallies[way]["loss"]

    def loss(self, way: str) -> Interval:
        """Language loss, per cent more than the baseline's."""
        row = self.scores["loss"][way]
        reach = t95(row["n"] - 1) * row["relative error"]
        return row["relative"], row["relative"] - reach, row["relative"] + reach

    def points(self, task: str, way: str) -> Interval:
        """Right answers, difference in points."""
        row = self.scores[task][way]
        return 100 * row["difference"], *(100 * side for side in row["interval"])

    def verdict(self, way: str) -> str:
        """Whether the loss of a way differs at 95 % from that at random on the same windows, in
        words."""
        samples = self.samples["loss"]
        low, high = paired(*(np.array(samples[of]) for of in ("random", way)))["interval"]
        if high < 0:
            return "better than random"
        return "worse than random" if low > 0 else "indistinguishable from random"


def costs(model: Any, ways: Ways, tasks: Sequence[str] = TASKS, **how: Any) -> DropCosts:
    """Score every way on the same windows and prompts; `how` are the sizes of
    `accuracy.compare`."""
    modes = {way: partial(limited, model, make) for way, make in ways.items()}
    ran: dict[tuple[str, str], Any] = {}
    found = compare(model, {BASELINE: nullcontext} | modes, tasks, ran=ran, **how)
    tallies = {way: {task: ran[way, task].tally for task in tasks} for way in modes}
    return DropCosts(found["scores"], found["samples"], tallies)


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


def tallies(model: Any, ways: Ways, texts: Sequence[str]) -> dict[str, Tally]:
    """What each way routes, drops and pads while the model reads texts, each in a forward pass of
    its own: prompts share no capacity."""
    found = {}
    for name, make in ways.items():
        with limited(model, make) as executor, torch.no_grad():
            for text in texts:
                model(**model.tokenizer(text, return_tensors="pt"), use_cache=False)
        found[name] = executor.tally
    return found


def expected_unique(batch: int, inclusion: Sequence[float]) -> float:
    """Experts that a batch of independent tokens is expected to need: Σ_e 1 − (1 − p_e)^batch.

    inclusion : [E], the probability p_e that a token chooses each expert; `[K / E] * E` if
    balanced."""
    return sum(1 - (1 - p) ** batch for p in inclusion)


# ---- the guide's worked examples


def intensity(T: int, weight_bytes: int) -> float:
    """FLOPs a byte of [T, 4096] @ [4096, 12288], bf16 in and out, so many bytes a weight."""
    return 2 * T * 4096 * 12288 / (2 * (T * 4096 + T * 12288) + weight_bytes * 4096 * 12288)


def figures() -> dict[str, tuple[float, str]]:
    """What AWS's guide gives as one number each, recomputed from the guide's own inputs, or from a
    device's published rates: name → (value, unit). What it says itself is in the ledger."""
    trn2, oss = load_device("trn2"), load_model("GPT-OSS-120B")
    router, routers = (blocks.router_bytes(2880, 128, layers) for layers in (1, 36))
    core = 1e9 * trn2["memory_gb"] / 4  # memory of one of four logical cores (LNC2)
    even = blocks.padding([250] * 8, 1000, 2, 256, "text")
    # the worst routing of 1000 tokens to distinct two of 8 experts
    worst = blocks.padding([769, 769, 457, 1, 1, 1, 1, 1], 1000, 2, 256, "text")
    row, expert = 2 * oss.H, 2 * 3 * oss.H * oss.I
    return {
        "router_mb": (router / 1e6, "MB"),
        "routers_mb": (routers / 1e6, "MB"),
        "router_share": (routers / core, "of memory"),
        # 128 logits in bf16, against 8 weights and 8 ids
        "gather_ratio_int32_ids": (128 * 2 / (8 * (2 + 4)), "×"),
        "oss_top_k": (oss.K, ""),
        "oss_hidden": (oss.H, ""),
        "oss_intermediate": (oss.I, ""),
        "blocks_provisioned": (even.provisioned, "blocks"),
        "blocks_needed": (even.needed, "blocks"),
        "padding_to_provisioned": (even.worst_case, "of needed slots"),
        "padding_algorithmic": (even.algorithmic, "of routings"),
        "worst_possible_blocks": (worst.needed, "blocks"),
        "compute_bound_bf16": (blocks.intensity_target(trn2, "bf16"), "FLOPs/byte"),
        "compute_bound_fp8": (blocks.intensity_target(trn2, "fp8"), "FLOPs/byte"),
        "token_skipping_saves": (row / (4 * row + expert), "of a block's bytes"),
        "intensity_prefill": (intensity(8192, 2), "FLOPs/byte"),
        "intensity_decode_batch_32": (intensity(32, 2), "FLOPs/byte"),
        "provisioned_savings_DeepSeek": (1 - 16 * 8 / 256, "of experts"),
        "provisioned_savings_GPT-OSS": (1 - 8 * 8 / 128, "of experts"),
        "provisioned_savings_Llama4": (1 - 8 * 1 / 16, "of experts"),
        "experts_needed_256_8_32": (expected_unique(32, [8 / 256] * 256), "experts, even routing"),
    }
