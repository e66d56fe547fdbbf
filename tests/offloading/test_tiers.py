"""GPU memory, pinned memory, disk: no expert's bytes are lost, doubled or overwritten, whatever the
order in which copies end."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import calibrate, convert, open_model, record, simulate
from moelab.cache.policies import POLICIES
from moelab.models.seam import discover
from moelab.offloading import link as links
from moelab.offloading.engine import Cancelled
from moelab.offloading.offload import host_slots
from moelab.offloading.tiers import HostPool, experts_of
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader
from tests.depth import depth, in_turn
from tests.models import tiny
from tests.offloading.links import Delayed
from tests.offloading.test_offload import generate

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(model, store in raw) of a small model."""
    folder = tmp_path_factory.mktemp("tiers")
    tiny.save("qwen3_moe", folder / "model", torch.bfloat16)
    return folder / "model", convert(folder / "model", folder / "raw", codec="raw").folder


@pytest.fixture(scope="module")
def truth(folders):
    """The store, and the bytes of its experts."""
    store = ExpertStore(folders[1])
    with Reader(store) as reader:
        return store, {key: reader.read(*key).data.copy() for key in experts_of(store)}


@pytest.fixture
def opened(monkeypatch, folders):
    """Opens the store as if the CPU were a GPU, with so much memory beside it."""

    def opens(memory, host="auto", seed=0, **options):
        monkeypatch.setattr(
            "moelab.offloading.offload.link_to", lambda device: Delayed(device, seed)
        )
        monkeypatch.setattr(
            "moelab.offloading.offload.host_slots",
            lambda store, sizes, _, *more: host_slots(store, sizes, host, *more),
        )
        return open_model(folders[1], memory=memory, **options)

    return opens


class Exchange:
    """A GPU with a few slots, and a pool; experts come and go at random."""

    def __init__(self, truth, seed, count, gpu):
        (self.store, self.truth), self.chance = truth, random.Random(seed)
        self.pool = HostPool(self.store, CPU, count, True)
        self.pool.link = self.link = Delayed(CPU, seed)
        self.gpu = torch.zeros(gpu, self.pool.size, dtype=torch.uint8)
        self.there = {}  # key → slot of the GPU

    def fetch(self, key):
        """An expert comes, to stay or for once."""
        free = [slot for slot in range(len(self.gpu)) if slot not in self.there.values()]
        if key in self.there or not free:
            return
        slot = self.there[key] = self.chance.choice(free)
        if key in self.pool.slots:
            source = torch.from_numpy(self.pool.held(*key).data)
            out = self.gpu[slot][: len(source)]
            what = "link", "read", key
            self.pool.reads(key, self.link.send(what, source, out, slot, self.pool.coming.get(key)))
        else:
            landing = self.pool.take()
            (chunks,) = self.pool.read_parts(*key, {"both": self.pool.bytes(landing)})
            source, what = torch.from_numpy(chunks.data), ("link", "send", key)
            end = self.link.send(what, source, self.gpu[slot][: len(source)], slot)
            self.pool.put(key, landing, end)
        if self.chance.random() < 0.8:
            self.pool.release(key)

    def compute(self, key):
        if key in self.there:
            self.link.arrive([self.there[key]])
            found = self.gpu[self.there[key]].numpy()[: len(self.truth[key])]
            assert np.array_equal(found, self.truth[key])

    def evict(self, key):
        if key in self.there:
            slot = self.there.pop(key)
            if (end := self.pool.take_back(key, self.gpu[slot], self.link.leave(slot))) is not None:
                self.link.leave_after(slot, end)
            if self.chance.random() < 0.4:  # while it is on its way back
                self.fetch(key)

    def check(self, key):
        """What is said to have landed has."""
        self.pool.landed()
        for key in self.pool.slots:
            if self.pool.home[key]:
                address = self.pool.held(*key).data
                assert address.ctypes.data == self.pool.home[key]
                assert np.array_equal(address, self.truth[key])
        assert {*map(tuple, np.argwhere(self.pool.home))} <= {*self.pool.slots}
        assert len({*self.pool.slots.values()}) + len(self.pool.spare) == self.pool.count

    def restart(self, key):
        self.link.rest()
        self.there.clear()
        self.pool.rested()
        self.check(key)
        assert all(self.pool.home[key] for key in self.pool.slots)


@given(st.integers(0, 1 << 30), st.integers(1, 20), st.integers(1, 6))
def test_bytes_stay_true_in_any_order_of_copies(truth, seed, count, gpu):
    of = Exchange(truth, seed, count, gpu)
    of.pool.hold(experts_of(of.store)[:count])
    does = [of.fetch] * 6 + [of.compute] * 4 + [of.evict] * 4 + [of.check, of.restart]
    keys = of.chance.sample(experts_of(of.store), 12)
    for _ in range(80):
        of.chance.choice(does)(of.chance.choice(keys))
    of.link.rest()
    of.check(None)
    of.pool.close()
    assert of.pool._memory is None and not of.pool.home.any()


