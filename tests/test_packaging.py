"""pyproject.toml, constraints.txt, environment.yml and the Makefile say the same."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.depth import STRESS

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: [Requirement(r) for r in wanted]
    for extra, wanted in PROJECT["optional-dependencies"].items()
}
CORE = [Requirement(r) for r in PROJECT["dependencies"]]
MINOR_VERSIONS = [f"3.{minor}" for minor in range(8, 20)]


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints():
    lines = (
        line.partition("#")[0].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    )
    return [Requirement(line) for line in lines if line]


def environment():
    """(conda packages, lines for pip) of environment.yml."""
    packages = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = [line for entry in packages if isinstance(entry, dict) for line in entry["pip"]]
    return [entry for entry in packages if isinstance(entry, str)], pip


def test_constraints_are_exact_and_there_is_one_a_package():
    found = constraints()
    for requirement in found:
        operators = [specifier.operator for specifier in requirement.specifier]
        assert operators == ["=="] and "+" not in str(requirement.specifier), requirement
    names = [canonical(requirement.name) for requirement in found]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("extra", ["core", "lab", "ane", "test", "docs", "peers"])
def test_constraints_satisfy_the_ranges(extra):
    pinned = {canonical(r.name): next(iter(r.specifier)).version for r in constraints()}
    for requirement in CORE if extra == "core" else EXTRAS[extra]:
        name = canonical(requirement.name)
        if extra != "peers":  # these are tested only where they are installed
            assert name in pinned, f"{requirement} has no tested version in constraints.txt"
        if name in pinned:
            assert requirement.specifier.contains(pinned[name]), (
                f"{requirement} against {pinned[name]}"
            )
        assert len(requirement.specifier), f"{requirement.name} has no range"


def test_conda_gets_its_packages_from_pyproject_and_the_constraints():
    packages, pip = environment()
    assert {re.match(r"[\w-]+", package).group() for package in packages} == {"python", "pip"}
    python = SpecifierSet(
        next(p for p in packages if p.startswith("python")).removeprefix("python").strip()
    )
    supported = SpecifierSet(PROJECT["requires-python"])
    allowed = [version for version in MINOR_VERSIONS if version in python]
    assert allowed and all(version in supported for version in allowed)
    assert pip[0] == "-c constraints.txt" and len(pip) == 2
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", pip[1]).group(1).split(",")
    assert set(extras) <= set(EXTRAS)


def test_make_installs_the_same_for_the_same_pythons():
    text = (ROOT / "Makefile").read_text()
    extras = re.search(r"pip install .*-c constraints\.txt -e '\.\[([\w,]+)\]'", text).group(1)
    assert environment()[1][1] == f"-e .[{extras}]"
    assert "$(INSTALLED): pyproject.toml constraints.txt" in text
    low, high = re.search(r"\(3, (\d+)\) <= sys\.version_info\[:2\] < \(3, (\d+)\)", text).groups()
    assert PROJECT["requires-python"] == f">=3.{low},<3.{high}"
    candidates = re.search(r"CANDIDATES := (.*)", text).group(1).split()
    assert {f"python3.{minor}" for minor in range(int(low), int(high))} <= set(candidates)


def test_the_files_that_pyproject_and_ci_name_are_there():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert PROJECT["scripts"] == {"moelab": "moelab.__main__:main"}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111 and "make test" in (
        ROOT / ".ci" / "run"
    ).read_text()
    assert list((ROOT / "moelab" / "cards").rglob("*.toml"))


@pytest.mark.skipif(not STRESS, reason="builds a wheel: make stress")
def test_an_installed_package_finds_what_it_ships(tmp_path):
    """The wheel, installed without a clone into a folder whose name is awkward, runs a page of
    the guide."""
    home = tmp_path / "dossier à part"
    home.mkdir()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "-w",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
    )
    subprocess.run([sys.executable, "-m", "venv", str(home / "env")], check=True)
    python = home / "env" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", *tmp_path.glob("*.whl")],
        check=True,
    )
    (site,) = (home / "env").glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # after the wheel's own
    guide = (ROOT / "docs" / "guide" / "open_model.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", guide, re.S)
    small = block.replace('"Qwen/Qwen3-30B-A3B"', "None").replace('"8GB"', '"50%"')
    (home / "blocks.py").write_text(small)
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MOELAB"))
    }
    done = subprocess.run(
        [python, "blocks.py"], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (home / "qwen.store").is_dir()
    found = subprocess.run(
        [python, "-c", "import moelab, moelab.base.files as f; print(moelab.__file__, f.CHECKOUT)"],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(site) in found and found.strip().endswith("None")
