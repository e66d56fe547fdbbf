"""The state machine of loads: slots, transitions and counts against a naive account, in any order
of events."""

import random
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import ExpertKey, State
from moelab.cache.pools import HIERARCHY, Pools
from moelab.cache.residency import Request, Residency
from moelab.offloading.load_queue import HOLDS, KINDS, LoadQueue, Phase, given_order
from moelab.offloading.slots import slot_counts
from moelab.simulation.costs import Delays
from moelab.zipmoe.affinity import naive_order, order

DELAYS = Delays(1, 2, 3, 1, 1, 1)
L, E = 3, 8
BYTES = {"full": 11, "e": 3, "sm": 8}


class Driver:
    """Plays steps on a `LoadQueue` in a random order of events, and keeps its own account of
    everything."""

    def __init__(self, chance, pools, in_flight, ahead, workers, in_place, tensors, shards):
        self.chance, self.pools, self.workers = chance, pools, workers
        self.count = slot_counts(pools, 1, in_flight + ahead)
        self.queue = LoadQueue(
            self.count,
            ahead,
            tensors=lambda key: tensors,
            in_place=in_place,
            shards=lambda load, tensor: shards,
            workers=workers,
        )
        self.residency = Residency(L, E, pools, "lfu")
        self.kinds, self.tensors = ("full",) if in_place else KINDS, tensors
        self.shards = shards
        self.reading, self.working, self.ready = [], [], []
        self.dropped = []  # prefetched loads that nobody wanted, still busy
        self.cooled = []  # warm loads that were evicted, still busy
        self.expected = SimpleNamespace(begun=0, used=0, wasted=0)
        self.read, self.decoded = Counter(), Counter()  # of each load: parts, shares of tensors

    def check(self):
        queue = self.queue
        ahead = self.admitted()
        self.dropped = [load for load in self.dropped if load.busy]
        self.cooled = [load for load in self.cooled if load.busy]
        lost = *ahead, *self.dropped, *self.cooled
        for kind in KINDS:
            taken = [slots[kind] for slots in queue.held.values() if kind in slots]
            taken += [load.slots[kind] for load in lost if kind in load.lacks]
            assert sorted(queue.free[kind] + taken) == list(range(self.count[kind])), (
                "a slot has one owner"
            )
        assert len(ahead) + len(self.dropped) <= queue.ahead
        assert vars(queue.counts) == vars(self.expected)
        for load in ahead:
            done = self.read[load] == len(load.lacks) - (
                "full" in load.lacks and self.kinds != ("full",)
            ) and self.decoded[load] == len(self.tensors) * (self.kinds == KINDS)
            assert (load.phase is Phase.LOADED) == done

    def admitted(self):
        """The prefetched loads that have slots."""
        return [l for l in self.queue.prefetched.values() if l.phase is not Phase.WAITING]

    def account(self, load, wanted):
        """A prefetched load that has slots meets its layer."""
        self.expected.begun += 1
        self.expected.used += wanted
        if not wanted:
            self.expected.wasted += load.nbytes
            self.dropped.append(load)

    def warm(self, keys):
        """What counts as there is loaded beside all that happens."""
        self.queue.warm(self.residency.fill(keys), self.ready.append)
        self.check()

    def event(self):
        """Something begins or ends; False if nothing can."""
        choices = [("end", i) for i in range(len(self.working))]
        if len(self.reading) < 2 and (found := self.queue.next_read()) is not None:
            load, kinds = found
            assert load.phase is Phase.LOADING and all(kind in load.lacks for kind in kinds)
            self.reading.append((*found, load.keep is None))
            assert sum(ahead for *_, ahead in self.reading) < 2
        choices += [("landed", i) for i in range(len(self.reading))]
        while len(self.working) < self.workers and (found := self.queue.next_decode()) is not None:
            self.working.append(found)
            choices.append(("end", len(self.working) - 1))
        if not choices:
            return False
        what, i = self.chance.choice(choices)
        if what == "landed":
            load, kinds, _ = self.reading.pop(i)
            nbytes = sum(BYTES[kind] for kind in kinds)
            self.expected.wasted += nbytes * (load.phase is Phase.DROPPED)
            self.read[load] += len(kinds)
            self.queue.read_done(load, kinds, nbytes)
        else:
            load, tensor, operation = self.working.pop(i)
            part = 1 if tensor.shard is None else Fraction(1, self.shards)
            self.decoded[load] += part * (operation != "decompress")
            self.queue.decode_done(load, tensor, operation)
        self.check()
        return True

    def step(self, layer, experts, guesses, distance):
        step = self.residency.begin(layer, dict.fromkeys(experts, 1))
        late = [of.key for of in step.requests if of.key in self.queue.late]
        assert all(of.state is State.FULL for of in step.requests if of.key in late)
        step.requests = [
            of._replace(state=State.MISSED) if of.key in late else of for of in step.requests
        ]
        asked = [request for request in step.requests if request.state is not State.FULL]
        evicted, keys = step.evicted, {request.key for request in asked}
        for load in self.admitted():
            if load.key.layer == layer or load.key in evicted:
                self.account(load, load.key.layer == layer and load.key in keys)
        self.cooled += filter(None, map(self.queue.late.get, evicted))
        self.ready = []
        how = self.chance.choice([lambda r: order(r, DELAYS, self.workers), naive_order])
        self.queue.begin(layer, asked, evicted, self.ready.append, how)
        self.check()
        if layer + distance < L:
            keys = [ExpertKey(layer + distance, e) for e in guesses]
            state = self.residency.state
            keys = [key for key in keys if state(key) is not State.FULL]
            self.queue.prefetch([Request(key, 1, state(key), State.MISSED) for key in keys])
            self.check()
        self.queue.computed(
            [r for r in step.requests if r.state is State.FULL and r.keep is not State.FULL]
        )
        waiting, computed = {request.key: request for request in asked}, []
        while waiting:
            while self.ready and (self.chance.random() < 0.5 or not self.event()):
                request = waiting.pop(self.ready.pop(0))
                computed.append(request.key)
                if request.keep is not State.FULL:
                    self.queue.computed([request])
                self.check()
            assert not waiting or self.ready or self.event(), (
                "no deadlock: every demanded load ends"
            )
        assert len(computed) == len(asked)
        there = ((key, state) for state in HIERARCHY for key in self.residency.resident(state))
        held = {key: HOLDS[state] for key, state in there if key not in self.queue.late}
        there = ((k, slots) for k, slots in self.queue.held.items() if k not in self.queue.late)
        assert {key: set(slots) for key, slots in there} == {
            key: {kind for kind in kinds if self.kinds == KINDS or kind == "full"}
            for key, kinds in held.items()
        }

    def end(self):
        for load in self.admitted():
            self.account(load, False)
        self.queue.drop_prefetched()
        self.check()


