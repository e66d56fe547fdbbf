import os
import shlex
import subprocess
import sys

import pytest

from moelab.__main__ import COMMANDS, build_parser, main
from moelab.base.files import CHECKOUT


def test_the_list_of_commands_imports_nothing_heavy():
    code = (
        "import sys; from moelab.__main__ import build_parser\n"
        "for words in ([], ['reproduce'], ['run'], ['check'], ['bench']): build_parser(words)\n"
        "print([m for m in ('torch', 'transformers', 'papermill', 'plotly') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_that_can_be_read(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    example = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("example: moelab ")
    )
    arguments = shlex.split(example.removeprefix("example: moelab "))
    assert arguments[0] == command and build_parser(arguments).parse_args(arguments)


def test_errors_are_one_line_and_status_2(capsys):
    assert main(["run", "77"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("moelab: there is no notebook '77'") and "Traceback" not in told
    for words in (["--debug", "run", "77"], ["run", "77", "--debug"]):
        with pytest.raises(ValueError):
            main(words)


def test_a_command_of_a_clone_is_refused_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr("moelab.__main__.CHECKOUT", None)
    assert main(["check"]) == 2
    told = capsys.readouterr().err
    assert "clone of the repository" in told and len(told.splitlines()) == 1


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("notebooks.check.main", interrupted)
    assert main(["check"]) == 130
    assert capsys.readouterr().err == "\nmoelab: interrupted\n"


@pytest.mark.parametrize(
    "arguments, statuses", [(["claims"], {141}), ([], {2, 141}), (["check", "--help"], {0, 141})]
)  # argparse forgives some by itself
def test_it_ends_quietly_when_its_reader_has_left(arguments, statuses):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "moelab", *arguments],
        cwd=CHECKOUT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.returncode in statuses and done.stderr == ""


def test_without_a_command_it_lists_them_and_knows_its_version(capsys):
    assert main([]) == 2
    assert "reproduce" in (told := capsys.readouterr().out) and "generate" in told
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("moelab ")


def test_results_may_lie_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOELAB_RESULTS", "here")
    monkeypatch.chdir(tmp_path)
    assert main(["list", "--results", "elsewhere"]) == 0
    assert os.environ["MOELAB_RESULTS"] == str(tmp_path / "elsewhere")
