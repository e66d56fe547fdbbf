"""Plans, policies and runs of one model on a slow disk, and the same on a board: against loops, and
that it runs."""

import pytest
import torch

from moelab.bench import cache_planning as planning
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
