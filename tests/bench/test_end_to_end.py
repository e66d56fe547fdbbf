"""End to end on a tiny model: no speed without the right output, every figure beside its limit,
fronts by brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.bench import end_to_end, harness, peers
from moelab.bench.end_to_end import BASE, RESIDENT, ablation, divergence, front, parts, together
from moelab.bench.harness import EngineBenchmark
from moelab.bench.limits import LayerRecord, on_demand_limit, overlapped_limit
from moelab.claims import ledger
from moelab.specs import MoESpec
from moelab.viz.end_to_end_figures import against, fronts

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
        for one in report if isinstance(report, list) and options["predictor"] else ():
            one["digest"] = "another"
        return report

    right = peers.run
    monkeypatch.setattr(harness.peers, "run", wrong)
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
    monkeypatch.setattr(harness.peers, "run", remembered)
    monkeypatch.setattr(end_to_end, "PROCESS", 0)
    monkeypatch.setattr(EngineBenchmark, "others", lambda *_: {})
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

    right, asked = EngineBenchmark.report, []
    monkeypatch.setattr(EngineBenchmark, "report", stops)
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


def test_a_configuration_is_made_of_techniques_that_go_together():
    assert parts(BASE) == [] and parts("bf12 + fast") == ["bf12", "fast"]
    with pytest.raises(ValueError, match="names warp; a configuration is"):
        parts("bf12 + warp")
    with pytest.raises(
        ValueError, match="huffman and bf12 exclude each other: both decide on the codec"
    ):
        parts("huffman + bf12")
    sources = {claim.source for claim in ledger()} | {"moelab"}
    assert {technique.source for technique in end_to_end.TECHNIQUES.values()} <= sources


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


def test_a_table_of_times_has_a_column_for_each_budget_and_rate():
    sections = {"x": SECTION["x"], "y": {BASE: {"TPOT s": 0.5}, "fast": {"result": "killed"}}}
    found = {row[""]: row for row in end_to_end.tpots(sections)}
    assert [*found] == [*ROWS] and found[BASE] == {"": BASE, "x": 8000, "y": 500}
    assert found["fast"] == {"": "fast", "x": 7000, "y": None}


def test_winners_are_the_fastest_of_each_kind():
    # few bits are no lossless way, however little a random model's KL is
    rows = {
        name: of | ({"KL": 0.2} if name == "bf12 + fast" else {"KL": 1e-5})
        for name, of in SECTION["x"].items()
    } | {
        RESIDENT: {"TPOT s": 0.1},
        "accelerate disk": {"result": "absent"},
        "transformers mmap": {
            "TPOT s": 0.1,
            "result": "no control group can be made here: nothing was limited",
        },
    }
    assert end_to_end.winners({"x": rows}) == {
        "x": {
            "lossless, ours": "huffman + prefetch",
            "lossless, ours, ms": 4000,
            "lossless, others": "llama.cpp",
            "lossless, others, ms": 1000,
            "lossless: ours ÷ others": 4,
            "lossless: 95 % from": 4,
            "lossless: to": 4,
            "any, ours": "mxfp4 + fast",
            "any, ours, ms": 2000,
            "any, others": "llama.cpp",
            "any, others, ms": 1000,
            "any: ours ÷ others": 2,
            "any: 95 % from": 2,
            "any: to": 2,
        }
    }


def test_an_ablation_takes_one_technique_away():
    rows = SECTION["x"] | {
        "bf12 + fast + prefetch": {"TPOT s": 2.0, "each token s": [2.0] * 6},
        "bf12 + prefetch": {"result": "killed"},
        "fast + prefetch": {"TPOT s": 5.0, "each token s": [5.0] * 6},
    }
    found = ablation({"x": rows})
    assert {name: of["÷ bf12 + fast + prefetch"] for name, of in found.items()} == {
        "without bf12, x": 2.5,
        "without prefetch, x": 1.5,
        "with none, x": 4,
    }
    assert (
        found["with none, x"]["95 % from"] == 4 * TOKENS[0]
        and found["with none, x"]["to"] == 4 * TOKENS[-1]
    )
    assert (
        ablation({"x": {BASE: {"result": "killed"}}})
        == {}
        == ablation({"x": {BASE: SECTION["x"][BASE]}})
    )


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(max_size=3), st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12
    )
)
def test_the_front_is_what_nothing_beats(points):
    rows = {name: {"a": a, "b": b} for name, (a, b) in points.items()} | {"no b": {"a": -1}}
    best = front(rows, "a", "b")
    for name, (a, b) in points.items():
        beaten = any(c <= a and d <= b and (c < a or d < b) for c, d in points.values())
        assert (name in best) == (not beaten)
    assert best == sorted(best, key=lambda name: points[name]) and "no b" not in best


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


def test_the_figures_draw_what_is_in_the_tables(found):
    sections = {title: rows for title, rows in found.items() if " of experts, " in title}
    figure = against(sections)
    drawn = sorted(x for one in figure.data if one.name != "limit" for x in one.x)
    assert drawn == pytest.approx(
        sorted(
            1e3 * row["TPOT s"]
            for rows in sections.values()
            for row in rows.values()
            if "TPOT s" in row
        )
    )
    assert len({one.marker.symbol for one in figure.data}) == 2  # a budget, and the limits
    rows = sections["75% of experts, 100 MB/s"]
    points = {name: (row["KL"], row["TPOT s"]) for name, row in rows.items() if "KL" in row}
    figure = fronts({"KL": (points, front(rows, "KL", "TPOT s"))}, "TPOT (s)")
    assert sorted(np.concatenate([one.x for one in figure.data if one.mode != "lines"])) == sorted(
        x for x, _ in points.values()
    )


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)),
        min_size=1,
    )
)
def test_trades_are_those_of_the_first_rate_that_no_other_beats(rows):
    def table(rows):
        return {name: {"least GB": gb, "TPOT s": s, "KL": kl} for name, (gb, s, kl) in rows.items()}

    sections = {
        "25% of experts, 20 MB/s": table(rows),
        "25% of experts, 80 MB/s": table({"a": (0, 0, 0)}),
    }
    for (points, best), at in zip(end_to_end.trades(sections).values(), (0, 2)):
        assert points == {
            f"{name}, 25%" if at == 0 else name: (row[at], row[1]) for name, row in rows.items()
        }
        for name, (x, y) in points.items():
            beaten = any(a <= x and b <= y and (a < x or b < y) for a, b in points.values())
            assert (name in best) != beaten
