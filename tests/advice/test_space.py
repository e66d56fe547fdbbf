"""The simulated space beside counts by hand, and properties that hold for any model, machine and
memory."""

from dataclasses import replace

import pytest

from moelab.advice.assumed import assumed, steps_of
from moelab.advice.kept import Kept
from moelab.advice.model import AS_IS, Model
from moelab.advice.question import Question
from moelab.advice.space import Costs, Scene, Search, play, predicted
from moelab.advice.ways import PROMPT, TIMED, WARM
from moelab.base.specs import DeviceSpec, Figure, MoESpec
from moelab.simulation.costs import Machine, delays_in_place
from notebooks.studies.advise import reading

SPEC = MoESpec("m", "m", 2, (0, 1), 8, 2, H=64, I=32)
MODEL = Model("m", SPEC, 0, "given")
CARD = DeviceSpec(
    "card",
    {
        name: Figure(value, unit, "published", "here")
        for name, value, unit in (
            ("storage_read_gbs", 1e-3, "GB/s"),
            ("memory_bandwidth_gbs", 1.0, "GB/s"),
            ("fp32_tflops", 1e6, "TFLOPS"),
        )
    },
)
WEIGHTS = 3 * 64 * 32
BYTES = {
    AS_IS: 2 * WEIGHTS,
    "bf12": 1.5 * WEIGHTS,
    "int8": 8.5 / 8 * WEIGHTS,
    "int4": 4.5 / 8 * WEIGHTS,
    "mxfp4": 4.25 / 8 * WEIGHTS,
}


def question(nbytes, loss=0.0):
    """With memory for so many bytes of experts."""
    asked = Question(MODEL, CARD, 0, 16, 1, loss, True, assumed(SPEC))
    return replace(asked, memory=asked.fixed + int(nbytes))


def card_costs():
    """Each form by the figures of the card."""
    found = {}
    for form in MODEL.forms():
        full = MODEL.expert_bytes(form)
        delays, other = delays_in_place(CARD, SPEC, full, full, MODEL.dense)
        found[form] = Costs(Machine(delays, other=other), full, 0.0)
    return found


def scene_of():
    """Drawn tokens: a prompt, and then one by one."""
    tokens = PROMPT + WARM + TIMED
    ids = assumed(SPEC).draw(SPEC.L, [tokens], 0)
    steps = [*steps_of(ids[:PROMPT], PROMPT, SPEC.E), *steps_of(ids[PROMPT:], 1, SPEC.E)]
    forwards = [(PROMPT, "prefill")] + [(1, "decode")] * (len(steps) - 1)
    return Scene(steps, forwards, predicted(steps, SPEC.E, 0.8))


def played(experts, form, seen, **changed):
    """A form with memory for so many of its experts."""
    costs = replace(card_costs()[form], **changed)
    asked = question(experts * costs.full)
    way = asked.way(form, costs.full)
    return way and play(asked, way, costs, seen)


def test_forms_by_hand():
    """With room for all, a token reads its experts from memory; with room for few, its misses come
    from the disk."""
    seen = scene_of()
    for form, nbytes in BYTES.items():
        assert MODEL.expert_bytes(form) == nbytes
        everything = played(16, form, seen)
        assert (
            everything.tpot == pytest.approx(2 * 2 * nbytes / 1e9, rel=1e-3)
            and everything.hit_rate == 1
        )
        assert everything.kind == "simulated" and everything.resident
        assert everything.written == (0 if form == AS_IS else 16 * nbytes)
        few = played(6, form, seen)
        assert few.tpot > 0.9 * 4 * (1 - few.hit_rate) * nbytes / 1e6  # by the disk, of 1 MB/s
    assert 1.2 < played(4, AS_IS, seen).tpot / played(4, "bf12", seen).tpot < 1.6
    assert played(3, AS_IS, seen) is None


def test_a_token_in_memory_takes_its_experts_and_the_rest_that_was_measured():
    """Whatever a line through one token and a prompt says of one: 7 s besides experts of 2 layers,
    2 each."""
    machine = replace(card_costs()[AS_IS].machine, other=(3.0, 5.0), head=(1.0, 1.0))
    experts = 2 * 2 * BYTES[AS_IS] / 1e9
    found = played(16, AS_IS, scene_of(), machine=machine, rest=7.0)
    assert found.tpot == pytest.approx(7 + experts)


def test_the_search_finds_what_trying_every_cache_finds():
    asked = question(6 * 2 * WEIGHTS)
    found = Search(asked, card_costs(), scene_of(), Kept("m"))
    best, plain = min((way for way in found.found if way.within(0.0)), key=lambda way: way.tpot), []
    for form in (AS_IS, "bf12"):
        costs = card_costs()[form]
        way = asked.way(form, costs.full)
        plain += [
            play(asked, replace(way, cache=cache), costs, found.seen)
            for cache in ("lru", "lfu", "lrfu")
        ]
    assert best.lossless and best.tpot <= min(way.tpot for way in plain) * (1 + 1e-9)
    assert all(way.memory <= asked.memory for way in found.found) and all(
        way.memory >= asked.memory for way in found.elsewhere
    )
    assert {way.form for way in found.found} == {AS_IS, "bf12", "int8", "fp8", "int4", "mxfp4"}
    assert found.left == []
    assert any(way.prefetch for way in found.found) and len({way.cache for way in found.found}) > 4


def test_another_disk_by_hand():
    costs = card_costs()
    own = costs[AS_IS].machine.delays
    half = reading(costs, lambda seconds, nbytes: seconds / 2)
    assert half[AS_IS].machine.delays == replace(own, e_read=own.e_read / 2)
    by_bytes = reading(costs, lambda seconds, nbytes: nbytes / 1e5)[AS_IS].machine.delays
    assert by_bytes.e_read == pytest.approx(2 * WEIGHTS / 1e5)
