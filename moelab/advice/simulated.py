"""Advice by simulation, and by running the best for real: what `moelab.advice.advise` does where it
may take a minute.

A model that is here is opened once in the memory that there is, takes the tokens that all ways are
to take, and is profiled: its routing, and what reading and computing its experts cost. Both are
kept. That run is a measurement, too: how far the simulator is off for it corrects all its other
predictions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np

from moelab.advice import verify as real
from moelab.advice.answer import Advice, beyond, more_of, unmeasured
from moelab.advice.disk import fitting
from moelab.advice.model import AS_IS, Model
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
    typical,
)
from moelab.advice.ways import Way, fitted
from moelab.bench.profile import Profile
from moelab.files import cache_folder, load_json, write_json
from moelab.schema import Amount, Count, Must, Positive, Size
from moelab.simulation.simulator import flat
from moelab.specs import DeviceSpec
from moelab.table import size, span

#: of what is kept of a look: another number where that would no longer do
FORMAT = "moelab.look/6"
#: ways that `verify` runs
VERIFIED = 3
#: seconds of measuring, the model itself first
MEASURING = 60.0


def simulated(
    model: Model,
    device: DeviceSpec,
    memory: int,
    *,
    context: int,
    batch: int,
    loss: float,
    shares: np.ndarray,
    popularity: str,
    counted: bool,
    on_card: bool,
    decompress_gbs: float | None,
    verify: bool,
) -> Advice:
    """The advice; `shares` [L, E] and `popularity` say how often experts are chosen where no trace
    does.

    counted : whether a calibration says so.    on_card : whether the device is not this machine. Others as of `advise`.
    """
    kept, notes, look, end = None, [], None, time.monotonic() + MEASURING
    offered = model.forms()
    forms = sorted(
        forms_of(model), key=lambda form: not offered.get(form, (0, True))[1]
    )  # lossless, whatever is lost
    if model.folder is not None and not on_card:
        kept = real.Kept(identity_of(model))
        look, why = looked(model, kept, memory=memory, context=context, batch=batch)
        notes += [f"The model could not be run here: {why}"] * (look is None)
    if look is not None:
        seen, popularity = look.seen, "as in what ran here"
    else:
        seen = scene(shares, batch)
        notes.append(
            f"Tokens were drawn {popularity}, each by itself; a model's own repeat more of each other."
        )
    costs_of = (
        card_costs(device, model, decompress_gbs)
        if on_card
        else sample_costs(model, forms, look, end)
    )
    if look is not None and disturbed(itself := look.itself):
        about = "" if itself.clock_mhz is None else f", {itself.clock_mhz:,.0f} MHz"
        notes.append(
            f"While the model was measured, other processes kept {itself.others:.1f} cores busy{about}: "
            f"times are too long. When it is quiet, remove {profile_file(model, kept, batch)} and ask "
            f"again."
        )
    if on_card and any(costs_of(form) is None for form in forms):
        notes.append(
            "Huffman is left out: how fast a thread decodes is not known; give decompress_gbs "
            "(--decompress-gbs)"
        )

    search = searched(model, costs_of, seen, memory, context, batch, kept, loss)
    if look is not None:
        way, ran = as_looked(model, look.ran), look.ran
        if (
            not way.resident
            and all(record["settings"] != way.settings for record in kept.records)
            and (played := search.play(way, []))
        ):
            kept.add(
                settings=way.settings,
                batch=batch,
                predicted=played.tpot,
                tpot=typical(ran["tpot"][-TIMED:]),
                ttft=ran["ttft"],
                peak=ran["peak"],
                limit=ran["limit"],
                loss=None,
            )
    if verify:
        notes += real.verify(
            model, chosen(search, kept, loss), kept, memory=memory, batch=batch, loss=loss > 0
        )
        search.found = [replace(way, loss=search.loss(way.form)) for way in search.found]
    return judged(search, kept, device, costs_of, popularity, notes, on_card)


def searched(
    model: Model,
    costs_of: Callable[..., Costs | None],
    seen: Scene,
    memory: int,
    context: int,
    batch: int,
    kept: real.Kept | None,
    loss: float,
    before: Search | None = None,
) -> Search:
    """What there is to be found by simulation, each form's loss being what was measured of it.

    before : a search with another loss and all else the same, whose ways are not played again."""

    def loss_of(form: str) -> float | None:
        _, lossless = model.forms().get(form, (0, True))
        return 0.0 if lossless else kept.loss(form) if kept else None

    search = Search(model, costs_of, seen, memory, context, batch, loss_of, loss)
    search.played = before.played if before else {}
    search.run(forms_of(model))
    return search


def judged(
    search: Search,
    kept: real.Kept | None,
    device: DeviceSpec,
    costs_of: Callable[..., Costs | None],
    popularity: str,
    notes: list[str],
    on_card: bool = False,
) -> Advice:
    """The advice that follows from what was simulated and, on this machine, measured, and from what
    its disks hold."""

    def corrected(way: Way | None) -> Way | None:
        return kept.corrected(way, search.batch) if kept and way else way

    ways = sorted(
        map(corrected, {(way.name, way.budget): way for way in search.found}.values()),
        key=lambda way: (way.tpot, not way.lossless),
    )
    ways, short = (ways, []) if on_card else fitting(search.model, ways, search.allowed)
    notes += short + unmeasured(ways, search.allowed)
    best = next((way for way in ways if way.within(search.allowed)), None)
    if best is None:
        raise ValueError(
            f"nothing that fits {size(search.memory)} is known to lose no more than "
            f"{search.allowed:.2%}: measure it (--verify), allow any loss, or give more memory"
        )
    plain = next(way for way in search.found if (way.name, way.budget) == (best.name, best.budget))
    faster = Search(
        search.model,
        twice_as_fast(costs_of),
        search.seen,
        search.memory,
        search.context,
        search.batch,
        search.loss,
        search.allowed,
    )
    options = [
        (
            f"{size(1.5 * search.memory)} of memory",
            corrected(search.other(plain, search.memory * 3 // 2)),
        ),
        (
            f"a {beyond(device)[0]} twice as fast",
            None if plain.resident else _scaled(faster.play(plain, []), best, plain),
        ),
    ]
    few = next((way for way in ways if not way.within(search.allowed)), None)
    if few is not None:
        what = "of unknown loss" if few.loss is None else f"of {few.loss:.2%} more loss"
        options.append((f"{few.form} experts, {what}", few))
    if kept and (ratios := kept.ratios()):
        factor, error = kept.correction()
        notes.append(
            f"Ways of running this model that were measured on this machine ({machine()}): {len(ratios)}, at "
            f"{span(min(ratios), max(ratios))} of the time simulated. What else was simulated is corrected by "
            f"{factor:.3g}, ± {'unknown' if error is None else f'{error:.0%}'}."
        )
    notes.append(
        f"Simulated: {PROMPT} tokens of a prompt, {WARM} that fill the cache and {TIMED} that count, the "
        f"mean of the middle half; for TTFT a prompt of {search.context:,}, without the growth of attention."
    )
    if kept and search.left:
        left = "; ".join(dict.fromkeys(search.left))
        notes.append(
            f"Left out, as time was over or nobody knows what it costs: {left}. The next advice goes on "
            "with what was measured."
        )
    if kept:
        notes.append(
            f"What was measured is kept in {kept.path.parent}; without that folder, all is measured anew."
        )
    return Advice(
        search.model,
        device,
        search.memory,
        search.context,
        search.batch,
        search.allowed,
        tuple(ways),
        more_of(best, options),
        popularity,
        tuple(map(corrected, search.elsewhere)),
        tuple(notes),
    )


def _scaled(way: Way | None, best: Way, plain: Way) -> Way | None:
    """A simulated way by how the best, measured or corrected, is to what was simulated of it."""
    return way and replace(way, tpot=way.tpot * best.tpot / plain.tpot)


def chosen(search: Search, kept: real.Kept, loss: float) -> list[Way]:
    """The ways to run for real: the fastest that may be advised, each of another form or with
    another prefetcher, and where loss is allowed also those whose loss is not known yet; a lossless
    one, to compare losses with."""
    ways = sorted(search.found, key=lambda way: kept.corrected(way, search.batch).tpot)
    ways = [way for way in ways if way.within(loss) or loss and way.loss is None]
    picked = list({(way.form, way.executor): way for way in reversed(ways)}.values())[::-1]
    picked = sorted(picked, key=ways.index)[:VERIFIED]
    if loss and not any(way.lossless for way in picked):
        picked[-1:] = [
            next(way for way in sorted(search.found, key=lambda way: way.tpot) if way.lossless)
        ]
    return picked


def identity_of(model: Model) -> str:
    from moelab.checkpoint.checkpoint import Checkpoint, load_config
    from moelab.models.identity import of_checkpoint

    return of_checkpoint(Checkpoint.at(model.folder), load_config(model.folder))


def as_looked(model: Model, ran: dict[str, Any]) -> Way | None:
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
    kept) or None, and why not.    within : memory, context and batch.    bandwidth : of throttled reads, B/s."""
    profile = profile_file(model, kept, within["batch"], bandwidth)
    file = profile.with_name(profile.name.replace(".profile.", ".trace."))
    if kept_look(file, profile, model) is None:
        if (way := as_looked(model, within)) is None:
            return None, f"its experts as they are do not fit {size(within['memory'])}"
        options = {
            "memory": "100%" if way.resident else way.budget,
            "executor": "fast",
            "prefetch": PREFETCH,
        }
        options |= {"bandwidth": bandwidth} if bandwidth else {}
        try:
            found = real.fresh(
                str(model.folder),
                options,
                within["memory"],
                prompt=PROMPT,
                tokens=WARM + TIMED,
                batch=within["batch"],
                profile=str(profile),
            )
        except (RuntimeError, OSError) as error:
            return None, str(error)
        write_json(file, found | within | {"format": FORMAT})
    if (both := kept_look(file, profile, model)) is None:
        return None, f"what was measured of it makes no sense, and was not kept: {file}"
    found, itself = both
    steps = [[(layer, dict(experts)) for layer, experts in step] for step in found["steps"]]
    tokens, shares = sum(n for n, _ in found["forwards"]), np.zeros((model.spec.L, model.spec.E))
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


class _Look(TypedDict):
    """What is kept of a look, as far as it is read."""

    steps: list[list[tuple[Count, list[tuple[Count, Size]]]]]
    forwards: list[tuple[Size, Literal["prefill", "decode"]]]
    recall: Amount | None
    ttft: Positive
    tpot: Annotated[list[Positive], Must(len, "a list of times")]
    peak: Count | None
    limit: str
    memory: Size
    context: Size
    batch: Size
    late: NotRequired[Amount]


def kept_look(file: Path, profile: Path, model: Model) -> tuple[dict[str, Any], Profile] | None:
    """What is kept of a look at the model, and its profile; None where that is not there, or makes
    no sense."""
    try:
        found = load_json(file, FORMAT, "look at a model", "`moelab advise`", _Look)
        routed = [
            (layer, expert)
            for step in found["steps"]
            for layer, experts in step
            for expert, _ in experts
        ]
        if not found["forwards"] or any(
            layer >= model.spec.L or expert >= model.spec.E for layer, expert in routed
        ):
            return None
        return found, Profile.load(profile)
    except (FileNotFoundError, ValueError):
        return None
