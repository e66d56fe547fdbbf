"""The profiler: everything is measured, on real experts, and nothing is left changed; what follows
from the samples."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import open_model
from moelab.checkpoint.convert import convert
from moelab.models import discover, plugged
from moelab.offloading.requests import Delays
from moelab.offloading.slots import Sizes
from moelab.registry import make
from moelab.simulation import microbenchmarks
from moelab.simulation import profile as profiling
from moelab.simulation.microbenchmarks import EXPERT_TOKENS, FORWARD_TOKENS, Microbenchmarks
from moelab.simulation.profile import Profile, profile
from moelab.simulation.simulator import MachineRates
from moelab.store.layout import run
from moelab.store.reader import Reader, StoreExperts
from moelab.zipmoe.planning import plan
from tests.checkpoint.stores import open_store
from tests.models import tiny
from tests.models.sweep import generate


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    return convert(tiny.save("qwen3_moe", folder / "m", torch.bfloat16), folder / "s")


@pytest.fixture(scope="module")
def measured(store):
    return profile(store, seconds=0, mode="buffered")


@pytest.fixture
def one_round(monkeypatch):
    monkeypatch.setattr(profiling, "MINIMUM", 1)


def test_everything_is_measured_as_often(measured, store):
    names = {
        "read both",
        "read E",
        "read SM",
        "decompress",
        "recover",
        "decode",
        "copy",
        "matmul float32",
        "matmul bfloat16",
        *(f"expert {n}" for n in EXPERT_TOKENS),
        *(f"{part} {n}" for n in FORWARD_TOKENS for part in ("other", "head")),
        *(f"{a} beside {b}" for a, b in permutations(("read", "decode", "expert"), 2)),
        "read alone",
        "decode alone",
        "expert alone",
    }
    assert names <= set(measured.seconds)
    assert {len(samples) for name, samples in measured.seconds.items() if "matmul" not in name} == {
        profiling.MINIMUM
    }
    assert min(map(min, measured.seconds.values())) > 0
    lengths = {
        part: statistics.fmean(
            run(entries, part)[1] for layer in store.layers for entries in layer.experts
        )
        for part in ("E", "SM")
    }
    assert (measured.nbytes["e"], measured.nbytes["sm"]) == (
        round(lengths["E"]),
        round(lengths["SM"]),
    )
    assert (measured.mode, measured.dtype, measured.codec, measured.N) == (
        "buffered",
        "bfloat16",
        store.codec,
        2,
    )


@pytest.mark.parametrize("codec", ["raw", "bf12"])
def test_what_is_read_in_place_is_only_checked(codec, tmp_path, one_round):
    source = (
        None if codec == "bf12" else tiny.save("qwen3_moe", tmp_path / "m", torch.bfloat16)
    )  # tiny rows are short
    raw = convert(source, tmp_path / "s", codec=codec)
    found = profile(raw, seconds=0, mode="buffered", workers=2)
    delays = found.delays()
    assert delays.sm_read == delays.recover == 0 < delays.decode_at_once
    assert delays.e_read == statistics.median(found.seconds["read both"]) > 0
    with torch.no_grad(), ThreadPoolExecutor(1) as pool, Reader(raw) as reader:
        rounds = Microbenchmarks(
            raw, open_store(raw, mode="buffered"), reader, pool, 1, np.random.default_rng(0)
        )
        rounds._read_in_place()
        source = StoreExperts(raw)
        for slot, key in rounds.full.items():
            held = rounds.slots.tensors(slot, *key)
            assert all(torch.equal(held[name], tensor) for name, tensor in source(*key).items())


def test_reads_are_those_of_the_given_disk(store, one_round):
    """At 1 MB a second a read of n bytes cannot take less than n / 1 MB."""
    slow = profile(store, seconds=0, mode="buffered", bandwidth=1e6)
    for part in ("E", "SM"):
        assert min(slow.seconds[f"read {part}"]) >= 0.99 * slow.nbytes[part.lower()] / 1e6
    assert all(seconds >= 0.99 * size / 1e6 for size, seconds in slow.points("read").items())


@pytest.mark.parametrize("how", [{"codec": "bf12"}, {"quantize": "int4"}], ids=["bf12", "int4"])
@pytest.mark.parametrize("executor", [None, "fast"])
def test_what_is_computed_is_an_expert_by_the_executor(how, executor, tmp_path, one_round):
    store, compact = convert(None, tmp_path / "s", **how), executor == "fast"
    found = profile(store, seconds=0, mode="buffered", executor=executor, compact=compact)
    assert (
        found.nbytes["full"] == Sizes.of(store, None if compact or "codec" in how else False).full
    )
    model, truth = (
        open_model(store.folder, experts="external"),
        StoreExperts(store, mode="buffered"),
    )
    with ThreadPoolExecutor(1) as pool, Reader(store, "buffered") as reader:
        rounds = Microbenchmarks(
            store,
            model,
            reader,
            pool,
            1,
            np.random.default_rng(0),
            make("executor", executor) if executor else None,
            compact,
        )
        with plugged(model, rounds.without_experts, rounds), torch.inference_mode():
            torch.manual_seed(0)
            y, ((expert, slot),) = rounds._computing(3)(), rounds.at.items()
            layer = rounds.full[slot][0]
            torch.manual_seed(0)
            x = torch.randn(3, store.spec.H).to(model.dtype)
            assert torch.allclose(
                y, discover(model)[layer].seam.ffn(x, truth(layer, expert)), rtol=0.02, atol=0.02
            )
            if executor is not None:
                torch.manual_seed(0)
                y, (layer, _) = rounds._together()(), rounds.full[next(iter(rounds.at.values()))]
                assert len(rounds.at) == store.spec.K and {
                    rounds.full[i] for i in rounds.at.values()
                } == {(layer, expert) for expert in rounds.at}
                torch.manual_seed(0)
                x = torch.randn(1, store.spec.H).to(model.dtype)
                each = [
                    discover(model)[layer].seam.ffn(x, truth(layer, expert)) for expert in rounds.at
                ]
                assert torch.allclose(y, sum(each), rtol=0.05, atol=0.05)


def test_pairs_run_side_by_side():
    """Every sample lies within a time in which the other kind was at work; an error of either side
    ends both."""
    spans = {"decode": [], "read": []}

    def sleeping(kind, seconds):
        def sleep():
            start = time.perf_counter()
            time.sleep(seconds)
            spans[kind].append((start, time.perf_counter()))

        return lambda: sleep

    with ThreadPoolExecutor(1) as pool:
        rounds = object.__new__(Microbenchmarks)
        rounds.pools, rounds.seconds = {"decode": pool}, {}
        rounds.work = {"decode": sleeping("decode", 0.004), "read": sleeping("read", 0.001)}
        start = time.perf_counter()
        rounds._side_by_side("decode", "read")
        whole = time.perf_counter() - start
        assert {name: len(samples) for name, samples in rounds.seconds.items()} == {
            "decode beside read": 1,
            "read beside decode": 1,
        }
        assert 0.004 <= rounds.seconds["decode beside read"][0] < whole
        assert 0.001 <= rounds.seconds["read beside decode"][0] < whole
        assert (
            len(spans["read"]) >= 3 <= len(spans["decode"])
            and spans["decode"][0][0] < spans["read"][0][1]
        )
        assert spans["decode"][-1][1] > spans["read"][-1][0]
        rounds.work = rounds.work | {"expert": sleeping("read", 0.002)}
        with ThreadPoolExecutor(1) as rounds.pools["read"]:
            rounds._side_by_side(*rounds.work)
        assert rounds.seconds["decode beside expert and read"][0] >= 0.004
        assert rounds.seconds["read beside decode and expert"][0] >= 0.001
        assert rounds.seconds["expert beside decode and read"][0] >= 0.002
        for kind in ("decode", "read"):
            broken = rounds.work | {kind: lambda: 1 / 0}
            rounds.work, kept = broken, rounds.work
            with pytest.raises(ZeroDivisionError):
                rounds._side_by_side("decode", "read")
            rounds.work = kept


def test_work_that_ran_before_the_other_began_counts_for_nothing(monkeypatch):
    """Others were at work three times already while this thread was not given a core."""
    late = iter([0.02])

    def perf_counter():
        if threading.current_thread() is threading.main_thread():
            time.sleep(next(late, 0))
        return time.perf_counter()

    monkeypatch.setattr(microbenchmarks, "time", SimpleNamespace(perf_counter=perf_counter))
    rounds = object.__new__(Microbenchmarks)
    rounds.work = {"decode": lambda: partial(time.sleep, 0.002), "read": lambda: lambda: None}
    rounds.seconds, rounds.pools = {}, {}
    with ThreadPoolExecutor(1) as rounds.pools["decode"]:
        rounds._side_by_side("decode", "read")
    assert rounds.seconds["decode beside read"][0] >= 0.002


def test_contention_is_the_ratio_to_what_the_same_takes_alone_in_that_round():
    seconds = {
        "read E": [1.0],
        "read SM": [1.0],
        "read both": [2.0],
        "decompress": [1.0],
        "recover": [1.0],
        "decode": [2.0],
        "expert 1": [4.0],
        "expert alone": [4.0, 5.0, 6.0],
        "read alone": [2.0],
        "expert beside decode": [12.0, 10.0, 90.0],
        "read beside expert": [3.0],
    }
    delays = replace_seconds(seconds).delays()
    assert (
        delays.beside == {"expert beside decode": 3.0, "read beside expert": 1.5}
        and delays.one_thread is None
    )
    assert replace_seconds(seconds | {"one thread": [6.0]}).delays().one_thread == 6.0
    assert delays.together == ()
    assert replace_seconds(
        seconds | {"experts 3": [5.0], "experts 8": [6.0, 9.0, 7.0]}
    ).delays().together == ((8, 7.0),)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text", "switch_transformers"])
def test_a_model_is_left_as_it_was(name, tmp_path, one_round):
    source = tiny.save(name, tmp_path / "m", torch.bfloat16)
    store = convert(source, tmp_path / "s", "zstd-huffman")
    model = open_store(store, mode="buffered")
    before = [(layer.seam.executor, layer.seam.source) for layer in discover(model)]
    found = profile(store, model, workers=2, seconds=0, mode="buffered")
    assert [(layer.seam.executor, layer.seam.source) for layer in discover(model)] == before
    assert all(
        torch.equal(a, b) for a, b in zip(generate(model, 0), generate(open_model(source), 0))
    )
    assert len(found.seconds["decode"]) == 2 * len(found.seconds["read both"])
    assert found.workers == 2 and found.model == store.spec.name


def test_a_model_is_left_as_it_was_after_an_error(store, monkeypatch):
    model = open_store(store, mode="buffered")
    before = [layer.seam.executor for layer in discover(model)]
    monkeypatch.setattr(Microbenchmarks, "_forward", lambda self, tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        profile(store, model, seconds=0, mode="buffered")
    assert [layer.seam.executor for layer in discover(model)] == before


def test_what_is_decoded_are_the_experts(store):
    model, truth = (
        open_model(store.folder, experts="external"),
        StoreExperts(store, mode="buffered"),
    )
    with Reader(store, "buffered") as reader, ThreadPoolExecutor(2) as pool, torch.inference_mode():
        rounds = Microbenchmarks(store, model, reader, pool, 2, np.random.default_rng(1))
        for slot, key in rounds.full.items():
            for tensor in rounds.slots.tensors(slot, *key).values():
                tensor.zero_()
        for _ in range(rounds.kept // 2):
            rounds.done += 1
            rounds._read_and_decode()
        rounds.pieces.close()
    assert len(rounds.full) == rounds.kept == 16
    for slot, key in rounds.full.items():
        found = rounds.slots.tensors(slot, *key)
        assert all(torch.equal(found[name], tensor) for name, tensor in truth(*key).items())


def test_delays_and_the_device_are_the_medians(measured):
    delays = measured.delays()
    for field, name in (
        ("e_read", "read E"),
        ("sm_read", "read SM"),
        ("decompress", "decompress"),
        ("recover", "recover"),
    ):
        assert getattr(delays, field) == statistics.median(measured.seconds[name])
    assert all(
        delays.expert(n) == pytest.approx(measured.median(f"expert {n}")) for n in EXPERT_TOKENS
    )
    assert (delays.e_bytes, delays.sm_bytes, delays.K) == (
        measured.nbytes["e"],
        measured.nbytes["sm"],
        1,
    )
    device = measured.to_device()
    assert {figure.kind for figure in device.figures.values()} == {"measured"}
    assert all(measured.when in figure.source for figure in device.figures.values())
    both = measured.nbytes["e"] + measured.nbytes["sm"]
    assert device["storage_read_gbs"] == pytest.approx(
        both / statistics.median(measured.seconds["read both"]) / 1e9
    )
    rates = MachineRates.of(device)
    assert rates.read == pytest.approx(1e9 * device["storage_read_gbs"]) and rates.flops > 0


def test_a_plan_can_be_made_of_it(measured, store):
    sizes = measured.nbytes["full"], measured.nbytes["sm"], measured.nbytes["e"]
    f = np.full(store.spec.E, store.spec.K / store.spec.E)
    found = plan(f, 3 * sizes[0], sizes, store.spec.K, measured.delays(), 1, step=0.25)
    assert found.pools.nbytes(*sizes) <= 3 * sizes[0] and found.seconds > 0


# ----------------------------------------------------------------------------------------- what
# follows from samples

positive = st.floats(1e-6, 10)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 200), positive), min_size=1, max_size=6, unique_by=lambda p: p[0]
    ).map(sorted)
)
def test_a_fit_is_exact_for_the_fewest_tokens_and_the_best_slope_beyond(points):
    made = replace_seconds({f"other {n}": [seconds] for n, seconds in points})
    base, token = made.other
    n0, once = points[0]
    assert base >= 0 and token >= 0 and base + token * n0 == pytest.approx(once)

    def error(slope):
        return sum(((once + slope * (n - n0)) / y - 1) ** 2 for n, y in points)

    assert all(
        error(token) <= error(other) * (1 + 1e-6) + 1e-9 for other in np.linspace(0, once / n0, 21)
    )
    assert made.fit_error("other") == pytest.approx(
        max(abs((base + token * n) / y - 1) for n, y in points)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 64), positive), min_size=2, max_size=6, unique_by=lambda p: p[0]
    ).map(sorted),
    st.integers(1, 64),
)
def test_delays_between_measurements_are_on_straight_lines(points, tokens):
    delays = Delays(0, 0, 0, 0, 0, 0, computed=tuple(points))
    if points[0][0] <= tokens <= points[-1][0]:
        assert delays.expert(tokens) == pytest.approx(np.interp(tokens, *zip(*points)))
    (n0, low), (n1, high) = points[-2:]
    assert delays.expert(n1 + 10) == pytest.approx(
        max(0, high + 10 * (high - low) / (n1 - n0)), abs=1e-12
    )


def replace_seconds(seconds):
    sizes = {"full": 1, "e": 1, "sm": 1}
    return Profile(seconds, sizes, [], 1, 3, "m", "raw", "float32", "direct", 1, 1, "now", "here")


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(range(9)).flatmap(lambda order: st.tuples(st.just(order), st.integers(4, 9)))
)
def test_the_calmer_half_of_the_rounds_is_kept_in_order(drawn):
    """Everything of a round takes as many times longer; what was not measured in every round
    stays."""
    order, rounds = drawn
    factors = [1 + 0.1 * place for place in order[:rounds]]
    found = replace_seconds(
        {
            "read both": [2.0 * f for f in factors],
            "expert 1": [0.1 * f for f in factors],
            "resident": [5.0],
        }
    ).calm()
    half = sorted(factors)[: max((rounds + 1) // 2, 3)]
    kept = [f for f in factors if f in half]
    assert found.seconds["read both"] == [2.0 * f for f in kept] and found.seconds["resident"] == [
        5.0
    ]
    assert found.seconds["expert 1"] == [0.1 * f for f in kept]


def test_samples_of_two_times_are_joined():
    first, then = (
        replace_seconds({"read both": [1.0, 2.0]}),
        replace_seconds({"read both": [3.0], "resident": [4.0]}),
    )
    joined = replace(first, others=0.5, when="before") + replace(then, others=0.1)
    assert joined.seconds == {"read both": [1.0, 2.0, 3.0], "resident": [4.0]}
    assert (joined.others, joined.when) == (0.5, "now") and (first + then).others is None


def test_saved_and_loaded_it_is_the_same(measured, tmp_path):
    path = measured.save(tmp_path / "new" / "profile.json")
    assert Profile.load(path) == measured and [f.name for f in path.parent.iterdir()] == [
        "profile.json"
    ]
    assert Profile.load(replace(measured, workers=3).save(path)).workers == 3


def test_errors_say_what_to_do(measured, store, tmp_path):
    with pytest.raises(FileNotFoundError, match="moelab profile"):
        Profile.load(tmp_path / "none.json")
    for content in ("{", "[]", '{"format": "other"}', '{"format": "moelab.profile/2"}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match="x.json is no readable profile"):
            Profile.load(tmp_path / "x.json")
    with pytest.raises(KeyError, match="expert 1"):
        measured.median("expert 3")
    with pytest.raises(ValueError, match="workers is 0"):
        profile(store, workers=0)


def test_the_command_prints_and_keeps(store, tmp_path, capsys, one_round):
    parser = argparse.ArgumentParser()
    profiling.add_arguments(parser)
    arguments = [str(store.folder), "--seconds", "0.001", "--output", str(tmp_path / "p")]
    assert profiling.main(parser.parse_args(arguments)) == 0
    printed = capsys.readouterr().out
    assert (
        "read both" in printed
        and "a token" in printed
        and Profile.load(tmp_path / "p").model == store.spec.name
    )
