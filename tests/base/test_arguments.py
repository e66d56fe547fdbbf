"""Every number and list of the command line: what cannot be used is refused where it is read, in
words."""

import argparse
import importlib
import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.__main__ import COMMANDS, error_text, main
from moelab.base.arguments import Parser, described, number, one_of, output, several, whole
from moelab.bench import module_of, parser_of
from moelab.bench import names as benches

PYTHONS_OWN = (
    "invalid int",
    "invalid float",
    "invalid <lambda>",
    "Traceback",
    "could not convert",
    "invalid literal",
)


def parsers():
    """(words before the options, parser) of every command, subcommand and bench."""
    for name, (module, *_) in COMMANDS.items():
        parser = Parser()
        importlib.import_module(module).add_arguments(parser)
        nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        yield from (
            (((name, sub), one) for sub, one in nested[0].choices.items())
            if nested
            else [((name,), parser)]
        )
    yield from ((("bench", name), parser_of(name)) for name in benches())


OPTIONS = [
    (words, action)
    for words, parser in parsers()
    for action in parser._actions
    if action.option_strings and action.type is not None and action.type not in (Path, output)
]


@pytest.mark.parametrize("text", ["-5", "nan", "x", "", "1e999", ","])
def test_no_option_takes_nonsense(text):
    assert len(OPTIONS) > 60
    for words, action in OPTIONS:
        with pytest.raises(argparse.ArgumentTypeError) as error:
            pytest.fail(f"{' '.join(words)}: {action.option_strings} takes {action.type(text)!r}")
        said = str(error.value)
        assert repr(text) in said and not any(own in said for own in PYTHONS_OWN), (words, action)


@given(st.integers(max_value=2**63 - 1), st.integers(-100, 100))
def test_whole_numbers(value, least):
    if value >= least:
        assert whole(least)(str(value)) == value
    else:
        with pytest.raises(argparse.ArgumentTypeError, match=f"at least {least}"):
            whole(least)(str(value))


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_numbers(value):
    reads = number(above=0, most=1)
    if 0 < value <= 1:
        assert reads(repr(value)) == value
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="above 0 and at most 1"):
            reads(repr(value))


def test_lists_and_names():
    assert several(number(above=0))("1, 2.5,") == [1.0, 2.5]
    assert several(one_of("ab"))("b,a") == ["b", "a"]
    with pytest.raises(argparse.ArgumentTypeError, match="no choice 'c'. There are: a, b"):
        several(one_of("ab"))("a,c")


def test_arguments_that_a_file_describes(tmp_path, capsys):
    (tmp_path / "module.toml").write_text(
        """
        [one]
        "-n --number" = {least = 2, default = 3}
        --shares = {above = 0, most = 1, several = true}
        --codec = {names = "codec"}
        [two]
        file = {type = "pathlib:Path", help = "of any program: this one"}
        """
    )
    parser = Parser()
    described(str(tmp_path / "module.py"))(parser)
    found = parser.parse_args(["-n", "7", "--shares", "0.5,1", "--codec", "RAW", "x"])
    assert vars(found) == {"number": 7, "shares": [0.5, 1.0], "codec": "raw", "file": Path("x")}
    for wrong in (["-n", "1"], ["--shares", "2"], ["--codec", "none"]):
        with pytest.raises(SystemExit):
            parser.parse_args([*wrong, "x"])
    alone = Parser()
    described(str(tmp_path / "module.py"), "one")(alone)
    assert alone.parse_args([]).number == 3


@pytest.mark.parametrize(
    "line",
    [
        "ane plan Phi-3.5-MoE --chunk -5",
        "ane plan Phi-3.5-MoE --layers 99",
        "bench prefetch --tokens -1",
        "generate --max-new-tokens 0",
        "calibrate small c --prompts 0",
        "bench engine --only everything",
        "evaluate --modes executor:capacity:factor=x",
        "evaluate --modes executor:blockwise:skip_blocks=perhaps",
        "run 01 -p smoke=maybe",
    ],
)
def test_what_was_accepted_or_told_in_python_s_words(line, capsys):
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status == 2 and not any(
        own in said for own in (*PYTHONS_OWN, "n < 0", "is None", "not supported")
    )
    assert line.split()[-1].rpartition("=")[2] in said  # what was typed is named


def test_errors_of_the_system_in_words():
    full = error_text(OSError(28, "No space left on device", "/data/x"))
    assert full == (
        "No space left on device (/data/x); free some space, or write to another disk, and "
        "run the command again"
    )
    assert (
        "Errno" not in error_text(PermissionError(13, "Permission denied"))
        and error_text(KeyError("no layer 3")) == "no layer 3"
    )
    assert (
        error_text(FileNotFoundError("there is no checkpoint folder at x"))
        == "there is no checkpoint folder at x"
    )


@pytest.mark.parametrize("name", benches())
def test_a_bench_without_options_runs_on_its_own_defaults(name):
    parser = parser_of(name)
    if any(action.required for action in parser._actions):
        with pytest.raises(SystemExit):  # it says which
            parser.parse_args([])
        return
    given, run = (
        vars(parser.parse_args([])),
        inspect.signature(module_of(name).run),
    )
    for option in ("output", "busy"):  # of every bench
        given.pop(option)
    for option, value in given.items():
        default = run.parameters[option].default
        assert value == (list(default) if isinstance(default, tuple) else default)
    assert all(action.help for action in parser._actions) and parser.format_help()


def test_values_have_commas_between_them():
    assert parser_of("engine").parse_args(["--only", "peers,resident"]).only == [
        "peers",
        "resident",
    ]
