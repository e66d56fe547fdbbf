"""The tables of static shapes, as rows for `moelab.viz.notebook.table`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from moelab.ane.device.published import TABLE_3, TABLE_3_ACCURACY
from moelab.bench.experts import LOADING, ExpertTimes
from moelab.bench.measure import Samples
from moelab.bench.neuron_examples import BlockAdvice
from moelab.bench.static import BASELINE, NO_EXPERTS, BlockCount, DropCosts, TierPlan
from moelab.cards import load_model
from moelab.records import Record, Rows
from moelab.static.advice import Advice
from moelab.static.blocks import Padding, intensity_factor
from moelab.static.blockwise import BlockMap
from moelab.static.neuron import expected_unique
from moelab.static.quantization import Quantized
from moelab.table import ms, percent
from moelab.viz.figures import Values


def block_map(mapped: BlockMap) -> Rows:
    """Who is in which slot of which block."""
    return [
        {
            "block": str(b),
            "expert": f"E{expert}",
            "slots": " ".join(f"T{t}" if t >= 0 else "–" for t in slots),
            "real": str(sum(t >= 0 for t in slots)),
            "padding": str(sum(t < 0 for t in slots)),
        }
        for b, (expert, slots) in enumerate(
            zip(mapped.block_to_expert.tolist(), mapped.tokens.tolist())
        )
    ]


def blocks(counted: Sequence[BlockCount]) -> Rows:
    """Padding and skipped loads, block size by block size."""
    return [
        {
            "B": str(one.B),
            "N (text)": str(one.by_text),
            "N (code)": str(one.by_code),
            "filled, mean of layers": f"{one.filled:.1f}",
            "padding: filled blocks": percent(one.padded),
            "all N": percent(one.padded_all),
            "weight loads skipped": percent(one.weights_skipped),
            "row loads skipped": percent(one.rows_skipped),
        }
        for one in counted
    ]


def caption(p: Padding, T: int, E: int, K: int, skew: float) -> str:
    """One block size in a sentence: blocks, padding and the intensity factor of T tokens, top-K of
    E."""
    return (
        f"B = {p.B}, {T} tokens, Zipf {skew:g}: {p.provisioned} blocks provided, {p.needed} "
        f"filled; {percent(1 - p.pairs / (p.needed * p.B), 0)} of the filled slots are "
        f"padding, {percent(p.padded / p.slots, 0)} of all. AIF "
        f"{intensity_factor(p.B, p.provisioned, E):.0f} FLOPs/byte over all blocks, "
        f"{T * K / E:.0f} on real tokens; one block alone {p.B}."
    )


def block_sizes(asked: Sequence[BlockAdvice]) -> Rows:
    """Which block size the intensity factor advises."""
    return [
        {
            "device": one.device,
            "model": one.model,
            "dtype": one.dtype,
            "T": str(one.T),
            "weights are read": "once" if one.reuse else "for each block",
            "target, FLOPs/byte": f"{one.advice.target:.0f}",
            "on real tokens, if read once": f"{one.real:.0f}",
            "advised B": str(one.advice.block_size),
            "compute-bound": one.advice.compute_bound,
        }
        for one in asked
    ]


def capacity(costs: DropCosts) -> Rows:
    """What each capacity factor drops, pads and costs, with the paper's drops, padding and accuracy
    below."""
    tasks = [task for task in costs.scores if task != "loss"]
    plain = {task: of[BASELINE] for task, of in costs.scores.items()}
    first = {
        "capacity factor": BASELINE,
        "dropped": "0 %",
        "padding": "–",
        "language loss": f"{plain['loss']['score']:.3f} nats",
    }
    first |= {f"{task}, points (95 %)": f"{percent(plain[task]['score'])} right" for task in tasks}
    own = [
        {
            "capacity factor": way,
            "dropped": percent(costs.tally(way).drop_rate),
            "padding": percent(costs.tally(way).padded_fraction),
            "language loss": _loss(costs, way),
        }
        | _points(costs, way)
        for way in costs.tallies
    ]
    paper = [
        {
            "capacity factor": f"*paper, {name}*",
            "dropped": percent(dropped),
            "padding": percent(padding),
            "accuracy in the paper, fp16 → NPUMoE": "{:g} → {:g} %".format(*TABLE_3_ACCURACY[name]),
        }
        for name, (dropped, padding) in TABLE_3.items()
    ]
    return [first, *own, *paper]


def orders(costs: DropCosts) -> Rows:
    """What each order of dropping costs, its loss beside that of dropping at random."""
    rows = []
    for way in costs.tallies:
        row = {
            "dropped first": way,
            "dropped, loss's windows": percent(costs.tally(way).drop_rate),
            "loss, % more": _loss(costs, way).replace(" %", ""),
            "against random, nats": "–",
            "95 %": "–",
        }
        if way not in ("random", NO_EXPERTS):
            difference, low, high = costs.against("random", way)
            row |= {
                "against random, nats": f"{difference:+.4f}",
                "95 %": f"{low:+.4f} to {high:+.4f}",
            }
        rows.append(row | _points(costs, way))
    return rows


def tiers(plan: TierPlan, texts: Sequence[float], chunk: Sequence[float]) -> Rows:
    """Each layer's imbalance r over all texts and within a chunk, its capacities and its groups."""
    return [
        {
            "layer": str(l),
            "r, all texts": f"{texts[l]:.2f}",
            "r, in a chunk": f"{chunk[l]:.2f}",
            "capacities (experts)": ", ".join(
                f"{level} ({of.capacity.count(level)})" for level in of.levels
            ),
            "groups of 8": str(len(plan.groups[l])),
        }
        for l, of in enumerate(plan.tiers)
    ]


