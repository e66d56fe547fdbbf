"""The seam: every MoE layer of every architecture as one call, `executor(x, ids, weights,
experts)`.

`plug` hangs a `SeamExperts` on each experts module: who computes it, and where its weights come
from. transformers then calls moelab by the name under which it is registered as an implementation
of experts. Classes that transformers does not dispatch by name, and blocks that do not call
`experts(hidden_states, top_k_index, top_k_weights)`, get a class of ours (`moelab.models.dialects`).
Shapes: x [T, H], ids [T, K] (E means "no expert"), weights [T, K] → [T, H]."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from moelab.models import compat
from moelab.models.dialects import ROUTING, SEQUENCES, block_class, experts_class
from moelab.models.experts import Run, SeamExperts, Source, expert_count, run, seam_of
from moelab.models.identity import require_same_model
from moelab.models.patches import Patches, while_on
from moelab.models.unchanged import FusedModule, Listener, forward


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One MoE layer of a live model: where its block, router and experts are."""

    index: int  # 0 … L−1
    name: str  # the block, e.g. "model.layers.3.mlp"
    block: nn.Module
    experts: nn.Module
    router: nn.Module

    @property
    def E(self) -> int:
        return expert_count(self.experts)

    @property
    def seam(self) -> SeamExperts:
        """What executors are given of this layer; only while the model is plugged."""
        return self.experts.seam

    @property
    def plugged(self) -> bool:
        return "seam" in vars(self.experts)

    @property
    def resident(self) -> bool:
        """Whether the experts' parameters are in the model."""
        return not self.plugged or self.seam.resident

    def routing(self, router_output: Any) -> tuple[Tensor, Tensor]:
        """(ids [T, K], weights [T, K]) from what the router's forward returned; dropped tokens have
        id E."""
        if adapter := ROUTING.get(type(self.router).__name__):
            return adapter(self.block, router_output)
        try:
            _, weights, ids, *_ = router_output
        except (TypeError, ValueError):
            raise ValueError(
                f"{self.name}: {type(self.router).__name__} does not return (logits, weights, ids); say "
                f"how it is read in moelab.models.dialects.ROUTING"
            ) from None
        return self.checked(ids, weights)

    def checked(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The same two; ValueError unless they can be ids and weights [T, K]."""
        if ids.is_floating_point() or ids.shape != weights.shape:
            raise ValueError(
                f"{self.name}: ids {list(ids.shape)} of {ids.dtype} and weights {list(weights.shape)} are no "
                f"routing [T, K]: {type(self.router).__name__} needs an entry in "
                f"moelab.models.dialects.ROUTING, and {type(self.block).__name__} perhaps one in BLOCKS"
            )
        return ids, weights

    def listen(self, patches: Patches, told: Callable[[Tensor, Tensor], None]) -> None:
        """Have told(ids [T, K], weights [T, K]) called in each pass, until `patches` are undone."""
        if not self.plugged and type(self.router).__name__ in ROUTING:

            def of_router(_m: nn.Module, _args: tuple, out: Any) -> None:
                told(*self.routing(out))

            patches.hook(self.router.register_forward_hook, Listener(told, of_router))
            return

        @while_on
        def of_experts(_: nn.Module, args: tuple, kwargs: dict) -> None:
            told(*[*args, *kwargs.values()][1:3])  # after the hidden states

        register = self.experts.register_forward_pre_hook
        patches.hook(register, Listener(told, of_experts), with_kwargs=True)

    def ask(self, x: Tensor, own: bool = False) -> Any:
        """What the router's own code returns for x [..., H], called as its block does; hooks are
        for real passes. A kernel that was put in place of the code (`moelab.fast.fast_decode`) is
        asked instead, but for `own`.

        Raises ValueError: the router needs what is neither x nor kept by the block, such as the
        tokens' ids."""
        x = x.reshape(-1, x.shape[-1])
        if not own and isinstance(kernel := forward(self.router), FusedModule):
            return kernel(x)
        stock = type(self.router).forward
        kept = [name for name in _parameters(stock)[2:] if hasattr(self.block, name)]
        given = {name: getattr(self.block, name) for name in kept}
        # Capacity is counted along a sequence: each token is a sequence of its own, so that none is
        # dropped.
        x = x[:, None] if type(self.router).__name__ in SEQUENCES else x
        try:
            return stock(self.router, x, **given)
        except TypeError as error:
            raise ValueError(
                f"{self.name}: {type(self.router).__name__} cannot be asked what it would choose for a "
                f"hidden state alone ({error})"
            ) from error


@cache
def _parameters(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)


def discover(model: nn.Module) -> list[MoELayer]:
    """The MoE layers of a model in execution order (an encoder's before its decoder's); ValueError
    for none."""
    layers = []
    for name, module in model.named_modules():
        block_name, _, last = name.rpartition(".")
        if last != "experts" or expert_count(module) is None:
            continue
        block = model.get_submodule(block_name)
        parts = dict(block.named_children())
        router = next((parts[name] for name in ROUTERS if name in parts), None)
        if router is None:
            raise ValueError(
                f"the MoE block {block_name} ({type(block).__name__}) has no child named {' or '.join(ROUTERS)}; "
                f"name its router in moelab.models.seam.ROUTERS"
            )
        layers.append(MoELayer(len(layers), block_name, block, module, router))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no MoE layer: moelab works on mixture-of-experts models"
        )
    return layers


