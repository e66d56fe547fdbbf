"""Files from elsewhere: whatever is wrong with one, it is refused in a ValueError that names it, or
it is loaded right.

A valid file of every kind is changed in every way that one thinks of: a part is missing, of another
type, too large, negative, not finite, nested, there twice; the file is cut off, empty, of another
kind. Which of them may be loaded, and as what, is judged by loops over what was loaded."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from argparse import Namespace
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moelab import claims
from moelab.__main__ import main
from moelab.ane.plan import ANEPlan, make_plan
from moelab.api import make_predictor
from moelab.base.files import read_json, write_json
from moelab.base.schema import checked, parse_json, typed
from moelab.base.specs import MoESpec
from moelab.calibration import Calibration, calibrate
from moelab.cards import load_device
from moelab.checkpoint.opening import open_checkpoint, spec_of
from moelab.comparison import MetricsFile
from moelab.lab.runner import inspect, tagged
from moelab.models.identity import identity
from moelab.speculate import DefaultVectors, Estimator, default_vectors
from moelab.trace import RoutingTrace
from notebooks import compare
from notebooks.check import compare as checked_against
from tests.depth import depth
from tests.models import tiny
from tests.test_trace import random_trace

pytestmark = pytest.mark.filterwarnings("ignore")
NUMBERS = [-1, 0, 1, -0.5, 2**70, -(2**70), 10**400, 1e300, math.nan, math.inf, -math.inf]
WORDS = ["", "x", "nan", "\ud800", "../../../etc/passwd", "<img src=x>"]
NESTED = [[], [[]], {}, {"": None}, [None], ["x"] * 3, [1, [2, [3]]]]
#: what stands in the place of any value of JSON
VALUES = [None, True, False, *NUMBERS, *WORDS, *NESTED]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_checkpoint(tiny.save("mixtral", tmp_path_factory.mktemp("model")))


def finite(values):
    assert all(math.isfinite(value) for value in values)


# ---------------------------------------------------------------------------------------------
# of each kind: what writes a valid file, and what loads and judges any


def trace_file(path, model):
    random_trace(7, 2, 5, 2).save(path)


def as_trace(path, model):
    trace = RoutingTrace.load(path)
    assert 0 <= trace.ids.min() <= trace.ids.max() <= trace.spec.E
    finite(trace.weights.float().flatten().tolist())
    assert set(trace.phase.tolist()) <= {0, 1}
    assert min([0, *trace.sequence.tolist(), *trace.tokens.tolist()]) == 0
    assert trace.counts().sum() <= trace.ids.numel() and repr(trace)


def calibration_file(path, model):
    calibrate(random_trace(7, 2, 5, 2)).save(path)


def as_calibration(path, model):
    found = Calibration.load(path)
    counts, spec = found.counts_by_phase, found.spec
    assert counts.shape == (2, spec.L, spec.E) and counts.min() >= 0 and counts.sum() > 0
    for phase, tokens in zip(counts.tolist(), found.tokens):
        assert all(sum(layer) <= tokens * spec.K for layer in phase)
    assert repr(found)


def estimator_file(path, model):
    spec = spec_of(model)
    estimator = Estimator(spec.H, spec.E, spec.L, 8, model_id=identity(model))
    estimator.vectors = default_vectors(model, [[5, 9]])
    estimator.choice = (True,) * spec.L
    estimator.save(path)


def as_estimator(path, model):
    found = Estimator.load(path)
    if found.vectors and found.choice:
        fits(model, "hybrid", estimator=found, choice=found.choice, vectors=found.vectors)
    finite(found(torch.ones(2, found.config["H"]), 0).flatten().tolist())


def fits(model, name, **parts):
    """What a file gave makes a predictor of the model, or is refused as another's."""
    try:
        make_predictor(model, name, **parts)
    except ValueError as error:
        assert re.search("of another model|damaged|choice has", str(error))


def vectors_file(path, model):
    default_vectors(model, [[5, 9]]).save(path)


def as_vectors(path, model):
    fits(model, "quasi", vectors=DefaultVectors.load(path))


def plan_file(path, model):
    spec = MoESpec("small", "test", 2, (0, 1), E=4, K=2, H=8, I=16, heads=2, kv_heads=1, head_dim=4)
    make_plan(spec, np.ones((2, 4)), 4, 16).save(path)


def as_plan(path, model):
    plan = ANEPlan.load(path)
    for layer in plan.layers:
        assert sorted(e for group in layer.groups for e in group.experts) == [*range(plan.spec.E)]
    assert plan.describe() and plan.slots >= 0


def metrics_file(path, model):
    (path.parent / "figures").mkdir(exist_ok=True)
    figure = {"caption": "c", "alt": "a", "figure": {"data": [], "layout": {}}}
    write_json(path.parent / "figures" / "a.json", figure)
    metrics = {
        "x": {"value": 1.5, "unit": "s", "kind": "exact", "readings": {"other": 2.0}},
        "y": {"value": "word", "unit": "", "kind": "measured", "tolerance": 0.1},
    }
    document = {"params": {"smoke": True}, "seed": 0, "metrics": metrics}
    document["takeaways"] = [{"text": "t", "numbers": {}}]
    document["figures"] = {"a": {"file": "figures/a.json", "caption": "c"}}
    write_json(path, document | {"tables": {"t": [["h"], ["1"]]}})


