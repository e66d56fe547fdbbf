"""Whether modules are still what a kernel that replaces them was made of.

This is asked for every token: in a few passes over flat lists, as visiting each module would take longer than what the
kernel saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from operator import itemgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as everywhere

_CHILDREN, _WEIGHTS = itemgetter("_modules"), itemgetter("_parameters")
_HOOKS = itemgetter("_forward_pre_hooks"), itemgetter("_forward_hooks")


class Unchanged:
    """Modules with the children, weights and forwards that they have now; a linear layer's forward may be another.

    heard : modules on which hooks may lie that only tell what the kernel knows: a layer's choices (`moelab.models.seam
        .MoELayer.listening`) or what its second norm reads (`moelab.speculate.execution`); on the others, none.
    """

    def __init__(self, modules: Iterable[nn.Module], heard: Iterable[nn.Module] = ()) -> None:
        modules, heard = list(modules), list(heard)
        self.silent, self.heard = [vars(module) for module in modules], [vars(module) for module in heard]
        self.parents, self.owners = [list(filter(has, self.silent + self.heard)) for has in (_CHILDREN, _WEIGHTS)]
        self.replaced = [vars(module) for module in modules + heard if type(module) is not nn.Linear]
        self.links = [own["forward"] for own in self.replaced if hasattr(own.get("forward"), "call")]
        children, *others = self._state()
        self.state = [[dict(held) for held in children], *others]

    def _state(self) -> list[list]:
        return [list(map(_CHILDREN, self.parents)), list(map(dict.get, self.replaced, repeat("forward"))),
                [link.call for link in self.links],
                [w if w is None else w.data_ptr() for held in map(_WEIGHTS, self.owners) for w in held.values()]]

    def listeners(self) -> list[tuple[int, Callable[..., Any]]] | None:
        """Who is told by a hook, and on which of `heard` that lies: ids [1, K] and weights [1, K] by one on a router or
        experts, r [1, 1, H] by one on a norm. None if somebody has replaced or moved something, or has put something
        else on one of the modules, or on all that there are."""
        if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks \
                or any(any(map(hooks, self.silent)) for hooks in _HOOKS) or self._state() != self.state:
            return None
        told = [(i, getattr(getattr(hook, "function", None), "told", None)) for i, own in enumerate(self.heard)
                for hooks in _HOOKS if hooks(own) for hook in hooks(own).values()]
        return None if any(one is None for _, one in told) else told


def forward(module: nn.Module) -> Any:
    """What was put on a module in place of its class's forward, the topmost; None for nothing."""
    there = module.__dict__.get("forward")
    return getattr(there, "call", there)
