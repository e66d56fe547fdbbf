"""How deep a sweep goes: a sample in `make test`, all of it in `make stress`.

A sweep asks `depth(sample, whole)` which cases to try, or how many; of two lists it takes each name
with one of the options (`in_turn`). Property tests take ten examples, always the same, and two
hundred new ones in depth (conftest.py)."""

import os
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

STRESS = os.environ.get("MOELAB_STRESS") == "1"


def depth(sample: Any, whole: Any) -> Any:
    """`whole` under `make stress`, else `sample`."""
    return whole if STRESS else sample


def in_turn(names: Sequence[Any], options: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each name with one of the options, which take turns; with every option under `make
    stress`."""
    return [*product(names, options)] if STRESS else [*zip(names, cycle(options))]
