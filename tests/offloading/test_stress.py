"""A stress test of the offloading engine: many generations, each set up at random, each equal to
eager bit for bit; `make stress` runs hundreds.

Each one draws a codec, a budget from the least that works to everything, pools, policy, scope,
margin, workers, staging, good or bad predictions to prefetch one or two layers ahead, batch, lengths
and padding; reads and workers are delayed at random. It stops at the first output that differs from
eager's, and with the stacks of all threads if one generation takes too long."""

from __future__ import annotations

import faulthandler
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moelab import convert, open_model
from moelab.cache.policies import NEEDS, POLICIES
from moelab.cache.pools import Pools
from moelab.offloading import decoders
from moelab.offloading.offload import offload
from moelab.offloading.slots import Sizes
from moelab.progress import progress
from moelab.registry import make
from moelab.speculate import Speculation
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader
from tests.depth import depth
from tests.models import tiny

MODELS = ("qwen3_moe", "qwen2_moe")
CODECS = ("raw", "bf12", "zstd-huffman", "huffman")
WATCHDOG = 300  # seconds that one generation may take


def draw(rng: random.Random, store: ExpertStore) -> dict[str, Any]:
    """Options of `offload`, all that are allowed being about equally likely."""
    everyone = store.spec.L * store.spec.E
    workers, staging, ahead = (
        rng.randint(1, 4),
        rng.choice((None, 1, 2, 5)),
        rng.choice((0, 1, 3, 8)),
    )
    options = {
        "workers": workers,
        "staging": staging,
        "ahead": ahead,
        "cache": rng.choice([p for p in POLICIES if p not in NEEDS]),
        "scope": rng.choice(("model", "layer")),
        "margin": rng.choice((None, 0, 1, 4)),
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


def draw_inputs(rng: random.Random) -> dict[str, Any]:
    """Arguments of `generate`: a batch of prompts, padded on the left, and how many tokens to
    add."""
    batch, length, new = (
        rng.randint(1, 4),
        rng.choice((1, 2, rng.randint(3, 40))),
        rng.randint(1, 6),
    )
    ids = torch.tensor([[rng.randrange(3, 96) for _ in range(length)] for _ in range(batch)])
    mask = torch.ones_like(ids)
    if length > 2:
        padded = rng.randrange(length - 1)
        ids[0, :padded], mask[0, :padded] = 0, 0
    return {
        "inputs": ids,
        "attention_mask": mask,
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
    }


def output(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and all logits of a generation."""
    said = model.generate(**inputs, output_logits=True, return_dict_in_generate=True)
    return said.sequences, torch.stack(said.logits)


@contextmanager
def held_up(rng: random.Random) -> Iterator[None]:
    """Reads and workers take a random while longer; if it takes too long, the process ends with
    the stacks of all threads."""
    longest = rng.choice((0, 1e-4, 1e-3, 5e-3))

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            if longest and random.random() < 0.3:
                time.sleep(random.uniform(0, longest))
            return function(*args, **kwargs)

        return slowed

    faulthandler.dump_traceback_later(WATCHDOG, exit=True)
    with ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        for owner, name in ((Reader, "read_parts"), (decoders, "on_cpu")):
            stack.enter_context(mock.patch.object(owner, name, slow(getattr(owner, name))))
        yield


def stress(n: int, seed: int = 0) -> Counter:
    """`n` generations; returns the cache's counts over all.

    Raises AssertionError, with the options, at the first output that differs from eager's."""
    rng, counts = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder, references, stores = Path(temporary), {}, []
        for name in MODELS:
            references[name] = open_model(tiny.save(name, folder / name, torch.bfloat16))
            stores += [
                (name, convert(folder / name, folder / f"{name}-{codec}", codec))
                for codec in CODECS
            ]
        for i in progress(range(n), "stress", unit="generations"):
            name, store = rng.choice(stores)
            options, inputs = draw(rng, store), draw_inputs(rng)
            said = f"generation {i} of seed {seed}: {name}, {store.codec}, {options}"
            wanted = output(references[name], inputs)
            guess, distance = rng.choice(("router", "random", "previous")), rng.choice((1, 1, 2))
            with (
                held_up(rng),
                (model := offload(store, **options)).moelab as session,
                Speculation(model, make("predictor", guess, model, ahead=distance), "hint"),
            ):
                for _ in range(rng.choice((1, 1, 2))):  # then a cache that is not empty
                    assert all(map(torch.equal, output(model, inputs), wanted)), (
                        f"{said}: not eager's output"
                    )
                found = session.residency.counters
            counts.update(
                hits=sum(found.hits.values()), misses=found.misses, evictions=found.evictions
            )
    return counts


@pytest.mark.stress
def test_stress_finds_nothing():
    assert stress(depth(8, 300))["misses"] > 0


def test_stress_notices_a_wrong_weight(monkeypatch):
    right = decoders.on_cpu

    def wrong(kind, chunks, name, out, slot):
        right(kind, chunks, name, out, slot)
        out.add_(1)

    monkeypatch.setattr(decoders, "on_cpu", wrong)
    monkeypatch.setitem(globals(), "CODECS", ["huffman"])  # others are not decoded
    monkeypatch.setitem(globals(), "draw", lambda rng, store: {"budget": 1.0})
    with pytest.raises(AssertionError, match="not eager's"):
        stress(1)
