"""The ledger's file is complete, every claim has an answer, and verdicts follow the rules:
hand-made cases."""

import itertools
import json
import math
import re
from math import inf

import pytest

from moelab import claims
from moelab.__main__ import main
from moelab.base.files import CHECKOUT
from moelab.base.papers import paper
from moelab.claims import (
    CONTRADICTED,
    DIRECTION,
    FITTED,
    FOLLOWS,
    NOT_REPRODUCED,
    NOT_TESTABLE,
    REPRODUCED,
    UNANSWERED,
    Claim,
    rows,
)
from notebooks.claims import problems

BASELINES = CHECKOUT / "results"
EFFECT = {"value": 1.2, "tolerance": 0.2, "neutral": 1.0}


def claim(**how):
    """A claim of value 2, answered by a metric."""
    value = {} if {"above", "below"} & how.keys() else {"value": 2.0}
    metric = {} if how.get("needs") or how.get("contradicted") else {"metric": ("n", "x")}
    names = ("source", "title", "id", "where", "text", "hardware", "model")
    return Claim(**dict.fromkeys(names, "s") | {"tolerance": 0.1} | value | metric | how)


@pytest.mark.parametrize(
    "how, found, verdict",
    [
        ({}, 2.1, REPRODUCED),
        ({}, 2.3, NOT_REPRODUCED),
        ({"tolerance": 0.0}, 2.001, NOT_REPRODUCED),
        ({}, None, UNANSWERED),
        ({"value": [1.0, 2.0]}, 0.91, REPRODUCED),
        ({"value": [1.0, 2.0]}, 2.21, NOT_REPRODUCED),
        ({"value": [1.0, inf]}, 1e9, REPRODUCED),
        ({"value": True}, True, REPRODUCED),
        ({"value": "TP"}, "EP", NOT_REPRODUCED),
        (EFFECT, 1.05, NOT_REPRODUCED),  # half of the effect is 0.1
        (EFFECT, 1.29, REPRODUCED),
        (EFFECT | {"either_way": True}, 1.06, DIRECTION),
        (EFFECT | {"either_way": True}, 1.04, NOT_REPRODUCED),  # a fifth of it
        ({"instead": "a small model"}, 2.0, DIRECTION),
        ({"instead": "a small model"}, 3.0, NOT_REPRODUCED),
        ({"above": 1.0}, 1.1, DIRECTION),
        ({"above": 1.0}, 1.0, NOT_REPRODUCED),
        ({"below": 1.0}, 0.9, DIRECTION),
        ({"above": 1.0, "follows": "it is a largest value"}, 1.1, FOLLOWS),
        ({"fitted": "chosen by it"}, 2.1, FITTED),
        ({"fitted": "chosen by it"}, 9.0, NOT_REPRODUCED),
        ({"fitted": "chosen by it", "metric": ()}, None, FITTED),
        ({"follows": "1 + 1"}, 9.0, NOT_REPRODUCED),
        ({"follows": "1 + 1", "metric": ()}, None, FOLLOWS),
        ({"null": "a", "predictor": 2.0}, 2.1, FOLLOWS),
        ({"null": "a", "predictor": 3.0}, 2.1, REPRODUCED),
        ({"needs": "a Mac"}, None, NOT_TESTABLE),
        ({"contradicted": "Table 2 says 3"}, None, CONTRADICTED),
        ({"contradicted": "Table 2 says 3", "metric": ("n", "x")}, 2.0, CONTRADICTED),
    ],
)
def test_verdicts(how, found, verdict):
    assert claim(**how).verdict(found) == verdict


@pytest.mark.parametrize(
    "combine, values, result",
    [
        ("ratio", [6.0, 2.0], 3.0),
        ("ratio", [6.0, 2.0, 3.0, 2.0], 2.0),
        ("least", [3.0, 1.0, 2.0], 1.0),
        ("", [3.0], 3.0),
    ],
)
def test_metrics_become_one_number(combine, values, result):
    names = [f"x{i}" for i in range(len(values))]
    own = {"n": {name: {"value": value, "kind": "exact"} for name, value in zip(names, values)}}
    (row,) = rows([claim(metric=("n", *names), combine=combine)], own=own)
    assert row.ours == result and row.kind == "exact"
    (pattern,) = rows([claim(metric=("n", "x*"), combine="most")], own=own)
    assert pattern.ours == max(values)
    for value in ("none", 0.0):  # no number, or none to divide by: nothing is answered
        own = {"n": {"x": {"value": 1.0, "kind": "exact"}, "y": {"value": value, "kind": "exact"}}}
        (row,) = rows([claim(metric=("n", "x", "y"), combine="ratio")], own=own)
        assert (row.ours, row.verdict) == (None, UNANSWERED)


