"""Dense weights that stay packed: a tensor that looks like the weight, over the blob of a codec.

`F.linear` multiplies the blob as it lies (`moelab.kernels.linear`), `F.embedding` decodes the rows
that are asked for, and every other operation works on the decoded weight. What is to be
differentiated is decoded, too, as kernels record nothing. The weight cannot be edited.

    blob uint8 [bytes]    →    a weight [R, n] of a floating-point dtype
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from moelab.kernels.linear import gathered, linear
from moelab.kernels.products import KINDS, PACKED, Matrices
from moelab.store.codec import Codec
from moelab.store.headers import NAMES, Shape

_ALIASES = torch.ops.aten.detach.default, torch.ops.aten.alias.default


def unpacked(weight: Tensor) -> Tensor:
    """What was packed, or what that decodes to; any other weight as it is."""
    if not isinstance(weight, Packed):
        return weight
    return weight.dense() if weight.origin is None else weight.origin


#: a context in which tensors of subclasses are taken as tensors
untouched = torch._C.DisableTorchFunctionSubclass


class Packed(Tensor):
    """The weight of a shape and dtype that a blob, uint8 on the CPU, holds; it keeps the blob.

    origin : the weight that was packed, if it is kept.
    nbytes : of the blob, as those are what it takes in memory.
    """

    @staticmethod
    def __new__(
        cls,
        codec: Codec,
        blob: Tensor,
        shape: Shape,
        dtype: torch.dtype,
        origin: Tensor | None = None,
    ) -> Packed:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        self.codec = codec
        self.blob = blob
        self.origin = origin
        return self

    def __init__(self, *_: Any) -> None:
        pass

    nbytes = property(lambda self: self.blob.nbytes)

    @torch._disable_dynamo  # which would trace what decodes; the public name loads it now, 3 s
    def dense(self) -> Tensor:
        """The weight, decoded."""
        with torch.inference_mode(False):  # of which there may be views, as of this
            out = torch.empty(self.shape, dtype=self.dtype)
        self.codec.decompress(self.blob.numpy(), out)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of a matrix, decoded: [*ids.shape, n]."""
        found = self.matrices()
        if found is None or found.rows[0, 3]:  # or escapes lie elsewhere
            return F.embedding(ids, self.dense())
        out = torch.empty(*ids.shape, self.shape[-1], dtype=self.dtype)
        return gathered(found, ids, out)

    def matrices(self, bias: Tensor | None = None) -> Matrices | None:
        """The matrix as kernels multiply it; None if they do not. Valid while this and the bias live."""
        shape = tuple(self.shape)
        kind = PACKED.get(self.codec.kernel(NAMES[self.dtype], shape)) if len(shape) == 2 else None
        if kind is None:
            return None
        row = self.codec.row(self.blob.data_ptr(), len(self.blob), shape)
        if bias is None:
            return Matrices(kind, np.array([row]), shape[0])
        row[2] = bias.data_ptr()
        return Matrices(kind, np.array([row]), shape[0], biases=KINDS[bias.dtype])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = kwargs or {}
        with untouched():
            found = _COMPUTED[func](*args, **given) if func in _COMPUTED else None
            return func(*args, **given) if found is None else found

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _ALIASES:
            return Packed(*args[0]._given())
        for given, of in zip(args, func._schema.arguments):
            if isinstance(given, Packed) and of.alias_info and of.alias_info.is_write:
                _refuse(given)
        return func(*tree_map_only(Packed, Packed.dense, args), **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Tensor:
        made, given = self.__reduce_ex__(2)
        return memo.setdefault(id(self), made(*given))

    def __reduce_ex__(self, _: Any) -> tuple:
        return _made, (isinstance(self, torch.nn.Parameter), *self._given())

    def _given(self) -> tuple:
        return self.codec, self.blob, tuple(self.shape), self.dtype, self.origin

    def __repr__(self, **_: Any) -> str:
        return f"<{self.codec.name}: {list(self.shape)} of {self.dtype}, {self.nbytes:,} bytes>"


def _made(parameter: bool, *of: Any) -> Tensor:
    made = Packed(*of)
    return torch.nn.Parameter(made, requires_grad=False) if parameter else made


def _refuse(weight: Any, *_: Any) -> None:
    if isinstance(weight, Packed):
        raise ValueError(
            f"a weight {list(weight.shape)} that is kept as {weight.codec.name} cannot be edited: put "
            f"another parameter in its place; weight.clone() is its decoded copy"
        )


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    """`F.linear`; None where kernels do not multiply so."""
    if not isinstance(weight, Packed) or type(input) is not Tensor or not input.is_cpu:
        return None
    recorded = torch.is_grad_enabled() and any(
        of is not None and of.requires_grad for of in (input, weight, bias)
    )
    fits = input.numel() and input.dtype == weight.dtype and input.dtype in KINDS
    fits = fits and (bias is None or bias.dtype in KINDS and bias.is_contiguous())
    if recorded or torch.compiler.is_compiling() or not fits or input.shape[-1] != weight.shape[-1]:
        return None
    found = weight.matrices(bias)
    return found and linear(input, found)


def _embedding(
    input: Tensor, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Tensor | None:
    usual = isinstance(weight, Packed) and not weight.requires_grad and max_norm is None
    return weight.rows(input) if usual else None


#: function of torch → what is done in its place; None where that is not for this call
_COMPUTED = {
    F.linear: _linear,
    F.embedding: _embedding,
    Tensor.data.__set__: _refuse,
    # by which a module's `to` would put decoded weights into the same tensor
    torch._has_compatible_shallow_copy_type: lambda *_: False,
}
