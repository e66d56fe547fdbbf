"""What the notebooks conclude, for ten seeds at small sizes: in how many of them it holds.

A seed picks prompts, windows, the order of training, synthetic weights and simulated routing. A number above or below
its bar keeps the conclusion; sizes are far below the notebooks', so that a failure says "not at this size" as well as
"not for any seed". What is a matter of speed is left to intervals, as no seed changes it. With `--journal`, what a seed
has found is kept, and the same command goes on with the seeds that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moelab import datasets, open_model
from moelab.ane.device import comparison
from moelab.arguments import one_of, several, whole
from moelab.bench import end_to_end, ndp, orin, recall_and_misses, static, store
from moelab.bench.measure import torch_threads
from moelab.bench.popularity import Popularity
from moelab.bench.predictors import Contest, mean
from moelab.bench.zipmoe import inclusion_of_ranks
from moelab.calibration import calibrate, chunk_loads
from moelab.files import small_model
from moelab.intervals import ratio
from moelab.journal import Journal
from moelab.ndp.sweep import Assumptions, paper_sweep, quantities
from moelab.progress import progress
from moelab.schedule.optimum import ratio_study
from moelab.speculate.scoring import score
from moelab.speculate.training import train
from moelab.trace import PREFILL

SOURCES = ("code", "lookup")
#: conclusion → ("above" or "below", bar)
BARS = {
    "00: tokens that are not transformers', half of the experts in memory": ("below", 1.0),
    "01: overlap@4 on the same source less on another": ("above", 0.0),
    "01: overlap@4 of two forms of one question less on another source": ("above", 0.0),
    "02: size by huffman less the entropy bound (points)": ("below", 1.0),
    "02: size by zstd with its matches less without (points)": ("above", 0.0),
    "03: Algorithm 1's time over the optimum, worst": ("below", 2.0),
    "03: naive order over Algorithm 1, six threads": ("above", 1.0),
    "03: how far Algorithm 1 is from the naive order, one thread": ("below", 0.01),
    "03: TPOT of the plan over an uncompressed LRU cache, Qwen3-30B-A3B on an Orin": ("below", 1.0),
    "04: recall of the next router on q less on s": ("above", 0.0),
    "04: recall of the residual estimator less the router's on q": ("above", 0.0),
    "04: recall of the residual estimator less appendix A's": ("above", 0.0),
    "04: misses of the prediction across tokens over the default's, half of the experts": ("below", 1.0),
    "05: largest effect of skew on padding over that of block size": ("below", 0.5),
    "05: loss, dropping by router weight less by saliency (nats)": ("below", 0.0),
    "05: loss, dropping by router weight less at random (nats)": ("below", 0.0),
    "06: least TTFT of another system over NPUMoE's, every model and run": ("above", 1.0),
    "06: least energy of another system over NPUMoE's, every model and run": ("above", 1.0),
    "06: placement's gain less what it is if CPU and ANE take turns": ("above", 0.0),
    "07: tensor parallelism over MoNDE, decode": ("above", 1.0),
    "07: all three techniques over tensor parallelism, decode": ("above", 1.0),
    "07: what balancing adds in decode, DRAM shared": ("below", 1e-9),
    "08: lossless configurations whose output is not eager's": ("below", 1.0)}


@dataclass
class Trial:
    """A seed of the small model; prompts : test prompts a source. train_tokens : that estimators see."""

    model: Any
    seed: int
    prompts: int
    train_tokens: int
    windows: int

    @cached_property
    def contest(self) -> Contest:
        return Contest.of(self.model, 2 * self.prompts, self.prompts, 128, 8, self.seed)


def start(of: Trial) -> list[float]:
    text, found = datasets.prompts("needle", 1, tokens=128, seed=of.seed)[0].text, []
    with open_model(memory="50%") as offloaded:
        for lm in (of.model, offloaded):
            ids = lm.tokenizer(text, return_tensors="pt")
            found.append(lm.generate(**ids, do_sample=False, max_new_tokens=12, min_new_tokens=12))
    return [float((found[0] != found[1]).sum())]


def popularity(of: Trial) -> list[float]:
    found = Popularity.of(of.model, SOURCES, 8, 128, 2, 16, of.seed)
    agreed = found.across(4, PREFILL)[:len(SOURCES)]
    other = float((agreed.sum() - agreed.diag().sum()) / (agreed.numel() - len(SOURCES)))
    return [float(agreed.diag().mean()) - other, found.same_domain(4)["prefill"] - other]


def compression(of: Trial) -> list[float]:
    weights = store.synthetic_expert(2 << 20, of.seed)
    sizes = store.sizes(weights, store.coders(weights, ("huffman", "zstd", "zstd-huffman")))
    return [sizes["huffman"]["points above the bound"],
            sizes["zstd"]["fraction %"] - sizes["zstd-huffman"]["fraction %"]]


def planning(of: Trial) -> list[float]:
    board = orin.Board(6, 1.2)
    gains, _ = board.gains(100, of.seed)
    runs = board.large_model(inclusion_of_ranks(32, 4), (24,), 1, of.seed).runs
    plan, lru = (orin.tpot(runs[way][24]) for way in ("planned, ZipMoE's rule", "uncompressed, LRU"))
    return [ratio_study(100, of.seed)["worst"], float(gains[6].mean()), abs(float(gains[1].mean()) - 1), plan / lru]


def speculation(of: Trial) -> list[float]:
    contest, tokens = of.contest, of.train_tokens
    learned = [mean(score(contest.test, contest.predictor("estimator", estimator=train(
        contest.train, contest.model, contest.vectors, validation=contest.validation, kind=kind, tokens=tokens,
        every=-(-tokens // 5), seed=of.seed).estimator), PREFILL)) for kind in ("residual", "appendix-a")]
    s, q = (mean(found) for found in contest.scores(("router", "quasi")).values())
    arms = {"default": recall_and_misses.DEFAULT, "ours": recall_and_misses.OURS}
    missed = recall_and_misses.missed(contest.train, contest.test, "0.5", arms)[0.5]
    return [q - s, learned[0] - q, learned[0] - learned[1], ratio(missed["ours"], missed["default"])[0]]


def shapes(of: Trial) -> list[float]:
    trace = of.contest.train
    curves = static.padding_curves(chunk_loads(trace, 256), 256, trace.spec.K, "model", of.seed)
    sizes = dict(curves["uniform"])
    tight = static.TierPlan.of(calibrate(trace), 256, slack=0.75)
    ways = {name: way for name, way in static.drop_orders(tight.tiers, of.seed).items()
            if name in ("saliency", "router", "random")}
    costs = static.costs(of.model, ways, ("loss",), windows=of.windows, tokens=256, seed=of.seed)
    return [static.apart(curves, "Zipf 1.2", "uniform")[0] / (max(sizes.values()) - min(sizes.values())),
            *(costs.against(other, "router")[0] for other in ("saliency", "random"))]


def conversion(of: Trial) -> list[float]:
    at_once, in_turn = (comparison.studies(of.seed, **how) for how in (
        {}, comparison.READINGS["CPU and ANE in turn"]))
    placed = [comparison.ratio(study["Phi-3.5-MoE"][comparison.RUNS[0]], "ttft", "base+TG")
              for study in (at_once, in_turn)]
    return [*(min(comparison.baselines(study, metric)[0] for study in at_once.values())
              for metric in ("ttft", "energy")), placed[0] - placed[1]]


def modules(of: Trial) -> list[float]:
    chosen, how = Assumptions(), {"seeds": (of.seed,), "units": (2, 6), "answer": 128}
    found = quantities(paper_sweep(chosen, **how), of.seed)
    shared = paper_sweep(ndp.physical(chosen), systems=("NDP+TP", "NDP+TP+LB"), **how)
    added = shared.speedups("NDP+TP+LB", "NDP+TP", "moe_decode", of.seed).values()
    return [found["decode NDP+TP"], found["decode NDP+TP+LB+PRE"] / found["decode NDP+TP"],
            max(abs(gain - 1) for gain in added)]


def together(of: Trial) -> list[float]:
    found = end_to_end.titled(end_to_end.run(
        ("huffman", "prefetch", "bf12", "huffman + prefetch"), (0.5,), (0,), contexts=(8,), decode=4, seed=of.seed,
        model=str(small_model()), alone=True, here=True, simulated=False))
    return [float(sum(row.get("output") != "= eager" for rows in found.values() for row in rows.values()))]


#: notebook → what finds the numbers of its `BARS`, in their order
NOTEBOOKS: dict[str, Callable[[Trial], list[float]]] = {
    "00": start, "01": popularity, "02": compression, "03": planning, "04": speculation, "05": shapes,
    "06": conversion, "07": modules, "08": together}


def told(values: list[float], bar: tuple[str, float]) -> dict[str, Any]:
    """A row: the range over seeds, and how many of them keep the conclusion."""
    side, limit = bar
    kept = sum(value > limit if side == "above" else value < limit for value in values)
    return {"bar": f"{side} {limit:g}", "min": min(values), "median": median(values), "max": max(values),
            "mean": fmean(values), "seeds": len(values), "hold": kept}


def one(trial: Trial, notebooks: Sequence[str]) -> dict[str, float]:
    """Every conclusion's number for a seed."""
    return {name: value for notebook in notebooks for name, value in zip(
        [name for name in BARS if name.startswith(notebook)], NOTEBOOKS[notebook](trial), strict=True)}


