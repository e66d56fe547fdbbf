"""A stress test of the offloading engine: many generations, each set up at random, each equal to
eager bit for bit; `make stress` runs hundreds.

Each one draws a codec, a budget from the least that works to everything, pools, policy, scope,
workers, staging, good or bad predictions to prefetch one or two layers ahead, batch and
lengths; reads are delayed at random. It stops at the first output that differs from eager's, and with
the stacks of all threads if one generation takes too long."""

import random
from collections import Counter
from contextlib import closing

import pytest
import torch

from moelab import convert, open_model
from moelab.base.progress import progress
from moelab.base.registry import make
from moelab.cache.policies import POLICIES
from moelab.cache.pools import Pools
from moelab.offloading import loading
from moelab.offloading.offload import offload
from moelab.offloading.slots import Sizes
from moelab.speculate import Speculation
from tests.depth import depth
from tests.models import tiny
from tests.offloading.test_interruption import watched
from tests.offloading.test_offload import generate, jitter

MODELS = ("qwen3_moe", "qwen2_moe")
CODECS = ("raw", "bf12", "zstd-huffman", "huffman")


def draw(rng, store):
    """Options of `offload`, all that are allowed being about equally likely."""
    everyone = store.spec.L * store.spec.E
    workers, staging = rng.randint(1, 4), rng.choice((None, 1, 2, 5))
    ahead = rng.choice((0, 1, 3, 8))
    options = {
        "workers": workers,
        "staging": staging,
        "ahead": ahead,
        "cache": rng.choice([p for p in POLICIES if p != "belady"]),
        "scope": rng.choice(("model", "layer")),
        "mode": rng.choice(("auto", "buffered")),
        "verify": rng.random() < 0.5,
    }
    sizes, loads = Sizes.of(store), ahead + (staging or workers + 2)
    if rng.random() < 0.5:  # whole experts only
        least = (ahead + (staging or 1)) * sizes.in_flight
        everything = everyone * sizes.full + loads * sizes.in_flight
        budget = round(rng.choice((least, everything, rng.uniform(least, everything))))
        return options | {"budget": budget}
    copies = store.spec.L if options["scope"] == "layer" else 1
    most = everyone // (2 * copies)
    pools = Pools(**{name: rng.choice((0, rng.randint(0, most))) for name in "FCSE"})
    sizes = Sizes.of(store, False if pools.C or pools.S or pools.E else None)
    room = copies * pools.nbytes(sizes.full, sizes.sm, sizes.e) + loads * sizes.in_flight
    return options | {"plan": pools, "budget": max(2, room + rng.choice((0, 5 * sizes.in_flight)))}


def stress(n, folder, seed=0):
    """`n` generations; returns the cache's counts over all.

    Raises AssertionError, with the options, at the first output that differs from eager's."""
    rng, counts, references, stores = random.Random(seed), Counter(), {}, []
    for name in MODELS:
        references[name] = open_model(tiny.save(name, folder / name, torch.bfloat16))
        for codec in CODECS:
            stores.append((name, convert(folder / name, folder / f"{name}-{codec}", codec)))
    for i in progress(range(n), "stress", unit="generations"):
        name, store = rng.choice(stores)
        options = draw(rng, store)
        given = {"seed": i, "batch": rng.randint(1, 4), "new": rng.randint(1, 6)}
        given["prompt"] = rng.choice((1, 2, rng.randint(3, 40)))
        said = f"generation {i} of seed {seed}: {name}, {store.codec}, {options}, {given}"
        wanted = generate(references[name], **given)
        guess, distance = rng.choice(("router", "random", "previous")), rng.choice((1, 1, 2))
        with (
            watched(),
            closing((model := offload(store, **options)).moelab) as session,
            Speculation(model, make("predictor", guess, model, ahead=distance), "hint"),
        ):
            jitter(model, random.Random(i))
            for _ in range(rng.choice((1, 1, 2))):  # then a cache that is not empty
                same = all(map(torch.equal, generate(model, **given), wanted))
                assert same, f"{said}: not eager's output"
            found = session.residency.counters
        counts += Counter(
            hits=sum(found.hits.values()), misses=found.misses, evictions=found.evictions
        )
    return counts


def test_stress_finds_nothing(tmp_path):
    assert stress(depth(8, 300), tmp_path)["misses"] > 0


def test_stress_notices_a_wrong_weight(monkeypatch, tmp_path):
    right = loading.on_cpu

    def wrong(slots, kind, chunks, piece, load):
        right(slots, kind, chunks, piece, load)
        slots.tensors(load.slots["full"], load.key.layer)[piece.tensor].add_(1)

    monkeypatch.setattr(loading, "on_cpu", wrong)
    monkeypatch.setitem(globals(), "CODECS", ["huffman"])  # others are not decoded
    monkeypatch.setitem(globals(), "draw", lambda rng, store: {"budget": 1.0})
    with pytest.raises(AssertionError, match="not eager's"):
        stress(1, tmp_path)
