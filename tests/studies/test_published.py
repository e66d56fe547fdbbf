"""Published numbers: the table is whole, verdicts follow the rules, statistics are those of naive
loops, an engine's trace is read and replayed."""

from pathlib import Path

import numpy as np
import pytest

from notebooks.studies import published
from notebooks.studies.published import EQUAL, OFF, OPEN, WITHIN, Answer, Texts


def answer(**how):
    return Answer(**{"what": "x", "by": "routing", "published": (50.0,)} | how)


def test_all_49_rows_are_there_each_with_its_source():
    rows = published.rows()
    assert [row.n for row in rows] == list(range(1, 50))
    for row in rows:
        assert row.model and row.result and row.source
        for of in row.answer:
            assert of.between or len(of.at) == len(of.published), row.n
            assert of.trace in ("", *published.TRACES) and (of.by != "stated" or of.formula)


@pytest.mark.parametrize(
    "how, value, ours, verdict",
    [
        ({}, 50.0, 50.04, EQUAL),
        ({}, 50.0, 50.06, WITHIN),
        ({}, 50, 50.4, EQUAL),
        ({}, 50.0, 55.1, OFF),
        ({}, 50.0, None, OPEN),
        ({"unit": "tokens/s"}, 2.0, 2.4, WITHIN),
        ({"unit": "tokens/s"}, 2.0, 2.41, OFF),
        ({"between": True}, (8, 18), 23.0, WITHIN),
        ({"between": True}, (8, 18), 10.0, WITHIN),
        ({"between": True}, (8, 18), 2.9, OFF),
    ],
)
def test_verdicts(how, value, ours, verdict):
    assert published.judged(answer(**how), value, ours).answer == verdict


def test_formulas_are_arithmetic_and_nothing_else():
    assert published.value_of("1 / (0.5 + 2 ** 2 * miss - 0.25)", 0.25) == pytest.approx(0.8)
    for formula in ("__import__('os')", "hit", "(1).real", "True if miss else 2"):
        with pytest.raises(ValueError, match="numbers"):
            published.value_of(formula, 0.5)


def texts(seed=0, n=3, tokens=7, L=2, E=6, K=2):
    rng = np.random.default_rng(seed)
    ids = rng.random((n, tokens, L, E)).argsort(-1)[..., :K].astype(np.int16)
    return Texts(list(ids), E, "made")


def test_statistics_are_those_of_naive_loops():
    made = texts()
    shared = asked = 0
    for one in made.ids:
        for t in range(2, len(one)):
            for layer in range(2):
                before = {int(e) for s in (1, 2) for e in one[t - s, layer]}
                shared += len(before & set(one[t, layer].tolist()))
                asked += 2
    assert published.reuse(made, answer(), 2) == pytest.approx(100 * shared / asked)
    seen = {(layer, int(e)) for one in made.ids for t in one for layer in (0, 1) for e in t[layer]}
    assert published.distinct(made) == len(seen)
    assert published.static(made, answer(), 12) == 100.0
    assert published.static(made, answer(scope="layer"), 6) == 100.0
    own = published.static(made, answer(statistic="static"), 4)
    others = published.static(made, answer(statistic="static, other texts"), 4)
    assert 0 < others <= own < 100


def test_a_pool_of_each_layer_is_a_cache_of_each_layer_and_texts_can_be_apart():
    made = texts(tokens=20)
    for policy in ("lru", "lfu", "random", "belady", "belady-bypass"):
        of = answer(scope="layer", policy=policy)
        runs = [published.replayed(made, of, at) for at in (2, 3, 6)]
        assert [run.requests for run in runs] == [3 * 20 * 2 * 2] * 3
        assert runs[0].misses >= runs[1].misses >= runs[2].misses == published.distinct(made)
    apart = published.replayed(made, answer(cleared=True), 12)
    each = [published.distinct(made._replace(ids=[one])) for one in made.ids]
    assert apart.misses == sum(each)
    together = published.replayed(made, answer(batch=3), 12)
    assert together.batches == 20 and together.requests < 3 * 20 * 2 * 2


ROUTES = """# route_trace v1
# layer=0 expert_bytes=1048576 dense_bytes=1
# layer=1 expert_bytes=2097152 dense_bytes=1
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""


def test_an_engines_trace_is_replayed(tmp_path: Path):
    """Two tokens of a prompt, then three: one expert of each layer at a time fits."""
    rows = [(0, 0, 0, 1, 0), (0, 1, 0, 1, 0), (0, 0, 1, 2, 0), (0, 1, 1, 3, 0)]
    rows += [(1, 0, 0, 1, 0), (1, 0, 1, 3, 1), (1, 1, 0, 1, 1), (1, 1, 1, 2, 0)]
    lines = [f"0,{ph},{t},{layer},0,{e},0.5,{hit},0" for ph, t, layer, e, hit in rows]
    file = tmp_path / "made.route.csv"
    file.write_text(ROUTES + "\n".join(lines))
    made = published.engine(file)
    assert made.prompt == [[(0, [1]), (1, [2, 3])]] or made.prompt == [[(0, [1, 1]), (1, [2, 3])]]
    assert [[layer for layer, _ in batch] for batch in made.decode] == [[0, 1], [0, 1]]
    assert made.outcomes(3)[1] == 4 and made.hits(100, "lru")[1] == 100.0
    (tmp_path / "none.csv").write_text("# layer=0\n1,2")
    with pytest.raises(ValueError, match=r"none\.csv is no readable route\.csv"):
        published.engine(tmp_path / "none.csv")


def test_without_traces_what_needs_them_stays_open(monkeypatch):
    chosen = [row for row in published.rows() if row.n in (1, 14, 28, 39)]
    monkeypatch.setattr(published, "rows", lambda: chosen)
    found = published.run()
    verdicts = {n: row["answer"] for n, row in found["rows"].items()}
    assert verdicts == {"1": OPEN, "14": OPEN, "28": EQUAL, "39": WITHIN}
    assert (
        found["summary"]["rows"][OPEN] == 2
        and found["values"]["28: precision at which prefetching pays, 0"]
    )
