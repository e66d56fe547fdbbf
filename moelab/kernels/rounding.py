"""Rounding fp32 weights to the few-bit kinds of `moelab.kernels.vectors`: what `moelab.store.fewbit` says, in vectors.

A group of 32 weights is one vector, which LLVM cuts into what the processor has. int8 and int4 add 1.5 · 2²³, which
leaves the nearest integer in the last bits; the exponents of MXFP4 are fp32's own, its codes counts of the midpoints
that a weight is above.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moelab.kernels.compile import kernel
from moelab.kernels import vectors as v
from moelab.kernels.vectors import GROUP, INT4, INT8, MXFP4

_GROUP, _BITS = ir.VectorType(v.F32, GROUP), ir.VectorType(v.I32, GROUP)
#: between the values of e2m1; at every other one a tie goes up, to an even code
_MIDDLE = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@kernel
def round_groups(kind, above, w, n, codes, scales):
    """Round n finite fp32 weights at w, whole groups, to codes and scales at their addresses.

    above : of MXFP4, 1 for the smallest scale that saturates nothing, 0 for OCP's.
    """
    _round(kind, np.int32(above), w, n, codes, scales)


@intrinsic
def _round(typing, kind, above, w, n, codes, scales):
    def code(context, builder, signature, args):
        _, above, w, n, codes, scales = args
        with v.steps(builder, n, GROUP) as (i, _):
            at = v.addr(builder, w, i, 4)
            group = v.load(builder, _GROUP, at)
            sizes = builder.and_(builder.bitcast(group, _BITS), v.fill(_BITS, 0x7FFFFFFF))
            widest = _call(builder, f"llvm.vector.reduce.umax.v{GROUP}i32", v.I32, sizes)
            if kind == MXFP4:
                scale, found = _mxfp4(builder, group, sizes, widest, above)
            else:
                if kind == INT4:                        # with its sign, the first one's of several
                    same = builder.icmp_unsigned("==", sizes, v.everywhere(builder, widest, GROUP))
                    same = builder.bitcast(same, v.I32)
                    first = _call(builder, "llvm.cttz.i32", v.I32, same, v.fill(ir.IntType(1), 1))
                    widest = v.load(builder, v.I32, v.addr(builder, at, builder.zext(first, v.I64), 4))
                scale, found = _integers(builder, kind, group, builder.bitcast(widest, v.F32))
            if kind != INT8:
                even, odd = (v.shuffle(builder, found, found, list(range(k, GROUP, 2))) for k in (0, 1))
                found = builder.or_(builder.and_(even, v.fill(even.type, 15)), builder.shl(odd, v.fill(odd.type, 4)))
            v.store(builder, scale, v.skip(builder, kind, scales, i, 1))
            v.store(builder, builder.trunc(found, ir.VectorType(v.I8, found.type.count)),
                   v.skip(builder, kind, codes, i))
        return context.get_dummy_value()

    return types.void(kind, above, w, n, codes, scales), code


def _mxfp4(builder: Any, group: Any, sizes: Any, widest: Any, above: Any) -> tuple[Any, Any]:
    """The scale's byte and the codes of a group."""
    mantissa = builder.and_(widest, v.fill(v.I32, 0x7FFFFF))
    more = builder.icmp_unsigned(">", mantissa, v.fill(v.I32, 0x400000))           # than 1½ · 2ⁿ
    exponent = builder.add(builder.lshr(widest, v.fill(v.I32, 23)), builder.and_(builder.zext(more, v.I32), above))
    scale = _call(builder, "llvm.usub.sat.i32", v.I32, exponent, v.fill(v.I32, 2))
    factor = builder.bitcast(builder.shl(builder.sub(v.fill(v.I32, 254), scale), v.fill(v.I32, 23)), v.F32)
    scaled = builder.fmul(builder.bitcast(sizes, _GROUP), v.everywhere(builder, factor, GROUP))
    found = builder.shl(builder.lshr(builder.bitcast(group, _BITS), v.fill(_BITS, 31)), v.fill(_BITS, 3))
    for k, middle in enumerate(_MIDDLE):
        beyond = builder.fcmp_ordered(">=" if k % 2 else ">", scaled, v.fill(_GROUP, middle))
        found = builder.add(found, builder.zext(beyond, _BITS))
    return builder.trunc(scale, v.I8), found


def _integers(builder: Any, kind: Any, group: Any, widest: Any) -> tuple[Any, Any]:
    """The scale as bf16 and the codes of a group, of int8 or int4."""
    low, high, zero = (-8.0, 7.0, 8) if kind == INT4 else (-127.0, 127.0, 0)
    bits = builder.bitcast(builder.fdiv(widest, v.fill(v.F32, low if kind == INT4 else high)), v.I32)
    odd = builder.and_(builder.lshr(bits, v.fill(v.I32, 16)), v.fill(v.I32, 1))
    bits = builder.lshr(builder.add(bits, builder.add(odd, v.fill(v.I32, 0x7FFF))), v.fill(v.I32, 16))    # ties to even
    scale = builder.bitcast(builder.shl(bits, v.fill(v.I32, 16)), v.F32)
    none = builder.fcmp_ordered("==", scale, v.fill(v.F32, 0.0))
    divisor = builder.select(none, v.fill(v.F32, float("inf")), scale)
    scaled = builder.fdiv(group, v.everywhere(builder, divisor, GROUP))
    for relation, bound in (("<", v.fill(_GROUP, low)), (">", v.fill(_GROUP, high))):
        scaled = builder.select(builder.fcmp_ordered(relation, scaled, bound), bound, scaled)
    return builder.trunc(bits, v.I16), builder.bitcast(builder.fadd(scaled, v.fill(_GROUP, 1.5 * 2**23 + zero)), _BITS)


def _call(builder: Any, name: str, of: Any, *args: Any) -> Any:
    f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(of, [arg.type for arg in args]), name)
    return builder.call(f, args)
