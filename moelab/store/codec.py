"""What a codec is: how a tensor, or one byte plane of it, becomes a blob and comes back.

A codec is either `in_place`, its blob is a whole tensor, which is read to where it is computed
from, or it compresses byte planes (`moelab.store.codecs`), which are decoded and joined first.
Adding one is a subclass, and a line with an object of it in `CODECS` or
`moelab.store.fewbit.FORMATS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from moelab.kernels.vectors import BLOCK
from moelab.store.bits import as_bytes
from moelab.store.headers import Shape, nbytes

#: what is compressed is kept so if that leaves at most this fraction of it
WORTH = 0.98


@dataclass(frozen=True)
class Codec:
    """A lossless codec of byte planes, unless a subclass says otherwise.

    name : as errors, tables and `record`, what the index says, have it.
    in_place : whether a blob is a whole tensor and is computed from as it lies.
    few_bits : whether the weights that a blob holds have few bits: rounded ones, or those that a
        checkpoint publishes so.
    """

    name: str
    in_place: ClassVar[bool] = False
    few_bits: ClassVar[bool] = False

    @property
    def record(self) -> Any:
        """The codec in JSON."""
        return self.name

    def compress(self, data: Any) -> Any:
        """The blob, a bytes-like object, of a plane or, if `in_place`, of a tensor; None for a
        tensor that the codec does not fit."""
        raise NotImplementedError

    def decompress(self, blob: Any, out: Any) -> None:
        """Fill a writable buffer, of few bits a tensor, with what a blob holds; releases the GIL.

        Raises ValueError, naming what is wrong, if the blob is damaged or `out` has another size.
        """
        raise NotImplementedError

    def admits(self, dtype: str, shape: Shape, planes: int, lengths: list[int]) -> bool:
        """Whether blobs of these lengths can be one of so many planes of a tensor."""
        return min(lengths, default=0) > 0 and sum(lengths) <= nbytes(dtype, shape) // planes

    def kernel(self, dtype: str, shape: Shape) -> str:
        """As what `moelab.kernels.products` multiplies by such a tensor's blob as it lies; "" if
        it cannot."""
        return ""

    def nbytes(self, shape: Shape, dtype: str) -> int:
        """Bytes of the blob of a tensor, where they do not depend on its weights; ValueError for
        one that has none."""
        raise NotImplementedError

    def row(self, address: int, length: int, shape: Shape) -> list[int]:
        """Where `moelab.kernels.products.multiply` finds what in a blob, without a bias."""
        return [address, 0, 0, 0]


#: of tensors in few bits, by name
Blobs = dict[str, tuple[Codec, Any]]


class Raw(Codec):
    """The bytes themselves."""

    in_place = True

    def nbytes(self, shape: Shape, dtype: str) -> int:
        return nbytes(dtype, shape)

    def compress(self, data: Any) -> np.ndarray:
        return np.require(as_bytes(data), requirements=["OWNDATA"])

    def decompress(self, blob: Any, out: Any) -> None:
        source = as_bytes(blob)
        target = as_bytes(out, writable=True)
        if len(source) != len(target):
            raise ValueError(f"the raw blob has {len(source)} bytes; {len(target)} were expected")
        np.copyto(target, source)

    def admits(self, dtype: str, shape: Shape, planes: int, lengths: list[int]) -> bool:
        return lengths == [nbytes(dtype, shape) // planes]

    def kernel(self, dtype: str, shape: Shape) -> str:
        return self.name


RAW = Raw("raw")


def in_blocks(shape: Shape) -> bool:
    """Whether weights of a shape are a matrix of whole blocks of 64, few enough to be counted in 32
    bits."""
    n = math.prod(shape)
    return len(shape) > 1 and n % BLOCK == 0 and 0 < n < 1 << 32


def rows_in_blocks(shape: Shape) -> bool:
    """Whether kernels multiply packed weights of this shape: each row is whole blocks, too."""
    return in_blocks(shape) and shape[-1] % BLOCK == 0
