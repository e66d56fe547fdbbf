"""A running mean of what takes time."""

from __future__ import annotations

MEMORY = 20  # values after which a `Mean` becomes exponential


class Mean:
    """A running mean: arithmetic over the first `MEMORY` values, exponential from then on."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value, self.count = value, count

    def add(self, value: float) -> None:
        """Add a value."""
        self.count = min(self.count + 1, MEMORY)
        self.value += (value - self.value) / self.count
