"""The GPU's side of a `moelab.offloading.mailbox`, in Triton.

Words are loaded with acquire and stored with release in system scope by PTX, as Triton has only
atomics with these; those also change what they read, and are not atomic to the CPU over PCIe. In
Triton's interpreter there is no PTX, and both sides are one CPU's threads: there they are atomics."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moelab.offloading.mailbox import Mailbox

_PTX = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _acquired(address):
    """The int64 at an address; what its writer released before is seen after it. Each thread looks
    for itself, so two may see another number."""
    if _PTX:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s64 $0, [$1];", "=l,l", [address], tl.int64, False, 1
        )
    return tl.atomic_add(address.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")


@triton.jit
def _released(address, value):
    """Write the int64 at an address, by each thread behind what was written before."""
    if _PTX:
        tl.inline_asm_elementwise(
            "st.release.sys.global.s64 [$1], $2; mov.u32 $0, 0;",
            "=r,l,l",
            [address, value],
            tl.int32,
            False,
            1,
        )
    else:
        tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), value, sem="release", scope="sys")


@triton.jit(do_not_specialize=["layer"])
def _post_kernel(where, number, layer, x, away, w, L, H: tl.constexpr, K: tl.constexpr):
    """where : addresses of posted, x, away and w."""
    k = tl.arange(0, triton.next_power_of_2(K))
    chosen = tl.load(away + k, mask=k < K, other=-1)
    if tl.max(chosen, 0) >= 0:
        h = tl.arange(0, triton.next_power_of_2(H))
        to_x = tl.multiple_of(where[1].to(tl.pointer_type(x.dtype.element_ty)), 16)
        tl.store(to_x + h, tl.load(x + h, mask=h < H), mask=h < H)
        tl.store(where[2].to(tl.pointer_type(tl.int64)) + k, chosen, mask=k < K)
        scale = tl.load(w + k, mask=k < K).to(tl.float32)
        tl.store(where[3].to(tl.pointer_type(tl.float32)) + k, scale, mask=k < K)
        tl.debug_barrier()  # behind what all threads have written
        _released(where[0], tl.load(number) * L + layer)


@triton.jit(do_not_specialize=["layer"])
def _take_kernel(where, number, layer, away, out, patience, L, H: tl.constexpr, K: tl.constexpr):
    """where : addresses of done, y, stop and late."""
    k = tl.arange(0, triton.next_power_of_2(K))
    if tl.max(tl.load(away + k, mask=k < K, other=-1), 0) >= 0:
        ticket = tl.load(number) * L + layer
        looks = tl.zeros([], tl.int64)
        ended = tl.zeros([], tl.int64)
        seen = _acquired(where[0])
        if seen != ticket:
            ended = _acquired(where[3])
        while (seen != ticket) & (ended == 0) & (looks < patience):
            if looks % 16 == 0:  # a look takes the link's time there and back
                ended = _acquired(where[2])
            seen = _acquired(where[0])
            looks += 1
        if seen == ticket:
            h = tl.arange(0, triton.next_power_of_2(H))
            y = tl.multiple_of(where[1].to(tl.pointer_type(tl.float32)), 16)
            more = tl.load(y + h, mask=h < H)
            total = tl.load(out + h, mask=h < H).to(tl.float32) + more
            tl.store(out + h, total.to(out.dtype.element_ty), mask=h < H)
        elif ended == 0:
            _released(where[3], ticket)  # by each thread that has seen no answer


def post(box: Mailbox, number: Tensor, layer: int, x: Tensor, away: Tensor, w: Tensor) -> None:
    """Have the CPU compute, for token `number` int64 [1] in this layer, x [1, H]'s experts `away`
    int64 [K], −1 for those that it is not to compute, with weights w [K]; nothing if there are
    none."""
    where = tuple(box.at[name] for name in ("posted", "x", "away", "w"))
    given = where, number, layer, x, away, w
    _post_kernel[(1,)](*given, box.L, box.H, box.K, num_warps=1)


def take(box: Mailbox, number: Tensor, layer: int, away: Tensor, out: Tensor) -> None:
    """Wait for what was posted for these, and add it to out [1, H]; nothing if nothing was."""
    where = tuple(box.at[name] for name in ("done", "y", "stop", "late"))
    _take_kernel[(1,)](where, number, layer, away, out, box.patience, box.L, box.H, box.K)
