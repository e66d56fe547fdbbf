"""Whether a guess is worth a read, against what it gains on average, and that a predictor is asked as it deserves."""

import random
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.models import discover, plug
from moelab.offloading.offload import offload
from moelab.offloading.prefetch_gate import CONTROL, MEMORY, Mean, PrefetchGate
from moelab.schedule.load_queue import PIECE, Reads
from tests.offloading.test_offload import DELAYS

E = 16


def gain_of_fetching(precision, idle, read, piece, demands, chance, rounds=20_000):
    """Mean seconds that experts read one after another gain when the layer comes after a memoryless time, each right
    with its probability: for right ones the time that is hidden, for a wrong one under way the rest of its piece."""
    total = 0.0
    for _ in range(rounds):
        comes, now = chance.expovariate(1 / idle), 0.0
        for p in precision:
            if now >= comes:
                break
            hidden = min(read, comes - now)
            if chance.random() < p:
                total += hidden
            elif hidden < read and chance.random() < demands:
                total -= piece - hidden % piece
            now += read
    return total / rounds


class Run:
    """A layer whose disk rests for about `idle` before it, with a predictor that takes `asking` seconds."""

    def __init__(self, idle=2e-3, read=1e-3, asking=1e-5, nbytes=PIECE, slow=0.0, seed=0):
        self.gate, self.idle, self.read, self.asking, self.nbytes = PrefetchGate(), idle, read, asking, nbytes
        self.slow, self.chance, self.reads, self.followed = slow, random.Random(seed), Reads(), False
        self.residency = Residency(2, E, Pools())

    def token(self, precision, phase="decode"):
        """One token, whose prediction has as many ranks: (whether the predictor was asked, ranks prefetched)."""
        gate, n = self.gate, len(precision)
        gate.begin(phase)
        wanted = self.chance.sample(range(E), n)
        others = [expert for expert in range(E) if expert not in wanted]
        guess = [wanted[i] if self.chance.random() < p else others[i] for i, p in enumerate(precision)]
        found = []
        if asked := gate.wants(1):
            gate.asked(1, self.asking)
            found = gate.requests(self.residency, 1, guess, self.reads)
        self.reads = Reads(*(a + b * n for a, b in zip(self.reads, (1, self.read, self.nbytes))))
        gate.rested(1, self.idle + self.slow * bool(found))
        gate.came(self.residency.begin(1, dict.fromkeys(wanted, 1)))
        return asked, {guess.index(request.key.expert) for request in found}


@settings(deadline=None, max_examples=15)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.5, 4), st.integers(1, 8), st.floats(0, 1))
def test_worth_is_the_gain_on_average(precision, read, pieces, demands):
    gate, idle = PrefetchGate(), 4.0
    gate.requests(Residency(2, E, Pools()), 1, (), Reads(1, read, pieces * PIECE))
    of = gate.now.layers[1]
    of.idle, of.demands = Mean(idle, 1), Mean(demands, 1)
    for rank, p in enumerate(precision):
        of.precision[rank] = Mean(p, 1)
    total = sum(gate.worth(of, rank, rank) for rank in range(len(precision)))
    assert total == pytest.approx(gain_of_fetching(precision, idle, read, read / pieces, demands, random.Random(0)),
                                  abs=0.15 + 0.25 * (read / pieces) ** 2 / idle)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=60))
def test_a_mean_is_plain_at_first_and_forgets_later(values):
    mean, by_hand = Mean(), []
    for value in values:
        mean.add(value)
        by_hand.append(value)
        if len(by_hand) <= MEMORY:
            plain = fmean(by_hand)
        else:
            plain += (value - plain) / MEMORY
    assert mean.value == pytest.approx(plain)


def test_what_was_disturbed_counts_little():
    mean = Mean()
    for seconds in (1, 1, 1, 100):
        mean.took(seconds)
    assert mean.value == 1.5


@pytest.mark.parametrize("seed", range(5))
def test_a_useless_predictor_is_asked_ever_more_rarely(seed):
    run = Run(seed=seed)
    asked, fetched = [], []
    for _ in range(2000):
        one, ranks = run.token([0.05] * 4)
        asked.append(one)
        fetched.append(len(ranks))
    early, middle, late = (sum(asked[a:b]) for a, b in ((0, 100), (100, 1000), (1000, 2000)))
    assert early > 12 and middle / 9 < early and late / 10 < middle / 9 and late < 60
    assert sum(fetched[1000:]) < 20


@pytest.mark.parametrize("seed", range(5))
def test_of_a_perfect_predictor_all_ranks_pass(seed):
    run = Run(seed=seed)
    for _ in range(40):
        run.token([1.0] * 8)
    found = [run.token([1.0] * 8) for _ in range(10 * CONTROL)]
    assert all(asked for asked, _ in found)
    assert sum(ranks == set(range(8)) for _, ranks in found) == 10 * (CONTROL - 1)


