"""Types of command-line options: what cannot be used is refused where it is read, and the message says what can.

    parser.add_argument("--tokens", type=whole(1)); parser.add_argument("--budgets", type=several(number(above=0)))
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moelab.files import writable


def output(text: str) -> Path:
    """Reads the name of a file that is to be written, and refuses it before there is anything to write."""
    try:
        return writable(text)
    except (ValueError, OSError) as error:
        raise ArgumentTypeError(getattr(error, "strerror", None) or str(error)) from None


def whole(least: int = 0) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            if (value := int(text)) >= least:
                return value
        except ValueError:
            pass
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return read


def number(least: float = -math.inf, *, above: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Reads a finite number: at least `least`, more than `above`, at most `most`."""
    limits = [f"at least {least:g}" if least > -math.inf else "", f"above {above:g}" if above > -math.inf else "",
              f"at most {most:g}" if most < math.inf else ""]

    def read(text: str) -> float:
        try:
            value = float(text)
            if math.isfinite(value) and value >= least and above < value <= most:
                return value
        except ValueError:
            pass
        raise ArgumentTypeError(f"{text!r} is not a finite number " + " and ".join(filter(None, limits)))
    return read


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Reads one of `names`, within `several`; for one word alone use argparse's `choices`."""
    names = list(names)

    def read(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text
    return read


def several(read: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """Reads values with commas between them, each by `read`; at least one."""
    def read_all(text: str) -> list[Any]:
        if parts := [part.strip() for part in text.split(",") if part.strip()]:
            return [read(part) for part in parts]
        raise ArgumentTypeError(f"{text!r} names nothing; write values with commas between them")
    return read_all
