"""The study of what a prompt says about its answer, on traces that it makes, against sets."""

from collections import Counter

import numpy as np
import pytest

from moelab.bench import parser_of
from notebooks.studies import answers as study

T, L, E, K = 20, 2, 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two texts of which the prompt's tokens come first; and the same, all of it as decoded."""
    root = tmp_path_factory.mktemp("traces")
    draw = np.random.default_rng(0)
    ids = np.stack([draw.permutation(E)[:K] for _ in range(T * L)]).reshape(T, L, K)
    of = {"ids": ids, "sequence": np.arange(T) // 10, "position": np.arange(T) % 10, "experts": E}
    np.savez(root / "told.npz", **of, phase=(np.arange(T) % 10 > 5).astype(np.uint8))
    np.savez(root / "untold.npz", **of, phase=np.ones(T, np.uint8))
    return root


def test_hits_of_answers_are_those_that_sets_count(folder):
    """In memory for all that stays: a prompt's x most used of each layer, and nothing else."""
    given = ["--traces", str(folder), "--tokens", "0", "--shares", "0.375"]
    options = vars(parser_of("answers").parse_args(given))
    ((_, rows),) = study.run(**{name: options[name] for name in study.OPTIONS}).items()
    assert list(rows) == ["told", "untold, half a text as prompt"]
    (_, trace), _ = options["traces"]
    ids, hits = trace.ids.numpy(), 0
    for text in (ids[:10], ids[10:]):
        for layer in range(L):
            used = Counter(text[:6, layer].flatten().tolist())
            kept = sorted(used, key=lambda expert: (-used[expert], expert))[:3]
            hits += int(np.isin(text[6:, layer], kept).sum())
    assert rows["told"]["prompt, layer"] == hits / rows["told"]["requests"]
    assert rows["told"]["requests"] == 2 * 4 * L * K and rows["told"]["tokens"] == 8


def test_half_a_text_stands_for_a_prompt_that_nobody_told(folder):
    (_, told), (_, untold) = study.Traces(str(folder))
    assert study.with_prompts(told) is told
    assert study.with_prompts(untold).phase.tolist() == [0] * 5 + [1] * 5 + [0] * 5 + [1] * 5
