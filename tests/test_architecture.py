"""The design's directions of imports, read from the sources; imports inside functions count too."""

import ast
import subprocess
import sys
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moelab"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "transformers", "plotly", "papermill", "coremltools", "numba")

#: what every part may use
COMMON = {"base", "cards", "kernels"}
#: what these three may use of each other
BELOW = {"base": set(), "cards": {"base"}, "kernels": {"base"}}
#: part of moelab → the parts that it may import, COMMON aside
DIRECTIONS = {
    **BELOW,
    "files": {"base"},
    "comparison": set(),
    "store": set(),
    "models": {"store"},
    "checkpoint": {"store", "models"},
    "trace": {"models", "store", "checkpoint"},
    "recording": {"models", "checkpoint", "trace"},
    "calibration": {"models", "trace", "checkpoint"},
    "experts": {"store", "models"},
    "fast": {"models", "store", "experts", "checkpoint"},
    "static": {"experts", "store", "trace"},
    "parallel": {"experts", "models", "checkpoint", "static"},
    "cache": {"trace"},
    "speculate": {"models", "checkpoint", "store", "trace", "recording"},
    "offloading": {
        "models",
        "checkpoint",
        "trace",
        "calibration",
        "store",
        "cache",
        "speculate",
        "experts",
    },
    "simulation": {"trace", "store", "cache", "offloading"},
    "zipmoe": {"models", "trace", "calibration", "store", "cache", "offloading", "simulation"},
    "api": {
        "trace",
        "zipmoe",
        "ane",
        "models",
        "checkpoint",
        "store",
        "experts",
        "fast",
        "static",
        "speculate",
        "offloading",
        "calibration",
    },
    "generate": {
        "models",
        "checkpoint",
        "parallel",
        "offloading",
        "calibration",
        "speculate",
        "api",
    },
    "ane": {
        "models",
        "checkpoint",
        "trace",
        "calibration",
        "experts",
        "static",
        "offloading",
        "simulation",
    },
    "ndp": {"trace", "experts", "parallel"},
    "conversation": {"models", "trace"},
}
TECHNIQUES = set(DIRECTIONS)
#: prompts, with which these try what they have made
DIRECTIONS["generate"] |= {"evaluation"}
DIRECTIONS["evaluation"] = TECHNIQUES - {"ndp", "generate"}
DIRECTIONS["bench"] = TECHNIQUES | {"evaluation"}
DIRECTIONS["claims"] = {"comparison", "bench"}
DIRECTIONS["advice"] = TECHNIQUES | {"evaluation", "bench"}
DIRECTIONS["viz"] = TECHNIQUES | {"evaluation", "advice", "bench", "claims", "chat"}
DIRECTIONS["lab"] = TECHNIQUES | {"evaluation", "advice", "bench", "claims", "viz"}
DIRECTIONS["chat"] = TECHNIQUES | {"evaluation", "advice"}
DIRECTIONS["__main__"] = DIRECTIONS["__init__"] = set(DIRECTIONS)
#: above everything, so they may use what `moelab` itself exports
FACADE_USERS = {"evaluation", "bench", "viz", "lab", "chat", "__main__", "__init__"}
#: package → the only parts that may import it
ONLY_IN = {
    "coremltools": {"ane"},
    "zstandard": {"zipmoe"},
    "lz4": {"zipmoe"},
    "papermill": {"lab"},
    "nbclient": {"lab"},
    "nbformat": {"lab"},
    "jupyter_client": {"lab"},
    "plotly": {"viz"},
    "kaleido": {"viz"},
    "ipywidgets": {"viz"},
    "anywidget": {"viz"},
    "pandas": {"lab", "viz"},
    "pyarrow": {"lab"},
    "distributed": {"lab"},
}
#: package → the only parts that may import it outside a function
AT_THE_TOP_ONLY_IN = {
    "transformers": {"models"},
    "datasets": set(),
    "papermill": set(),
    "coremltools": set(),
    "plotly": {"viz"},
}
WITHOUT_TORCH = {
    "schema",
    "records",
    "specs",
    "configs",
    "cards",
    "library",
    "progress",
    "table",
    "arguments",
    "files",
    "registry",
    "journal",
    "forks",
    "lab",
    "claims",
    "comparison",
    "papers",
    "__main__",
    "__init__",
}


def part_of(path):
    """The part of moelab that a file belongs to: its folder or, at the top, its own name."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


@lru_cache(None)
def imports(path):
    """(imported dotted name, whether it is inside a function) of a file, for types alone, too;
    relative imports resolved."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ["moelab", *path.relative_to(PACKAGE).parts[:-1]]

    def visit(node, inside):
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join(base + ([child.module] if child.module else []))
                yield from ((f"{module}.{alias.name}", inside) for alias in child.names)
            else:
                yield from visit(child, inside)

    return list(visit(tree, False))


