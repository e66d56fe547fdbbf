import json
import math
import statistics
from contextlib import contextmanager, nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moelab
from moelab.base import registry
from moelab.evaluation import accuracy, questions, scores
from moelab.models import plugged

scipy_stats = pytest.importorskip("scipy.stats")


@pytest.fixture(scope="module")
def model():
    return moelab.open_model()


@contextmanager
def wrong_experts(model):
    with plugged(model, lambda x, ids, weights, experts: 10 * x.flip(-1)):
        yield


# ---- the scores


@pytest.mark.parametrize("decode", [0, 5])
def test_language_loss_is_that_of_transformers(model, decode):
    windows = scores.text_windows(model.tokenizer, "test", 3, 40)
    found = scores.language_loss(model, windows, batch_size=2, decode=decode)
    for window, loss in zip(windows, found):
        labels = window.clone()
        labels[: len(window) - decode if decode else 0] = -100
        with torch.no_grad():
            assert loss == pytest.approx(
                model(window[None], labels=labels[None]).loss.item(), abs=0.02
            )


def test_decode_steps_predict_what_one_pass_predicts(model):
    ids = scores.text_windows(model.tokenizer, "test", 2, 24)
    whole, steps = (scores.last_logits(model, ids, 6, decode).float() for decode in (False, True))
    assert whole.shape == steps.shape == (2, 6, 1024)
    assert (whole - steps).abs().max() < 0.15 < whole.std()  # bf16, summed in another order
    with pytest.raises(ValueError, match="ask for fewer"):
        scores.last_logits(model, ids, 24)


def test_right_answers_in_decode_steps_are_those_of_generate(model):
    prompts = questions.prompts("needle_multikey", 4, tokens=64) + questions.prompts(
        "code", 6, tokens=64
    )
    expected = []
    for prompt in prompts:
        question, answer = scores.split_ids(model.tokenizer, prompt)
        out = model.generate(
            torch.tensor([question]),
            max_new_tokens=len(answer),
            do_sample=False,
            attention_mask=torch.ones(1, len(question)),
        )
        expected.append(out[0, len(question) :].tolist() == answer)
    assert scores.right_answers(model, prompts, decode=True) == expected
    assert (
        scores.right_answers(model, prompts, batch_size=3) == expected and len(set(expected)) == 2
    )


# ---- the statistics


@pytest.mark.parametrize("lost, gained", [(0, 0), (1, 0), (3, 1), (5, 5), (2, 8), (9, 0)])
def test_mcnemar_by_enumerating_every_outcome(lost, gained):
    changed = lost + gained
    outcomes = [sum(coins) for coins in product((0, 1), repeat=changed)]
    as_uneven = sum(abs(2 * heads - changed) >= abs(lost - gained) for heads in outcomes)
    base = np.array([True] * lost + [False] * gained + [True, False])
    values = np.array([False] * lost + [True] * gained + [True, False])
    assert accuracy.paired(base, values)["p"] == pytest.approx(as_uneven / 2**changed)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_answers_are_counted_as_by_hand(pairs):
    base, values = (np.array(column) for column in zip(*pairs))
    rows = accuracy.summarise({"t": {"baseline": base, "mode": values}})["t"]
    differences = [int(b) - int(a) for a, b in pairs]
    row, n = rows["mode"], len(pairs)
    assert rows["baseline"]["score"] == pytest.approx(sum(a for a, _ in pairs) / n)
    assert row["error"] == pytest.approx(statistics.stdev(int(b) for _, b in pairs) / n**0.5)
    assert row["difference"] == pytest.approx(statistics.mean(differences))
    assert row["difference error"] == pytest.approx(statistics.stdev(differences) / n**0.5)
    assert (row["lost"], row["gained"]) == (differences.count(-1), differences.count(1))
    low, high = row["interval"]
    assert low < high and low - 1e-9 <= row["difference"] * n / (n + 2) <= high + 1e-9
    assert "difference" not in rows["baseline"]


def test_errors_of_losses_are_the_spread_over_repetitions():
    rng, found = np.random.default_rng(1), []
    for _ in range(600):
        base = rng.gamma(4, 0.6, 80)  # windows differ far more than modes
        found.append(accuracy.paired(base, base * (1.02 + 0.03 * rng.standard_normal(80))))
    for value, error in (("difference", "difference error"), ("relative", "relative error")):
        spread = statistics.stdev(row[value] for row in found)
        assert statistics.mean(row[error] for row in found) == pytest.approx(spread, rel=0.12)
    assert statistics.mean(row["relative"] for row in found) == pytest.approx(2.0, abs=0.1)


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=2, max_size=30))
def test_the_interval_of_losses_is_scipys_of_pairs(pairs):
    base, values = (np.array(column) for column in zip(*pairs))
    row = accuracy.paired(base, values)
    assert row["difference"] == pytest.approx((values - base).mean())
    if np.ptp(values - base) > 1e-6:
        expected = scipy_stats.ttest_rel(values, base).confidence_interval(0.95)
        assert row["interval"] == pytest.approx(list(expected), abs=1e-6)


