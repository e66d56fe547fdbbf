"""Compressed experts on their way to a GPU: planes arrive and are joined beside each other, and
nothing is used before it is there."""

import random
import threading
from collections import Counter

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moelab import convert, open_model
from moelab.cache.pools import Pools
from moelab.offloading import decoders, loading, offload
from moelab.offloading.slots import slot_counts
from moelab.store import codecs
from notebooks.studies.zipmoe import overlaps
from tests.models import tiny
from tests.offloading.links import Delayed
from tests.offloading.test_interruption import watched
from tests.offloading.test_offload import DELAYS, assert_equal, jitter
from tests.timelines import check

CODECS = ("huffman", "zstd", "lz4hc")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """(a model, codec → store of it), whose tensors are in shards."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "MIN_SHARD", 500)
        sizes = {"hidden_size": 48, "moe_intermediate_size": 40}
        tiny.save("qwen3_moe", folder / "model", torch.bfloat16, **sizes)
        found = {one: convert(folder / "model", folder / one, one) for one in CODECS}
    return open_model(folder / "model"), found


@pytest.fixture
def far(monkeypatch):
    """The CPU is as far as a GPU."""
    monkeypatch.setattr("moelab.offloading.offload.link_to", Delayed)


@settings(phases=[p for p in Phase if p is not Phase.shrink])
@given(
    st.integers(0, 1 << 30).map(random.Random),
    st.sampled_from(CODECS),
    st.sampled_from([Pools(F=5), Pools(2, 3, 2, 4), Pools(0, 0, 5, 0), Pools(0, 4, 0, 0)]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["default", "affinity", "expert"]),
    st.sampled_from([0, 1, 100]),
    st.booleans(),
)
def test_what_is_computed_was_joined_before(
    stores, chance, codec, plan, workers, staging, scheduler, places, recovers
):
    """However late the link is: it does nothing before somebody waits for it."""
    reference, of = stores
    with pytest.MonkeyPatch.context() as patch, watched():
        patch.setattr("moelab.offloading.offload.link_to", Delayed)
        for room in (decoders, loading):
            patch.setattr(room, "recovers", lambda device: recovers)

        def counts(*given):
            found = slot_counts(*given)
            return found | {"passing": min(places, found["passing"])}

        patch.setattr(offload, "slot_counts", counts)
        how = {"plan": plan, "cache": "zipmoe", "workers": workers, "staging": staging}
        how |= {"scheduler": scheduler, "delays": DELAYS, "ahead": 2}
        with offload.offload(of[codec], "10MB", **how) as model:
            jitter(model, chance)
            for seed in range(2):
                assert_equal(model, reference, seed=seed, batch=1 + seed, new=3)
            model.moelab.engine.loader.slots.link.rest()
            model.moelab.engine.loader.settle()
            events = model.moelab.run.timeline
            kinds = Counter(event.kind for event in events)
            assert check(events) == [] and bool(kinds["recover"]) is recovers
            assert (
                ("link" in overlaps(events)) == bool(kinds["send"]) == bool(places or not recovers)
            )


def test_sign_mantissas_are_sent_while_exponents_are_decompressed(stores, far, monkeypatch):
    decompress, late = decoders.unpack_plane, []
    with offload.offload(stores[1]["huffman"], "10MB", plan=Pools(F=2)) as model:
        link = model.moelab.engine.loader.slots.link

        told, behind = [], link.behind

        def listening(what, *given):
            told.append(what)
            return behind(what, *given)

        monkeypatch.setattr(link, "behind", listening)
        monkeypatch.setattr(
            decoders, "unpack_plane", lambda *of: (late.append(len(told)), decompress(*of))
        )
        assert_equal(model, stores[0], batch=1, new=2)
    assert late[0] > 0  # before the first exponent was decompressed


@pytest.mark.parametrize("stage", ["unpack_plane", "_join"])
def test_after_an_error_between_stages_nothing_old_is_computed_with(
    stores, far, stage, monkeypatch
):
    right, calls = getattr(decoders, stage), iter(range(10**6))
    failing = {7, 31}

    def fails(*given):
        if next(calls) in failing:
            raise RuntimeError("between stages")
        return right(*given)

    monkeypatch.setattr(decoders, stage, fails)
    plan = {"plan": Pools(2, 3, 2, 4), "cache": "zipmoe"}
    with watched(), offload.offload(stores[1]["huffman"], "10MB", workers=2, **plan) as model:
        errors = 0
        for seed in range(4):
            try:
                assert_equal(model, stores[0], seed=seed, batch=1, new=2)
            except RuntimeError:
                errors += 1
        assert errors
        failing.clear()
        assert_equal(model, stores[0], seed=9, batch=1, new=2)


def test_closing_while_planes_are_under_way_ends(stores, far, monkeypatch):
    right, begun, go_on = decoders.unpack_plane, threading.Event(), threading.Event()

    def slow(*given):
        begun.set()
        go_on.wait(60)
        right(*given)

    monkeypatch.setattr(decoders, "unpack_plane", slow)
    with watched():
        model = offload.offload(stores[1]["huffman"], "10MB", plan=Pools(F=2))
        found = []

        def run():
            with pytest.raises(RuntimeError, match="closed"):
                model(torch.arange(3, 9)[None])
            found.append(True)

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait(60)
        threading.Timer(0.05, go_on.set).start()
        model.moelab.close()
        thread.join(60)
    assert found
