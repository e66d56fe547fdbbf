"""What notebooks 01, 04, 05 and 07 conclude, for ten seeds at small sizes: in how many of them it holds.

A seed picks prompts, windows, the order of training and simulated routing. A number above or below its bar keeps the
conclusion; sizes are far below the notebooks', so that a failure says "not at this size" as well as "not for any seed".
With `--journal`, what a seed has found is kept, and the same command goes on with the seeds that are missing.
"""

from __future__ import annotations

from contextlib import closing, nullcontext, suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moelab import open_model
from moelab.arguments import whole
from moelab.bench import ndp, prediction, static
from moelab.bench.popularity import Popularity
from moelab.bench.speculation import Contest, mean
from moelab.calibration import calibrate, chunk_loads
from moelab.intervals import ratio
from moelab.journal import Journal
from moelab.ndp.sweep import Assumptions, paper_sweep, quantities
from moelab.progress import progress
from moelab.speculate.scoring import score
from moelab.speculate.training import train
from moelab.trace import PREFILL

SOURCES = ("code", "lookup")
#: conclusion → ("above" or "below", bar)
BARS = {
    "01: overlap@4 on the same source less on another": ("above", 0.0),
    "01: overlap@4 of two forms of one question less on another source": ("above", 0.0),
    "04: recall of the next router on q less on s": ("above", 0.0),
    "04: recall of the residual estimator less the router's on q": ("above", 0.0),
    "04: recall of the residual estimator less appendix A's": ("above", 0.0),
    "04: misses of the prediction across tokens over the default's, half of the experts": ("below", 1.0),
    "05: largest effect of skew on padding over that of block size": ("below", 0.5),
    "05: loss, dropping by router weight less by saliency (nats)": ("below", 0.0),
    "05: loss, dropping by router weight less at random (nats)": ("below", 0.0),
    "07: tensor parallelism over MoNDE, decode": ("above", 1.0),
    "07: all three techniques over tensor parallelism, decode": ("above", 1.0),
    "07: what balancing adds in decode, DRAM shared": ("below", 1e-9)}


def overlaps(model: Any, seed: int) -> list[float]:
    found = Popularity.of(model, SOURCES, 8, 128, 2, 16, seed)
    agreed = found.across(4, PREFILL)[:len(SOURCES)]
    other = float((agreed.sum() - agreed.diag().sum()) / (agreed.numel() - len(SOURCES)))
    return [float(agreed.diag().mean()) - other, found.same_domain(4)["prefill"] - other]


def speculation(contest: Contest, tokens: int, seed: int) -> list[float]:
    learned = [mean(score(contest.test, contest.predictor("estimator", estimator=train(
        contest.train, contest.model, contest.vectors, validation=contest.validation, kind=kind, tokens=tokens,
        every=-(-tokens // 5), seed=seed).estimator), PREFILL)) for kind in ("residual", "appendix-a")]
    s, q = (mean(of) for of in contest.scores(("router", "quasi")).values())
    arms = {"default": prediction.DEFAULT, "ours": prediction.OURS}
    missed = prediction.missed(contest.train, contest.test, "0.5", arms)[0.5]
    return [q - s, learned[0] - q, learned[0] - learned[1], ratio(missed["ours"], missed["default"])[0]]


def shapes(contest: Contest, windows: int, seed: int) -> list[float]:
    model, trace = contest.model, contest.train
    curves = static.padding_curves(chunk_loads(trace, 256), 256, trace.spec.K, "model", seed)
    sizes = dict(curves["uniform"])
    tight = static.TierPlan.of(calibrate(trace), 256, slack=0.75)
    ways = {name: way for name, way in static.drop_orders(tight.tiers, seed).items()
            if name in ("saliency", "router", "random")}
    costs = static.costs(model, ways, ("loss",), windows=windows, tokens=256, seed=seed)
    return [static.apart(curves, "Zipf 1.2", "uniform")[0] / (max(sizes.values()) - min(sizes.values())),
            *(costs.against(other, "router")[0] for other in ("saliency", "random"))]


def modules(seed: int) -> list[float]:
    chosen = Assumptions()
    how = {"seeds": (seed,), "units": (2, 6), "answer": 128}
    found = quantities(paper_sweep(chosen, **how), seed)
    shared = paper_sweep(ndp.physical(chosen), systems=("NDP+TP", "NDP+TP+LB"), **how)
    added = shared.speedups("NDP+TP+LB", "NDP+TP", "moe_decode", seed).values()
    return [found["decode NDP+TP"], found["decode NDP+TP+LB+PRE"] / found["decode NDP+TP"],
            max(abs(gain - 1) for gain in added)]


def told(values: list[float], bar: tuple[str, float]) -> dict[str, Any]:
    """A row: the range over seeds, and how many of them keep the conclusion."""
    side, limit = bar
    kept = sum(value > limit if side == "above" else value < limit for value in values)
    return {"bar": f"{side} {limit:g}", "min": min(values), "median": median(values), "max": max(values),
            "mean": fmean(values), "seeds": len(values), "hold": kept}


def one(model: Any, seed: int, prompts: int, train_tokens: int, windows: int) -> dict[str, float]:
    """Every conclusion's number for a seed."""
    contest = Contest.of(model, 2 * prompts, prompts, 128, 8, seed)
    values = [*overlaps(model, seed), *speculation(contest, train_tokens, seed), *shapes(contest, windows, seed),
              *modules(seed)]
    return dict(zip(BARS, values, strict=True))


def run(seeds: int = 10, first: int = 0, prompts: int = 6, train_tokens: int = 4_000, windows: int = 8,
        journal: str | None = None) -> dict[str, dict[str, Any]]:
    """ValueError: the journal is of other sizes or conclusions."""
    model, sizes = open_model(), {"prompts": prompts, "train_tokens": train_tokens, "windows": windows}
    head, wanted = [sizes, list(BARS)], range(first, first + seeds)
    with closing(Journal(Path(journal))) if journal else nullcontext() as kept:
        lines = kept.lines if kept else []
        if lines and lines[0] != head:
            raise ValueError(f"{journal} is of other sizes or conclusions ({lines[0][0]}); name another file")
        found = {seed: values for seed, values in lines[1:] if seed in wanted}
        if kept and not lines:
            kept.append([head])
        with suppress(KeyboardInterrupt):                       # what is done counts
            for seed in progress([seed for seed in wanted if seed not in found], "conclusions", unit="seed"):
                found[seed] = one(model, seed, **sizes)
                if kept:
                    kept.append([[seed, found[seed]]])
    return {"conclusions by seed (01, 04, 05 measured; 07 modelled)": {
        name: told([of[name] for of in found.values()], bar) for name, bar in BARS.items() if found}}


OPTIONS = {"seeds": (whole(1), "how many"), "first": (whole(), "the first of them"),
           "prompts": (whole(2), "test prompts a source, half of those learned from"),
           "train_tokens": (whole(1), "that estimators see"), "windows": (whole(2), "windows of text"),
           "journal": (None, "a file that keeps finished seeds")}
