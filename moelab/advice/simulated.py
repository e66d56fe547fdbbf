"""Advice by simulation, and by running the best for real: what `moelab.advice.advise` does where it
may take a minute.

A model that is here is opened once in the memory that there is, takes the tokens that all ways are
to take, and is profiled: its routing, and what reading and computing its experts cost. Both are
kept. That run is a measurement, too: how far the simulator is off for it corrects all its other
predictions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from moelab.advice import verify as real
from moelab.advice.answer import Advice, conclude
from moelab.advice.kept import Kept
from moelab.advice.machine import machine, told
from moelab.advice.model import AS_IS, Model
from moelab.advice.question import Question
from moelab.advice.sample import disturbed, sample_costs
from moelab.advice.space import (
    PREFETCH,
    PROMPT,
    RECALL,
    TIMED,
    WARM,
    Look,
    Scene,
    Search,
    card_costs,
    forms_of,
    play,
    predicted,
    scenes,
)
from moelab.advice.ways import Way
from moelab.base.files import cache_folder, load_json, write_json
from moelab.base.records import Record
from moelab.base.schema import typed
from moelab.base.table import span
from moelab.bench.profile import Profile
from moelab.bench.results import why_busy

#: of what is kept of a look: another number where that would no longer do
FORMAT = "moelab.look/7"
#: ways that `verify` runs
VERIFIED = 3


def simulated(asked: Question, verify: bool) -> Advice:
    """The advice; verify : also run the best for real."""
    model = asked.model
    ours = model.folder is not None and not asked.on_card and not asked.assumed.given
    kept = Kept(identity_of(model) if ours else None)
    look = None
    notes = []
    if ours:
        try:
            look = looked(asked, kept)
        except (RuntimeError, OSError) as error:
            notes.append(f"The model could not be run here: {error}")
    if look is None:
        texts = scenes(asked.assumed)
    else:
        texts = [look.seen]
        asked = replace(asked, assumed=replace(asked.assumed, words="as in what ran here"))
    if asked.on_card:
        costs_of = card_costs(asked.device, model)
    else:
        costs_of = sample_costs(model, forms_of(model), look)
    known = filter(None, map(costs_of, forms_of(model)))
    notes += told(max((costs.others for costs in known), default=0.0))
    search = Search(asked, costs_of, texts[0], kept)
    if look is not None:
        _keep_look(search, look.ran)
    if verify:
        notes += real.verify(asked, chosen(search), kept)
        search.found = [replace(way, loss=search.loss(way.form)) for way in search.found]
    return judged(search, texts, notes)


def _keep_look(search: Search, ran: Record) -> None:
    """Keep the run in which an offloaded model was looked at as a measurement of that way, unless
    there is one."""
    kept = search.kept
    way = as_looked(replace(search.asked, **ran["within"]))
    if way.resident or any(record["settings"] == way.settings for record in kept.records):
        return
    if played := search.play(way):
        kept.add(played, search.asked.batch, ran)


def judged(search: Search, texts: list[Scene], notes: list[str]) -> Advice:
    """The advice that follows from what was simulated and, on this machine, measured; the range of
    the best is that over all texts."""
    asked = search.asked
    allowed = [way for way in search.found if way.within(asked.loss)]
    for best in sorted(allowed, key=lambda way: search.corrected(way).tpot)[:1]:
        costs = search.costs_of(best.form)
        took = [one.tpot for text in texts if (one := play(asked, best, costs, text))]
        between = min(best.tpot, *took), max(best.tpot, *took)
        search.found[search.found.index(best)] = replace(best, between=between)
    plain = {(way.name, way.budget): way for way in search.found}

    def changed(best: Way) -> tuple[Way | None, Way | None]:
        """The best with half as much memory again, and with a disk twice as fast: simulated,
        scaled by how the best's own time differs from its simulation."""
        simulated = plain[best.name, best.budget]
        more = search.play(search.other(simulated, asked.memory * 3 // 2))
        more = more and search.corrected(more)
        if simulated.resident:
            return more, None
        costs = search.costs_of(best.form)
        delays = costs.machine.delays
        fast = replace(delays, e_read=delays.e_read / 2, sm_read=delays.sm_read / 2)
        costs = replace(costs, machine=replace(costs.machine, delays=fast))
        faster = play(asked, simulated, costs, search.seen)
        return more, replace(faster, tpot=faster.tpot * best.tpot / simulated.tpot)

    ways = sorted(
        map(search.corrected, plain.values()), key=lambda way: (way.tpot, not way.lossless)
    )
    elsewhere = map(search.corrected, search.elsewhere)
    return conclude(asked, ways, changed, elsewhere, notes + _how(search))


def _how(search: Search) -> list[str]:
    """Notes of how the answer was found, and of what is kept for the next."""
    kept = search.kept
    notes = []
    if ratios := kept.ratios():
        factor, (least, most) = kept.correction()
        notes.append(
            f"Ways of running this model that were measured on this machine ({machine()}): "
            f"{len(ratios)}, at {span(min(ratios), max(ratios))} of the time simulated. What "
            f"else was simulated is corrected by {factor:.3g}, and takes "
            f"{span(least, most)} of that."
        )
    notes.append(
        f"Simulated: {PROMPT} tokens of a prompt, {WARM} that fill the cache and {TIMED} that "
        f"count, the mean of the middle half; for TTFT a prompt of {search.asked.context:,}, "
        "without the growth of attention."
    )
    if search.left:
        left = "; ".join(dict.fromkeys(search.left))
        notes.append(f"Left out, as time was over or nobody knows what it costs: {left}.")
    if kept.identity:
        notes.append(
            f"What was measured is kept in {kept.path.parent}, and the next advice goes on with it."
        )
    return notes


def chosen(search: Search) -> list[Way]:
    """The ways to run for real: the fastest that may be advised, each of another form, and where
    loss is allowed also those whose loss is not known yet; a lossless one, to compare losses
    with."""
    loss = search.asked.loss
    fastest = sorted(search.found, key=lambda way: search.corrected(way).tpot)
    picked: dict[str, Way] = {}
    for way in fastest:
        if way.within(loss) or loss and way.loss is None:
            picked.setdefault(way.form, way)
    ways = [*picked.values()][:VERIFIED]
    if loss and not any(way.lossless for way in ways):
        ways[-1:] = [way for way in fastest if way.lossless][:1]
    return ways


def identity_of(model: Model) -> str:
    """The identity of a checkpoint's weights."""
    from moelab.checkpoint.checkpoint import Checkpoint

    return Checkpoint.at(model.folder).identity


def as_looked(asked: Question) -> Way | None:
    """The way in which a model is first measured; None if its experts do not fit."""
    way = asked.way(AS_IS, 0.0, asked.model.expert_bytes(AS_IS))
    return way and replace(way, prefetch=PREFETCH)


def looked(asked: Question, kept: Kept, **slow: float) -> Look:
    """What the model does here, run once as it is: its tokens' routing, its profile, what was
    measured; all of that is kept, but what others disturbed is measured again once the machine is
    quiet.

    slow : the bandwidth of throttled reads, B/s.

    Raises RuntimeError, OSError: it cannot be run."""
    model = asked.model
    parts = kept.identity, model.stored or "checkpoint", asked.batch, *slow.values()
    file = cache_folder("advice") / f"{'-'.join(map(str, parts))}.look.json"
    found = None
    with suppress(FileNotFoundError, ValueError):
        found = load_json(file, FORMAT, "look at a model", "`moelab advise`", Record)
    if found is None or disturbed(typed(found["profile"], Profile)) and why_busy() is None:
        if (way := as_looked(asked)) is None:
            raise RuntimeError("its experts as they are do not fit its memory") from None
        options = {"prefetch": PREFETCH} | way.options
        within = {name: getattr(asked, name) for name in ("memory", "context", "batch")}
        found = real.fresh(
            str(model.folder), options | slow, asked.memory, batch=asked.batch, look=True
        )
        found |= {"within": within}
        write_json(file, found | {"format": FORMAT})
    steps = [[(layer, dict(experts)) for layer, experts in step] for step in found["steps"]]
    predictions = predicted(steps, model.spec.E, found["recall"] or RECALL)
    seen = Scene(steps, found["forwards"], predictions, model.spec.E, asked.batch)
    return Look(seen, typed(found["profile"], Profile), found)
