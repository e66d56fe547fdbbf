"""Advice by simulation, and by running the best for real: what `moelab.advice.advise` does where it
may take a minute.

A model that is here is opened once in the memory that there is, takes the tokens that all ways are
to take, and is profiled: its routing, and what reading and computing its experts cost. Both are
kept. That run is a measurement, too: how far the simulator is off for it corrects all its other
predictions."""

from __future__ import annotations

from dataclasses import asdict, replace

from moelab.advice import verify as real
from moelab.advice.answer import Advice, conclude
from moelab.advice.kept import Kept
from moelab.advice.machine import machine, quietest, told
from moelab.advice.model import AS_IS
from moelab.advice.question import Question
from moelab.advice.sample import sample_costs
from moelab.advice.space import (
    PREFETCH,
    RECALL,
    Look,
    Scene,
    Search,
    play,
    predicted,
)
from moelab.advice.ways import PROMPT, TIMED, WARM, Way
from moelab.base.records import Record
from moelab.base.schema import typed
from moelab.base.table import span
from moelab.bench.profile import Profile

#: of what is kept of a look: another number where that would no longer do
FORMAT = "moelab.look/8"
#: ways that `verify` runs
VERIFIED = 3


def simulated(asked: Question, verify: bool) -> Advice:
    """The advice; verify : also run the best for real.

    Raises RuntimeError, OSError: the model cannot be run here."""
    from moelab.checkpoint.checkpoint import Checkpoint

    kept = Kept(Checkpoint.at(asked.model.folder).identity)
    look = looked(asked, kept)
    asked = replace(asked, assumed=replace(asked.assumed, words="as in what ran here"))
    costs = sample_costs(asked.model, look)
    notes = told(look.ran["others"])
    search = Search(asked, costs, look.seen, kept)
    once = Way(**look.ran["way"])  # is kept as a measurement of that way, unless there is one
    known = [record["settings"] for record in kept.records]
    if AS_IS in costs and not once.resident and once.settings not in known:
        kept.add(search.play(once), asked.batch, look.ran)
    if verify:
        notes += real.verify(asked, chosen(search), kept)
        search.found = [
            way if way.lossless else replace(way, loss=kept.loss(way.form)) for way in search.found
        ]

    def faster(best: Way) -> Way:
        """With a disk twice as fast: simulated, scaled by how the best's own time differs from its
        simulation."""
        own = costs[best.form]
        delays = own.machine.delays
        delays = replace(delays, e_read=delays.e_read / 2, sm_read=delays.sm_read / 2)
        quick = replace(own, machine=replace(own.machine, delays=delays))
        tpot = play(asked, best, quick, look.seen).tpot / search.play(best).tpot
        return replace(best, tpot=best.tpot * tpot)

    ways, elsewhere = (map(search.corrected, of) for of in (search.found, search.elsewhere))
    return conclude(asked, ways, faster, [*elsewhere], notes + _how(search))


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
        "count, the mean of the middle half. TTFT is modelled, without the growth of attention."
    )
    if search.left:
        notes.append(f"Left out, as time was over: {'; '.join(search.left)}.")
    return [
        *notes,
        f"What was measured is kept in {kept.path.parent}, and the next advice goes on with it.",
    ]


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


def looked(asked: Question, kept: Kept, **slow: float) -> Look:
    """What the model does here, run once as it is: its tokens' routing, its profile, what was
    measured; all of that is kept, but what others disturbed is measured again once the machine is
    quiet.

    slow : the bandwidth of throttled reads, B/s.

    Raises RuntimeError, OSError: it cannot be run."""
    model = asked.model

    def once() -> Record:
        if (way := asked.way(AS_IS, model.expert_bytes(AS_IS))) is None:
            raise RuntimeError("its experts as they are do not fit its memory")
        way = replace(way, prefetch=PREFETCH)
        options = {"memory": "100%", "prefetch": PREFETCH} | way.options(model.stored) | slow
        how = {"batch": asked.batch, "look": True}
        return real.fresh(str(model.folder), options, asked.memory, **how) | {"way": asdict(way)}

    parts = FORMAT, kept.identity, model.stored, asked.batch, *slow.values()
    found = quietest("-".join(map(str, parts)), "look", once)
    steps = [[(layer, dict(experts)) for layer, experts in step] for step in found["steps"]]
    predictions = predicted(steps, model.spec.E, found["recall"] or RECALL)
    seen = Scene(steps, found["forwards"], predictions)
    return Look(seen, typed(found["profile"], Profile), found)
