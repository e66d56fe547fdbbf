"""The advice for a GPU beside what is measured on it: `moelab bench advise --device cuda`.

A synthetic model of a card's geometry with a few of its layers, routed as is fitted to real traces,
in three forms, with shares of its experts in the GPU's memory. Each way is predicted twice:
with launches as of another GPU, and with launches fitted to two rows, the checkpoint as it is with
all experts and with the share nearest to a half, which then say nothing about the prediction and
are marked so."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from moelab import open_model
from moelab.advice.assumed import assumed
from moelab.advice.gpu import OnGpu
from moelab.advice.gpu_machine import here
from moelab.advice.machine import figure
from moelab.advice.model import AS_IS, find_model
from moelab.advice.verify import stored
from moelab.advice.ways import PROMPT, TIMED, WARM, Way
from moelab.base.progress import progress
from moelab.base.records import Record, Records
from moelab.base.specs import MoESpec
from moelab.bench.implant import tokens_of
from moelab.bench.synthesize import scaled, synthesize
from moelab.cards import load_model
from moelab.evaluation.intervals import typical
from moelab.simulation.costs import MachineRates
from moelab.simulation.routing import routing_of

from .peers import Transformers
from .timing import working

CONTEXT = PROMPT + WARM + TIMED
#: the model of a card, and the part of its layers
MODEL, SCALE = "Qwen3-30B-A3B", 0.125
FORMS = (AS_IS, "bf12", "int4")


def asked_of(place: Path, share: float) -> OnGpu:
    """A question of GPU memory for this share of the experts, and all of the CPU's memory."""
    model, device = find_model(place), here()
    routing = assumed(model.spec, model=MODEL)
    host = round(1e9 * device["host_memory_gb"])
    asked = OnGpu(model, device, 0, CONTEXT, 1, 0.0, False, routing, host=host)
    return replace(asked, memory=asked.fixed + round(share * model.spec.experts_bytes))


def measured(asked: OnGpu, way: Way, rounds: int) -> tuple[float, float]:
    """(TPOT, hit rate) of a way, each token in its least disturbed round; the first, in which kernels
    are compiled, counts nothing."""
    source = stored(asked.model, way.form)
    ids = tokens_of(asked.model.folder)[:CONTEXT]
    with open_model(source, **way.options(asked.model.stored)) as model:
        engine = Transformers(model)
        found = [engine.measure([ids], PROMPT)["tpot_s"][-TIMED:] for _ in range(rounds + 1)]
        hits = 1.0 if way.resident else model.moelab.metrics().hit_rate
    del engine, model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return typical(map(min, zip(*found[1:]))), hits


def seconds(asked: OnGpu, hits: float) -> float:
    """Predicted of a token of the checkpoint as it is."""
    expert, rates = asked.model.expert_bytes(AS_IS), MachineRates.of(asked.device)
    return asked.token(expert, hits, rates)[0]


def fitted(asked: OnGpu, every: float, some: float, hits: float) -> OnGpu:
    """The question with launches by which tokens of the checkpoint as it is take `every` seconds with
    all experts in the GPU's memory, and `some` with so many hits."""
    L, card = asked.model.spec.L, asked.device
    layer, step = card["layer_ms"], card["step_ms"]
    whole = every - seconds(asked, 1.0)
    layer = max(layer + 1e3 * whole / L, 0.0)
    step = max(step + 1e3 * (some - seconds(asked, hits) - whole) / L, 0.0)
    new = {
        name: figure(of, "ms", "this bench")
        for name, of in (("layer_ms", layer), ("step_ms", step))
    }
    return replace(asked, device=replace(card, figures=card.figures | new))


def on_gpu(
    shares: Sequence[float], rounds: int, folder: str | Path | None, spec: MoESpec | None = None
) -> Record:
    """Sections of the record. ValueError: no GPU is here."""
    card = here()
    spec = spec or scaled(load_model(MODEL), SCALE)
    rows: Records = {}
    ran: dict[tuple[str, float], tuple[OnGpu, Way, float, float]] = {}
    with working(folder) as place:
        if not (place / "model").exists():
            routing, _ = routing_of(load_model(MODEL))
            ids = routing.draw(spec.L, spec.E, spec.K, [CONTEXT])
            synthesize(place / "model", spec, routing=ids)
        for share in progress(shares, "advice", unit="budgets"):
            asked = asked_of(place / "model", share)
            for way in (one for one in asked.arithmetic() if one.form in FORMS):
                ran[way.form, share] = asked, way, *measured(asked, way, rounds)
    known = looks(share for form, share in ran if form == AS_IS)
    fits = {}
    if known:
        (_, _, every, _), (first, _, some, hits) = (ran[AS_IS, share] for share in known)
        fit = fitted(first, every, some, hits)
        fits = {key: replace(asked, device=fit.device) for key, (asked, *_) in ran.items()}
    for (form, share), (_, way, tpot, hits) in ran.items():
        row = rows[f"{form}, {share:.0%} on the GPU"] = {
            "measured ms": 1e3 * tpot,
            "predicted ms": 1e3 * way.tpot,
            "at least ms": 1e3 * way.between[0],
            "at most ms": 1e3 * way.between[1],
            "predicted ÷ measured": way.tpot / tpot,
            "hit rate": hits,
            "predicted hit rate": way.hit_rate,
        }
        if fits and not (form == AS_IS and share in known):
            again = next(one for one in fits[form, share].arithmetic() if one.form == form)
            row["launches fitted, predicted ÷ measured"] = again.tpot / tpot
    return {
        "conditions": {
            "GPU": card.name,
            "model": f"{spec.name}, {spec.num_layers} layers, synthetic, routed as fitted to traces",
            "launches fitted to": ", ".join(f"{AS_IS}, {share:.0%}" for share in known)
            or "nothing",
        }
        | {name: of.value for name, of in card.figures.items()},
        "on a GPU": rows,
    }


def looks(shares: Iterable[float]) -> tuple[float, ...]:
    """The two shares that launches are fitted to: all, and what is nearest to a half; () without."""
    shares = sorted(shares, key=lambda share: abs(share - 0.5))
    return (1.0, shares[0]) if 1.0 in shares and shares[0] < 1 else ()