def as_metrics(path, model):
    found = read_json(path, MetricsFile)
    for metric in found["metrics"].values():
        assert isinstance(metric["value"], str) or math.isfinite(metric["value"])
    checked_against(found, found), claims.rows(results=path.parents[2])
    assert compare.main(Namespace(runs=[path.parent, path.parent])) == 0


def notebook_file(path, model):
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["a: int = 1"]}
    cell |= {"outputs": [], "execution_count": None, "id": "a"}
    write_json(path, {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]})


def as_notebook(path, model):
    inspect(path), tagged(path, "side-by-side")


def device_file(path, model):
    path.write_text(
        'name = "Mine"\n[figures.memory_gb]\nvalue = 8\nunit = "GB"\nkind = "measured"\nsource = "me"\n'
    )


def as_device(path, model):
    finite(figure.value for figure in load_device(path).figures.values())


TENSORS = {
    "trace": (trace_file, as_trace),
    "calibration": (calibration_file, as_calibration),
    "estimator": (estimator_file, as_estimator),
    "vectors": (vectors_file, as_vectors),
}
OBJECTS = {
    "plan.json": (plan_file, as_plan),
    "metrics.json": (metrics_file, as_metrics),
    "n.ipynb": (notebook_file, as_notebook),
}
TEXTS = {"device.toml": (device_file, as_device)}
KINDS = TENSORS | OBJECTS | TEXTS


def valid(kind, folder, model):
    """(the path of a valid file, what loads and judges it)."""
    make, judge = KINDS[kind]
    path = folder / "runs" / "n" / "1" / (kind if "." in kind else f"{kind}.safetensors")
    path.parent.mkdir(parents=True)
    make(path, model)
    return path, judge


def refused(path, judge, model, what):
    """Whether it is refused, by its name; else it was loaded as it may be."""
    try:
        judge(path, model)
    except (ValueError, FileNotFoundError) as error:
        assert str(path) in str(error) and len(str(error)) < 2000, (what, error)
        return True
    return False


# ---------------------------------------------------------------------------------------------
# what may be wrong with any file


@pytest.mark.parametrize("kind", KINDS)
def test_only_whole_files_of_their_kind_are_loaded(kind, tmp_path, model):
    path, judge = valid(kind, tmp_path, model)
    judge(path, model)
    whole, lenient = path.read_bytes(), kind in TEXTS  # TOML that ends early can be whole
    for cut in {0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 3}:
        path.write_bytes(whole[:cut])
        assert refused(path, judge, model, cut) or lenient, cut
    others = [b"\0" * 64, b"[" * 100_000, b'{"a":' * 20_000, b"\xff\xfe{}", b"null", b"[]", b"{}"]
    others += [b"1e999", b'{"format": 1}', b"\x93NUMPY\x01\x00", b"\xe9", b"a = " + b"[" * 50_000]
    for other in others:
        path.write_bytes(other)
        assert refused(path, judge, model, other[:20]), other[:20]
    for elsewhere, (make, _) in KINDS.items():
        make(path, model)
        assert elsewhere == kind or refused(path, judge, model, elsewhere), elsewhere
    path.unlink()
    with pytest.raises((FileNotFoundError, ValueError), match=path.name):
        judge(path, model)


def places(value, at=()):
    """The paths of all parts of JSON."""
    yield at
    if isinstance(value, (dict, list)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*at, key))


def mutants(document, seed, count):
    """`count` copies of a document with one part changed or gone, each with what was done."""
    every = [(at, value, False) for at in places(document) for value in VALUES]
    every += [(at, None, True) for at in places(document) if at]
    for at, value, gone in random.Random(seed).sample(every, min(count, len(every))):
        whole = inner = [json.loads(json.dumps(document))]
        for key in (0, *at)[:-1]:
            inner = inner[key]
        if gone:
            del inner[at[-1]]
        else:
            inner[(0, *at)[-1]] = value
        yield (at, value, gone), whole[0]


