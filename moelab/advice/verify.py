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
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import astuple, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypedDict

from moelab.advice.machine import clock_mhz
from moelab.advice.model import AS_IS, Model
from moelab.advice.sample import machine
from moelab.advice.ways import Way
from moelab.bench.measure import last_json
from moelab.bench.memory_limit import drop_cached, memory_limit
from moelab.bench.profile import measured
from moelab.bench.results import load_average, others_seconds
from moelab.files import cache_folder
from moelab.journal import Journal
from moelab.progress import progress
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


def opened(source: str, options: Mapping[str, Any]) -> Any:
    """A model as `options_of` says."""
    from moelab.api import open_model
    from moelab.cache.pools import Pools

    plan = {"plan": Pools(*options["plan"])} if "plan" in options else {}
    return open_model(source, **dict(options) | plan)


def given(lm: Any, batch: int, tokens: int) -> tuple[Any, bool]:
    """(tokens [batch, tokens] for a model, whether they are of text); random ones where it has no
    text of so many."""
    import torch

    from moelab.evaluation import scores

    if lm.tokenizer is not None:
        try:
            return scores.text_windows(lm.tokenizer, "test", batch, tokens), True
        except ValueError:  # the library has no text of so many tokens
            pass
    return torch.randint(
        3, lm.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0)
    ), False


def forwards(lm: Any, ids: Any, prompt: int) -> Iterator[None]:
    """Give a model a prompt of `ids` [batch, tokens], and then the other tokens, each when the next
    is asked for."""
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
        yield


def run(
    source: str,
    options: Mapping[str, Any],
    *,
    prompt: int,
    tokens: int,
    batch: int = 1,
    loss: bool = False,
    profile: str | None = None,
) -> dict[str, Any]:
    """One way, here and now: open the model, give it `prompt` and then `tokens` single tokens of
    `batch` sequences.

    loss : also score `WINDOWS` windows of text.    profile : a file for the profile of the model, if it is offloaded;
        then all tokens are given again for `LOOKED` seconds, and the calmest round counts.

    Returns "ttft" and "tpot" (s, of each forward), "hit_rate", "recall" of the predictions, "peak"
    (bytes), "steps", "forwards", "loss": nats a token of each window, and with a profile how "late"
    a throttled read came."""
    from moelab.advice import sample
    from moelab.evaluation import scores

    with opened(source, options) as lm:
        ids, text = given(lm, batch, prompt + tokens)
        for _ in forwards(lm, ids, prompt):
            pass
        this = lm.moelab
        seconds = [end - start for start, end, *_ in lm.moelab.forwards]
        found = this.metrics()
        recall = [] if this.speculation is None else this.speculation.recall()
        known = [share for share in map(float, recall) if not math.isnan(share)]
        report = {
            "ttft": seconds[0],
            "tpot": seconds[1:],
            "hit_rate": found.hit_rate,
            "text": text,
            "recall": fmean(known) if known else None,
            "peak": found.peak_rss_bytes,
            "steps": [
                [[layer, list(experts.items())] for layer, experts in step] for step in this.steps
            ],
            "forwards": [[tokens, phase] for *_, tokens, phase in this.forwards],
            "loss": None,
        }
        if loss and lm.tokenizer is not None:
            windows = scores.text_windows(lm.tokenizer, "test", WINDOWS, TOKENS)
            report["loss"] = [
                float(value) for value in scores.language_loss(lm, windows, 4, 0, "language loss")
            ]
        if profile is not None:
            bandwidth = options.get("bandwidth", math.inf)
            report |= _look_longer(lm, ids, prompt, bandwidth, profile)
        whole = this.residency.holds_all
    if profile is not None and whole:  # nothing was read
        sample.of_store(source, options["executor"]).save(profile)
    return report


def _look_longer(lm: Any, ids: Any, prompt: int, bandwidth: float, profile: str) -> dict[str, Any]:
    """All tokens again for `LOOKED` seconds: seconds of each token of the calmest round, and how
    late a throttled read comes; a profile of that round is saved."""
    this = lm.moelab
    rounds = [lm.moelab.run.since(0)]
    load = load_average()
    start = time.perf_counter()
    before = others_seconds()
    while this.forwards[-1].end - this.forwards[0].start < LOOKED:
        first = len(this.forwards)
        for _ in forwards(lm, ids, prompt):
            pass
        rounds.append(this.run.since(first))
    others = max(others_seconds() - before, 0.0) / (time.perf_counter() - start)
    calm = min(rounds, key=lambda run: sum(end - begin for begin, end, *_ in run.forwards[1:]))
    if not this.residency.holds_all:
        found = measured(lm, calm)
        often = fitted(this.run).predict  # asked for in few tokens
        found = replace(found, machine=replace(found.machine, predict=often))
        replace(found, load_average=load, others=others, clock_mhz=clock_mhz()).save(profile)
    late = [
        event.end - event.start - event.bytes / bandwidth
        for event in this.run.timeline
        if event.bytes
    ]
    return {
        "tpot": [end - begin for begin, end, *_ in calm.forwards[1:]],
        "late": max(median(late), 0.0) if late else 0.0,
    }


