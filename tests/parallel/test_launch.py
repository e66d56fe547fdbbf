"""What connected processes leave behind: nothing that could still run when the interpreter ends."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.depth import depth

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time
from pathlib import Path
from moelab.parallel import connect
from moelab.generate import generate

def threads():
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]

try:
    with connect(30):
        generate(max_new_tokens=2, parallel=sys.argv[1])
        assert [name for name in threads() if "gloo" in name], threads()
        if sys.argv[2:]:
            raise {"error": ValueError, "Ctrl-C": KeyboardInterrupt}[sys.argv[2]]
except (ValueError, KeyboardInterrupt):
    pass
def left():
    return [name for name in threads() if "gloo" in name or "tcpstore" in name]

end = time.monotonic() + 10                     # a thread that has been joined may be seen a moment longer
while left() and time.monotonic() < end:
    time.sleep(0.01)
print(left())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the process's threads")
@pytest.mark.parametrize(
    "arguments", [["tp", "error"], ["ep-a2a"], ["ep-a2a", "Ctrl-C"]][: depth(1, 3)], ids=" ".join
)
def test_no_thread_of_the_group_outlives_the_connection(arguments):
    """One that did would now and then abort a rank that has succeeded, when the interpreter
    ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
