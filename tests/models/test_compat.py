"""What is private to transformers, torch and numba is used in one file, and in the versions that
were tried."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: the files that may use private names, each with the reason beside it
PLACES = (
    "models/compat.py",
    "kernels/compile.py",
    "store/packed.py",  # what torch's documentation has subclasses of tensors made with
)
#: private by their names only, or of other packages
KNOWN = {
    *("_asdict", "_replace", "_fields", "_field_defaults"),  # named tuples
    *("_exit", "_at_fork_reinit", "_get_values"),  # Python
    *("_model_generate", "_sym_type", "_async_launch_kernel"),  # lm_eval, coremltools, nbclient
    *("_ctx", "_repr_mimebundle_"),  # llama-cpp, IPython
}


def private_uses(tree: ast.AST) -> dict[str, int]:
    """Private names that are asked of something else than self: name → line."""
    return {
        node.attr: node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a file defines: functions, classes, and what is assigned."""
    return {
        getattr(node, "name", None) or getattr(node, "attr", None) or getattr(node, "id", None)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        or isinstance(node, (ast.Attribute, ast.Name))
        and isinstance(node.ctx, ast.Store)
        and (isinstance(node, ast.Name) or getattr(node.value, "id", "") in ("self", "cls"))
    }


def test_private_names_of_others_stand_in_one_place():
    trees = {
        str(path.relative_to(ROOT / "moelab")): ast.parse(path.read_text())
        for path in sorted((ROOT / "moelab").rglob("*.py"))
    }
    ours = set().union(*map(own_names, trees.values())) | KNOWN
    wrong = [
        f"{file}:{line} {name}"
        for file, tree in trees.items()
        if file not in PLACES
        for name, line in private_uses(tree).items()
        if name not in ours
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["transformers", "torch", "numba"])
def test_the_next_minor_version_is_not_taken_untried(package):
    from packaging.requirements import Requirement
    from packaging.version import Version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = (ROOT / "constraints.txt").read_text().split(f"\n{package}==")[1].split()[0]
    wanted = next(
        found for found in map(Requirement, project["dependencies"]) if found.name == package
    )
    major, minor = Version(tried).release[:2]
    assert wanted.specifier.contains(tried)
    assert not wanted.specifier.contains(f"{major}.{minor + 1}.0")
