"""Random MIL programs: what the evaluator makes of their inputs against coremltools' own inference of constants.

A program is built twice by coremltools' Builder, from constants, whose values it infers, and from inputs, which the
evaluator gets. Values are multiples of 1/4, so that what jumps (floor, comparison, cast …) is only ever done to numbers
that no arithmetic has rounded; every other operation may follow any.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ct = pytest.importorskip("coremltools")

from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.evaluator_ops import OPS
from moelab.ane.coreml.package import Package, _function, coremltools, quiet
from tests.depth import depth

FLOATS = {"fp16": (np.float16, types.fp16, 2e-2), "fp32": (np.float32, types.fp32, 1e-3)}
#: of exact numbers they make exact ones, as long as these are short
EXACT = {"add", "sub", "mul", "maximum", "minimum", "abs", "relu", "relu6", "clip", "floor", "ceil", "round", "sign",
         "square", "select", "identity", "reduce_sum", "reduce_max", "reduce_min", "reduce_sum_square",
         "reduce_l1_norm", "matmul", "linear", "cast", "floor_div", "mod", "logical_and", "logical_or", "logical_xor",
         "logical_not", "greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "reduce_argmax",
         "reduce_argmin", "pow", "real_div", "exp2", "reduce_mean", "reduce_prod", "reduce_l2_norm",
         "reduce_log_sum_exp"}
MOVING = {"reshape", "transpose", "expand_dims", "squeeze", "concat", "stack", "split", "slice_by_index",
          "slice_by_size", "slice_update", "tile", "pad", "reverse", "gather", "gather_along_axis"}
#: in floats their results are rounded, in integers they are exact
ROUNDING = {"pow", "real_div", "exp2", "reduce_mean", "reduce_prod", "reduce_l2_norm", "reduce_log_sum_exp"}
UNARY = {"sigmoid": None, "tanh": None, "erf": None, "cos": None, "sin": None, "atan": None, "softplus": None,
         "softsign": None, "relu": None, "relu6": None, "abs": None, "square": None, "sign": None, "identity": None,
         "exp": lambda v: v.max() < 5, "exp2": lambda v: v.max() < 8, "tan": lambda v: abs(v).max() < 1.2,
         "sqrt": lambda v: v.min() >= 0.25}
JUMPS = {"floor", "ceil", "round", "sign", "floor_div", "mod", "cast", "greater", "greater_equal", "less", "less_equal",
         "equal", "not_equal", "reduce_argmax", "reduce_argmin"}
COMPARE = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")
REDUCE = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_sum_square", "reduce_l1_norm",
          "reduce_l2_norm", "reduce_log_sum_exp", "reduce_prod", "reduce_log_sum")
#: without inference of constants in coremltools; `test_evaluator` compares them with torch
NOT_INFERRED = {"conv", "batch_norm", "instance_norm", "silu"}


class Writer:
    """Writes one random program of constants, and remembers it as steps: (operation, parameters, values made)."""

    def __init__(self, seed, dtype):
        self.seed, self.rng, self.dtype = seed, np.random.default_rng(seed), dtype
        self.vars, self.exact, self.steps, self.sources = [], [], [], []

    def source(self, array):
        self.sources.append(array)
        self.vars.append(mb.const(val=array))
        self.exact.append(True)

    def one(self, *options):
        return options[self.rng.integers(len(options))]

    def pick(self, kinds="f", fits=None, exact=False):
        """The number of a value, or StopIteration; its array is never empty."""
        found = [i for i, v in enumerate(self.vars) if np.asarray(v.val).dtype.kind in kinds and v.rank
                 and (self.exact[i] or not exact) and (fits is None or fits(np.asarray(v.val)))]
        if not found:
            raise StopIteration
        return self.one(*found)

    def partner(self, i):
        """Something of the same type that can be combined with value i by broadcasting: a value or a constant."""
        mine = np.asarray(self.vars[i].val)
        same = [j for j, v in enumerate(self.vars) if v.shape == self.vars[i].shape and v.dtype == self.vars[i].dtype]
        if len(same) > 1 and self.rng.random() < 0.6:
            return Ref(self.one(*same))
        shape = [1 if self.rng.random() < 0.4 else n for n in mine.shape][self.rng.integers(mine.ndim + 1):]
        return numbers(self.rng, shape, mine.dtype.type)

    def add(self, kind, top=2e3, **parameters):
        """Write one operation; False if coremltools refuses it or its result is not worth keeping."""
        given = resolve(parameters, self.vars)
        made = getattr(mb, kind)(**given)
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        used = [self.vars[r.at] for r in refs(parameters)]
        exact = all(self.exact[r.at] for r in refs(parameters)) and (kind in EXACT or kind in MOVING)
        for var in made:
            value = var.val
            if value is None or not np.size(value) or np.size(value) > 4000 or var.rank > 5 \
                    or not np.isfinite(np.asarray(value, dtype=float)).all() or abs(np.asarray(value, float)).max() > top:
                return False
        floating = any(np.asarray(v.val).dtype.kind == "f" for v in used)
        if kind in ROUNDING and floating:
            exact = False
        start = len(self.vars)
        self.vars += made
        self.exact += [exact and short(v.val) for v in made]
        self.steps.append((kind, parameters, start, len(made)))
        return True

    def step(self):
        getattr(self, self.one("unary", "binary", "compare", "logic", "reduce", "move", "slice", "join", "matrix",
                               "special", "integers"))()

    def unary(self):
        kind = self.one(*UNARY, "floor", "ceil", "round")
        kinds = "fi" if kind in ("abs", "square", "sign", "exp2") else "fib" if kind == "identity" else "f"
        i = self.pick(kinds, UNARY.get(kind), kind in JUMPS)
        self.add(kind, x=Ref(i))

    def binary(self):
        kind = self.one("add", "sub", "mul", "maximum", "minimum", "floor_div", "mod", "real_div", "pow")
        jumps = kind in JUMPS
        i = self.pick("fi", None if kind != "pow" else lambda v: v.min() >= 0.25 and v.max() <= 8, jumps)
        other = self.partner(i)
        if kind in ("floor_div", "mod", "real_div"):
            like = np.asarray(self.vars[i].val).dtype.type
            other = nonzero(self.rng, np.asarray(self.vars[i].val).shape, like)
        if kind == "pow":
            like = np.asarray(self.vars[i].val).dtype.type
            other = like(self.rng.integers(0, 4)) if like is np.int32 else like(self.one(-2, -0.5, 0.5, 1, 2, 3))
        self.add(kind, x=Ref(i), y=other)

    def compare(self):
        i = self.pick("fi", exact=True)
        other = self.partner(i)
        if isinstance(other, Ref) and not self.exact[other.at]:
            raise StopIteration
        self.add(self.one(*COMPARE), x=Ref(i), y=other)

    def logic(self):
        i = self.pick("b")
        kind = self.one("logical_and", "logical_or", "logical_xor", "logical_not", "select")
        if kind == "logical_not":
            self.add(kind, x=Ref(i))
        elif kind == "select":
            shape, like = self.vars[i].shape, self.one(FLOATS[self.dtype][0], np.int32)
            self.add(kind, cond=Ref(i), a=numbers(self.rng, shape, like), b=numbers(self.rng, shape, like))
        else:
            j = self.pick("b", lambda v: v.shape == self.vars[i].shape)
            self.add(kind, x=Ref(i), y=Ref(j))

    def reduce(self):
        kind = self.one(*REDUCE, "reduce_argmax", "reduce_argmin")
        positive = kind in ("reduce_log_sum",)
        fits = {"reduce_prod": lambda v: v.size <= 16, "reduce_log_sum": lambda v: v.min() >= 0.25}.get(kind)
        i = self.pick("f" if positive else "fi", fits, kind in JUMPS)
        rank = self.vars[i].rank
        if kind in JUMPS:
            value, axis = np.asarray(self.vars[i].val), int(self.rng.integers(-rank, rank))
            ends = np.sort(value, axis)                     # of equals, no one says which
            if value.shape[axis] > 1 and (np.diff(ends, axis=axis).min() == 0):
                raise StopIteration
            self.add(kind, x=Ref(i), axis=axis, keep_dims=bool(self.rng.integers(2)))
            return
        axes = self.some_axes(rank)
        options = {} if self.rng.random() < 0.2 else {"axes": axes}
        self.add(kind, x=Ref(i), keep_dims=bool(self.rng.integers(2)), **options)

    def some_axes(self, rank, least=1):
        axes = self.rng.permutation(rank)[:self.rng.integers(least, rank + 1)]
        return [int(a) - rank if self.rng.random() < 0.5 else int(a) for a in axes]

    def move(self):
        kind = self.one("reshape", "transpose", "expand_dims", "squeeze", "tile", "pad", "reverse", "cast", "gather",
                        "gather_along_axis")
        i = self.pick("f" if kind == "pad" else "fi" if kind.startswith("gather") else "fib",
                      (lambda v: 1 in v.shape and v.size > 1) if kind == "squeeze" else None, kind == "cast")
        value = np.asarray(self.vars[i].val)
        rank, shape = value.ndim, list(value.shape)
        if kind == "reshape":
            target = self.one([-1], [*shape[:-1], 1, -1], [-1, *shape[1:]], [int(np.prod(shape[:-1])), -1],
                              [0] * rank, [*[0] * (rank - 1), -1], [-1, 0], [1, *shape], [1, -1, *[0] * (rank - 1)])
            self.add(kind, x=Ref(i), shape=target)
        elif kind == "transpose":
            self.add(kind, x=Ref(i), perm=[int(p) - rank * self.rng.integers(2) for p in self.rng.permutation(rank)])
        elif kind == "expand_dims":
            self.add(kind, x=Ref(i), axes=self.one([0], [-1], [rank], [0, -1], [1], [-2, 0]))
        elif kind == "squeeze":
            ones = [a - rank * int(self.rng.integers(2)) for a, n in enumerate(shape) if n == 1]
            self.add(kind, x=Ref(i), **self.one({}, {"axes": ones[:1]}, {"axes": ones}))
        elif kind == "tile":
            self.add(kind, x=Ref(i), reps=[int(self.rng.integers(1, 4)) for _ in shape])
        elif kind == "pad":
            mode = self.one("constant", "reflect", "replicate")
            n = self.rng.integers(1, rank + 1)
            pairs = [[int(self.rng.integers(0, min(size, 4))) for _ in range(2)] for size in shape[rank - n:]]
            self.add(kind, x=Ref(i), pad=list(itertools.chain(*pairs)), mode=mode,
                     constant_val=value.dtype.type(self.one(0, 1.5, -2)))
        elif kind == "reverse":
            self.add(kind, x=Ref(i), axes=self.some_axes(rank))
        elif kind == "cast":
            to = self.one("fp32", "fp16", "int32", "bool", "int8", "uint8", "int16", "uint16")
            if to in FLOATS and to != self.dtype:
                raise StopIteration
            self.add(kind, x=Ref(i), dtype=to)
        else:
            axis = int(self.rng.integers(-rank, rank))
            n = shape[axis]
            at = list(shape) if kind == "gather_along_axis" else self.one([3], [2, 2], [1])
            if kind == "gather_along_axis":
                at[axis] = int(self.rng.integers(1, 4))
            low = 0 if kind == "gather_along_axis" else -n
            self.add(kind, x=Ref(i), indices=self.rng.integers(low, n, at).astype(np.int32), axis=axis)

    def slice(self):
        kind = self.one("slice_by_index", "slice_by_size", "slice_update")
        i = self.pick("fib" if kind != "slice_update" else "f")
        value = np.asarray(self.vars[i].val)
        if kind == "slice_by_size":
            begin, size = [], []
            for n in value.shape:
                b = int(self.rng.integers(0, n))
                whole = self.rng.random() < 0.3
                negative = not whole and self.rng.random() < 0.4   # from a negative begin to the end has a wrong type
                size.append(-1 if whole else int(self.rng.integers(1, n - b + 1)))
                begin.append(b - n if negative else b)
            self.add(kind, x=Ref(i), begin=begin, size=size)
            return
        begin, end, stride, masks = [], [], [], [[], [], []]
        for n in value.shape:
            first, last = sorted(self.rng.integers(0, n + 1, 2).tolist())
            last += first == last == 0
            first -= first == last
            s = int(self.one(1, 1, 1, 2, 3, -1, -2))
            if s < 0:
                first, last = last - 1, first - 1
                if last < 0:
                    last = -n - 1
            flags = [self.rng.random() < 0.2, self.rng.random() < 0.2, self.rng.random() < 0.2]
            if self.rng.random() < 0.3 and first > 0 and s > 0:
                first -= n
            begin.append(first)
            end.append(last - n if 0 < last < n and self.rng.random() < 0.3 else last)
            stride.append(s)
            for mask, flag in zip(masks, flags):
                mask.append(flag)
        if kind == "slice_update" or all(masks[2]):
            masks[2] = [False] * value.ndim
        index = {"begin": begin, "end": end, "stride": stride, "begin_mask": masks[0], "end_mask": masks[1],
                 "squeeze_mask": masks[2]}
        if kind == "slice_by_index":
            self.add(kind, x=Ref(i), **index)
            return
        taken = value[tuple(slice(None if f else b, None if e else last, s)
                            for b, last, s, f, e in zip(begin, end, stride, *masks[:2]))]
        if taken.size:
            self.add(kind, x=Ref(i), update=numbers(self.rng, taken.shape, value.dtype.type), **index)

    def join(self):
        kind = self.one("concat", "stack", "split")
        i = self.pick("fib")
        var, value = self.vars[i], np.asarray(self.vars[i].val)
        rank, same = value.ndim, [j for j, v in enumerate(self.vars) if v.shape == self.vars[i].shape
                                  and v.dtype == self.vars[i].dtype]
        axis = int(self.rng.integers(-rank, rank))
        if kind == "split":
            n = value.shape[axis]
            ways = [w for w in range(2, n + 1) if n % w == 0]
            if ways and self.rng.random() < 0.6:
                self.add(kind, x=Ref(i), num_splits=int(self.one(*ways)), axis=axis)
            elif n > 1:
                at = int(self.rng.integers(1, n))
                self.add(kind, x=Ref(i), split_sizes=[at, n - at], axis=axis)
            return
        values = [Ref(int(self.one(*same))) for _ in range(self.rng.integers(2, 4))]
        if var.dtype != types.bool and self.rng.random() < 0.5:
            values[0] = numbers(self.rng, value.shape, value.dtype.type)
            values[1] = Ref(i)
        self.add(kind, values=tuple(values), axis=axis)         # the inference forgets `interleave`: test_evaluator

    def matrix(self):
        like = FLOATS[self.dtype][0]
        i = self.pick("f", lambda v: v.ndim >= 2 and v.dtype == like and abs(v).max() < 30)
        value = np.asarray(self.vars[i].val)
        kind = self.one("matmul", "linear", "einsum")
        if kind == "linear":
            weight = numbers(self.rng, (int(self.rng.integers(1, 5)), value.shape[-1]), like)
            options = {"bias": numbers(self.rng, (len(weight),), like)} if self.rng.integers(2) else {}
            self.add(kind, x=Ref(i), weight=weight, **options)
        elif kind == "matmul":
            tx, ty = bool(self.rng.integers(2)), bool(self.rng.integers(2))
            inner = value.shape[-2 if tx else -1]
            shape = [*value.shape[:-2], *((3, inner) if ty else (inner, 3))]
            self.add(kind, x=Ref(i), y=numbers(self.rng, shape[value.ndim - 2 if self.rng.integers(2) else 0:], like),
                     transpose_x=tx, transpose_y=ty)
        elif value.ndim == 3:
            self.add(kind, values=(Ref(i), numbers(self.rng, (value.shape[2], value.shape[1], 3), like)),
                     equation="chw,whr->chr")

    def special(self):
        like = FLOATS[self.dtype][0]
        kind = self.one("softmax", "gelu", "layer_norm", "clip", "rsqrt", "inverse", "log", "leaky_relu", "elu", "prelu",
                        "sigmoid_hard", "l2_norm")
        fits = {"rsqrt": lambda v: v.min() >= 0.25, "log": lambda v: v.min() >= 0.25,
                "inverse": lambda v: abs(v).min() >= 0.25, "prelu": lambda v: 3 <= v.ndim <= 5,
                "l2_norm": lambda v: v.ndim >= 3 and abs(v).max() > 0.5,
                "layer_norm": lambda v: abs(v).max() < 30}.get(kind, lambda v: True)
        i = self.pick("f", lambda v: v.dtype == like and fits(v))
        value = np.asarray(self.vars[i].val)
        epsilon = {"epsilon": like(self.one(0.001, 0.01, 0.5))}
        options = {"softmax": {"axis": int(self.rng.integers(-value.ndim, value.ndim))},
                   "gelu": {"mode": self.one("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION")},
                   "clip": {"alpha": like(-1.25), "beta": like(0.75)}, "rsqrt": epsilon, "inverse": epsilon,
                   "log": epsilon, "leaky_relu": {"alpha": like(0.25)}, "elu": {"alpha": like(0.5)},
                   "sigmoid_hard": {"alpha": like(0.25), "beta": like(0.5)}, "l2_norm": epsilon}.get(kind)
        if kind == "prelu":
            options = {"alpha": numbers(self.rng, (value.shape[1],), like)}
        if kind == "layer_norm":
            axes = sorted({a % value.ndim for a in self.some_axes(value.ndim)})
            if value.std(tuple(axes)).min() < 0.1:
                raise StopIteration
            over = [value.shape[a] for a in axes]
            options = {"axes": axes, "epsilon": like(0.01)}
            if self.rng.integers(2):
                options |= {"gamma": numbers(self.rng, over, like), "beta": numbers(self.rng, over, like)}
        self.add(kind, x=Ref(i), **options)

    def integers(self):
        """More of what only integers do: quotients, means and powers that are rounded, and what wraps around."""
        i = self.pick("i", lambda v: v.dtype == np.int32)
        value = np.asarray(self.vars[i].val)
        kind = self.one("real_div", "floor_div", "mod", "reduce_mean", "reduce_l2_norm", "cast")
        if kind == "cast":
            self.add(kind, x=Ref(i), dtype=self.one("int8", "uint8", "int16", "uint16", self.dtype, "bool"))
        elif kind.startswith("reduce"):
            self.add(kind, x=Ref(i), axes=self.some_axes(value.ndim), keep_dims=bool(self.rng.integers(2)))
        else:
            self.add(kind, x=Ref(i), y=nonzero(self.rng, value.shape, np.int32))


class Ref(SimpleNamespace):
    """The number of a value of the program."""

    def __init__(self, at):
        super().__init__(at=at)


def refs(parameters):
    for given in parameters.values():
        yield from (r for r in (given if isinstance(given, tuple) else (given,)) if isinstance(r, Ref))


def resolve(parameters, values):
    def one(given):
        return values[given.at] if isinstance(given, Ref) else given
    return {name: [one(g) for g in given] if isinstance(given, tuple) else one(given)
            for name, given in parameters.items()}


def numbers(rng, shape, like):
    return (rng.integers(-300, 300, shape) if like is np.int32 and rng.random() < 0.3 else
            rng.integers(-9, 10, shape) if like is not np.bool_ and np.dtype(like).kind in "iu" else
            rng.integers(0, 2, shape) if np.dtype(like).kind == "b" else rng.integers(-12, 13, shape) / 4).astype(like)


def nonzero(rng, shape, like):
    found = numbers(rng, shape, like)
    return np.where(found == 0, like(3), found).astype(like)


def short(value):
    value = np.asarray(value, dtype=float)
    return bool((value * 64 == np.round(value * 64)).all() and abs(value).max() < 16)


def written(seed, dtype, body):
    """The writer that has written what `body` tells it to."""
    writer = Writer(seed, dtype)

    @mb.program(input_specs=[mb.TensorSpec(shape=(1,))], opset_version=coremltools().target.iOS18)
    def program(x):
        body(writer)
        return mb.identity(x=x)
    return writer


def random_program(seed, dtype, length):
    def body(writer):
        for shape in ((2, 3, 4), (4, 6), (1, 4, 2, 3)):
            writer.source(numbers(writer.rng, shape, FLOATS[dtype][0]))
        writer.source(numbers(writer.rng, (2, 3, 4), np.int32))
        for _ in range(20 * length):
            if len(writer.steps) == length:
                break
            try:
                writer.step()
            except (StopIteration, ValueError, TypeError, IndexError, AttributeError):
                continue                        # nothing fits, or coremltools refuses it or cannot infer it
    with quiet(), np.errstate(all="ignore"):
        return written(seed, dtype, body)


def rebuild(steps, sources, dtype):
    """The same program with inputs instead of constants, every value an output."""
    specs = [mb.TensorSpec(shape=s.shape, dtype=types.int32 if s.dtype == np.int32 else FLOATS[dtype][1])
             for s in sources]

    def body(*values):
        values = list(values)
        for kind, parameters, _, _ in steps:
            made = getattr(mb, kind)(**resolve(parameters, values))
            values += list(made) if isinstance(made, (list, tuple)) else [made]
        names[:] = [v.name for v in values]
        return tuple(values[len(sources):])
    names, arguments = [], [f"x{i}" for i in range(len(sources))]       # mb.program counts the named parameters
    named = eval(f"lambda {', '.join(arguments)}: body({', '.join(arguments)})", {"body": body})
    program = mb.program(input_specs=specs, opset_version=coremltools().target.iOS18)(named)
    function = _function("main", program.functions["main"], SimpleNamespace(input=[]))
    return Evaluator(Package(Path("program"), {"main": function}, 0),
                     mode="fp16" if dtype == "fp16" else "double"), names


def declared(value):
    """(shape, kind of type) as the evaluator gives it."""
    return tuple(value.shape), "f" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")


def compare(writer):
    with quiet(), np.errstate(all="ignore"):
        evaluate, names = rebuild(writer.steps, writer.sources, writer.dtype)
    out = evaluate(dict(zip(names, writer.sources)))
    for kind, parameters, start, n in writer.steps:
        for at in range(start, start + n):
            expected, found = np.asarray(writer.vars[at].val), out[names[at]]
            said = f"{writer.seed}: {kind} {parameters}"
            assert declared(found) == (expected.shape, "f" if expected.dtype.kind == "f" else str(expected.dtype)), said
            tolerance = FLOATS[writer.dtype][2] if expected.dtype.kind == "f" else 0
            difference = abs(found.double().numpy() - expected.astype(float))
            assert (difference <= tolerance * max(1.0, abs(expected.astype(float)).max())).all(), \
                f"{said}: {found.tolist()} against {expected.tolist()}"


@pytest.mark.stress
def test_random_programs():
    seen, programs = set(), depth(100, 2000)
    for seed in range(programs):
        writer = random_program(seed, ("fp32", "fp32", "fp16")[seed % 3], 2 + seed % 6)
        compare(writer)
        seen |= {kind for kind, *_ in writer.steps}
    assert len(seen) > 60 and (programs < 2000 or seen == set(OPS) - NOT_INFERRED)


#: what was silently wrong once, and its relatives: operations on the float value 0 or the int32 value 1, both [2, 3, 4]
FAULTS = [
    ("slice_by_size", dict(x=0, begin=[0, -2, -3], size=[1, 1, 2])),
    ("slice_by_size", dict(x=0, begin=[-1, 1, 0], size=[1, -1, -1])),
    ("slice_by_index", dict(x=0, begin=[0, 2, 0], end=[2, 3, 4], begin_mask=[False, True, False],
                            squeeze_mask=[False, True, False])),
    ("slice_by_index", dict(x=0, begin=[-1, 0, 0], end=[0, 3, 4], squeeze_mask=[True, False, False])),
    ("slice_by_index", dict(x=0, begin=[1, 2, 3], end=[0, 0, 0], stride=[-1, -1, -2])),
    ("slice_by_index", dict(x=0, begin=[0, 2, 0], end=[2, 0, 4], stride=[1, -1, 1], end_mask=[False, True, False])),
    ("real_div", dict(x=1, y=np.full((2, 3, 4), -2, np.int32))), ("real_div", dict(x=1, y=np.int32(3))),
    ("mul", dict(x=1, y=np.int32(2 ** 30))), ("reduce_mean", dict(x=1, axes=[1])), ("reduce_sum", dict(x=1)),
    ("reduce_l2_norm", dict(x=1, axes=[0, 2])), ("reduce_log_sum_exp", dict(x=1, axes=[0])),
    *[("cast", dict(x=x, dtype=to)) for x in (0, 1) for to in ("int8", "uint8", "int16", "uint16", "int32", "bool")],
    ("cast", dict(x=1, dtype="fp16")), ("exp2", dict(x=1)), ("reshape", dict(x=0, shape=[0, -1])),
    ("reshape", dict(x=0, shape=[0, 1, -1, 0])), ("concat", dict(values=(np.int32(3), np.int32(-5)), axis=0))]


@pytest.mark.parametrize("kind, parameters", FAULTS, ids=[f"{kind} {i}" for i, (kind, _) in enumerate(FAULTS)])
def test_what_was_silently_wrong(kind, parameters):
    def body(writer):
        writer.source(np.linspace(-300, 400, 24, dtype=np.float32).reshape(2, 3, 4))
        writer.source(np.arange(-11, 13, dtype=np.int32).reshape(2, 3, 4))
        given = {name: Ref(value) if name == "x" else value for name, value in parameters.items()}
        assert writer.add(kind, top=np.inf, **given)
    compare(written(0, "fp32", body))