def executors(found: Mapping[str, ExpertTimes]) -> Rows:
    """The fastest executor here beside transformers' fastest, and beside the roofline."""
    return [
        {
            "phase": phase,
            "best of transformers, ms": f"{ms(of.stock[0])} ({of.stock[1].split()[1]})",
            "best here, ms": f"{ms(of.ours[0])} ({of.ours[1]})",
            "times as fast": f"{of.speedup:.2f}",
            "share of the roofline that it reaches": percent(of.reached, 0),
        }
        for phase, of in found.items()
    ]


def loading(raced: Mapping[int, Samples], ratios: Mapping[int, float], E: int, K: int) -> Rows:
    """Selective loading beside all experts, batch by batch, with what the guide's rule would
    choose."""
    return [
        {
            "batch": str(b),
            f"unique of {E}, expected (even)": f"{expected_unique(b, [K / E] * E):.1f}",
            "guide's rule (α = 1)": "all experts" if b * K >= E else "selective",
        }
        | {f"{name}, ms": ms(median(of[name])) for name in LOADING}
        | {"all ÷ selective": f"{ratios[b]:.2f}"}
        for b, of in raced.items()
    ]


def formats(
    errors: Mapping[str, Values], sources: Mapping[str, Quantized], own: int, L: int
) -> Rows:
    """Bytes and errors of each format: `layer_errors` of `moelab.bench.quantization`, own bytes of
    an expert."""
    return [
        {"format": name, "bytes ÷ bf16 (exact)": f"{source.nbytes(0, 0) / own:.3f}"}
        | {f"layer {l}": f"{errors[f'{name}, layer {l}']['layer']:.2f} %" for l in range(L)}
        | {
            "all layers": f"**{errors[f'{name}, all']['layer']:.2f} %**",
            "of the weights": f"{errors[f'{name}, all']['weights']:.2f} %",
        }
        for name, source in sources.items()
    ]


def stored(found: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Bytes and language loss of each way of storing experts: what `compare_formats` returns."""
    return [
        {
            "format": name,
            "bits a weight (exact)": f"{of['bits a weight']:.2f}",
            "of raw (exact)": percent(of["of raw"]),
            "loss, nats a token (measured)": f"{of['loss: score']:.4f}",
            "against raw, paired": f"{of['loss: difference']:+.4f} ± "
            f"{of['loss: difference error']:.4f}"
            if "loss: difference" in of
            else "0, lossless",
            "95 %": "[{:+.4f}, {:+.4f}]".format(*of["loss: interval"])
            if "loss: interval" in of
            else "–",
        }
        for name, of in found.items()
    ]


def zipf(loads: Mapping[str, Values]) -> Rows:
    """Max/mean by skew of the popularity and way of placing."""
    return [
        {"load, max/mean": name} | {way: f"{value:.3f}" for way, value in of.items()}
        for name, of in loads.items()
    ]


def parallel_ways(advice: Mapping[str, Mapping[int, Advice]]) -> Rows:
    """What is advised for each model, and why for the fewest devices."""
    return [
        {"model": name, "experts": str(load_model(name).E), "I": str(load_model(name).I)}
        | {f"{n} devices": f"{one.kind}: tp {one.tp}, ep {one.ep}" for n, one in of.items()}
        | {f"why ({min(of)})": " ".join(of[min(of)].reasons)}
        for name, of in advice.items()
    ]


def _loss(costs: DropCosts, way: str) -> str:
    return "{relative:+.2f} % ± {relative error:.2f}".format(**costs.scores["loss"][way])


def _points(costs: DropCosts, way: str) -> Record:
    return {
        f"{task}, points (95 %)": costs.told(task, way).replace(" points (95 % ", " (")
        for task in costs.scores
        if task != "loss"
    }
