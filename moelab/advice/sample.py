"""What experts of a geometry cost on this machine in every form, measured on a small sample of
them, and kept.

A model that is here is in one form only, and one that is not here in none. So a sample is
synthesized: a layer or two of Qwen3-MoE with experts, attention and routing of the model's sizes,
in the form that is asked for, on the disk where moelab keeps its files. `moelab.bench.profile`
measures it, the same way as a model; the profile is kept, so the next advice asks nothing of the
disk. What a model has besides, a longer head, shared experts, dense layers, is added as bytes over
the rate of memory."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import median

from moelab.advice.machine import memory_rate
from moelab.advice.model import AS_IS, Model
from moelab.advice.space import Costs, Look
from moelab.bench.profile import FORMAT, Profile, profile
from moelab.bench.results import watched
from moelab.bench.synthesize import VOCABULARY, synthesize
from moelab.cache.residency import Pools, Residency
from moelab.files import cache_folder
from moelab.offloading.slots import Sizes
from moelab.progress import progress
from moelab.simulation.costs import Machine
from moelab.simulation.simulator import simulate
from moelab.specs import MoESpec
from moelab.store import fewbit
from moelab.store.layout import ExpertStore, aligned

#: of what is measured of a sample: another number where what is kept would no longer do
VERSION = "moelab.sample/8"
#: bytes of a sample's experts in bf16, about; seconds of measuring it
SIZE = 160 << 20
SECONDS = 1.6
#: bytes beyond which it makes no difference how many more a processor's cache has to let go of a
#: sample for
PUSHED = 128 << 20
#: cores that others keep busy, above which what is measured meanwhile is measured again the next
#: time
DISTURBED = 0.25
#: dtype of experts as they are → the form of a sample that costs as much
STORED = {
    "bfloat16": "raw",
    "float16": "raw",
    "int8": "int8",
    "float8_e4m3fn": "fp8",
    "mxfp4": "mxfp4",
    "int4": "int4",
}


def machine() -> str:
    """This machine, as what was measured on it is kept under."""
    return f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores"


def sample_spec(spec: MoESpec) -> MoESpec:
    """A few layers of a few experts of the spec's size in a model as small as possible."""
    I = (
        spec.I if spec.gated else max(spec.I * 2 // 3 // 32 * 32, 32)
    )  # three matrices of as many bytes
    bytes_each = 6 * spec.H * I
    layers = min(max(SIZE // (2 * spec.K * bytes_each), 2 if bytes_each < SIZE // 4 else 1), spec.L)
    E = min(spec.E, max(2, SIZE // layers // bytes_each))
    return replace(
        spec,
        name="a sample",
        model_type="qwen3_moe",
        num_layers=layers,
        moe_layers=tuple(range(layers)),
        E=E,
        K=min(spec.K, E),
        I=I,
        router="softmax",
        gated=True,
        bias=False,
        shared_I=0,
        dense_I=0,
        vocab=VOCABULARY,
        heads=spec.heads or 8,
        kv_heads=spec.kv_heads or 8,
        head_dim=max(spec.head_dim, 2) // 2 * 2 or 64,
        dtype="bfloat16",
    )


def attention_bytes(sample: MoESpec) -> int:
    """Of a layer of a sample, about."""
    return 4 * sample.H * sample.head_dim * (sample.heads + sample.kv_heads)


def between(model: Model, expert: int) -> int:
    """Bytes to read between two tokens of a model's sample, so that it meets each of its weights
    after as many others as the model would: a processor's cache, which may hold a sample in few
    bits, keeps what it would of the model.

    expert : bytes of an expert in memory.    An expert comes again after E/K tokens, all other weights in each.
    """
    spec = model.spec
    here = sample_spec(model.spec)
    experts = (spec.L * spec.E - here.L * here.E) * expert * here.K // here.E
    others = model.dense - here.L * attention_bytes(here) - 2 * here.vocab * here.H
    return min(experts + max(others, 0), PUSHED)


def measured(model: Model, forms: Sequence[str], executor: str) -> dict[str, Profile]:
    """The profiles of a sample in some forms, kept from an earlier time or measured now, in a few
    seconds each; of one that was disturbed and is measured again, the less disturbed."""
    sample = sample_spec(model.spec)
    files = {}
    found = {}
    for form in forms:
        parts = VERSION, FORMAT, machine(), sample, between(model, 1 << 10), form, executor
        key = sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
        files[form] = cache_folder("advice") / f"{key}.profile.json"
        with suppress(FileNotFoundError, ValueError):  # of a damaged one: it is measured anew
            found[form] = Profile.load(files[form])
    wanted = [form for form in forms if form not in found or disturbed(found[form])]
    if not wanted:
        return found
    with tempfile.TemporaryDirectory(dir=cache_folder("advice")) as folder:
        stores = {}
        new = {}
        for form in progress(wanted, "measuring this machine", unit="forms"):
            how = {"quantize" if form in fewbit.FORMATS else "codec": form}
            stores[form] = ExpertStore(synthesize(Path(folder) / form, sample, **how))
            new[form] = of_store(stores[form].folder, executor)
        others = {form: between(model, of.full) for form, of in new.items()}
        for form, seconds in resident_tokens(stores, executor, others).items():
            new[form] = replace(new[form], resident=median(seconds))
            if form not in found or new[form].others <= found[form].others:
                found[form] = new[form]
                found[form].save(files[form])
    return found


def disturbed(found: Profile) -> bool:
    """Whether others kept the machine busy while this was measured."""
    return (found.others or 0.0) > DISTURBED


def of_store(source: str | Path, executor: str) -> Profile:
    """The profile of a model as `open_model` runs it with an executor."""
    found, others = watched(lambda: profile(source, SECONDS, executor=executor))
    return replace(found, others=others)


def resident_tokens(
    stores: Mapping[str, ExpertStore],
    executor: str,
    others: Mapping[str, int],
    rounds: int = 8,
    tokens: int = 16,
) -> dict[str, list[float]]:
    """Seconds of single tokens, with all of a store's experts in memory and so many bytes of
    `others` read before each: of all stores in turn, of each its least disturbed turn. The first
    round, which meets new memory, and the first half of a turn, which meets the cache as another
    store has left it, do not count."""
    import torch
    from transformers import DynamicCache

    from moelab.api import open_model

    with ExitStack() as stack, torch.inference_mode():
        models = {
            form: stack.enter_context(open_model(store.folder, memory="100%", executor=executor))
            for form, store in stores.items()
        }
        beside = torch.zeros(max(others.values(), default=0) // 8, dtype=torch.int64)
        caches = {form: DynamicCache(config=lm.config) for form, lm in models.items()}
        for ids in torch.arange(rounds * tokens).split(tokens):
            for form, lm in models.items():
                for one in ids[:, None, None] % lm.config.vocab_size:
                    beside[
                        : others[form] // 8
                    ].sum()  # reads it; written lines would be in the token's way
                    lm(input_ids=one, past_key_values=caches[form], use_cache=True)
        seconds = {
            form: [forward.end - forward.start for forward in lm.moelab.forwards]
            for form, lm in models.items()
        }
        return {
            form: min(
                (of[i + tokens // 2 : i + tokens] for i in range(tokens, len(of), tokens)),
                key=median,
            )
            for form, of in seconds.items()
        }


def before_experts(found: Profile, sample: MoESpec) -> float:
    """Seconds before a layer's experts in a sample whose experts are all in memory: what its tokens
    took, without their experts and the head as they are simulated."""
    residency = Residency(sample.L, sample.E, Pools(F=sample.L * sample.E))
    token = [(layer, dict.fromkeys(range(sample.K), 1)) for layer in range(sample.L)]
    residency.fill()
    alone = Machine(found.machine.delays, head=found.machine.head)
    rest = simulate([token], [(1, "decode")], residency, alone).tpot
    return max(found.resident - rest, 0.0) / sample.L


_memory_rate = cache(memory_rate)  # for all forms


def costs(found: Profile, model: Model, whole: bool) -> Costs:
    """What a profile says; `whole` if it is of the model itself, not of a sample."""
    machine = replace(found.machine, delays=replace(found.machine.delays, experts_bytes=()))
    e = machine.delays.e_bytes
    sm = machine.delays.sm_bytes
    rest = None
    if not whole:
        spec = model.spec
        here = sample_spec(model.spec)
        (base, token), (head, head_token) = machine.other, machine.head
        head += max(spec.vocab - here.vocab, 0) * spec.H * 2 / _memory_rate()
        attention = spec.num_layers * attention_bytes(here)
        more = max(model.dense - attention - spec.vocab * spec.H * 2, 0) / spec.L / _memory_rate()
        # a dense layer's attention is its successor's
        layers = spec.num_layers / spec.L
        rest = (before_experts(found, here) * layers + more) * spec.L + head + head_token
        machine = replace(machine, other=(base * layers + more, token), head=(head, head_token))
    sizes = Sizes(found.full, aligned(e), aligned(sm)) if sm else Sizes(found.full, 0, 0, True)
    return Costs(machine, sizes, e + sm, rest)


def sample_costs(
    model: Model, forms: list[str], look: Look | None = None
) -> Callable[..., Costs | None]:
    """What each form costs here, measured for those of `forms`, fast, and whatever is asked for
    later; None for experts as they are of which no sample can be made.

    look : at the model itself, as it is and fast; what is not of an expert took so long in that
    run, in every form."""

    def stored_as(form: str) -> str | None:
        if form != AS_IS:
            return form
        return model.stored if model.stored not in (None, "raw") else STORED.get(model.spec.dtype)

    @cache
    def sampled(form: str, executor: str) -> Costs | None:
        if (name := stored_as(form)) is None:
            return None
        known = together if executor == "fast" and name in together else {}
        return costs((known or measured(model, [name], executor))[name], model, False)

    together = measured(model, list(dict.fromkeys(filter(None, map(stored_as, forms)))), "fast")

    def costs_of(form: str, executor: str = "fast") -> Costs | None:
        found = sampled(form, executor)
        if look is None:
            return found
        own = costs(look.itself, model, True)
        if form == AS_IS and executor == "fast":
            return replace(own, rest=found.rest) if found else own
        if found is None:
            return None
        seen = own.machine  # its head, and more layers than a sample has
        machine = replace(found.machine, predict=seen.predict)
        if executor == "fast":
            machine = replace(machine, other=seen.other, head=seen.head)
        return replace(found, machine=machine)

    return costs_of
