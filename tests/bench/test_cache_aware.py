"""The bench of cache-aware routing: its counts against the routing that was recorded, and what its
rows must say."""

from moelab import open_model
from moelab.bench import cache_aware as bench


def test_rows_say_what_was_counted():
    with open_model(memory="30%", executor="fast") as model:
        rows = bench.compare(model, (8.0,), ("loss", "lookup"), n=2, windows=2, tokens=64)
        assert model.moelab.routing is None
    own, eager = rows["margin 0"], rows["margin 8"]
    assert own["choices changed"] == own["difference"] == own["lookup, lost"] == 0
    assert own["misses ÷ margin 0"] == 1 and 0 < own["hit rate"] < 1
    assert eager["choices changed"] > 0.1 and eager["hit rate"] > own["hit rate"]
    assert (1 - eager["hit rate"]) / (1 - own["hit rate"]) == eager["misses ÷ margin 0"]
    assert eager["from"] <= eager["difference"] <= eager["to"] and eager["difference"] != 0
