"""Random requests and tasks for the tests of this folder."""

from typing import NamedTuple

from hypothesis import strategies as st

from moelab.base.specs import ExpertKey, State
from moelab.simulation.costs import Delays
from moelab.zipmoe.affinity import Task

LOADING = [State.MISSED, State.E, State.SM, State.COMPRESSED]


class Request(NamedTuple):
    key: ExpertKey
    tokens: int
    state: State
    keep: State


seconds = st.integers(0, 9).map(float) | st.floats(0.01, 10)
some_seconds = st.integers(1, 9).map(float) | st.floats(0.01, 10)
delays = st.builds(
    Delays,
    e_read=seconds,
    sm_read=seconds,
    decompress=seconds,
    recover=seconds,
    expert_base=seconds,
    expert_token=seconds,
    N=st.integers(1, 3),
    e_bytes=st.just(3),
    sm_bytes=st.just(5),
)


@st.composite
def requests(draw, states=tuple(State), most=8):
    experts = draw(st.lists(st.integers(0, 63), unique=True, max_size=most).map(sorted))
    return [
        Request(
            ExpertKey(2, expert),
            draw(st.integers(1, 5)),
            draw(st.sampled_from(states)),
            draw(st.sampled_from(tuple(State))),
        )
        for expert in experts
    ]


@st.composite
def task_sets(draw, experts=6, tensors=3, K=4, most=99):
    """Tasks that share u, v, c and K, as a layer's do."""
    u, v, c, K = draw(some_seconds), draw(some_seconds), draw(some_seconds), draw(st.integers(1, K))
    tasks = []
    for expert in range(draw(st.integers(1, experts))):
        state, p = draw(st.sampled_from(LOADING)), draw(some_seconds)
        tasks += [
            Task(expert, tensor, state, u, v, c, K, p)
            for tensor in range(draw(st.integers(1, tensors)))
        ]
    return tasks[:most]
