"""The registry of everything that is chosen by name: executors, cache policies, predictors, codecs,
few-bit formats, …

    moelab.names("executor")                → the names of all executors
    moelab.describe("executor")             → name → (what it is for, "use" or "teaching")
    make("cache", "lru")                    → an instance, made with options

Each kind is a dictionary, name → `Entry`, in the package that implements it; a new technique is one
line there."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from inspect import Parameter, isfunction, signature
from operator import or_
from typing import Any, NamedTuple

from moelab.base.files import beside
from moelab.base.schema import typed
from moelab.base.table import text_table


class Entry(NamedTuple):
    home: Any  # "module:attribute", imported when it is made, or the class or function itself
    purpose: Any  # in a phrase, or what returns it
    teaching: bool = False  # whether it is there to explain or compare rather than for use


#: kind → "module:dictionary"
KINDS = beside(__file__)


def entries(kind: str) -> dict[str, Entry]:
    """Name → `Entry` of a kind; a class that is registered without one is described by the first
    paragraph of its docstring. ValueError: an unknown kind."""
    require("kind", kind, KINDS)
    module, _, name = KINDS[kind].partition(":")
    known = getattr(import_module(module), name)
    return {
        key: entry
        if isinstance(entry, Entry)
        else Entry(entry, " ".join((entry.__doc__ or "").partition("\n\n")[0].split()).rstrip("."))
        for key, entry in known.items()
    }


def names(kind: str) -> list[str]:
    """The names of a kind, in the order of its dictionary."""
    return list(entries(kind))


class Described(dict[str, tuple[str, str]]):
    """Name → (what it is for, "use" or "teaching"); its repr is a table."""

    def __repr__(self) -> str:
        return text_table(
            ["name", "what it is for", "of"], [(name, *told) for name, told in self.items()]
        )


def describe(kind: str, among: Iterable[str] | None = None) -> Described:
    """Name → (what it is for, "use" or "teaching"), of all or of some names."""
    return Described(
        {
            name: (
                entry.purpose() if callable(entry.purpose) else entry.purpose,
                "teaching" if entry.teaching else "use",
            )
            for name, entry in entries(kind).items()
            if among is None or name in among
        }
    )


def require(what: str, name: str, known: Iterable[str]) -> None:
    """ValueError, with the known names and the most similar one, unless `name` is among them."""
    if name not in (known := list(known)):
        raise ValueError(
            f"there is no {what} {name!r}.{near(name, known)} There are: "
            f"{', '.join(known) or 'none'}"
        )


def near(name: str, known: Iterable[str]) -> str:
    """ " Did you mean …?" with the most similar known name; "" if none is similar."""
    lower = {one.lower(): one for one in known}
    return "".join(
        f" Did you mean {lower[one]!r}?" for one in get_close_matches(str(name).lower(), lower, n=1)
    )


def like(kind: str, text: Any) -> str | None:
    """The name of a kind that equals a text, ignoring case; None if there is none."""
    return next((name for name in names(kind) if name.lower() == str(text).lower()), None)


def find(kind: str, name: str) -> Any:
    """What is registered under a name: a class or a function. ValueError: there is none."""
    known = entries(kind)
    require(kind, name, known)
    if not isinstance(home := known[name].home, str):
        return home
    module, _, attribute = home.partition(":")
    return getattr(import_module(module), attribute)


def make(kind: str, name: str, *positional: Any, **options: Any) -> Any:
    """An object of the class that is registered under a name, made with its options; a function as
    it is.

    Raises ValueError: an unknown name, or other options.
    """
    made = find(kind, name)
    if isfunction(made):
        if positional or options:
            raise ValueError(f"{kind} {name!r} is a function, so it takes no options")
        return made
    takes = signature(made)
    try:
        takes.bind(*positional, **options)
        for option, value in options.items():
            if option in takes.parameters:
                _check(option, value, str(takes.parameters[option].annotation))
    except (TypeError, ValueError) as error:
        plain = [one.replace(annotation=one.empty) for one in takes.parameters.values()]
        listed = ", ".join(map(str, plain)) or "no options"
        raise ValueError(f"{kind} {name!r}: {error}; it takes {listed}") from None
    return made(*positional, **options)


def _check(option: str, value: Any, annotation: str) -> None:
    """ValueError unless a value is what an annotation of plain types says; a text is none of
    others."""
    plain = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}
    wanted = annotation.split(" | ")
    if {*wanted} <= plain.keys():
        typed(value, reduce(or_, (plain[one] for one in wanted)), option)
    elif isinstance(value, str) and annotation not in ("Any", str(Parameter.empty)):
        raise ValueError(f"{option} is {value!r}; it must be {annotation}")
