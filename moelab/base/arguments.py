"""Types of command-line options, which refuse invalid values with a message that says what is valid.

parser.add_argument("--tokens", type=whole(1)); parser.add_argument("--budgets",
type=several(number(above=0)))"""

from __future__ import annotations

import math
import re
from argparse import PARSER, REMAINDER, Action, ArgumentError, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from moelab.base import registry
from moelab.base.files import beside, writable
from moelab.base.records import Record
from moelab.base.registry import require


class Parser(ArgumentParser):
    """An `ArgumentParser` whose errors are one line and suggest similar names; choices ignore
    case."""

    def add_argument(self, *names: Any, **options: Any) -> Action:
        """As argparse's; `choices` are read by `one_of`."""
        if choices := list(options.pop("choices", ())):
            shown = {"metavar": f"{{{','.join(choices)}}}"} if names[0].startswith("-") else {}
            options = shown | {"type": one_of(choices)} | options
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but unknown arguments are an error already in a subcommand's parser, whose
        options can be suggested."""
        namespace, left = super().parse_known_args(args, namespace)
        if left:
            option = left[0].partition("=")[0]
            close = get_close_matches(
                option, re.findall(r"--[a-z][\w-]*", self.format_help()), 1, 0.7
            )
            hint = f"; did you mean {close[0]}?" if close and option.startswith("-") else ""
            self.error(f"nothing here takes {' '.join(left)}{hint}")
        return namespace, left

    def _check_value(self, action: Action, value: Any) -> None:
        """As argparse's, with suggestions, for subcommands."""
        try:
            require("command", value, action.choices or [value])
        except ValueError as error:
            raise ArgumentError(action, str(error)) from None

    def _get_values(self, action: Action, texts: list[str]) -> Any:
        """As argparse's, but an empty text is refused: as a path it would be the working folder."""
        if "" in texts and action.nargs not in (PARSER, REMAINDER):
            raise ArgumentError(action, "it is empty; give a value, or leave it out")
        return super()._get_values(action, texts)

    def error(self, message: str) -> NoReturn:
        """End with one line and status 2."""
        self.exit(2, f"moelab: {message} ({self.prog} --help)\n")


def described(module: str, *sections: str) -> Callable[[Any], list[Action]]:
    """A function that adds to a parser, or to a group of it, the arguments which the TOML file beside
    a module, `__file__`, describes, in all of its sections or in these: its names → what argparse
    takes. What is "module:name" stands for that object, and further words for a `type` or `choices`:

        least = 1                a whole number of at least so much
        above = 0, most = 1      a number
        several = true           values with commas between them
        names = "codec"          one of the names of a kind of the registry"""

    def add(parser: Any) -> list[Action]:
        content = beside(module)
        return [
            parser.add_argument(*flags.split(), **argument(of))
            for section in sections or content
            for flags, of in content[section].items()
        ]

    return add


def argument(told: Record) -> Record:
    """What argparse takes, of a description as in `described`."""
    found = {
        key: resolve_name(of)
        if key in ("type", "choices", "default", "action") and ":" in str(of)
        else of
        for key, of in told.items()
    }
    if limits := {key: found.pop(key) for key in ("above", "most") if key in found}:
        found["type"] = number(**limits)
    if "least" in found:
        found["type"] = whole(found.pop("least"))
    if "names" in found:
        found["choices"] = registry.names(found.pop("names"))
    if found.pop("several", False):
        found["type"] = several(found["type"])
    return found


def output(text: str) -> Path:
    """Reads the path of an output file; refuses one that cannot be written before work begins."""
    try:
        return writable(text)
    except (ValueError, OSError) as error:
        raise ArgumentTypeError(getattr(error, "strerror", None) or str(error)) from None


def whole(least: int = 0) -> Callable[[str], int]:
    """Reads a whole number of at least `least`, of 64 bits."""

    def read(text: str) -> int:
        try:
            if 2**63 > (value := int(text)) >= least:  # what libraries take
                return value
        except ValueError:
            pass
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")

    return read


def number(
    least: float = -math.inf, *, above: float = -math.inf, most: float = math.inf
) -> Callable[[str], float]:
    """Reads a finite number: at least `least`, more than `above`, at most `most`."""
    limits = {"at least": least, "above": above, "at most": most}
    said = [f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit)]

    def read(text: str) -> float:
        try:
            value = float(text)
            if math.isfinite(value) and value >= least and above < value <= most:
                return value
        except ValueError:
            pass
        raise ArgumentTypeError(f"{text!r} is not a finite number {' and '.join(said)}")

    return read


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Reads one of `names`, in any case."""
    names = list(names)
    known = {name.lower(): name for name in names}

    def read(text: str) -> str:
        name = text if text in names else known.get(text.lower(), text)
        return checked(lambda of: require("choice", of, names))(name)

    return read


def checked(require: Callable[[str], Any]) -> Callable[[str], str]:
    """Reads what `require` raises no ValueError for."""

    def read(text: str) -> str:
        try:
            require(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None
        return text

    return read


def folder(text: str) -> Path:
    """Reads the path of a folder that is there."""
    if not text or not Path(text).is_dir():
        raise ArgumentTypeError(f"{text!r} is no folder")
    return Path(text)


def several(read: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """Reads values with commas between them, each by `read`; at least one."""

    def read_all(text: str) -> list[Any]:
        if parts := [part.strip() for part in text.split(",") if part.strip()]:
            return [read(part) for part in parts]
        raise ArgumentTypeError(f"{text!r} names nothing; write values with commas between them")

    return read_all
