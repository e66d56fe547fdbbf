"""Splitting bf16 weights into exponent bytes and sign-mantissa bytes, and joining them again.

Source: ZipMoE §2.2 (only the exponents of trained weights are compressible) and §3.1 (the recovery kernel). Every
weight is rotated left by one bit, which puts the 8 exponent bits of bf16 into the upper byte and
`mantissa << 1 | sign` into the lower one. Joining is one OR and one rotation of 16-bit words, which vector units do
faster than memcpy moves the same bytes; the paper's layout (sign above the mantissa) needs two masks more. The same
rotation serves every float type: fp16 gets 5 exponent and 3 mantissa bits into its upper byte, fp32 8 exponent bits.

Shapes: weights of any shape with N entries ↔ exponents uint8 [N] and sign-mantissa uint8 [N].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moelab.kernels.compile import kernel

#: the name of the byte layout, recorded in every store
LAYOUT = "rotated"


def split(weights: Any, exponents: Any = None, sign_mantissa: Any = None) -> tuple[Any, Any]:
    """Split 16-bit weights into their exponent bytes and their sign-mantissa bytes.

    weights : contiguous tensor (CPU or CUDA) or array of any 2-byte dtype and any shape, N entries.
    exponents, sign_mantissa : buffers of N bytes to write into; by default new ones, uint8 [N], arrays for an array
        and tensors, on the same device, for a tensor.

    Returns the two buffers. Raises ValueError for weights that are not contiguous or not 2 bytes wide, and a buffer of
    another size or read-only.
    """
    if _on_gpu(weights):
        from moelab.store import bits_triton
        return bits_triton.split(weights, exponents, sign_mantissa)
    words = _as_words(weights)
    new = torch.empty if isinstance(weights, torch.Tensor) else np.empty
    dtype = torch.uint8 if isinstance(weights, torch.Tensor) else np.uint8
    buffers = [new(len(words), dtype=dtype) if given is None else given for given in (exponents, sign_mantissa)]
    first, second = (as_bytes(buffer, writable=True) for buffer in buffers)
    _check_sizes(len(words), first, second)
    _split(words, first, second)
    return buffers[0], buffers[1]


def join(exponents: Any, sign_mantissa: Any, out: Any = None) -> Any:
    """Join exponent bytes and sign-mantissa bytes to 16-bit weights: ZipMoE's recovery.

    exponents, sign_mantissa : N bytes each: uint8 tensors (CPU or CUDA) or arrays, or bytes-like objects.
    out : contiguous tensor or array of a 2-byte dtype with N entries to write into; by default a new bf16 tensor
        [N], on the same device, for tensors and a new uint16 array [N] for anything else.

    ValueError for buffers of different sizes, and an `out` that is not contiguous, not 2 bytes wide or read-only.
    """
    if _on_gpu(exponents):
        from moelab.store import bits_triton
        return bits_triton.join(exponents, sign_mantissa, out)
    first, second = as_bytes(exponents), as_bytes(sign_mantissa)
    if out is None:
        tensor = isinstance(exponents, torch.Tensor)
        out = torch.empty(len(first), dtype=torch.bfloat16) if tensor else np.empty(len(first), np.uint16)
    words = _as_words(out, writable=True)
    _check_sizes(len(words), first, second)
    join_words(first, second, words)
    return out


def as_bytes(buffer: Any, writable: bool = False) -> np.ndarray:
    """A uint8 [n] view, without a copy, of a contiguous array, CPU tensor or any other bytes-like object.

    Raises TypeError if it is none of these, ValueError if it is not contiguous or, with `writable`, is read-only.
    """
    if isinstance(buffer, torch.Tensor) and not buffer.numel():
        buffer = np.empty(0, np.uint8)      # torch cannot view nothing as bytes if its stride is 0
    elif isinstance(buffer, torch.Tensor):
        buffer = buffer.detach().reshape(-1).view(torch.uint8).numpy() if buffer.is_contiguous() else None
    elif isinstance(buffer, np.ndarray):
        buffer = buffer.reshape(-1).view(np.uint8) if buffer.flags.c_contiguous else None
    else:
        buffer = np.frombuffer(buffer, np.uint8)
    if buffer is None:
        raise ValueError("the array is not contiguous; pass a contiguous slice or call .contiguous() first")
    if writable and not buffer.flags.writeable:
        raise ValueError("the output buffer is read-only; pass a bytearray, an array or a tensor that can be written")
    return buffer


def _as_words(weights: Any, writable: bool = False) -> np.ndarray:
    """A uint16 [N] view of weights that are 2 bytes wide."""
    size = weights.element_size() if isinstance(weights, torch.Tensor) else np.asarray(weights).itemsize
    if size != 2:
        raise ValueError(f"weights of {weights.dtype} are {size} bytes wide; this splits and joins 2-byte weights: "
                         f"bfloat16, float16 or their bits as uint16")
    return as_bytes(weights, writable).view(np.uint16)


def _check_sizes(n: int, exponents: np.ndarray, sign_mantissa: np.ndarray) -> None:
    if not len(exponents) == len(sign_mantissa) == n:
        raise ValueError(f"{n} weights need {n} exponent bytes and {n} sign-mantissa bytes; the buffers have "
                         f"{len(exponents)} and {len(sign_mantissa)}")


def _on_gpu(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cuda"


@kernel
def _split(words, exponents, sign_mantissa):
    for i in range(len(words)):
        x = words[i]
        exponents[i] = np.uint8(x >> 7)
        sign_mantissa[i] = np.uint8((x << 1) | (x >> 15))


@kernel
def join_words(exponents, sign_mantissa, words):
    """`join` of flat arrays, for other kernels."""
    for i in range(len(words)):
        x = np.uint16(np.uint16(exponents[i]) << np.uint16(8)) | np.uint16(sign_mantissa[i])
        words[i] = np.uint16(x >> np.uint16(1)) | np.uint16(x << np.uint16(15))
