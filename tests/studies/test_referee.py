"""The referee's statistics on routing that is made by hand."""

import numpy as np
import pytest

from moelab.base.specs import MoESpec
from notebooks.studies import referee
from notebooks.studies.published import Texts

SPEC = MoESpec("made", "qwen3_moe", 2, (0, 1), 8, 2, 64, 32)


def subject(*texts):
    return referee.Subject("made", Texts(list(map(np.array, texts)), 8, "made"), SPEC, 1e6)


def text(first, tokens=20):
    """Tokens that keep to four experts of each layer, from `first` on."""
    return [[[first + t % 4, first + (t + 1) % 4]] * 2 for t in range(tokens)]


def test_a_static_set_of_a_text_with_other_experts_hits_nothing():
    found = referee.static_sets(subject(text(0), text(4)), 0.5)
    assert found["static, own text"][0] == 1.0 and found["static, other texts"][0] == 0.0
    belady = referee.policies(subject(text(0), text(4)), 0.5)["Belady"]
    assert found["LRU"][0] == belady[0] == pytest.approx(1 - 16 / 160)
    assert found["static, other texts, less LRU"][0] == pytest.approx(-0.9)
    same = referee.static_sets(subject(text(0), text(0)), 0.5)
    assert same["static, other texts"][0] == 1.0


def test_a_batch_reads_the_union_and_fewer_experts_miss_less():
    made = subject(text(0), text(4))
    assert referee.union(made)["1"] == 1.0 and referee.union(made)["4"] == 4 / 8
    missed = referee.of_k(made, 0.25)
    assert missed["half of K"] < missed["K"]


def test_engines_agree_on_hits_and_a_perfect_guess_never_waits_longer():
    rng = np.random.default_rng(0)
    ids = rng.random((2, 2 * referee.TIMED, 2, 8)).argsort(-1)[..., :2]
    made = subject(*ids)
    rows = referee.engines(made, 0.5)
    hits = {row["hits %"] for name, row in rows.items() if "LRU" in name}
    assert len(hits) == 1 and all(row["tokens/s"] > 0 for row in rows.values())
    hidden, plain = (
        rows[f"phone: LRU, {how}"]["tokens/s"] for how in ("overlapped", "then computes")
    )
    assert hidden >= plain
    guesses = referee.prefetching(made, 0.5)
    right = [guesses[f"phone, {p:.0%} of guesses right"]["speed ×"] for p in (0.0, 1.0)]
    assert right[0] <= right[1]
    assert 0 <= referee.break_even(guesses, "phone") <= 1


def test_guesses_at_absent_experts_are_right_where_a_layer_tells_the_next():
    """The next layer has the same experts; with other ones in every text, nothing is absent twice."""
    rng = np.random.default_rng(0)
    chosen = rng.random((4, 30, 1, 8)).argsort(-1)[..., :2]
    made = subject(*np.repeat(chosen, 2, axis=2))
    precision, low, high = referee.guessed(made, 0.25)
    assert 0.8 < low <= precision <= high < 1.2


@pytest.mark.parametrize(
    "points, even", [([(0.2, 0.9), (0.6, 1.1)], 0.4), ([(0.2, 1.1)], 0.0), ([(0.9, 0.99)], 1.0)]
)
def test_where_prefetching_pays(points, even):
    rows = {f"GPU {i}": {"right of absent": p, "speed ×": s} for i, (p, s) in enumerate(points)}
    assert referee.break_even(rows, "GPU") == pytest.approx(even)
