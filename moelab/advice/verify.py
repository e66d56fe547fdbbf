"""Ways for real: each in a process of its own, in turn; what was measured is kept, and corrects
later predictions.

Every way is given the same tokens: a prompt of `PROMPT`, `WARM` that fill the cache, and `TIMED`,
whose `typical` time counts. They are text, where the model has a tokenizer, and given, not sampled,
since a model that repeats itself asks for the same experts again. What is in another form is
converted once and kept with moelab's own files. Few bits are also asked for their language loss, on
windows of library text, beside that of the model as it is.

A measurement is kept under this machine and the model's identity, with what had been predicted for
it. The ratios of the two correct the next predictions, by their geometric mean; how far they are
apart is the uncertainty that is left.

    python -m moelab.advice.verify '{"source": …, "options": …, …}'      prints what `run` returns as its last line
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import astuple, replace
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any, TypedDict

from moelab.advice.model import AS_IS, Model
from moelab.advice.sample import machine
from moelab.advice.ways import PROMPT, TIMED, WARM, Way
from moelab.bench.measure import in_process
from moelab.bench.memory_limit import drop_cached
from moelab.bench.profile import measured
from moelab.bench.results import watched
from moelab.evaluation.intervals import typical
from moelab.files import cache_folder
from moelab.journal import Journal
from moelab.progress import progress
from moelab.records import Record
from moelab.schema import Amount, Positive, Size, typed
from moelab.simulation.fit import fitted

#: seconds that one process may take; windows and tokens by which language loss is measured
TIMEOUT = 1200
WINDOWS = 12
TOKENS = 128
#: seconds in which a run that is looked at takes its tokens again and again: what disturbs a
#: machine lasts some of them
LOOKED = 5.0
#: seconds of converting and running the best
SECONDS = 190.0
#: bytes that a process may take beyond its memory before it is killed
SPARE = 256 << 20
#: the least uncertainty of a corrected prediction, as this much differs between two runs of one way
LEAST = 0.05


def forwards(lm: Any, ids: Any, prompt: int) -> None:
    """Give a model a prompt of `ids` [batch, tokens], and then the other tokens, one by one."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=lm.config)
    at = 0
    while at < ids.shape[1]:
        n = 1 if at else prompt
        with torch.inference_mode():
            lm(
                input_ids=ids[:, at : at + n],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        at += n


def run(
    source: str,
    options: Mapping[str, Any],
    *,
    prompt: int,
    tokens: int,
    batch: int = 1,
    loss: bool = False,
    profile: str | None = None,
) -> Record:
    """One way, here and now: open the model as `options_of` says, give it `prompt` and then `tokens`
    single tokens of `batch` sequences; text, where the model has a tokenizer, or else random ones.

    loss : also score `WINDOWS` windows of text.    profile : a file for the profile of the model, if it is offloaded;
        then all tokens are given again for `LOOKED` seconds, and the calmest round counts.

    Returns "ttft" and "tpot" (s, of each forward), "recall" of the predictions, "peak" (bytes),
    "steps", "forwards", "loss": nats a token of each window, and with a profile how "late" a
    throttled read came."""
    import torch

    from moelab.advice import sample
    from moelab.api import open_model
    from moelab.cache.pools import Pools
    from moelab.evaluation import scores

    plan = {"plan": Pools(*options["plan"])} if "plan" in options else {}
    with open_model(source, **dict(options) | plan) as lm:
        size = batch, prompt + tokens
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(3, lm.config.vocab_size, size, generator=draw)
        with suppress(ValueError):  # the library has no text of so many tokens
            ids = ids if lm.tokenizer is None else scores.text_windows(lm.tokenizer, "test", *size)
        forwards(lm, ids, prompt)
        this = lm.moelab
        seconds = [end - start for start, end, *_ in this.forwards]
        recall = [] if this.speculation is None else this.speculation.recall()
        known = [share for share in map(float, recall) if not math.isnan(share)]
        report = {
            "ttft": seconds[0],
            "tpot": seconds[1:],
            "recall": fmean(known) if known else None,
            "peak": this.metrics().peak_rss_bytes,
            "steps": [
                [[layer, list(experts.items())] for layer, experts in step] for step in this.steps
            ],
            "forwards": [[tokens, phase] for *_, tokens, phase in this.forwards],
            "loss": None,
        }
        if loss and lm.tokenizer is not None:
            windows = scores.text_windows(lm.tokenizer, "test", WINDOWS, TOKENS)
            losses = scores.language_loss(lm, windows, 4, 0, "language loss")
            report["loss"] = losses.tolist()
        whole = this.residency.holds_all
        if profile is not None:
            report |= _look(lm, ids, prompt, options.get("bandwidth", math.inf), profile)
    if profile is not None and whole:  # nothing was read
        sample.of_store(source, options["executor"]).save(profile)
    return report


def _look(lm: Any, ids: Any, prompt: int, bandwidth: float, profile: str) -> Record:
    """All tokens again for `LOOKED` seconds: seconds of each token of the calmest round, and how
    late a throttled read comes; a profile of that round is saved."""
    this = lm.moelab

    def rounds() -> list[Any]:
        found = [this.run.since(0)]
        while this.forwards[-1].end - this.forwards[0].start < LOOKED:
            first = len(this.forwards)
            forwards(lm, ids, prompt)
            found.append(this.run.since(first))
        return found

    found, others = watched(rounds)
    calm = min(found, key=lambda run: sum(end - begin for begin, end, *_ in run.forwards[1:]))
    if not this.residency.holds_all:
        itself = measured(lm, calm)
        often = replace(itself.machine, predict=fitted(this.run).predict)  # asked for in few tokens
        replace(itself, machine=often, others=others).save(profile)
    late = [e.end - e.start - e.bytes / bandwidth for e in this.run.timeline if e.bytes]
    return {
        "tpot": [end - begin for begin, end, *_ in calm.forwards[1:]],
        "late": max(median(late), 0.0) if late else 0.0,
    }


def fresh(source: str, options: Mapping[str, Any], memory: int, **how: Any) -> Record:
    """`run` in a process of its own, in a control group of `memory` bytes and some to spare, where
    one can be made: a larger machine's page cache would hold what this model shall not have.
    RuntimeError as of `measure.in_process`."""
    drop_cached(Path(source))
    task = json.dumps({"source": source, "options": dict(options), **how})
    with progress(total=1, desc="running it in its memory", unit="runs"):
        return in_process(("-m", "moelab.advice.verify", task), memory + SPARE, timeout=TIMEOUT)


def options_of(way: Way, model: Model) -> Record:
    """What `open_model` takes to run a way."""
    if way.resident and way.form == AS_IS and model.stored is None:
        return {"executor": way.executor}
    options: dict[str, Any] = {
        "memory": "100%" if way.resident else way.budget,
        "executor": way.executor,
    }
    if not way.resident:
        options |= {"cache": way.cache, "prefetch": way.prefetch, "workers": way.workers}
    return options | ({"plan": [*astuple(way.pools)]} if way.pools else {})


def stored(model: Model, form: str, seconds: float = math.inf) -> str:
    """What opens the model in a form; it is converted if that was not done before. TimeoutError as
    `convert`."""
    if form == AS_IS:
        return model.source if model.folder is None else str(model.folder)
    from moelab.checkpoint.convert import kept_store
    from moelab.store import fewbit

    how = {"quantize": form} if form in fewbit.FORMATS else {"codec": form}
    return str(kept_store(model.folder, **how, seconds=seconds).folder)


class _Record(TypedDict):
    machine: str
    model: str
    settings: dict[str, Any]
    batch: Size
    predicted: Positive | None
    tpot: Positive
    loss: tuple[float, Amount] | None


def sensible(record: Any) -> bool:
    """Whether a line of the journal is a measurement; one that is none counts as not made."""
    with suppress(ValueError):
        return "form" in typed(record, _Record)["settings"]
    return False


class Kept:
    """What was measured of a model on this machine, in a journal that all models share.

    records : of this model, as dictionaries: "settings" of the `Way`, "batch", "predicted" (by
        simulation, before any correction), "tpot", "ttft" (s), "peak" (bytes), "limit" (in words,
        of its memory), "loss" (relative, [mean, error]; None if it was not asked), "when".
    """

    def __init__(self, identity: str) -> None:
        self.identity, self.path = (
            identity.partition("-")[0],
            cache_folder("advice") / "measured.journal",
        )
        self.records = [
            record
            for record in self._write([])
            if sensible(record)
            and (record["machine"], record["model"]) == (machine(), self.identity)
        ]

    def add(self, **record: Any) -> None:
        """Keep a measurement, on the disk at once."""
        record = {
            "machine": machine(),
            "model": self.identity,
            "when": time.strftime("%Y-%m-%d %H:%M"),
        } | record
        self._write([record])
        self.records.append(record)

    def _write(self, records: list[Record]) -> list[Record]:
        """Append to the journal, which another process may hold for a moment; returns what was in
        it."""
        for last in [False] * 50 + [True]:
            try:
                journal = Journal(self.path)
                break
            except FileExistsError:
                if last:
                    raise
                time.sleep(0.1)
        with closing(journal):
            journal.append(records)
        return journal.lines

    def loss(self, form: str) -> float | None:
        """Relative language loss of a form: the upper end of what was measured last, one error
        above the mean."""
        found = [of["loss"] for of in self.records if of["settings"]["form"] == form and of["loss"]]
        return max(sum(found[-1]), 0.0) if found else None

    def ratios(self) -> list[float]:
        """Measured over predicted TPOT, of the last measurement of each way."""
        latest = {json.dumps([of["settings"], of["batch"]]): of for of in self.records}
        return [of["tpot"] / of["predicted"] for of in latest.values() if of["predicted"]]

    def correction(self) -> tuple[float, float | None]:
        """(factor on a predicted TPOT, relative uncertainty that is left: None where fewer than two
        ways tell it)."""
        if not (ratios := self.ratios()):
            return 1.0, None
        factor = geometric_mean(ratios)
        apart = max(abs(ratio / factor - 1) for ratio in ratios)
        return factor, max(apart, LEAST) if len(ratios) > 1 else None

    def corrected(self, way: Way, batch: int) -> Way:
        """A simulated way as it was measured, if it was, or else corrected by what was."""
        asked = way.settings, batch
        tpot = [of["tpot"] for of in self.records if (of["settings"], of["batch"]) == asked]
        if not tpot:
            factor, error = self.correction()
            return replace(way, tpot=way.tpot * factor, error=error)
        middle = median(tpot)
        error = max(LEAST, (max(tpot) - min(tpot)) / 2 / middle)
        return replace(way, tpot=middle, kind="measured", predicted=way.tpot, error=error)


def verify(
    model: Model,
    ways: Sequence[Way],
    kept: Kept,
    *,
    memory: int,
    batch: int,
    rounds: int = 2,
    loss: bool = False,
) -> list[str]:
    """Run ways for real, in turn, and keep what is measured; Ctrl-C or the end of `SECONDS` stops,
    and what there is stays, half a conversion, too.

    ways : simulated, not corrected.
    loss : measure the language loss of few bits, and of the model as it is.

    Returns what could not be run, with the reason.
    """
    if loss and any(way.loss is None for way in ways) and not any(way.lossless for way in ways):
        raise ValueError("a loss is measured beside a lossless way; give one")
    failed: dict[str, str] = {}
    windows: dict[str, list[float]] = {}
    queue = sorted(ways, key=lambda way: not way.lossless) + [*ways] * (rounds - 1)
    end = time.monotonic() + SECONDS
    longest = 0.0
    try:
        with progress(total=len(queue), desc="running the best (Ctrl-C stops)", unit="runs") as bar:
            for way in queue:
                if way.name in failed:
                    continue
                left = end - longest - time.monotonic()
                if left < 0:
                    failed["the rest"] = (
                        f"not run, as {SECONDS:.0f} s were over; the next --verify goes on"
                    )
                    break
                bar.note(way.name)
                asked = loss and way.form not in windows
                how = {"prompt": PROMPT, "tokens": WARM + TIMED, "batch": batch, "loss": asked}
                try:
                    source = stored(model, way.form, left)
                    start = time.monotonic()
                    found = fresh(source, options_of(way, model), memory, **how)
                    longest = max(longest, time.monotonic() - start)
                except (RuntimeError, OSError, ValueError) as error:
                    failed[way.name] = str(error)
                    continue
                if asked and found["loss"]:
                    windows[way.form] = found["loss"]
                keep(kept, way, batch, found, relative(windows, way, ways) if asked else None)
                bar.update()
    except KeyboardInterrupt:
        failed["the rest"] = "stopped"
    return [f"{name}: {why}" for name, why in failed.items()]


def keep(kept: Kept, way: Way, batch: int, found: Record, loss: Any) -> None:
    """Keep what a way measured."""
    kept.add(
        settings=way.settings,
        batch=batch,
        predicted=way.tpot,
        tpot=typical(found["tpot"][-TIMED:]),
        ttft=found["ttft"],
        peak=found["peak"],
        limit=found["limit"],
        loss=loss,
    )


def relative(
    windows: Mapping[str, Sequence[float]], way: Way, ways: Iterable[Way]
) -> list[float] | None:
    """[mean, error] of a form's loss against that of a lossless one, paired by window; None without
    either."""
    import numpy as np

    from moelab.evaluation.accuracy import paired

    base = next((windows[one.form] for one in ways if one.lossless and one.form in windows), None)
    if base is None or way.form not in windows or way.lossless:
        return None
    row = paired(np.array(base), np.array(windows[way.form]))
    return [row["relative"] / 100, row["relative error"] / 100]


if __name__ == "__main__":
    print("\n" + json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
