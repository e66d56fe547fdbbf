"""What the operations of Core ML's ML Programs compute, in torch: one function an operation, by its MIL name.

Source: the definitions in coremltools (`coremltools.converters.mil.mil.ops.defs`), read for the operations that our
graphs and near relatives of them contain. A function takes the operation's parameters by name: tensors in the
evaluator's working precision, or constants, which for axes, shapes, flags and modes are numpy arrays, ints and
strings. 1×1 convolutions are matrix products over rows of channels, so a result does not depend on the layout.

Left out: images, control flow, recurrent cells, random numbers, and everything that builds dynamic shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, strides: Any = None, pad_type: str = "valid",
         pad: Any = None, dilations: Any = None, groups: Any = 1) -> Tensor:
    """x [N, Cin, *space], weight [Cout, Cin/groups, *kernel] → [N, Cout, *space]."""
    strides, dilations = _ints(strides) or [1] * (x.dim() - 2), _ints(dilations) or [1] * (x.dim() - 2)
    pointwise = all(n == 1 for n in (*weight.shape[2:], *strides, int(groups)))
    padding = _ints(pad) if pad_type == "custom" else [0] * (2 * (x.dim() - 2))
    if pointwise and not any(padding):
        last = x.movedim(1, -1)
        rows = last.reshape(-1, x.shape[1]).contiguous()
        return F.linear(rows, weight.flatten(1), bias).view(*last.shape[:-1], -1).movedim(-1, 1).contiguous()
    if pad_type not in ("valid", "custom"):
        raise ValueError(f"conv with pad_type {pad_type!r} and a kernel larger than 1×1 is not evaluated")
    x = F.pad(x, [n for pair in reversed(list(zip(padding[::2], padding[1::2]))) for n in pair])
    kernel = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    return kernel(x, weight, bias, strides, 0, dilations, int(groups))


def matmul(x: Tensor, y: Tensor, transpose_x: Any = False, transpose_y: Any = False) -> Tensor:
    x, y = x.mT if transpose_x else x, y.mT if transpose_y else y
    return torch.matmul(x.contiguous(), y.contiguous())


def split(x: Tensor, axis: Any, num_splits: Any = None, split_sizes: Any = None) -> list[Tensor]:
    sizes = _ints(split_sizes) if split_sizes is not None else x.shape[int(axis)] // int(num_splits)
    return [part.contiguous() for part in x.split(sizes, int(axis))]


def concat(values: list[Tensor], axis: Any, interleave: Any = False) -> Tensor:
    if interleave:
        return torch.stack(values, int(axis) + 1 if axis >= 0 else int(axis)).flatten(int(axis) % values[0].dim(),
                                                                                     int(axis) % values[0].dim() + 1)
    return torch.cat(values, int(axis))


def reshape(x: Tensor, shape: Any) -> Tensor:
    """A 0 keeps the axis, −1 is what remains."""
    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(_ints(shape))])


def slices(x: Tensor, begin: Any, end: Any, stride: Any = None, begin_mask: Any = None, end_mask: Any = None,
           squeeze_mask: Any = None) -> tuple[slice | int, ...]:
    """The index of `slice_by_index` and `slice_update`: begin, end and stride an axis, masks for "from the edge"."""
    n = x.dim()
    begin, end, stride = _ints(begin), _ints(end), _ints(stride) or [1] * n
    masks = [[False] * n if m is None else [bool(b) for b in np.ravel(m)] for m in (begin_mask, end_mask, squeeze_mask)]
    if any(s < 1 for s in stride):
        raise ValueError("a slice with a negative stride is not evaluated")
    return tuple(b if squeeze else slice(None if first else b, None if last else e, s)
                 for b, e, s, first, last, squeeze in zip(begin, end, stride, *masks))


def slice_by_index(x: Tensor, **index: Any) -> Tensor:
    return x[slices(x, **index)].contiguous()


def slice_update(x: Tensor, update: Tensor, **index: Any) -> Tensor:
    out = x.clone()
    out[slices(x, **index)] = update
    return out


def slice_by_size(x: Tensor, begin: Any, size: Any) -> Tensor:
    pairs = zip(_ints(begin), _ints(size), x.shape)
    return x[tuple(slice(b, total if n == -1 else b + n) for b, n, total in pairs)].contiguous()


def softmax(x: Tensor, axis: Any = -1) -> Tensor:
    return torch.softmax(x, int(axis))


def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


def layer_norm(x: Tensor, axes: Any = None, gamma: Tensor | None = None, beta: Tensor | None = None,
               epsilon: Any = 1e-5) -> Tensor:
    axes = _ints(axes) or list(range(x.dim()))
    centred = x - x.mean(axes, keepdim=True)
    y = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + epsilon)
    shape = [n if i in {a % x.dim() for a in axes} else 1 for i, n in enumerate(x.shape)]
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


def reduction(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, axes: Any = None, keep_dims: Any = False) -> Tensor:
        return f(x, _ints(axes) or list(range(x.dim())), bool(keep_dims))
    return reduce


def elementwise(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: f(torch.as_tensor(x), torch.as_tensor(y))


def unary(f: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x: f(x)


def cast(x: Tensor, dtype: str) -> Tensor:
    """Between floats nothing happens here: the evaluator rounds to the output's type."""
    if dtype.startswith(("int", "uint")):
        return x.trunc().to(torch.int64) if x.is_floating_point() else x.to(torch.int64)
    if dtype == "bool":
        return x != 0
    return x if x.is_floating_point() else x.double()


