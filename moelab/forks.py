"""What a forked process makes anew: no thread survives a fork, and a lock that was taken then is never let go."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

_owners: WeakSet[Any] = WeakSet()


def renew_in_children(owner: Any) -> None:
    """Let `owner.forked()` be called in each process that is forked from this one while the owner lives."""
    _owners.add(owner)


def _in_child() -> None:
    for owner in list(_owners):
        owner.forked()


if hasattr(os, "register_at_fork"):             # Windows cannot fork
    os.register_at_fork(after_in_child=_in_child)
