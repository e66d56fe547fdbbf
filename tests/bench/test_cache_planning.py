"""Plans, policies and runs of one model on a slow disk, and the same on a board: against loops, and
that it runs."""

import numpy as np
import pytest
import torch

from moelab.bench import cache_planning as planning
from moelab.bench import orin
from moelab.cache.pools import Pools


@pytest.fixture(scope="module")
def bench():
    torch.set_num_threads(1)
    return planning.Bench("", "", None, 8, 4, 1, 0.4, workers=1, rounds=1, seconds=0.1, seed=0)


def test_a_state_saves_what_it_holds(bench):
    states = {s["state"]: s for s in bench.states}
    assert states["C"]["bytes"] == states["E"]["bytes"] + states["S"]["bytes"]
    assert states["C"]["saved"] * states["C"]["bytes"] == pytest.approx(states["M"]["read"])
    assert bench.f.sum() == pytest.approx(bench.K) and bench.selection()[1] < 1e-8


def test_what_runs_is_what_is_simulated(bench):
    found = planning.planned(bench, [0.4])[0.4]
    assert set(found.took) == {"plan", found.best} and sum(
        found.bytes(bench).values()
    ) <= bench.room(0.4)
    assert bench.identical(found.pools["plan"])
    for name in found.took:
        how = found.pools[name], "zipmoe"
        bench.check(how, bench.play(*how))
        assert bench.pace(*how).shape == (2, 4)
    wrong = bench.play(Pools(F=1), "zipmoe")
    with pytest.raises(RuntimeError, match="hits and evictions"):
        bench.check((found.pools["plan"], "zipmoe"), wrong)


def test_policies_by_memory(bench):
    curves = planning.Curves.of(bench, {}, 3)
    rates = curves.hit_rates()
    assert max(rates, key=rates.get) == "belady" and "lru" in rates
    # the uniform bound by a loop: so many of all are held
    assert curves.bounds()["uniform"] == pytest.approx(
        (bench.L * bench.E // 2) / (bench.L * bench.E)
    )
    (size, seconds, _), *_ = curves.points["lru"]
    assert curves.tpot_at("lru", size) == pytest.approx(seconds)


def test_seconds_until_the_nth_token():
    pace = np.array([[1.0, 2, 3, 4], [2, 2, 2, 2]])
    assert [(n, mean) for n, mean, *_ in planning.until(pace)] == [
        (1, 1.5),
        (2, 3.5),
        (3, 6),
        (4, 9),
    ]


def test_the_board(bench):
    board = orin.Board(2, 1.2)
    assert board.step("MMMM") > board.step("FFFF") and len(board.orders("FM")) == 2
    for row in board.exact("MS"):
        assert (
            max(row["reading"], row["decoding"], row["computing"])
            <= row["optimum"]
            <= row["Algorithm 1"]
        )
    gains, seconds = board.gains(3, seed=0)
    assert set(gains) == {1, 2, 3} and seconds > 0
    there = board.large_model(bench.f, (4,), 1, seed=0)
    assert all(tpot > there.nothing_read for of in there.curves().values() for _, tpot, _ in of)
    assert board.same_model(bench, {"a": (Pools(F=20), "lru")})["a"] > 0
