"""What a forked process must make anew: threads do not survive a fork, and locks that other threads
held stay locked for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

_owners: WeakSet[Any] = WeakSet()


def renew_in_children(owner: Any) -> None:
    """Let `owner.forked()` be called in each process that is forked from this one while the owner
    lives."""
    _owners.add(owner)


def in_children(renew: Callable[[], object]) -> None:
    """Let a function be called in each process that is forked from this one."""
    os.register_at_fork(after_in_child=renew)


in_children(lambda: [owner.forked() for owner in list(_owners)])
