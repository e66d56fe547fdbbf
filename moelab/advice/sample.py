"""What experts of a geometry cost on this machine in every form, measured on a small sample of
them, and kept.

A model that is here is in one form only, and one that is not here in none. So a sample is
synthesized: a layer or two of Qwen3-MoE with experts, attention and routing of the model's sizes,
in the form that is asked for, on the disk where moelab keeps its files. `moelab.bench.profile`
measures it, the same way as a model; the profile is kept, so the next advice asks nothing of the
disk. What a model has besides, a longer head, shared experts, dense layers, is added as bytes over
the rate of memory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from moelab.advice.machine import here, machine, quietest
from moelab.advice.model import AS_IS, Model
from moelab.advice.space import Costs, Look
from moelab.base.files import cache_folder
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.base.schema import typed
from moelab.base.specs import MoESpec
from moelab.bench.profile import FORMAT, Profile, profile
from moelab.bench.synthesize import VOCABULARY, synthesize
from moelab.store import fewbit

#: of what is measured of a sample: another number where what is kept would no longer do
VERSION = "moelab.sample/10"
#: bytes of a sample's experts in bf16, about; seconds of measuring it
SIZE = 160 << 20
SECONDS = 1.6
#: turns and tokens of each by which a token in memory is timed
TURNS, TOKENS = 8, 16
#: bytes beyond which it makes no difference how many more a processor's cache has to let go of a
#: sample for
PUSHED = 128 << 20


def sample_spec(spec: MoESpec) -> MoESpec:
    """A few layers of a few experts of the spec's size in a model as small as possible."""
    I = (
        spec.I if spec.gated else max(spec.I * 2 // 3 // 32 * 32, 32)
    )  # three matrices of as many bytes
    bytes_each = 6 * spec.H * I
    layers = min(max(SIZE // (2 * spec.K * bytes_each), 2 if bytes_each < SIZE // 4 else 1), spec.L)
    E = min(spec.E, max(2, SIZE // layers // bytes_each))
    return MoESpec(
        "a sample",
        "qwen3_moe",
        layers,
        tuple(range(layers)),
        E,
        min(spec.K, E),
        spec.H,
        I,
        vocab=VOCABULARY,
        heads=spec.heads or 8,
        kv_heads=spec.kv_heads or 8,
        head_dim=max(spec.head_dim, 2) // 2 * 2 or 64,
    )


def measured(model: Model, forms: Sequence[str]) -> dict[str, Profile]:
    """The profiles of a sample in some forms, kept from an earlier time or measured now, in a few
    seconds each."""
    sample = sample_spec(model.spec)
    found = {}
    for form in progress(forms, "measuring this machine", unit="forms"):
        parts = VERSION, FORMAT, machine(), sample, model.spec.L * model.spec.E, form
        more = max(model.spec.experts_bytes - sample.experts_bytes, 0)
        once = partial(sampled, sample, form, min(more, PUSHED))
        found[form] = typed(quietest("\n".join(map(str, parts)), "profile", once), Profile)
    return found


def sampled(sample: MoESpec, form: str, beside: int) -> Record:
    """A profile of a sample in a form, as plain values; `beside` as of `resident_token`."""
    with tempfile.TemporaryDirectory(dir=cache_folder("advice")) as folder:
        how = {"quantize" if form in fewbit.FORMATS else "codec": form}
        store = synthesize(Path(folder) / form, sample, **how)
        found = profile(store, SECONDS, executor="fast")
        return asdict(found) | {"resident": resident_token(store, beside)}


def resident_token(store: Path, beside: int) -> float:
    """Median seconds of a single token, with all of a store's experts in memory, in the least
    disturbed of `TURNS` turns after the first, which meets new memory. So many bytes are read
    before each token, as of a model that a processor's cache does not hold."""
    import torch
    from transformers import DynamicCache

    from moelab.api import open_model

    others = torch.zeros(beside // 8, dtype=torch.int64)
    with open_model(store, memory="100%", executor="fast") as lm, torch.inference_mode():
        cache = DynamicCache(config=lm.config)
        for one in torch.arange(TURNS * TOKENS)[:, None, None] % lm.config.vocab_size:
            others.sum()  # reads it; written lines would be in the token's way
            lm(input_ids=one, past_key_values=cache, use_cache=True)
        seconds = np.array([one.seconds for one in lm.moelab.forwards])
    return float(np.median(seconds.reshape(TURNS, TOKENS)[1:], axis=1).min())


def before_experts(found: Profile, sample: MoESpec) -> float:
    """Seconds before a layer's experts in a sample whose experts are all in memory: what its tokens
    took, without their experts and the head as they are simulated."""
    rest = sample.L * found.machine.delays.one_token(sample.K) + sum(found.machine.head)
    return max(found.resident - rest, 0.0) / sample.L


def without_experts(found: Profile, model: Model) -> float:
    """Seconds of a model's token without any experts where all are in memory: as in a sample, and
    bytes of what a sample has not."""
    spec, sample = model.spec, sample_spec(model.spec)
    attention = 4 * spec.H * sample.head_dim * (sample.heads + sample.kv_heads)
    head = max(spec.vocab - sample.vocab, 0) * spec.H * 2
    more = max(model.dense - spec.num_layers * attention - spec.vocab * spec.H * 2, 0)
    rate = 1e9 * here(model.folder)["memory_bandwidth_gbs"]
    # a dense layer's attention is its successor's
    layers = before_experts(found, sample) * spec.num_layers
    return layers + sum(found.machine.head) + (more + head) / rate


def sample_costs(model: Model, look: Look) -> dict[str, Costs]:
    """What each form costs here: its experts by a sample, or as they are by the look at the model,
    which tells of every form what is not of an expert."""
    forms = model.forms()
    samples = measured(model, ["raw" if form == AS_IS else form for form in forms])
    found = {}
    for form, sample in zip(forms, samples.values()):
        own = look.itself if form == AS_IS else sample
        delays = replace(own.machine.delays, experts_bytes=())
        machine = replace(look.itself.machine, delays=delays)
        found[form] = Costs(machine, own.full, without_experts(sample, model))
    return found
