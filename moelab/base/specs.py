"""What a model is and what a machine is, without torch. The shape legend of the whole package:

T tokens               L MoE layers                E experts a layer        K experts a token
H hidden size          I expert intermediate size  S sequence length        V vocabulary
B block or chunk size  C capacity of an expert     G experts a group
N devices or blocks (says which)
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple

#: bytes of one weight; MXFP4 is 32 four-bit values and one shared 8-bit scale, int4 128 and one of
#: 16 bits
DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8_e4m3fn": 1.0,
    "int8": 1.0,
    "mxfp4": 4.25 / 8,
    "int4": 4.125 / 8,
}


class ExpertKey(NamedTuple):
    """One expert of one MoE layer; `layer` counts MoE layers (0 … L−1), not decoder layers."""

    layer: int
    expert: int


class State(StrEnum):
    """What of an expert is in memory: ZipMoE's compression states (§3.2). FULL holds the joined
    tensors only."""

    MISSED = "M"
    E = "E"  # the compressed exponents
    SM = "S"  # the sign-mantissa bytes
    COMPRESSED = "C"  # both
    FULL = "F"

    __hash__ = (
        str.__hash__
    )  # Enum's own is slow, and states are keys wherever an expert is asked for


class Event(NamedTuple):
    """One thing that one resource did, in seconds of the real clock or of a simulated one.

    resource : "disk" or, from pinned memory to a GPU, "link"; "worker 0" …, "compute"; "gpu", which
        recovers, and "gpu compute", which waits for a link; "ane", or what stands for it.
    layer, expert : −1 for none, or for several experts at once.
    kind : "read E", "read SM", "read", "send" (planes that were read), "decompress", "recover", "decode" (both in one), "expert",
        "other" (attention, router, norms …), "wait" (compute has nothing that is ready); of prompts
        by `moelab.ane`, "launch" (a group of experts), and "attention", "router", "gather",
        "scatter" apart from the other.
    """

    resource: str
    kind: str
    layer: int
    expert: int
    start: float
    end: float
    bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class MoESpec:
    """The geometry of a mixture-of-experts model.

    model_type : transformers' `config.model_type`; of a multimodal model, its language model's
        ("llama4_text").
    num_layers : all decoder (and encoder) layers, MoE or not.
    moe_layers : indices of the layers that are MoE; an encoder-decoder counts its encoder first.
    H, I : the width that experts read, and their own; both 0 where only routing is known.
    router : "softmax", "softmax-group" (best groups first), "topk-softmax" (softmax over the
        chosen), "sigmoid-group" (correction bias and groups), "sigmoid", "sparsemixer" or "top1"
        (with capacity); for a rarer one, the config's own word.
    gated : three matrices an expert (gate, up, down) or two (up, down).
    bias : whether the experts have biases.
    shared_I, dense_I : summed intermediate size of the shared experts; that of the layers that are
        not MoE; 0 without.
    vocab, heads, kv_heads, head_dim : for costs. MLA models state the query heads and the value
        head size.
    dtype : a key of `DTYPE_BYTES`; how the experts are stored.
    """

    name: str
    model_type: str
    num_layers: int
    moe_layers: tuple[int, ...]
    E: int
    K: int
    H: int
    I: int
    router: str = "softmax"
    gated: bool = True
    bias: bool = False
    shared_I: int = 0
    dense_I: int = 0
    vocab: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        unknown = self.H == self.I == 0
        least = dict.fromkeys(("E", "K", "num_layers"), 1)
        least |= dict.fromkeys(("H", "I"), 0 if unknown else 1)
        least |= dict.fromkeys(("shared_I", "dense_I", "vocab", "heads", "kv_heads", "head_dim"), 0)
        for field, low in least.items():
            if (value := getattr(self, field)) < low:
                raise ValueError(f"{self.name}: {field} is {value}; it must be at least {low}")
        rising = sorted({n for n in self.moe_layers if 0 <= n < self.num_layers})
        if [*self.moe_layers] != rising:
            raise ValueError(
                f"{self.name}: moe_layers are {self.moe_layers}; they must be rising indices of "
                f"its {self.num_layers} layers"
            )
        if self.K > self.E:
            raise ValueError(
                f"{self.name}: K={self.K} experts a token, but only E={self.E} experts a layer"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"{self.name}: unknown dtype {self.dtype!r}; known are {', '.join(DTYPE_BYTES)}"
            )

    @property
    def L(self) -> int:
        """How many layers are MoE."""
        return len(self.moe_layers)

    def _sizes(self) -> tuple[int, int]:
        """(weights, biases) of one expert. ValueError: only its routing is known."""
        if not self.H:
            raise ValueError(
                f"the experts' sizes of {self.name} are not known, only its routing: give model=, a "
                "card's name, a hub id or a folder, where the trace is loaded"
            )
        matrices = 3 if self.gated else 2
        return matrices * self.H * self.I, self.bias * ((matrices - 1) * self.I + self.H)

    @property
    def expert_params(self) -> int:
        """Weights of one expert, biases included."""
        return sum(self._sizes())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert as stored; quantised weights keep 16-bit biases."""
        bytes_each, (weights, biases) = DTYPE_BYTES[self.dtype], self._sizes()
        return round(weights * bytes_each + biases * max(bytes_each, 2))

    @property
    def experts_bytes(self) -> int:
        """Bytes of all routed experts of the model."""
        return self.L * self.E * self.expert_bytes

    @property
    def routed_bytes(self) -> int:
        """Bytes of the experts that one token visits: what a decode step must touch."""
        return self.L * self.K * self.expert_bytes

    @property
    def dense_params(self) -> int:
        """Weights that every token passes: attention, shared experts, dense layers, routers, LM
        head; of grouped-query attention, which MLA is not."""
        matrices = 3 if self.gated else 2
        attention = 2 * self.H * self.head_dim * (self.heads + self.kv_heads)
        moe = self.L * (matrices * self.H * self.shared_I + self.E * self.H)
        dense = (self.num_layers - self.L) * matrices * self.H * self.dense_I
        return self.num_layers * attention + moe + dense + self.vocab * self.H

    @property
    def dense_bytes(self) -> float:
        """Bytes of those weights and of the input embeddings, at least 16 bits each."""
        return (self.dense_params + self.vocab * self.H) * max(2.0, DTYPE_BYTES[self.dtype])

    def with_dtype(self, dtype: str) -> MoESpec:
        """The same model with its experts stored in another dtype."""
        return replace(self, dtype=dtype)

    def fingerprint(self) -> str:
        """Twelve hex digits that name the geometry; the name and the dtype do not count."""
        fields = {k: v for k, v in asdict(self).items() if k not in ("name", "dtype")}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Figure:
    """One number of a device, with what kind of number it is and where it comes from."""

    value: float
    unit: str
    kind: Literal["measured", "published", "fitted", "assumed"]
    source: str


@dataclass(frozen=True)
class DeviceSpec:
    """A machine: compute rates, bandwidths, latencies, memory and power."""

    name: str
    figures: dict[str, Figure]

    def __getitem__(self, name: str) -> float:
        if name not in self.figures:
            raise KeyError(
                f"{self.name} has no figure {name!r}; it has {', '.join(sorted(self.figures))}"
            )
        return self.figures[name].value
