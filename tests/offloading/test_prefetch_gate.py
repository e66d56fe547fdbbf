"""Whether a guess is worth a read, and that tokens with prefetching are never much slower than
those without."""

import random
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.intervals import MEMORY, Mean
from moelab.models import discover, plug
from moelab.offloading.load_queue import PIECE, Reads
from moelab.offloading.offload import offload
from moelab.offloading.prefetch_gate import COST, FEW, RISK, PrefetchGate, gained
from tests.offloading.test_offload import DELAYS

E = 16


def gain_of_fetching(p, idle, piece, demands, chance, rounds=20_000):
    """Mean seconds that a read under way gains when the layer comes after a memoryless time: one of
    a right expert the time since it began, one of a wrong expert the rest of its piece, less than
    nothing."""
    total = 0.0
    for _ in range(rounds):
        if chance.random() < p:
            total += chance.expovariate(1 / idle)
        elif chance.random() < demands:
            total -= chance.random() * piece
    return total / rounds


class Run:
    """Tokens of `layers` layers, each of which loads the experts that it wants, or some of them.
    One takes 50 ms and 1 ms more for each load, disturbed by `noise` (a share) and now and then by
    much; the gate's part is `asking` for each prediction and `each` for each prefetch, seconds."""

    def __init__(self, each=0.0, asking=0.0, noise=0.0, layers=4, idle=2e-3, seed=0):
        self.gate, self.each, self.asking, self.noise, self.idle = (
            PrefetchGate(),
            each,
            asking,
            noise,
            idle,
        )
        self.chance, self.reads, self.layers = random.Random(seed), Reads(), layers
        self.residency = Residency(layers, E, Pools())

    def token(self, precision, phase="decode", predicts=True):
        """(seconds, what they would have been without prefetching, layers asked for, [(layer, rank)
        prefetched])."""
        gate, n, asked, found = self.gate, len(precision), 0, []
        gate.begin(phase)
        without = 50e-3
        for layer in range(self.layers):
            wanted = self.chance.sample(range(E), n + self.chance.randint(0, 3))
            others = [expert for expert in range(E) if expert not in wanted]
            guess = [
                wanted[i] if self.chance.random() < p else others[i]
                for i, p in enumerate(precision)
            ]
            if predicts and gate.wants(layer):
                asked += 1
                found += [
                    (layer, guess.index(request.key.expert))
                    for request in gate.requests(self.residency, layer, guess, self.reads)
                ]
            self.reads = Reads(*(a + b * n for a, b in zip(self.reads, (1, 1e-3, PIECE))))
            gate.rested(layer, self.idle)
            gate.came(self.residency.begin(layer, dict.fromkeys(wanted, 1)))
            without += 1e-3 * len(wanted)
        without *= self.chance.gauss(1.0, self.noise) * (
            3 if self.noise and self.chance.random() < 0.03 else 1
        )
        seconds = without + self.each * len(found) + self.asking * asked
        gate.ended(seconds)
        return seconds, without, asked, found

    def share(self, tokens, precision):
        """Time with the gate over time without prefetching."""
        taken, without, *_ = zip(*(self.token(precision) for _ in range(tokens)))
        return sum(taken) / sum(without)

    def fetched(self, tokens, precision):
        """Prefetched experts a token."""
        return fmean(len(self.token(precision)[3]) for _ in range(tokens))


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 1), st.floats(0.1, 4), st.floats(0.1, 4), st.integers(1, 3), st.floats(0, 1))
def test_an_expert_pays_if_it_gains_on_average(p, idle, piece, pieces, demands):
    gate = PrefetchGate()
    gate.requests(Residency(2, E, Pools()), 1, (), Reads(1, pieces * piece, pieces * PIECE))
    of = gate.now.layers[1]
    of.idle, of.demands, of.precision[0] = Mean(idle, 1), Mean(demands, 1), Mean(p, 1)
    gain = gain_of_fetching(p, idle, piece, demands, random.Random(0))
    assert gate.pays(of, 0) == (gain > 0) or abs(gain) < 0.05 * max(idle, piece)


