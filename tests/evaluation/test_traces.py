"""`moelab trace`: what is imported is what was there, what is shown is what `statistics` finds."""

from __future__ import annotations

import tomllib

import pytest
import torch

from moelab.__main__ import main
from moelab.base.table import percent
from moelab.calibration import Calibration
from moelab.simulation.routing import Routing
from moelab.trace import load
from moelab.trace.statistics import statistics
from tests.trace.samples import POPULARITY, TRACES, routed


def run(capsys, *words):
    """(exit status, output, errors) of a command."""
    capsys.readouterr()
    return main(["trace", *map(str, words)]), *capsys.readouterr()


def test_a_trace_goes_round_through_every_form(tmp_path, capsys):
    trace = routed((6, 5), E=8)
    trace.ids[0, 0] = torch.tensor([7, 0])
    path = tmp_path / "t.csv"
    TRACES["t.csv"][0](path, trace)
    for name in ("a.safetensors", "b.npz", "c.npy"):
        status, said, _ = run(capsys, "import", path, tmp_path / name)
        assert status == 0 and str(tmp_path / name) in said
        path = tmp_path / name
        assert torch.equal(load(path).ids, trace.ids)
    status, _, error = run(capsys, "import", path, tmp_path / "b.npz")
    assert status == 2 and "--force" in error
    assert run(capsys, "import", path, tmp_path / "b.npz", "--force")[0] == 0
    assert run(capsys, "import", path, tmp_path / "b.txt")[0] == 2


def test_what_is_shown_is_what_was_found(tmp_path, capsys):
    traces = [routed((9, 8), E=8, seed=seed) for seed in (0, 1)]
    paths = [trace.save(tmp_path / f"t{n}.safetensors") for n, trace in enumerate(traces)]
    status, said, _ = run(capsys, "compare", *paths, "--shares", "25,60")
    assert status == 0
    for trace, path in zip(traces, paths):
        found = statistics(trace, (0.25, 0.6))
        for value in (found.reuse, found.next_layer, found.hits["lru"][0], found.hits["belady"][1]):
            assert percent(value) in said
        assert path.name in said and path.name in run(capsys, "show", path)[1]
    assert run(capsys, "show", tmp_path / "none.csv")[0] == 2


@pytest.mark.parametrize("name", POPULARITY)
def test_counts_become_a_calibration(name, tmp_path, capsys):
    counts = routed((40,), 32, 8, 2).counts()
    POPULARITY[name](tmp_path / name, counts.tolist())
    given = (tmp_path / name, "--model", "Mixtral-8x7B")
    assert "40 tokens" in run(capsys, "show", *given)[1]
    assert run(capsys, "import", *given[:1], tmp_path / "c.safetensors", *given[1:])[0] == 0
    assert torch.equal(Calibration.load(tmp_path / "c.safetensors").counts(), counts)
    assert run(capsys, "import", *given[:1], tmp_path / "c.npy", *given[1:])[0] == 2


def test_a_fit_is_shown_as_a_card_has_it(tmp_path, capsys):
    path = routed((40, 30), E=8).save(tmp_path / "t.safetensors")
    code, out, _ = run(capsys, "fit", path)
    shown = tomllib.loads(out)["routing"]
    assert code == 0 and shown.pop("kind") == "fitted" and "70 tokens" in shown.pop("source")
    assert Routing(**shown).popularity == shown["popularity"]
