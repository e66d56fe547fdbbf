"""`advise`: what to do with this model on this machine in so much memory, and what it will give; by arithmetic.

Source: the limits of `moelab.offloading.limits`: a layer takes as long as reading its missing experts or multiplying
all of them, whichever is longer, after what comes before. Everything follows from a config, bytes and rates, so no
weights are needed and nothing is downloaded but the config. Every time here is *modelled*: the limit at the hit rate
that is assumed and the rates that were measured. Where experts are not equally popular, a cache hits more than is
assumed without a calibration, and tokens come faster than this says.

With `simulate`, each way of storing the experts is also played by the simulator (`moelab.offloading.planner`), with a
cache, queues and a Huffman code's pools; then its order counts. Left out: codecs other than Huffman that are decoded
before they are multiplied; prefetching, which hides reads behind other work but reads no fewer bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moelab import registry
from moelab.advice.machine import here
from moelab.arguments import number, whole
from moelab.cache.pools import HIERARCHY
from moelab.cards import load_card, load_device, load_model
from moelab.configs import spec_from_config
from moelab.offloading.budget import RESERVE, parse_budget
from moelab.offloading.limits import MachineRates, kv_bytes, uniform_hit_rate
from moelab.specs import DTYPE_BYTES, DeviceSpec, MoESpec
from moelab.table import percent, text_table

#: how bf16 experts may be stored → (bits a weight, whether lossless): `moelab.store.bf12`, `moelab.store.fewbit`
FORMS = {"bf12": (12, True), "int8": (8.5, False), "fp8": (8.002, False), "int4": (4.5, False),
         "mxfp4": (4.25, False)}
#: experts that must have slots beside those that are kept, so that a layer can load while it computes
STAGING = 2


@dataclass(frozen=True)
class Model:
    """A model without its weights: what opens it, its geometry, bytes of all other weights and how they are known, its
    folder if it is here, and the form that an expert store has."""

    source: str
    spec: MoESpec
    others: int
    how: str
    folder: Path | None = None
    stored: str | None = None

    def forms(self) -> dict[str, tuple[float, bool]]:
        """How its experts may be stored → (bits a weight, whether lossless)."""
        own = 8 * DTYPE_BYTES[self.spec.dtype]
        if self.stored in FORMS:
            own, _ = FORMS[self.stored]
        offered = {name: form for name, form in FORMS.items() if form[0] < own
                   and (name != "bf12" or self.spec.dtype == "bfloat16")} if own > 8.5 else {}
        # what has to be decoded before it is multiplied, is not compared: see above
        return ({} if self.stored not in (None, "raw", *FORMS) else {"as it is": (own, True)}) | offered


@dataclass(frozen=True)
class Way:
    """One way of running a model.

    form : of the stored experts, or "as it is".    budget : bytes for experts.    hit_rate : of a token's experts.
    memory : bytes of everything.    read : bytes that a token reads from the disk.    tpot, ttft : s.
    """

    form: str
    lossless: bool
    experts: int
    budget: int
    memory: int
    hit_rate: float
    read: float
    tpot: float
    ttft: float
    limited_by: str

    @property
    def resident(self) -> bool:
        return self.budget >= self.experts

    def row(self, batch: int) -> dict[str, Any]:
        return {"experts as": self.form, "loss": "none" if self.lossless else "unknown",
                "experts GB": self.experts / 1e9, "in memory GB": self.budget / 1e9, "process GB": self.memory / 1e9,
                "hit rate": self.hit_rate, "read MB/token": self.read / batch / 1e6, "TPOT, s": self.tpot,
                "tokens/s": batch / self.tpot, "TTFT, s": self.ttft, "limited by": self.limited_by}


@dataclass(frozen=True)
class Advice:
    """The answer: `ways` that fit, best first; `more`: (what would give more, and then); `simulated`: what
    `planner.rank_stored` found."""

    model: Model
    device: DeviceSpec
    memory: int
    context: int
    batch: int
    lossy: bool
    ways: tuple[Way, ...]
    more: tuple[tuple[str, Way], ...] = field(repr=False)
    popularity: str = "equally"
    simulated: tuple[Any, ...] = ()

    @property
    def best(self) -> Way:
        """The first that loses no more than was allowed."""
        return next(way for way in self.ways if way.lossless or self.lossy)

    @property
    def steps(self) -> list[tuple[str, str, dict[str, str]]]:
        """(command, source, options) of what to run, in this order."""
        way, source = self.best, self.model.source
        options = {"memory": "100%" if way.resident else f"{int(way.budget / 1e6)}MB", "executor": "fast"}
        if not way.resident:
            options["prefetch"] = "router"
        if way.form == "bf12":
            store = f"{Path(source).name}.bf12"
            return [("convert", f"{source} {store}", {"codec": "bf12"}), ("generate", store, options)]
        if way.form in FORMS:
            return [("generate", source, {"quantize": way.form} | options)]
        if way.resident and self.model.stored is None:
            del options["memory"]
        return [("generate", source, options)]

    @property
    def commands(self) -> list[str]:
        return [" ".join(["python -m moelab", command, source, *(f"--{name} {value}" for name, value in given.items())])
                for command, source, given in self.steps]

    @property
    def python(self) -> str:
        """The last of `commands`, in Python."""
        _, source, given = self.steps[-1]
        return f"moelab.open_model({', '.join([repr(source), *(f'{k}={v!r}' for k, v in given.items())])})"

    def __str__(self) -> str:
        way, spec, device = self.best, self.model.spec, self.device
        where = "all of them in memory" if way.resident else \
            f"{way.budget / 1e9:.3g} of their {way.experts / 1e9:.3g} GB in memory, the others on disk"
        stored = "Leave the checkpoint as it is" if way.form == "as it is" else f"Store the experts as {way.form}"
        loss = "lossless" if way.lossless else "its loss is unknown: python -m moelab evaluate measures it"
        rates = MachineRates.of(device)
        more = "; ".join(f"{what}: {other.tpot:.3g} s ({way.tpot / other.tpot:.3g}×)" for what, other in self.more)
        rows = [way.row(self.batch) for way in self.ways]
        return "\n".join([
            f"{spec.name}: {spec.L} layers of {spec.E} experts, {spec.K} a token; experts "
            f"{spec.experts_bytes / 1e9:.3g} GB, other weights {self.model.others / 1e9:.3g} GB ({self.model.how}), "
            f"KV cache {kv_bytes(spec, self.context * self.batch) / 1e9:.3g} GB, process {RESERVE / 1e9:.2g} GB",
            f"{device.name}: memory {rates.memory / 1e9:.3g} GB/s, experts arrive at {rates.read / 1e9:.3g} GB/s; "
            f"{self.memory / 1e9:.3g} GB may be used",
            "",
            f"Do: {stored} ({loss}), {where}.",
            f"Gives: {way.tpot:.3g} s a token ({self.batch / way.tpot:.3g} tokens/s), "
            f"{way.ttft:.3g} s to the first, of {self.context:,} tokens; modelled, limited by the {way.limited_by}, "
            f"if experts are chosen {self.popularity} often" + (
                ": a worst case, --calibration knows better." if self.popularity == "equally" else "."),
            f"More: {more or 'nothing that was tried here'}.",
            "", *(f"  {command}" for command in self.commands), f"  {self.python}", "",
            text_table(list(rows[0]), [list(row.values()) for row in rows]), *self._simulated()])

    def _simulated(self) -> list[str]:
        if not self.simulated:
            return []
        head = ["stored as", "lossless", "on disk, GB", "pools F/C/S/E", "hits, any state", "TPOT, s", "kind"]
        rows = [[row.name, row.lossless, row.disk_bytes / 1e9, "/".join(str(row.pools[state]) for state in HIERARCHY),
                 percent(row.hit_rate), row.tpot, row.kind] for row in self.simulated]
        left_out = [] if any(row.name == "huffman" for row in self.simulated) else \
            ["Huffman is left out: how fast a thread decodes is not known; give decompress_gbs (--decompress-gbs)"]
        return ["", "By simulation, in the same memory for experts, each token's experts drawn independently:",
                text_table(head, rows), *left_out]

    def _repr_markdown_(self) -> str:
        return f"```text\n{self}\n```"


def advise(model: str | Path | None = None, memory: str | float | int = "auto", *, context: int = 4096,
           batch: int = 1, lossy: bool = False, device: str | Path | DeviceSpec | None = None,
           calibration: str | Path | None = None, simulate: bool = False, decompress_gbs: float | None = None
           ) -> Advice:
    """What to do with a model in so much memory, from its config alone; `print` it, or look at it in a notebook.

    model : a card's name (`moelab.names("model")`), a hub id, a checkpoint folder or a store; None is the small model.
    memory : bytes, "8GB" or "auto", for the whole process: experts, other weights, KV cache, interpreter.
    context : tokens of a sequence, of which all but few are the prompt.    batch : sequences at a time.
    lossy : whether few-bit experts may be advised, whose loss nobody has measured here.
    device : a card's name, your own .toml or a `DeviceSpec`; without one, this machine is measured for a second.
    calibration : file of `moelab calibrate`, whose counts say how popular experts are; else all are taken as equally
        popular, the worst case for a cache.
    simulate : play each way of storing the experts, too; it takes up to a minute, for one sequence of bf16 experts.
    decompress_gbs : exponents that a thread decodes, GB/s, for Huffman in `simulate`, if the card does not say it.

    Raises FileNotFoundError, ValueError: a model or device that is not there or not known; a memory in which not even
    the model without its experts fits; another model's calibration; what cannot be simulated.
    """
    found = find_model(model)
    spec = found.spec
    if device is None:
        device = here(found.folder)
    elif not isinstance(device, DeviceSpec):
        device = load_device(device)
    if memory == "auto":
        memory = device["memory_gb"] * 1e9
    elif isinstance(memory, str) and memory.strip().endswith("%"):
        raise ValueError(f"memory is {memory!r}; it is of the whole process, so it must be bytes, such as '8GB', or "
                         f"'auto'")
    if simulate and (batch > 1 or spec.dtype != "bfloat16" or found.stored is not None):
        raise ValueError("simulate compares ways of storing the bf16 experts of a checkpoint or a card, one sequence "
                         f"at a time; {found.source} has {found.stored or spec.dtype} experts, the batch is {batch}")
    nbytes, rates = parse_budget(memory, 0, 0), MachineRates.of(device)
    counted = None if calibration is None else _load(calibration, spec)
    hits = _hit_rates(spec, counted)

    def best_of(rates: MachineRates, nbytes: int, lossy: bool = lossy) -> Way:
        return next(way for way in possible(found, rates, nbytes, context, batch, hits) if way.lossless or lossy)
    ways = possible(found, rates, nbytes, context, batch, hits)
    if not any(way.lossless or lossy for way in ways):
        least = _least(spec, found.others, context, batch)
        few = f"; with lossy (--lossy), {ways[0].form} would fit" if ways else ""
        raise ValueError(f"{spec.name} does not fit {nbytes / 1e9:.3g} GB: its other weights, a KV cache of {context} "
                         f"tokens, the process and a layer's experts take {least / 1e9:.3g} GB{few}. Give more memory, "
                         f"or a smaller context or batch")
    simulated: tuple[Any, ...] = ()
    if simulate:
        from moelab.offloading.planner import rank_stored, shares_of
        room = nbytes - found.others - kv_bytes(spec, context) - RESERVE
        simulated = tuple(rank_stored(spec, device, room, None if counted is None else shares_of(counted),
                                      dense_bytes=_dense(found), decompress_gbs=decompress_gbs))
        place = {"as it is" if one.name == "raw" else one.name: i for i, one in enumerate(simulated)}
        ways.sort(key=lambda way: place.get(way.form, len(place)))
    best = next(way for way in ways if way.lossless or lossy)
    options = [(f"{1.5 * nbytes / 1e9:.3g} GB of memory", best_of(rates, nbytes * 3 // 2)),
               ("a disk twice as fast", best_of(replace(rates, read=2 * rates.read), nbytes))]
    if not lossy:
        few = best_of(rates, nbytes, True)
        options.append((f"{few.form} experts, of unknown loss", few))
    more = sorted((one for one in options if one[1].tpot < 0.98 * best.tpot), key=lambda one: one[1].tpot)
    return Advice(found, device, nbytes, context, batch, lossy, tuple(ways), tuple(more),
                  "equally" if calibration is None else "as the calibration counted", simulated)


def find_model(model: str | Path | None) -> Model:
    """A model's geometry and bytes, without its weights. Raises FileNotFoundError, ValueError."""
    if model is not None and str(model) in registry.names("model"):
        spec, card = load_model(str(model)), load_card(str(model))
        source, published = card.get("hub", str(model)), card.get("figures", {}).get("total_params")
        if published is None:
            return Model(source, spec, _others(spec), "estimated from its geometry")
        others = (published["value"] - spec.L * spec.E * spec.expert_params) * 2
        return Model(source, spec, round(others), "published parameters less the experts'")
    if model is not None and not Path(model).expanduser().exists() and str(model).count("/") == 1:
        spec = _read_config(_download(str(model)), str(model))
        return Model(str(model), spec, _others(spec), "estimated from its geometry")
    from moelab.models.checkpoint import Checkpoint
    from moelab.models.opening import find, model_name
    folder = find(model)
    checkpoint = Checkpoint.at(folder)
    spec = _read_config(folder / "config.json", model_name(model, folder))
    everything = sum(entry.nbytes for entry in checkpoint.tensors.values())
    if (store := checkpoint.store) is not None:
        return Model(str(folder), spec, everything, "exact", folder, store.quantized or store.codec)
    return Model(str(folder), spec, max(everything - spec.experts_bytes, 0), "exact", folder)