def fresh(source: str, options: Mapping[str, Any], memory: int, **how: Any) -> dict[str, Any]:
    """`run` in a process of its own, in a control group of `memory` bytes and some to spare, where
    one can be made: a larger machine's page cache would hold what this model shall not have. Also
    returns "limit": whether one could.

    Raises RuntimeError with the process's last words if it fails or takes too long.
    """
    path = os.pathsep.join(
        filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    )
    drop_cached(Path(source))
    with memory_limit(memory + SPARE) as group:
        task = {"source": source, "options": dict(options), **how}
        words = [
            sys.executable,
            "-m",
            "moelab.advice.verify",
            json.dumps(task),
            *filter(None, [group.procs]),
        ]
        code, out, err = _waited(
            words, os.environ | {"PYTHONPATH": path}, TIMEOUT, "running it in its memory"
        )
        if code:
            killed = ["killed; it took more than its memory?"] * (code == -9)
            raise RuntimeError(
                [*(err.strip() or "it died without a word").splitlines(), *killed][-1]
            )
        return last_json(out) | {"limit": group.reason}


def _waited(
    words: Sequence[str], environment: Mapping[str, str], timeout: float, what: str
) -> tuple[int, str, str]:
    """A process's (exit status, output, errors); progress tells that it runs. RuntimeError if it
    takes too long."""
    start = time.monotonic()
    with (
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as task,
        progress(total=1, desc=what, unit="runs") as bar,
    ):
        try:
            while True:
                try:
                    out, err = task.communicate(timeout=1.0)
                    bar.update()
                    return task.returncode, out, err
                except subprocess.TimeoutExpired:
                    if time.monotonic() - start > timeout:
                        raise RuntimeError(f"gave up after {timeout:.0f} s") from None
                    bar.update(0)
        finally:
            task.kill()


def options_of(way: Way, model: Model) -> dict[str, Any]:
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
        of its memory), "loss" (relative, [mean, error]; None if it was not asked), "when", "load"
        (of the machine).
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
            "load": load_average(),
        } | record
        self._write([record])
        self.records.append(record)

    def _write(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
        found = [
            record["loss"]
            for record in self.records
            if record["settings"]["form"] == form and record["loss"]
        ]
        return max(found[-1][0] + found[-1][1], 0.0) if found else None

    def ratios(self) -> list[float]:
        """Measured over predicted TPOT, of the last measurement of each way."""
        latest = {
            json.dumps([record["settings"], record["batch"]]): record for record in self.records
        }
        return [
            record["tpot"] / record["predicted"]
            for record in latest.values()
            if record["predicted"]
        ]

    def correction(self) -> tuple[float, float | None]:
        """(factor on a predicted TPOT, relative uncertainty that is left: None where fewer than two
        ways tell it)."""
        if not (ratios := self.ratios()):
            return 1.0, None
        factor = math.exp(fmean(map(math.log, ratios)))
        apart = max(abs(ratio / factor - 1) for ratio in ratios)
        return factor, max(apart, LEAST) if len(ratios) > 1 else None

    def corrected(self, way: Way, batch: int) -> Way:
        """A simulated way as it was measured, if it was, or else corrected by what was."""
        same = [
            record
            for record in self.records
            if (record["settings"], record["batch"]) == (way.settings, batch)
        ]
        if same:
            tpot = [record["tpot"] for record in same]
            return replace(
                way,
                tpot=median(tpot),
                kind="measured",
                predicted=way.tpot,
                error=max(LEAST, (max(tpot) - min(tpot)) / 2 / median(tpot)),
            )
        factor, error = self.correction()
        return replace(way, tpot=way.tpot * factor, error=error)


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
                try:
                    source = stored(model, way.form, left)
                    start = time.monotonic()
                    found = _ran(model, source, way, memory, batch, asked)
                    longest = max(longest, time.monotonic() - start)
                except (RuntimeError, OSError, ValueError) as error:
                    failed[way.name] = str(error)
                    continue
                if asked and found["loss"]:
                    windows[way.form] = found["loss"]
                lost = relative(windows, way, ways) if asked else None
                keep(kept, way, batch, found, lost)
                bar.update()
    except KeyboardInterrupt:
        failed["the rest"] = "stopped"
    return [f"{name}: {why}" for name, why in failed.items()]


def _ran(
    model: Model, source: str, way: Way, memory: int, batch: int, loss: bool
) -> dict[str, Any]:
    from moelab.advice.space import PROMPT, TIMED, WARM

    return fresh(
        source,
        options_of(way, model),
        memory,
        prompt=PROMPT,
        tokens=WARM + TIMED,
        batch=batch,
        loss=loss,
    )


def keep(kept: Kept, way: Way, batch: int, found: dict[str, Any], loss: Any) -> None:
    """Keep what a way measured."""
    from moelab.advice.space import TIMED, typical

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
    for group in sys.argv[2:]:
        Path(group).write_text(str(os.getpid()))
    print("\n" + json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
