"""Plans beside single states on a slow disk, cold and warm: against loops, and that it runs."""

import numpy as np
import pytest
import torch

from moelab.cache.pools import Pools
from moelab.checkpoint.export import export
from notebooks.studies import plans


@pytest.fixture(scope="module")
def bench():
    torch.set_num_threads(1)
    return plans.Bench("", "", None, 8, 4, 1, 0.4, 1, 0.1, 0)


def test_what_runs_is_what_is_simulated(bench):
    states = bench.states
    assert states["C"]["bytes"] == states["E"]["bytes"] + states["S"]["bytes"]
    assert states["C"]["saved"] * states["C"]["bytes"] == pytest.approx(states["M"]["read"])
    assert bench.f.sum() == pytest.approx(bench.K) and bench.selection_error() < 1e-8
    pools, sizes = bench.plan(0.4).pools, bench.sizes
    assert pools.nbytes(sizes.full, sizes.sm, sizes.e) <= bench.room(0.4)
    assert bench.identical(pools) and bench.pace(pools).shape == (6,)  # else RuntimeError
    with pytest.raises(RuntimeError, match="hits and evictions"):
        bench.check(bench.measured[pools, plans.POLICY], bench.play(Pools(F=1)))
    found = plans.curves(bench, {0.4: bench.plan(0.4)}, 2, ("lru",))
    at = dict((nbytes, hit) for nbytes, _, hit in found.points["lru"])
    assert at[found.cliff] == 0 < at[max(at)]
    assert all(hit <= best for (_, _, hit), (_, _, best) in zip(found.points["lru"], found.ceiling))
    assert max(found.hit_rates.values()) == found.hit_rates["belady"]


@pytest.mark.filterwarnings("ignore:llama.cpp takes token ids only")
def test_a_gguf_file_is_planned_in_two_states(tmp_path):
    file = export(None, tmp_path / "m.gguf", "Q4_0")
    bench = plans.Bench(str(file), "", None, 8, 4, 1, 0.4, 1, 0.1, 0)
    states = bench.states
    assert [*states] == ["M", "F", "C"] and 0 < states["C"]["bytes"] < states["F"]["bytes"] / 2
    pools = bench.plan(0.4).pools
    assert bench.identical(pools) and pools.S == pools.E == 0
    assert bench.pace(pools).shape == (6,)  # else RuntimeError: engine and simulator differ
    found = plans.stationary(bench, 0.4, before=8, tokens=3)
    assert {"plan", "auto"} < set(found.took) <= {"plan", "auto", "F", "C"}


def test_the_best_single_state_is_that_of_the_measurement():
    took = {"plan": (2, 4, 3), "auto": (1, 2, 3), "F": (9, 9, 9), "C": (2, 2, 3), "S": (4, 4, 4)}
    took = {name: np.array(of, float) for name, of in took.items()}
    made = plans.Warm(dict.fromkeys(took, plans.Arm(Pools(F=1))), took, dict.fromkeys(took, 2.0))
    assert made.best == "C"
    rows = made.rows()
    assert rows["C"]["best single state ÷ it"] == rows["C"]["95 % from"] == rows["C"]["to"] == 1
    assert rows["auto"]["best single state ÷ it"] == pytest.approx(7 / 6)
    assert rows["plan"]["95 % from"] < 7 / 9 < rows["plan"]["to"] and rows["plan"]["TPOT ms"] == 3e3
    assert made.ablation()["the plan"]["without ÷ with"] == pytest.approx(7 / 9)
    assert set(made.ablation()) == {"the plan", "compression"}


@pytest.mark.parametrize("ablation", [False, True])
def test_equal_pools_run_once_and_decide_as_the_simulator(bench, ablation):
    found = plans.stationary(bench, 0.4, before=8, tokens=3, ablation=ablation)
    assert set(found.took) == set(found.simulated) and set(found.ablation()) == (
        set(plans.ABLATION) if ablation else set(found.ablation())
    )
    assert ablation or {"plan", "auto"} < set(found.took) <= {"plan", "auto", *plans.STATES}
    for name, arm in found.arms.items():
        assert len(found.took[name]) == 4 and (found.took[name] > 0).all()
        twin = next(other for other, of in found.arms.items() if of == arm)
        assert (found.took[name] == found.took[twin]).all()
