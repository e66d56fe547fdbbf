"""Advice without waiting: samples of a megabyte, a round of each; runs in the test's own
process."""

import math
from functools import cache
from importlib import import_module

import pytest

from moelab.advice import machine, sample, verify
from moelab.bench import profile


@pytest.fixture(autouse=True, scope="session")
def texts_are_played_once():
    """Routing that is assumed of a model of which nothing was recorded is the same each time."""
    module = import_module("moelab.advice.advise")
    assumed, known = module.assumed, cache(module.assumed)

    def once(spec, batch=1, trace=None, calibration=None, model=None):
        ask = known if trace is calibration is None else assumed
        return ask(spec, batch, trace, calibration, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "assumed", once)
        yield


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch):
    monkeypatch.setattr(machine, "SECONDS", 0.0)


@pytest.fixture
def small_samples(monkeypatch):
    monkeypatch.setattr(sample, "SECONDS", 0.01)
    monkeypatch.setattr(sample, "SIZE", 1 << 20)
    monkeypatch.setattr(profile, "MINIMUM", 1)


@pytest.fixture
def in_this_process(small_samples, monkeypatch):
    """What is measured while other tests keep the machine busy is not measured again."""
    monkeypatch.setattr(machine, "DISTURBED", math.inf)
    monkeypatch.setattr(verify, "LOOKED", 0.0)
    monkeypatch.setattr(
        verify,
        "fresh",
        lambda source, options, _, **how: verify.run(source, options, **how) | {"limit": "none"},
    )