@pytest.mark.parametrize("kind", OBJECTS)
def test_json_that_is_wrong_anywhere_is_refused_or_right(kind, tmp_path, model):
    path, judge = valid(kind, tmp_path, model)
    text = path.read_text()
    document = json.loads(text)
    for what, other in mutants(document, 0, depth(80, 10**6)):
        path.write_text(json.dumps(other))  # with what JSON has not: NaN, lone surrogates
        refused(path, judge, model, what)
    for key in document:
        path.write_text(json.dumps(document)[:-1] + f', "{key}": null}}')
        assert refused(path, judge, model, f"{key} twice")


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_are_wrong_anywhere_are_refused_or_right(kind, tmp_path, model):
    path, judge = valid(kind, tmp_path, model)
    with safe_open(path, "pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    count = 0
    for name, tensor in tensors.items():
        others = [tensor[:0], tensor[:-1], torch.cat([tensor, tensor[:1]]), tensor[None]]
        others += [tensor.flatten(), tensor > 0, torch.tensor(1), torch.zeros_like(tensor)]
        dtypes = torch.float64, torch.float16, torch.uint8, torch.int64
        others += [-tensor - 1, *(tensor.to(dtype) for dtype in dtypes)]
        hostile = (math.nan, math.inf, -math.inf)
        if not tensor.is_floating_point():
            hostile = (torch.iinfo(tensor.dtype).max, torch.iinfo(tensor.dtype).min)
        for value in hostile:
            others.append(tensor.clone().contiguous())
            others[-1].view(-1)[-1] = value
        changed = [tensors | {name: other.contiguous()} for other in others]
        for i, other in enumerate([{k: v for k, v in tensors.items() if k != name}, *changed]):
            save_file(other, path, about)
            count += refused(path, judge, model, (name, i))
    assert count > 6 * len(tensors)
    for name, text in about.items():
        save_file(tensors, path, {key: value for key, value in about.items() if key != name})
        assert refused(path, judge, model, f"without {name}")
        try:
            document = json.loads(text)
        except ValueError:
            document = text
        for what, other in mutants(document, name, depth(12, 10**6)):
            for said in (json.dumps(other), str(other)[:50]):
                save_file(tensors, path, about | {name: said.encode(errors="replace").decode()})
                refused(path, judge, model, (name, what))


@pytest.mark.parametrize("kind", TEXTS)
def test_toml_that_is_wrong_anywhere_is_refused_or_right(kind, tmp_path, model):
    path, judge = valid(kind, tmp_path, model)
    lines = path.read_text().splitlines()
    values = ["nan", "inf", "-1", "0", '""', "[]", "{}", "true", "[1, nan]", "1979-05-27", "9" * 30]
    values += ["[nan, 1]", '[["x"]]', "[inf, inf]", '"i / 0"']
    for i, line in enumerate(lines):
        key = line.partition(" = ")[0]
        for new in ([], [line, line], *([f"{key} = {value}"] for value in values)):
            path.write_text("\n".join([*lines[:i], *new, *lines[i + 1 :]]))
            refused(path, judge, model, (line, new))


@pytest.mark.parametrize(
    "command", ["run {}", "run {} --list", "sweep {} --grid a=1", "reproduce {}"]
)
def test_what_is_no_notebook_is_one_line(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MOELAB_RESULTS", str(tmp_path / "results"))
    path = tmp_path / "broken.ipynb"
    for content in ("", "[]", '{"cells": []}', '{"nbformat": 4, "metadata": {}, "cells": [{}]}'):
        path.write_text(content)
        assert main(command.format(path).split()) == 2
        told = capsys.readouterr().err.strip().splitlines()
        assert len(told) == 1 and "broken.ipynb is no readable notebook" in told[0]


def test_annotations_mean_what_they_say():
    """Against a table of what each admits."""
    cases = {
        int: [0, -5, 2**63 - 1],
        float: [0, 1.5, -1e300],
        str: ["", "x"],
        bool: [True],
        list[int]: [[], [1]],
        tuple[int, str]: [[1, "a"]],
        dict[str, float]: [{}, {"a": 1}],
        int | None: [None, 3],
        MoESpec: [asdict(MoESpec("n", "t", 1, (0,), 2, 1, 4, 4))],
    }
    none = [math.nan, math.inf, 10**400, {"a": math.nan}, [math.inf], ["x"], object(), [1, 2, 3.5]]
    for annotation, good in cases.items():
        assert [typed(json.loads(json.dumps(value)), annotation) is not Ellipsis for value in good]
        for value in none:
            with pytest.raises(ValueError):
                typed(value, annotation)
    with pytest.raises(ValueError, match="64 bits"):
        typed(2**63, int)
    for text in ("[1, NaN]", "Infinity", '{"a": 1, "a": 1}', "[" * 100_000 + "]" * 100_000, ""):
        with pytest.raises(ValueError):
            parse_json(text)
    with pytest.raises(ValueError, match=r"a\[1\].b is 'x'; it must be a whole number"):
        typed({"a": [{"b": 1}, {"b": "x"}]}, dict[str, list[dict[str, int]]])
    with pytest.raises(ValueError, match="w is float32 .2.; it must be int64 .any, 3."):
        checked({"w": torch.ones(2)}, "w", ("int64",), (None, 3))


def test_the_arena_imports_nothing_but_a_class_of_this_folder(tmp_path, monkeypatch, capsys):
    pytest.importorskip("anywidget")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "mine.py").write_text(
        "number = 3\nclass Empty: pass\nclass Policy:\n  def touch(self, key, step): pass\n"
        "  def victim(self, resident): return next(iter(resident))\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "json.py").write_text("class A: pass\n")
    bad = (
        "os:system os.path:join numpy:array mine mine: mine:Nothing mine:number mine:Empty broken:A"
    )
    for text in [*bad.split(), "json:A", "../mine:Policy"]:
        assert main(["arena", text]) == 2
        assert "the arena is of a class, as in" in capsys.readouterr().err