@pytest.mark.parametrize("p, demands, least", [(0.5, 1.0, 0.5), (0.2, 1.0, 2.0), (0.5, 0.4, 0.2)])
def test_an_expert_pays_from_the_bound_of_the_formula_on(p, demands, least):
    """Eq. (1) of §5.1 with pieces of one second: p · a > (1 − p) · q / 2."""
    gate = PrefetchGate()
    gate.requests(Residency(2, E, Pools()), 1, (), Reads(1, 1.0, PIECE))
    of = gate.now.layers[1]
    of.demands, of.precision[0] = Mean(demands, 1), Mean(p, 1)
    for idle, pays in ((0.95 * least, False), (1.05 * least, True)):
        of.idle = Mean(idle, 1)
        assert gate.pays(of, 0) == pays


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


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=16),
    st.integers(0, 20),
    st.floats(1, 9),
    st.floats(0, 1),
    st.floats(0.5, 2),
)
def test_what_a_token_gains_does_not_depend_on_what_it_loads(before, loads, base, each, factor):
    """Tokens of exactly base + each · loads, and one that takes `factor` times that."""
    if len({*before}) == 1:  # of tokens all alike nothing can be told
        loads = before[0]
    found = gained([(n, base + each * n) for n in before], loads, factor * (base + each * loads))
    assert found == pytest.approx(1 - factor, abs=1e-9)


def test_a_disturbed_token_moves_no_comparison():
    tokens = [(n, 1.0 + 0.1 * n) for n in range(8)]
    assert gained([*tokens[:-1], (7, 100.0)], 3, 1.3) == pytest.approx(0, abs=0.12)


@pytest.mark.parametrize("each, counted", [(1.0, -2 * RISK), (-4e-3, 2 * RISK), (0.0, 0.0)])
def test_one_trial_counts_for_no_more_than_twice_the_risk(each, counted):
    """A token that takes a hundred times as long, or half, may have been disturbed."""
    run = Run(each=each)
    while not run.token([1.0] * 3)[3]:
        assert run.gate.gain == -RISK
    assert run.gate.gain == pytest.approx((counted - RISK) / 2)


@settings(deadline=None, max_examples=15)
@given(st.floats(0, 1e-3), st.integers(0, 99))
def test_no_generation_however_short_takes_a_hundredth_longer_than_on_demand(each, seed):
    """Prefetching would cost up to a sixth of a token with all ranks of four layers."""
    run, taken, without = Run(each=each, seed=seed), 0.0, 0.0
    for n in range(1, 201):
        seconds, alone, *_ = run.token([1.0] * 3)
        taken, without = taken + seconds, without + alone
        assert taken <= 1.01 * without and (n > RISK / COST or taken == without)


@settings(deadline=None, max_examples=15)
@given(st.floats(-2e-3, 1e-3), st.sampled_from([0.0, 0.02, 0.05]), st.integers(0, 99))
def test_of_the_better_of_both_ways_hardly_anything_is_lost(each, noise, seed):
    """Against brute force: the same tokens all with prefetching, and all without."""

    def total(gate):
        run = Run(each=each, noise=noise, seed=seed)
        run.gate = gate or run.gate
        taken, without, *_ = zip(*(run.token([1.0] * 3) for _ in range(300)))
        return sum(taken), sum(without)

    (found, without), (within, _) = total(None), total(PrefetchGate(trials=False))
    best = min(without, within)
    # what the first tokens could have gained, what trials cost, and what noise hides
    begun = (without - best) * 4 * RISK / COST / 300
    assert found <= best + begun + (2 * COST + noise / 4) * without


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("each", [1e-3, 0.4e-3, 0.1e-3])
def test_prefetching_that_costs_is_given_up(each, noise):
    """It would cost 15, 6 and 1.5 % of a token with all ranks of four layers."""
    found = [Run(each=each, noise=noise, seed=seed).share(600, [0.9] * 3) for seed in range(4)]
    assert fmean(found) < 1.01 and max(found) < 1.015


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("each", [-0.2e-3, -1e-3, -2e-3])
def test_of_a_gain_hardly_anything_is_lost(each, noise):
    for seed in range(3):
        run = Run(each=each, noise=noise, seed=seed)
        run.share(60, [1.0] * 3)
        most = 1 + 4 * 3 * each / (50e-3 + 4 * 4.5e-3)
        assert run.share(300, [1.0] * 3) < most + 2.5 * COST + 0.3 * (1 - most)


def test_a_predictor_that_takes_longer_than_it_gains_is_hardly_asked():
    """It takes 3 % of a token, and what it gains a third of that."""
    run = Run(asking=0.5e-3, each=-0.05e-3, noise=0.01)
    run.share(100, [1.0] * 3)
    assert (
        fmean(run.token([1.0] * 3)[2] for _ in range(400)) < 4 * 0.4
        and run.share(400, [1.0] * 3) < 1.01
    )


def test_layers_without_a_rank_that_pays_are_hardly_asked_for():
    run = Run(each=-1e-3, idle=1e-4)
    run.gate = PrefetchGate(trials=False)
    for _ in range(200):
        run.token([0.0] * 3)
    fresh = run.gate.now.layers[3] = type(run.gate.now.layers[3])(run.gate.now.precision)
    run.gate.begin("decode")
    run.gate._since = 1
    assert [run.gate.wants(layer) for layer in range(4)] == [
        False,
        False,
        False,
        True,
    ] and not fresh.precision
    run.gate._since = 0
    assert all(run.gate.wants(layer) for layer in range(4))


