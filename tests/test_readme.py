"""The README's Python runs, from top to bottom, and its layout names what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "MoE layers" in capsys.readouterr().out


def test_its_layout_is_true():
    listed = re.search(r"## Layout\n\n```\n(.*?)```", README, re.S)[1]
    folder = Path()
    for line in listed.splitlines():
        name = line.split()[0]
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            path, folder = Path(name), Path(name)
        elif depth == 2:
            path, parent = folder / name, folder / name
        else:
            path = parent / name
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_its_links_lead_somewhere(target):
    assert target.startswith("http") or (ROOT / target).exists()


def test_every_notebook_is_listed():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"`{notebook.stem}`" in README


def test_its_commands_exist():
    from moelab.__main__ import COMMANDS
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)\b", README):
        assert target in ("reproduce", "test", "lab") and f"\n{target}:" in makefile
    for command in re.findall(r"python -m moelab ([\w-]+)", README):
        assert command in COMMANDS