@given(
    st.integers(0, 1 << 40).map(random.Random),
    st.sampled_from([Pools(F=5), Pools(2, 2, 1, 2), Pools(0, 0, 4, 2), Pools(C=6), Pools()]),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([("",), ("up", "down")]),
    st.integers(0, 3),
    st.integers(1, 2),
    st.booleans(),
)
def test_any_order_of_events(
    chance, pools, in_flight, ahead, workers, in_place, tensors, shards, distance, warm
):
    in_place &= pools == Pools(F=pools.F)
    driver = Driver(chance, pools, in_flight, ahead, workers, in_place, tensors, shards)
    if warm:
        driver.warm(chance.sample([ExpertKey(i, e) for i in range(L) for e in range(E)], L * E))
    for _ in range(6):
        for layer in range(L):
            driver.step(
                layer,
                chance.sample(range(E), chance.randint(0, E)),
                chance.sample(range(E), 4),
                distance,
            )
        driver.end()
    while driver.event():
        pass
    assert not driver.queue.late
    assert not driver.queue.demanded and all(
        len(driver.queue.free[kind]) + sum(kind in slots for slots in driver.queue.held.values())
        == driver.count[kind]
        for kind in KINDS
    )


def requests(*experts, layer=0, state=State.MISSED, keep=State.MISSED):
    return [Request(ExpertKey(layer, expert), 1, state, keep) for expert in experts]


def demand(queue, asked, layer=0):
    ready = []
    queue.begin(layer, asked, [], ready.append, given_order)
    return ready


def finish(queue, error=None):
    """Everything that can be done, one after another; a read may fail."""
    while (found := queue.next_read()) is not None:
        queue.read_done(*found, 1, error)
    while (found := queue.next_decode()) is not None:
        queue.decode_done(*found)


def simple(slots, ahead):
    """Experts that are decoded as one, by one worker."""
    return LoadQueue(
        dict.fromkeys(KINDS, slots), ahead, lambda key: ("",), lambda load, tensor: 1, 1
    )


@pytest.mark.parametrize("wanted", [True, False])
def test_a_prefetch_that_fails_is_begun_anew_by_who_wants_the_expert(wanted):
    queue = simple(4, ahead=2)
    demand(queue, [])
    queue.prefetch(requests(5, layer=1))
    finish(queue, OSError("the disk"))
    expert = 5 if wanted else 6
    ready = demand(queue, requests(expert, layer=1), layer=1)
    finish(queue)
    assert ready == [(1, expert)] and (queue.counts.begun, queue.counts.used) == (1, 0)


@pytest.mark.parametrize("loaded", [True, False])
def test_what_is_prefetched_gives_way_to_a_demand_that_nothing_else_would_serve(loaded):
    """Two slots: one is prefetched for a layer after the next, the other is taken by an expert that
    stays."""
    queue = simple(2, ahead=1)
    demand(queue, [])
    queue.prefetch(requests(5, layer=2))
    if loaded:
        finish(queue)
    else:
        load, kinds = queue.next_read()
    ready = demand(queue, [*requests(0, layer=1, keep=State.FULL), *requests(1, layer=1)], layer=1)
    finish(queue)
    if not loaded:
        assert load.phase is Phase.DROPPED and ready == [(1, 0)]  # the disk is still at it
        queue.read_done(load, kinds, 1)
    finish(queue)
    assert ready == [(1, 0), (1, 1)] and (queue.counts.begun, queue.counts.used) == (1, 0)


def test_what_counts_as_there_comes_behind_demands_and_its_error_ends_a_step():
    queue = simple(9, ahead=0)
    errors = []
    queue.warm([ExpertKey(1, e) for e in range(6)], errors.append)
    first, _ = queue.next_read()
    ready = demand(queue, requests(0, 1))
    assert [queue.next_read()[0].key for _ in range(2)] == [(0, 0), (0, 1)]
    assert first.key == (1, 0) and len(queue.late) == 6
    demanded = demand(queue, requests(5, layer=1, keep=State.FULL), layer=1)
    assert (1, 5) not in queue.late
    error = OSError("the disk")
    queue.read_done(first, ("e", "sm"), 0, error)
    finish(queue)
    assert not ready and demanded == [error, (1, 5)]


def test_errors():
    queue = simple(1, ahead=0)
    with pytest.raises(ValueError, match="the requests leave"):
        queue.begin(0, requests(1), [], print, lambda _: given_order(requests(2)))
