"""Attention of one chunk of S tokens as a static Core ML graph: projections, rotary, GQA, mask, a
fixed-shape cache.

Source: NPUMoE §3.2, §A.4. Tensors are (1, heads, D, S), positions on the long last axis, so the
graph needs no transpose. What depends on the position in the prompt is an input, so one graph
serves all chunks:

    x (1, H, 1, S)   q_cos, q_sin (with the softmax scale), k_cos, k_sin (1, 1, D, S)
    mask (1, 1, S, keys), 0 or MASKED   k_past, v_past (1, KV, D, P)
                                        → y (1, H, 1, S), k_new, v_new (1, KV, D, S)

P is the context length. A chunk sees P + S keys, and the caller puts k_new and v_new into its
cache. Left out: a cache that the graph keeps as its state, which decoding on the CPU could not
read; MLA, attention sinks, partial rotary.

fp16 rounds a score by up to 2^-11 of its size, so scores are made small before they are rounded:
softmax(q·k) = softmax(q·k − m) with any m for each query. With m near its largest score, the scores
that count are near 0, and the matrix product subtracts m before it rounds (SageAttention shifts by
all keys' mean, arXiv 2410.02367 §3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.ane.coreml.ffn_graph import conv, half
from moelab.ane.coreml.package import coremltools
from moelab.ane.systems import why_no_graph

#: what the mask adds to a hidden key's score: the smallest fp16 or fp32 turns into NaN on the
#: device
MASKED = -1e4
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention graph."""

    hidden: int  # H
    heads: int  # query heads
    kv_heads: int  # KV
    head_dim: int  # D
    chunk: int  # S
    context: int  # P
    norm: str | None = (
        None  # of q and k: "head" (over each head's D, Qwen3) or "full" (over all heads, OLMoE)
    )
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.norm and float(torch.tensor(self.eps).half()) == 0:
            raise ValueError(f"the epsilon {self.eps:g} of the norms of q and k is 0 in fp16")

    @property
    def keys(self) -> int:
        """Key positions that the mask covers."""
        return self.context + self.chunk

    @property
    def cache(self) -> tuple[int, int, int, int]:
        """Shape of the cache of keys, and of values."""
        return 1, self.kv_heads, self.head_dim, self.context


def attention_shape(config: Any, chunk: int, context: int) -> AttentionShape:
    """The sizes of a model's attention; ValueError for an architecture whose attention stays on the
    CPU."""
    kind = config.model_type
    rope = getattr(config, "rope_parameters", None) or {}
    if reason := why_no_graph("attention", kind):
        raise ValueError(reason)
    if getattr(config, "clip_qkv", None) is not None or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"this {kind!r} model clips q, k and v or rotates a part of each head; no graph "
            "does that"
        )
    heads = config.num_attention_heads
    return AttentionShape(
        config.hidden_size,
        heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        chunk,
        context,
        {"qwen3_moe": "head", "olmoe": "full"}.get(kind),
        float(getattr(config, "rms_norm_eps", 1e-6)),
    )


def attention_program(shape: AttentionShape, tensors: dict[str, Tensor]) -> Any:
    """The MIL program of one layer's attention.

    tensors : "q_proj.weight" [heads·D, H] …, biases, "q_norm.weight" and "k_norm.weight";
    ValueError for any other."""
    ct = coremltools()
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    _require_known(shape, tensors)
    weights = {name: half(tensor, name) for name, tensor in tensors.items()}
    S = shape.chunk
    D = shape.head_dim
    H = shape.hidden

    def project(x: Any, name: str, out: str = "") -> Any:
        matrix, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        return conv(mb, x, matrix, bias, out or name)

    def positioned(x: Any, of: str, heads: int, cos: Any, sin: Any, **name: str) -> Any:
        """Projection, norm and rotation of q or k: (1, H, 1, S) → (1, heads, D, S)."""
        x = project(x, f"{of}_proj")
        if shape.norm == "full":
            x = normalised(mb, x, 1, shape.eps)
        x = mb.reshape(x=x, shape=(1, heads, D, S))
        if shape.norm == "head":
            x = normalised(mb, x, 2, shape.eps)
        if shape.norm:
            x = mb.mul(x=x, y=weights[f"{of}_norm.weight"].reshape(1, -1, D, 1))
        first, second = mb.split(x=x, num_splits=2, axis=2)
        turned = mb.concat(values=[mb.mul(x=second, y=np.float16(-1)), first], axis=2)
        return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=turned, y=sin), **name)

    shapes = [(1, H, 1, S), *[(1, 1, D, S)] * 4, (1, 1, S, shape.keys), *[shape.cache] * 2]
    specs = [mb.TensorSpec(shape=dims, dtype=types.fp16) for dims in shapes]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x, q_cos, q_sin, k_cos, k_sin, mask, k_past, v_past):
        q = positioned(x, "q", shape.heads, q_cos, q_sin)
        k = positioned(x, "k", shape.kv_heads, k_cos, k_sin, name="k_new")
        v = mb.reshape(x=project(x, "v_proj"), shape=(1, shape.kv_heads, D, S), name="v_new")
        keys = mb.concat(values=[k_past, k], axis=3)
        values = mb.concat(values=[v_past, v], axis=3)
        keys, values, own = (
            _repeated(mb, each, shape.heads // shape.kv_heads)
            for each in (with_ones(mb, keys), values, k)
        )
        scores = shifted(mb, q, keys, own)  # (1, heads, S, keys)
        shares = mb.softmax(x=mb.add(x=scores, y=mask), axis=-1, name="shares")
        mixed = mb.matmul(x=values, y=shares, transpose_y=True, name="mixed")  # (1, heads, D, S)
        mixed = mb.reshape(x=mixed, shape=(1, shape.heads * D, 1, S))
        return project(mixed, "o_proj", "y"), k, v

    return program


def _require_known(shape: AttentionShape, tensors: dict[str, Tensor]) -> None:
    known = {f"{name}.{kind}" for name in PROJECTIONS for kind in ("weight", "bias")}
    known |= {"q_norm.weight", "k_norm.weight"} if shape.norm else set()
    if other := set(tensors) - known:
        raise ValueError(
            f"this attention has {', '.join(sorted(other))}, which no graph computes: plan it "
            "for the CPU"
        )


def _repeated(mb: Any, x: Any, times: int) -> Any:
    """(1, KV, D, n) → (1, KV·times, D, n), each head `times` times in a row."""
    if times == 1:
        return x
    heads = mb.split(x=x, num_splits=x.shape[1], axis=1) if x.shape[1] > 1 else [x]
    return mb.concat(values=[head for head in heads for _ in range(times)], axis=1)


def normalised(mb: Any, x: Any, axis: int, eps: float) -> Any:
    """RMS norm over an axis, without a weight."""
    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[axis], keep_dims=True)
    return mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(eps)))