@pytest.mark.parametrize("seed", range(5))
def test_only_ranks_that_are_good_enough_pass(seed):
    """A read of one piece, half as long again as the disk rests: with demands sure, p·2 > (1 − p)·3/2, so p > 0.43."""
    run, precision = Run(idle=2e-3, read=3e-3, seed=seed), [0.95, 0.9, 0.05, 0.02, 0.8]
    for _ in range(60):
        run.token(precision)
    found = [ranks for _, ranks in (run.token(precision) for _ in range(300)) if ranks]
    often = [sum(rank in ranks for ranks in found) / len(found) for rank in range(5)]
    assert min(often[0], often[1], often[4]) > 0.95 and max(often[2:4]) < 0.05


def test_a_predictor_that_takes_longer_than_it_gains_is_not_asked():
    slow, fast = Run(asking=5e-3), Run(asking=5e-4)
    for _ in range(300):
        slow.token([1.0] * 4), fast.token([1.0] * 4)
    assert sum(slow.token([1.0] * 4)[0] for _ in range(300)) < 30
    assert all(fast.token([1.0] * 4)[0] for _ in range(300))


def test_a_predictor_that_has_learnt_comes_back():
    run = Run()
    for _ in range(1000):
        run.token([0.0] * 4)
    for _ in range(600):
        run.token([0.95] * 4)
    assert sum(len(run.token([0.95] * 4)[1]) for _ in range(100)) > 300


def test_prefetches_that_slow_computing_down_are_given_up():
    """Of rests of 2 ms, 0.8 are hidden at a precision of 0.4; beside reads, they take 1.9 ms longer."""
    free, contended = Run(), Run(slow=1.9e-3)
    for run in (free, contended):
        for _ in range(1000):
            run.token([0.4] * 2)
    assert sum(len(free.token([0.4] * 2)[1]) for _ in range(200)) > 300
    assert sum(len(contended.token([0.4] * 2)[1]) for _ in range(200)) < 60


def test_reads_that_nobody_waits_for_are_not_prefetched():
    """Computing what is resident hides a demanded read, so there is nothing to gain, but wrong ones still delay."""
    run = Run()
    for waited, many in ((0.0, False), (1e-3, True)):
        for _ in range(200):
            run.token([0.6] * 3)
            run.gate.waited(2, 2 * waited)
        assert (sum(len(run.token([0.6] * 3)[1]) for _ in range(100)) > 200) == many


def test_a_deep_model_learns_from_all_its_layers():
    """With 48 layers, each seen a few times, useless predictions are given up by all of them."""
    gate, residency, reads, chance, found = PrefetchGate(), Residency(48, E, Pools()), Reads(), random.Random(0), []
    for token in range(6):
        for layer in range(48):
            wanted = chance.sample(range(E), 4)
            others = [expert for expert in range(E) if expert not in wanted]
            if gate.wants(layer):
                gate.asked(layer, 1e-5)
                found.append((token, len(gate.requests(residency, layer, others[:4], reads))))
            reads = Reads(reads.count + 4, reads.seconds + 4e-3, reads.nbytes + 4 * PIECE)
            gate.rested(layer, 2e-3)
            gate.came(residency.begin(layer, dict.fromkeys(wanted, 1)))
    assert sum(n for token, n in found if token == 0) > 100
    assert sum(n for token, n in found if token > 1) < 20


def test_prefill_and_decode_are_apart():
    run = Run()
    for _ in range(100):
        run.token([0.0] * 2, "decode"), run.token([1.0] * 2, "prefill")
    assert not any(run.token([0.0] * 2, "decode")[1] for _ in range(10))
    assert all(run.token([1.0] * 2, "prefill")[0] for _ in range(10))
    assert run.gate._phases["prefill"].layers[1].precision[0].value > 0.9
    assert run.gate._phases["decode"].layers[1].precision[0].value < 0.2


def test_an_engine_stops_fetching_for_a_guesser_that_is_always_wrong(qwen):
    _, store = qwen
    offloaded = offload(store, "10MB", plan=Pools(), ahead=4, delays=DELAYS, bandwidth=2e6)
    engine = offloaded.moelab.engine
    inner, begin = type(engine).__call__, engine.residency.begin
    rested = engine.gate.rested                             # on a busy machine all is idle
    engine.gate.rested = lambda layer, seconds: rested(layer, 1e-4)
    chosen = {}
    engine.residency.begin = lambda layer, tokens: (chosen.__setitem__(layer, set(tokens)), begin(layer, tokens))[1]
    assert len(discover(offloaded)) == 2
    right = False

    def announcing(x, ids, weights, experts):
        if experts.layer == 0 and 1 in chosen:
            others = chosen[1] if right else set(range(8)) - chosen[1]
            engine.prefetch(1, torch.tensor([sorted(others)]))
        return inner(engine, x, ids, weights, experts)
    plug(offloaded, executor=announcing)

    def begun(passes):
        offloaded.moelab.reset()
        for _ in range(passes):
            offloaded(torch.tensor([[5]]))                      # the same token: layer 1 wants the same as before
        return offloaded.moelab.metrics().prefetched["begun"]
    with torch.inference_mode():
        begun(30)
        assert begun(5) == 0                                    # it has learnt not to listen
        right = True
        begun(100)
        assert begun(5) > 0                                     # and that it may again
    offloaded.moelab.close()
