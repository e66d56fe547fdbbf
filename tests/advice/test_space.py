"""The simulated space beside counts by hand, and properties that hold for any model, machine and
memory."""

from dataclasses import replace

import pytest

from moelab import advise
from moelab.advice import space
from moelab.advice.model import AS_IS, DECODED, Model
from moelab.advice.question import Question
from moelab.advice.space import (
    Search,
    at_rate,
    card_costs,
    play,
    scene,
    stored_bytes,
)
from moelab.advice.ways import fitted, needed, zipf
from moelab.specs import DeviceSpec, Figure, MoESpec

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
DECODES = DeviceSpec(
    "decodes", CARD.figures | {"decompress_gbs": Figure(1e6, "GB/s", "published", "here")}
)
LOSS = {AS_IS: 0.0, "bf12": 0.0, DECODED: 0.0}
WEIGHTS = 3 * 64 * 32
BYTES = {
    AS_IS: 2 * WEIGHTS,
    "bf12": 1.5 * WEIGHTS,
    "int8": 8.5 / 8 * WEIGHTS,
    "int4": 4.5 / 8 * WEIGHTS,
    "mxfp4": 4.25 / 8 * WEIGHTS,
}


def played(experts, form, seen, card=CARD):
    """A form with memory for so many of its experts."""
    costs = card_costs(card, MODEL)(form)
    memory = needed(MODEL, 16, 1) + int(experts * costs.sizes.full)
    way = fitted(MODEL, form, LOSS.get(form), costs.sizes.full, memory, 16, 1)
    return way and play(MODEL, way, costs, seen, 16)


def test_forms_by_hand():
    """With room for all, a token reads its experts from memory; with room for few, its misses come
    from the disk."""
    seen = scene(zipf(SPEC))
    for form, nbytes in BYTES.items():
        assert stored_bytes(SPEC, form) == nbytes
        everything = played(16, form, seen)
        assert (
            everything.tpot == pytest.approx(2 * 2 * nbytes / 1e9, rel=1e-3)
            and everything.hit_rate == 1
        )
        assert everything.read == 0 and everything.kind == "simulated" and everything.resident
        assert everything.written == (0 if form == AS_IS else 16 * nbytes)
        few = played(6, form, seen)
        assert few.read == pytest.approx(4 * (1 - few.hit_rate) * nbytes)
        assert few.tpot > 0.9 * 4 * (1 - few.hit_rate) * nbytes / 1e6  # by the disk, of 1 MB/s
    assert 1.2 < played(4, AS_IS, seen).tpot / played(4, "bf12", seen).tpot < 1.6
    assert played(3, AS_IS, seen) is None
    assert card_costs(CARD, MODEL)(DECODED) is None  # nobody said how fast it is decoded
    kept = played(6, DECODED, seen, DECODES)
    assert kept.pools.capacity > 4 and kept.written == pytest.approx(
        16 * WEIGHTS * (1 + 2.65 / 8), rel=1e-3
    )


def test_a_token_in_memory_takes_its_experts_and_the_rest_that_was_measured():
    """Whatever a line through one token and a prompt says of one: 7 s besides experts of 2 layers,
    2 each."""
    plain = card_costs(CARD, MODEL)(AS_IS)
    machine = replace(plain.machine, other=(3.0, 5.0), head=(1.0, 1.0))
    costs = replace(plain, machine=machine, rest=7.0)
    way = fitted(MODEL, AS_IS, 0.0, costs.sizes.full, 10**9, 16, 1)
    assert play(MODEL, way, costs, scene(zipf(SPEC)), 16).tpot == pytest.approx(
        7 + 2 * 2 * BYTES[AS_IS] / 1e9
    )
    assert play(MODEL, way, replace(costs, rest=None), scene(zipf(SPEC)), 16).tpot == pytest.approx(
        2 * (3 + 5 + 2 * BYTES[AS_IS] / 1e9) + 2
    )


def search(memory, allowed, loss=LOSS.get, forms=(AS_IS, "bf12", "int8", "int4")):
    asked = Question(MODEL, CARD, memory, 16, 1, allowed, True, zipf(SPEC), "assumed")
    found = Search(asked, card_costs(DECODES, MODEL), scene(asked.shares), loss)
    found.run(forms)
    return found


def test_the_search_finds_what_trying_every_cache_finds():
    memory = needed(MODEL, 16, 1) + 6 * 2 * WEIGHTS
    found = search(memory, 0.0)
    best, plain = min((way for way in found.found if way.within(0.0)), key=lambda way: way.tpot), []
    for form in (AS_IS, "bf12"):
        costs = card_costs(CARD, MODEL)(form)
        way = fitted(MODEL, form, 0.0, costs.sizes.full, memory, 16, 1)
        plain += [
            play(MODEL, replace(way, cache=cache), costs, found.seen, 16)
            for cache in ("lru", "lfu", "lrfu")
        ]
    assert best.lossless and best.tpot <= min(way.tpot for way in plain) * (1 + 1e-9)
    assert all(way.memory <= memory for way in found.found) and all(
        way.memory >= memory for way in found.elsewhere
    )
    assert {way.form for way in found.found} == {AS_IS, "bf12", "int8", "int4"}
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
        assert way.tpot > spec.K / spec.E * way.experts / 400e9 and way.memory <= found.memory
    assert [way.tpot for way in found.ways] == sorted(way.tpot for way in found.ways)
    assert found.best.lossless and found.best.error is None
    assert "simulated" in str(found) and "Huffman is left out" in " ".join(str(found).split())
    few = advise("GPT-OSS-20B", "20GB", device="m2-max", simulate=True, batch=2)
    assert few.best.form == AS_IS and few.batch == 2
    with pytest.raises(ValueError, match="only a model whose weights are here"):
        advise("Phi-tiny-MoE", "6GB", verify=True)


def test_a_throttled_disk_by_hand():
    """Each read takes its bytes over the rate, if that is longer."""
    full, plain = 2 * WEIGHTS, card_costs(CARD, MODEL)(AS_IS)

    def delays(rate, late=0.0):
        return at_rate(lambda form, executor: plain, rate, late)(AS_IS).machine.delays

    own = plain.machine.delays
    assert delays(1e5).e_read == pytest.approx(full / 1e5) == 10 * own.e_read
    assert delays(1e9) == own and delays(1e5).sm_read == 0
    assert delays(1e5, 0.25).e_read == pytest.approx(full / 1e5 + 0.25)
    assert at_rate(lambda *_: None, 1e5)(AS_IS) is None
    twice = space.twice_as_fast(lambda form, executor: plain)(AS_IS)
    assert twice.machine.delays == replace(own, e_read=own.e_read / 2)
