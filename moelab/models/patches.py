"""Changes of a live model that are undone in reverse order: hooks, attributes, methods, classes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any


def while_on(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook (module, args, kwargs) that does nothing once it was removed: if another thread removes
    it within a call, torch still calls it, without the keywords."""
    return lambda of, args, kwargs=None: None if kwargs is None else hook(of, args, kwargs)


class Patches(ExitStack):
    """What one owner has changed; undone by `close`, or at the end of a `with` block; `pop_all`
    hands it on."""

    def hook(
        self, register: Callable[..., Any], function: Callable[..., Any], **options: Any
    ) -> None:
        """`register(function, **options)`, where `register` is one of a module's
        `register_…_hook`."""
        self.callback(register(function, **options).remove)

    def put(self, target: Any, name: str, value: Any) -> None:
        """Give an object an attribute of its own."""
        held = vars(target)  # past `Module.__setattr__`, which would take a module in as a child
        if name in held:
            self.callback(held.__setitem__, name, held[name])
        else:
            self.callback(held.pop, name, None)
        held[name] = value

    def wrap(self, target: Any, name: str, around: Callable[[Callable], Callable]) -> None:
        """Replace a method by `around(the method)`; its signature stays."""
        below = getattr(target, name)
        self.put(target, name, wraps(below)(around(below)))

    def become(self, target: Any, cls: type) -> None:
        """Make an object an instance of another class.

        Raises ValueError: it has a forward of its own, which would hide the class's."""
        if cls is type(target):
            return
        if "forward" in vars(target):
            raise ValueError(
                f"this {type(target).__name__} has a forward of its own ({target.forward!r:.80}), which "
                f"does not ask the class's: take it off, put this on, and then that again"
            )
        self.callback(setattr, target, "__class__", type(target))
        target.__class__ = cls
