"""Figures that are drawn when a test first asks for them, not while tests are collected."""

from types import FunctionType


class Lazily(dict):
    """name → figure, given as name → function that draws it."""

    def __getitem__(self, name):
        value = super().__getitem__(name)
        if isinstance(value, FunctionType):
            value = self[name] = value()
        return value
