"""The table of hit rates: a trace's files as the study wants them, and its numbers against those of
the parts that it is made of."""

import numpy as np
import pytest
import torch

from moelab.bench.arena import play
from moelab.trace import load, save_arrays
from moelab.trace.statistics import statistics
from notebooks.studies.hit_rates import RECORDED, Folder, beginning, run
from tests.trace.samples import routed

NAME = "OLMoE-1B-7B"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / RECORDED[NAME].file
    path.parent.mkdir()
    save_arrays(routed((9, 12, 7), L=16, E=64, K=8), path)
    return tmp_path


def test_its_numbers_are_those_of_the_parts(folder):
    found = run(Folder(folder), [NAME], ["lru", "lrfu"], (0.25,), tokens=10)
    trace = load(folder / RECORDED[NAME].file, NAME)
    row, of = found["whole traces"][NAME], statistics(trace, (0.25,))
    assert row["lru at 25%"] == of.hits["lru"][0] and row["next layer"] == of.next_layer
    row = found["all policies"][NAME]
    first = beginning(trace, 10)
    assert (
        row["tokens"] == len(first) == 20
        and row["lrfu at 25%"] == play(first, "lrfu", 0.25)[0] / 100
    )
    assert row["belady at 25%"] >= row["lru at 25%"]
    assert str(Folder(folder)) == folder.name


@pytest.mark.parametrize("tokens, kept", [(5, 9), (9, 9), (10, 20), (22, 28), (99, 28), (4, 8)])
def test_whole_texts_are_kept_but_no_long_one(tokens, kept):
    trace = routed((9, 12, 7))
    first = beginning(trace, tokens)
    assert len(first) == kept
    assert torch.equal(first.ids, trace.ids[:kept])


def test_a_task_is_its_sequences(tmp_path):
    name = "DeepSeek-V2-Lite, law"
    path = tmp_path / RECORDED[name].file
    path.parent.mkdir()
    trace = routed((9, 12, 7), L=26, E=64, K=6)
    arrays = {"ids": trace.ids.numpy(), "sequence": trace.sequence.numpy()}
    np.savez(path, **arrays, sequence_task=np.array(["law", "intent", "law"]))
    with pytest.warns(UserWarning, match="sequence_task"):
        found = run(str(tmp_path), [name], ["lru"], (0.5,), tokens=99)
    assert found["whole traces"][name]["tokens"] == 16
