"""Compiled functions: what is cached of them must not outlive a change of a file that they call into."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
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
