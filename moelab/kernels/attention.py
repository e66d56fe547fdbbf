"""Attention of a single token in two calls: projections, norms, rotation before the cache, heads and output after it.

A token's attention takes about thirty calls in transformers, which are overhead-dominated. Here threads share the rows
of q, k and v, then the key heads, then the rows of the output. Sums are in fp32 and rounded once, so the result is
transformers' within the dtype's tolerance. Only for `ATTENTIONS`, where a probe shows the same result, on the CPU;
prompts, batches, masks and gradients take the module's own forward.

    x [1, 1, H] → q [heads, D], k and v [kv heads, D] → the cache: [kv heads, S, D] → y [1, 1, H]
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moelab.kernels import products
from moelab.kernels.tiles import (add_rows, dots, exponential, kept, place, read, span, spread, take, together,
                                  weight, write)
from moelab.kernels.compile import c_function, kernel
from moelab.kernels.products import Matrices, Pack
from moelab.kernels.vectors import STEP

#: classes of transformers whose attention is the one above; a probe must agree as well
ATTENTIONS = ("MixtralAttention", "OlmoeAttention", "PhimoeAttention", "Qwen2MoeAttention", "Qwen3MoeAttention")
#: what a probe may differ by, relative to the largest number
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
ROOM = 256                      # tokens for which a cache gets memory at once
_NONE = np.zeros(1, np.int64)


class DecodeAttention:
    """The forward of one layer's attention; the module's own for everything but a single token.

    pack : how its weights are packed, if they are; all of q, k and v or none.
    """

    def __init__(self, module: nn.Module, pack: Pack | None = None) -> None:
        self.module, self.own = module, type(module).forward
        self.linears = [module.q_proj, module.k_proj, module.v_proj, module.o_proj]
        norms = [norm for norm in (getattr(module, name, None) for name in ("q_norm", "k_norm")) if norm is not None]
        D = self.D = module.head_dim
        self.heads, self.kv_heads = (linear.out_features // D for linear in self.linears[:2])
        # of q's and k's: addresses of weights, widths, epsilon
        self.norms = (*(n.weight.data_ptr() for n in norms), *(len(n.weight) for n in norms), epsilon(norms[0])) \
            if len(norms) == 2 else (0, 0, D, D, 0.0)
        self.dtype = self.linears[0].weight.dtype
        kind = products.KINDS[self.dtype]
        self.kind, self.heads_work = kind(0), c_function(_ENTRIES[kind])
        before = [Matrices(linear.weight, linear.bias, linear.out_features // D, pack) for linear in self.linears[:3]]
        if len({matrices.kind for matrices in before}) > 1:
            before = [Matrices(linear.weight, linear.bias, linear.out_features // D) for linear in self.linears[:3]]
        after = Matrices(self.linears[3].weight, self.linears[3].bias, 1, pack)
        rows = np.concatenate([matrices.rows for matrices in before])           # a matrix for each head
        self.before = before[0].kind(0), rows, np.arange(len(rows) + 1), np.zeros(len(rows), np.int64)
        self.after = after.kind(0), after.rows, np.array([0, 1]), _NONE
        self.works, self.alive = [products.entry(before[0].kind), products.entry(after.kind)], (before, after)
        self.addresses = _addresses(module)
        self.rooms: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()      # of caches' layers

    def takes(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None, cache: Any) -> bool:
        """Whether this is a single token without a mask, and nothing of the module was replaced or moved."""
        module, dtype = self.module, self.dtype
        return (x.numel() == x.shape[-1] and mask is None and cache is not None and cos is not None
                and x.dtype == cos.dtype == sin.dtype == dtype and x.is_cpu and cos.numel() == sin.numel() == self.D
                and not torch.is_grad_enabled() and not module.training
                and module.config._attn_implementation == "sdpa" and _addresses(module) == self.addresses)

    def __call__(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None,
                 attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        x, module, (cos, sin) = hidden_states, self.module, position_embeddings or (None, None)
        if args or not self.takes(x, cos, sin, attention_mask, past_key_values):
            return self.own(module, hidden_states, *args, position_embeddings=position_embeddings,
                            attention_mask=attention_mask, past_key_values=past_key_values, **kwargs)
        grown = self.grown(past_key_values)
        k, v = [t[:, :, -1:] for t in grown] if grown else x.new_empty(2, 1, self.kv_heads, 1, self.D).unbind()
        x, cos, sin, threads = x.contiguous(), cos.contiguous(), sin.contiguous(), torch.get_num_threads()
        q = np.empty(self.heads * self.D, np.float32)
        _project(self.kind, *self.before, x.data_ptr(), x.numel(), self.D, *self.norms, cos.data_ptr(),
                 sin.data_ptr(), module.scaling, q, k.data_ptr(), v.data_ptr(), k.stride(1), self.works[0],
                 products.TEAM, threads)
        keys, values = grown or (t.contiguous() for t in past_key_values.update(k, v, module.layer_idx))
        S, y = keys.shape[2], torch.empty_like(x)
        _attend(self.kind, *self.after, q, keys.data_ptr(), values.data_ptr(), self.kv_heads, S, keys.stride(1), self.D,
                y.data_ptr(), y.numel(), self.heads_work, self.works[1], products.TEAM, threads)
        return y, None

    def grown(self, cache: Any) -> tuple[Tensor, Tensor] | None:
        """The layer's keys and values [1, kv heads, S + 1, D], the last to be written; None for the cache's `update`.

        transformers copies all keys and values for every token. Here a plain growing cache gets memory for `ROOM`
        tokens more, in `rooms` by layer. What it has given out, cropped or reordered stays what it was.
        """
        layers, index = () if getattr(cache, "offloading", True) else cache.layers, self.module.layer_idx
        layer = layers[index] if index < len(layers) else None
        if type(layer).__name__ != "DynamicLayer" or not layer.is_initialized or layer.keys.ndim != 4:
            return None
        keys, values, S = layer.keys, layer.values, layer.keys.shape[2]
        room, given = self.rooms.get(layer, (None, (None, None)))
        if keys is not given[0] or values is not given[1] or S == room[0].shape[2]:
            if keys.dtype != self.dtype or not keys.is_cpu or keys.shape[:3] != values.shape[:3]:
                return None
            room = tuple(t.new_empty(*t.shape[:2], S + ROOM, t.shape[3]) for t in (keys, values))
            room[0][:, :, :S], room[1][:, :, :S] = keys, values
        layer.keys, layer.values = given = room[0].narrow(2, 0, S + 1), room[1].narrow(2, 0, S + 1)
        self.rooms[layer] = room, given
        return given


def _addresses(module: nn.Module) -> list[int]:
    return [p.data_ptr() for child in module._modules.values() for p in child._parameters.values() if p is not None]


def epsilon(norm: nn.Module) -> float | None:
    """What an RMSNorm adds to the mean square; None if it keeps that elsewhere."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.inference_mode()
