"""How deep a sweep goes: a sample in `make test`, all of it in `make stress`.

A sweep is marked `@pytest.mark.stress` and asks `depth(sample, whole)` how many cases to try.
"""

import os

STRESS = os.environ.get("MOELAB_STRESS") == "1"


def depth(sample: int, whole: int) -> int:
    """`whole` under `make stress`, else `sample`."""
    return whole if STRESS else sample
