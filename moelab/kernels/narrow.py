"""Rounding fp32 weights to the few-bit kinds of `moelab.kernels.tiles`: what `moelab.store.fewbit` says, in vectors.

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
from moelab.kernels.tiles import (_F32, _I8, _I16, _I32, _I64, GROUP, INT4, INT8, MXFP4, _all, _at, _load, _shuffle,
                                  _skip, _steps, _store)

_GROUP, _BITS = ir.VectorType(_F32, GROUP), ir.VectorType(_I32, GROUP)
#: between the values of e2m1; at every other one a tie goes up, to an even code
_MIDDLE = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@kernel
def narrow(kind, above, w, n, codes, scales):
    """Round n finite fp32 weights at w, whole groups, to codes and scales at their addresses.

    above : of MXFP4, 1 for the smallest scale that saturates nothing, 0 for OCP's.
    """
    _narrow(kind, np.int32(above), w, n, codes, scales)


@intrinsic
def _narrow(typing, kind, above, w, n, codes, scales):
    def code(context, builder, signature, args):
        _, above, w, n, codes, scales = args
        with _steps(builder, n, GROUP) as (i, _):
            at = _at(builder, w, i, 4)
            group = _load(builder, _GROUP, at)
            sizes = builder.and_(builder.bitcast(group, _BITS), _all(_BITS, 0x7FFFFFFF))
            widest = _call(builder, f"llvm.vector.reduce.umax.v{GROUP}i32", _I32, sizes)
            if kind == MXFP4:
                scale, found = _mxfp4(builder, group, sizes, widest, above)
            else:
                if kind == INT4:                        # with its sign, the first one's of several
                    same = builder.bitcast(builder.icmp_unsigned("==", sizes, _everywhere(builder, widest)), _I32)
                    first = _call(builder, "llvm.cttz.i32", _I32, same, _all(ir.IntType(1), 1))
                    widest = _load(builder, _I32, _at(builder, at, builder.zext(first, _I64), 4))
                scale, found = _integers(builder, kind, group, builder.bitcast(widest, _F32))
            if kind != INT8:
                even, odd = (_shuffle(builder, found, found, list(range(k, GROUP, 2))) for k in (0, 1))
                found = builder.or_(builder.and_(even, _all(even.type, 15)), builder.shl(odd, _all(odd.type, 4)))
            _store(builder, scale, _skip(builder, kind, scales, i, 1))
            _store(builder, builder.trunc(found, ir.VectorType(_I8, found.type.count)),
                   _skip(builder, kind, codes, i))
        return context.get_dummy_value()

    return types.void(kind, above, w, n, codes, scales), code


def _mxfp4(builder: Any, group: Any, sizes: Any, widest: Any, above: Any) -> tuple[Any, Any]:
    """The scale's byte and the codes of a group."""
    mantissa = builder.and_(widest, _all(_I32, 0x7FFFFF))
    more = builder.icmp_unsigned(">", mantissa, _all(_I32, 0x400000))           # than 1½ · 2ⁿ
    exponent = builder.add(builder.lshr(widest, _all(_I32, 23)), builder.and_(builder.zext(more, _I32), above))
    scale = _call(builder, "llvm.usub.sat.i32", _I32, exponent, _all(_I32, 2))
    factor = builder.bitcast(builder.shl(builder.sub(_all(_I32, 254), scale), _all(_I32, 23)), _F32)
    scaled = builder.fmul(builder.bitcast(sizes, _GROUP), _everywhere(builder, factor))
    found = builder.shl(builder.lshr(builder.bitcast(group, _BITS), _all(_BITS, 31)), _all(_BITS, 3))
    for k, middle in enumerate(_MIDDLE):
        beyond = builder.fcmp_ordered(">=" if k % 2 else ">", scaled, _all(_GROUP, middle))
        found = builder.add(found, builder.zext(beyond, _BITS))
    return builder.trunc(scale, _I8), found


def _integers(builder: Any, kind: Any, group: Any, widest: Any) -> tuple[Any, Any]:
    """The scale as bf16 and the codes of a group, of int8 or int4."""
    low, high, zero = (-8.0, 7.0, 8) if kind == INT4 else (-127.0, 127.0, 0)
    bits = builder.bitcast(builder.fdiv(widest, _all(_F32, low if kind == INT4 else high)), _I32)
    odd = builder.and_(builder.lshr(bits, _all(_I32, 16)), _all(_I32, 1))
    bits = builder.lshr(builder.add(bits, builder.add(odd, _all(_I32, 0x7FFF))), _all(_I32, 16))    # ties to even
    scale = builder.bitcast(builder.shl(bits, _all(_I32, 16)), _F32)
    none = builder.fcmp_ordered("==", scale, _all(_F32, 0.0))
    scaled = builder.fdiv(group, _everywhere(builder, builder.select(none, _all(_F32, float("inf")), scale)))
    for relation, bound in (("<", _all(_GROUP, low)), (">", _all(_GROUP, high))):
        scaled = builder.select(builder.fcmp_ordered(relation, scaled, bound), bound, scaled)
    return builder.trunc(bits, _I16), builder.bitcast(builder.fadd(scaled, _all(_GROUP, 1.5 * 2**23 + zero)), _BITS)


def _everywhere(builder: Any, number: Any) -> Any:
    """A group of one number."""
    one = builder.insert_element(ir.Constant(ir.VectorType(number.type, GROUP), ir.Undefined), number, _all(_I32, 0))
    return _shuffle(builder, one, one, [0] * GROUP)


def _call(builder: Any, name: str, of: Any, *args: Any) -> Any:
    f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(of, [arg.type for arg in args]), name)
    return builder.call(f, args)
