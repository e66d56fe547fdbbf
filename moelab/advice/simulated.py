"""Advice by simulation, and by running the best for real: what `moelab.advice.advise` does where it
may take a minute.

A model that is here is opened once in the memory that there is, takes the tokens that all ways are
to take, and is profiled: its routing, and what reading and computing its experts cost. Both are
kept. That run is a measurement, too: how far the simulator is off for it corrects all its other
predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from moelab.advice import verify as real
from moelab.advice.answer import Advice, conclude
from moelab.advice.model import AS_IS, Model
from moelab.advice.question import Question
from moelab.advice.sample import disturbed, machine, sample_costs
from moelab.advice.space import (
    PREFETCH,
    PROMPT,
    RECALL,
    TIMED,
    WARM,
    Costs,
    Look,
    Scene,
    Search,
    card_costs,
    forms_of,
    predicted,
    scene,
    twice_as_fast,
)
from moelab.advice.ways import Way, fitted
from moelab.bench.profile import Profile
from moelab.files import cache_folder, load_json, write_json
from moelab.records import Record
from moelab.simulation.simulator import flat
from moelab.table import size, span

#: of what is kept of a look: another number where that would no longer do
FORMAT = "moelab.look/6"
#: ways that `verify` runs
VERIFIED = 3


def simulated(asked: Question, verify: bool) -> Advice:
    """The advice; verify : also run the best for real."""
    model = asked.model
    on_card = asked.on_card
    offered = model.forms()
    # lossless ones first, whatever may be lost
    forms = sorted(forms_of(model), key=lambda form: not offered.get(form, (0, True))[1])
    kept = None
    look = None
    notes = []
    if model.folder is not None and not on_card:
        kept = real.Kept(identity_of(model))
        within = {name: getattr(asked, name) for name in ("memory", "context", "batch")}
        look, why = looked(model, kept, **within)
        notes += [f"The model could not be run here: {why}"] * (look is None)
    if look is not None:
        seen = look.seen
        asked = replace(asked, popularity="as in what ran here")
        if disturbed(look.itself):
            notes.append(
                f"While the model was measured, other processes kept {look.itself.others:.1f} "
                "cores busy: times are too long. When it is quiet, remove "
                f"{profile_file(model, kept, asked.batch)} and ask again."
            )
    else:
        seen = scene(asked.shares, asked.batch)
        notes.append(
            f"Tokens were drawn {asked.popularity}, each by itself; a model's own repeat more of "
            "each other."
        )
    if on_card:
        costs_of = card_costs(asked.device, model)
        if any(costs_of(form) is None for form in forms):
            notes.append(
                "Huffman is left out: the card does not say how fast a thread decodes "
                "(decompress_gbs)"
            )
    else:
        costs_of = sample_costs(model, forms, look)
    search = searched(asked, costs_of, seen, kept)
    if look is not None:
        _keep_look(search, kept, look.ran)
    if verify:
        notes += real.verify(
            model,
            chosen(search, kept, asked.loss),
            kept,
            memory=asked.memory,
            batch=asked.batch,
            loss=asked.loss > 0,
        )
        search.found = [replace(way, loss=search.loss(way.form)) for way in search.found]
    return judged(search, kept, costs_of, notes)


def _keep_look(search: Search, kept: real.Kept, ran: Record) -> None:
    """Keep the run in which an offloaded model was looked at as a measurement of that way, unless
    there is one."""
    way = as_looked(search.asked.model, ran)
    if way.resident or any(record["settings"] == way.settings for record in kept.records):
        return
    if played := search.play(way, []):
        real.keep(kept, replace(way, tpot=played.tpot), search.asked.batch, ran, None)


def searched(
    asked: Question, costs_of: Callable[..., Costs | None], seen: Scene, kept: real.Kept | None
) -> Search:
    """What there is to be found by simulation, each form's loss being what was measured of it."""

    def loss_of(form: str) -> float | None:
        _, lossless = asked.model.forms().get(form, (0, True))
        return 0.0 if lossless else kept.loss(form) if kept else None

    search = Search(asked, costs_of, seen, loss_of)
    search.run(forms_of(asked.model))
    return search


