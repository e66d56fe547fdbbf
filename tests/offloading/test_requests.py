from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.offloading.requests import Delays, Operation, Task, operations
from moelab.specs import ExpertKey, State
from tests.zipmoe.instances import Request

DELAYS = Delays(
    e_read=12.0,
    sm_read=9.0,
    decompress=24.0,
    recover=1.0,
    expert_base=5.0,
    expert_token=0.5,
    K=4,
    N=3,
)


def graph(state, K=2):
    return operations(Task(7, 1, state, u=1.0, v=1.0, c=1.0, K=K, p=1.0))


def test_a_missed_tensor():
    e0, e1, sm = (
        Operation("read E", 7, 1, 0),
        Operation("read E", 7, 1, 1),
        Operation("read SM", 7, 1),
    )
    d0, d1 = Operation("decompress", 7, 1, 0), Operation("decompress", 7, 1, 1)
    recover, expert = Operation("recover", 7, 1), Operation("expert", 7)
    assert graph(State.MISSED) == {
        e0: (),
        d0: (e0,),
        e1: (),
        d1: (e1,),
        sm: (),
        recover: (d0, d1, sm),
        expert: (recover,),
    }


@pytest.mark.parametrize(
    "state, kinds",
    [
        (State.E, ["decompress", "decompress", "read SM", "recover", "expert"]),
        (State.SM, ["read E", "decompress", "read E", "decompress", "recover", "expert"]),
        (State.COMPRESSED, ["decompress", "decompress", "recover", "expert"]),
        (State.FULL, ["expert"]),
    ],
)
def test_what_is_in_memory_is_not_read(state, kinds):
    assert [operation.kind for operation in graph(state)] == kinds


@given(st.sampled_from(State), st.integers(1, 5))
def test_the_graph_is_listed_in_an_order_that_respects_it(state, K):
    seen = set()
    for operation, before in graph(state, K).items():
        assert set(before) <= seen
        seen.add(operation)


@given(st.sampled_from(State))
def test_reading_left_to_do_is_that_of_the_graph(state):
    if state is State.FULL:
        return
    task = Task(0, 0, state, u=3.0, v=0.5, c=1.0, K=4, p=1.0)
    cost = {"read E": 0.5, "read SM": 3.0}
    assert task.io == sum(cost.get(operation.kind, 0.0) for operation in operations(task))


def test_an_expert_as_one_task():
    request = Request(ExpertKey(0, 5), 4, State.MISSED, State.MISSED)
    assert DELAYS.whole(request) == Task(5, 0, State.MISSED, u=9.0, v=12.0, c=25.0, K=1, p=7.0)


def test_one_read_of_both_chunks_has_a_time_of_its_own():
    bytes_of = {"e_bytes": 10, "sm_bytes": 30, "experts_bytes": [[[10, 30], [20, 60]]]}
    two = Delays(2.0, 3.0, 1.0, 1.0, 1.0, 0.0, **bytes_of)
    one, slow = replace(two, read_both=4.0), replace(two, read_both=4.0, decompress=3.5)
    for expert, times in ((0, 1), (1, 2)):  # an expert of twice the bytes takes twice as long
        key = ExpertKey(0, expert)
        assert (
            two.read(key, True, True) == (times * 5.0, times * 40)
            and one.read(key, True, True)[0] == times * 4.0
        )
        for delays in (one, two):
            assert delays.read(key, True, False) == (times * 2.0, times * 10)
            assert delays.read(key, False, True) == (times * 3.0, times * 30)
    assert (two.miss_read, one.miss_read, slow.miss_read) == (5.0, 4.0, 5.0)
    assert one.by_expert and not slow.by_expert and replace(slow, sm_read=0.0).by_expert


@pytest.mark.parametrize("wrong", [{"e_read": -1.0}, {"recover": float("nan")}, {"K": 0}, {"N": 0}])
def test_impossible_delays(wrong):
    good = {
        "e_read": 1.0,
        "sm_read": 1.0,
        "decompress": 1.0,
        "recover": 1.0,
        "expert_base": 1.0,
        "expert_token": 1.0,
    }
    with pytest.raises(ValueError, match="at least"):
        Delays(**{**good, **wrong})
