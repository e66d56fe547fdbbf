"""Whatever is put on a model and taken off again: hooks, methods, classes, executors, sources.

Others patch the same model (accelerate, a notebook), before, above and between ours. So each owner keeps a `Patches`,
whose end takes off what this owner put on, in any order with all others.

    hook    torch's own hooks
    wrap    a method (`forward`, `generate`): calls go through a link that stays valid for whoever has taken hold of
            it, and passes on to what lies beneath once nothing of ours is left in it
    put     a value: the topmost shows            dress    a class made of the class beneath

All state is kept on the object itself. What an owner that is a string ("plug") has put on belongs to the model, and a
copy (deepcopy, pickle) has it, too; a copy has nothing of what a `Patches` put on.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

STACKS = "_patched"             # the attribute under which an object keeps what was put on it
HELD = "_old_forward"           # where accelerate's hooks keep a module's forward, and call it
_lock = threading.RLock()


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):             # a thread that a child does not have may have taken it
    os.register_at_fork(after_in_child=_new_lock)


class Absent:
    """Stands for an attribute that an object does not have itself."""


class Patches(ExitStack):
    """What one owner has put on; taken off by `close`, or at the end of a `with` block; `pop_all` hands it on."""

    def hook(self, register: Callable[..., Any], function: Callable[..., Any], **options: Any) -> None:
        """`register(function, **options)`, where `register` is one of a module's `register_…_hook`."""
        hook = _Hook(function)
        self.callback(hook.remove)
        hook.handle = register(hook, **options)

    def wrap(self, target: Any, name: str, around: Callable[[Callable], Callable]) -> None:
        """Let `around(below)` be called for the method `name`, where `below` is what would be called without it."""
        with _lock:
            layer = (around,)                           # of its own identity: the same `around` may be put on twice
            link = _link(target, name)
            self.callback(link.remove, layer)
            link.set((*link.layers, layer))
            vars(target)[_place(target, name)] = link


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
    """Stands in an object in place of one of its methods; calls the topmost layer, or else what it found there."""

    __slots__ = ("target", "name", "below", "layers", "call")

    def __init__(self, target: Any, name: str, below: Any) -> None:
        self.target, self.name, self.below = weakref.ref(target), name, below
        self.set(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def set(self, layers: tuple) -> None:
        own = self.below is None or getattr(self.below, "__self__", None) is self.target()
        call = partial(_of_class, self.target, self.name) if own else self.below
        for around, in layers:
            call = around(call)
        self.layers, self.call = layers, call

    def remove(self, layer: tuple) -> None:
        with _lock:
            self.set(tuple(other for other in self.layers if other is not layer))
            if (target := self.target()) is not None:
                _clear(target, self.name)

    @property
    def __wrapped__(self) -> Callable[..., Any]:                # `inspect.signature` follows it
        return getattr(type(self.target()), self.name).__get__(self.target())

    def __reduce__(self) -> tuple:
        return _copied, (self.target(), self.name, self.below)


def _of_class(target: weakref.ref, name: str, *args: Any, **kwargs: Any) -> Any:
    """The class's own method, as the class is when it is called."""
    return getattr(type(target()), name)(target(), *args, **kwargs)


def _copied(target: Any, name: str, below: Any) -> Any:
    own = below is None or getattr(below, "__self__", None) is target
    return MethodType(getattr(type(target), name), target) if own else below


def _place(target: Any, name: str) -> str:
    """Where a method is put: beneath accelerate's hooks, which would throw away what lies on them."""
    return HELD if name == "forward" and HELD in vars(target) else name


def _link(target: Any, name: str) -> _Link:
    """The link in the place of a method, or one to be put there."""
    there = vars(target).get(_place(target, name))
    return there if _is_link(there, target) else _Link(target, name, there)


def _is_link(value: Any, target: Any) -> bool:
    return type(value) is _Link and value.target() is target


def _clear(target: Any, name: str) -> None:
    """Take off links that do nothing any more; one beneath something of others passes on."""
    held = vars(target)
    for place in () if name == "forward" and STACKS in held else (name, HELD):
        while _is_link(top := held.get(place), target) and top.name == name and not top.layers:
            if top.below is not None:
                held[place] = top.below
            elif place == name:
                del held[place]
            else:                                               # accelerate came after us, and calls what is here
                held[place] = MethodType(getattr(type(target), name), target)


def bare(module: Any) -> bool:
    """Whether a module's forward is the class's own, with nothing put on it by anybody."""
    return getattr(module.forward, "__func__", None) is type(module).forward


class _Stack:
    """The values of one attribute: what was there first, what shows, and (owner, make) of all that was put on."""

    def __init__(self, base: Any) -> None:
        self.base = self.shown = base
        self.layers: list[tuple[Any, Callable[[Any], Any]]] = []

    def found(self, now: Any) -> None:
        """What shows was assigned by somebody else: that lies on top, and nobody here takes it off."""
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
        value = stack.top(target, name, layers)                 # if this fails, nothing has been changed
        vars(target).setdefault(STACKS, {})[name] = stack
        stack.layers, stack.shown = layers, value
        _write(target, name, value)


def dress(owner: Any, target: Any, make: Callable[[type], type]) -> None:
    """Let an object be of the class `make(its class)`, which must be `dressed`; `make(that)` must be that.

    Raises ValueError: somebody has given the object a forward of its own, which the new class's could not replace.
    """
    with _lock:
        if make(type(target)) is type(target) and "__class__" not in vars(target).get(STACKS, {}):
            return
        there = vars(target).get(place := _place(target, "forward"))
        if there is not None and not _is_link(there, target) and getattr(there, "__self__", None) is not target:
            raise ValueError(f"this {type(target).__name__} has a forward of its own ({there!r:.80}), which does not "
                             f"ask the class's: take it off, put this on, and then that again")
        change(owner, target, "__class__", make)
        if there is not None:
            vars(target)[place] = _link(target, "forward")      # goes to the class's forward, whatever that is


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
        if not stacks and STACKS in vars(target):
            del vars(target)[STACKS]
            _clear(target, "forward")


def _read(target: Any, name: str) -> Any:
    return type(target) if name == "__class__" else vars(target).get(name, Absent)


def _write(target: Any, name: str, value: Any) -> None:
    if name == "__class__":
        target.__class__ = value
    elif value is Absent:
        vars(target).pop(name, None)
    else:
        vars(target)[name] = value          # past `Module.__setattr__`, which would take a module in as a child


class Dressed:
    """Mixin of the classes that `dress` makes: a copy has what lasts."""

    def __reduce_ex__(self, _: Any) -> tuple:
        with _lock:
            state, cls, stacks = dict(vars(self)), type(self), {}
            makes: list[Callable[[type], type]] = []
            for name, old in state.pop(STACKS, {}).items():
                old.found(_read(self, name))
                stack = _Stack(old.base)
                stack.layers = [layer for layer in old.layers if layer[0] is None or isinstance(layer[0], str)]
                stack.shown = stack.top(self, name, stack.layers)
                if any(owner is not None for owner, _ in stack.layers):
                    stacks[name] = stack
                if name == "__class__":
                    cls, makes = stack.base, [make for _, make in stack.layers]
                elif stack.shown is Absent:
                    state.pop(name, None)
                else:
                    state[name] = stack.shown
            return _of, (cls, makes), state | ({STACKS: stacks} if stacks else {})


def _of(cls: type, makes: list[Callable[[type], type]]) -> Any:
    for make in makes:
        cls = make(cls)
    return cls.__new__(cls)
