"""The study of recorded traces: its files, tasks and numbers."""

import numpy as np
import pytest

from moelab.trace import load, save_arrays
from moelab.trace.statistics import statistics
from notebooks.studies.recorded_traces import RECORDED, Folder, run
from tests.trace.samples import routed

NAME = "OLMoE-1B-7B"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / RECORDED[NAME].file
    path.parent.mkdir()
    save_arrays(routed((9, 12, 7), L=16, E=64, K=8), path)
    return tmp_path


def test_its_numbers_are_those_of_the_parts(folder):
    found = run(Folder(folder), [NAME], (0.25,))
    trace = load(folder / RECORDED[NAME].file, NAME)
    row, of = found["whole traces"][NAME], statistics(trace, (0.25,))
    assert row["lru at 25%"] == of.hits["lru"][0] and row["next layer"] == of.next_layer
    assert str(Folder(folder)) == folder.name


def test_a_task_is_its_sequences(tmp_path):
    name = "DeepSeek-V2-Lite, law"
    path = tmp_path / RECORDED[name].file
    path.parent.mkdir()
    trace = routed((9, 12, 7), L=26, E=64, K=6)
    arrays = {"ids": trace.ids.numpy(), "sequence": trace.sequence.numpy()}
    np.savez(path, **arrays, sequence_task=np.array(["law", "intent", "law"]))
    with pytest.warns(UserWarning, match="sequence_task"):
        found = run(str(tmp_path), [name], (0.5,))
    assert found["whole traces"][name]["tokens"] == 16
