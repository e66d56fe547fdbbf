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
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from moelab.advice.machine import DISTURBED, here, machine
from moelab.advice.model import AS_IS, Model
from moelab.advice.space import Costs, CostsOf, Look
from moelab.base.files import cache_folder
from moelab.base.progress import progress
from moelab.base.specs import MoESpec
from moelab.bench.profile import FORMAT, Profile, profile
from moelab.bench.results import watched
from moelab.bench.synthesize import VOCABULARY, synthesize
from moelab.offloading.slots import Sizes
from moelab.store import fewbit
from moelab.store.layout import aligned

#: of what is measured of a sample: another number where what is kept would no longer do
VERSION = "moelab.sample/9"
#: bytes of a sample's experts in bf16, about; seconds of measuring it
SIZE = 160 << 20
SECONDS = 1.6
#: turns and tokens of each by which a token in memory is timed
TURNS, TOKENS = 8, 16
#: bytes beyond which it makes no difference how many more a processor's cache has to let go of a
#: sample for
PUSHED = 128 << 20
#: dtype of experts as they are → the form of a sample that costs as much
STORED = {
    "bfloat16": "raw",
    "float16": "raw",
    "int8": "int8",
    "float8_e4m3fn": "fp8",
    "mxfp4": "mxfp4",
    "int4": "int4",
}


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
    seconds each; of one that was disturbed and is measured again, the less disturbed."""
    sample = sample_spec(model.spec)
    found = {}
    for form in progress(forms, "measuring this machine", unit="forms"):
        parts = VERSION, FORMAT, machine(), sample, model.spec.L * model.spec.E, form
        key = sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
        file = cache_folder("advice") / f"{key}.profile.json"
        with suppress(FileNotFoundError, ValueError):  # of a damaged one: it is measured anew
            found[form] = Profile.load(file)
        if form in found and not disturbed(found[form]):
            continue
        with tempfile.TemporaryDirectory(dir=cache_folder("advice")) as folder:
            how = {"quantize" if form in fewbit.FORMATS else "codec": form}
            store = synthesize(Path(folder) / form, sample, **how)
            new = of_store(store)
            more = model.spec.experts_bytes - sample.experts_bytes
            new = replace(new, resident=resident_token(store, min(max(more, 0), PUSHED)))
        if form not in found or new.others <= found[form].others:
            found[form] = new
            new.save(file)
    return found


def disturbed(found: Profile) -> bool:
    """Whether others kept the machine busy while this was measured."""
    return (found.others or 0.0) > DISTURBED


def of_store(source: str | Path) -> Profile:
    """The profile of a model as `open_model` runs it."""
    found, others = watched(lambda: profile(source, SECONDS, executor="fast"))
    return replace(found, others=others)


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
        seconds = np.array([end - start for start, end, *_ in lm.moelab.forwards])
    return float(np.median(seconds.reshape(TURNS, TOKENS)[1:], axis=1).min())


def before_experts(found: Profile, sample: MoESpec) -> float:
    """Seconds before a layer's experts in a sample whose experts are all in memory: what its tokens
    took, without their experts and the head as they are simulated."""
    rest = sample.L * found.machine.delays.one_token(sample.K) + sum(found.machine.head)
    return max(found.resident - rest, 0.0) / sample.L


def costs(found: Profile, model: Model, whole: bool) -> Costs:
    """What a profile says; `whole` if it is of the model itself, not of a sample."""
    machine = replace(found.machine, delays=replace(found.machine.delays, experts_bytes=()))
    e = machine.delays.e_bytes
    sm = machine.delays.sm_bytes
    rest = None
    if not whole:
        spec = model.spec
        rate = 1e9 * here(model.folder)["memory_bandwidth_gbs"]
        sampled = sample_spec(model.spec)
        (base, token), (head, head_token) = machine.other, machine.head
        head += max(spec.vocab - sampled.vocab, 0) * spec.H * 2 / rate
        attention = 4 * spec.H * sampled.head_dim * (sampled.heads + sampled.kv_heads)
        more = (
            max(model.dense - spec.num_layers * attention - spec.vocab * spec.H * 2, 0)
            / spec.L
            / rate
        )
        # a dense layer's attention is its successor's
        layers = spec.num_layers / spec.L
        rest = (before_experts(found, sampled) * layers + more) * spec.L + head + head_token
        machine = replace(machine, other=(base * layers + more, token), head=(head, head_token))
    sizes = Sizes(found.full, aligned(e), aligned(sm)) if sm else Sizes(found.full, 0, 0, True)
    return Costs(machine, sizes, e + sm, rest, found.others or 0.0)


def sample_costs(model: Model, forms: list[str], look: Look | None = None) -> CostsOf:
    """What each of `forms` costs here, measured; None for experts as they are of which no sample can
    be made.

    look : at the model itself, as it is; what is not of an expert took so long in that run, in
    every form."""
    stored = {form: form for form in forms}
    if AS_IS in stored:
        own = model.stored if model.stored not in (None, "raw") else STORED.get(model.spec.dtype)
        stored[AS_IS] = own
    profiles = measured(model, list(dict.fromkeys(filter(None, stored.values()))))
    sampled = {form: costs(profiles[of], model, False) for form, of in stored.items() if of}
    if look is None:
        return sampled.get
    itself = costs(look.itself, model, True)
    seen = itself.machine  # its head, and more layers than a sample has
    known = {
        form: replace(
            found,
            machine=replace(found.machine, predict=seen.predict, other=seen.other, head=seen.head),
        )
        for form, found in sampled.items()
    }
    rest = sampled[AS_IS].rest if AS_IS in sampled else None
    return (known | {AS_IS: replace(itself, rest=rest)}).get
