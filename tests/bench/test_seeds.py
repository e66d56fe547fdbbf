"""Conclusions by seed: how they are counted, and that finished seeds are kept."""

import pytest

from moelab.bench import seeds as bench
from tests.depth import depth


@pytest.mark.parametrize("side, limit, hold", [("above", 1.0, 2), ("below", 1.0, 1)])
def test_a_conclusion_holds_on_its_side_of_the_bar(side, limit, hold):
    row = bench.told([0.5, 1.0, 1.5, 4.0], (side, limit))
    assert (row["hold"], row["seeds"], row["min"], row["median"], row["max"]) == (hold, 4, 0.5, 1.25, 4.0)


def test_finished_seeds_are_kept_and_not_run_again(tmp_path, monkeypatch):
    ran = []

    def one(trial, notebooks):
        seed = trial.seed
        if seed == 2 and ran.count(2) == 0:
            ran.append(2)
            raise KeyboardInterrupt
        ran.append(seed)
        return {name: float(seed) for name in bench.BARS if name[:2] in notebooks}
    monkeypatch.setattr(bench, "one", one)
    monkeypatch.setattr(bench, "open_model", lambda: None)
    journal = str(tmp_path / "seeds.journal")
    rows, = bench.run(seeds=4, journal=journal).values()
    assert ran == [0, 1, 2] and all(row["seeds"] == 2 for row in rows.values())
    rows, = bench.run(seeds=4, journal=journal).values()
    assert ran == [0, 1, 2, 2, 3] and all((row["min"], row["max"], row["seeds"]) == (0, 3, 4) for row in rows.values())
    assert list(rows) == list(bench.BARS)
    rows, = bench.run(seeds=2, first=2, journal=journal).values()
    assert len(ran) == 5 and all((row["min"], row["seeds"]) == (2, 2) for row in rows.values())
    for other in ({"windows": 9}, {"notebooks": ["01"]}):
        with pytest.raises(ValueError, match="other sizes"):
            bench.run(seeds=4, journal=journal, **other)
    with pytest.raises(ValueError, match="no conclusions of 11 are tried; there are: 00, 01"):
        bench.run(notebooks=["01", "11"])


@pytest.mark.stress
def test_every_conclusion_has_a_number():
    """Those of 06 and 08 take as long as all others; what they call is run by these notebooks' smoke runs, too."""
    some = depth([name for name in bench.NOTEBOOKS if name not in ("06", "08")], list(bench.NOTEBOOKS))
    rows, = bench.run(seeds=1, prompts=2, train_tokens=200, windows=2, notebooks=some).values()
    assert list(rows) == [bar for bar in bench.BARS if bar[:2] in some]
    assert all(row["seeds"] == 1 for row in rows.values())
