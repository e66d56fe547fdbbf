"""What a limit is worth: one that is beaten is none, and is said to be wrong in place of a share of it.

A limit is measured like what it bounds (same threads, same rounds, as cold or as warm) and is the best that was seen;
what it bounds is a median. So a share above 1 means that the limit was measured wrongly, by more than `TOLERANCE` of
noise, and no figure that hangs on it is printed as a number. An aim that hangs on it is not met.
"""

from __future__ import annotations

from typing import Any

TOLERANCE = 0.05


def share(reached: float) -> float | str:
    """The share of a limit that is reached, or, above 1 + `TOLERANCE`, words that say that the limit is invalid."""
    return reached if reached <= 1 + TOLERANCE else f"limit invalid: beaten, {reached:.2f} of it"


def multiple(taken: float, least: float) -> float | str:
    """How many times the least time possible something takes; words where it takes less."""
    found = share(least / taken)
    return found if isinstance(found, str) else taken / least


def aim(measured: float | str, wanted: float, below: bool = False) -> dict[str, Any]:
    """A row of aims: at least `wanted`, or at most; words, such as of an invalid limit, never meet one."""
    met = not isinstance(measured, str) and (measured <= wanted if below else measured >= wanted)
    return {"measured": measured, "aim": f"{'≤' if below else '≥'} {wanted}", "met": met}
