"""What the operations of Core ML's ML Programs compute, in torch: one function an operation, by its MIL name.

Source: the definitions in coremltools (`coremltools.converters.mil.mil.ops.defs`, opset iOS 18). A function takes the
operation's parameters by name: floats as tensors in the evaluator's working precision, integers and flags as tensors of
their own type, modes as strings. 1×1 convolutions are matrix products over rows of channels, so a result does not
depend on the layout.

Where the definitions leave something open, coremltools' inference of constants decides: integers wrap around, an
integer quotient, mean, norm or power of two is rounded towards zero, a cast to fewer bits keeps the low ones. What even
that leaves open is refused: a division of integers by zero, a cast of nan or of 2^31 and more to an integer. Its own
faults are not repeated: `interleave` of `concat` is computed as defined, all axes of an fp16 tensor can be squeezed,
and a `slice_by_size` from a negative begin to the end (size −1) has the right value, whose declared type is too long,
so the evaluator refuses it. Left out: images, control flow, recurrent cells, random numbers, sorting, dynamic shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

#: MIL's name of an integer type → torch's
INTEGERS = {name: getattr(torch, name) for name in ("bool", "int8", "uint8", "int16", "uint16", "int32")}


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, strides: Any = None, pad_type: str = "valid",
         pad: Any = None, dilations: Any = None, groups: Any = 1) -> Tensor:
    """x [N, Cin, *space], weight [Cout, Cin/groups, *kernel] → [N, Cout, *space]."""
    strides, dilations = _ints(strides) or [1] * (x.dim() - 2), _ints(dilations) or [1] * (x.dim() - 2)
    pointwise = all(n == 1 for n in (*weight.shape[2:], *strides, int(groups)))
    padding = _ints(pad) if pad_type == "custom" else [0] * (2 * (x.dim() - 2))
    if pad_type in ("same", "same_lower"):                  # as many windows as strides; what is odd goes to one end
        missing = [max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
                   for n, k, s, d in zip(x.shape[2:], weight.shape[2:], strides, dilations)]
        padding = [n for total in missing for n in sorted((total // 2, -(-total // 2)), reverse=pad_type != "same")]
    if pointwise and not any(padding):
        last = x.movedim(1, -1)
        rows = last.reshape(-1, x.shape[1]).contiguous()
        return F.linear(rows, weight.flatten(1), bias).view(*last.shape[:-1], -1).movedim(-1, 1).contiguous()
    if pad_type not in ("valid", "custom", "same", "same_lower"):
        raise ValueError(f"pad_type is {pad_type!r}")
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
    if not values[0].dim():
        return torch.stack(values)
    axis = int(axis) % values[0].dim()
    return torch.stack(values, axis + 1).flatten(axis, axis + 1) if interleave else torch.cat(values, axis)


def reshape(x: Tensor, shape: Any) -> Tensor:
    """A 0 keeps the axis that has as many behind it, or is 1 without one; −1 is what remains."""
    shape = _ints(shape)
    kept = [1] * max(len(shape) - x.dim(), 0) + list(x.shape)[max(x.dim() - len(shape), 0):]
    return x.reshape([n or axis for n, axis in zip(shape, kept)])


def places(x: Tensor, begin: Any, end: Any, stride: Any = None, begin_mask: Any = None, end_mask: Any = None,
           squeeze_mask: Any = None) -> tuple[tuple[Tensor, ...], list[int]]:
    """What `slice_by_index` and `slice_update` take of each axis, as open indices, and which axes are squeezed.

    begin, end and stride an axis, negative ones from the end as in Python; masks for "from" and "to the edge"; of a
    squeezed axis only the first is taken, wherever `end` is.
    """
    n = x.dim()
    begin, end, stride = _ints(begin), _ints(end), _ints(stride) or [1] * n
    first, last, squeeze = ([False] * n if m is None else [bool(b) for b in np.ravel(m)]
                            for m in (begin_mask, end_mask, squeeze_mask))
    taken = [range(x.shape[i])[slice(None if first[i] else begin[i], None if last[i] or squeeze[i] else end[i],
                                     None if squeeze[i] else stride[i])] for i in range(n)]
    taken = [at[:1] if squeeze[i] else at for i, at in enumerate(taken)]
    index = (torch.tensor(list(at), dtype=torch.long).view([-1] + [1] * (n - i - 1)) for i, at in enumerate(taken))
    return tuple(index), [i for i in range(n) if squeeze[i]]


def slice_by_index(x: Tensor, **index: Any) -> Tensor:
    at, squeezed = places(x, **index)
    return x[at].squeeze(squeezed) if squeezed else x[at]


def slice_update(x: Tensor, update: Tensor, **index: Any) -> Tensor:
    out, (at, _) = x.clone(), places(x, **index)
    out[at] = update.reshape(out[at].shape)
    return out


def slice_by_size(x: Tensor, begin: Any, size: Any) -> Tensor:
    """A negative begin counts from the end; a size of −1 takes what remains."""
    for axis, (b, n) in enumerate(zip(_ints(begin), _ints(size))):
        b += x.shape[axis] * (b < 0)
        x = x.narrow(axis, b, x.shape[axis] - b if n == -1 else n)
    return x.contiguous()


def gather(x: Tensor, indices: Any, axis: Any = 0, batch_dims: Any = 0, validate_indices: Any = False) -> Tensor:
    """The entries of an axis at the indices, of any shape; negative ones count from the end."""
    if int(batch_dims):
        raise ValueError(f"gather with batch_dims = {int(batch_dims)}")
    axis, indices = int(axis) % x.dim(), torch.as_tensor(indices).long()
    at = torch.where(indices < 0, indices + x.shape[axis], indices)
    return x.index_select(axis, at.flatten()).reshape(*x.shape[:axis], *at.shape, *x.shape[axis + 1:])


def pad(x: Tensor, pad: Any, mode: str = "constant", constant_val: Any = 0.0) -> Tensor:
    """Pairs (before, after) of the last axes."""
    pairs = list(zip(*[iter(_ints(pad))] * 2))
    if mode == "constant":
        return F.pad(x, [n for pair in reversed(pairs) for n in pair], value=float(constant_val))
    for axis, (before, after) in enumerate(pairs, x.dim() - len(pairs)):
        last = x.shape[axis] - 1
        at = torch.arange(-before, last + 1 + after)
        x = x.index_select(axis, at.clamp(0, last) if mode == "replicate" else last - (last - at.abs()).abs())
    return x


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


def reduction(f: Callable[..., Tensor], wide: torch.dtype = torch.int64) -> Callable[..., Tensor]:
    """wide : what integers are reduced in; the result has their own type."""
    def reduce(x: Tensor, axes: Any = None, keep_dims: Any = False) -> Tensor:
        axes, keep = _ints(axes) or list(range(x.dim())), bool(keep_dims)
        return f(x, axes, keep) if x.is_floating_point() else f(x.to(wide), axes, keep).to(x.dtype)
    return reduce


def arg(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, axis=-1, keep_dims=False, output_dtype="int32": \
        f(x, int(axis), bool(keep_dims)).to(INTEGERS[output_dtype])


def elementwise(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: f(torch.as_tensor(x), torch.as_tensor(y))


def unary(f: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x: f(x)


def real_div(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def power(x: Tensor, y: Tensor) -> Tensor:
    if not x.is_floating_point() and bool((y < 0).any()):
        raise ValueError("an integer to a negative power")
    return torch.pow(x, y)


def cast(x: Tensor, dtype: str) -> Tensor:
    """To integers towards zero, and then their low bits; between floats the evaluator rounds to the output's type."""
    if dtype == "bool":
        return x != 0
    if dtype not in INTEGERS:
        return x if x.is_floating_point() else x.double()
    if x.is_floating_point() and not bool((x.abs() < 2 ** 31).all()):
        raise ValueError(f"a cast of {float(x.abs().max()):.4g} to {dtype}, which no definition covers")
    return x.long().to(INTEGERS[dtype])


