"""Files from elsewhere: whatever is wrong with one, it is refused in a ValueError that names it, or
it is loaded right.

A valid file of every kind is changed in every way that one thinks of: a part is missing, of another
type, too large, negative, not finite, nested, there twice; the file is cut off, empty, of another
kind. Which of them may be loaded, and as what, is judged by loops over what was loaded."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moelab import claims
from moelab.__main__ import main
from moelab.advice.simulated import FORMAT, kept_look
from moelab.advice.verify import sensible
from moelab.ane.device.published import TABLE_5
from moelab.ane.device.timing import load_samples, save_samples
from moelab.ane.plan import ANEPlan, make_plan
from moelab.bench.profile import Profile
from moelab.calibration import Calibration, calibrate
from moelab.cards import load_device
from moelab.checkpoint.opening import open_checkpoint, spec_of
from moelab.comparison import compare
from moelab.files import CHECKOUT, read_json, write_json
from moelab.lab.check import compare as checked_against
from moelab.lab.runner import inspect, is_side_by_side
from moelab.models.identity import identity
from moelab.records import BenchFile, FigureFile, MetricsFile, RunFile
from moelab.schema import checked, parse_json, typed
from moelab.simulation.costs import Delays, Machine
from moelab.specs import MoESpec
from moelab.speculate.estimator import Estimator
from moelab.speculate.next_token import NextToken
from moelab.speculate.signals import DefaultVectors
from moelab.trace import RoutingTrace
from tests.depth import depth
from tests.models import tiny
from tests.test_trace import random_trace

pytestmark = pytest.mark.filterwarnings("ignore")
#: what stands in the place of any value of JSON
VALUES = [
    None,
    True,
    False,
    -1,
    0,
    1,
    -0.5,
    2**70,
    -(2**70),
    10**400,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "nan",
    "\ud800",
    [],
    [[]],
    {},
    {"": None},
    [None],
    ["x"] * 3,
    [1, [2, [3]]],
    "../../../etc/passwd",
    "<img src=x>",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_checkpoint(tiny.save("mixtral", tmp_path_factory.mktemp("model")))


def finite(*values):
    assert all(math.isfinite(value) for value in values)


def as_trace(path, model):
    trace = RoutingTrace.load(path)
    spec = trace.spec
    assert all(0 <= e <= spec.E for token in trace.ids.tolist() for layer in token for e in layer)
    finite(*trace.weights.float().flatten().tolist())
    assert (
        set(trace.phase.tolist()) <= {0, 1}
        and min([0, *trace.sequence.tolist(), *trace.tokens.tolist()]) == 0
    )
    assert trace.counts().sum() <= len(trace) * spec.L * spec.K and trace.summary()


def as_calibration(path, model):
    found = Calibration.load(path)
    counts = found.counts_by_phase.tolist()
    assert (
        all(n >= 0 for phase in counts for layer in phase for n in layer)
        and found.counts().sum() > 0
    )
    assert all(
        sum(layer) <= found.tokens[i] * found.spec.K
        for i, phase in enumerate(counts)
        for layer in phase
    )
    assert np.shape(counts) == (2, found.spec.L, found.spec.E) and found.summary()


def as_vectors(path, model):
    found = DefaultVectors.load(path, model)
    finite(*found.d.flatten().tolist(), *found.shared.flatten().tolist())
    assert (
        found.layer_default(0, torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)).shape
        == found.shared[:1].shape
    )


def as_next_token(path, model):
    found = NextToken.load(path, model)
    H = found.W.shape[1] - found.W.shape[2] - 1
    finite(
        *found.expected(
            0, np.ones((1, H), np.float32), np.ones(found.shape[1], np.float32)
        ).tolist()
    )
    assert 0 <= found.discount < 1 and found.half_life > 0


def as_estimator(path, model):
    found = Estimator.load(path, model)
    finite(*found(torch.ones(2, found.config["H"]), 0).flatten().tolist())


def as_profile(path, model):
    found = Profile.load(path)
    machine = found.machine
    finite(machine.delays.decode, machine.delays.expert_base, *machine.other, *machine.head)
    assert machine.delays.miss_read > 0 and found.table() and repr(found)


def as_plan(path, model):
    plan = ANEPlan.load(path)
    for layer in plan.layers:
        assert sorted(e for group in layer.groups for e in group.experts) == list(
            range(plan.spec.E)
        )
    assert plan.describe() and plan.weight_bytes >= 0


def as_samples(path, model):
    samples, device = load_samples(path)
    finite(*(s.ms for s in samples))
    assert all(s.ms > 0 and s.G > 0 for s in samples) and isinstance(device, str)


def as_metrics(path, model):
    found = read_json(path, MetricsFile)
    for metric in found["metrics"].values():
        assert isinstance(metric["value"], str) or math.isfinite(metric["value"])
    checked_against(found, found), claims.rows(results=path.parents[2])
    assert compare(path.parent, path.parent).cells is not None


def as_device(path, model):
    finite(*(figure.value for figure in load_device(path).figures.values()))


def as_ledger(path, model):
    for claim in claims.load(path):
        assert claim.said is not None and claim.verdict(1.0) in claims.VERDICTS


def as_notebook(path, model):
    inspect(path), is_side_by_side(path)


def counted(path):
    pytest.importorskip("anywidget")
    from moelab.viz.views import treemap

    return treemap.counted(path)


def as_counts(path, model):
    found = counted(path)
    assert found.ndim == 2 and (found >= 0).all() and np.isfinite(found.sum())


def trace_file(path, model):
    return random_trace(7, 2, 5, 2).save(path)


def calibration_file(path, model):
    return calibrate(random_trace(7, 2, 5, 2)).save(path)


def vectors_file(path, model):
    spec = spec_of(model)
    return DefaultVectors(
        torch.randn(spec.L, spec.E, spec.H),
        torch.randn(spec.L, spec.H),
        torch.ones(spec.L, spec.E, dtype=torch.long),
        False,
        identity(model),
    ).save(path)


def next_token_file(path, model):
    spec = spec_of(model)
    return NextToken(
        torch.randn(spec.L, spec.H + spec.E + 1, spec.E), 16.0, 0.5, identity(model)
    ).save(path)


def estimator_file(path, model):
    spec = spec_of(model)
    return Estimator(spec.H, spec.E, spec.L, 8, model_id=identity(model)).save(path)


def profile_file(path, model):
    machine = Machine(
        Delays(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, e_bytes=4, sm_bytes=4), decide=((1, 0.1),)
    )
    names = ("m", "raw", "float32", "direct", 1, "now", "here")
    return Profile(machine, 0.2, 8, 1e9, {"float32": 1e9}, *names, 0.5, 0.1, 2000.0).save(path)


def plan_file(path, model):
    return make_plan(
        MoESpec("small", "test", 2, (0, 1), E=4, K=2, H=8, I=16, heads=2, kv_heads=1, head_dim=4),
        np.ones((2, 4)),
        4,
        16,
    ).save(path)


def samples_file(path, model):
    return save_samples(path, TABLE_5[:3], "a Mac")


def metrics_file(path, model):
    (path.parent / "figures").mkdir(exist_ok=True)
    write_json(
        path.parent / "figures" / "a.json",
        {"caption": "c", "alt": "a", "figure": {"data": [], "layout": {}}},
    )
    return write_json(
        path,
        {
            "params": {"smoke": True},
            "seed": 0,
            "takeaways": [{"text": "t", "numbers": {}}],
            "metrics": {
                "x": {"value": 1.5, "unit": "s", "kind": "exact", "readings": {"other": 2.0}},
                "y": {"value": "word", "unit": "", "kind": "measured", "tolerance": 0.1},
            },
            "figures": {"a": {"file": "figures/a.json", "caption": "c"}},
            "tables": {"t": [["h"], ["1"]]},
        },
    )


def notebook_file(path, model):
    cell = {
        "cell_type": "code",
        "metadata": {"tags": ["parameters"]},
        "source": ["a: int = 1"],
        "outputs": [],
        "execution_count": None,
        "id": "a",
    }
    return write_json(path, {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]})


def device_file(path, model):
    path.write_text(
        'name = "Mine"\n[figures.memory_gb]\nvalue = 8\nunit = "GB"\nkind = '
        '"measured"\nsource = "me"\n'
    )
    return path


def ledger_file(path, model):
    path.write_text(
        '[source.a]\ntitle = "A"\nhardware = "h"\nmodel = "m"\n[[a]]\nid = "i"\nwhere = '
        '"w"\ntext = "t"\nvalue = 2.0\ntolerance = 0.1\nmetric = ["n", "x"]\n[[a]]\nid = '
        '"j"\nwhere = "w"\ntext = "t"\nvalue = [1, 2]\nnull = "i * 2"\nfollows = "x"\nmetric '
        '= ["n", "y"]\n'
    )
    return path


def counts_file(path, model):
    np.save(path, np.ones((2, 3), int))
    return path


TENSORS = {
    "trace": (trace_file, as_trace),
    "calibration": (calibration_file, as_calibration),
    "vectors": (vectors_file, as_vectors),
    "next-token": (next_token_file, as_next_token),
    "estimator": (estimator_file, as_estimator),
}
OBJECTS = {
    "profile.json": (profile_file, as_profile),
    "plan.json": (plan_file, as_plan),
    "samples.json": (samples_file, as_samples),
    "metrics.json": (metrics_file, as_metrics),
    "n.ipynb": (notebook_file, as_notebook),
}
TEXTS = {"device.toml": (device_file, as_device), "claims.toml": (ledger_file, as_ledger)}
KINDS = TENSORS | OBJECTS | TEXTS | {"counts.npy": (counts_file, as_counts)}


def valid(kind, folder, model):
    """(the path of a valid file, what loads and judges it)."""
    make, judge = KINDS[kind]
    path = folder / "runs" / "n" / "1" / (kind if "." in kind else f"{kind}.safetensors")
    path.parent.mkdir(parents=True)
    return make(path, model), judge


def judged(path, judge, model, what):
    """Refused by its name, or loaded as it may be."""
    try:
        judge(path, model)
    except (ValueError, FileNotFoundError) as error:
        assert str(path) in str(error) and len(str(error)) < 2000, (what, error)
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_valid_file_is_loaded(kind, tmp_path, model):
    path, judge = valid(kind, tmp_path, model)
    judge(path, model)
    path.unlink()
    with pytest.raises((FileNotFoundError, ValueError), match=path.name):
        judge(path, model)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_whole_file_of_its_kind_is_refused(kind, tmp_path, model):
    path, judge = valid(kind, tmp_path, model)
    whole = path.read_bytes()
    for cut in {0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 3}:
        path.write_bytes(whole[:cut])
        refused = judged(path, judge, model, cut)
        assert refused or kind in TEXTS, cut  # TOML that ends early can be whole
    for other in (
        b"\0" * 64,
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b"\xff\xfe{}",
        b"null",
        b"[]",
        b"{}",
        b'"x"',
        b"1e999",
        b'{"format": 1}',
        b"\x93NUMPY\x01\x00",
        "é".encode("latin-1"),
        b"a = " + b"[" * 50_000,
    ):
        path.write_bytes(other)
        refused = judged(path, judge, model, other[:20])
        assert refused or kind == "claims.toml"  # no claims are no fault
    for elsewhere, (make, _) in KINDS.items():
        if elsewhere != kind:
            make(path, model)
            assert judged(path, judge, model, elsewhere) or kind == "claims.toml"


def places(value, at=()):
    """The paths of all parts of JSON."""
    yield at
    for key, one in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from places(one, (*at, key))


def changed(document, at, value, gone=False):
    """A copy with another value at a place, or without it."""
    document = json.loads(json.dumps(document))
    if not at:
        return value
    inner = document
    for key in at[:-1]:
        inner = inner[key]
    if gone:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return document


def mutants(document, seed, count):
    """Documents with one part changed, gone, or repeated in itself; `count` of them."""
    draw = random.Random(seed)
    every = [(at, value, False) for at in places(document) for value in VALUES]
    every += [(at, None, True) for at in places(document) if at]
    for at, value, gone in draw.sample(every, min(count, len(every))):
        yield (at, value, gone), changed(document, at, value, gone)


def as_text(document):
    """JSON with what JSON has not: NaN, lone surrogates."""
    return json.dumps(document).encode()


@pytest.mark.parametrize("kind", OBJECTS)
def test_json_that_is_wrong_anywhere_is_refused_or_right(kind, tmp_path, model):
    path, judge = valid(kind, tmp_path, model)
    document = json.loads(path.read_text())
    for what, other in mutants(document, 0, depth(250, 10**6)):
        path.write_bytes(as_text(other))
        judged(path, judge, model, what)
    text = json.dumps(document)
    for key in document:
        path.write_text(text[:-1] + f', "{key}": null}}')
        assert judged(path, judge, model, f"{key} twice")


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_are_wrong_anywhere_are_refused_or_right(kind, tmp_path, model):
    path, judge = valid(kind, tmp_path, model)
    with safe_open(path, "pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    refused = 0
    for name, tensor in tensors.items():
        last = tensor.flatten().clone()
        others = [
            None,
            tensor[:0],
            tensor[:-1],
            torch.cat([tensor, tensor[:1]]),
            tensor[None],
            tensor.flatten(),
            tensor.double(),
            tensor.half(),
            tensor.to(torch.uint8),
            tensor.to(torch.int64),
            tensor > 0,
            torch.tensor(1),
            torch.zeros_like(tensor),
            -tensor - 1,
        ]
        hostile = (
            (math.nan, math.inf, -math.inf)
            if tensor.is_floating_point()
            else (-1, torch.iinfo(tensor.dtype).max, torch.iinfo(tensor.dtype).min)
        )
        for value in hostile:
            last[-1] = value if value != -1 or tensor.dtype != torch.uint8 else 255
            others.append(last.view_as(tensor).clone())
        for i, other in enumerate(others):
            save_file(
                {
                    key: value.contiguous()
                    for key, value in (tensors | {name: other}).items()
                    if value is not None
                },
                path,
                about,
            )
            refused += judged(path, judge, model, (name, i))
    assert refused > 6 * len(tensors)
    draw = random.Random(0)
    for name, text in about.items():
        save_file(tensors, path, {key: value for key, value in about.items() if key != name})
        assert judged(path, judge, model, f"without {name}")
        try:
            document = json.loads(text)
        except ValueError:
            document = text
        for what, other in mutants(document, draw.random(), depth(40, 10**6)):
            for said in (json.dumps(other), str(other)[:50]):
                save_file(tensors, path, about | {name: said.encode(errors="replace").decode()})
                judged(path, judge, model, (name, what))


@pytest.mark.parametrize("kind", TEXTS)
def test_toml_that_is_wrong_anywhere_is_refused_or_right(kind, tmp_path, model):
    path, judge = valid(kind, tmp_path, model)
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        key = line.partition(" = ")[0]
        for value in (
            "nan",
            "inf",
            "-1",
            "0",
            '""',
            "[]",
            "{}",
            "true",
            "[1, nan]",
            "[nan, 1]",
            "1979-05-27",
            "9" * 30,
            '[["x"]]',
            "[inf, inf]",
            '"i / 0"',
        ):
            path.write_text("\n".join([*lines[:i], f"{key} = {value}", *lines[i + 1 :]]))
            judged(path, judge, model, (line, value))
        path.write_text("\n".join([*lines[:i], *lines[i + 1 :]]))
        judged(path, judge, model, f"without {line}")
        path.write_text("\n".join([*lines[: i + 1], *lines[i:]]))
        judged(path, judge, model, f"twice {line}")


@pytest.mark.parametrize(
    "array",
    [
        np.ones(3),
        np.ones((1, 2, 3)),
        -np.ones((2, 3)),
        np.full((2, 3), np.nan),
        np.zeros((2, 3)),
        np.array([["a"]]),
        np.full((2, 3), np.inf),
        np.ones((2, 3), complex),
        np.array([[None]]),
        np.ones((0, 3)),
        np.array(3),
    ],
)
def test_counts_that_are_none_are_refused(array, tmp_path):
    np.save(tmp_path / "c.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match="c.npy is no readable array of expert counts"):
        counted(tmp_path / "c.npy")


@pytest.mark.parametrize(
    "shape, document",
    [
        (
            RunFile,
            {
                "parameters": {},
                "seconds": 1.0,
                "peak_anonymous_bytes": 5,
                "env": {
                    "git": None,
                    "versions": {"a": "1"},
                    "device": "cpu",
                    "cpu": "x",
                    "cores": 2,
                },
            },
        ),
        (FigureFile, {"caption": "c", "alt": "a", "figure": {"data": [{}], "layout": {}}}),
        (BenchFile, {"bench": "b", "kind": "exact", "results": {}}),
    ],
)
def test_what_a_run_keeps_is_of_one_form(shape, document, tmp_path):
    path = write_json(tmp_path / "f.json", document)
    assert read_json(path, shape) == document
    for key in document:
        path.write_text(
            json.dumps({name: value for name, value in document.items() if name != key})
        )
        optional = key == "peak_anonymous_bytes"
        assert judged(path, lambda path, _: read_json(path, shape), None, key) != optional
    for what, other in mutants(document, 0, 400):
        path.write_bytes(as_text(other))
        judged(path, lambda path, _: read_json(path, shape), None, what)


@pytest.mark.parametrize(
    "command",
    [["run", "{}", "--list"], ["run", "{}"], ["sweep", "{}", "--grid", "a=1"], ["reproduce", "{}"]],
)
@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"cells": []}',
        '{"nbformat": 3, "worksheets": []}',
        '{"nbformat": 4, "metadata": {}, "cells": [{}]}',
        '{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "code", "source": 1}]}',
    ],
)
def test_what_is_no_notebook_is_one_line(command, content, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MOELAB_RESULTS", str(tmp_path / "results"))
    path = tmp_path / "broken.ipynb"
    path.write_text(content)
    assert main([word.format(path) for word in command]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and "broken.ipynb is no readable notebook" in told[0]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"nbformat": 3, "worksheets": 5}'])
def test_the_git_filter_says_what_is_no_notebook(content):
    pytest.importorskip("nbstripout")
    done = subprocess.run(
        [sys.executable, "-m", "moelab.lab.strip"],
        input=content,
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        timeout=60,
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr and "otebook" in done.stderr


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
        MoESpec: [MoESpec("n", "t", 1, (0,), 2, 1, 4, 4).to_dict()],
    }
    for annotation, good in cases.items():
        assert [typed(json.loads(json.dumps(value)), annotation) is not Ellipsis for value in good]
        for value in (
            math.nan,
            math.inf,
            10**400,
            {"a": math.nan},
            [math.inf],
            ["x"],
            object(),
            [1, 2, 3.5],
        ):
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


def test_kept_measurements_that_make_no_sense_count_as_not_made(tmp_path):
    """Of a look at a model: negative, NaN, absurd, of another geometry; and lines of the journal of
    measurements."""
    spec = MoESpec("m", "t", 2, (0, 1), E=4, K=2, H=8, I=8)
    look = {
        "format": FORMAT,
        "steps": [[[0, [[3, 1]]], [1, [[0, 2]]]]] * 2,
        "forwards": [[5, "prefill"], [1, "decode"]],
        "recall": 0.5,
        "ttft": 0.1,
        "tpot": [0.2],
        "peak": 10**9,
        "limit": "",
        "memory": 1,
        "context": 1,
        "batch": 1,
        "late": 0.0,
    }
    profile, file, asked = (
        profile_file(tmp_path / "p.json", None),
        tmp_path / "l.json",
        SimpleNamespace(spec=spec),
    )
    write_json(file, look)
    found, itself = kept_look(file, profile, asked)
    assert found["late"] == 0 and itself == Profile.load(profile)
    for at, value in (
        (("tpot", 0), -0.2),
        (("tpot", 0), math.nan),
        (("ttft",), 0),
        (("steps", 0, 0, 1, 0, 0), 4),
        (("steps", 0, 0, 0), 2),
        (("steps", 0, 0, 1, 0, 1), -1),
        (("format",), "x"),
        (("tpot",), []),
        (("forwards", 0, 1), "else"),
        (("forwards",), []),
    ):
        file.write_bytes(as_text(changed(look, at, value)))
        assert kept_look(file, profile, asked) is None, (at, value)
    for what, other in mutants(look, 1, depth(200, 10**6)):
        file.write_bytes(as_text(other))
        if (kept := kept_look(file, profile, asked)) is not None:
            assert min(kept[0]["tpot"]) > 0 and kept[0]["ttft"] > 0 and kept[0]["batch"] >= 1, what
    write_json(file, look)
    profile.write_text(profile.read_text().replace("0.1", "-0.1", 1))
    assert kept_look(file, profile, asked) is None
    record = {
        "machine": "a",
        "model": "b",
        "settings": {"form": "bf12"},
        "batch": 1,
        "predicted": 0.1,
        "tpot": 0.2,
        "ttft": 0.1,
        "peak": 1,
        "limit": "",
        "loss": [0.01, 0.001],
        "when": "now",
        "load": 0.1,
    }
    assert sensible(record) and sensible(record | {"loss": None, "predicted": None})
    for key, value in (
        ("tpot", -1),
        ("tpot", math.nan),
        ("tpot", 0),
        ("predicted", -0.1),
        ("loss", [1]),
        ("batch", 0),
        ("settings", {}),
        ("machine", None),
        ("loss", "x"),
    ):
        assert not sensible(record | {key: value}), (key, value)
    assert not any(map(sensible, (None, [], {}, "x", 1)))


@pytest.mark.parametrize(
    "text",
    [
        "os:system",
        "subprocess:Popen",
        "os.path:join",
        "numpy:array",
        "mine",
        "mine:",
        "mine:Nothing",
        "mine:number",
        "mine:Empty",
        "broken:A",
        "json:A",
        "../mine:Policy",
    ],
)
def test_the_arena_imports_nothing_but_a_class_of_this_folder(text, tmp_path, monkeypatch, capsys):
    pytest.importorskip("anywidget")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "mine.py").write_text(
        "number = 3\nclass Empty: pass\nclass Policy:\n  def touch(self, key, step): pass\n"
        "  def victim(self, resident): return next(iter(resident))\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "json.py").write_text("class A: pass\n")
    assert main(["view", "arena", text]) == 2
    assert "the arena is of a class, as in" in capsys.readouterr().err

    def found(mine):  # no contest, which takes a while
        raise ValueError(f"this is {mine.__name__}")

    monkeypatch.setattr("moelab.viz.views.arena", found, raising=False)
    assert (
        main(["view", "arena", "mine:Policy"]) == 2 and "this is Policy" in capsys.readouterr().err
    )