def test_the_newest_run_with_the_baselines_parameters_counts(tmp_path):
    def write(path, value, **params):
        path.parent.mkdir(parents=True, exist_ok=True)
        metrics = {"x": {"value": value, "unit": "", "kind": "measured"}}
        path.write_text(
            json.dumps({"params": {"smoke": False} | params, "seed": 0, "metrics": metrics})
        )

    one = [claim()]
    assert rows(one, tmp_path)[0].verdict == UNANSWERED
    write(tmp_path / "baseline" / "n.json", 5.0)
    assert rows(one, tmp_path)[0].ours == 5.0
    for name, value in (("1", 1.5), ("2", 2.5), ("3", 2.0), ("4", 9.0), ("5-lab", 8.0)):
        path = tmp_path / "runs" / "n" / name / "metrics.json"
        write(path, value, **{"3": {"trace": ""}, "4": {"smoke": True}}.get(name, {}))
    (row,) = rows(one, tmp_path)
    assert (row.ours, row.verdict) == (2.0, REPRODUCED) and "2" in row.cells


def test_what_is_not_reproduced_needs_a_reason_unless_it_was_measured():
    for kind, reason, fails in (("exact", "", 1), ("exact", "because", 0), ("measured", "", 0)):
        of = claim(reason=reason)
        row = claims.Row(of, 5.0, kind)
        assert row.verdict == NOT_REPRODUCED and len(problems([row])) == fails


def test_claims_of_the_ledger_are_whole():
    names = [(of.source, of.id) for of in claims.ledger()]
    assert len(set(names)) == len(names)
    for of in claims.ledger():
        answered = bool(of.metric or of.fitted or of.follows)
        assert of.id and of.where and of.text
        assert sum(x is not None for x in (of.value, of.above, of.below)) == 1, of.id
        if isinstance(of.value, list):
            low, high = of.value
            assert {type(low), type(high)} <= {int, float} and low <= high, of.id
        if of.either_way:
            assert isinstance(of.value, (int, float)) and of.neutral is not None, of.id
        assert answered or of.needs or of.contradicted, of.id
        assert not (of.needs and answered), of.id
        assert len(of.metric) != 1, of.id  # a notebook or a bench, and then metrics
        assert not of.interval or (len(of.interval), len(of.metric)) == (2, 2), of.id


def test_the_ledger_is_complete():
    """At least 150 claims of five sources; each has an answer in what is committed, or says why
    there is none."""
    answered = rows(results=BASELINES)
    assert len(answered) >= 150 and len({row.claim.source for row in answered}) == 5
    assert problems(answered) == []
    assert sum(claims.counts(answered).values()) == len(answered)
    for row in answered:
        assert row.why or row.verdict in (REPRODUCED, DIRECTION), row.claim.id
        assert not row.claim.instead or row.verdict != REPRODUCED, row.claim.id
        assert not isinstance(row.ours, float) or math.isfinite(row.ours)


@pytest.mark.parametrize(
    "how, by_ours, by_another, verdict",
    [
        ({}, 2.1, 2.0, REPRODUCED),
        ({}, 2.1, 2.9, NOT_REPRODUCED),
        ({"above": 1.0}, 1.1, 0.9, NOT_REPRODUCED),
        ({"above": 1.0}, 1.1, 9.0, DIRECTION),
        ({"fitted": "by it"}, 2.1, 2.9, FITTED),
        ({"follows": "of it"}, 2.1, 2.9, NOT_REPRODUCED),
        ({"follows": "of it"}, 2.1, 2.0, FOLLOWS),
    ],
)
def test_what_holds_by_one_choice_only_is_not_reproduced(how, by_ours, by_another, verdict):
    metric = {"value": by_ours, "kind": "modelled", "readings": {"turned round": by_another}}
    (row,) = rows([claim(**how | {"metric": ("n", "x")})], own={"n": {"x": metric}})
    assert (row.verdict, row.ours, row.readings) == (verdict, by_ours, {"turned round": by_another})
    assert ("turned round" in row.cells[-1]) == (verdict == NOT_REPRODUCED)
    agrees = claim(**how).agrees(by_another)
    assert row.why.endswith(f"{int(agrees)} of 1 other choices agree")


