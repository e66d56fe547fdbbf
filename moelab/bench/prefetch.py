"""Prefetching beside loading on demand, token by token in turn, with copying slowed down to 0.5, 1 and 3 × computing.

One process and one model of 5 GB (raw experts, routing from random tokens) at a budget; each token is decoded by the
next of four: on demand as in Speculating Experts (all of a layer's experts are copied, then computed), on demand as the
engine does it (each is computed as it comes), hint and speculative. The cache is shared, so all of them find it alike.
Eq. (1) bounds what prefetching can gain over the first by Σ over layers of min(copy, compute); over the second, which
has hidden copying behind its layer's own experts already, the same argument leaves Σ of min(max(copy − experts, 0),
everything else). Both bounds are taken from the events of the run itself. Copying above the disk's own rate comes out
of the system's page cache. Last comes a guesser that is right once in E/K times, which the engine must learn to ignore.

Left out: training a predictor (the model is random; the guess is the next router on this layer's router input),
decoding of compressed experts, GPUs: there the copy is from host to device, and the same code has not been run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from moelab.bench.engine import SPEC
from moelab.progress import progress
from moelab.runtime.convert import convert
from moelab.runtime.offload import offload
from moelab.runtime.pipeline import clock
from moelab.runtime.synthesize import synthesize
from moelab.specs import Event, MoESpec
from moelab.speculate import Speculation, make
from moelab.store.layout import ExpertStore

ARMS = ("serial", "on demand", "hint", "speculative")
RATIOS, BUDGETS = (0.5, 1.0, 3.0), (0.25, 0.5)
WARM = 2                    # tokens of every arm that are not counted


def by_layer(events: Iterable[Event]) -> dict[int, tuple[float, float, float]]:
    """Of one token: layer → seconds of (copying, computing experts, everything else before them)."""
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for event in events:
        kind = "copy" if event.resource == "disk" else event.kind if event.resource == "compute" else None
        seconds[event.layer, kind] += event.end - event.start
    layers = {layer for layer, kind in seconds if layer >= 0}
    return {layer: tuple(seconds[layer, kind] for kind in ("copy", "expert", "other")) for layer in sorted(layers)}


def bounds(tokens: Sequence[dict[int, tuple[float, float, float]]]) -> tuple[float, float]:
    """(Eq. 1's bound on the gain over copying, then computing; what is left of it over computing as experts come), in
    seconds a token."""
    layers = [layer for token in tokens for layer in token.values()]
    return (sum(min(copy, expert + other) for copy, expert, other in layers) / len(tokens),
            sum(min(max(copy - expert, 0.0), other) for copy, expert, other in layers) / len(tokens))


class Contest:
    """A model with `ahead` experts of room, and the arms that take turns on its tokens."""

    def __init__(self, store: Path, share: float, seed: int = 0) -> None:
        K = ExpertStore(store).spec.K
        self.model = offload(store, share, ahead=K, staging=K)
        self.store, self.rng = store, torch.Generator().manual_seed(seed)
        self.vocabulary, self.past = self.model.config.vocab_size, None

    def token(self, arm: str, guess: str = "router") -> tuple[float, dict[int, tuple[float, float, float]], dict]:
        """(seconds, seconds by layer, metrics) of one more token."""
        self.model.moelab.engine.serial = arm == "serial"
        speculation = Speculation(self.model, make(guess, self.model), arm) if arm in ("hint", "speculative") else None
        ids = torch.randint(3, self.vocabulary, (1, 1), generator=self.rng)
        self.model.moelab.reset()
        try:
            start = clock()
            with torch.inference_mode():
                self.past = self.model(input_ids=ids, past_key_values=self.past, use_cache=True).past_key_values
            took = clock() - start
        finally:
            if speculation is not None:
                speculation.close()
        return took, by_layer(self.model.moelab.timeline), self.model.moelab.metrics()

    def turns(self, arms: Sequence[str], tokens: int, name: str, guess: str = "router") -> dict[str, dict[str, Any]]:
        """`tokens` for each arm, every second turn backwards."""
        took: dict[str, list[float]] = defaultdict(list)
        layers, found = defaultdict(list), defaultdict(list)
        for turn in progress(range(tokens + WARM), name, unit="turns"):
            for arm in arms if turn % 2 else arms[::-1]:
                seconds, by, metrics = self.token(arm, guess)
                if turn >= WARM:
                    took[arm].append(seconds)
                    layers[arm].append(by)
                    found[arm].append(metrics)
        return {arm: {"TPOT s": statistics.median(took[arm]), "mean s": statistics.fmean(took[arm]),
                      "best s": min(took[arm]), "samples": took[arm], "layers": layers[arm],
                      "MB read": statistics.fmean(m["read_bytes"] for m in found[arm]) / 1e6,
                      "MB wasted": statistics.fmean(m["fetched_ahead"]["wasted"] for m in found[arm]) / 1e6,
                      "hidden reads": statistics.fmean(m["fetched_ahead"]["used"] for m in found[arm])}
                for arm in arms}

    def slow_down(self, ratio: float, found: dict[str, Any]) -> float:
        """Slow copying down to `ratio` × computing, as both were in `found`; returns bytes a second."""
        compute = statistics.fmean(sum(e + o for _, e, o in token.values()) for token in found["layers"])
        rate = found["MB read"] * 1e6 / (ratio * compute)
        reader = self.model.moelab.engine.pipeline.reader
        reader.mode, reader.bandwidth = "buffered", rate            # the cache can be faster than the disk
        return rate


def compare(contest: Contest, ratio: float, rate: float, tokens: int, title: str) -> tuple[dict, dict]:
    """(rows of the arms, figures against the bounds)."""
    found = contest.turns(ARMS, tokens, title)
    serial, demand, guessed = found["serial"], found["on demand"], found["speculative"]
    over_serial, over_demand = bounds(serial["layers"])[0], bounds(demand["layers"])[1]
    copy, compute = (statistics.fmean(sum(f(*layer) for layer in token.values()) for token in serial["layers"])
                     for f in (lambda c, e, o: c, lambda c, e, o: e + o))
    rows = {arm: {key: row[key] for key in row if key not in ("samples", "layers")} for arm, row in found.items()}
    return rows, {
        "copied at GB/s": rate / 1e9, "copy ÷ compute, wanted": ratio, "copy ÷ compute, found": copy / compute,
        "gain over serial s": serial["mean s"] - guessed["mean s"], "eq. (1) s": over_serial,
        "gain ÷ eq. (1)": (serial["mean s"] - guessed["mean s"]) / over_serial,
        "gain over on demand s": demand["mean s"] - guessed["mean s"], "left of it s": over_demand,
        "speculative ÷ on demand": guessed["TPOT s"] / demand["TPOT s"],
        "hint ÷ on demand": found["hint"]["TPOT s"] / demand["TPOT s"]}


def run(folder: str | Path | None = None, tokens: int = 30, budgets: Sequence[float] = BUDGETS,
        ratios: Sequence[float] = RATIOS, spec: MoESpec = SPEC) -> dict[str, Any]:
    """Measure; returns sections of figures. The arguments are those of the command line."""
    sections: dict[str, Any] = {}
    against, wrong = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary).expanduser().resolve()
        model, store = place / "model", place / "raw"
        if not model.is_dir():
            synthesize(model, spec)
        if not store.is_dir():
            convert(model, store, codec="raw")
        for share in budgets:
            contest = Contest(store, share)
            with contest.model.moelab:
                for file in store.glob("experts-*"):            # into the page cache
                    with open(file, "rb", buffering=0) as f:
                        while f.read(1 << 24):
                            pass
                contest.turns(("on demand",), 20, f"{share:.0%}: filling the cache")
                free = contest.turns(("on demand",), 8, f"{share:.0%}: as fast as it goes")["on demand"]
                for ratio in ratios:
                    rate = contest.slow_down(ratio, free)
                    title = f"budget {share:.0%}, copying {ratio:g} × computing"
                    sections[title], against[title] = compare(contest, ratio, rate, tokens, title)
                title = f"budget {share:.0%}, guesses at random"
                contest.turns(("hint",), 30, f"{title}: learning", "random")
                found = contest.turns(("on demand", "hint"), tokens, title, "random")
                wrong[title] = {"hint ÷ on demand": found["hint"]["TPOT s"] / found["on demand"]["TPOT s"],
                                "MB wasted": found["hint"]["MB wasted"]}
    return sections | {"against the bounds": against, "guesses at random": wrong}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="where the model is kept, 10 GB, for the next time; else it is temporary")
    parser.add_argument("--tokens", type=int, default=30, help="of every arm and setting (default: 30)")
    for name, default in (("budgets", BUDGETS), ("ratios", RATIOS)):
        parser.add_argument(f"--{name}", type=lambda text: [float(x) for x in text.split(",")], default=list(default),
                            help=f"default: {','.join(map(str, default))}")
