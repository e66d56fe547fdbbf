"""The command line in the houses it runs in: terminals of any encoding, any folder, words typed
wrongly."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.__main__ import main
from moelab.advice import doctor
from moelab.base import registry
from moelab.base.arguments import Parser, one_of
from moelab.base.table import text_table
from tests.depth import in_turn


@pytest.mark.parametrize(
    "words, encoding",
    in_turn(
        [
            ["claims", "--source", "zipmoe"],
            ["generate", "--help"],
            ["bench", "--help"],
            ["check", "naïve \U0001f642"],
            ["run", "\udcff"],
            ["generate", "--prompt", "naïve \U0001f642 fox", "--max-new-tokens", "1"],
        ],
        ["ascii", "cp437", "utf-16"],
    ),
)
def test_no_terminal_s_encoding_loses_output(words, encoding, monkeypatch):
    """What it lacks is a "?"; hydropix/TranslateBooksWithLLMs issue 184."""
    written = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, raw in written.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding=encoding))
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    said = "".join(raw.getvalue().decode(encoding) for raw in written.values())
    assert status == (2 if words[0] in ("check", "run") else 0) and len(said) > 10
    assert "codec" not in said and "Traceback" not in said


@pytest.mark.parametrize(
    "words, said",
    [
        (["generat"], "'generate'"),
        (["generate", "--memroy", "8GB"], "--memory"),
        (["generate", "--executor", "fasst"], "'fast'"),
        (["convert", "a", "b", "--quantize", "intt4"], "'int4'"),
        (["bench", "engin"], "'engine'"),
        (["run", "calibraton"], "mean '01_calibration'"),
        (["sweep", "engin", "--grid", "a=1"], "mean 'engine'"),
        (["view", "model_map", "-p", "color=x"], "mean 'colour'"),
        (["view", "budgt"], "'budget'"),
        (["evaluate", "--modes", "hint:quazi"], "'quasi'"),
        (["advise", "qwen3-30b-a3"], "'Qwen3-30B-A3B'"),
        (["generate", "--memory", "16", "GB"], "'16GB'"),
        (["advise", "--memory", "18"], "'18GB'"),
    ],
)
def test_what_was_mistyped_is_told_with_what_is_near_in_one_line(words, said, capsys):
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moelab: ")]
    assert status == 2 and len(told) == 1 and said in told[0], told


@given(st.sampled_from(["exact", "INT8", "lru"]), st.data())
def test_names_are_read_in_any_case(name, data):
    typed = "".join(data.draw(st.sampled_from([c.upper(), c.lower()])) for c in name)
    assert one_of(["exact", "INT8", "lru"])(typed) == name
    parser = Parser()
    parser.add_argument("--name", choices=["exact", "INT8", "lru"])
    assert parser.parse_args(["--name", typed]).name == name


@pytest.mark.parametrize("kind", registry.KINDS)
def test_a_description_prints_as_a_table_and_names_go_in_any_case(kind):
    told = registry.describe(kind)
    lines = repr(told).splitlines()
    assert len(lines) >= len(told) + 2 and all(
        any(line.split()[:1] == [name] for line in lines) for name in told
    )
    assert {registry.like(kind, name.swapcase()) for name in told} == set(told) and registry.like(
        kind, "no such"
    ) is None


@given(
    st.lists(
        st.lists(st.text("ab 1", max_size=60), min_size=3, max_size=3), min_size=1, max_size=4
    ),
    st.integers(20, 120),
)
def test_a_table_fits_the_terminal_and_loses_no_word(rows, columns):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        lines = text_table(["x", "y", "z"], rows).splitlines()
    longest = [max([1, *(len(row[i]) for row in rows)]) for i in range(3)]
    assert max(map(len, lines)) <= max(columns, sum(min(cell, 24) for cell in longest) + 6)
    assert sorted("".join(lines[2:]).replace(" ", "")) == sorted(
        "".join(map("".join, rows)).replace(" ", "")
    )


def test_doctor_walks_no_folder_and_tells_what_it_cannot_measure(tmp_path, monkeypatch):
    """INTI-CMNB/kicad_auto issue 17: a container begins in /."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "loop").symlink_to(tmp_path, target_is_directory=True)

    def closed(*_):
        raise PermissionError(13, "Permission denied", "proc/1/cwd")

    monkeypatch.setattr(doctor, "disk_rates", closed)
    monkeypatch.setattr(doctor, "folder_bytes", closed)
    found = dict(doctor.findings(tmp_path))
    assert (
        found["disk"] == found["cache"] == "unknown: Permission denied (proc/1/cwd)"
        and "torch" in found
    )
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("MOELAB_CACHE", str(blocker / "cache"))
    assert "$MOELAB_CACHE" in dict(doctor.findings(tmp_path))["cache"]


def test_a_mistake_of_ours_is_called_one(monkeypatch, capsys):
    def broken(*_):
        raise TypeError("'NoneType' object is not iterable")

    monkeypatch.setattr("notebooks.check.main", broken)
    assert main(["check"]) == 2
    told = capsys.readouterr().err
    assert "mistake in moelab" in told and "--debug" in told and len(told.splitlines()) == 1
    with pytest.raises(TypeError):
        main(["check", "--debug"])


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "", "x"],
        ["advise", ""],
        ["generate", "--calibration", ""],
        ["view", "model_map", "--output", ""],
        ["evaluate", "--estimator", ""],
        ["sweep", "", "--grid", "a=1"],
    ],
)
def test_an_empty_path_is_no_path_to_the_working_folder(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    told = capsys.readouterr().err
    assert (
        end.value.code == 2
        and "argument" in told
        and "is empty" in told
        and len(told.splitlines()) == 1
    )


def test_doctor_tells_how_a_gpu_decodes(tmp_path, monkeypatch):
    """Whatever is where a GPU would be runs the shipped model."""
    assert doctor.decoded_by("cpu") == "7 by no graph"
