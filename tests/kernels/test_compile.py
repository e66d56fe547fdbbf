"""Compiled functions: what is cached of them must not outlive a change of a file that they call into."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
from moelab.kernels import compile as compiling  # noqa: E402

INNER = "from moelab.kernels.compile import kernel\n\n@kernel\ndef inner(x):\n    return x + {}\n"
OUTER = "from inner import inner\nfrom moelab.kernels.compile import c_function, kernel\n\n@kernel\ndef outer(x):\n" \
        "    return inner(x)\n"


def outer(folder):
    code = "from outer import outer; print(outer(1), *outer.stats.cache_hits.values())"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiling kernels") == (len(done.stdout.split()) == 1)         # said if so, and once
    return [int(word) for word in done.stdout.split()]


def test_a_changed_file_changes_the_kernels_that_call_into_it(tmp_path):
    (tmp_path / "inner.py").write_text(INNER.format(1))
    (tmp_path / "outer.py").write_text(OUTER)
    assert outer(tmp_path) == [2]
    assert outer(tmp_path) == [2, 1]                        # from the cache
    (tmp_path / "inner.py").write_text(INNER.format(10))
    newer = max(path.stat().st_mtime for path in tmp_path.rglob("*")) + 2
    os.utime(tmp_path / "inner.py", (newer, newer))
    assert outer(tmp_path) == [11]


@pytest.mark.parametrize("age, kept", [(1, False), (-1, True)])
def test_what_is_older_than_any_file_of_the_kernels_is_dropped(tmp_path, age, kept, monkeypatch):
    """Also if that file, such as tiles.py, has no kernels of its own."""
    folder = Path(compiling.__file__).parent            # other tests' files have been added since
    monkeypatch.setattr(compiling, "_FILES", {p: t for p, t in compiling._FILES.items() if p.parent == folder})
    (tmp_path / "__pycache__").mkdir()
    (file := tmp_path / "outer.py").touch()
    (index := tmp_path / "__pycache__" / "outer.outer-1.py311.nbi").write_bytes(b"")
    tiles = Path(compiling.__file__).with_name("tiles.py")
    assert "@kernel" not in tiles.read_text()
    newest = max(path.stat().st_mtime for path in tiles.parent.glob("*.py"))
    for path, when in ((file, newest - 9), (index, newest - age)):
        os.utime(path, (when, when))
    compiling._drop_stale(file)
    assert index.exists() == kept
