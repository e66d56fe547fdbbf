from hypothesis import given
from hypothesis import strategies as st
from moelab.simulation.execution import makespan

from moelab.offloading.requests import Task
from moelab.specs import State
from moelab.zipmoe.optimal_schedule import Bounds, bounds, critical_path
from tests.zipmoe.instances import task_sets


def test_by_hand():
    a = Task(0, 0, State.MISSED, u=3.0, v=1.0, c=2.0, K=2, p=4.0)
    b = Task(1, 0, State.COMPRESSED, u=3.0, v=1.0, c=2.0, K=2, p=9.0)
    found = bounds([a, a._replace(tensor=1), b], workers=2)
    assert found == Bounds(io=10.0, workers=6.0, compute=13.0, path=11.0)
    assert found.best == 13.0
    assert bounds([], 2) == Bounds(0, 0, 0, 0)


@given(task_sets(experts=1, tensors=1), st.integers(1, 6))
def test_the_path_of_one_task_is_what_it_takes(tasks, workers):
    assert abs(critical_path(tasks[0], workers) - makespan([tasks], workers)) < 1e-9


def critical_path_printed(task, workers):
    """z_j as eq. (3) prints it."""
    return (
        task.reads_e * task.K * task.v
        + max(task.K * task.c / min(task.K, workers), task.type_1 * task.u)
        + task.p
    )


@given(task_sets(experts=1, tensors=1, K=1), st.integers(1, 6))
def test_the_printed_path_is_right_for_one_shard(tasks, workers):
    assert abs(critical_path_printed(tasks[0], workers) - critical_path(tasks[0], workers)) < 1e-9


def test_the_printed_path_exceeds_a_schedule_with_two_shards():
    task = Task(0, 0, State.SM, u=0.0, v=1.0, c=1.0, K=2, p=0.0)
    assert (
        critical_path_printed(task, 1)
        == 4.0
        > makespan([[task]], 1)
        == critical_path(task, 1)
        == 3.0
    )
