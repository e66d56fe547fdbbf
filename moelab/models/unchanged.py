"""Whether modules are still what a kernel that replaces them was made of, down to weights, hooks
and settings.

This is asked for every token, when a model's weights have just passed through the processor's
caches: what Python keeps in dicts is looked at again only if a dict was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from moelab.models import compat
from moelab.store import packed


def watched() -> bool:
    """Whether this call is to be differentiated or traced, of which a kernel knows nothing."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


class FusedModule:
    """A kernel in place of a module's forward.

    module : whose forward it replaces.
    parts : what must be unchanged for the kernel to run.
    inner : the kernels of parts of the module that come with this one.
    """

    def __init__(self, module: nn.Module, parts: Unchanged) -> None:
        self.module = module
        self.parts = parts
        self.inner: list[FusedModule] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y = self.fused(*args, **kwargs)
        return self.own(*args, **kwargs) if y is None else y

    def fused(self, *args: Any, **kwargs: Any) -> Any:
        """What the kernel makes of a call; None where it is not for the kernel."""
        raise NotImplementedError

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's class makes of a call."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def free(self) -> bool:
        """Whether a kernel may run instead of the module now."""
        return not watched() and self.parts.listeners() is not None


@dataclass(eq=False)
class Listener:
    """A hook that only listens: who computes a module's work without calling the module calls
    `heard` in place of the hook.

    heard : (ids [1, K], weights [1, K]) of a hook on a router or experts
        (`moelab.models.seam.MoELayer.listen`), (r [1, 1, H]) of one on a norm
        (`moelab.speculate.execution`).
    """

    heard: Callable[..., None]
    hook: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.hook(*args)


class Unchanged:
    """Modules with the children, weights, settings, classes and forwards that they had when this
    was last sealed.

    modules : on which no hook may lie.
    called : modules of which only the forward was replaced, so that their hooks run as ever.
    heard : modules on which no hooks may lie but `Listener`s."""

    def __init__(
        self,
        modules: Iterable[nn.Module] = (),
        called: Iterable[nn.Module] = (),
        heard: Iterable[nn.Module] = (),
    ) -> None:
        self.silent = list(modules)
        self.heard = list(heard)
        self.modules = [*self.silent, *self.heard, *called]
        self.seal()

    def seal(self) -> None:
        """What the modules are now is what they shall be."""
        classes = map(type, self.modules)
        self.classes = [*dict.fromkeys(getattr(cls, "stock", cls) for cls in classes)]
        settings, held = self._tables()
        self.settings = [dict(table) for table in settings]
        tensors = [tensor for table in held for tensor in table.values()]
        self.ids = [*map(id, tensors)]
        self.weights = [tensor for tensor in tensors if tensor is not None]
        self.state = self._state()
        #: versions of what is looked at, the dicts among that, and what `_found` found
        self.seen: tuple = None, [], None

    def _tables(self) -> tuple[list[dict], list[dict]]:
        """Attributes and children of all modules; their weights."""
        modules = self.modules
        return (
            [*map(vars, modules), *map(compat.children_of, modules)],
            [*map(compat.parameters_of, modules), *map(compat.buffers_of, modules)],
        )

    def _state(self) -> list[list]:
        """What is in no dict of theirs."""
        weights = self.weights
        with packed.untouched():  # packed weights would answer slowly
            return [
                list(map(type, self.modules)),
                [cls.forward for cls in self.classes],
                list(map(Tensor.data_ptr, weights)),
                list(map(Tensor.is_contiguous, weights)),
                [w.dtype for w in weights],
            ]

    def listeners(self) -> list[tuple[int, Callable[..., None]]] | None:
        """(which of `heard`, `Listener.heard`) of each hook there. None if anything was changed, or
        if there is any other hook on one of the modules, or a global one."""
        if compat.hooks_on_all() or self._state() != self.state:
            return None
        versions, dicts, found = self.seen
        if versions != [compat.hooks_made(), *map(compat.version, dicts)]:
            settings, held = self._tables()
            hooks = [of for module in self.modules for of in compat.hooks_on(module)]
            # What is empty matters with another forward only, or with a hook more.
            dicts = [table for table in settings + held + hooks if table]
            versions = [compat.hooks_made(), *map(compat.version, dicts)]
            found = self._found(settings, held)
            self.seen = versions, dicts, found
        return found

    def _found(self, settings: list[dict], held: list[dict]) -> list | None:
        ids = [id(tensor) for table in held for tensor in table.values()]
        if ids != self.ids or any(any(compat.hooks_on(module)) for module in self.silent):
            return None
        try:
            if settings != self.settings:
                return None
        except (
            RuntimeError,
            ValueError,
        ):  # an attribute is another tensor, which does not just compare
            return None
        found = []
        for i, module in enumerate(self.heard):
            for hook in chain(*map(dict.values, compat.hooks_on(module))):
                if not isinstance(hook, Listener):
                    return None
                found.append((i, hook.heard))
        return found


def forward(module: nn.Module) -> Any:
    """What was put on a module in place of its class's forward; None for nothing."""
    return vars(module).get("forward")