def _download(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:          # the hub client has a dozen kinds of "cannot be had"
        raise FileNotFoundError(f"{model!r} is no card and no folder here, and its config cannot be had from the hub "
                                f"({type(error).__name__}). Check the spelling and the network; moelab.names('model') "
                                f"lists the cards, which need neither") from error


def _read_config(file: Path, name: str) -> MoESpec:
    """By the file's own words; what it leaves to transformers' defaults, by transformers."""
    try:
        config = json.loads(file.read_text(), object_hook=lambda fields: SimpleNamespace(**fields))
        return spec_from_config(config, name)
    except (ValueError, AttributeError, TypeError):
        from moelab.models.checkpoint import load_config
        return spec_from_config(load_config(file.parent), name)


def _others(spec: MoESpec) -> int:
    """Bytes of all weights but the routed experts: embedding, head, attention, routers, shared and dense layers."""
    H, heads = spec.H, spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    dense = spec.num_layers - spec.L
    weights = 2 * spec.vocab * H + spec.num_layers * H * heads + dense * 3 * H * spec.dense_I \
        + spec.L * (H * spec.E + 3 * H * spec.shared_I)
    return round(weights * max(DTYPE_BYTES[spec.dtype], 2.0))


def _load(calibration: str | Path, spec: MoESpec) -> Any:
    """A calibration. ValueError: of another geometry."""
    from moelab.calibration import Calibration
    found = Calibration.load(calibration)
    if found.spec.fingerprint() != spec.fingerprint():
        raise ValueError(f"{calibration} was counted on {found.spec.name}, whose geometry is another than "
                         f"{spec.name}'s; calibrate this model: python -m moelab calibrate MODEL FILE")
    return found


def _hit_rates(spec: MoESpec, calibration: Any) -> Callable[[int], float]:
    """Kept experts (of all L·E) → share of a token's experts among them: of the most popular, or of any."""
    if calibration is None:
        return lambda kept: uniform_hit_rate(spec, kept)
    counts = calibration.counts().double().flatten().sort(descending=True).values
    shares = (counts / counts.sum()).cumsum(0)
    return lambda kept: float(shares[kept - 1]) if 0 < kept < len(shares) else float(kept > 0)


def _dense(model: Model) -> int:
    """Bytes of other weights that a token needs: of the embedding one row, but all of the head."""
    return max(model.others - model.spec.vocab * model.spec.H * 2, 0)


def _least(spec: MoESpec, others: int, context: int, batch: int) -> int:
    """Bytes of everything, of experts only those that a token needs of one layer."""
    return others + kv_bytes(spec, context * batch) + RESERVE + (STAGING + spec.K) * spec.expert_bytes


def possible(model: Model, rates: MachineRates, memory: int, context: int, batch: int,
             hits: Callable[[int], float]) -> list[Way]:
    """All ways that fit `memory`, the fastest first; of equally fast ones, the lossless first."""
    spec, ways = model.spec, []
    kv, count = kv_bytes(spec, context * batch), spec.L * spec.E
    visits = spec.L * spec.E * (1 - (1 - spec.K / spec.E) ** batch)        # experts of a step, if chosen at random
    dense = _dense(model)
    for form, (bits, lossless) in model.forms().items():
        expert = round(spec.expert_params * bits / 8)
        experts = count * expert
        budget = min(memory - model.others - kv - RESERVE, experts)
        if budget < min(STAGING + spec.K, count) * expert:
            continue
        kept = count if budget >= experts else max(budget // expert - STAGING, 0)
        hit, touched = hits(kept), visits * expert
        parts = {"memory": touched / rates.memory, "disk": touched * (1 - hit) / rates.read}
        weights = spec.L * spec.K * spec.expert_params + dense / 2              # that each token multiplies
        prompt = ((dense + experts) / rates.memory, (count - kept) * expert / rates.read,
                  2 * context * batch * weights / rates.flops)
        ways.append(Way(form, lossless, experts, budget, model.others + kv + RESERVE + budget, hit,
                        touched * (1 - hit), (dense + kv) / rates.memory + max(parts.values()),
                        max(prompt), max(parts, key=parts.get)))
    return sorted(ways, key=lambda way: (way.tpot, not way.lossless))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a card's name, a hub id, a checkpoint folder or a store; without it, "
                                                 "the small model")
    parser.add_argument("--memory", default="auto", help="of the whole process, such as 8GB; auto (default): what is "
                                                         "available")
    parser.add_argument("--context", type=whole(1), default=4096, help="tokens of a sequence (default: 4096)")
    parser.add_argument("--batch", type=whole(1), default=1, help="sequences at a time (default: 1)")
    parser.add_argument("--lossy", action="store_true", help="advise few-bit experts as well, whose loss is unknown")
    parser.add_argument("--device", help="a device card's name or a .toml instead of this machine")
    parser.add_argument("--calibration", metavar="FILE", help="of `moelab calibrate`: how popular experts are")
    parser.add_argument("--simulate", action="store_true", help="play each way of storing the experts, too")
    parser.add_argument("--decompress-gbs", type=number(above=0), metavar="GB/S", help="exponents that one thread puts "
                        "out, for Huffman with --simulate, where the card does not say it")


def main(args: argparse.Namespace) -> int:
    print(advise(args.model, args.memory, context=args.context, batch=args.batch, lossy=args.lossy,
                 device=args.device, calibration=args.calibration, simulate=args.simulate,
                 decompress_gbs=args.decompress_gbs))
    return 0