def violations(path):
    """What a file imports that it must not, in words."""
    part = part_of(path)
    if part not in DIRECTIONS:
        yield f"{part} is new: say in DIRECTIONS what it may import"
    common = set() if part in BELOW else COMMON
    for name, inside in imports(path):
        package, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if part not in ONLY_IN.get(package, {part}):
            yield f"{part}: {package} is imported only in {ONLY_IN[package]}"
        if not inside and part not in AT_THE_TOP_ONLY_IN.get(package, {part}):
            yield f"{part}: import {package} inside the function that uses it"
        if part in WITHOUT_TORCH and package == "torch":
            yield f"{part} works without torch"
        if package != "moelab" or part in FACADE_USERS and other not in DIRECTIONS:
            continue
        if not other:
            yield (
                f"{part}: import what is needed, not moelab as a whole, which would hide the "
                "direction"
            )
        elif other not in {part} | DIRECTIONS.get(part, set()) | common:
            yield f"{part} must not import moelab.{rest}"


def test_directions():
    found = [f"{path.relative_to(ROOT)}: {wrong}" for path in FILES for wrong in violations(path)]
    assert found == []


def graph(paths):
    """Module → the modules of moelab that its file imports, wherever in the file."""
    names = {
        path: ".".join(["moelab", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
            ".__init__"
        )
        for path in paths
    }
    known = set(names.values())
    return {
        module: {
            target
            for name, _ in imports(path)
            for target in (name, name.rpartition(".")[0])
            if target in known and (target == name or name not in known)
        }
        - {module}
        for path, module in names.items()
    }


def no_circle(edges):
    """ValueError (`CycleError`) with the circle if there is one."""
    TopologicalSorter(edges).prepare()


def test_no_file_imports_itself_by_way_of_others():
    no_circle(graph(FILES))


def test_no_room_imports_one_above_it():
    no_circle({part: others - {part} for part, others in DIRECTIONS.items()})


def python(code):
    """Run code in a fresh interpreter; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_moelab_loads_nothing_heavy():
    assert python(f"import sys, moelab; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_everything_but_viz_imports_where_optional_packages_are_missing():
    """Without the packages of the extras `lab`, `ane` and `peers`."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if part_of(path) not in ("viz", "__main__") and not path.stem.endswith("_triton")
    ]  # GPU kernels
    assert len(modules) > 10
    python(f"""
import importlib.util, sys
MISSING = {{"coremltools", "plotly", "ipywidgets", "papermill", "nbformat", "nbclient", "IPython", "ipykernel",
           "jupyter_client", "kaleido", "datasets", "accelerate", "lm_eval", "zipnn", "psutil",
           "pyarrow", "distributed"}}
sys.modules.update(dict.fromkeys(MISSING))  # as if they were not installed
for name in {modules}:
    importlib.import_module(name)
""")


# ---- the test can fail: what it must object to


@pytest.mark.parametrize(
    "file, source",
    [
        ("cache/x.py", "import plotly.graph_objects as go"),
        ("cache/x.py", "def f():\n    from moelab.viz import theme"),
        ("cache/x.py", "from ..lab import results"),
        ("models/x.py", "from moelab.trace import RoutingTrace"),
        ("models/x.py", "from moelab import trace"),
        ("specs.py", "from moelab import configs"),
        ("experts/x.py", "import moelab"),
        ("store/x.py", "import coremltools"),
        ("offloading/x.py", "def f():\n    import zstandard"),
        ("offloading/x.py", "from transformers import AutoModel"),
        ("viz/x.py", "class A:\n    def f(self):\n        import moelab.lab.runner"),
        ("library.py", "import torch"),
    ],
)
def test_violations_are_seen(file, source, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert [*violations(path)]


@pytest.mark.parametrize(
    "sources",
    [
        {"a.py": "from moelab import b", "b.py": "def f():\n    import moelab.a"},
        {
            "a.py": "from moelab.b.c import x",
            "b/__init__.py": "",
            "b/c.py": "from moelab.b import d",
            "b/d.py": "import moelab.a",
        },
    ],
)
def test_circles_are_seen(sources, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    with pytest.raises(ValueError, match="cycle"):
        no_circle(graph(sorted(tmp_path.rglob("*.py"))))


#: torch's functions whose numbers are of its default dtype, which each of transformers'
#: `from_pretrained` sets for all threads meanwhile
DEFAULT_DTYPE = {"empty", "zeros", "ones", "rand", "randn", "eye", "linspace", "logspace"}


def test_what_is_made_from_nothing_names_its_dtype():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func)
            function = ast.unparse(node.args[0]) if function == "partial" else function
            made = function.removeprefix("torch.") in DEFAULT_DTYPE and function.startswith(
                "torch."
            )
            assert not made or {keyword.arg for keyword in node.keywords} & {"dtype", None}, (
                f"{path}:{node.lineno}: {ast.unparse(node)} has whatever dtype is torch's default now"
            )