@pytest.mark.parametrize("memory, host", [(0.3, "auto"), (0.3, 0.3), (0.6, "auto"), (1.0, "auto")])
def test_opening_reads_each_byte_once_and_pins_what_is_not_on_the_gpu(memory, host, opened):
    with opened(memory, host) as lm:
        session, pool = lm.moelab, lm.moelab.engine.loader.reader
        tiers, everyone = session.tiers, len(experts_of(session.store))
        read = tiers["gpu"] + tiers["pinned"]
        assert pool.bytes_read == read and session.store.raw
        assert (tiers["disk"] > 0) == (host == 0.3)
        if memory == 1.0:
            assert tiers["gpu"] == read and pool._memory is None
        elif host == "auto":
            away = everyone - len(session.residency)
            assert pool.count - away <= max(1, away // 50)
        generate(lm)
        assert session.metrics().misses or memory == 1.0
        assert sum(session.tiers.values()) == sum(tiers.values())
        if memory == 0.6:  # a layer's experts fit, so nobody comes for once only
            assert pool.bytes_read == read, "all else was exchanged over the link"
            assert session.residency.counters.evictions


@pytest.mark.parametrize(
    "cache, scope",
    in_turn([name for name in POLICIES if name != "belady"], ["model", "layer"]),
)
def test_every_policy_opens_with_experts_and_is_replayed(cache, scope, opened, folders):
    reference = open_model(folders[0])
    with opened(0.4, 0.4, cache=cache, scope=scope, prefetch="none") as lm:
        assert len(lm.moelab.run.settings.first) == len(lm.moelab.residency) > 0
        for got, wanted in zip(generate(lm), generate(reference)):
            assert torch.equal(got, wanted)
        assert simulate(lm.moelab.run).counters == lm.moelab.residency.counters


def test_the_popular_begin_on_the_gpu(opened, folders, tmp_path):
    with open_model(folders[0]) as lm:
        counted = calibrate(record(lm, [torch.arange(3, 40).tolist()]))
    with opened(0.4, calibration=counted) as lm:
        first = {*lm.moelab.run.settings.first}
    counts = counted.counts()
    rest = {*experts_of(ExpertStore(folders[1]))} - first
    assert min(counts[key] for key in first) >= max(counts[key] for key in rest)


@pytest.mark.parametrize("seed", range(3))
def test_after_an_error_the_experts_are_what_they_were(seed, opened, folders, monkeypatch):
    reference = generate(open_model(folders[0]))
    with opened(0.3, (0.3, "auto")[seed % 2], seed) as lm:
        link, left = lm.moelab.engine.loader.slots.link, [seed * 5 + 3]
        send = link.send

        def failing(*what):
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("the link is down")
            return send(*what)

        monkeypatch.setattr(link, "send", failing)
        with pytest.raises(RuntimeError, match="the link is down"):
            for _ in range(9):
                generate(lm)
        for got, wanted in zip(generate(lm), reference):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("seed", range(depth(4, 60)))
def test_in_any_setting_each_expert_is_in_one_place(seed, opened, folders, monkeypatch):
    chance, reference = random.Random(seed), open_model(folders[0])
    slots, policies = chance.choice([4, 5, 8, 99]), [name for name in POLICIES if name != "belady"]
    how = {
        "cache": chance.choice(policies),
        "scope": chance.choice(["model", "layer"]),
        "prefetch": chance.choice(["none", "router"]),
        "staging": chance.choice([None, 1, 3]),
    }
    with opened(chance.choice([0.3, 0.5, 0.8]), slots * 8192, seed, **how) as lm:
        for prompt in chance.sample([1, 9, 40], 2):
            given = {"seed": seed, "prompt": prompt, "new": 5}
            for got, wanted in zip(generate(lm, **given), generate(reference, **given)):
                assert torch.equal(got, wanted)
        loader = lm.moelab.engine.loader
        pool, held = loader.pool, {key for key, of in loader.queue.held.items() if "full" in of}
        assert not held & pool.slots.keys()
        assert (
            len({*pool.slots.values(), *pool.spare})
            == pool.count
            == len(pool.slots) + len(pool.spare)
        )


@pytest.mark.parametrize("host", ["auto", 0.3])
def test_ctrl_c_between_layers_and_closing_lose_nothing(host, opened, folders):
    reference = generate(open_model(folders[0]))
    with opened(0.3, host) as lm:
        layers = discover(lm)
        hook = layers[1].experts.register_forward_hook(lambda *_: lm.moelab.cancel() and None)
        with pytest.raises(Cancelled):
            generate(lm)
        hook.remove()
        for got, wanted in zip(generate(lm), reference):
            assert torch.equal(got, wanted)
        pool = lm.moelab.engine.loader.reader
    assert pool._memory is None and not pool.slots


def test_a_forked_process_reads_again_what_was_on_its_way(opened, folders):
    reference = generate(open_model(folders[0]), new=3)
    with opened(0.3) as lm:
        generate(lm, new=3)
        if not (child := os.fork()):
            same = map(torch.equal, generate(lm, new=3), reference)
            os._exit(0 if all(same) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for got, wanted in zip(generate(lm, new=3), reference):
            assert torch.equal(got, wanted)


def test_what_a_host_cannot_be(opened, truth):
    with pytest.raises(ValueError, match="the least that works"):
        opened(0.3, "5kB")
    with pytest.raises(ValueError, match="this machine has"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moelab.offloading.offload.available", lambda: 1)
            opened(0.3, 0.5)


def test_a_system_that_pins_nothing_is_slower_and_as_true(monkeypatch):
    class Refusing:
        def cudaHostRegister(self, *_):
            return 2

    def failing(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", failing)
        with pytest.warns(UserWarning, match="pageable"):
            assert links.pin(np.zeros(9, np.uint8), torch.device("cuda"), Refusing()) is None


def test_a_gpu_that_pinned_memory_has_other_addresses_for_is_told_of(monkeypatch):
    def missing(name):
        raise OSError(f"no {name} here")

    monkeypatch.setattr(links.ctypes, "CDLL", missing)
    with pytest.warns(UserWarning, match="layer by layer"):
        assert not links.shares_addresses.__wrapped__(torch.device("cuda:0"))
