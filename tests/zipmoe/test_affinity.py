from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import registry
from moelab.offloading.load_queue import Order
from moelab.simulation.costs import Delays
from moelab.specs import ExpertKey, State
from moelab.zipmoe.affinity import SCHEDULERS, naive_order, order, schedule
from moelab.zipmoe.tasks import Task, timetable
from tests.zipmoe.instances import Request, delays, requests, task_sets

SLOW_DISK = Delays(
    e_read=4.0, sm_read=6.0, decompress=1.0, recover=0.0, expert_base=0.0, expert_token=1.0
)


def request(expert, tokens, state):
    return Request(ExpertKey(0, expert), tokens, State(state), State.MISSED)


@given(task_sets(), st.integers(1, 9))
def test_blocks_are_a_permutation_of_the_tasks(tasks, workers):
    blocks = schedule(tasks, workers)
    assert Counter(task for block in blocks for task in block) == Counter(tasks)
    assert all(blocks)


@given(task_sets(), st.integers(1, 4))
def test_tasks_of_a_type_keep_their_order_within_a_block(tasks, workers):
    for block in schedule(tasks, workers):
        for type_1 in (True, False):
            ranks = [(-task.p, task.expert, task.tensor) for task in block if task.type_1 == type_1]
            assert ranks == sorted(ranks)  # non-increasing p, tasks of an expert together


@settings(max_examples=150, deadline=None)
@given(task_sets(), st.integers(1, 4))
def test_a_block_ends_when_the_workers_lag(tasks, workers):
    """Definition A.1, on the executed schedule: workers find the next block's E-chunks there as
    they come free. Only where later blocks wait for reads: of a chunk that is in memory, execution
    begins earlier than its block, so workers end sooner than the listing, which takes blocks one
    after another, has it."""
    blocks = schedule(tasks, workers)
    v, K = tasks[0].v, tasks[0].K
    for m in range(1, len(blocks)):
        if not all(task.reads_e for block in blocks[1:m] for task in block):
            break
        times = timetable(blocks[:m], workers)
        io_end = max(
            (end for op, (_, end) in times.items() if op.kind.startswith("read")), default=0.0
        )
        busy = [0.0] * workers
        for _start, end in sorted(span for op, span in times.items() if op.kind == "decompress"):
            busy[busy.index(min(busy))] = end
        for k, end in enumerate(sorted(busy)[:K], 1):
            assert end - io_end >= k * v - 1e-9 * (1 + end)


def test_type_1_by_itself_is_ordered_by_tokens():
    found = order(
        [request(0, 1, "M"), request(1, 3, "M"), request(2, 2, "M")], SLOW_DISK, workers=2
    )
    assert found.decode == [1, 2, 0]
    assert found.io == [(1, "E"), (2, "E"), (0, "E"), (1, "SM"), (2, "SM"), (0, "SM")]


def test_what_is_in_memory_hides_behind_the_reading():
    found = order(
        [request(0, 1, "C"), request(1, 3, "M"), request(2, 2, "C"), request(3, 5, "F")],
        SLOW_DISK,
        1,
    )
    assert found == Order([(1, "E"), (1, "SM")], [2, 0, 1])


def test_a_type_2_task_that_makes_workers_idle_goes_behind_larger_type_1_tasks():
    # one worker waits 4 s for the first E-chunk anyway and 3 s more for the second
    assert order([request(0, 1, "S"), request(1, 3, "M")], SLOW_DISK, 1).io == [
        (1, "E"),
        (0, "E"),
        (1, "SM"),
    ]
    assert order([request(0, 3, "S"), request(1, 1, "M")], SLOW_DISK, 1).io == [
        (0, "E"),
        (1, "E"),
        (1, "SM"),
    ]


def test_blocks_follow_when_decompression_is_slow():
    slow_workers = Delays(
        e_read=1.0, sm_read=1.0, decompress=9.0, recover=0.0, expert_base=1.0, expert_token=0.0
    )
    found = order([request(e, 1, "M") for e in range(3)], slow_workers, workers=1)
    assert found.io == [(e, part) for e in range(3) for part in ("E", "SM")]


@given(requests(), delays, st.integers(1, 4))
def test_an_order_reads_what_is_missing_once(asked, machine, workers):
    for found in (registry.find("scheduler", name)(asked, machine, workers) for name in SCHEDULERS):
        missing = [r for r in asked if r.state is not State.FULL]
        wanted = [(r.key.expert, "E") for r in missing if r.state not in "EC"] + [
            (r.key.expert, "SM") for r in missing if r.state not in "SC"
        ]
        assert sorted(found.io) == sorted(wanted)
        assert sorted(found.decode) == sorted(r.key.expert for r in missing)


def test_the_naive_order():
    asked = [request(3, 9, "M"), request(1, 1, "S"), request(2, 1, "F"), request(0, 5, "E")]
    assert naive_order(asked) == Order([(0, "SM"), (1, "E"), (3, "E"), (3, "SM")], [0, 1, 3])


def test_nothing_to_do():
    assert schedule([], 2) == []
    assert order([], SLOW_DISK, 2) == order([request(0, 1, "F")], SLOW_DISK, 2) == Order([], [])


def test_errors():
    task = Task(4, 0, State.MISSED, 1.0, 1.0, 1.0, 1, 1.0)
    with pytest.raises(ValueError, match="0 workers"):
        schedule([task], 0)
    with pytest.raises(ValueError, match="expert 4 is FULL"):
        schedule([task._replace(state=State.FULL)], 1)
    with pytest.raises(ValueError, match="layers one by one"):
        schedule([task, task._replace(u=2.0)], 1)
