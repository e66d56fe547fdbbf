"""What a file may hold, said once by annotations, and checked where the file is loaded.

    typed(json, MoESpec)                                    a dataclass of what is in it, or ValueError: "K is 'x', …"
    typed(json, dict[str, list[float]])                     builtin containers, unions, Literal, TypedDict, NamedTuple
    checked(tensors, "counts", ("int64",), (2, L, E), 0)    a tensor's type, shape and range

Numbers are finite and fit 64 bits, and a truth value is no number. Of a TypedDict, further keys are
kept, since a record may come from a later version; a dataclass or a NamedTuple is made of the
values, so it refuses what it lacks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
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
    """In `Annotated`: what a value must be beside its type, and that in words."""

    test: Callable[[Any], bool]
    words: str


AtLeast0 = Must(lambda number: number >= 0, "0 or more")
Count, Size = (
    Annotated[int, AtLeast0],
    Annotated[int, Must(lambda number: number >= 1, "1 or more")],
)
Amount, Positive = (
    Annotated[float, AtLeast0],
    Annotated[float, Must(lambda number: number > 0, "above 0")],
)
FLOATS = ("float32", "bfloat16", "float16", "float64")
#: what people and messages call the types of JSON
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
#: levels of lists and objects in each other beyond which JSON is refused
DEEPEST = 64


@contextmanager
def naming(path: str | Path, what: str, remedy: str) -> Iterator[None]:
    """What shows that a file is not `what` is told with its name; `remedy` says how another is
    made.

    Raises FileNotFoundError: there is no such file. ValueError: for whatever else is raised inside.
    """
    try:
        yield
    except FileNotFoundError as error:
        if Path(path).is_file():  # another one, which belongs to it
            raise ValueError(f"{path} is no whole {what}: {error}") from error
        raise FileNotFoundError(f"no {what} at {path}; {remedy} makes one") from None
    except (ImportError, NameError):  # no fault of the file
        raise
    except (
        Exception
    ) as error:  # of any kind: parsers and libraries have dozens for a file that is not theirs
        words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is no readable {what}: {words}; {remedy} makes another"
        ) from error


def parse_json(text: str | bytes) -> Any:
    """JSON in UTF-8, without duplicate keys, NaN, infinities, half characters or endless nesting;
    ValueError for what is none."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"a key is there twice, among {', '.join(found)[:200]}")
        return found

    def number(word: str) -> None:
        raise ValueError(f"{word} is no number of JSON")

    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        found = json.loads(text, object_pairs_hook=unique, parse_constant=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [found]
    for _ in range(DEEPEST):
        level = [
            one
            for of in level
            if isinstance(of, (dict, list))
            for one in (of.values() if isinstance(of, dict) else of)
        ]
    if level:
        raise ValueError(f"it is nested in more than {DEEPEST} levels")
    if "\\ud" in text.lower():  # escaped, which half of a character can be by itself
        json.dumps(found, ensure_ascii=False).encode()
    return found


def typed(value: Any, annotation: Any, at: str = "it") -> Any:
    """What `annotation` says, made of a value from JSON or TOML; ValueError says `at` what place it
    is not."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin is Annotated:
        found = typed(value, parts[0], at)
        for must in parts[1:]:
            if not must.test(found):
                raise ValueError(f"{at} is {_short(value)}; it must be {must.words}")
        return found
    if origin is Literal:
        return typed(
            value, Annotated[str, Must(parts.__contains__, f"one of {', '.join(parts)}")], at
        )
    if origin in (Union, UnionType):
        for part in parts[:-1]:
            with suppress(ValueError):
                return typed(value, part, at)
        return typed(value, parts[-1], at)
    kind = annotation if annotation in WORDS else origin
    if kind is None:
        return _made(value, annotation, at)
    if not _fits(value, kind):
        raise ValueError(f"{at} is {_short(value)}; it must be {WORDS[kind]}")
    if kind is tuple and parts[-1] is not Ellipsis:
        if len(value) != len(parts):
            raise ValueError(f"{at} has {len(value)} values; it must have {len(parts)}")
        return tuple(
            typed(one, part, f"{at}[{i}]") for i, (one, part) in enumerate(zip(value, parts))
        )
    if kind in (list, tuple) and parts:
        return kind(typed(one, parts[0], f"{at}[{i}]") for i, one in enumerate(value))
    if kind is dict and parts:
        return {key: typed(one, parts[1], _inside(at, key)) for key, one in value.items()}
    return float(value) if kind is float and type(value) is int and abs(value) > 2**63 else value


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and -LARGEST <= value <= LARGEST
    if kind is int:
        return type(value) is int and -(2**63) <= value < 2**63
    return isinstance(value, (list, tuple) if kind in (list, tuple) else kind)


@cache
def _hints(of: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Annotations by name, and the names that must be there, of a dataclass, a NamedTuple or a
    TypedDict."""
    hints = get_type_hints(of, include_extras=True)
    if is_dataclass(of):
        hints = {field.name: hints[field.name] for field in fields(of) if field.init}
        there = {
            field.name
            for field in fields(of)
            if field.init and field.default is field.default_factory is MISSING
        }
    else:
        optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
        there = hints.keys() - (optional if is_typeddict(of) else of._field_defaults.keys())
    return {
        name: get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        for name, hint in hints.items()
    }, frozenset(there)


def _made(value: Any, of: Any, at: str) -> Any:
    """The dataclass, NamedTuple or TypedDict `of` an object's values; JSON may have a NamedTuple as
    a list."""
    if isinstance(value, list) and len(value) == len(names := getattr(of, "_fields", ())):
        value = dict(zip(names, value))
    if not isinstance(value, Mapping):
        raise ValueError(f"{at} is {_short(value)}; it must be an object")
    hints, needed = _hints(of)
    if missing := needed - value.keys():
        raise ValueError(f"{at} lacks {', '.join(sorted(missing))}")
    if is_typeddict(of):
        return {
            key: typed(one, hints.get(key, Any), _inside(at, key)) for key, one in value.items()
        }
    if unknown := value.keys() - hints.keys():
        raise ValueError(
            f"{at} has unknown {', '.join(sorted(unknown))[:200]}; known are {', '.join(hints)}"
        )
    parts = {key: typed(one, hints[key], _inside(at, key)) for key, one in value.items()}
    try:
        return of(**parts)
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
    """The tensor of that name; ValueError unless it is there, of one of these dtypes, of this shape
    (None: any number) and all of its values are finite and from `low` to `high`; with `low` None,
    as where it is mapped, they are not looked at."""
    if name not in tensors:
        raise ValueError(f"it lacks the tensor {name}")
    tensor = tensors[name]
    dtype, found = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if (
        dtype not in dtypes
        or len(found) != len(shape)
        or any(n not in (None, m) for n, m in zip(shape, found))
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} is {dtype} {found}; it must be {' or '.join(dtypes)} [{wanted}]")
    if low is not None and tensor.numel():
        least, most = (float(end) for end in (tensor.min(), tensor.max()))  # NaN where one is
        if not (low <= least and most <= high):
            said = "finite" if (low, high) == (-LARGEST, LARGEST) else f"from {low:g} to {high:g}"
            raise ValueError(
                f"the values of {name} are from {least:g} to {most:g}; they must be {said}"
            )
    return tensor
