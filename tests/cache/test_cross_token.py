"""What followed what, against counts of the whole history."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moelab.cache.cross_token import CrossToken

E = 5
experts = st.sets(st.integers(0, E - 1), min_size=1, max_size=3).map(sorted)


@given(
    st.lists(
        st.tuples(st.sampled_from(["prefill", "decode", "decode"]), experts),
        min_size=1,
        max_size=20,
    )
)
def test_scores_are_shares_of_the_history(tokens):
    predictor = CrossToken(E)
    for phase, chosen in tokens:
        predictor.begin(phase)
        predictor.came(2, chosen)
        predictor.came(3, [0])
    pairs = [
        (before, after)
        for (_, before), (phase, after) in zip(tokens, tokens[1:])
        if phase == "decode"
    ]
    seen = [1 + sum(e in chosen for _, chosen in tokens) for e in range(E)]
    score = [
        sum(
            (sum(i in before and e in after for before, after in pairs) + seen[e] / sum(seen))
            / (1 + sum(i in before for before, _ in pairs))
            for i in tokens[-1][1]
        )
        for e in range(E)
    ]
    predictor.begin("decode")
    assert predictor.first == predictor.starts == 2
    found = predictor.predict()
    assert sorted(found) == list(range(E))
    assert np.all(np.diff([score[e] for e in found]) <= 1e-12)


def test_it_knows_the_end_of_a_pass_from_the_one_before():
    predictor, ends = CrossToken(E), []
    for phase in ("prefill", "decode", "decode"):
        predictor.begin(phase)
        for layer in (1, 2, 4):
            predictor.came(layer, [0])
            ends.append(predictor.ends(layer))
    assert ends == [False] * 5 + [True] + [False] * 2 + [True]