def judged(
    search: Search, kept: real.Kept | None, costs_of: Callable[..., Costs | None], notes: list[str]
) -> Advice:
    """The advice that follows from what was simulated and, on this machine, measured."""
    asked = search.asked

    def corrected(way: Way | None) -> Way | None:
        return kept.corrected(way, asked.batch) if kept and way else way

    plain = {(way.name, way.budget): way for way in search.found}

    def changed(best: Way) -> tuple[Way | None, Way | None]:
        """The disk's gain is what was simulated, by how the best is to what was simulated of it."""
        simulated = plain[best.name, best.budget]
        more = corrected(search.other(simulated, asked.memory * 3 // 2))
        if simulated.resident:
            return more, None
        faster = Search(asked, twice_as_fast(costs_of), search.seen, search.loss).play(
            simulated, []
        )
        scale = best.tpot / simulated.tpot
        return more, faster and replace(faster, tpot=faster.tpot * scale)

    ways = sorted(map(corrected, plain.values()), key=lambda way: (way.tpot, not way.lossless))
    elsewhere = [corrected(way) for way in search.elsewhere]
    return conclude(asked, ways, changed, elsewhere, notes + _how(search, kept))


def _how(search: Search, kept: real.Kept | None) -> list[str]:
    """Notes of how the answer was found, and of what is kept for the next."""
    notes = [
        f"Simulated: {PROMPT} tokens of a prompt, {WARM} that fill the cache and {TIMED} that "
        f"count, the mean of the middle half; for TTFT a prompt of {search.asked.context:,}, "
        "without the growth of attention."
    ]
    if not kept:
        return notes
    if ratios := kept.ratios():
        factor, error = kept.correction()
        notes.insert(
            0,
            f"Ways of running this model that were measured on this machine ({machine()}): "
            f"{len(ratios)}, at {span(min(ratios), max(ratios))} of the time simulated. What "
            f"else was simulated is corrected by {factor:.3g}, ± "
            f"{'unknown' if error is None else f'{error:.0%}'}.",
        )
    if search.left:
        left = "; ".join(dict.fromkeys(search.left))
        notes.append(
            f"Left out, as time was over or nobody knows what it costs: {left}. The next "
            "advice goes on with what was measured."
        )
    notes.append(
        f"What was measured is kept in {kept.path.parent}; without that folder, all is "
        "measured anew."
    )
    return notes


def chosen(search: Search, kept: real.Kept, loss: float) -> list[Way]:
    """The ways to run for real: the fastest that may be advised, each of another form or with
    another prefetcher, and where loss is allowed also those whose loss is not known yet; a lossless
    one, to compare losses with."""
    ways = sorted(search.found, key=lambda way: kept.corrected(way, search.asked.batch).tpot)
    ways = [way for way in ways if way.within(loss) or loss and way.loss is None]
    picked = list({(way.form, way.executor): way for way in reversed(ways)}.values())[::-1]
    picked = sorted(picked, key=ways.index)[:VERIFIED]
    if loss and not any(way.lossless for way in picked):
        picked[-1:] = [
            next(way for way in sorted(search.found, key=lambda way: way.tpot) if way.lossless)
        ]
    return picked


def identity_of(model: Model) -> str:
    """The identity of a checkpoint's weights."""
    from moelab.checkpoint.checkpoint import Checkpoint

    return Checkpoint.at(model.folder).identity


def as_looked(model: Model, ran: Record) -> Way | None:
    """The way in which a model was looked at, by what is kept about that; None if its experts do
    not fit."""
    way = fitted(
        model, AS_IS, 0.0, model.spec.expert_bytes, ran["memory"], ran["context"], ran["batch"]
    )
    return way and replace(way, prefetch=PREFETCH)


def profile_file(model: Model, kept: real.Kept, batch: int, bandwidth: float | None = None) -> Path:
    """Where the profile of the model itself is kept."""
    slow = f"-{bandwidth:g}" if bandwidth else ""
    return (
        cache_folder("advice")
        / f"{kept.identity}-{model.stored or 'checkpoint'}-{batch}{slow}.profile.json"
    )


def looked(
    model: Model, kept: real.Kept, bandwidth: float | None = None, **within: int
) -> tuple[Look | None, str]:
    """What the model does here, run once as it is: (its tokens' routing, its profile, what was
    measured; all of that is
    kept) or None, and why not.    within : memory, context and batch.
    bandwidth : of throttled reads, B/s."""
    profile = profile_file(model, kept, within["batch"], bandwidth)
    file = profile.with_name(profile.name.replace(".profile.", ".trace."))
    try:
        found, itself = _load(file), Profile.load(profile)
    except (FileNotFoundError, ValueError):
        if (way := as_looked(model, within)) is None:
            return None, f"its experts as they are do not fit {size(within['memory'])}"
        options = {
            "memory": "100%" if way.resident else way.budget,
            "executor": "fast",
            "prefetch": PREFETCH,
        } | ({"bandwidth": bandwidth} if bandwidth else {})
        how = {"prompt": PROMPT, "tokens": WARM + TIMED, "batch": within["batch"]}
        try:
            ran = real.fresh(
                str(model.folder), options, within["memory"], **how, profile=str(profile)
            )
        except (RuntimeError, OSError) as error:
            return None, str(error)
        write_json(file, ran | within | {"format": FORMAT})
        found, itself = _load(file), Profile.load(profile)
    steps = [[(layer, dict(experts)) for layer, experts in step] for step in found["steps"]]
    tokens = sum(n for n, _ in found["forwards"])
    shares = np.zeros((model.spec.L, model.spec.E))
    for layer, experts in flat(steps):
        for expert, n in experts.items():
            shares[layer, expert] += n / tokens
    seen = Scene(
        steps,
        found["forwards"],
        predicted(steps, model.spec.E, found["recall"] or RECALL),
        np.minimum(shares, 1),
        within["batch"],
    )
    return Look(seen, itself, found), ""


def _load(file: Path) -> Record:
    return load_json(file, FORMAT, "look at a model", "`moelab advise`", Record)
