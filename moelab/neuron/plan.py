"""A model on AWS Neuron cores: degrees of TP and EP, settings of the blockwise products, memory a
core, and what bounds each phase. Modelled, not run on Neuron.

Source: AWS Neuron's MoE guide; limits that it leaves out are those of NxD's own code
(neuronx_distributed/modules/moe). A core is a *logical* NeuronCore: two physical ones on Trainium2,
LNC = 2. What is not a routed expert is cut over all cores; routers are copied. A phase takes as long
as the slowest of computing, reading HBM and sending rows between chips, if these overlap perfectly and
routing is even: a bound from below.

    block size   compute-bound though each block loads its weights: 2·B/2 FLOPs a byte of bf16 against
                 the guide's 400 to 500, so 512; halved while it is more than an expert gets of a
                 prompt. The guide's AIF = B·N/E counts padded rows as work, and the smallest block meets it
    sharding     over a core's two halves: I where there are few groups and wide parts, whole blocks
                 where a core has several experts, else H, whose kernel computes empty blocks, too

Left out: MLA's compressed cache (each head counts as an ordinary one), pipeline and context
parallelism, the compiler's own memory beyond a tenth of HBM."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moelab.advice.model import Model, find_model
from moelab.base.records import Record
from moelab.base.registry import require
from moelab.base.specs import DeviceSpec, MoESpec
from moelab.base.table import size
from moelab.cards import DEVICES, load_device
from moelab.offloading.budget import kv_bytes
from moelab.static.parallelism import (
    HYBRID,
    Parallelism,
    blocks_by_code,
    choose,
    neuron_choice,
)

FORMAT = "moelab.neuron/1"
KIND = "modelled, not run on Neuron"
#: weights that the guide names → our dtype of an expert; products are in bf16
WEIGHTS = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "mxfp4": "mxfp4"}
#: FLOPs a byte from which on TRN2 computes rather than waits ("approximately 400-500"), bf16 weights
TARGET = 400
SIZES = (128, 256, 512)
#: the SDK's kernel for FP8 weights takes no larger block
LARGEST = {"fp8": 256}
#: shard-on-I wants parts of a multiple of this (NxD Inference's models/config.py); "low" EP (assumed)
PART = 256
LOW_EP = 4
#: tokens of a prompt, where nobody says how many
CONTEXT = 8192
#: of HBM, what is left beside the compiler's and runtime's own (assumed)
USABLE = 0.9


def up(n: int, step: int) -> int:
    """n padded to a multiple of `step`."""
    return -(-n // step) * step


@dataclass(frozen=True)
class Bound:
    """Seconds that a phase takes at least, by each of its parts: of a prompt, or of a token of all
    sequences."""

    algorithm: str
    parts: dict[str, float]
    seconds: float
    limited_by: str


@dataclass(frozen=True)
class Blocks:
    """What a block size gives in a core: blocks of the static graph, those that are computed when
    routing is even (all, where shards are of H: the kernel has no dynamic loop), the share of their slots
    that is padding, and seconds of the experts of a prompt, if an expert's weights are read once, and if
    each block reads them."""

    block_size: int
    graph: int
    computed: int
    padding: float
    once: float
    each: float


@dataclass(frozen=True)
class Deployment:
    """What is asked: a model, its experts in some weights, on so many cores of a device.

    phase : whose degrees are chosen.    batch : sequences that decode together; a prompt comes alone.
    context : tokens of a prompt, and of a sequence in the KV cache.
    capacity_factor : drops tokens beyond it; None drops none."""

    model: Model
    device: DeviceSpec
    cores: int
    phase: str
    batch: int
    context: int
    weights: str
    capacity_factor: float | None = None

    @property
    def spec(self) -> MoESpec:
        return self.model.spec.with_dtype(WEIGHTS[self.weights])

    def core(self, figure: str) -> float:
        """A chip's figure, of one logical core."""
        return self.device[figure] / self.device["logical_cores_count"]

    @property
    def usable(self) -> int:
        """Bytes of a core's HBM for the model."""
        return int(USABLE * 1e9 * self.core("memory_gb"))

    @property
    def rows(self) -> float:
        """Tokens of a prompt that each expert gets if all get as many."""
        return self.context * self.spec.K / self.spec.E

    @property
    def block_size(self) -> int:
        """The guide's, but no more than an expert gets of a prompt."""
        wanted = next(B for B in SIZES if B >= TARGET)
        most = min(max(self.rows, SIZES[0]), LARGEST.get(self.weights, wanted))
        return max(B for B in SIZES if most >= B)

    def algorithm(self, phase: str, ep: int) -> str | None:
        """NxD's choice; None where it does not run with experts that are spread."""
        decode = phase == "decode"
        found = neuron_choice(
            self.batch if decode else self.context,
            self.spec.K,
            self.spec.E,
            decode=decode,
            block_size=self.block_size,
            capacity_factor=self.capacity_factor,
        )
        alone = found == "selective" or found == "all_experts" and not decode
        return None if alone and ep > 1 else found

    def allowed(self, tp: int, ep: int) -> bool:
        """Whether NxD runs the phase with these degrees."""
        return self.spec.E % ep == 0 and self.algorithm(self.phase, ep) is not None

    @property
    def heads(self) -> int:
        """Attention heads, padded to a multiple of the cores."""
        return up(self.spec.heads, self.cores)

    def part(self, tp: int) -> float:
        """Of an expert, with I padded to a multiple of tp."""
        return up(self.spec.I, tp) / self.spec.I / tp

    def share(self, nbytes: float) -> float:
        """A core's of weights outside of the experts, with padded heads."""
        return nbytes * self.heads / max(self.spec.heads, 1) / self.cores

    def memory(self, tp: int, ep: int) -> dict[str, int]:
        """Bytes of a core. Heads of keys and values are copied where they are fewer than cores; the
        activations are a prompt's rows, and what the two halves of a core make of them."""
        spec = self.spec
        routers = 2 * spec.L * spec.H * spec.E
        head = kv_bytes(spec, self.batch * self.context) / max(spec.kv_heads, 1)
        return {
            "experts": round(spec.L * spec.E / ep * spec.expert_bytes * self.part(tp)),
            "routers": routers,
            "other weights": round(self.share(max(self.model.others - routers, 0))),
            "KV cache": round(head * -(-spec.kv_heads // self.cores)),
            "activations": 6 * max(self.context, self.batch) * spec.H,
        }

    def expert(self, tp: int) -> tuple[float, float]:
        """Seconds of a row in one expert, and of reading its weights."""
        flops = 1e12 * self.core("bf16_tflops")
        read = self.spec.expert_bytes / (1e9 * self.core("memory_bandwidth_gbs"))
        return 2 * self.spec.expert_params * self.part(tp) / flops, read * self.part(tp)

    def blocks(self, tp: int, ep: int) -> tuple[Blocks, ...]:
        """Each block size that the SDK takes."""
        spec = self.spec
        here = spec.E // ep
        row, read = self.expert(tp)
        found = []
        for B in SIZES[: SIZES.index(LARGEST.get(self.weights, SIZES[-1])) + 1]:
            graph = blocks_by_code(self.context, spec.K, here, B)
            even = min(here * math.ceil(self.rows / B), graph)
            computed = graph if self.shard(tp, ep) == "H" else even
            compute = computed * B * row
            reads = min(here, computed), computed
            once, each = (spec.L * max(compute, n * read) for n in reads)
            padding = max(1 - here * self.rows / (computed * B), 0.0)
            found.append(Blocks(B, graph, computed, padding, once, each))
        return tuple(found)

    def bound(self, phase: str, tp: int, ep: int) -> Bound | None:
        """What limits a phase; None where NxD does not run it with these degrees."""
        spec, decode = self.spec, phase == "decode"
        T = self.batch if decode else self.context
        here = spec.E // ep
        match algorithm := self.algorithm(phase, ep):
            case None:
                return None
            case "selective":
                rows, here = T * spec.K, min(T * spec.K, here)
            case "all_experts":
                rows = T * here
            case "capacity":
                rows = here * min(math.ceil(self.rows * self.capacity_factor), T)
            case "blockwise":
                sizes = {of.block_size: of for of in self.blocks(tp, ep)}
                rows = sizes[self.block_size].computed * self.block_size
        row, read = self.expert(tp)
        dense = self.share(self.model.dense)
        head = 0 if decode else self.share(2 * spec.vocab * spec.H)  # the last row's only
        attention = spec.num_layers * self.heads * spec.head_dim / self.cores
        seen = 2 * self.context if decode else T  # causal
        flops = T * (max(dense - head, 0) + 2 * seen * attention)
        nbytes = dense + decode * self.memory(tp, ep)["KV cache"]
        # before attention and before the experts a chip gets all rows, after them sums go back
        chips = -(-self.cores // self.device["logical_cores_count"])
        sent = spec.num_layers * 4 * T * 2 * spec.H * (1 - 1 / chips)
        parts = {
            "compute": flops / (1e12 * self.core("bf16_tflops")) + spec.L * rows * row,
            "HBM": nbytes / (1e9 * self.core("memory_bandwidth_gbs")) + spec.L * here * read,
            "link": sent / (1e9 * self.device["interconnect_gbs"]),
        }
        limit = max(parts, key=parts.get)
        return Bound(algorithm, parts, parts[limit], limit)

    def shard(self, tp: int, ep: int) -> str:
        """What the two halves of a core divide: "I", "H" or "block"."""
        part = self.spec.I / tp
        if part % PART == 0 and (ep == self.spec.E or ep <= LOW_EP and part >= 2 * PART):
            return "I"
        return "H" if tp > HYBRID[1] or ep == self.spec.E else "block"

    def fitting(self) -> Parallelism | None:
        """How it is spread; None if it does not fit. ValueError as `choose`."""
        way = choose(self.spec, self.cores, self.allowed)
        return way if sum(self.memory(way.tp, way.ep).values()) <= self.usable else None

    def refusal(self) -> ValueError:
        """Why it does not fit, and what would."""
        way = choose(self.spec, self.cores, self.allowed)
        memory = self.memory(way.tp, way.ep)
        parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in memory.items())
        growing = memory["KV cache"] + memory["activations"]
        found = ["a smaller --batch or --context"] * (sum(memory.values()) - growing <= self.usable)
        for option, field, values in (
            ("--quantize", "weights", [of for of in WEIGHTS if of != self.weights]),
            ("--cores", "cores", [self.cores << n for n in range(1, 8)]),
        ):
            for value in values:
                with suppress(ValueError):
                    if replace(self, **{field: value}).fitting():
                        found.append(f"{option} {value}")
                        break
        return ValueError(
            f"{self.spec.name} does not fit {self.cores} cores of {self.device.name}: each has "
            f"{size(self.usable)} for it, and it needs {size(sum(memory.values()))} ({parts}). Give "
            f"{' or '.join(found) or 'a smaller model'}"
        )


@dataclass(frozen=True)
class NeuronPlan:
    """The answer: degrees, what a core's halves divide, each block size, bytes of a core, and the
    bounds; a phase is None that NxD does not run with these degrees."""

    asked: Deployment
    way: Parallelism
    shard: str
    blocks: tuple[Blocks, ...]
    memory: dict[str, int]
    prefill: Bound | None
    decode: Bound | None

    @property
    def nbytes(self) -> int:
        """Of a core."""
        return sum(self.memory.values())

    @property
    def blockwise(self) -> dict[str, Any]:
        """What `BlockwiseMatmulConfig.from_kwargs` takes."""
        dynamic = {"I": "intermediate", "block": "block"}.get(self.shard)
        given = {"block_size": self.asked.block_size, "logical_nc_config": 2}
        given |= {"skip_dma_token": True, "skip_dma_weight": True}
        return given | ({f"use_shard_on_{dynamic}_dynamic_while": True} if dynamic else {})

    @property
    def record(self) -> Record:
        """Everything, as plain values."""
        asked, spec = self.asked, self.asked.spec
        given = {
            name: getattr(asked, name)
            for name in ("cores", "phase", "batch", "context", "weights", "capacity_factor")
        }
        return {
            "format": FORMAT,
            "kind": KIND,
            "model": asked.model.source,
            "device": asked.device.name,
            "geometry": asdict(spec),
            **given,
            **asdict(self.way),
            "blockwise_matmul_config": self.blockwise,
            "block_sizes": [asdict(of) for of in self.blocks],
            "router_sequence_parallel": asked.phase == "prefill",
            "padded": {"I": up(spec.I, self.way.tp), "heads": asked.heads},
            "memory": self.memory,
            "usable": asked.usable,
            "prefill": self.prefill and asdict(self.prefill),
            "decode": self.decode and asdict(self.decode),
        }


def plan(
    model: str | Path | None,
    device: str | Path = "trn2",
    cores: int = 64,
    *,
    phase: str = "prefill",
    batch: int = 1,
    context: int | None = None,
    quantize: str | None = None,
    capacity_factor: float | None = None,
) -> NeuronPlan:
    """How to deploy a model: a card's name, a hub id, a folder or a store, of which no weights are
    read.

    context : None is 8,192, or what the model takes.    quantize : a key of `WEIGHTS`; None is the
        checkpoint's own, else bf16.    Others: see `Deployment`.

    Raises ValueError: a device without NeuronCores; no way of spreading the model; too little memory,
    and what would do. FileNotFoundError: no such model."""
    found, card = find_model(model), load_device(device)
    own = {dtype: name for name, dtype in WEIGHTS.items()}.get(found.spec.dtype, "bf16")
    require("phase", phase, ("prefill", "decode"))
    require("weights", quantize or own, WEIGHTS)
    if min(cores, batch, context or 1) < 1:
        raise ValueError(
            f"{cores} cores, a batch of {batch}, a context of {context}: 1 is the least"
        )
    if "logical_cores_count" not in card.figures:
        known = [name for name in DEVICES if "logical_cores_count" in load_device(name).figures]
        raise ValueError(f"{card.name} has no NeuronCores; give {' or '.join(known)}")
    asked = Deployment(
        found,
        card,
        cores,
        phase,
        batch,
        context or min(CONTEXT, found.most or CONTEXT),
        quantize or own,
        None
        if capacity_factor is not None and capacity_factor >= found.spec.E / found.spec.K
        else capacity_factor,
    )
    if (way := asked.fitting()) is None:
        raise asked.refusal()
    tp, ep = way.tp, way.ep
    phases = [asked.bound(of, tp, ep) for of in ("prefill", "decode")]
    shard, blocks = asked.shard(tp, ep), asked.blocks(tp, ep)
    return NeuronPlan(asked, way, shard, blocks, asked.memory(tp, ep), *phases)
