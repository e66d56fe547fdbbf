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
from functools import cached_property
from pathlib import Path

from moelab.advice.model import Model, find_model
from moelab.base.records import Record
from moelab.base.registry import require
from moelab.base.specs import DeviceSpec, MoESpec
from moelab.base.table import size
from moelab.cards import DEVICES, load_device
from moelab.offloading.budget import kv_bytes
from moelab.static.parallelism import (
    MOST_TP,
    Parallelism,
    blocks_by_code,
    choose,
    neuron_choice,
)
from moelab.static.tiers import round_up

FORMAT = "moelab.neuron/1"
KIND = "modelled, not run on Neuron"
#: weights that the guide names → our dtype of an expert; products are in bf16
WEIGHTS = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "mxfp4": "mxfp4"}
OWN = {dtype: name for name, dtype in WEIGHTS.items()}
PHASES = ("prefill", "decode")
#: the figure that only cards of NeuronCores have
CORES = "logical_cores_count"
#: up to the guide's: as many FLOPs a byte of bf16 weights as it wants on TRN2 ("approximately 400-500")
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
class NeuronPlan:
    """A model, its experts in some weights, on so many cores of a device, and all that follows.

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
        return self.device[figure] / self.device[CORES]

    @property
    def rates(self) -> tuple[float, float]:
        """FLOP/s in bf16, and bytes/s of HBM, of a core."""
        return 1e12 * self.core("bf16_tflops"), 1e9 * self.core("memory_bandwidth_gbs")

    @property
    def usable(self) -> int:
        """Bytes of a core's HBM for the model."""
        return int(USABLE * 1e9 * self.core("memory_gb"))

    @property
    def rows(self) -> float:
        """Tokens of a prompt that each expert gets if all get as many."""
        return self.context * self.spec.K / self.spec.E

    @property
    def sizes(self) -> list[int]:
        """Block sizes that the SDK takes."""
        return [B for B in SIZES if LARGEST.get(self.weights, B) >= B]

    @property
    def block_size(self) -> int:
        """The guide's, but no more than an expert gets of a prompt."""
        return max(B for B in self.sizes if max(self.rows, SIZES[0]) >= B)

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

    @cached_property
    def way(self) -> Parallelism:
        """The degrees. ValueError as `choose`."""
        return choose(self.spec, self.cores, self.allowed)

    @property
    def here(self) -> int:
        """Experts of a core."""
        return self.spec.E // self.way.ep

    @property
    def padded(self) -> dict[str, int]:
        """I, a multiple of TP, and attention heads, one of the cores."""
        spec = self.spec
        return {"I": round_up(spec.I, self.way.tp), "heads": round_up(spec.heads, self.cores)}

    def share(self, nbytes: float) -> float:
        """A core's of weights outside of the experts, with padded heads."""
        return nbytes * self.padded["heads"] / max(self.spec.heads, 1) / self.cores

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of a core. Heads of keys and values are copied where they are fewer than cores; the
        activations are a prompt's rows, and what the two halves of a core make of them."""
        spec = self.spec
        routers = 2 * spec.L * spec.H * spec.E
        head = kv_bytes(spec, self.batch * self.context) / max(spec.kv_heads, 1)
        return {
            "experts": round(spec.L * self.here * self.part * spec.expert_bytes),
            "routers": routers,
            "other weights": round(self.share(max(self.model.others - routers, 0))),
            "KV cache": round(head * -(-spec.kv_heads // self.cores)),
            "activations": 6 * max(self.context, self.batch) * spec.H,
        }

    @property
    def nbytes(self) -> int:
        """Of a core."""
        return sum(self.memory.values())

    @property
    def part(self) -> float:
        """Of an expert in a core."""
        return self.padded["I"] / self.spec.I / self.way.tp

    @property
    def expert(self) -> tuple[float, float]:
        """Seconds of a row in a core's part of an expert, and of reading it."""
        flops, hbm = self.rates
        spec = self.spec
        return 2 * self.part * spec.expert_params / flops, self.part * spec.expert_bytes / hbm

    @property
    def shard(self) -> str:
        """What the two halves of a core divide: "I", "H" or "block"."""
        spec, way = self.spec, self.way
        part = spec.I / way.tp
        if part % PART == 0 and (self.here == 1 or way.ep <= LOW_EP and part >= 2 * PART):
            return "I"
        return "H" if way.tp > MOST_TP or self.here == 1 else "block"

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """What each size gives."""
        here = self.here
        row, read = self.expert
        found = []
        for B in self.sizes:
            graph = blocks_by_code(self.context, self.spec.K, here, B)
            even = min(here * math.ceil(self.rows / B), graph)
            computed = graph if self.shard == "H" else even
            reads = min(here, computed), computed
            once, each = (self.spec.L * max(computed * B * row, n * read) for n in reads)
            padding = max(1 - here * self.rows / (computed * B), 0.0)
            found.append(Blocks(B, graph, computed, padding, once, each))
        return tuple(found)

    def bound(self, phase: str) -> Bound | None:
        """What limits a phase; None where NxD does not run it with these degrees."""
        spec, decode, here = self.spec, phase == "decode", self.here
        T = self.batch if decode else self.context
        match algorithm := self.algorithm(phase, self.way.ep):
            case None:
                return None
            case "selective":
                rows, here = T * spec.K, min(T * spec.K, here)
            case "all_experts":
                rows = T * here
            case "capacity":
                rows = here * min(math.ceil(self.rows * self.capacity_factor), T)
            case "blockwise":
                B = self.block_size
                rows = B * next(of.computed for of in self.blocks if of.block_size == B)
        row, read = self.expert
        flops, hbm = self.rates
        dense = self.share(self.model.dense)
        head = 0 if decode else self.share(2 * spec.vocab * spec.H)  # the last row's only
        attention = spec.num_layers * self.padded["heads"] * spec.head_dim / self.cores
        seen = 2 * self.context if decode else T  # causal
        # before attention and before the experts a chip gets all rows, after them sums go back
        chips = -(-self.cores // self.device[CORES])
        sent = spec.num_layers * 4 * T * 2 * spec.H * (1 - 1 / chips)
        computed = T * (max(dense - head, 0) + 2 * seen * attention)
        nbytes = dense + decode * self.memory["KV cache"]
        parts = {
            "compute": computed / flops + spec.L * rows * row,
            "HBM": nbytes / hbm + spec.L * here * read,
            "link": sent / (1e9 * self.device["interconnect_gbs"]),
        }
        limit = max(parts, key=parts.get)
        return Bound(algorithm, parts, parts[limit], limit)

    @property
    def blockwise(self) -> Record:
        """What `BlockwiseMatmulConfig.from_kwargs` takes."""
        dynamic = {"I": "intermediate", "block": "block"}.get(self.shard)
        given = {"block_size": self.block_size, "logical_nc_config": 2}
        given |= {"skip_dma_token": True, "skip_dma_weight": True}
        return given | ({f"use_shard_on_{dynamic}_dynamic_while": True} if dynamic else {})

    @property
    def record(self) -> Record:
        """Everything, as plain values."""
        given = {name: of for name, of in vars(self).items() if name not in ("device", "way")}
        bounds = {of: (found := self.bound(of)) and asdict(found) for of in PHASES}
        return {
            "format": FORMAT,
            "kind": KIND,
            **given,
            "model": self.model.source,
            "device": self.device.name,
            **asdict(self.way),
            **bounds,
            "memory": self.memory,
            "usable": self.usable,
            "padded": self.padded,
            "blockwise_matmul_config": self.blockwise,
            "blocks": [asdict(of) for of in self.blocks],
            "router_sequence_parallel": self.phase == "prefill",
        }

    @property
    def fits(self) -> bool:
        """Whether there are such degrees, and enough memory."""
        with suppress(ValueError):
            return self.nbytes <= self.usable
        return False

    def refusal(self) -> ValueError:
        """Why it does not fit, and what would."""
        memory = self.memory
        growing = memory["KV cache"] + memory["activations"]
        more = [self.cores << n for n in range(1, 8)]
        remedies = [
            *["a smaller --batch or --context"] * (self.nbytes - growing <= self.usable),
            *[f"--quantize {of}" for of in WEIGHTS if replace(self, weights=of).fits],
            *[f"--cores {n}" for n in more if replace(self, cores=n).fits][:1],
        ]
        parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in memory.items())
        return ValueError(
            f"{self.spec.name} does not fit {self.cores} cores of {self.device.name}: each has "
            f"{size(self.usable)} for it, and it needs {size(self.nbytes)} ({parts}). Give "
            f"{' or '.join(remedies) or 'a smaller model'}"
        )


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
        checkpoint's own, else bf16.    Others: see `NeuronPlan`.

    Raises ValueError: a device without NeuronCores; no way of spreading the model; too little memory,
    and what would do. FileNotFoundError: no such model."""
    found, card = find_model(model), load_device(device)
    weights = quantize or OWN.get(found.spec.dtype, "bf16")
    require("phase", phase, PHASES)
    require("weights", weights, WEIGHTS)
    if min(cores, batch, context or 1) < 1:
        raise ValueError(
            f"{cores} cores, a batch of {batch}, a context of {context}: 1 is the least"
        )
    if CORES not in card.figures:
        known = [name for name in DEVICES if CORES in load_device(name).figures]
        raise ValueError(f"{card.name} has no NeuronCores; give {' or '.join(known)}")
    context = context or min(CONTEXT, found.most or CONTEXT)
    made = NeuronPlan(found, card, cores, phase, batch, context, weights, capacity_factor)
    if made.nbytes > made.usable:
        raise made.refusal()
    return made
