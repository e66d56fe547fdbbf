from collections import Counter
from dataclasses import replace
from itertools import groupby, product
from operator import itemgetter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moelab.base import registry
from moelab.base.specs import ExpertKey, State
from moelab.cards import load_device, load_model
from moelab.offloading.load_queue import Order
from moelab.simulation.costs import RHO, Delays, delays_of
from moelab.zipmoe.affinity import (
    SCHEDULERS,
    Task,
    by_expert,
    default_order,
    naive_order,
    order,
    schedule,
)
from notebooks.studies.optimal_schedule import execute, timetable
from tests.zipmoe.instances import Request, delays, requests, task_sets

SLOW_DISK = Delays(
    e_read=4.0, sm_read=6.0, decompress=1.0, recover=0.0, expert_base=0.0, expert_token=1.0
)


def request(expert, tokens, state):
    return Request(ExpertKey(0, expert), tokens, State(state), State.MISSED)


@given(task_sets(), st.integers(1, 9))
def test_blocks_are_a_permutation_of_the_tasks_each_type_by_falling_p(tasks, workers):
    blocks = schedule(tasks, workers)
    assert Counter(task for block in blocks for task in block) == Counter(tasks) and all(blocks)
    for block, type_1 in product(blocks, (True, False)):
        ranks = [(-task.p, task.expert, task.tensor) for task in block if task.type_1 == type_1]
        assert ranks == sorted(ranks)  # tasks of an expert together


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


SLOW_WORKERS = Delays(1.0, 1.0, 9.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "asked, delays, io, decode",
    [
        # type I by tokens: all E-chunks of a block before its SM-chunks
        (
            [(0, 1, "M"), (1, 3, "M"), (2, 2, "M")],
            SLOW_DISK,
            "1E 2E 0E 1SM 2SM 0SM",
            [1, 2, 0],
        ),
        # what is in memory hides behind the reading
        ([(0, 1, "C"), (1, 3, "M"), (2, 2, "C"), (3, 5, "F")], SLOW_DISK, "1E 1SM", [2, 0, 1]),
        # type II goes behind larger type I where it makes the one worker wait 3 s more
        ([(0, 1, "S"), (1, 3, "M")], SLOW_DISK, "1E 0E 1SM", [1, 0]),
        ([(0, 3, "S"), (1, 1, "M")], SLOW_DISK, "0E 1E 1SM", [0, 1]),
        # slow workers: a block for each
        ([(0, 1, "M"), (1, 1, "M")], SLOW_WORKERS, "0E 0SM 1E 1SM", [0, 1]),
        ([(0, 1, "F")], SLOW_DISK, "", []),
        ([], SLOW_DISK, "", []),
    ],
)
def test_orders_by_hand(asked, delays, io, decode):
    found = order([request(*one) for one in asked], delays, 2 if len(io) > 15 else 1)
    assert " ".join(f"{expert}{part}" for expert, part in found.io) == io
    assert found.decode == decode


@given(requests(), delays, st.integers(1, 4))
def test_an_order_reads_what_is_missing_once(asked, machine, workers):
    for found in (registry.find("scheduler", name)(asked, machine, workers) for name in SCHEDULERS):
        missing = [r for r in asked if r.state is not State.FULL]
        wanted = [(r.key.expert, "E") for r in missing if r.state not in "EC"] + [
            (r.key.expert, "SM") for r in missing if r.state not in "SC"
        ]
        parts = {"both": ("E", "SM")}
        read = [(expert, part) for expert, of in found.io for part in parts.get(of, (of,))]
        assert sorted(read) == sorted(wanted)
        assert sorted(found.decode) == sorted(r.key.expert for r in missing)


def test_the_naive_order():
    asked = [request(3, 9, "M"), request(1, 1, "S"), request(2, 1, "F"), request(0, 5, "E")]
    assert naive_order(asked) == Order([(0, "SM"), (1, "E"), (3, "both")], [0, 1, 3])


@given(requests((State.MISSED, State.FULL), most=6), delays, st.integers(1, 4), st.integers(1, 3))
def test_where_decompressing_takes_longer_no_misses_are_faster_in_merged_reads(
    asked, machine, workers, shards
):
    """Of the default order; its adjacent reads of an expert as one are the other one."""
    machine = replace(machine, shards=shards)
    assume(not by_expert(machine))
    plan = default_order(asked, machine, workers)
    merged = [
        (expert, "both" if len(of := [part for _, part in those]) == 2 else of[0])
        for expert, those in groupby(plan.io, itemgetter(0))
    ]
    apart, together = (
        execute(asked, one, machine, workers)[1] for one in (plan, plan._replace(io=merged))
    )
    assert apart <= together * (1 + 1e-9)


@pytest.mark.parametrize("workers, most", [(3, 3.45e-3), (6, 3.42e-3)])
def test_a_lone_miss_on_an_orin_takes_no_longer_than_reading_it(workers, most):
    """Read, then joined and computed; its exponents are decompressed beside the reading."""
    board, spec = load_device("jetson-agx-orin-64gb"), load_model("DeepSeek-V2-Lite")
    machine, _ = delays_of(board, spec, RHO, 0.0, decompress_gbs=1.2)
    asked = [request(0, 1, "M")]
    end = execute(asked, default_order(asked, machine, workers), machine, workers)[1]
    assert machine.miss_read < end < most


def test_errors():
    task = Task(4, 0, State.MISSED, 1.0, 1.0, 1.0, 1, 1.0)
    with pytest.raises(ValueError, match="0 workers"):
        schedule([task], 0)