def test_where_the_disk_never_rests_nothing_is_tried():
    run = Run(each=-1e-3, idle=0.0)
    assert not any(run.token([1.0] * 3)[2] for _ in range(300))


@pytest.mark.parametrize("before, after, most", [(2e-3, -2e-3, False), (-2e-3, 2e-3, True)])
def test_when_the_machine_changes_so_does_the_choice(before, after, most):
    run = Run(each=before, noise=0.01)
    assert (run.fetched(200, [1.0] * 3) > 6) == most
    run.each = after
    run.share(900, [1.0] * 3)
    assert (run.fetched(200, [1.0] * 3) > 6) != most


@pytest.mark.parametrize("seed", range(3))
def test_only_ranks_that_are_good_enough_pass(seed):
    """A piece takes 1 ms, and the disk rests for half of one: with demands sure, p > (1 − p), so p
    > 0.5."""
    run, precision = Run(each=-1e-3, idle=0.5e-3, seed=seed), [0.95, 0.9, 0.05, 0.02, 0.8]
    run.share(60, precision)
    found = [one[3] for one in (run.token(precision) for _ in range(200)) if one[3]]
    often = [
        sum((layer, rank) in one for one in found for layer in range(4)) / len(found) / 4
        for rank in range(5)
    ]
    assert min(often[0], often[1], often[4]) > 0.9 and max(often[2:4]) < 0.1


def test_a_predictor_that_has_learnt_comes_back():
    run = Run(each=-1e-3, idle=0.5e-3)
    run.share(300, [0.0] * 4)
    assert run.fetched(100, [0.0] * 4) < 1
    run.share(300, [0.95] * 4)
    assert run.fetched(100, [0.95] * 4) > 8


def test_tokens_that_nobody_predicts_for_do_not_count():
    run, n = Run(), 0
    while not run.token([1.0])[2]:
        n += 1
        for _ in range(3):
            run.token([1.0], predicts=False), run.token([1.0], phase="prefill")
    assert n == RISK / COST


def test_what_is_announced_behind_the_last_layer_belongs_to_the_next_token():
    gate, residency, opens = PrefetchGate(trials=True), Residency(2, E, Pools()), []
    for _ in range(100):
        gate.begin("decode")
        opens.append(gate.wants(1))
        assert opens[-1] == gate.opens
        gate.rested(0, 1.0)
        for layer in range(2):
            gate.came(residency.begin(layer, {0: 1}))
        then = gate.wants(0)
        assert bool(gate.requests(residency, 0, [3], Reads())) == then
        gate.ended(1.0)
        gate.begin("decode")
        assert gate.wants(0) == then
    assert FEW < sum(opens) < 20


def test_a_deep_model_learns_from_all_its_layers():
    """With 48 layers, each seen a few times, useless predictions are given up by all of them."""
    run = Run(layers=48, idle=0.5e-3)
    run.gate = PrefetchGate(trials=False)
    found = [run.token([0.0] * 4)[3] for _ in range(12)]
    assert len(found[0]) > 50 and not any(found[1:])


def test_prefill_and_decode_are_apart():
    run = Run(idle=0.5e-3)
    run.gate = PrefetchGate(trials=False)
    for _ in range(100):
        run.token([0.0] * 2, "decode"), run.token([1.0] * 2, "prefill")
    assert not any(run.token([0.0] * 2, "decode")[3] for _ in range(10))
    assert all(len(run.token([1.0] * 2, "prefill")[3]) == 8 for _ in range(10))


def test_an_engine_stops_fetching_for_a_guesser_that_is_always_wrong(qwen):
    _, store = qwen
    offloaded = offload(store, "10MB", plan=Pools(), ahead=4, delays=DELAYS, bandwidth=2e6)
    engine = offloaded.moelab.engine
    inner, begin = type(engine).__call__, engine.residency.begin
    engine.gate = PrefetchGate(trials=False)  # whatever this machine's tokens take
    rested = engine.gate.rested  # on a busy machine all is idle
    engine.gate.rested = lambda layer, seconds: rested(layer, 1e-4)
    chosen = {}
    engine.residency.begin = lambda layer, tokens: (
        chosen.__setitem__(layer, set(tokens)),
        begin(layer, tokens),
    )[1]
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
            offloaded(torch.tensor([[5]]))  # the same token: layer 1 wants the same as before
        return offloaded.moelab.metrics().prefetched["begun"]

    with torch.inference_mode():
        begun(30)
        assert begun(5) == 0  # it has learnt not to listen
        right = True
        begun(100)
        assert begun(5) > 0  # and that it may again
    offloaded.moelab.close()
