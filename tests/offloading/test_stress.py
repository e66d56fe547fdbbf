"""A stress test of the offloading engine: many generations, each set up at random, each equal to
eager bit for bit.

    python -m tests.offloading.test_stress 1000

Each one draws a model (two architectures, with and without shared experts), a codec, a budget from
the least that works to everything, pools, policy, scope, margin, workers, staging, good or bad
predictions to prefetch one or two layers ahead, batch, lengths and padding; reads and workers are
delayed at random by up to some milliseconds. It stops at the first output that differs from
eager's, and with the stacks of all threads if one generation takes longer than a minute.
Cancelling, errors of the disk and damaged stores have tests of their own."""

from __future__ import annotations

import faulthandler
import json
import random
import sys
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

from moelab import open_model
from moelab.cache.policies import NEEDS, POLICIES
from moelab.cache.pools import Pools
from moelab.offloading.decoders import CpuDecoder
from moelab.offloading.offload import offload
from moelab.offloading.slots import Sizes
from moelab.progress import progress
from moelab.registry import make
from moelab.simulation.costs import Delays
from moelab.speculate import Speculation
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader
from tests.depth import depth

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 24,
    "intermediate_size": 48,
}
MODELS = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 8,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
CODECS = ("raw", "zstd-huffman", "huffman")
WATCHDOG = 300  # seconds that one generation may take


def save(folder: Path, model_type: str, seed: int = 0) -> Path:
    """A random bf16 checkpoint of a tiny model."""
    from transformers import AutoConfig

    from moelab.models import compat

    config = AutoConfig.for_model(model_type, **_COMMON, **MODELS[model_type], dtype="bfloat16")
    torch.manual_seed(seed)
    model = compat.model_class(config)._from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():  # the usual 0.02 leaves logits near zero
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def draw(rng: random.Random, store: ExpertStore) -> dict[str, Any]:
    """Options of `offload`, all that are allowed being about equally likely."""
    L, E = store.spec.L, store.spec.E
    workers, staging = rng.randint(1, 4), rng.choice((None, 1, 2, 5))
    options = {
        "workers": workers,
        "staging": staging,
        "cache": rng.choice([p for p in POLICIES if p not in NEEDS]),
        "scope": rng.choice(("model", "layer")),
        "margin": rng.choice((None, 0, 1, 4)),
        "mode": rng.choice(("auto", "buffered")),
        "verify": rng.random() < 0.5,
    }
    sizes, ahead = Sizes.of(store), rng.choice((0, 0, 1, 3, 8))
    options["ahead"] = ahead
    least = (ahead + (staging or 1)) * sizes.in_flight
    if rng.random() < 0.5:  # whole experts only
        everything = L * E * sizes.full + (ahead + (staging or workers + 2)) * sizes.in_flight
        return options | {
            "budget": round(rng.choice((least, everything, rng.uniform(least, everything))))
        }
    copies = L if options["scope"] == "layer" else 1
    pools = Pools(
        **{name: rng.choice((0, rng.randint(0, L * E // (2 * copies)))) for name in "FCSE"}
    )
    sizes = Sizes.of(store, False if pools.C or pools.S or pools.E else None)
    spare = rng.choice((0, 5 * sizes.in_flight))
    room = (
        copies * pools.nbytes(sizes.full, sizes.sm, sizes.e)
        + (ahead + (staging or workers + 2)) * sizes.in_flight
    )
    return options | {"plan": pools, "budget": max(2, room + spare)}


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
    """Reads and workers take a random while longer."""
    longest = rng.choice((0, 1e-4, 1e-3, 5e-3))

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            if longest and random.random() < 0.3:
                time.sleep(random.uniform(0, longest))
            return function(*args, **kwargs)

        return slowed

    with ExitStack() as stack:
        for owner, names in ((Reader, ("plan", "fill")), (CpuDecoder, ("__call__",))):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, slow(getattr(owner, name))))
        yield


@contextmanager
def _watched() -> Iterator[None]:
    """Ends the process with the stacks of all threads if this takes longer than `WATCHDOG`."""
    faulthandler.dump_traceback_later(WATCHDOG, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def stress(n: int = 1000, seed: int = 0) -> dict[str, Any]:
    """`n` generations; returns how many of each kind there were, and the cache's counts over all.

    Raises AssertionError, with the options, at the first output that differs from eager's.
    """
    from moelab.checkpoint.convert import convert

    rng, tried, counts = random.Random(seed), Counter(), Counter()
    delays = Delays(1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-4)
    with tempfile.TemporaryDirectory() as temporary:
        folder, references, stores = Path(temporary), {}, []
        for model_type in MODELS:
            checkpoint = save(folder / model_type, model_type)
            references[model_type] = open_model(checkpoint)
            stores += [
                (model_type, convert(checkpoint, folder / f"{model_type}-{codec}", codec))
                for codec in CODECS
            ]
        for i in progress(range(n), "stress", unit="generations"):
            model_type, store = rng.choice(stores)
            options, inputs = draw(rng, store), draw_inputs(rng)
            said = (
                f"generation {i} of seed {seed}: {model_type}, {store.codec}, {options}, "
                f"ids {list(inputs['inputs'].shape)}, {inputs['max_new_tokens']} new"
            )
            wanted = output(references[model_type], inputs)
            with (
                _watched(),
                held_up(rng),
                (model := offload(store, delays=delays, **options)).moelab as offloading,
                Speculation(
                    model,
                    make(
                        "predictor",
                        rng.choice(("router", "random", "previous")),
                        model,
                        ahead=rng.choice((1, 1, 2)),
                    ),
                    "hint",
                ),
            ):
                runs = rng.choice((1, 1, 2))  # the second one finds a cache that is not empty
                for _ in range(runs):
                    assert all(map(torch.equal, output(model, inputs), wanted)), (
                        f"{said}: not eager's output"
                    )
                found = offloading.residency.counters
            tried.update(
                [
                    model_type,
                    store.codec,
                    options["cache"],
                    options["scope"] + " scope",
                    f"{options['workers']} workers",
                    "pools" if "plan" in options else "whole experts only",
                    "prefetching" if options["ahead"] else "on demand",
                ]
            )
            counts.update(
                {
                    "generations": runs,
                    "hits": sum(found.hits.values()),
                    "misses": found.misses,
                    "evictions": found.evictions,
                }
            )
    return {
        "all equal to eager": True,
        "set-ups": n,
        **counts,
        "of these": dict(sorted(tried.items())),
    }


@pytest.mark.stress
def test_stress_finds_nothing_and_counts():
    n = depth(2, 300)
    found = stress(n)
    assert found["all equal to eager"] and found["set-ups"] == n and found["misses"] > 0


def test_stress_notices_a_wrong_weight(monkeypatch):
    right = CpuDecoder.__call__

    def wrong(self, kind, chunks, name, out, shard=None):
        right(self, kind, chunks, name, out, shard)
        out.add_(1)

    monkeypatch.setattr(CpuDecoder, "__call__", wrong)
    monkeypatch.setitem(globals(), "CODECS", ["huffman"])  # a raw store is not decoded
    monkeypatch.setitem(globals(), "draw", lambda rng, store: {"budget": 1.0})
    with pytest.raises(AssertionError, match="not eager's"):
        stress(1)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are too small for more
    print(json.dumps(stress(*(int(word) for word in sys.argv[1:])), indent=1))
