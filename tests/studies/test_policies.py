"""The study of cache policies on traces, on traces that it makes: against the past in a list."""

from argparse import ArgumentTypeError

import numpy as np
import pytest

from moelab.bench import parser_of
from moelab.cache.residency import Pools, Residency
from notebooks.studies import policies as study

T, L, E, K = 40, 3, 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two texts, of which the prompt's tokens come first; in a folder of its own and beside it."""
    root = tmp_path_factory.mktemp("traces")
    draw = np.random.default_rng(0)
    ids = np.stack([draw.permutation(E)[:K] for _ in range(T * L)]).reshape(T, L, K)
    sequence = np.arange(T) // 20
    of = {"ids": ids, "sequence": sequence, "phase": (np.arange(T) % 20 > 4).astype(np.uint8)}
    (root / "one").mkdir()
    np.savez(root / "one" / "trace.npz", **of, position=np.arange(T) % 20, experts=E)
    np.save(root / "two.npy", ids)
    return root


def lru(steps, held):
    """Hits by a list, the oldest first; experts of a step do not leave in it."""
    kept, hits = [], 0
    for layer, tokens in steps:
        wanted = [(layer, expert) for expert in sorted(tokens)]
        hits += sum(key in kept for key in wanted)
        for key in [key for key in wanted if key not in kept]:
            if len(kept) >= held:
                old = [other for other in kept if other not in wanted]
                if not old:
                    continue
                kept.remove(old[0])
            kept.append(key)
        kept = [key for key in kept if key not in wanted] + [key for key in wanted if key in kept]
    return hits


def test_replays_are_what_a_list_counts(folder):
    name, trace = next(iter(study.Traces(str(folder))))
    assert name == "one"
    steps = study.steps(trace)
    assert steps == [
        (layer, dict.fromkeys(sorted(row), 1))
        for token in trace.ids.tolist()
        for layer, row in enumerate(token)
    ]
    by_layer = [[step for step in steps if step[0] == layer] for layer in range(L)]
    hits = sum(lru(of, 4) for of in by_layer)
    assert study.hit_rate(trace, steps, "lru, layer", 0.5) == hits / (T * L * K)


def test_a_prompt_in_one_step_asks_once_for_each_expert(folder):
    _, trace = next(iter(study.Traces(str(folder))))
    steps = study.steps(trace, prefill_at_once=True)
    assert len(steps) == (T - 2 * 4) * L
    for layer in range(L):
        at, tokens = steps[layer]
        assert at == layer and sum(tokens.values()) == 5 * K
        assert set(tokens) == set(trace.ids[:5, layer].flatten().tolist())


def test_records_name_traces_and_their_digests(folder):
    options = vars(parser_of("policies").parse_args(["--traces", str(folder), "--shares", "0.5"]))
    told = str(options["traces"])
    assert str(folder) not in told and told.startswith("one ") and "two " in told
    found = study.run(options["traces"], tokens=0, shares=[0.5])
    whole, at_once = found.values()
    assert list(whole) == ["one", "two"] and list(at_once) == ["one"]
    for row in whole.values():
        assert all(row[arm] <= row["belady"] for arm in study.ARMS)
    (folder / "none").mkdir()
    for name, said in {"none": "has no trace", "elsewhere": "is no folder"}.items():
        with pytest.raises(ArgumentTypeError, match=said):
            study.Traces(str(folder / name))


@pytest.mark.parametrize(
    "capacity, steps, victim",
    [
        # not used when its layer last ran, though another layer's ran more recently
        (3, [(0, {0: 1}), (1, {0: 1}), (0, {1: 1}), (1, {0: 1}), (2, {0: 1})], (0, 0)),
        # the running layer's own is stale as soon as it is not asked for
        (3, [(0, {0: 1}), (1, {0: 1}), (2, {0: 1}), (0, {0: 1}), (1, {1: 1})], (1, 0)),
        # none is stale: layer 2 comes next, layer 0 only in the next pass
        (3, [(0, {0: 1}), (1, {0: 1}), (2, {0: 1}), (0, {0: 1}), (1, {0: 1, 1: 1})], (0, 0)),
        # within a layer, the least recently used
        (3, [(0, {1: 1}), (0, {0: 1}), (0, {2: 1}), (0, {3: 1})], (0, 1)),
    ],
)
def test_least_stale_by_hand(capacity, steps, victim):
    residency = Residency(3, 4, Pools(F=capacity), study.LeastStale)
    decisions = [residency.begin(*step) for step in steps]
    assert [step.evicted for step in decisions] == [[]] * (len(steps) - 1) + [[victim]]
