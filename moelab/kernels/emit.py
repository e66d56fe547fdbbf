"""LLVM's instructions by Python's operators, for what numba cannot say: vectors, bits of numbers,
memory by address.

A `Value` is the result of an instruction; operators on values append further instructions to the
code of the function that is being compiled. `emitted` makes a part of kernels, an intrinsic of numba, of a function of values; those
that know no weights follow it."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I1, I8, I16, I32, I64 = map(ir.IntType, (1, 8, 16, 32, 64))
F16 = ir.HalfType()
F32 = ir.FloatType()
VOID = ir.VoidType()
#: processor → (LLVM's function for its instruction, with these arguments)
_PAUSES: dict[str, tuple[str, list[ir.Constant]]] = {
    **dict.fromkeys(("x86_64", "AMD64"), ("llvm.x86.sse2.pause", [])),
    **dict.fromkeys(("aarch64", "arm64"), ("llvm.aarch64.hint", [ir.Constant(I32, 1)])),
}
#: numba's type of a tag → the kind of weights (`moelab.kernels.vectors`) that it stands for
TAGS: dict[types.Type, Any] = {}


def fill(of: ir.Type, value: Any) -> ir.Constant:
    """A number, in every place of a vector, or a list of its numbers."""
    return ir.Constant(
        of, [value] * of.count if hasattr(of, "count") and not isinstance(value, list) else value
    )


def _operator(integer: str, real: str = "") -> Callable:
    return lambda self, other: self.made(real if self.scalar == F32 else integer, other)


class Value:
    """A number, an address or a vector of LLVM; plain numbers next to it are of its type. Integers
    have no sign."""

    def __init__(self, builder: ir.IRBuilder, llvm: Any) -> None:
        self.builder = builder
        self.llvm = llvm
        self.type = llvm.type
        self.scalar = getattr(self.type, "element", self.type)

    __add__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = _operator("mul", "fmul")
    __truediv__ = _operator("", "fdiv")
    __and__ = _operator("and_")
    __or__ = _operator("or_")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")
    __floordiv__ = _operator("udiv")

    def made(self, instruction: str, *others: Any) -> Value:
        """What the builder's instruction of this name gives, of values, plain numbers and types."""
        return Value(
            self.builder, getattr(self.builder, instruction)(self.llvm, *map(self._operand, others))
        )

    def _operand(self, other: Any) -> Any:
        if isinstance(other, ir.Type):
            return other
        return other.llvm if isinstance(other, Value) else fill(self.type, other)

    def of(self, other: Any, type_: ir.Type | None = None) -> Value:
        """A constant."""
        return Value(self.builder, fill(type_ or self.type, other))

    def to(self, of: ir.Type, how: str = "bitcast") -> Value:
        """By one of LLVM's conversions, "zext" …; a vector to as many of a scalar type."""
        vector = hasattr(self.type, "count") and not hasattr(of, "count")
        return self.made(how, ir.VectorType(of, self.type.count) if vector else of)

    def is_(self, sign: str, other: Any) -> Value:
        """A relation; "uno" holds where a number is NaN, the others never."""
        compare = self.builder.fcmp_ordered if self.scalar == F32 else self.builder.icmp_unsigned
        return Value(self.builder, compare(sign, self.llvm, self._operand(other)))

    def call(
        self, name: str, *others: Any, of: ir.Type | None = None, fastmath: tuple[str, ...] = ()
    ) -> Value:
        """One of LLVM's own functions of this and others; its result is of this type, or of
        another."""
        args = [self.llvm, *map(self._operand, others)]
        function = ir.FunctionType(of or self.type, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(self.builder.module, function, "llvm." + name)
        return Value(self.builder, self.builder.call(function, args, fastmath=fastmath))

    def shuffled(self, order: list[int], other: Value | None = None) -> Value:
        """Places of a vector, and of another counted on."""
        return self.made(
            "shuffle_vector", other or self, self.of(order, ir.VectorType(I32, len(order)))
        )

    def everywhere(self, count: int) -> Value:
        """A vector of a number."""
        one = ir.Constant(ir.VectorType(self.type, count), ir.Undefined)
        return Value(
            self.builder, self.builder.insert_element(one, self.llvm, fill(I32, 0))
        ).shuffled([0] * count)

    def at(self, of: ir.Type, i: Value | None = None) -> Any:
        """A pointer to what lies at this address, or to the i-th, of which LLVM knows that the next
        lies beside it."""
        pointer = self.builder.inttoptr(self.llvm, of.as_pointer())
        return pointer if i is None else self.builder.gep(pointer, [i.llvm])

    def load(self, of: ir.Type, i: Value | None = None) -> Value:
        return Value(self.builder, self.builder.load(self.at(of, i), align=1))

    def store(self, value: Value, i: Value | None = None) -> None:
        self.builder.store(value.llvm, self.at(value.type, i), align=1)

    @contextmanager
    def steps(self, step: int) -> Iterator[Value]:
        """A loop from 0 to this, of which the block is the body."""
        with cgutils.for_range_slice(
            self.builder, fill(I64, 0), self.llvm, fill(I64, step), I64
        ) as (i, _):
            yield Value(self.builder, i)


def emitted(result: types.Type = types.void) -> Callable:
    """A part of kernels, from the function that makes its code of values: of int64, of fp32, of an
    array the address. A parameter annotated `Kind` is the kind of weights that a tag stands for, one
    annotated `int` a number known when a kernel is compiled."""

    def part(function: Callable) -> Any:
        own = inspect.signature(function)
        wanted = [parameter.annotation for parameter in own.parameters.values()]

        def typed(typing, *given):
            taken = [_taken(*one) for one in zip(wanted, given)]

            def code(context, builder, signature, args):
                found = function(
                    *(_value(context, builder, *one) for one in zip(wanted, taken, args))
                )
                if isinstance(found, Value):
                    return found.llvm
                return context.get_dummy_value() if found is None else fill(I64, found)

            return result(*taken), code

        typed.__name__ = function.__name__
        typed.__doc__ = function.__doc__
        typed.__signature__ = own.replace(
            parameters=[inspect.Parameter("typing", 1), *own.parameters.values()]
        )
        return intrinsic(prefer_literal="int" in wanted)(typed)

    return part


def _taken(wanted: str, given: types.Type) -> types.Type:
    """The type in which a part takes an argument."""
    if wanted in ("int", "Kind"):
        return given if wanted == "int" else types.unliteral(given)
    wide = {types.Integer: types.int64, types.Float: types.float32}
    return next((to for of, to in wide.items() if isinstance(given, of)), given)


def _value(context: Any, builder: ir.IRBuilder, wanted: str, taken: Any, llvm: Any) -> Any:
    if wanted in ("int", "Kind"):
        return taken.literal_value if wanted == "int" else TAGS[taken]
    if isinstance(taken, types.Array):
        llvm = builder.ptrtoint(context.make_array(taken)(context, builder, llvm).data, I64)
    return Value(builder, llvm)


@emitted(types.int64)
def address(array):
    """Where an array's numbers lie; `ctypes.data` would be uint64, and every kernel compiled for
    these as well."""
    return array


@emitted()
def kept(array):
    """A use of an array: numba frees its memory after the last one, even if its address is still
    used."""


@emitted(types.int64)
def read(address, i):
    """The i-th int64 at an address."""
    return (address + i * 8).load(I64)


@emitted(types.voidptr)
def pointer(address):
    """An address as `numba.carray` takes it."""
    return Value(address.builder, address.at(I8))


@emitted(types.int64)
def take(counter):
    """Add one to the int64 at an address, atomically; returns what it was before."""
    return Value(
        counter.builder,
        counter.builder.atomic_rmw("add", counter.at(I64), fill(I64, 1), "monotonic"),
    )


@emitted(types.int64)
def acquired(address):
    """The int64 at an address; what its writer `released` before is seen after it."""
    b = address.builder
    return Value(b, b.load_atomic(address.at(I64), "acquire", 8))


@emitted()
def released(address, value):
    """Write the int64 at an address, behind all that this thread has written before."""
    address.builder.store_atomic(value.llvm, address.at(I64), "release", 8)


@emitted()
def pause(address):
    """The processor's hint that this thread is spinning on an address."""
    name, args = _PAUSES.get(platform.machine(), ("", []))
    if name:
        kind = ir.FunctionType(VOID, [arg.type for arg in args])
        b = address.builder
        b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


@emitted()
def sleep(function, microseconds):
    """Let the thread sleep, by the C library's usleep at an address."""
    of = ir.FunctionType(I32, [I32])
    function.builder.call(function.at(of), [microseconds.to(I32, "trunc").llvm])


@emitted()
def together(team, function, threads, job):
    """Call the C function at an address with that of the array `job` in so many threads, by
    OpenMP's GOMP_parallel at the address `team`; in this thread, if threads is 1."""
    b = team.builder
    body = ir.FunctionType(VOID, [I64])
    run = ir.FunctionType(VOID, [body.as_pointer(), I64, I32, I32])
    with b.if_else(threads.is_(">", 1).llvm) as (then, otherwise):
        with then:
            b.call(
                team.at(run),
                [function.at(body), job.llvm, threads.to(I32, "trunc").llvm, fill(I32, 0)],
            )
        with otherwise:
            b.call(function.at(body), [job.llvm])


@emitted(types.int64)
def now(function, clock):
    """Nanoseconds of a clock, by the C library's clock_gettime at an address."""
    b = function.builder
    time = cgutils.alloca_once(function.builder, ir.ArrayType(I64, 2))
    b.call(function.at(ir.FunctionType(I32, [I32, time.type])), [clock.to(I32, "trunc").llvm, time])
    seconds, rest = (Value(b, b.load(cgutils.gep_inbounds(b, time, 0, i))) for i in (0, 1))
    return seconds * 1_000_000_000 + rest


@emitted(types.float32)
def exponential(x):
    """e^x of an fp32 number, to one unit in the last place, in steps of which loops make vectors;
    subnormals are 0.

    Source: Cephes, expf: x = n ln 2 + r with |r| ≤ ln 2 / 2, a polynomial for e^r, n added to its
    exponent."""
    bound = x.call("maxnum.f32", -88.0).call("minnum.f32", 89.0)
    n = (bound * 1.44269504).call("rint.f32")
    r = n.call("fma.f32", 2.12194440e-4, n.call("fma.f32", -0.693359375, bound))
    total = x.of(1.9875691500e-4)
    for factor in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
        1.0,
        1.0,
    ):
        total = total.call("fma.f32", r, factor)
    power = (n.to(I32, "fptosi") + 127 << 23).to(F32)
    return x.is_("uno", x).made("select", x, total * power)
