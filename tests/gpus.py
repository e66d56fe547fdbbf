"""Triton's kernels compiled for a GPU that is not here: what calls them runs in a process of its own,
without the interpreter, where a launch only compiles.

The interpreter takes what the compiler does not, and says nothing of the instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PRETEND = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

class Pretended:
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", {capability}, 32)

driver.set_active(Pretended())
run, made = JITFunction.run, {{}}

def compiled(self, *args, **options):
    made[self.__name__] = run(self, *args, **options | {{"warmup": True}}).asm["ptx"]

JITFunction.run = compiled
{code}
print(json.dumps(made))
"""


def compiled(code: str, folder: Path, capability: int = 90) -> dict[str, str]:
    """The PTX of the kernels that this code calls, by their names; `folder` is for Triton's cache."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-c", PRETEND.format(code=code, capability=capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
