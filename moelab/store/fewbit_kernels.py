"""Rounding fp32 weights to few-bit kinds of `moelab.kernels.vectors`: what `moelab.store.fewbit`
says.

A group of 32 weights is one vector, which LLVM cuts into what the processor has. int8 and int4 add
1.5 · 2²³, which leaves the nearest integer in the last bits; the exponents of MXFP4 are fp32's own,
its codes counts of the midpoints that a weight is above."""

from __future__ import annotations

from llvmlite import ir

from moelab.kernels.compile import kernel
from moelab.kernels.emit import F32, I8, I32, Value, emitted
from moelab.kernels.vectors import BFLOAT16, GROUP, INT4, INT8, MXFP4, Kind

#: between the values of e2m1; at every other one a tie goes up, to an even code
_MIDDLE = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@kernel
def round_groups(kind, w, n, codes, scales):
    """Round n finite fp32 weights at w, whole groups, to codes and scales at their addresses."""
    _round(kind, w, n, codes, scales)


@emitted()
def _round(kind: Kind, w, n, codes, scales):
    with n.steps(GROUP) as i:
        at = w + i * 4
        group = at.load(ir.VectorType(F32, GROUP))
        sizes = group.to(I32) & 0x7FFFFFFF
        widest = sizes.call(f"vector.reduce.umax.v{GROUP}i32", of=I32)
        if kind == MXFP4:
            scale, found = _mxfp4(group, sizes, widest)
        else:
            if kind == INT4:  # with its sign, the first one's of several
                same = sizes.is_("==", widest.everywhere(GROUP))
                same = same.made("bitcast", I32)  # a bit for each
                first = same.call("cttz.i32", same.of(1, ir.IntType(1)))
                widest = (at + first.to(at.type, "zext") * 4).load(I32)
            scale, found = _integers(kind, group, widest.to(F32))
        if kind != INT8:
            even, odd = (found.shuffled(list(range(k, GROUP, 2))) for k in (0, 1))
            found = even & 15 | odd << 4
        (scales + kind.beside(i)).store(scale)
        (codes + kind.span(i)).store(found.to(I8, "trunc"))


def _mxfp4(group: Value, sizes: Value, widest: Value) -> tuple[Value, Value]:
    """The scale's byte and the codes of a group."""
    scale = (widest >> 23).call("usub.sat.i32", 2)
    scaled = sizes.to(F32) * (scale.of(254) - scale << 23).to(F32).everywhere(GROUP)
    found = group.to(I32) >> 31 << 3
    for k, middle in enumerate(_MIDDLE):
        found = found + scaled.is_(">=" if k % 2 else ">", middle).to(I32, "zext")
    return scale.to(I8, "trunc"), found


def _integers(kind: Kind, group: Value, widest: Value) -> tuple[Value, Value]:
    """The scale as bf16 and the codes of a group, of int8 or int4."""
    low, high, zero = (-8.0, 7.0, 8) if kind == INT4 else (-127.0, 127.0, 0)
    bits = BFLOAT16.rounded(widest / (low if kind == INT4 else high))
    scale = (bits.to(I32, "zext") << 16).to(F32)
    divisor = scale.is_("==", 0.0).made("select", scale.of(float("inf")), scale)
    scaled = group / divisor.everywhere(GROUP)
    for relation, bound in (("<", group.of(low)), (">", group.of(high))):
        scaled = scaled.is_(relation, bound).made("select", bound, scaled)
    return bits, (scaled + (1.5 * 2**23 + zero)).to(I32)
