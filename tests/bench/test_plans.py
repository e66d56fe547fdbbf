"""Plans beside single states, warm: what is compared, against loops, and that all of it runs."""

import numpy as np
import pytest
import torch

from moelab.bench import plans
from moelab.bench.cache_planning import Bench
from moelab.cache.pools import Pools

MADE = plans.Warm(
    dict.fromkeys(("plan", "auto", *"FCSE"), plans.Arm(Pools(F=1))),
    {
        "plan": np.array([2.0, 4, 3]),
        "auto": np.array([1.0, 2, 3]),
        "F": np.array([9.0, 9, 9]),
        "C": np.array([2.0, 2, 3]),
        "S": np.array([4.0, 4, 4]),
        "E": np.array([9.0, 9, 9]),
    },
    {"plan": 2.0, "auto": 2.5, "F": 5.0, "C": 3.0, "S": 4.0, "E": 9.0},
    {},
)


def test_the_best_single_state_is_that_of_the_measurement():
    assert MADE.best == "C"
    rows = MADE.rows()
    assert rows["C"]["best single state ÷ it"] == rows["C"]["95 % from"] == rows["C"]["to"] == 1
    assert rows["plan"]["best single state ÷ it"] == pytest.approx(7 / 9)
    assert (
        rows["auto"]["best single state ÷ it"] == pytest.approx(7 / 6)
        and rows["auto"]["TPOT ms"] == 2000
    )
    assert rows["plan"]["95 % from"] < 7 / 9 < rows["plan"]["to"]
    assert MADE.ablation()["the plan"]["without ÷ with"] == pytest.approx(7 / 9)
    assert set(MADE.ablation()) == {"the plan", "compression"}


def test_equal_pools_run_once_and_decide_as_the_simulator():
    torch.set_num_threads(1)
    bench = Bench("", "", None, 8, 4, 1, 0.4, workers=1, rounds=1, seconds=0.1, seed=0)
    found = plans.stationary(bench, 0.4, before=8, tokens=3)
    assert list(found.since)[0].startswith("4 to ") and all(
        of > 0 for row in found.since.values() for of in row.values()
    )
    assert {"plan", "auto"} < set(found.took) == set(found.simulated) <= {"plan", "auto", *"FCSE"}
    ablated = plans.stationary(bench, 0.4, before=8, tokens=3, ablation=True)
    assert set(ablated.took) == {
        "plan",
        "plan, Algorithm 1",
        "plan, naive order",
        "C",
        "F",
        "F, LRU",
    }
    assert set(ablated.ablation()) == set(plans.ABLATION)
    for name, arm in found.arms.items():
        assert len(found.took[name]) == 4 and (found.took[name] > 0).all()
        twin = next(other for other, of in found.arms.items() if of == arm)
        assert found.took[name] is found.took[twin] or (found.took[name] == found.took[twin]).all()