def run(seeds: int = 10, first: int = 0, prompts: int = 6, train_tokens: int = 4_000, windows: int = 8,
        notebooks: Sequence[str] = tuple(NOTEBOOKS), journal: str | None = None) -> dict[str, dict[str, Any]]:
    """ValueError: the journal is of other sizes or conclusions, or there is no such notebook."""
    if unknown := [name for name in notebooks if name not in NOTEBOOKS]:
        raise ValueError(f"no conclusions of {', '.join(unknown)} are tried; there are: {', '.join(NOTEBOOKS)}")
    sizes = {"prompts": prompts, "train_tokens": train_tokens, "windows": windows}
    bars = {name: bar for name, bar in BARS.items() if name[:2] in notebooks}
    model, head, wanted = open_model(), [sizes, list(bars)], range(first, first + seeds)
    with closing(Journal(Path(journal))) if journal else nullcontext() as kept, torch_threads(1):
        lines = kept.lines if kept else []
        if lines and lines[0] != head:
            raise ValueError(f"{journal} is of other sizes or conclusions ({lines[0][0]}); name another file")
        found = {seed: values for seed, values in lines[1:] if seed in wanted}
        if kept and not lines:
            kept.append([head])
        with suppress(KeyboardInterrupt):                       # what is done counts
            for seed in progress([seed for seed in wanted if seed not in found], "conclusions", unit="seed"):
                found[seed] = one(Trial(model, seed, **sizes), notebooks)
                if kept:
                    kept.append([[seed, found[seed]]])
    return {"conclusions by seed (00, 02, 08 exact; 01, 04, 05 measured; 03 simulated; 06, 07 modelled)": {
        name: told([of[name] for of in found.values()], bar) for name, bar in bars.items() if found}}


OPTIONS = {"seeds": (whole(1), "how many"), "first": (whole(), "the first of them"),
           "prompts": (whole(2), "test prompts a source, half of those learned from"),
           "train_tokens": (whole(1), "that estimators see"), "windows": (whole(2), "windows of text"),
           "notebooks": (several(one_of(NOTEBOOKS)), "whose conclusions"),
           "journal": (None, "a file that keeps finished seeds")}
