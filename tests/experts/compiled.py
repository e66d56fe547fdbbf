"""Triton's kernels compiled for a GPU that need not be there, as `kernel[grid](…)` calls them; a script,
as what a process has loaded of Triton either compiles or interprets.

    python -m tests.experts.compiled 90 int4 bf12    → compute capability, kinds (all without any)
"""

import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from moelab.kernels.gates import SILU, Gate
from moelab.kernels.tiles_triton import WIDTHS
from tests.experts.banks import FEW, PLAIN, make

SHARED = 99 << 10  # bytes that a program may have on any GPU since Ampere


class Driver:
    """Of no GPU: what is asked before a kernel is compiled."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_instead_of_running(capability):
    """From now on; returns a list that fills with (kernel, what it became)."""
    found = []
    triton.runtime.driver.set_active(Driver(capability))
    run = JITFunction.run

    def compiled(kernel, *args, grid, warmup, **options):
        found.append((kernel.__name__, run(kernel, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compiled
    return found


def experts(kind, transposed):
    """All kernels of experts of a kind."""
    from moelab.experts import gemm_triton, gemv_triton

    dtype = PLAIN.get(kind, torch.bfloat16)
    up, down = (
        make(kind, 3, *of, "cpu", dtype, transposed, True) for of in ((128, 128), (128, 64))
    )
    gate = Gate(True, 1.702, 7.0, 1.0) if transposed else SILU
    banks = [gemv_triton.bank(of.of, of.table, gate) for of in (up, down)]
    ids = torch.zeros(300, 2, dtype=torch.int64)
    x, w = torch.zeros(300, 128, dtype=dtype), torch.ones(300, 2)
    gemv_triton.feed_forward(*banks, x[:1], ids[0], w[0])
    for T in (2, 300):
        gemm_triton.feed_forward(*banks, x[:T], ids[:T], w[:T])


def blobs(name):
    """The kernels that unpack a blob."""
    from moelab.store import bf12
    from moelab.store.fewbit import find_format
    from moelab.store.unpack_triton import unpack

    w = torch.linspace(-1, 1, 64 * 128).view(64, 128).bfloat16()
    packed = bf12.pack(w) if name == "bf12" else find_format(name).compress(w)
    codec = bf12.CODEC if name == "bf12" else find_format(name)
    unpack(codec, torch.from_numpy(packed), w)


def token_path():
    """The kernels of a token that a GPU runs alone, of E experts, K of them chosen."""
    from moelab.offloading import device_triton, mailbox_triton

    E, K = 8, 4
    sizes = [E], [E], [K + 1], [6], [K], [2], [2, E, 4], [2, 4], [E], [2, K, 4], [3, K], [2, K], [K]
    tables = device_triton.Tables(*(torch.zeros(of, dtype=torch.int64) for of in sizes))
    device_triton.assign(tables.away, tables)
    device_triton.fetch(tables.jobs)
    one = tables.sizes[:1]
    device_triton._stamp_kernel[(1,)](one, num_warps=1)
    names = "posted", "x", "away", "w", "done", "y", "stop", "late"
    at = dict.fromkeys(names, 1 << 40)
    for H, dtype in ((2048, torch.bfloat16), (2880, torch.float16), (64, torch.float32)):
        box = SimpleNamespace(at=at, L=4, H=H, K=K, patience=1 << 20)
        x, w = torch.zeros(1, H, dtype=dtype), torch.zeros(K, dtype=dtype)
        mailbox_triton.post(box, one, 2, x, tables.away, w)
        mailbox_triton.take(box, one, 2, tables.away, x)


if __name__ == "__main__":
    found = compile_instead_of_running(int(sys.argv[1]))
    token_path()
    for kind in sys.argv[2:] or WIDTHS:
        for transposed in (False, True):
            if not transposed or kind not in FEW:
                experts(kind, transposed)
        if kind not in PLAIN:
            blobs(kind)
    largest = max(kernel.metadata.shared for _, kernel in found)
    print(f"{len(found)} kernels, {largest} bytes of shared memory at most")
    sys.exit(largest > SHARED)
