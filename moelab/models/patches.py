"""Whatever is put on a model and taken off again: hooks, methods, classes, executors, sources.

Each owner keeps a `Patches`, whose end takes off what this owner put on; the owners of one model
may end in any order. What others put there later (accelerate, a notebook) stays; what they had put
there before is called from ours.

    hook    torch's own hooks
    wrap    a method (`forward`, `generate`): calls go through a link that stays valid for whoever has taken hold of
            it, and passes on to what lies beneath once it is taken off
    put     a value: the topmost shows            dress    a class made of the class beneath

All state is kept on the object itself. A copy (deepcopy, pickle) has no hooks and links, and what
is dressed cannot be copied. What an owner that is a string ("plug") has put on belongs to the
model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from moelab.forks import in_children

STACKS = "_patched"  # the attribute under which an object keeps what was put on it
_lock = threading.RLock()
in_children(
    _lock._at_fork_reinit
)  # as Python's own modules do: a thread that is not there may have it


class Absent:
    """Stands for an attribute that an object does not have itself."""


class Patches(ExitStack):
    """What one owner has put on; taken off by `close`, or at the end of a `with` block; `pop_all`
    hands it on."""

    def hook(
        self, register: Callable[..., Any], function: Callable[..., Any], **options: Any
    ) -> None:
        """`register(function, **options)`, where `register` is one of a module's
        `register_…_hook`."""
        hook = _Hook(function)
        self.callback(hook.remove)
        hook.handle = register(hook, **options)

    def wrap(self, target: Any, name: str, around: Callable[[Callable], Callable]) -> None:
        """Let `around(below)` be called for the method `name`, where `below` is what would be
        called without it."""
        with _lock:
            link = _Link(target, name, vars(target).get(name))
            self.callback(link.remove)
            link.call = around(link.below)
            vars(target)[name] = link


class _Hook:
    """A hook of torch's that a copy of its module has no part in."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.handle = function, None

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> tuple:
        return _Hook, (_nothing,)

    def remove(self) -> None:
        self.function = _nothing
        if self.handle is not None:
            self.handle.remove()


def _nothing(*_: Any) -> None:
    pass


class _Link:
    """Stands in an object in place of one of its methods, and of what it found there."""

    __slots__ = ("target", "name", "found", "below", "call")

    def __init__(self, target: Any, name: str, found: Any) -> None:
        self.target, self.name, self.found = weakref.ref(target), name, found
        self.below = self.call = (
            partial(_of_class, self.target, name) if of_class(target, found) else found
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def remove(self) -> None:
        """Pass on from now on; and go, where this is on top, with all beneath it that pass on."""
        with _lock:
            self.call, held = self.below, vars(self.target()) if self.target() is not None else {}
            while isinstance(top := held.get(self.name), _Link) and top.passes_on:
                if top.found is None:
                    del held[self.name]
                else:
                    held[self.name] = top.found

    @property
    def passes_on(self) -> bool:
        return self.call is self.below

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # `inspect.signature` follows it
        return getattr(type(self.target()), self.name).__get__(self.target())

    def __reduce__(self) -> tuple:  # a copy of the object has what would be without this
        found = None if of_class(self.target(), self.found) else self.found
        return _unlinked, (self.target(), self.name, found)


def _unlinked(target: Any, name: str, found: Any) -> Any:
    return MethodType(getattr(type(target), name), target) if found is None else found


def of_class(target: Any, found: Any) -> bool:
    """Whether what an object has in place of a method is none, or its class's own, as accelerate
    leaves it."""
    return found is None or getattr(found, "__self__", None) is target


def _of_class(target: weakref.ref, name: str, *args: Any, **kwargs: Any) -> Any:
    """The class's own method, as the class is when it is called."""
    return getattr(type(target()), name)(target(), *args, **kwargs)


def bare(module: Any) -> bool:
    """Whether a module's forward is the class's own, with nothing put on it by anybody."""
    there = vars(module).get("forward")
    while (
        isinstance(there, _Link) and there.passes_on
    ):  # left behind beneath hooks that have gone, too
        there = there.found
    return of_class(module, there)


class _Stack:
    """The values of one attribute: what was there first, what shows, and (owner, make) of all that
    was put on."""

    def __init__(self, base: Any) -> None:
        self.base = self.shown = base
        self.layers: list[tuple[Any, Callable[[Any], Any]]] = []

    def found(self, now: Any) -> None:
        """What shows was assigned by somebody else: that lies on top, and nobody here takes it
        off."""
        if now is not self.shown:
            self.layers.append((None, partial(_constant, now)))
            self.shown = now

    def top(self, target: Any, name: str, layers: list) -> Any:
        value = self.base
        for _, make in layers:
            value = make(getattr(type(target), name, Absent) if value is Absent else value)
        return value


def _constant(value: Any, _: Any) -> Any:
    return value


def put(owner: Any, target: Any, name: str, value: Any) -> None:
    """Let an attribute show `value`, in place of what the same owner has put there before."""
    change(owner, target, name, partial(_constant, value))


def change(owner: Any, target: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Let an attribute show `make(below)`, in place of what the same owner has put there before."""
    with _lock:
        if isinstance(owner, Patches):
            owner.callback(take, owner, target)
        now = _read(target, name)
        stack = vars(target).get(STACKS, {}).get(name) or _Stack(now)
        stack.found(now)
        layers = [layer for layer in stack.layers if layer[0] is not owner] + [(owner, make)]
        value = stack.top(target, name, layers)  # if this fails, nothing has been changed
        vars(target).setdefault(STACKS, {})[name] = stack
        stack.layers, stack.shown = layers, value
        _write(target, name, value)


def dress(owner: Any, target: Any, make: Callable[[type], type]) -> None:
    """Let an object be of the class `make(its class)`, which must be `dressed`; `make(that)` must
    be that.

    Raises ValueError: somebody has given the object a forward of its own, which the new class's
    could not replace."""
    with _lock:
        if make(type(target)) is type(target) and "__class__" not in vars(target).get(STACKS, {}):
            return
        there = vars(target).get("forward")
        if not (of_class(target, there) or isinstance(there, _Link)):
            raise ValueError(
                f"this {type(target).__name__} has a forward of its own ({there!r:.80}), which does not "
                f"ask the class's: take it off, put this on, and then that again"
            )
        change(owner, target, "__class__", make)
        if there is not None and of_class(target, there):
            del vars(target)["forward"]  # it is the class's, whatever that is


def take(owner: Any, target: Any) -> None:
    """Take off every value and class that an owner has put on an object."""
    with _lock:
        stacks = vars(target).get(STACKS, {})
        for name, stack in list(stacks.items()):
            stack.found(_read(target, name))
            stack.layers = [layer for layer in stack.layers if layer[0] is not owner]
            stack.shown = stack.top(target, name, stack.layers)
            _write(target, name, stack.shown)
            if all(other is None for other, _ in stack.layers):
                del stacks[name]
        if not stacks:
            vars(target).pop(STACKS, None)


def _read(target: Any, name: str) -> Any:
    return type(target) if name == "__class__" else vars(target).get(name, Absent)


def _write(target: Any, name: str, value: Any) -> None:
    if name == "__class__":
        target.__class__ = value
    elif value is Absent:
        vars(target).pop(name, None)
    else:
        vars(target)[name] = (
            value  # past `Module.__setattr__`, which would take a module in as a child
        )


class Dressed:
    """Mixin of the classes that `dress` makes."""

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            f"this {type(self).__name__} is opened or plugged by moelab, bound to hooks, threads, files "
            f"and memory, so it cannot be copied, pickled or sent to another process: open it again there"
        )
