"""Loads and stores at addresses, for numba kernels. Words are little-endian, of any alignment;
bounds are unchecked."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from moelab.kernels.emit import I8, I64, emitted


@emitted(types.uint64)
def load(address):
    return address.load(I64)


@emitted(types.uint64)
def load_byte(address):
    return address.load(I8).to(I64, "zext")


@emitted()
def store(address, value):
    address.store(value)


@emitted()
def store_byte(address, value):
    address.store(value.to(I8, "trunc"))


@emitted(types.int64)
def trailing_zeros(value):
    """Zeros below the lowest 1 of a u64 that has one."""
    return value.made("cttz", value.of(1, ir.IntType(1)))
