"""What a decode step does besides its experts, in one kernel each: norms and attention of a single token.

transformers runs a token's RMSNorm as six operations on a few kilobytes, four times a layer, and attention through a
kernel made for whole prompts: with experts out of the way, that is half of a small model's TPOT, and none of it is
arithmetic. `fast_decode(model)` puts a numba kernel in the place of each, for one token at a time on the CPU;
anything else (prompts, batches, masks, sliding windows, other devices) goes where it went before. A norm is replaced
only if a probe shows that the kernel gives what the module gives; attention is registered with transformers' own
interface. Linear layers get the kernels of the experts (`moelab.experts.dense`).

    norm: x [..., H] → [..., H]    attention: q [1, heads, 1, D], k and v [1, kv heads, S, D] → [1, 1, heads, D]

The results are transformers' within the dtype's tolerance, not bit for bit. Left out: rotary embeddings and routers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moelab.experts.dense import FastLinears

try:
    import numba
except ImportError:                     # nothing is replaced then
    numba = None

#: transformers' name for the attention below, and the one that everything else goes to
ATTENTION, FALLBACK = "moelab_decode", "sdpa"
#: S · D · kv heads beyond which two threads of torch's kernel are faster than one of ours
LARGEST = 1 << 20
#: entries of a norm's x up to which one thread of ours is faster than torch's many operations
LARGEST_NORM = 1 << 16


class FastDecode:
    """A model whose decode steps take the short way; undone by `close`, or at the end of a `with` block.

    Attributes
    ----------
    norms, linears : how many modules were replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._norms, self._linears = model, [], None
        self._attention = getattr(model.config, "_attn_implementation", None)
        if numba is None:
            return
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm") and _same(module):
                module.forward = _Norm(module)
                self._norms.append(module)
        if self._attention == FALLBACK:
            _register()
            model.set_attn_implementation(ATTENTION)
        self._linears = FastLinears(model)

    @property
    def norms(self) -> int:
        return len(self._norms)

    @property
    def linears(self) -> int:
        return len(self._linears.linears) if self._linears else 0

    def close(self) -> None:
        """Give the model its own modules back."""
        for module in self._norms:
            del module.forward
        self._norms = []
        if self._linears is not None:
            self._linears.close()
            if self._attention == FALLBACK:
                self.model.set_attn_implementation(FALLBACK)
        self._linears = None

    def __enter__(self) -> FastDecode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fast_decode(model: nn.Module) -> FastDecode:
    """Let single tokens take the short way through a model on the CPU; without numba, nothing changes."""
    return FastDecode(model)


# ------------------------------------------------------------------------------------------------------------ norms

class _Norm:
    """The forward of an RMSNorm: its own for many rows, the kernel for few."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own, self.eps = module, type(module).forward, _epsilon(module)

    def __call__(self, x: Tensor) -> Tensor:
        w = self.module.weight
        if x.numel() > LARGEST_NORM or x.dtype != w.dtype or not x.is_contiguous() or x.device.type != "cpu":
            return self.own(self.module, x)
        out = torch.empty_like(x)
        H = w.shape[0]
        _rms_norm(x.data_ptr(), w.data_ptr(), x.numel() // H, H, self.eps, x.dtype != torch.float32, out.data_ptr())
        return out


def _epsilon(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _same(module: nn.Module) -> bool:
    """Whether the kernel gives what this module gives, tried on random rows of very different sizes."""
    w = getattr(module, "weight", None)
    if w is None or w.ndim != 1 or _epsilon(module) is None or "forward" in vars(module) \
            or w.device.type != "cpu" or w.dtype not in (torch.float32, torch.bfloat16):
        return False
    x = torch.randn(3, len(w), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1.0], [30.0]])
    x = x.to(w.dtype)
    with torch.inference_mode():
        wanted, got = module(x), _Norm(module)(x)
    return got.dtype == wanted.dtype and torch.allclose(got.float(), wanted.float(), rtol=2 ** -7, atol=1e-6)


# -------------------------------------------------------------------------------------------------------- attention

def _register() -> None:
    """Make the attention known to transformers; its masks are those of the function it falls back to."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                  scaling: float | None = None, **options: Any) -> tuple[Tensor, None]:
        B, heads, T, D = query.shape
        plain = T == 1 and B == 1 and attention_mask is None and key.numel() <= LARGEST and D == value.shape[-1] \
            and query.dtype in (torch.float32, torch.bfloat16) and query.device.type == "cpu" \
            and key.is_contiguous() and value.is_contiguous() and query.is_contiguous() \
            and not any(options.get(name) is not None for name in ("softcap", "position_bias", "cache", "s_aux"))
        if not plain:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        out = query.new_empty(1, 1, heads, D)
        kv_heads, S = key.shape[1:3]
        _attend(query.data_ptr(), key.data_ptr(), value.data_ptr(), kv_heads, heads // kv_heads, S, D,
                scaling or 1 / math.sqrt(D), query.dtype != torch.float32, out.data_ptr())
        return out, None
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# ---------------------------------------------------------------------------------------------------------- kernels

