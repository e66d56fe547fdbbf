"""The GPU's side of a `moelab.offloading.mailbox`, in Triton.

Words are loaded with acquire and stored with release in system scope by PTX, as Triton has only
atomics with these; those also change what they read, and are not atomic to the CPU over PCIe. In
Triton's interpreter there is no PTX, and both sides are one CPU's threads: there they are atomics.
`tell` and `hear` may be called within other kernels; of a kernel one program does it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moelab.offloading.mailbox import Mailbox

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_LOAD = tl.constexpr("ld.acquire.sys.global.s64 $0, [$1];")
_STORE = tl.constexpr("st.release.sys.global.s64 [$1], $2; mov.u32 $0, 0;")
_FIRST = tl.constexpr(
    "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
    "@first st.release.sys.global.s64 [$1], $2; mov.u32 $0, 0; }"
)


@triton.jit
def acquired(address, PTX: tl.constexpr):
    """The int64 at an address; what its writer released before is seen after it. Each thread looks
    for itself, so two may see another number."""
    if PTX:
        return tl.inline_asm_elementwise(
            _LOAD, "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
        )
    return tl.atomic_add(address.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")


@triton.jit
def released(address, value, PTX: tl.constexpr, STORE: tl.constexpr):
    """Write the int64 at an address, behind what was written before: by a program's first thread, or
    by each."""
    if PTX:
        tl.inline_asm_elementwise(
            STORE, "=r,l,l", [address, value], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        pointer = address.to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(pointer, value, sem="release", scope="sys")


@triton.jit
def _any(away, K: tl.constexpr, PAD: tl.constexpr):
    k = tl.arange(0, PAD)
    return tl.max(tl.load(away + k, mask=k < K, other=-1), 0) >= 0


@triton.jit
def tell(
    posted,
    to_x,
    to_away,
    to_w,
    ticket,
    x,
    away,
    w,
    TYPE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    PAD: tl.constexpr,
    PTX: tl.constexpr,
):
    """Post x [H], away and w [K] at these addresses, if any expert is away.

    WIDE, PAD : powers of two, at least H and K."""
    if _any(away, K, PAD):
        h = tl.arange(0, WIDE)
        k = tl.arange(0, PAD)
        there = tl.load(x + h, mask=h < H, other=0.0)
        letter = tl.multiple_of(to_x.to(tl.pointer_type(TYPE)), 16)
        tl.store(letter + h, there, mask=h < H)
        ids = tl.load(away + k, mask=k < K, other=-1)
        tl.store(to_away.to(tl.pointer_type(tl.int64)) + k, ids, mask=k < K)
        scale = tl.load(w + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(to_w.to(tl.pointer_type(tl.float32)) + k, scale, mask=k < K)
        tl.debug_barrier()  # behind what all threads have written
        released(posted, ticket, PTX, _FIRST)


@triton.jit
def hear(
    done,
    y,
    stop,
    late,
    ticket,
    away,
    out,
    patience,
    H: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    PAD: tl.constexpr,
    PTX: tl.constexpr,
):
    """Add y [H] at its address to out [H], if any expert is away, when it is there."""
    if _any(away, K, PAD):
        looks = tl.zeros([], tl.int64)
        ended = tl.zeros([], tl.int64)
        seen = acquired(done, PTX)
        if seen != ticket:
            ended = acquired(late, PTX)
        while (seen != ticket) & (ended == 0) & (looks < patience):
            if looks % 16 == 0:  # a look takes the link's time there and back
                ended = acquired(stop, PTX)
            seen = acquired(done, PTX)
            looks += 1
        if seen == ticket:
            h = tl.arange(0, WIDE)
            answer = tl.multiple_of(y.to(tl.pointer_type(tl.float32)), 16)
            more = tl.load(answer + h, mask=h < H, other=0.0)
            sum = tl.load(out + h, mask=h < H, other=0.0).to(tl.float32) + more
            tl.store(out + h, sum.to(out.dtype.element_ty), mask=h < H)
        elif ended == 0:
            released(late, ticket, PTX, _STORE)  # by each thread that has seen no answer


@triton.jit(do_not_specialize=["layer"])
def _post_kernel(
    posted, to_x, to_away, to_w, number, layer, x, away, w,
    TYPE: tl.constexpr, L: tl.constexpr, H: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
    PAD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    ticket = tl.load(number) * L + layer
    tell(posted, to_x, to_away, to_w, ticket, x, away, w, TYPE, H, K, WIDE, PAD, PTX)


@triton.jit(do_not_specialize=["layer"])
def _take_kernel(
    done, y, stop, late, number, layer, away, out, patience,
    L: tl.constexpr, H: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, PAD: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    ticket = tl.load(number) * L + layer
    hear(done, y, stop, late, ticket, away, out, patience, H, K, WIDE, PAD, PTX)


def post(box: Mailbox, number: Tensor, layer: int, x: Tensor, away: Tensor, w: Tensor) -> None:
    """Have the CPU compute, for token `number` int64 [1] in this layer, x [1, H]'s experts `away`
    int64 [K], −1 for those that it is not to compute, with weights w [K]; nothing if there are
    none."""
    where = (box.at[name] for name in ("posted", "x", "away", "w"))
    _post_kernel[(1,)](
        *where, number, layer, x, away, w, TYPES[box.dtype], box.L, *_sizes(box), x.is_cuda
    )


def take(box: Mailbox, number: Tensor, layer: int, away: Tensor, out: Tensor) -> None:
    """Wait for what was posted for these, and add it to out [1, H]; nothing if nothing was."""
    where = (box.at[name] for name in ("done", "y", "stop", "late"))
    _take_kernel[(1,)](
        *where, number, layer, away, out, box.patience, box.L, *_sizes(box), out.is_cuda
    )


def _sizes(box: Mailbox) -> tuple[int, ...]:
    return box.H, box.K, triton.next_power_of_2(box.H), triton.next_power_of_2(box.K)
