"""Whether modules are still what a kernel that replaces them was made of, down to weights, hooks
and settings.

This is asked for every token: in a few passes over flat lists, as visiting each module would take
longer than what the kernel saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class Listener:
    """A hook that only listens: who computes a module's work without calling the module calls
    `heard` in place of the hook.

    heard : (ids [1, K], weights [1, K]) of a hook on a router or experts
        (`moelab.models.seam.MoELayer.listen`), (r [1, 1, H]) of one on a norm
        (`moelab.speculate.execution`).
    """

    def __init__(self, heard: Callable[..., None], hook: Callable[..., Any]) -> None:
        self.heard = heard
        self.hook = hook

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
        silent = list(modules)
        self.heard = list(heard)
        self.modules = [*silent, *self.heard, *called]
        self.hooks = [hooks for module in silent for hooks in compat.hooks_on(module)]
        self.tables = [*map(vars, self.modules), *map(compat.children_of, self.modules)]
        self.held = [
            table(module)
            for module in self.modules
            for table in (compat.parameters_of, compat.buffers_of)
        ]
        self.seal()

    def seal(self) -> None:
        """What the modules are now is what they shall be."""
        self.classes = [
            *{getattr(type(module), "stock", type(module)): None for module in self.modules}
        ]
        self.weights = [
            tensor for table in self.held for tensor in table.values() if tensor is not None
        ]
        self.known = [dict(table) for table in self.tables]
        self.state = self._state()

    def _state(self) -> list[list]:
        weights = self.weights
        ids = chain.from_iterable(map(dict.values, self.held))
        with packed.untouched():  # packed weights would answer slowly
            return [
                list(map(type, self.modules)),
                [cls.forward for cls in self.classes],
                list(map(id, ids)),
                list(map(Tensor.data_ptr, weights)),
                list(map(Tensor.is_contiguous, weights)),
                [w.dtype for w in weights],
            ]

    def listeners(self) -> list[tuple[int, Callable[..., None]]] | None:
        """(which of `heard`, `Listener.heard`) of each hook there. None if anything was changed, or
        if there is any other hook on one of the modules, or a global one."""
        if (
            compat.hooks_on_all()
            or any(self.hooks)
            or self._state() != self.state
            or not self._same_settings()
        ):
            return None
        found = [
            (i, hook)
            for i, module in enumerate(self.heard)
            for hooks in compat.hooks_on(module)
            for hook in hooks.values()
        ]
        if all(isinstance(hook, Listener) for _, hook in found):
            return [(i, hook.heard) for i, hook in found]
        return None

    def _same_settings(self) -> bool:
        try:
            return self.tables == self.known
        except (
            RuntimeError,
            ValueError,
        ):  # an attribute is another tensor or array, which do not just compare
            return False


def forward(module: nn.Module) -> Any:
    """What was put on a module in place of its class's forward; None for nothing."""
    return vars(module).get("forward")
