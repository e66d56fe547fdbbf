"""How much memory the experts may have: reading a budget that a person wrote, or finding one on
this machine.

Source: limit 9 of offloading: pools · bytes an expert + other weights + KV cache + workspace ≤ what
is available. A control group's limit counts like the machine's, that of a container, a service or a
job of SLURM."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

from moelab.base.arguments import checked
from moelab.base.specs import MoESpec

#: what "auto" leaves for the KV cache, activations and the interpreter, beyond the other weights
RESERVE = 512 << 20
#: the folder of all control groups; the file that says in which ones this process is
ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
#: files of a group: a limit, and what is used of it
LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
#: of memory.stat: what the page cache would give back, in older systems the group's own, then all
_CACHED = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.M)
_SIZE = re.compile(
    r"((?:\d+(?:_\d+)*(?:\.\d*|,\d{1,2})?|\.\d+)(?:e\+?\d+)?)\s*(%|(?:[kmgt]i?)?b?)", re.ASCII
)


def parse_budget(
    budget: str | float | int, everything: int, others: int, free: Callable[[], int] | None = None
) -> int:
    """A budget in bytes, 0 included, for which the caller says what the least is; ValueError for
    what is none.

    budget : bytes (a number), a fraction of `everything` (0 ≤ f ≤ 1), "2GB", "1,5 g", "800 MiB",
        "50%", or "auto": what is available now less the other weights and `RESERVE`.
    everything, others : bytes that keeping all experts takes, and bytes of the model's other
        weights.
    free : what is available, `available` of this machine if not given.
    """
    given = budget
    unit = ""
    text = given.strip().lower() if isinstance(given, str) else ""
    if text == "auto":
        return max(0, (free or available)() - others - RESERVE)
    if match := _SIZE.fullmatch(text):
        budget = float(match[1].replace(",", "."))
        unit = match[2]
    real = isinstance(budget, Real) and not isinstance(budget, bool)
    if not real or not 0 <= budget < math.inf or unit == "%" and budget > 100:
        raise ValueError(
            f"the budget is {given!r}; it must be bytes, a fraction of the experts up to 1, or a text "
            f"such as '2GB', '800MiB', '50%' or 'auto'"
        )
    if unit == "%":
        return int(budget / 100 * everything)
    if unit:
        thousand = 1024 if "i" in unit else 1000
        return int(budget * thousand ** "bkmgt".index(unit[0]))
    if budget <= 1:
        return int(budget * everything)
    if budget < (10**6 if isinstance(given, str) else 1024):  # gigabytes to whom wrote them
        raise ValueError(
            f"the budget is {given!r}, which would be {budget:g} bytes: write '{budget:g}GB', or "
            f"'{budget:g}B'"
        )
    return int(budget)


#: reads a budget on a command line: what `parse_budget` cannot read is refused before a model is
#: opened
memory = checked(lambda text: parse_budget(text, 0, 0, lambda: 0))


def available_on(device: Any) -> int:
    """Bytes that this process may still take of the memory that a `torch.device` computes from."""
    if device.type == "cpu":
        return available()
    import torch

    return torch.cuda.mem_get_info(device)[0]


def available(root: Path = ROOT) -> int:
    """Bytes that this process may still take: what the machine has available, or less within the
    limit of a control group that it is in, or of one around that."""
    import psutil

    free = psutil.virtual_memory().available
    for group in own_groups(root):
        for limit, usage in LIMITS:
            with suppress(OSError, ValueError):  # no such limit here, or "max"
                bound, used = (int((group / name).read_text()) for name in (limit, usage))
                cached = _CACHED.findall((group / "memory.stat").read_text())
                free = min(free, bound - used + sum(map(int, cached[-1:])))
    return max(0, free)


def own_groups(root: Path = ROOT) -> list[Path]:
    """The folders of the control groups that limit this process's memory, its own first, then those
    around it; in a container the outermost is what is mounted as `root`."""
    v1 = root / "memory"
    own = []
    for line in OWN.read_text().splitlines() if OWN.exists() else ():  # only on Linux
        _, kinds, path = line.split(":", 2)
        if "memory" in kinds.split(","):
            own += [v1 / path.lstrip("/")]
        elif not kinds:
            own += [root / path.lstrip("/"), root / "unified" / path.lstrip("/")]
    found = [
        group
        for folder in [*own, v1, root]
        for group in (folder, *folder.parents)
        if group.is_relative_to(root) and ".." not in group.parts and group.is_dir()
    ]
    return list(dict.fromkeys(found)) or [root]


def kv_bytes(spec: MoESpec, tokens: int) -> int:
    """Bytes of keys and values of `tokens` tokens in 16 bits, all sequences together; for models with
    ordinary attention."""
    return 4 * spec.num_layers * spec.kv_heads * spec.head_dim * tokens
