"""End to end on a tiny model: no speed without the right output, every figure beside its limit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.bench import end_to_end, grid, peers
from moelab.bench.end_to_end import BASE, RESIDENT, together
from moelab.bench.grid import Experiment, divergence
from moelab.bench.limits import LayerRecord, on_demand_limit, overlapped_limit
from moelab.specs import MoESpec

SPEC = MoESpec(
    "tiny", "qwen3_moe", 2, (0, 1), 8, 2, 64, 32, vocab=96, heads=2, kv_heads=1, head_dim=32
)
ARMS = ("huffman", "prefetch", "huffman + prefetch", "mxfp4 + fast")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return end_to_end.run(
        ARMS,
        (0.75,),
        (100, 0),
        contexts=(5,),
        decode=3,
        here=True,
        spec=SPEC,
        folder=tmp_path_factory.mktemp("bench"),
    )


def test_a_table_for_each_budget_and_rate_has_every_configuration(found):
    titles = [f"75% of experts, {rate}" for rate in ("100 MB/s", "the disk as it is")]
    assert list(end_to_end.titled(found)) == titles
    for title in titles:
        rows, peers_ = (
            found[title],
            [RESIDENT]
            + ["LRU baseline", "transformers mmap", "accelerate disk", *end_to_end.absent(False)]
            * title.endswith("is"),
        )
        assert set(rows) == {BASE, *ARMS, *peers_}
        for name in (BASE, *ARMS):
            row = rows[name]
            assert (
                row["TPOT s"] > 0
                and row["TTFT s"] > 0
                and row["TPOT limit s"] > 0
                and row["CPU s a token"] > 0
            )
            assert row["output"] == "= eager" or name == "mxfp4 + fast" and row["KL"] > 0
            assert row["KL"] == 0 or name == "mxfp4 + fast"
        assert all(
            rows[name].keys() == {"result"} for name in end_to_end.absent(False) if name in rows
        )
        assert rows[BASE]["÷ on demand"] == 1 and rows[BASE]["simulated TPOT s"] > 0
        assert f"{BASE}; {title}" in (said := end_to_end.foretold(end_to_end.titled(found)))
        assert f"prefetch; {title}" not in said
    assert set(found["together (two sources)"]) == {
        f"{title}: huffman + prefetch" for title in titles
    }


def test_a_wrong_output_has_no_speed(tmp_path, monkeypatch):
    def wrong(name, options):
        report = right(name, options)
        return report | ({"digest": "another"} if options.get("predictor") else {})

    right = peers.run
    monkeypatch.setattr(grid.peers, "run", wrong)
    found = end_to_end.run(
        ("prefetch",),
        (0.5,),
        (0,),
        contexts=(3,),
        decode=2,
        here=True,
        alone=True,
        simulated=False,
        spec=SPEC,
        folder=tmp_path,
    )
    rows = found["50% of experts, the disk as it is"]
    assert (
        rows["prefetch"] == {"result": "≠ EAGER: its speed does not count"}
        and rows[BASE]["output"] == "= eager"
    )


def test_experts_that_do_not_fit_in_the_process_are_not_loaded_and_still_compared_with(
    tmp_path, monkeypatch
):
    def remembered(name, options):
        ran.append(name)
        return right(name, options)

    right, ran = peers.run, []
    monkeypatch.setattr(grid.peers, "run", remembered)
    monkeypatch.setattr(end_to_end, "PROCESS", 0)
    monkeypatch.setattr(Experiment, "others", lambda *_: {})
    found = end_to_end.run(
        (), (0.5,), (0,), contexts=(3,), decode=2, here=True, spec=SPEC, folder=tmp_path
    )
    rows = found["50% of experts, the disk as it is"]
    assert rows[BASE]["output"] == "= eager" and "eager" not in ran
    assert rows[RESIDENT]["result"].startswith(
        "all experts take 0.00 GB, and this process has 0.00 GB"
    )


def test_contexts_and_batches_are_axes_and_what_is_done_is_kept(tmp_path, monkeypatch):
    def stops(bench, arm):
        asked.extend((arm[0], len(set(map(tuple, bench.tokens))), len(row)) for row in bench.tokens)
        if (bench.prompt, len(bench.tokens), arm[0]) == (6, 1, "moelab"):
            raise KeyboardInterrupt
        return right(bench, arm)

    right, asked = Experiment.report, []
    monkeypatch.setattr(Experiment, "report", stops)
    found = end_to_end.run(
        ("fast",),
        (0.5,),
        (0,),
        contexts=(3, 6),
        decode=2,
        batches=(1, 2),
        here=True,
        alone=True,
        simulated=False,
        spec=SPEC,
        folder=tmp_path,
    )
    sections = end_to_end.titled(found)
    assert list(sections) == [
        f"50% of experts, the disk as it is, context 3, batch {n}" for n in (1, 2)
    ]
    assert found["conditions"]["stopped"] == "after 2 of 4 tables"
    for rows in sections.values():
        assert rows[BASE]["output"] == "= eager" and 0 <= rows["fast"]["KL"] < 1e-2
    assert rows[BASE]["tokens/s"] > 1 / rows[BASE]["TPOT s"]  # two at a time
    assert set(asked) == {
        ("eager", 1, 5),
        ("moelab", 1, 5),
        ("eager", 2, 5),
        ("moelab", 2, 5),
        ("eager", 1, 8),
        ("moelab", 1, 8),
    }  # each sequence is of its own tokens


def test_your_own_model_by_a_text_of_its_own_tokenizer(tmp_path):
    from moelab.files import small_model

    found = end_to_end.run(
        (),
        (0.5,),
        (0,),
        contexts=(8,),
        decode=2,
        here=True,
        alone=True,
        simulated=False,
        model=str(small_model()),
        folder=tmp_path,
    )
    assert found["conditions"]["tokens"].startswith("of a text")
    assert found["50% of experts, the disk as it is"][BASE]["output"] == "= eager"


def test_the_divergence_is_torchs():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)) * 50
    other = logits + torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.kl_div(
        other.double().log_softmax(1),
        logits.double().log_softmax(1),
        log_target=True,
        reduction="batchmean",
    )
    assert divergence(other.numpy(), logits.numpy()) == pytest.approx(expected.item())
    assert divergence(logits.numpy(), logits.numpy()) == 0


ROWS = {
    BASE: 8.0,
    "huffman": 5.0,
    "prefetch": 6.0,
    "huffman + prefetch": 4.0,
    "bf12": 6.0,
    "fast": 7.0,
    "bf12 + fast": 3.0,
    "mxfp4 + fast": 2.0,
    "llama.cpp": 1.0,
}
TOKENS = [0.5, 0.9, 1.0, 1.0, 1.1, 2.0]  # times the median
SECTION = {
    "x": {
        name: {
            "TPOT s": s,
            "each token s": [s * of for of in TOKENS],
            "MB a token": 1.0,
            "stall ms": s,
            "result": "no limit",
        }
        for name, s in ROWS.items()
    }
}


def test_two_techniques_together_are_compared_with_each_alone():
    assert together(SECTION) == {
        "x: huffman + prefetch": {
            "÷ better of both": 0.8,
            "95 % from": 0.8,
            "to": 0.8,
            "beats each": True,
            "MB a token, huffman": 1.0,
            "MB a token, prefetch": 1.0,
            "MB a token, both": 1.0,
            "stall ms, huffman": 5.0,
            "stall ms, prefetch": 6.0,
            "stall ms, both": 4.0,
        }
    }  # bf12 and fast are of one source; mxfp4 alone is absent
    once = SECTION["x"]["huffman"] | {
        "each token s": [2.0, 4.5, 5, 5, 5, 10]
    }  # one token in six is faster
    assert together({"x": SECTION["x"] | {"huffman": once}})["x: huffman + prefetch"] == {
        **together(SECTION)["x: huffman + prefetch"],
        "to": 1.0,
        "beats each": False,
    }


@given(
    st.lists(st.builds(LayerRecord, st.integers(0, 10**9), *[st.floats(0, 9)] * 3), min_size=1),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_what_overlaps_wholly_takes_no_longer_than_what_is_read_on_demand(records, steps, workers):
    less, more = (
        limit(records, 1e9, steps, workers) for limit in (overlapped_limit, on_demand_limit)
    )
    assert less <= more * (1 + 1e-9)
    assert less >= max(
        sum(r.bytes for r in records) / 1e9, sum(r.other_s for r in records)
    ) / steps * (1 - 1e-9)
