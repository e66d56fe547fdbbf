"""Matrices of any kind as kernels of a GPU find them, and what they are worth, for tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.kernels.products import KINDS, PACKED, Matrices
from moelab.store import bf12
from moelab.store.fewbit import find_format
from moelab.store.reader import aligned_buffer

PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FEW = ("int8", "int4", "mxfp4", "fp8")


class Made(NamedTuple):
    """Matrices, their rows on the device, their weights [E, R, n] and biases [E, R] in fp64, and
    the memory that has all of it."""

    of: Matrices
    table: Tensor
    weights: Tensor
    biases: Tensor
    memory: list[Tensor]


def make(kind, E, R, n, device, dtype, transposed=False, bias=False, seed=0) -> Made:
    """`dtype` is the model's; in rows, the weights [R, n] are stored so, transposed ones [n, R]."""
    rng = torch.Generator().manual_seed(seed)
    memory, rows, found, biases = [], [], [], []
    for _ in range(E):
        w = torch.randn(R, n, generator=rng) / n**0.5
        row, w = _stored(kind, w, device, memory, transposed, rng)
        b = torch.randn(R, generator=rng).to(dtype)
        if bias:
            memory.append(b.to(device))
            row[2] = memory[-1].data_ptr()
        rows.append(row)
        found.append(w.double())
        biases.append(b.double() * bias)
    rows = np.array(rows)
    which = KINDS[PLAIN[kind]] if kind in PLAIN else PACKED[kind]
    of = Matrices(which, rows, R, transposed and kind not in FEW)
    table = torch.from_numpy(rows).to(device)
    return Made(of, table, torch.stack(found), torch.stack(biases), memory)


def _stored(kind, w, device, memory, transposed, rng):
    if kind in FEW:
        form = find_format(kind)
        blob = form.compress(w)
        codes, scales = form.split(blob, tuple(w.shape)).values()
        return form.row(put(blob, device, memory), len(blob), w.shape), form.dequantize(
            codes, scales
        ).view(w.shape)
    w = w.to(PLAIN.get(kind, torch.bfloat16))
    lies = w.T.contiguous() if transposed else w
    if kind == "bf12":
        flat = lies.view(-1)
        common = torch.tensor([2.0 ** (-2 * j) for j in range(9)]).repeat(4)
        flat[1:37] = torch.cat([common[:18], -common[18:]])  # 18 high bytes, so that others escape
        few = torch.randint(0, 30, (), generator=rng)
        flat[torch.randperm(len(flat), generator=rng)[:few]] *= 300
        flat[0], flat[-1] = 1000, -2000
        blob = bf12.pack(lies)
        row = bf12.CODEC.row(put(blob, device, memory), len(blob), lies.shape)
        assert row[3] >= 2
        return row, lies.T if transposed else lies
    memory.append(lies.to(device))
    return [memory[-1].data_ptr(), 0, 0, 0], w


def put(blob, device, memory) -> int:
    """The address of a blob's copy on a device."""
    there = aligned_buffer(len(blob), 64)
    there[:] = np.frombuffer(blob, np.uint8)
    memory.append(torch.from_numpy(there).to(device))
    return memory[-1].data_ptr()


def naive(up: Made, down: Made, x, ids, w, activate) -> Tensor:
    """Σ_k w_k · down_k(activate(up_k(x))) in fp64, [T, H]; ids of E contribute nothing."""
    out = torch.zeros(len(x), down.of.R, dtype=torch.float64)
    for t, k in np.ndindex(*ids.shape):
        e = int(ids[t, k])
        if e < len(up.weights):
            h = activate((up.weights[e] @ x[t].double() + up.biases[e])[None])
            y = down.weights[e] @ h[0] + down.biases[e]
            out[t] += w[t, k].double() * y
    return out
