"""What may be chosen of a table: what ran within the memory, and loses no more than is allowed."""

import pytest

from notebooks.studies import choosing
from notebooks.studies.choosing import ANY, LOSSLESS, allowed, fastest, ours
from notebooks.studies.end_to_end import BASE, RESIDENT


def row(seconds, result="control group", **more):
    return {"TPOT s": seconds, "each token s": [seconds] * 6, "result": result} | more


ROWS = {
    BASE: row(4.0, KL=0.0, **{"simulated TPOT s": 2.0, "simulated ÷ measured": 0.5}),
    "fast": row(3.0, KL=1e-5),
    "mxfp4 + fast": row(1.0, KL=0.0),  # a random model's KL does not tell
    "blockwise": {"result": "failed: x"},
    "LRU baseline": row(6.0, "nothing was limited", KL=0.0),
    "transformers mmap": row(0.5, "nothing was limited", KL=0.0),
    choosing.NORMALISES: row(2.0, KL=3.0),
    "llama.cpp Q4_0 mmap": row(0.9, KL=0.2),
    RESIDENT: row(0.1, KL=0.0),
}


@pytest.mark.parametrize(
    "loss, names",
    [
        (LOSSLESS, {BASE, "fast", "LRU baseline", choosing.NORMALISES}),
        (ANY, ROWS.keys() - {"blockwise", "transformers mmap", RESIDENT}),
    ],
)
def test_what_is_allowed(loss, names):
    assert allowed(ROWS, loss).keys() == names


def test_ours_is_compared_with_the_fastest_other_lossless_engine():
    assert fastest(ours(allowed(ROWS, LOSSLESS))) == "fast"
    assert fastest(ours(allowed(ROWS, ANY))) == "mxfp4 + fast"
    ((title, other, found),) = choosing.duels({"x": ROWS, "alone": ours(ROWS)})
    assert (title, other) == ("x", choosing.NORMALISES)
    assert list(found.values()) == [1.5] * 3
    assert list(choosing.foretold({"x": ROWS})) == [f"{BASE}; x"]
