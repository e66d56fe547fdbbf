"""The model of routing: what is drawn has what its numbers say, and a fit finds them again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import MoESpec
from moelab.cards import load_model
from moelab.simulation.routing import Routing, families, fit, routing_of

LIKE = Routing(0.1, 0.1, 0.2, 20.0, 0.4, 1.0, 8.0)


def spec(L: int, E: int, K: int) -> MoESpec:
    return MoESpec("toy", "toy", L, tuple(range(L)), E, K, 8, 8)


shares = st.lists(st.floats(0.0, 0.25), min_size=4, max_size=4)


@given(
    shares,
    st.floats(1.0, 12.0),
    st.integers(1, 4),
    st.integers(2, 20),
    st.lists(st.integers(1, 200), min_size=1, max_size=4),
    st.integers(0, 9),
    st.data(),
)
def test_a_draw_chooses_k_of_each_layer_and_is_the_same_again(
    parts, width, L, E, lengths, seed, data
):
    K = data.draw(st.integers(1, E))
    popularity, text, passage, neighbours = parts
    routing = Routing(popularity, text, passage, 9.0, neighbours, 0.8, width)
    ids = routing.draw(L, E, K, lengths, seed)
    assert ids.shape == (sum(lengths), L, K) and ids.dtype == np.int16
    assert ids.min() >= 0 and ids.max() < E
    assert (np.diff(np.sort(ids, 2), axis=2) > 0).all()
    assert np.array_equal(ids, routing.draw(L, E, K, lengths, seed))


def test_the_experts_are_those_of_the_highest_scores_best_first():
    b, v = LIKE.routers(3, 12, seed=4)
    x = LIKE.states([40, 30], seed=4)
    ids = LIKE.draw(3, 12, 5, [40, 30], seed=4)
    for t in range(70):
        for layer in range(3):
            scores = b[layer] + v[layer] @ x[t]
            assert ids[t, layer].tolist() == np.argsort(-scores)[:5].tolist()


@pytest.mark.parametrize("skew", [-0.7, 0.4])
def test_popularity_keeps_its_share_and_leans(skew):
    b, _ = replace(LIKE, skew=skew).routers(40, 64)
    assert b.var() == pytest.approx(LIKE.popularity, rel=0.15)
    assert np.sign(np.mean((b - b.mean()) ** 3)) == np.sign(skew)


def test_a_score_has_variance_one_and_each_part_its_share():
    b, v = LIKE.routers(40, 64)
    x = LIKE.states([600] * 60).reshape(60, 600, -1)
    assert np.linalg.norm(v, axis=2) == pytest.approx(1, abs=1e-4)
    assert b.var() == pytest.approx(LIKE.popularity, rel=0.15)
    assert x.var() == pytest.approx(1 - LIKE.popularity, rel=0.1)

    def alike(lag: int) -> float:
        return float((x[:, lag:] * x[:, : 600 - lag]).mean())

    for lag in (1, 3, 10):
        expected = LIKE.text + LIKE.passage * np.exp(-lag / 20) + LIKE.neighbours * np.exp(-lag)
        assert alike(lag) == pytest.approx(expected, abs=0.05)
    others = float((x[1:] * x[:-1]).mean())
    assert others == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("text", [[7, 90], [90]])
def test_texts_do_not_depend_on_how_many_follow(text):
    routing = Routing(0.1, 0.2, 0.0, 20.0, 0.0, 1.0, 3.0)
    assert np.array_equal(routing.routers(2, 8)[0], LIKE.routers(2, 8)[0])
    assert len(routing.states(text)) == sum(text)


def test_a_fit_finds_the_routing_that_was_drawn_from():
    trace = LIKE.trace(spec(6, 24, 4), [300] * 8, seed=7)
    found = fit(trace, rounds=4)
    again = found.trace(trace.spec, [300] * 8, seed=8)
    assert found.popularity == pytest.approx(LIKE.popularity, abs=0.08)
    assert found.width == pytest.approx(LIKE.width, rel=0.5)
    assert len(again) == len(trace)


def test_a_fit_needs_tokens_and_layers():
    with pytest.raises(ValueError, match="1 layers"):
        fit(LIKE.trace(spec(1, 8, 2), [30]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"popularity": -0.1},
        {"text": 0.9},
        {"width": 0.5},
        {"passage_tokens": 0.0},
        {"neighbour_tokens": float("nan")},
        {"skew": float("inf")},
    ],
)
def test_shares_and_lengths_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="shares"):
        Routing(**{**vars(LIKE), **wrong})


def test_a_model_has_its_own_fit_or_the_nearest_ones():
    for own in families():
        assert routing_of(load_model(own)) == (families()[own], f"fitted to a trace of {own}")
    routing, words = routing_of(spec(4, 64, 6))
    assert routing in families().values() and "toy" in words