def require_adaptable(model: nn.Module) -> None:
    """ValueError if PEFT has an adapter for experts that are not in memory: it does not find them
    and leaves it out."""
    if not (configs := vars(model).get("peft_config")):
        return  # this is asked in every forward pass
    absent = {name for layer in discover(model) if not layer.resident for name in layer.seam.shapes}
    for config in configs.values():
        modules = config.target_modules or ()
        meant = getattr(config, "target_parameters", None)
        named = [] if isinstance(modules, str) else [f"{module}.weight" for module in modules]
        for name in (*named, *(meant or ())):
            if any(f".{name}".endswith(f".{own}") for own in absent):
                raise ValueError(
                    f"this adapter is for the experts, too ({name}), which are not in memory: open the "
                    f"model without memory=, or merge the adapter into the checkpoint first"
                )


#: what blocks call their router
ROUTERS = ("gate", "router")


def plug(model: nn.Module, executor: Run | None = None, **parts: Any) -> list[MoELayer]:
    """Have a model's experts computed by moelab, or change how, for good.

    executor, parts : executor (`Run`), source (`Source`) and engine (`Run`) of `SeamExperts`; those
        that are None or not given stay.

    Raises ValueError: no MoE layer, or one whose experts are of a class that the seam does not know;
    an experts module with a forward of its own; an executor or source with weights of another
    model."""
    with Patches() as patches:
        layers = _put(patches, model, executor=executor, **parts)
        patches.pop_all()
    return layers


@contextmanager
def plugged(model: nn.Module, executor: Run | None = None, **parts: Any) -> Iterator[Run | None]:
    """`plug` for the length of a block."""
    with Patches() as patches:
        _put(patches, model, executor=executor, **parts)
        yield executor


def _put(
    patches: Patches,
    model: nn.Module,
    executor: Run | None = None,
    source: Source | None = None,
    engine: Run | None = None,
) -> list[MoELayer]:
    parts = {"executor": executor, "source": source, "engine": engine}
    require_same_model(model, *parts.values())
    layers = discover(model)
    compat.register_experts(run)
    for layer in layers:
        if not layer.plugged:
            patches.put(layer.experts, "seam", seam_of(layer.experts, layer.index))
        patches.become(layer.block, block_class(type(layer.block)))
        patches.become(layer.experts, experts_class(type(layer.experts)))
        if compat.dispatches_by_name(type(layer.experts)):
            before = compat.dispatch(layer.experts.config, compat.MOELAB)
            patches.callback(compat.dispatch, layer.experts.config, before)
        for name, part in parts.items():
            if part is not None:
                patches.put(layer.seam, name, part)
    return layers


def leave_out(model: nn.Module) -> None:
    """Take the experts' parameters out of a model that has just been constructed, to open it
    without them."""
    for layer in discover(model):
        experts = layer.experts
        experts.seam = seam_of(experts, layer.index)
        experts.seam.forget_own()
        compat.initialised(*experts.modules(), layer.block)
