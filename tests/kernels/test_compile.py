"""Compiled functions: what is cached of them is of the sources that there are, and is never
fatal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

INNER = "from moelab.kernels.compile import kernel\n\n@kernel\ndef inner(x):\n    return x + {}\n"
OUTER = (
    "from inner import inner\nfrom moelab.kernels.compile import kernel\n\n@kernel\n"
    "def outer(x):\n    return inner(x)\n"
)
RUN = "from outer import outer; print(outer(1), *outer.stats.cache_hits.values())"


def outer(folder, **environment):
    """[what it returns, and 1 if it was in the cache], what was said of a cache that cannot be
    kept."""
    ours = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    others = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=folder,
        capture_output=True,
        text=True,
        env=others | ours | environment,
    )
    assert done.returncode == 0, done.stderr
    compiled = len(done.stdout.split()) == 1
    assert done.stderr.count("compiling kernels (") == compiled  # said if so, and once
    said = done.stderr.count("UserWarning: compiled kernels cannot be kept")
    return [int(word) for word in done.stdout.split()], said


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner.py").write_text(INNER.format(1))
    (tmp_path / "outer.py").write_text(OUTER)
    return tmp_path


def test_kernels_are_compiled_once_for_each_content_of_files(folder):
    """Whatever a file's times are; nothing of other sources stays, and damage is written anew."""
    assert [outer(folder), outer(folder)] == [([2], 0), ([2, 1], 0)]
    inner, many = folder / "inner.py", len(list((folder / "__pycache__").iterdir()))
    before = inner.stat().st_mtime
    inner.write_text(INNER.format(5))  # which `outer` calls
    os.utime(inner, (before, before))
    assert outer(folder) == ([6], 0)
    assert len(list((folder / "__pycache__").iterdir())) == many
    for file in (folder / "__pycache__").iterdir():
        file.write_bytes(file.read_bytes()[:20])
    assert [outer(folder), outer(folder)] == [([6], 0), ([6, 1], 0)]


@pytest.mark.parametrize("how", ["no folder", "full"])
def test_a_cache_that_cannot_be_written_is_said_once(folder, how):
    (blocker := folder / "file").touch()
    places = {"NUMBA_CACHE_DIR": str(folder / "cache"), "XDG_CACHE_HOME": str(blocker)}
    if how == "full":
        (folder / "outer.py").write_text(
            "from numba.core import caching\n"
            "def full(*_): raise OSError(28, 'No space left on device')\n"
            "caching.IndexDataCacheFile._open_for_write = full\n" + OUTER
        )
    else:
        places["NUMBA_CACHE_DIR"] = str(blocker)
        (folder / "__pycache__").touch()
    assert outer(folder, HOME=str(blocker), **places) == ([2], 1)
