"""The simulated space beside counts by hand, and properties that hold for any model, machine and
memory."""

from collections import Counter
from dataclasses import replace

import pytest

from moelab import advise
from moelab.advice import space
from moelab.advice.assumed import SHARES, TEXTS, assumed, hit_rate
from moelab.advice.kept import Kept
from moelab.advice.model import AS_IS, DECODED, Model
from moelab.advice.question import Question
from moelab.advice.space import Search, card_costs, play, scenes
from moelab.base.specs import DeviceSpec, Figure, MoESpec
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


def played(experts, form, seen, **changed):
    """A form with memory for so many of its experts."""
    costs = replace(card_costs(CARD, MODEL)(form), **changed)
    asked = question(experts * costs.sizes.full)
    way = asked.way(form, 0.0, costs.sizes.full)
    return way and play(asked, way, costs, seen)


def test_forms_by_hand():
    """With room for all, a token reads its experts from memory; with room for few, its misses come
    from the disk."""
    seen = scenes(assumed(SPEC))[0]
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
    assert card_costs(CARD, MODEL)(DECODED) is None  # nobody said how fast it is decoded


@pytest.mark.parametrize("batch", [1, 3])
def test_scenes_are_what_the_assumed_texts_ask_for(batch):
    """Beside a loop over sequences and tokens; the first has the middle hit rate of `TEXTS`."""
    routing = assumed(SPEC, batch)
    length = space.PROMPT + space.WARM + space.TIMED
    texts = routing.texts(SPEC.L, [length] * batch)
    found = scenes(routing)
    assert len(found) == len(texts)
    wanted = []
    for ids in texts:
        steps = [[Counter() for _ in range(SPEC.L)] for _ in range(1 + length - space.PROMPT)]
        for at, token in enumerate(ids):
            step = steps[max(at % length - space.PROMPT + 1, 0)]
            for layer, experts in enumerate(token):
                step[layer].update(experts.tolist())
        wanted.append([[(layer, dict(n)) for layer, n in enumerate(step)] for step in steps])
    for scene in found:
        wanted.remove([[(layer, experts) for layer, experts in step] for step in scene.steps])
        assert scene.shares.sum(1) == pytest.approx([SPEC.K] * SPEC.L) and scene.shares.min() > 0
        assert sum(n for n, _ in scene.forwards) == length * batch
    assert wanted == []
    rates = [hit_rate(scene.steps, SPEC.E, SHARES[1]) for scene in found[:TEXTS]]
    assert sorted(rates)[TEXTS // 2] == rates[0]


def test_a_token_in_memory_takes_its_experts_and_the_rest_that_was_measured():
    """Whatever a line through one token and a prompt says of one: 7 s besides experts of 2 layers,
    2 each."""
    machine = replace(card_costs(CARD, MODEL)(AS_IS).machine, other=(3.0, 5.0), head=(1.0, 1.0))
    experts = 2 * 2 * BYTES[AS_IS] / 1e9
    for rest, seconds in ((7.0, 7 + experts), (None, 2 * (3 + 5) + 2 + experts)):
        found = played(16, AS_IS, scenes(assumed(SPEC))[0], machine=machine, rest=rest)
        assert found.tpot == pytest.approx(seconds)


def test_the_search_finds_what_trying_every_cache_finds():
    asked = question(6 * 2 * WEIGHTS)
    found = Search(asked, card_costs(CARD, MODEL), scenes(asked.assumed)[0], Kept(None))
    best, plain = min((way for way in found.found if way.within(0.0)), key=lambda way: way.tpot), []
    for form in (AS_IS, "bf12"):
        costs = card_costs(CARD, MODEL)(form)
        way = asked.way(form, 0.0, costs.sizes.full)
        plain += [
            play(asked, replace(way, cache=cache), costs, found.seen)
            for cache in ("lru", "lfu", "lrfu")
        ]
    assert best.lossless and best.tpot <= min(way.tpot for way in plain) * (1 + 1e-9)
    assert all(way.memory <= asked.memory for way in found.found) and all(
        way.memory >= asked.memory for way in found.elsewhere
    )
    assert {way.form for way in found.found} == {AS_IS, "bf12", "int8", "fp8", "int4", "mxfp4"}
    assert found.left == [DECODED]
    assert any(way.prefetch for way in found.found) and len({way.cache for way in found.found}) > 4


def test_an_advice_by_a_card(monkeypatch):
    for name in ("WARM", "TIMED", "FEW"):
        monkeypatch.setattr(space, name, 3)
    monkeypatch.setattr(space, "SECONDS", 1.0)
    found = advise("Phi-tiny-MoE", "6GB", device="m2-max", simulate=True)
    assert {way.form for way in found.ways} == {
        AS_IS,
        "bf12",
        "int8",
        "fp8",
        "mxfp4",
        "int4",
    }
    spec = found.model.spec
    for way in found.ways:  # the least that memory allows
        assert way.tpot > spec.K / spec.E * way.experts / 400e9 and way.memory <= found.asked.memory
    assert [way.tpot for way in found.ways] == sorted(way.tpot for way in found.ways)
    assert found.best.lossless and found.best.between is not None
    assert "simulated" in str(found) and any("huffman" in note for note in found.notes)
    few = advise("GPT-OSS-20B", "20GB", device="m2-max", simulate=True, batch=2)
    assert few.best.form == AS_IS and few.asked.batch == 2
    with pytest.raises(ValueError, match="only a model whose weights are here"):
        advise("Phi-tiny-MoE", "6GB", verify=True)


def test_another_disk_by_hand():
    costs_of = card_costs(CARD, MODEL)
    own = costs_of(AS_IS).machine.delays
    half = reading(costs_of, lambda seconds, nbytes: seconds / 2)
    assert half(AS_IS).machine.delays == replace(own, e_read=own.e_read / 2)
    by_bytes = reading(costs_of, lambda seconds, nbytes: nbytes / 1e5)(AS_IS).machine.delays
    assert by_bytes.e_read == pytest.approx(2 * WEIGHTS / 1e5) and half(DECODED) is None
