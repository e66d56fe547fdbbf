"""All combinations at once against the sweep, one by one, and what is asked of them against plain
loops."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from moelab.ndp.fit import CHOICES, CLAIMS, FIT, JUDGED, error, nulls
from moelab.ndp.readings import AXES, Readings, readings
from moelab.ndp.sweep import Assumptions, paper_sweep, quantities

FEW = CHOICES | {
    "zipf": (0.4,),
    "bias": (0.6,),
    "mapping": ("ChRaBaRoCo", "stated"),
    "clock_ghz": (0.5, 1.25),
    "efficiency": ((1.0, 1.0), (0.85, 0.8)),
    "averaged": ((2, 6), (2, 4)),
}


@pytest.fixture(scope="module")
def few():
    return readings(FEW, seed=3, prompt=8, answer=5)


def drawn(seed: int) -> Assumptions:
    rng = random.Random(seed)
    return Assumptions(**{name: rng.choice(options) for name, options in FEW.items()})


@pytest.mark.parametrize(
    "assumed",
    [
        drawn(0),
        replace(drawn(1), monde_prefill="none"),
        replace(drawn(2), monde_prefill="none"),
        replace(drawn(4), monde_prefill="tuned", placement="popularity"),
        replace(drawn(5), monde_prefill="share", monde_relieves="busiest", monde_rounding="ceil"),
        replace(
            drawn(6),
            rounding="none",
            limit="memory",
            cached="Fiddler",
            eq2_tokens="prompt",
            monde_prefill="share",
        ),
    ],
)
def test_every_combination_is_the_sweeps(few, assumed):
    sweep = paper_sweep(assumed, units=assumed.averaged, seeds=(3,), prompt=8, answer=5)
    assert few.at(assumed) == pytest.approx(quantities(sweep, 3), rel=1e-9)


def test_what_fits_against_a_loop_over_all():
    """Figures that depend on three assumptions, made up around the published ones."""
    choices = {name: options[:1] for name, options in CHOICES.items()} | {
        name: CHOICES[name][:3] for name in ("zipf", "clock_ghz", "rounding")
    }
    rng, shape = np.random.default_rng(0), [len(options) for options in choices.values()]
    figures = {}
    for i, name in enumerate((*FIT, *JUDGED)):
        axes = [
            size if a in (("zipf", "clock_ghz"), ("rounding",), ("zipf", "rounding"))[i % 3] else 1
            for a, size in zip(AXES, shape)
        ]
        figures[name] = np.mean(CLAIMS[name].ends) * rng.uniform(
            0.95 if i % 3 else 0.88, 1.06, axes
        )
    found = Readings(choices, figures)
    fitting = []
    for options in product(*choices.values()):
        assumed = Assumptions(**dict(zip(AXES, options)))
        values = found.at(assumed)
        if all(CLAIMS[name].agrees(values[name]) for name in FIT):
            fitting.append((assumed, values))
    assert 0 < len(fitting) == found.fits.sum() < found.fits.size
    for name in figures:
        of = [values[name] for _, values in fitting]
        assert found.band(name) == (min(of), max(of))
    assert found.errors.min() == pytest.approx(min(float(error(values)) for _, values in fitting))
    counts = [
        sum(bool(CLAIMS[name].agrees(values[name])) for name in JUDGED) for _, values in fitting
    ]
    assert found.agreement() == {n: counts.count(n) for n in sorted(set(counts))}
    assert found.left()["zipf"] == {
        str(z): sum(a.zipf == z for a, _ in fitting) for z in choices["zipf"]
    }


def test_judged_figures_follow_by_rule():
    """A ratio of the paper's own numbers decides: by hand."""
    paper = {name: CLAIMS[name].value for name in CLAIMS}
    together = paper["decode NDP+TP+LB"] * paper["decode NDP+TP+PRE"] / paper["decode NDP+TP"]
    balanced = paper["prefill NDP+TP"] * paper["decode NDP+TP+LB"] / paper["decode NDP+TP"]
    assert nulls() == pytest.approx(
        {
            "prefill NDP+TP+LB": balanced,
            "decode NDP+TP+LB+PRE": together,
            "Qwen3 prefill": balanced,
            "Qwen3 decode": together,
            "end to end ÷ Fiddler": paper["end to end ÷ MoE-OnDemand"] * 64 / 89.6,
            "end to end ÷ MoNDE": together,
            "DeepSeek, N=2, decode NDP+TP": 0.925,
        }
    )
    assert [name for name in JUDGED if not CLAIMS[name].predicted] == ["Qwen3 decode"]
    for name in JUDGED:
        claim = CLAIMS[name]
        assert claim.verdict(np.mean(claim.ends)) == (
            "follows" if claim.predicted else "reproduced"
        )