def decode_attention(module: nn.Module, pack: Pack | None = None) -> DecodeAttention | None:
    """The forward for this module; None if a probe on a random token and angle shows another attention."""
    config = getattr(module, "config", None)
    if type(module).__name__ not in ATTENTIONS or getattr(config, "clip_qkv", None):
        return None
    linears = [getattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    dtype = linears[0].weight.dtype
    if dtype not in products.KINDS or any(type(linear) is not nn.Linear or not linear.weight.is_cpu
                                          or not linear.weight.is_contiguous() or linear.weight.dtype != dtype
                                          for linear in linears):
        return None
    ours, rng = DecodeAttention(module), torch.Generator().manual_seed(0)
    angle = torch.rand(1, 1, ours.D // 2, generator=rng).repeat(1, 1, 2) * 6
    past = [torch.randn(1, ours.kv_heads, 3, ours.D, generator=rng).to(dtype) for _ in range(2)]
    given = {"position_embeddings": (angle.cos().to(dtype), angle.sin().to(dtype)), "attention_mask": None,
             "past_key_values": SimpleNamespace(
                 update=lambda k, v, *_: [torch.cat(pair, 2) for pair in zip(past, (k, v))])}
    x = torch.randn(1, 1, linears[0].in_features, generator=rng).to(dtype)
    wanted, got = (forward(x, **given)[0].float() for forward in (module, ours))
    if (got - wanted).abs().max() > TOLERANCE[dtype] * wanted.abs().max():
        return None
    return DecodeAttention(module, pack) if pack else ours


@kernel
def _project(kind, order, matrices, bounds, tokens, x, n, D, q_norm, k_norm, q_width, k_width, eps, cos, sin, scaling,
             q, k, v, stride, work, team, threads):
    """q fp32 [heads, D], scaled, in the order of `place`; k and v, heads `stride` numbers apart. A norm may be 0."""
    M, heads, whole = len(matrices), len(q) // D, D - D % STEP
    kv_heads, y = (M - heads) // 2, np.empty((M, D), np.float32)
    together(team, work, threads, products.job_of(kind, order, matrices, bounds, x, 1, n, tokens, D, y.ctypes.data))
    flat = y.reshape(M * D)
    _normalise(kind, flat[:heads * D], q_norm, q_width, eps)
    _normalise(kind, flat[heads * D:(heads + kv_heads) * D], k_norm, k_width, eps)
    turned, half = np.empty(D, np.float32), D // 2
    for m in range(heads + kv_heads):
        for i in range(half):
            a, b = y[m, i], y[m, i + half]
            turned[i] = a * weight(kind, cos, i) - b * weight(kind, sin, i)
            turned[i + half] = b * weight(kind, cos, i + half) + a * weight(kind, sin, i + half)
        if m < heads:
            for i in range(D):
                turned[i] *= np.float32(scaling)
            spread(np.float32(0), kind, turned.ctypes.data, whole, q.ctypes.data + 4 * m * D)
            for i in range(whole, D):
                q[m * D + i] = turned[i]
        else:
            for i in range(D):
                write(kind, k, (m - heads) * stride + i, turned[i])
                write(kind, v, (m - heads) * stride + i, y[m + kv_heads, i])


@kernel(fastmath={"reassoc", "contract"})
def _normalise(kind, y, w, width, eps):
    """RMS norm of y in rows of `width`, by the weight at w."""
    if w == 0:
        return
    for first in range(0, len(y), width):
        total = np.float32(0)
        for i in range(width):
            total += y[first + i] * y[first + i]
        inverse = np.float32(1 / np.sqrt(total / width + eps))
        for i in range(width):
            y[first + i] *= inverse * weight(kind, w, i)


@kernel
def _attend(kind, order, matrices, bounds, tokens, q, k, v, kv_heads, S, stride, D, out, H, heads_work, work, team,
            threads):
    """The output [H] from q of `_project` and keys and values [kv heads, S, D], `stride` numbers from head to head."""
    mixed, y = np.empty(len(q), np.float32), np.empty(H, np.float32)
    job = np.empty(10, np.int64)
    job[0], job[1], job[2], job[3], job[4] = 0, kv_heads, len(q) // D // kv_heads, S, D
    job[5], job[6], job[7], job[8], job[9] = q.ctypes.data, k, v, mixed.ctypes.data, span(kind, stride)
    together(team, heads_work, threads, job)
    job = products.job_of(np.float32(0), order, matrices, bounds, mixed.ctypes.data, 1, len(q), tokens, H,
                          y.ctypes.data)
    kept(mixed)
    together(team, work, threads, job)
    for i in range(H):
        write(kind, out, i, y[i])


@kernel
def _heads(kind, job):
    """One key head after the other, with the query heads that share it, until none is left."""
    kv_heads, group, S, D = read(job, 1), read(job, 2), read(job, 3), read(job, 4)
    q, k, v, mixed, stride = read(job, 5), read(job, 6), read(job, 7), read(job, 8), read(job, 9)
    whole, row = D - D % STEP, span(kind, D)
    scores, sums, inputs = np.empty((group, S), np.float32), np.empty(D, np.float32), np.empty(group, np.int64)
    while True:
        h = take(job)
        if h >= kv_heads:
            return
        keys, values = k + h * stride, v + h * stride
        for g in range(group):
            inputs[g] = q + 4 * (h * group + g) * D
        for g in range(group):
            x, to = inputs.ctypes.data + 8 * g, scores.ctypes.data + 4 * g * S
            for s in range(0, S - 3, 4):
                dots(1, 4, kind, x, keys + s * row, 0, 0, D, whole, to + 4 * s, S, 16 * row)
            for s in range(S - S % 4, S):
                dots(1, 1, kind, x, keys + s * row, 0, 0, D, whole, to + 4 * s, S, 16 * row)
            for s in range(S if whole < D else 0):
                for i in range(whole, D):
                    scores[g, s] += weight(np.float32(0), inputs[g], i) * weight(kind, keys, s * D + i)
            largest, total = scores[g].max(), np.float32(0)
            for s in range(S):
                scores[g, s] = exponential(scores[g, s] - largest)
            for s in range(S):
                total += scores[g, s]
            sums[:] = 0
            for s in range(0, S - 3, 4):
                add_rows(4, kind, scores.ctypes.data + 4 * (g * S + s), values + s * row, 0, 0, D, whole,
                         sums.ctypes.data)
            for s in range(S - S % 4, S):
                add_rows(1, kind, scores.ctypes.data + 4 * (g * S + s), values + s * row, 0, 0, D, whole,
                         sums.ctypes.data)
            for i in range(whole, D):
                for s in range(S):
                    sums[i] += scores[g, s] * weight(kind, values, s * D + i)
            for i in range(D):
                write(np.float32(0), mixed, (h * group + g) * D + i, sums[place(kind, i) if i < whole else i] / total)


def _entry(kind: type) -> Callable:
    def heads(job):
        _heads(kind(0), job)
    return heads


_ENTRIES = {kind: _entry(kind) for kind in products.KINDS.values()}
