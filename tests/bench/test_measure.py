"""A limit that is beaten is no limit: its share is said in words, and no aim that hangs on it is
met."""

from moelab.bench import experts


def test_no_table_has_a_share_above_1():
    samples = {"transformers a": [4.0] * 3, "fast": [0.5] * 3}
    rows = experts.ExpertTimes(samples, read=8e9, flops=1e9, bandwidth=8e9, rate=1e9).rows()
    assert (
        rows["fast"]["of bandwidth"].startswith("limit invalid")
        and rows["transformers a"]["of roofline"] == 0.25
    )
    assert experts.ExpertTimes({"gemv": [0.5]}, 1e9, 0, 1e9, 1e9).reached.startswith(
        "limit invalid"
    )
    assert experts.ExpertTimes({"gemv": [2.0]}, 1e9, 0, 1e9, 1e9).reached == 0.5


def test_neighbours_in_a_round_compute_other_steps_each_after_another_one():
    calls = []
    arms = {name: lambda i, name=name: calls.append((name, i)) for name in "abcd"}
    samples = experts.rounds_of(arms, 9, "")
    assert calls[:4] == [(name, 0) for name in "abcd"] and all(
        len(of) == 8 for of in samples.values()
    )
    pairs = [(calls[i], calls[i + 1]) for i in range(4, len(calls), 2)]
    assert all(
        warm[0] == timed[0] and warm[1] != timed[1] and 0 not in (warm[1], timed[1])
        for warm, timed in pairs
    )
    timed = [counted for _, counted in pairs]
    assert all(a[1] != b[1] for a, b in zip(timed, timed[1:]) if a[0] != b[0])
    assert all(sorted(i for n, i in timed if n == name) == list(range(1, 9)) for name in "abcd")
