"""Validation of what files contain: type annotations describe it, `typed` checks it.

    typed(json, MoESpec)                                  a dataclass, or ValueError: "K is 'x', …"
    typed(json, dict[str, list[float]])                   containers, unions, Literal, TypedDict, …
    checked(tensors, "counts", ("int64",), (2, L, E), 0)  a tensor's dtype, shape and range

Numbers are finite and fit 64 bits; a bool is not a number. A TypedDict may have further keys, as a
record may come from a later version; a dataclass or a NamedTuple may not."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from inspect import signature
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)


class Must(NamedTuple):
    """A condition in `Annotated`: a predicate, and its words for the error."""

    test: Callable[[Any], bool]
    words: str


AtLeast0 = Must(lambda number: number >= 0, "0 or more")
Count = Annotated[int, AtLeast0]
Size = Annotated[int, Must(lambda number: number >= 1, "1 or more")]
Amount = Annotated[float, AtLeast0]
Positive = Annotated[float, Must(lambda number: number > 0, "above 0")]
FLOATS = ("float32", "bfloat16", "float16", "float64")
#: JSON types in error messages
WORDS = {
    int: "a whole number of 64 bits",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    NoneType: "null",
}
LARGEST = sys.float_info.max


@contextmanager
def naming(path: str | Path, what: str, remedy: str) -> Iterator[None]:
    """Errors of the block name the file: "PATH is no readable `what`: …; `remedy` makes another".

    Raises FileNotFoundError: there is no such file. ValueError: instead of any other error of the
    block, except missing imports and undefined names, which are not the file's fault.
    """
    try:
        yield
    except (ImportError, NameError):  # no fault of the file
        raise
    except Exception as error:  # parsers have dozens of kinds for a file that is not theirs
        if isinstance(error, FileNotFoundError) and not Path(path).is_file():
            raise FileNotFoundError(f"no {what} at {path}; {remedy} makes one") from None
        words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        words = " ".join(words.split())[:1000]
        raise ValueError(
            f"{path} is no readable {what}: {words}; {remedy} makes another"
        ) from error


@contextmanager
def blamed(
    file: Path, what: str, passing: type[Exception] | tuple = (), raising: type = ValueError
) -> Iterator[None]:
    """Turn whatever a library raises about a damaged or foreign file into one error that names the
    file, `raising`.

    passing : errors that are left as they are, as are those of the system (OSError with errno)."""
    try:
        yield
    except passing:
        raise
    except BaseException as error:  # a panic of a Rust extension is no Exception
        foreign = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not foreign or isinstance(error, OSError) and error.errno:
            raise
        cause = error.__cause__ or error
        text = " ".join(str(cause)[:1000].split())
        raise raising(f"{file}: {what} ({type(cause).__name__}: {text})") from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON in UTF-8. ValueError also for what `json` accepts: duplicate keys, NaN, infinities
    and unpaired surrogates; and for nesting deeper than Python's recursion limit."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"a key is there twice, among {', '.join(found)[:200]}")
        return found

    def number(word: str) -> None:
        raise ValueError(f"{word} is no number of JSON")

    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        found = json.loads(text, object_pairs_hook=unique, parse_constant=number)
        if "\\ud" in text.lower():  # escaped, which half of a character can be by itself
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def typed(value: Any, annotation: Any, at: str = "it") -> Any:
    """Convert a value from JSON or TOML to what `annotation` says. ValueError: it does not fit; the
    message names the part, beginning with `at`."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if annotation is Any:
        return value
    if origin is Annotated:
        found = typed(value, parts[0], at)
        for must in parts[1:]:
            _require(must.test(found), found, must.words, at)
        return found
    if origin is Literal:
        _require(value in parts, value, f"one of {', '.join(parts)}", at)
        return value
    if origin in (Union, UnionType):
        for part in parts[:-1]:
            with suppress(ValueError):
                return typed(value, part, at)
        return typed(value, parts[-1], at)
    kind = annotation if annotation in WORDS else origin
    if kind is None:
        return _made(value, annotation, at)
    _require(_fits(value, kind), value, WORDS[kind], at)
    if not parts:
        return value
    if kind is dict:
        return {key: typed(one, parts[1], _inside(at, key)) for key, one in value.items()}
    if kind is list or parts[-1] is Ellipsis:
        parts = parts[:1] * len(value)
    if len(value) != len(parts):
        raise ValueError(f"{at} has {len(value)} values; it must have {len(parts)}")
    return kind(typed(one, part, f"{at}[{i}]") for i, (one, part) in enumerate(zip(value, parts)))