def _ints(values: Any) -> list[int]:
    return [] if values is None else [int(v) for v in np.ravel(np.asarray(values))]


def _inverse_root(x: Tensor, epsilon: Any = 1e-12) -> Tensor:
    return 1 / torch.sqrt(x + epsilon)


#: MIL operation → what it computes
OPS: dict[str, Callable[..., Any]] = {
    "conv": conv, "matmul": matmul, "split": split, "concat": concat, "reshape": reshape,
    "linear": lambda x, weight, bias=None: F.linear(x, weight, bias),
    "slice_by_index": slice_by_index, "slice_by_size": slice_by_size, "slice_update": slice_update,
    "transpose": lambda x, perm: x.permute(_ints(perm)).contiguous(),
    "expand_dims": lambda x, axes: x.reshape(_expanded(x, _ints(axes))),
    "squeeze": lambda x, axes=None: x.squeeze(tuple(_ints(axes)) or tuple(range(x.dim()))),
    "stack": lambda values, axis: torch.stack(values, int(axis)),
    "tile": lambda x, reps: x.repeat(_ints(reps)),
    "identity": lambda x: x, "cast": cast, "softmax": softmax, "layer_norm": layer_norm,
    "select": lambda cond, a, b: torch.where(torch.as_tensor(cond), a, b),
    "add": elementwise(torch.add), "sub": elementwise(torch.sub), "mul": elementwise(torch.mul),
    "real_div": elementwise(torch.true_divide), "maximum": elementwise(torch.maximum),
    "minimum": elementwise(torch.minimum), "pow": elementwise(torch.pow),
    "greater": elementwise(torch.gt), "greater_equal": elementwise(torch.ge), "less": elementwise(torch.lt),
    "less_equal": elementwise(torch.le), "equal": elementwise(torch.eq), "not_equal": elementwise(torch.ne),
    "silu": unary(F.silu), "sigmoid": unary(torch.sigmoid), "relu": unary(F.relu), "tanh": unary(torch.tanh),
    "erf": unary(torch.erf), "exp": unary(torch.exp), "sqrt": unary(torch.sqrt), "square": unary(torch.square),
    "abs": unary(torch.abs), "cos": unary(torch.cos), "sin": unary(torch.sin), "gelu": gelu,
    "rsqrt": _inverse_root, "inverse": lambda x, epsilon=1e-4: 1 / (x + epsilon),
    "log": lambda x, epsilon=1e-45: torch.log(x + epsilon),
    "clip": lambda x, alpha, beta: x.clamp(float(alpha), float(beta)),
    "reduce_sum": reduction(lambda x, a, k: x.sum(a, keepdim=k)),
    "reduce_mean": reduction(lambda x, a, k: x.mean(a, keepdim=k)),
    "reduce_max": reduction(lambda x, a, k: x.amax(a, keepdim=k)),
    "reduce_min": reduction(lambda x, a, k: x.amin(a, keepdim=k)),
    "reduce_prod": reduction(lambda x, a, k: _one_by_one(torch.prod, x, a, k)),
    "reduce_sum_square": reduction(lambda x, a, k: (x * x).sum(a, keepdim=k)),
    "reduce_l2_norm": reduction(lambda x, a, k: (x * x).sum(a, keepdim=k).sqrt()),
    "reduce_log_sum_exp": reduction(lambda x, a, k: torch.logsumexp(x, a, keepdim=k)),
}


def _expanded(x: Tensor, axes: list[int]) -> list[int]:
    shape, n = list(x.shape), x.dim() + len(axes)
    for axis in sorted(a % n for a in axes):
        shape.insert(axis, 1)
    return shape


def _one_by_one(f: Callable[..., Tensor], x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = f(x, axis, keepdim=keep)
    return x
