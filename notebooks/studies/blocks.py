"""Arithmetic of blockwise matrix multiplication: blocks, padding, intensity (AWS Neuron MoE guide,
"BWMM").

A static graph provides N blocks of B tokens, one expert a block, enough for any routing; beyond the
T·K token-expert pairs they hold padding. Large blocks pad more, small ones reload weights for less
work. The guide's rule is the smallest block that makes the work compute-bound, by its factor AIF =
B·N/E.

    T tokens    K experts a token    E experts (with expert parallelism: the local ones)    B block size    N blocks

Where the guide's worked numbers do not follow from its own inputs, or need care:

- "2880 × 128 × 2 bytes = ~0.07 MB" a router is 0.74 MB, and 36 of them are 27 MB, not 2.4 MB
    (`router_bytes`).
- "One expert gets 1750 tokens" of 1000 cannot be: with distinct top-2 experts it gets 1000 at most.
- AIF counts padded rows as work. A weight that is read once serves T·K/E rows, whatever B is; B
  sets the work for each *load* where weights are reloaded for every block, which is what
  `moelab.advice.neuron` goes by.
- "400–500 FLOPs/byte" on TRN2 fits its published FP8 rate over its bandwidth (448); in bf16 that is
230."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moelab.base.registry import require
from moelab.base.specs import DeviceSpec
from moelab.static.parallelism import blocks_by_code

#: dtype of the weights → (figure with its compute rate, bytes a weight)
RATES = {
    "fp32": ("fp32_tflops", 4),
    "fp16": ("fp16_tflops", 2),
    "bf16": ("bf16_tflops", 2),
    "fp8": ("fp8_tflops", 1),
}


def blocks_by_text(T: int, K: int, E: int, B: int) -> int:
    """N of the guide's text, ⌈T·K/B⌉ + E − 1; enough for any routing."""
    return -(-T * K // B) + E - 1


#: how a static graph's N is chosen
PROVISION = {"code": blocks_by_code, "text": blocks_by_text}


def blocks_needed(counts: Sequence[int], B: int) -> int:
    """Blocks that one routing fills: Σ_e ⌈n_e/B⌉ over the experts' token counts."""
    return sum(-(-n // B) for n in counts)


@dataclass(frozen=True)
class Padding:
    """Where the slots of one routing go; overheads are fractions."""

    pairs: int  # T·K
    B: int
    needed: int  # blocks that this routing fills
    provisioned: int  # blocks N that the graph has

    @property
    def slots(self) -> int:
        return self.provisioned * self.B

    @property
    def padded(self) -> int:
        return self.slots - self.pairs

    @property
    def algorithmic(self) -> float:
        """Overhead of whole blocks: (needed·B − T·K) / T·K; what is left when empty blocks are
        skipped."""
        return (self.needed * self.B - self.pairs) / self.pairs if self.pairs else 0.0

    @property
    def worst_case(self) -> float:
        """Overhead of being prepared for any routing: (N − needed) / needed; 0 if empty blocks are
        skipped."""
        return (self.provisioned - self.needed) / self.needed if self.needed else 0.0


def padding(counts: Sequence[int], T: int, K: int, B: int, provision: str = "code") -> Padding:
    """The padding of a routing with `counts` [E] tokens an expert; ValueError for more than T·K of
    them."""
    require("provision", provision, PROVISION)
    counts = [int(n) for n in counts]
    if not counts or min(counts) < 0 or sum(counts) > T * K:
        raise ValueError(
            f"{T} tokens with {K} experts each make {T * K} choices; the experts' counts must not be "
            f"negative and sum to no more, and sum to {sum(counts)}"
        )
    return Padding(
        sum(counts), B, blocks_needed(counts, B), PROVISION[provision](T, K, len(counts), B)
    )


def intensity_factor(B: int, N: int, E: int, bytes_a_weight: float = 2) -> float:
    """AIF in FLOPs/byte: (2·3·B·H·I·N) / (bytes·3·E·H·I), B·N/E for two bytes a weight; padding
    counts as work."""
    return 2 * B * N / (bytes_a_weight * E)


def intensity_target(device: DeviceSpec, dtype: str = "bf16") -> float:
    """FLOPs/byte from which on a device is compute-bound: peak compute / memory bandwidth; KeyError
    without a rate."""
    require("dtype", dtype, RATES)
    return 1e3 * device[RATES[dtype][0]] / device["memory_bandwidth_gbs"]


def router_bytes(H: int, E: int, layers: int = 1) -> int:
    """Memory of replicated 16-bit routers, each [H, E] ("Router execution in sequence parallel
    mode")."""
    return 2 * H * E * layers


@dataclass(frozen=True)
class Shared:
    """What two cores do to share a layer's blocks, one way; exact counts."""

    exchanged: int  # values that one core sends the other
    loads: float  # experts whose weights the busier core reads; a half counts half
    blocks: float  # that the busier core multiplies; a half counts half


def shared(counts: Sequence[int], T: int, H: int, I: int, B: int) -> dict[str, Shared]:
    """The guide's three LNC2 shardings of a gated layer, for the tokens of each expert, counts [E]."""
    walked = [e for e, n in enumerate(counts) for _ in range(-(-int(n) // B))]
    N, experts = len(walked), len({*walked})
    cores = walked[::2], walked[1::2]
    return {
        "H": Shared(N * B * 2 * I, experts / 2, N / 2),
        "I": Shared(N * B * H, experts / 2, N / 2),
        "block": Shared(T * H, max(len({*of}) for of in cores), len(cores[0])),
    }