if numba is not None:
    from llvmlite import ir
    from numba.extending import intrinsic

    @intrinsic
    def _pointer(typing, address):
        """Memory by its address: a tensor tells its own in a hundredth of the time that an array of it takes."""
        def code(context, builder, signature, args):
            return builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        return numba.types.voidptr(numba.types.int64), code

    def kernel(function: Any) -> Any:
        """`function` compiled; sums may be taken in any order, so that they are vectors."""
        try:
            return numba.njit(function, nogil=True, cache=True, fastmath={"reassoc", "contract"})
        except RuntimeError:            # numba found no folder that it can write to: compile in every process
            return numba.njit(function, nogil=True, fastmath={"reassoc", "contract"})

    @kernel
    def _widen(address, at, n, half, words, floats):
        """n numbers from the at-th on, bf16 if `half`, into `floats`, which is the memory of `words` as fp32."""
        if half:
            row = numba.carray(_pointer(address + 2 * at), n, np.uint16)
            for i in range(n):
                words[i] = np.uint32(row[i]) << np.uint32(16)
        else:
            row = numba.carray(_pointer(address + 4 * at), n, np.float32)
            for i in range(n):
                floats[i] = row[i]

    @kernel
    def _narrow(address, at, n, half, words, floats):
        """The opposite; rounded to the nearest bf16, ties to even."""
        if half:
            row = numba.carray(_pointer(address + 2 * at), n, np.uint16)
            for i in range(n):
                u = words[i]
                row[i] = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        else:
            row = numba.carray(_pointer(address + 4 * at), n, np.float32)
            for i in range(n):
                row[i] = floats[i]

    @kernel
    def _rms_norm(x, w, rows, H, eps, half, out):
        words, scale_words = np.empty(H, np.uint32), np.empty(H, np.uint32)
        floats, scale = words.view(np.float32), scale_words.view(np.float32)
        _widen(w, 0, H, half, scale_words, scale)
        for r in range(rows):
            _widen(x, r * H, H, half, words, floats)
            total = np.float32(0)
            for i in range(H):
                total += floats[i] * floats[i]
            inverse = np.float32(1 / math.sqrt(total / H + eps))
            for i in range(H):
                floats[i] *= inverse
            _narrow(out, r * H, H, half, words, floats)     # rounded before the weight, as transformers does it
            _widen(out, r * H, H, half, words, floats)
            for i in range(H):
                floats[i] *= scale[i]
            _narrow(out, r * H, H, half, words, floats)

    @kernel
    def _attend(q, k, v, kv_heads, group, S, D, scaling, half, out):
        words, many = np.empty(D, np.uint32), np.empty((2 * group, D), np.uint32)
        row, rows = words.view(np.float32), many.view(np.float32)
        query, sums, scores = rows[:group], rows[group:], np.empty((group, S), np.float32)
        for h in range(kv_heads):
            for g in range(group):
                _widen(q, (h * group + g) * D, D, half, many[g], query[g])
                for i in range(D):
                    query[g, i] *= np.float32(scaling)
            sums[:] = 0
            for s in range(S):
                _widen(k, (h * S + s) * D, D, half, words, row)
                for g in range(group):
                    total = np.float32(0)
                    for i in range(D):
                        total += query[g, i] * row[i]
                    scores[g, s] = total
            for g in range(group):
                largest, total = scores[g].max(), np.float32(0)
                for s in range(S):
                    scores[g, s] = np.exp(scores[g, s] - largest)
                    total += scores[g, s]
                for s in range(S):
                    scores[g, s] /= total
            for s in range(S):
                _widen(v, (h * S + s) * D, D, half, words, row)
                for g in range(group):
                    p = scores[g, s]
                    for i in range(D):
                        sums[g, i] += p * row[i]
            for g in range(group):
                _narrow(out, (h * group + g) * D, D, half, many[group + g], sums[g])