@pytest.mark.parametrize(
    "low, high, verdict",
    [(1.02, 1.2, DIRECTION), (0.98, 1.2, NOT_REPRODUCED), (1.02, None, UNANSWERED)],
)
def test_an_order_must_hold_at_both_ends_of_its_interval(low, high, verdict):
    found = {"x": 1.1, "low": low, "high": high}
    own = {"n": {k: {"value": v, "kind": "measured"} for k, v in found.items() if v}}
    (row,) = rows([claim(above=1.0, interval=("low", "high"))], own=own)
    assert row.verdict == verdict


@pytest.mark.parametrize(
    "how, found, kind, verdict",
    [
        ({"above": 1.0}, 1.04, "measured", NOT_REPRODUCED),
        ({"above": 1.0}, 1.06, "measured", DIRECTION),
        ({"below": 1.0}, 0.97, "measured", NOT_REPRODUCED),
        ({"above": 1.0}, 1.04, "exact", DIRECTION),
        ({"above": 0.0}, 0.01, "measured", DIRECTION),  # of 0 nothing is a share
        ({"above": 1.0, "follows": "of it"}, 1.04, "measured", FOLLOWS),
        ({}, 2.01, "measured", REPRODUCED),  # no order
    ],
)
def test_a_measured_order_that_is_about_level_needs_an_interval(how, found, kind, verdict):
    row = claims.Row(claim(**how), found, kind)
    assert row.verdict == verdict
    assert ("no interval was measured" in row.why) == (verdict == NOT_REPRODUCED)
    low_and_high = {"95 % from": found - 0.005, "95 % to": found + 0.005}
    sure = claims.Row(claim(**how | {"interval": ("a", "b")}), found, kind, low_and_high)
    assert sure.verdict != NOT_REPRODUCED


def test_what_is_quoted_of_a_table_is_in_it():
    """A number of the source's tables, or a ratio of two numbers of the named one."""
    checked = 0
    for of in claims.ledger():
        if not re.fullmatch(r"Table \d+", of.where) or not isinstance(of.value, float):
            continue
        if of.needs:  # of tables that nothing here is held against, only what is used is kept
            continue
        tables = [table for table in paper(of.source).values() if isinstance(table, dict)]
        named = [n for table in tables if table["where"] == of.where for n in numbers(table)]
        every = [n for table in tables for n in numbers(table)]
        digits = len(f"{of.value:g}".partition(".")[2])
        ratios = (a / b for a, b in itertools.permutations(named, 2) if b)
        if named:
            checked += 1
            assert of.value in every or of.value in {round(r, digits) for r in ratios}, of.id
    assert checked >= 7


def numbers(table):
    """Of a table of `data/papers`, whatever its form."""
    rows = table.get("rows", [])
    cells = [table.get("value"), *table.get("values", [])]
    for row in rows.values() if isinstance(rows, dict) else rows:
        cells += row
    return [n for n in cells if isinstance(n, (int, float))]


def test_a_null_is_computed_from_other_claims():
    values = {"one": 1, "two": [2, 4]}
    for null, predictor, verdict in (
        ("two * 8 / two * 3 / two", 8, REPRODUCED),
        ("8 * two / 2", 12, FOLLOWS),
    ):
        found = claims.of_others(null, values)
        assert found == pytest.approx(predictor)
        of = claim(value=12.0, null=null, predictor=found)
        assert of.verdict(12) == verdict
    for wrong in ("four * 2", "two + two", "two *"):
        with pytest.raises((KeyError, ValueError)):
            claims.of_others(wrong, values)


def test_the_command(capsys, results, monkeypatch):
    assert main(["claims", "--check", "--source", "zipmoe"]) == 1
    told = capsys.readouterr().out
    gone = sum(bool(of.metric) for of in claims.ledger() if of.source == "zipmoe")
    assert told.count("FAILED zipmoe/") == gone > 10 and "has no metric exponent_entropy" in told
    monkeypatch.setenv("MOELAB_RESULTS", str(BASELINES))
    assert main(["claims", "--check"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    answered = rows(results=BASELINES)
    assert first == claims.summary(answered) and first.startswith(f"{len(answered)} claims: ")
    assert main(["claims", "--source", "zipmoe"]) == 0
    told = capsys.readouterr().out
    assert "ZipMoE" in told and "NPUMoE" not in told
    with pytest.raises(SystemExit):
        main(["claims", "--source", "zipmo"])
    assert "Did you mean 'zipmoe'? There are: npumoe" in capsys.readouterr().err
