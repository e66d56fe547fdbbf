"""How much memory the experts may have: reading a budget that a person wrote, or finding one on this machine.

Source: limit 9 of offloading: pools · bytes an expert + other weights + KV cache + workspace ≤ what is available.
A container's limit counts like the machine's: cgroup v2 and v1 are read where they exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: what "auto" leaves for the KV cache, activations and the interpreter, beyond the other weights
RESERVE = 512 << 20
_ALLOWED = ("it must be bytes, a fraction of the experts up to 1, or a text such as '2GB', '800MiB', '50%' "
            "or 'auto'")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_CGROUPS = (("memory.max", "memory.current", "memory.stat"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"))


def parse_budget(budget: str | float | int, everything: int, others: int,
                 free: Callable[[], int] | None = None) -> int:
    """A budget in bytes, 0 included, for which the caller says what the least is; ValueError for what is none.

    budget : bytes (a number above 1), a fraction of `everything` (0 ≤ f ≤ 1), "2GB", "800 MiB", "50%", or "auto":
        what is available now less the other weights and `RESERVE`.
    everything, others : bytes that keeping all experts takes, and bytes of the model's other weights.
    free : what is available, `available` of this machine if not given.
    """
    if isinstance(budget, str):
        budget = budget.strip().lower()
    if isinstance(budget, str) and budget != "auto":
        match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(%|([kmgt]i?)?b?)", budget)
        if match is None:
            raise ValueError(f"the budget is {budget!r}; {_ALLOWED}")
        budget, unit = float(match[1]), match[2]
        if unit == "%" and budget > 100:
            raise ValueError(f"the budget is {budget:g}% of the experts, and all of them are 100%; {_ALLOWED}")
        if unit or not budget:
            return int(budget / 100 * everything if unit == "%" else budget * _UNITS[match[3] or ""])
    if budget == "auto":
        return max(0, (free or available)() - others - RESERVE)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget < math.inf:
        raise ValueError(f"the budget is {budget!r}; {_ALLOWED}")
    return int(budget * everything) if budget <= 1 else int(budget)


def available_on(device: Any) -> int:
    """Bytes that this process may still take of the memory that a `torch.device` computes from."""
    if device.type == "cpu":
        return available()
    import torch
    return torch.cuda.mem_get_info(device)[0]


def available(root: str | Path = "/sys/fs/cgroup") -> int:
    """Bytes that this process may still take: the machine's available memory, or less within a container's limit."""
    import psutil
    free = psutil.virtual_memory().available
    for limit, usage, stat in _CGROUPS:
        try:
            bound = (Path(root) / limit).read_text().strip()
            if bound != "max":
                cached = re.search(r"^(?:total_)?inactive_file (\d+)$", (Path(root) / stat).read_text(), re.M)
                used = int((Path(root) / usage).read_text()) - (int(cached[1]) if cached else 0)
                free = min(free, int(bound) - used)
        except (OSError, ValueError):
            continue                                            # no such cgroup here
    return max(0, free)
