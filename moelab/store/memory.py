"""Loads and stores at addresses, for numba kernels. Words are little-endian, of any alignment; bounds are unchecked."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moelab.kernels.compile import kernel


def _memory(bits: int):
    """(load, store) of words of so many bits, zero-extended to u64."""
    pointer = ir.IntType(bits).as_pointer()

    @intrinsic
    def load(typing, address):
        def code(context, builder, signature, args):
            value = builder.load(builder.inttoptr(args[0], pointer), align=1)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))
        return types.uint64(types.int64), code

    @intrinsic
    def store(typing, address, value):
        def code(context, builder, signature, args):
            value = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            builder.store(value, builder.inttoptr(args[0], pointer), align=1)
            return context.get_dummy_value()
        return types.void(types.int64, types.uint64), code
    return load, store


load, store = _memory(64)
load_byte, store_byte = _memory(8)


@intrinsic
def trailing_zeros(typing, value):
    """Zeros below the lowest 1 of a u64 that has one."""
    def code(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))
    return types.int64(types.uint64), code


@kernel
def copy(source, n, target):
    for i in range(n >> 3):
        store(target + 8 * i, load(source + 8 * i))
    for i in range(n & ~7, n):
        store_byte(target + i, load_byte(source + i))