def _ints(values: Any) -> list[int]:
    return [] if values is None else [int(v) for v in np.ravel(np.asarray(values))]


def _expanded(x: Tensor, axes: Any) -> Tensor:
    axes = _ints(axes)
    for axis in sorted(a % (x.dim() + len(axes)) for a in axes):
        x = x.unsqueeze(axis)
    return x


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


#: MIL operation → what it computes
OPS: dict[str, Callable[..., Any]] = {
    "conv": conv, "matmul": matmul, "split": split, "concat": concat, "reshape": reshape, "gather": gather, "pad": pad,
    "linear": lambda x, weight, bias=None: F.linear(x, weight, bias),
    "slice_by_index": slice_by_index, "slice_by_size": slice_by_size, "slice_update": slice_update,
    "transpose": lambda x, perm: x.permute(_ints(perm)).contiguous(), "expand_dims": _expanded,
    "squeeze": lambda x, axes=None: x.squeeze(tuple(_ints(axes)) or tuple(range(x.dim()))),
    "stack": lambda values, axis: torch.stack(values, int(axis)),
    "gather_along_axis": lambda x, indices, axis=0, validate_indices=False: torch.take_along_dim(
        x, torch.where(indices < 0, indices + x.shape[int(axis)], indices).long(), int(axis)),
    "reverse": lambda x, axes=None: x.flip(_ints(axes) or list(range(x.dim()))),
    "einsum": lambda values, equation: torch.einsum(equation, *values),
    "tile": lambda x, reps: x.repeat(_ints(reps)), "identity": lambda x: x, "cast": cast,
    "select": lambda cond, a, b: torch.where(torch.as_tensor(cond), a, b),
    # norms
    "softmax": lambda x, axis=-1: torch.softmax(x, int(axis)), "layer_norm": layer_norm,
    "batch_norm": lambda x, mean, variance, gamma=None, beta=None, epsilon=1e-5: F.batch_norm(
        x, mean, variance, gamma, beta, eps=float(epsilon)),
    "instance_norm": lambda x, gamma=None, beta=None, epsilon=1e-5: F.instance_norm(
        x, weight=gamma, bias=beta, eps=float(epsilon)),
    "l2_norm": lambda x, epsilon=1e-6: x * torch.rsqrt((x * x).sum((-3, -2, -1), keepdim=True) + epsilon),
    # of two values
    **{name: elementwise(f) for name, f in {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "real_div": real_div, "pow": power,
        "maximum": torch.maximum, "minimum": torch.minimum, "mod": torch.remainder, "floor_div": torch.floor_divide,
        "logical_and": torch.logical_and, "logical_or": torch.logical_or, "logical_xor": torch.logical_xor,
        "greater": torch.gt, "greater_equal": torch.ge, "less": torch.lt, "less_equal": torch.le, "equal": torch.eq,
        "not_equal": torch.ne}.items()},
    # of one value
    **{name: unary(getattr(torch, name)) for name in (
        "logical_not", "sigmoid", "relu", "tanh", "erf", "exp", "sqrt", "square", "abs", "cos", "sin", "tan", "atan",
        "floor", "ceil", "round", "sign")},
    **{name: unary(f) for name, f in {
        "silu": F.silu, "relu6": F.relu6, "softsign": F.softsign,
        "exp2": lambda x: torch.exp2(x.double()).to(x.dtype),
        "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x))}.items()},
    "gelu": gelu,
    "leaky_relu": lambda x, alpha: torch.where(x < 0, x * alpha, x),
    "elu": lambda x, alpha: torch.where(x < 0, torch.expm1(x) * alpha, x),
    "prelu": lambda x, alpha: torch.where(x < 0, x * alpha.view(-1, *[1] * (x.dim() - 2)), x),
    "sigmoid_hard": lambda x, alpha, beta: (x * alpha + beta).clamp(0, 1),
    "rsqrt": lambda x, epsilon=1e-12: 1 / torch.sqrt(x + epsilon), "inverse": lambda x, epsilon=1e-4: 1 / (x + epsilon),
    "log": lambda x, epsilon=1e-45: torch.log(x + epsilon),
    "clip": lambda x, alpha, beta: x.clamp(float(alpha), float(beta)),
    # reductions
    "reduce_sum": reduction(lambda x, a, k: x.sum(a, keepdim=k)),
    "reduce_mean": reduction(lambda x, a, k: x.mean(a, keepdim=k), torch.float64),
    "reduce_max": reduction(lambda x, a, k: x.amax(a, keepdim=k)),
    "reduce_min": reduction(lambda x, a, k: x.amin(a, keepdim=k)),
    "reduce_prod": reduction(_product),
    "reduce_sum_square": reduction(lambda x, a, k: (x * x).sum(a, keepdim=k)),
    "reduce_l1_norm": reduction(lambda x, a, k: x.abs().sum(a, keepdim=k)),
    "reduce_l2_norm": reduction(lambda x, a, k: (x * x).sum(a, keepdim=k).sqrt(), torch.float64),
    "reduce_log_sum": reduction(lambda x, a, k: x.sum(a, keepdim=k).log(), torch.float64),
    "reduce_log_sum_exp": reduction(lambda x, a, k: torch.logsumexp(x, a, keepdim=k), torch.float64),
    "reduce_argmax": arg(torch.argmax), "reduce_argmin": arg(torch.argmin),
}


def _inside(x: Tensor, axes: Any = None, **other: Any) -> Tensor:
    return x.abs().sum(_ints(axes) or list(range(x.dim())))


def _norm_inside(x: Tensor, axes: Any = None, **other: Any) -> Tensor:
    axes = _ints(axes) or list(range(x.dim()))
    return torch.maximum(_inside(x, axes), _inside((x - x.mean(axes, keepdim=True)) ** 2, axes))


#: operations that add up more than their results show → sums of absolute values, as large as in any order of adding
SUMS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("reduce_sum", "reduce_mean", "reduce_l1_norm", "reduce_log_sum"), _inside),
    **dict.fromkeys(("reduce_sum_square", "reduce_l2_norm"), lambda x, **other: _inside(x * x, **other)),
    "l2_norm": lambda x, **other: _inside(x * x, (-3, -2, -1)), "layer_norm": _norm_inside,
    "instance_norm": lambda x, **other: _norm_inside(x, range(2, x.dim())),
}