def _require(ok: Any, value: Any, words: str, at: str) -> None:
    if not ok:
        raise ValueError(f"{at} is {_short(value)}; it must be {words}")


def _fits(value: Any, kind: type) -> bool:
    if type(value) is int and kind in (int, float):
        return -(2**63) <= value < 2**63
    if kind is float:
        return type(value) is float and math.isfinite(value)
    if kind is int:
        return False
    return isinstance(value, (list, tuple) if kind in (list, tuple) else kind)


@cache
def _hints(of: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """(name → annotation, required names) of a dataclass, a NamedTuple or a TypedDict."""
    hints = get_type_hints(of, include_extras=True)
    if is_typeddict(of):
        optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
        hints |= {name: get_args(hints[name])[0] for name in optional}
    else:
        taken = signature(of).parameters
        hints = {name: hints[name] for name in taken}
        optional = {name for name, one in taken.items() if one.default is not one.empty}
    return hints, frozenset(hints.keys() - optional)


def _made(value: Any, of: Any, at: str) -> Any:
    """Convert an object to the dataclass, NamedTuple or TypedDict `of`; a NamedTuple may also be a
    list in JSON."""
    names = getattr(of, "_fields", ())
    if isinstance(value, list) and len(value) == len(names):
        value = dict(zip(names, value))
    _require(isinstance(value, Mapping), value, "an object", at)
    hints, needed = _hints(of)
    if missing := needed - value.keys():
        raise ValueError(f"{at} lacks {', '.join(sorted(missing))}")
    unknown = value.keys() - hints.keys()
    if unknown and not is_typeddict(of):
        raise ValueError(
            f"{at} has unknown {', '.join(sorted(unknown))[:200]}; known are {', '.join(hints)}"
        )
    made = {key: typed(one, hints.get(key, Any), _inside(at, key)) for key, one in value.items()}
    if is_typeddict(of):
        return made
    try:
        return of(**made)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from error


def _inside(at: str, key: str) -> str:
    return str(key)[:80] if at == "it" else f"{at}.{str(key)[:80]}"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # of more digits than Python writes
        text = f"a {type(value).__name__}"
    return text if len(text) < 80 else f"{text[:76]} …"


def checked(
    tensors: Mapping[str, Any],
    name: str,
    dtypes: Sequence[str],
    shape: Sequence[int | None],
    low: float | None = -LARGEST,
    high: float = LARGEST,
) -> Any:
    """The tensor `name`. ValueError unless it exists, has one of these dtypes and this shape (None:
    any size), and its values are finite and from `low` to `high`; with `low` None, values are not
    read, as those of a memory-mapped file."""
    if name not in tensors:
        raise ValueError(f"it lacks the tensor {name}")
    tensor = tensors[name]
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = list(tensor.shape)
    same = len(found) == len(shape) and all(n in (None, m) for n, m in zip(shape, found))
    if dtype not in dtypes or not same:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} is {dtype} {found}; it must be {' or '.join(dtypes)} [{wanted}]")
    if low is not None and tensor.numel():
        least, most = float(tensor.min()), float(tensor.max())  # NaN where one is
        if not (low <= least and most <= high):
            raise ValueError(
                f"the values of {name} are from {least:g} to {most:g}; they must be finite, "
                f"from {low:g} to {high:g}"
            )
    return tensor