@given(st.data(), st.integers(2, 9), st.permutations(["01", "bool", "float"]))
def test_a_metric_may_be_0_or_1_throughout_in_one_mode_only(data, n, kinds):
    """As lm-eval's metrics between 0 and 1 are: then no mode's are right answers, whichever comes
    first."""
    draw = {"01": st.integers(0, 1).map(float), "bool": st.booleans(), "float": st.floats(0, 1)}
    samples = {
        kind: np.array(data.draw(st.lists(draw[kind], min_size=n, max_size=n))) for kind in kinds
    }
    found = accuracy.result({"t": samples}, {})
    base = samples[kinds[0]].astype(float)
    for kind in kinds:
        row = found["scores"]["t"][kind]
        assert row["unit"] == "score" and row["score"] == pytest.approx(
            samples[kind].astype(float).mean()
        )
        if kind != kinds[0]:
            assert row["difference"] == pytest.approx(
                (samples[kind].astype(float) - base).mean(), abs=1e-12
            )


def test_unequal_or_single_samples_are_refused():
    with pytest.raises(ValueError, match="at least two"):
        accuracy.summarise({"t": {"baseline": np.array([1.0])}})
    with pytest.raises(ValueError, match="mode has 2 samples and the baseline 3"):
        accuracy.summarise({"t": {"baseline": np.zeros(3), "mode": np.zeros(2)}})


# ---- compare


@pytest.fixture(scope="module")
def found(model):
    return accuracy.compare(
        model,
        {"baseline": nullcontext, "same": nullcontext, "damaged": lambda: wrong_experts(model)},
        ("loss", "needle", "completion"),
        n=6,
        windows=3,
        tokens=64,
        seed=4,
    )


def test_damage_shows(found, model):
    for row in (by_mode["same"] for by_mode in found["scores"].values()):
        assert row["difference"] == row["difference error"] == 0
    loss = found["scores"]["loss"]["damaged"]
    assert loss["difference"] > 3 * loss["difference error"] > 0 and loss["interval"][0] > 0
    windows = scores.text_windows(model.tokenizer, "test", 3, 64, seed=4)
    with wrong_experts(model):
        expected = scores.language_loss(model, windows)
    assert loss["score"] == pytest.approx(expected.mean())
    assert loss["relative"] == pytest.approx(
        100 * (expected.mean() / found["scores"]["loss"]["baseline"]["score"] - 1)
    )
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert len(accuracy.table(found).splitlines()) >= 2 + 3 * 3


def test_hints_change_nothing_and_recall_is_reported(model):
    speculate = pytest.importorskip("moelab.speculate")

    def mode(name, predictor):
        return lambda: speculate.Speculation(
            model, registry.make("predictor", predictor, model), name, prefill=True
        )

    found = accuracy.compare(
        model,
        {
            "baseline": nullcontext,
            "hint": mode("hint", "router"),
            "random": mode("speculative", "random"),
        },
        ("loss",),
        windows=4,
        tokens=64,
    )
    samples, rows = found["samples"]["loss"], found["scores"]["loss"]
    assert samples["hint"] == samples["baseline"] != samples["random"]
    assert (
        "recall" not in rows["baseline"] and rows["hint"]["recall"] > 0.5 > rows["random"]["recall"]
    )
    assert math.isclose(rows["random"]["recall"], 4 / 32, abs_tol=0.05)


def test_what_cannot_be_scored_is_refused(model):
    modes = {"baseline": nullcontext}
    about = SimpleNamespace(is_encoder_decoder=True)
    other = SimpleNamespace(config=about, tokenizer=None)
    for of, how, tasks, said in (
        (model, modes, ("needel",), "no task 'needel'. Did you mean 'needle'"),
        (model, {}, ("loss",), "no mode"),
        (other, modes, ("loss",), "encoder-decoder"),
        (SimpleNamespace(config=model.config, tokenizer=None), modes, ("loss",), "no tokenizer"),
    ):
        with pytest.raises(ValueError, match=said):
            accuracy.compare(of, how, tasks)
