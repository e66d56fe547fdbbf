"""The study of implanted routing, on a trace that the test makes."""

import numpy as np
import pytest

from moelab.bench.implant import AHEAD
from notebooks.studies import implanted


def test_engines_on_a_trace_of_the_tests_own(tmp_path):
    T, L, E, K = 48, 3, 8, 2
    ids = np.random.default_rng(0).random((T, L, E)).argsort(-1)[..., :K].astype(np.int16)
    ids[5, 1, 0] = E  # a token that skips a layer's expert is left out
    np.savez(tmp_path / "made.npz", ids=ids, experts=np.int16(E))
    folder = implanted.local(str(tmp_path))
    found = implanted.run(folder, tokens=40, share=0.5, width=64, inner=32)
    ((title, rows),) = found.items()
    assert "result" not in rows["the trace"], rows
    assert title == f"{tmp_path.name} made, 50% of experts"
    kept = np.delete(ids, 5, 0)[:40]
    order, hits = [], 0
    for key in (kept + E * np.arange(L)[:, None]).reshape(-1).tolist():
        hits += key in order
        order = [of for of in order if of != key][-(E * L // 2) + 1 :] + [key]
    assert rows["the trace"]["LRU hits"] == pytest.approx(hits / kept.size)
    assert rows["the trace"]["tokens"] == 40
    ran = rows["transformers"]
    assert ran["slots right"] == 1 and ran["greedy decoding"] == "follows"
    assert abs(ran["a layer early"] - AHEAD) < 0.1
    moelab = rows["moelab"]
    assert abs(moelab["LRU hits"] - moelab["LRU hits, its slots, the trace"]) < 0.05


def test_no_path_of_a_machine_is_in_a_record(tmp_path):
    assert str(implanted.local(str(tmp_path))) == tmp_path.name
    with pytest.raises(ValueError, match="--traces FOLDER"):
        implanted.run()
