"""What a decode step does besides its experts, in a kernel or two each: norms, attention, routers of a single token.

transformers runs a token's RMSNorm as six operations on a few kilobytes, four times a layer, and its attention as
thirty: with experts out of the way, that is half of a small model's TPOT, and none of it is arithmetic.
`fast_decode(model)` puts numba kernels in their place, for one token at a time on the CPU; anything else (prompts,
batches, masks, other devices) goes where it went before. A module is replaced only if a probe shows that the kernel
gives what the module gives. Attention is `moelab.kernels.attention`; linear layers get the kernels of the
experts (`moelab.kernels.linear`).

    norm: x [..., H] → [..., H]    router: x [1, H] → logits [1, E], weights [1, K], ids [1, K]

The results are transformers' within the dtype's tolerance, not bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from moelab.kernels.linear import FastLinears
from moelab.models.patches import Patches, bare

try:
    import numba
    from moelab.kernels import products, tiles
    from moelab.kernels.compile import kernel
    from moelab.kernels.attention import decode_attention, epsilon
except ModuleNotFoundError as error:
    if error.name != "numba":
        raise
    numba = None                        # nothing is replaced then

#: entries of a norm's x up to which one thread of ours is faster than torch's many operations
LARGEST_NORM = 1 << 16


class FastDecode:
    """A model whose decode steps take the short way; undone by `close`, or at the end of a `with` block.

    Parameters
    ----------
    rows : up to how many rows linear layers take it; None measures it.

    Attributes
    ----------
    norms, routers, attentions, linears : how many modules have another forward. One that somebody has given another
        forward already is left alone.
    """

    def __init__(self, model: nn.Module, rows: float | None = None) -> None:
        self.norms = self.routers = self.attentions = self.linears = 0
        find_linear = FastLinears(rows)
        self.rows = find_linear.rows
        with Patches() as patches:
            for what, find in () if numba is None else (("norms", _norm), ("routers", _router),
                                                        ("attentions", decode_attention), ("linears", find_linear)):
                for module in model.modules():                  # attention's probe is of the norms in it, too
                    if bare(module) and (short := find(module)) is not None:
                        patches.wrap(module, "forward", lambda _, short=short: short)
                        setattr(self, what, getattr(self, what) + 1)
            self._patches = patches.pop_all()

    def close(self) -> None:
        """Give the model its own modules back."""
        self._patches.close()

    def __enter__(self) -> FastDecode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fast_decode(model: nn.Module, rows: float | None = None) -> FastDecode:
    """Let single tokens take the short way through a model on the CPU; without numba, nothing changes."""
    return FastDecode(model, rows)


# ------------------------------------------------------------------------------------------------------------ norms

class _Norm:
    """The forward of an RMSNorm: its own for many rows, the kernel for few."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own, self.eps = module, type(module).forward, epsilon(module)
        self.dtype = module.weight.dtype
        self.kind, self.H = products.KINDS[self.dtype](0), len(module.weight)

    def __call__(self, x: Tensor) -> Tensor:
        w, n = self.module._parameters["weight"], x.numel()             # asked each time: it may be replaced or moved
        if n > LARGEST_NORM or not x.dtype == w.dtype == self.dtype or not x.is_cpu or not x.is_contiguous():
            return self.own(self.module, x)
        out = torch.empty_like(x)
        _rms_norm(self.kind, x.data_ptr(), w.data_ptr(), n // self.H, self.H, self.eps, out.data_ptr())
        return out


@torch.inference_mode()
def _norm(module: nn.Module) -> _Norm | None:
    """The kernel for this module if it gives what the module gives, tried on random rows of very different sizes."""
    w = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNorm") or w is None or w.ndim != 1 or epsilon(module) is None \
            or not w.is_cpu or w.dtype not in products.KINDS:
        return None
    x = torch.randn(3, len(w), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1.0], [30.0]])
    x, ours = x.to(w.dtype), _Norm(module)
    wanted, got = module(x), ours(x)
    same = got.dtype == wanted.dtype and torch.allclose(got.float(), wanted.float(), rtol=2 ** -7, atol=1e-6)
    return ours if same else None


# ---------------------------------------------------------------------------------------------------------- routers

class _Router:
    """The forward of a router that takes the K largest of a softmax, `normalised` or not, as weights of a `dtype`; its
    own for several tokens."""

    def __init__(self, module: nn.Module, normalised: bool, dtype: torch.dtype) -> None:
        self.module, self.own, self.normalised, self.dtype = module, type(module).forward, normalised, dtype
        self.kind = products.KINDS[dtype](0)

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = hidden_states, self.module._parameters["weight"]
        E, H = w.shape
        if x.numel() != H or x.dtype != w.dtype or not (x.is_cpu and w.is_cpu and w.is_contiguous()) \
                or torch.is_grad_enabled():
            return self.own(self.module, x)
        x, K = x.contiguous(), self.module.top_k
        logits, scores = x.new_empty(1, E), torch.empty(1, K, dtype=self.dtype)
        ids = torch.empty(1, K, dtype=torch.int64)
        _route(products.KINDS[w.dtype](0), self.kind, x.data_ptr(), w.data_ptr(), E, H, K, self.normalised,
               logits.data_ptr(), scores.data_ptr(), ids.numpy())
        return logits, scores, ids


