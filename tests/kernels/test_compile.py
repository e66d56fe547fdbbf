"""Compiled functions: what is cached of them is of the sources that there are, and is never
fatal."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

INNER = "from moelab.kernels.compile import kernel\n\n@kernel\ndef inner(x):\n    return x + {}\n"
OUTER = (
    "from inner import inner\nfrom moelab.kernels.compile import c_function, kernel\n\n@kernel\ndef outer(x):\n"
    "    return inner(x)\n"
)


def outer(folder, **environment):
    """[what it returns, and 1 if it was in the cache], what was said of a cache that cannot be
    kept."""
    code = "from outer import outer; print(outer(1), *outer.stats.cache_hits.values())"
    environment = (
        os.environ
        | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
        | environment
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiling kernels (") == (
        len(done.stdout.split()) == 1
    )  # said if so, and once
    return [int(word) for word in done.stdout.split()], done.stderr.count(
        "UserWarning: compiled kernels cannot be kept"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "inner.py").write_text(INNER.format(1))
    (folder / "outer.py").write_text(OUTER)
    assert outer(folder) == ([2], 0)
    return folder


def test_another_content_of_a_file_changes_the_kernels_that_call_into_it(folder):
    """Whatever its times are; and nothing of other sources stays."""
    inner, many = folder / "inner.py", len(list((folder / "__pycache__").iterdir()))
    before = inner.stat().st_mtime
    for n, when in ((5, before), (1, before - 1e6)):
        inner.write_text(INNER.format(n))
        os.utime(inner, (when, when))
        assert outer(folder) == ([1 + n], 0)
        assert len(list((folder / "__pycache__").iterdir())) == many


def test_a_cache_that_is_damaged_is_written_anew(folder):
    for file in (folder / "__pycache__").iterdir():
        file.write_bytes(file.read_bytes()[:20])
    assert outer(folder) == ([2], 0)
    assert outer(folder) == ([2, 1], 0)


@pytest.mark.parametrize("how", ["no folder", "full"])
def test_a_cache_that_cannot_be_written_is_told_once(tmp_path, folder, how):
    folder = shutil.copytree(
        folder, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    (blocker := folder / "file").touch()
    elsewhere = {
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        "XDG_CACHE_HOME": str(blocker),
        "HOME": str(blocker),
    }
    if how == "full":
        (folder / "outer.py").write_text(
            "import os, tempfile\nfrom numba.core import caching\n"
            "def full(*_): raise OSError(28, 'No space left on device')\n"
            "caching.IndexDataCacheFile._open_for_write = full\n" + OUTER
        )
    else:
        elsewhere["NUMBA_CACHE_DIR"] = str(blocker)
        (folder / "__pycache__").touch()
    assert outer(folder, **elsewhere) == ([2], 1)
