"""Ways for real: each in a process of its own, in turn; what was measured is kept, and corrects
later predictions.

Every way is given the same tokens: a prompt of `PROMPT`, `WARM` that fill the cache, and `TIMED`,
whose `typical` time counts. They are text, where the model has a tokenizer, or those whose routing
was implanted in it, and given, not sampled, since a model that repeats itself asks for the same
experts again. What is in another form is
converted once and kept with moelab's own files. Few bits are also asked for their language loss, on
windows of library text, beside that of the model as it is.

    python -m moelab.advice.verify '{"source": …, "options": …, …}'      prints what `run` returns as its last line
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moelab.advice.kept import Kept
from moelab.advice.model import AS_IS, LOSSLESS, Model
from moelab.advice.question import Question
from moelab.advice.ways import PROMPT, TIMED, WARM, Way
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.bench.memory_limit import drop_cached, in_process
from moelab.bench.profile import measured, profile
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


def forwards(lm: Any, ids: Any) -> None:
    """Give a model a prompt of `ids` [batch, tokens], and then the other tokens, one by one."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=lm.config)
    at = 0
    while at < ids.shape[1]:
        n = 1 if at else PROMPT
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
    batch: int = 1,
    loss: bool = False,
    look: bool = False,
) -> Record:
    """One way, here and now: open the model as `options` say, give it the tokens of `batch`
    sequences; text, where the model has a tokenizer, or else random ones.

    loss : also score `WINDOWS` windows of text.    look : also profile the model; if it is offloaded,
        all tokens are given again for `LOOKED` seconds, and the calmest round counts.

    Returns "tpot" (s, of each decode step), "recall" of the predictions, "steps", "forwards",
    "loss": nats a token of each window, and of a look "profile" and how "late" a throttled read
    came."""
    import torch

    from moelab.advice import sample
    from moelab.api import open_model
    from moelab.bench.implant import tokens_of
    from moelab.evaluation import scores

    with open_model(source, **options) as lm:
        size = batch, PROMPT + WARM + TIMED
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(3, lm.config.vocab_size, size, generator=draw)
        with suppress(ValueError):  # the library has no text of so many tokens
            ids = ids if lm.tokenizer is None else scores.text_windows(lm.tokenizer, "test", *size)
        if len(own := tokens_of(Path(source))) >= ids.numel():  # whose routing was implanted
            ids = torch.tensor(own[: ids.numel()]).view(size)
        forwards(lm, ids)
        this = lm.moelab
        seconds = [one.seconds for one in this.forwards]
        recall = [] if this.speculation is None else this.speculation.recall()
        known = [share for share in map(float, recall) if not math.isnan(share)]
        report = {
            "tpot": seconds[1:],
            "recall": fmean(known) if known else None,
            "steps": [
                [[layer, list(experts.items())] for layer, experts in step] for step in this.steps
            ],
            "forwards": [[one.tokens, one.phase] for one in this.forwards],
            "loss": None,
            "late": 0.0,
        }
        if loss and lm.tokenizer is not None:
            windows = scores.text_windows(lm.tokenizer, "test", WINDOWS, TOKENS)
            losses = scores.language_loss(lm, windows, 4, 0, "language loss")
            report["loss"] = losses.tolist()
        whole = this.residency.holds_all
        if look and not whole:
            report |= _look(lm, ids, options.get("bandwidth", math.inf))
    if look and whole:  # nothing was read
        report["profile"] = asdict(profile(source, sample.SECONDS, executor="fast"))
    return report


def _look(lm: Any, ids: Any, bandwidth: float) -> Record:
    """All tokens again for `LOOKED` seconds: seconds of each token of the calmest round, a profile
    of that round, and how late a throttled read comes."""
    this = lm.moelab
    found = [this.run.since(0)]
    while this.forwards[-1].end - this.forwards[0].start < LOOKED:
        first = len(this.forwards)
        forwards(lm, ids)
        found.append(this.run.since(first))
    calm = min(found, key=lambda run: sum(one.seconds for one in run.forwards[1:]))
    itself = measured(lm, calm)
    often = replace(itself.machine, predict=fitted(this.run).predict)  # asked for in few tokens
    late = [e.seconds - e.bytes / bandwidth for e in this.run.timeline if e.bytes]
    return {
        "tpot": [one.seconds for one in calm.forwards[1:]],
        "profile": asdict(replace(itself, machine=often)),
        "late": max(median(late), 0.0) if late else 0.0,
    }


def fresh(source: str, options: Mapping[str, Any], memory: int, **how: Any) -> Record:
    """`run` in a process of its own, in a control group of `memory` bytes and some to spare, where
    one can be made: a larger machine's page cache would hold what this model shall not have.
    RuntimeError as of `in_process`."""
    drop_cached(Path(source))
    task = json.dumps({"source": source, "options": dict(options), **how})
    with progress(total=1, desc="running it in its memory", unit="runs"):
        return in_process(("-m", "moelab.advice.verify", task), memory + SPARE, timeout=TIMEOUT)


def stored(model: Model, form: str, seconds: float = math.inf) -> str:
    """What opens the model in a form; it is converted if that was not done before. TimeoutError as
    `convert`."""
    if form == AS_IS:
        return model.source if model.folder is None else str(model.folder)
    from moelab.checkpoint.convert import kept_store
    from moelab.store import fewbit

    how = {"quantize" if form in fewbit.FORMATS else "codec": form}
    return str(kept_store(model.folder, **how, seconds=seconds).folder)


def verify(asked: Question, ways: Sequence[Way], kept: Kept) -> list[str]:
    """Run ways for real, twice in turn, and keep what is measured; Ctrl-C or the end of `SECONDS` stops,
    and what there is stays, half a conversion, too.

    ways : simulated, not corrected; a lossless one among them where a loss is allowed, as then that
        of few bits is measured beside it.

    Returns what could not be run, with the reason.
    """
    failed: dict[str, str] = {}
    windows: dict[str, list[float]] = {}
    queue = sorted(ways, key=lambda way: not way.lossless) + [*ways]
    end = time.monotonic() + SECONDS
    try:
        for way in progress(queue, "running the best (Ctrl-C stops)", unit="runs"):
            if way.name in failed:
                continue
            if (left := end - time.monotonic()) < 0:
                failed["the rest"] = (
                    f"not run, as {SECONDS:.0f} s were over; the next --verify goes on"
                )
                break
            loss = asked.loss > 0 and way.form not in windows
            try:
                source = stored(asked.model, way.form, left)
                options = way.options(asked.model.stored)
                found = fresh(source, options, asked.memory, batch=asked.batch, loss=loss)
            except (RuntimeError, OSError, ValueError) as error:
                failed[way.name] = str(error)
                continue
            lost = None
            if found["loss"]:
                windows[way.form] = found["loss"]
                base = next((windows[of] for of in LOSSLESS if of in windows), None)
                lost = relative(base, found["loss"]) if base and not way.lossless else None
            kept.add(way, asked.batch, found, lost)
    except KeyboardInterrupt:
        failed["the rest"] = "stopped"
    return [f"{name}: {why}" for name, why in failed.items()]


def relative(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """[mean, error] of a form's loss against that of a lossless one, paired by window."""
    import numpy as np

    from moelab.evaluation.accuracy import paired

    row = paired(np.array(base), np.array(other))
    return [row["relative"] / 100, row["relative error"] / 100]


if __name__ == "__main__":
    print("\n" + json.dumps(run(**json.loads(sys.argv[1]))), flush=True)
