"""Draft tokens beside plain decoding: texts that repeat and texts that do not, in memory and at
budgets, on synthetic checkpoints with routing as in real models.

The checkpoint's greedy tokens are known (`moelab.bench.implant`), so drafts are right where the
prompt has the same tokens, and wrong where it was edited: "repeats" is code-like, "edited" has
another token in every eighth place, "misleads" in every third, in "new" nothing recurs, like prose.
A prompt's tokens are looked up (`moelab.offloading.drafts`). Ways take turns in each text; ratios
are of the rounds after the first, with 95 % intervals; "first" is of the first, in which `auto`
knows nothing. `auto` is on where, in the last round, it drafts in more than half as many passes as
eight drafts, always, do; that is right where drafts of one number, always, are faster, and off
where they are slower; where they differ by less than 3 %, both are right."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from moelab import open_model
from moelab.base.arguments import number, one_of, several, whole
from moelab.base.records import Records
from moelab.base.registry import names
from moelab.bench.implant import TOKENS_FILE
from moelab.bench.synthesize import synthesize
from moelab.cards import load_model
from moelab.models.greedy import greedy
from moelab.simulation.routing import routing_of

from .grid import synthetic
from .timing import ENGINE, gain, turns, working

MEASURES = ("notebooks/studies/drafts.py", *ENGINE)
OPTIONS = {
    "cards": (
        several(one_of(names("model"))),
        "whose routing, experts a layer and experts a token",
    ),
    "budgets": (several(number(0)), "shares of the experts in memory"),
    "executors": (several(one_of(names("executor"))), "that compute"),
    "new": (whole(32), "tokens of a text"),
    "rounds": (whole(2), "of all ways"),
}
#: layers, width of the model and of an expert, heads of the synthetic models
LAYERS, H, I, HEADS = 6, 768, 384, 12
TOKENS = 512
#: every so many tokens of the passage in the prompt are others
EDITED = {"repeats": 10**6, "edited": 8, "misleads": 3}
WAYS = {"plain": 0, "2": 2, "8": 8, "auto": "auto"}
CLOSE = 0.03


def prompts(chain: Sequence[int], new: int) -> dict[str, list[int]]:
    """Text → a prompt that the model goes on from along its chain of tokens."""
    spare = iter(chain[2 * new + 8 :])
    texts = {"new": list(chain[: new + 2])}
    for name, every in EDITED.items():
        passage = [
            next(spare) if n % every == every - 1 else token
            for n, token in enumerate(chain[: new + 12])
        ]
        texts[name] = passage + list(chain[:2])
    return texts


def one_text(lm: Any, prompt: list[int], new: int, rounds: int) -> tuple[dict, dict]:
    """({way: seconds of each round}, {way: (passes with drafts, drafts, right) in the last})."""
    ids, samples, seen = torch.tensor([prompt]), {name: [] for name in WAYS}, {}
    told = None
    lm.moelab.gates.clear()
    for _, name in turns(list(WAYS), rounds, "texts"):
        before = time.perf_counter()
        with torch.inference_mode():
            lm.moelab.reset()
            out = lm.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                drafts=WAYS[name],
                **greedy(lm),
            )
        passes = lm.moelab.forwards
        samples[name].append(time.perf_counter() - before - (passes[0].end - passes[0].start))
        told = out if told is None else told
        if not torch.equal(out, told):
            raise ValueError(f"other tokens with drafts {name}")
        seen[name] = (
            sum(one.drafts > 0 for one in passes),
            sum(one.drafts for one in passes),
            sum(one.right for one in passes),
        )
    return samples, seen


def row_of(samples: dict, seen: dict) -> dict[str, Any]:
    """What a text has shown."""
    warm = {name: of[1:] for name, of in samples.items()}
    ratios = {name: gain(warm, name, "plain") for name in WAYS if name != "plain"}
    auto, low, high = ratios.pop("auto")
    best = max(of[0] for of in ratios.values())
    on = seen["auto"][0] > seen["8"][0] / 2
    right = on if best > 1 + CLOSE else not on if best < 1 - CLOSE else True
    drafted = seen["8"]
    return {
        "right drafts of 8": drafted[2] / drafted[1] if drafted[1] else 0.0,
        "2 ÷ plain": ratios["2"][0],
        "8 ÷ plain": ratios["8"][0],
        "auto ÷ plain": auto,
        **({"from": low, "to": high} if isfinite(low) else {}),  # two rounds have no interval
        "auto ÷ plain, first": samples["plain"][0] / samples["auto"][0],
        "auto drafts": "yes" if on else "no",
        "auto is right": "yes" if right else "no",
    }


def run(
    cards: Sequence[str] = ("OLMoE-1B-7B", "GPT-OSS-20B"),
    budgets: Sequence[float] = (1.0, 0.5, 0.25),
    executors: Sequence[str] = ("fast",),
    new: int = 96,
    rounds: int = 3,
    folder: str | Path | None = None,
) -> dict[str, Records]:
    """Section → text, budget and executor → metric → value."""
    rows: Records = {}
    for card in cards:
        known = load_model(card)
        spec = synthetic(card, LAYERS, known.E, known.K, H, I, HEADS)
        ids = routing_of(known)[0].draw(spec.L, spec.E, spec.K, [TOKENS])
        with working(folder) as here:
            model = synthesize(here / card, spec, routing=ids)
            (chain,) = json.loads((model / TOKENS_FILE).read_text())["tokens"]
            for budget in budgets:
                for executor in executors:
                    memory = {} if budget == 1 else {"memory": f"{budget:.0%}"}
                    with open_model(model, executor=executor, **memory) as lm:
                        for text, prompt in prompts(chain, new).items():
                            found = row_of(*one_text(lm, prompt, new, rounds))
                            rows[f"{card}, {budget:.0%}, {executor}, {text}"] = found
    right = [row["auto is right"] == "yes" for row in rows.values()]
    paying = [row for row in rows.values() if max(row["2 ÷ plain"], row["8 ÷ plain"]) > 1.2]
    summary = {
        "all": {
            "settings": len(rows),
            "auto is right": sum(right) / len(right),
            "slowest auto ÷ plain": min(row["auto ÷ plain"] for row in rows.values()),
            "settings where drafts pay 1.2×": len(paying),
            "slowest auto ÷ plain there": min((r["auto ÷ plain"] for r in paying), default=1.0),
        }
    }
    return {"drafts": rows, "summary": summary}
