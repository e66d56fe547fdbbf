"""What drafts give: passes against naive loops, and what must hold of any text."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.cards import load_model
from moelab.simulation.drafts import PassCosts, advised, passes, verified
from moelab.simulation.routing import families
from moelab.trace import RoutingTrace
from notebooks.studies.draft_passes import texts, union


@st.composite
def traces(draw):
    """Ids [T, L, K] of a few texts whose tokens stand mixed, and their trace."""
    L, E, K = draw(st.integers(1, 3)), draw(st.integers(2, 6)), draw(st.integers(1, 2))
    rng = random.Random(draw(st.integers(0, 99)))
    sequence = [rng.randrange(3) for _ in range(draw(st.integers(3, 20)))]
    ids = torch.tensor([[rng.sample(range(E), K) for _ in range(L)] for _ in sequence])
    spec = replace(load_model("OLMoE-1B-7B"), num_layers=L, moe_layers=tuple(range(L)), E=E, K=K)
    return RoutingTrace.of_ids(ids, spec, sequence=torch.tensor(sequence, dtype=torch.int32))


@given(traces(), st.integers(0, 4))
def test_the_union_is_that_of_consecutive_tokens_of_a_text(trace, drafts):
    sizes = []
    for number in range(3):
        text = trace.ids[trace.sequence == number].tolist()
        for at in range(0, len(text) - drafts, 1 + drafts):
            for layer in range(trace.spec.L):
                window = text[at : at + 1 + drafts]
                sizes.append(len({expert for token in window for expert in token[layer]}))
    if sizes:
        assert union(trace, drafts) == pytest.approx(np.mean(sizes))


@given(traces(), st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0]))
def test_every_pass_has_the_tokens_that_are_right_and_as_many_drafts_in_all(trace, drafts, right):
    E, ids = trace.spec.E, texts(trace)
    assert sum(map(len, ids)) == len(trace)
    for kept, layers in verified(ids, E, drafts, right):
        assert 1 <= kept <= 1 + drafts
        assert kept == 1 + drafts * right or 0 < right < 1
        assert all(trace.spec.K <= len(experts) <= E for experts in layers)


@pytest.fixture(scope="module")
def drawn():
    routing = next(iter(families().values()))
    return [routing.draw(3, 32, 4, [160], seed=n) for n in range(2)]


def test_right_drafts_load_as_much_and_wrong_ones_more(drawn):
    plain = passes(drawn, 32, 0, 1.0, 0.5)
    assert plain.tokens == 1 and plain.union == 4
    right, wrong = passes(drawn, 32, 3, 1.0, 0.5), passes(drawn, 32, 3, 0.0, 0.5)
    assert right.misses / right.tokens == pytest.approx(plain.misses, rel=0.35)
    assert wrong.misses > 1.5 * plain.misses and wrong.tokens == 1
    assert passes(drawn, 32, 3, 1.0, 1.0).misses == 0


def test_drafts_pay_where_a_pass_costs_and_not_where_loading_does(drawn):
    assert "hardly" in advised(drawn, 32, 0.5, PassCosts(3, 0.0, 0.0, 0.0, 1.0))
    assert "50%" in advised(drawn, 32, 0.5, PassCosts(3, 1.0, 0.0, 0.0, 0.0))
    costs = PassCosts(3, 1.0, 0.1, 0.01, 0.5)
    plain = passes(drawn, 32, 0, 1.0, 0.5)
    assert costs.speedup(plain, plain) == 1
    assert costs.seconds(plain) == pytest.approx(1.1 + 3 * plain.misses * 0.5)


def test_a_text_must_be_long_enough(drawn):
    with pytest.raises(ValueError, match="161"):
        passes(drawn, 32, 160, 1.0, 0.5)