def with_ones(mb: Any, keys: Any) -> Any:
    """Keys (1, KV, D, n) with further channels of 1, for `shifted`; their number makes D a multiple
    of 16 again."""
    _, heads, D, n = keys.shape
    return mb.concat(values=[keys, np.ones((1, heads, 16 - D % 16, n), dtype=np.float16)], axis=2)


def shifted(mb: Any, q: Any, keys: Any, some: Any) -> Any:
    """Scores q·k − m, (1, heads, S, n), where m is a query's largest score among `some` keys.

    q (1, heads, D, S); keys (1, heads, D + ones, n), from `with_ones`; some (1, heads, D, any
    number)."""
    ones = keys.shape[2] - q.shape[2]
    m = mb.reduce_max(
        x=mb.matmul(x=some, y=q, transpose_x=True), axes=[2], keep_dims=True
    )  # (1, heads, 1, S)
    part = mb.mul(x=m, y=np.float16(-1 / ones))
    return mb.matmul(
        x=mb.concat(values=[q, *[part] * ones], axis=2), y=keys, transpose_x=True, name="scores"
    )


def mask_of(shape: AttentionShape, start: int, window: int | None = None) -> Tensor:
    """The additive mask (1, 1, S, keys) of the chunk that begins at position `start`.

    A query sees the keys up to its own position, with a sliding window the last `window` of these.
    Key j < P is position j of the cache, of which the first `start` are filled, and key P + i is
    the chunk's token i."""
    keys = torch.arange(shape.keys)
    query = start + torch.arange(shape.chunk)[:, None]
    in_chunk = keys >= shape.context
    position = torch.where(in_chunk, keys - shape.context + start, keys)
    seen = (position <= query) & (in_chunk | (keys < start))
    if window is not None:
        seen &= position > query - window
    return torch.where(seen, 0.0, MASKED)[None, None]


def attention_inputs(
    shape: AttentionShape,
    x: Tensor,
    start: int,
    cos: Tensor,
    sin: Tensor,
    window: int | None = None,
) -> dict[str, Tensor]:
    """All inputs but the cache of the chunk x [n, H], n ≤ S, that begins at position `start`; cos,
    sin [n, D].

    A short chunk is filled up with repetitions of its last token (zeros would be divided by in the
    norms), whose outputs and keys are to be discarded. ValueError for a chunk that is empty, too
    long or beyond the context."""
    n = len(x)
    S = shape.chunk
    if not 0 < n <= S or start + n > shape.context:
        raise ValueError(
            f"{n} tokens from position {start} on: a chunk holds 1 to {S} tokens and the context that "
            f"this attention was converted for {shape.context}: convert it for a longer one"
        )

    def filled(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows[-1:].expand(S - n, -1)]).T.contiguous()

    scale = shape.head_dim**-0.5
    tables = {"q_cos": cos * scale, "q_sin": sin * scale, "k_cos": cos, "k_sin": sin}
    return {
        "x": filled(x)[None, :, None],
        "mask": mask_of(shape, start, window).to(x.dtype),
        **{name: filled(table)[None, None] for name, table in tables.items()},
    }
