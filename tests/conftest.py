"""What every test shares: results go to a temporary folder, torch uses one thread, hypothesis takes
its time."""

import gc
import os
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import settings

from tests.depth import depth

gc.disable()  # until everything is imported and collected, which leaves hardly any garbage
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import torch  # noqa: E402

if not torch.cuda.is_available():  # before Triton is loaded: its kernels run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.modules.setdefault(
    "rfc3987_syntax", None
)  # optional, and seconds of work where nbformat is imported

# How long an example takes depends on the machine, and says nothing about the code. The examples are
# the same for the same code, so that its verdict is on the commit; `make stress` tries new ones.
settings.register_profile(
    "moelab",
    deadline=None,
    max_examples=depth(10, 200),
    print_blob=True,
    derandomize=depth(True, False),
)
settings.load_profile("moelab")


def pytest_collection_modifyitems(items):
    """What takes a minute comes first, so that no worker is left with it at the end."""
    items.sort(key=lambda item: "browser" not in item.nodeid and "test_accuracy" not in item.nodeid)


def pytest_collection_finish():
    """What was imported stays: half a second of work for the collector, each time that a test asks
    for it."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # else libraries complain at the end about what they take for leaks


@pytest.fixture(autouse=True)
def threads_stay_as_they_were():
    """How many threads torch uses is the process's: a test that leaves another number changes the
    next one."""
    get = torch.get_num_threads  # as it is before a test puts its own there
    before = get()
    yield
    after = get()
    torch.set_num_threads(before)
    assert after == before


@pytest.fixture(scope="session", autouse=True)
def stores_are_kept_for_a_session(tmp_path_factory):
    """MOELAB_CACHE points to a folder of its own, for fixtures of any scope; models open cold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOELAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("MOELAB_WARM", "0")  # no test begins with what another has left
        yield


@pytest.fixture(scope="session")
def every_result(tmp_path_factory):
    """Holds the folders of all tests: pytest's own would count all there are for each new one."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(autouse=True)
def results(every_result, monkeypatch):
    """A folder for results of its own; MOELAB_RESULTS points there."""
    folder = Path(mkdtemp(dir=every_result))
    monkeypatch.setenv("MOELAB_RESULTS", str(folder))
    monkeypatch.delenv("MOELAB_RUN_DIR", raising=False)
    return folder


@pytest.fixture
def triton_device():
    """Where Triton's kernels run: on a GPU if there is one, else on the CPU in Triton's
    interpreter."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"