@torch.inference_mode()
def _router(module: nn.Module) -> _Router | None:
    """The kernel for this module if it chooses as the module does (of equals any), tried on random tokens."""
    w, K = module._parameters.get("weight"), getattr(module, "top_k", None)
    if not type(module).__name__.endswith("Router") or not isinstance(K, int) or w is None or w.ndim != 2 \
            or len(list(module.parameters())) > 1 or len(list(module.buffers())) or w.dtype not in products.KINDS \
            or not (w.is_cpu and w.is_contiguous()):
        return None
    tokens = torch.randn(4, 1, w.shape[1], generator=torch.Generator().manual_seed(0)).to(w.dtype)
    wanted = [module(x) for x in tokens]
    if any(len(found) != 3 or found[1].shape != (1, K) or found[1].dtype not in products.KINDS for found in wanted):
        return None

    def agree(a: tuple, b: tuple) -> bool:
        pairs = (a[0], b[0]), (a[1], b[1]), tuple(a[0].gather(1, found[2]) for found in (a, b))
        return all(torch.allclose(x.float(), y.float(), rtol=2 ** -6, atol=1e-6) for x, y in pairs)
    for ours in (_Router(module, normalised, wanted[0][1].dtype) for normalised in (False, True)):
        if all(agree(found, ours(x)) for found, x in zip(wanted, tokens)):
            return ours
    return None


# ---------------------------------------------------------------------------------------------------------- kernels

if numba is not None:
    @kernel(fastmath={"reassoc", "contract"})               # sums may be taken in any order, so that they are vectors
    def _rms_norm(kind, x, w, rows, H, eps, out):
        row, scale, whole = np.empty(H, np.float32), np.empty(H, np.float32), H - H % tiles.STEP
        _widen(kind, w, H, whole, scale)
        for r in range(rows):
            at, to = x + r * H * tiles.size_of(kind), out + r * H * tiles.size_of(kind)
            _widen(kind, at, H, whole, row)
            total = np.float32(0)
            for i in range(H):
                total += row[i] * row[i]
            inverse = np.float32(1 / np.sqrt(total / H + eps))
            for i in range(H):
                tiles.write(kind, to, i, row[i] * inverse)          # rounded before the weight, as transformers does it
                tiles.write(kind, to, i, tiles.weight(kind, to, 0, i) * scale[i])

    @kernel
    def _widen(kind, x, n, whole, out):
        """n numbers as fp32; `whole` of them in vectors."""
        tiles.spread(kind, np.float32(0), x, whole, out.ctypes.data)
        for i in range(whole, n):
            out[i] = tiles.weight(kind, x, 0, i)

    @kernel
    def _route(kind, score_kind, x, w, E, H, K, normalised, logits, scores, ids):
        whole, size, inputs = H - H % tiles.STEP, tiles.size_of(kind), np.empty(H, np.float32)
        tiles.spread(kind, kind, x, whole, inputs.ctypes.data)
        for i in range(whole, H):
            inputs[i] = tiles.weight(kind, x, 0, i)
        p, row = np.empty(E, np.float32), np.empty(1, np.int64)
        row[0] = inputs.ctypes.data
        for e in range(0, E - 3, 4):
            tiles.dots(1, 4, kind, row.ctypes.data, w + e * H * size, 0, H, whole, p.ctypes.data + 4 * e, E)
        for e in range(E - E % 4, E):
            tiles.dots(1, 1, kind, row.ctypes.data, w + e * H * size, 0, H, whole, p.ctypes.data + 4 * e, E)
        for e in range(E):
            for i in range(whole, H):
                p[e] += inputs[i] * tiles.weight(kind, w, 0, e * H + i)
            tiles.write(kind, logits, e, p[e])              # rounded before the softmax, as transformers does it
            p[e] = tiles.weight(kind, logits, 0, e)
        tiles.kept(row)
        p = np.exp(p - p.max())
        total = p.sum()
        for k in range(K):
            ids[0, k] = np.argmax(p)
            inputs[k] = p[ids[0, k]]
            p[ids[0, k]] = -1
        chosen = inputs[:K].sum() if normalised else total
        for k in range(K):
            tiles.write(score_kind, scores, k, inputs[k] / chosen)
