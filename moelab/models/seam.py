"""The seam: every MoE layer of every architecture as one call, `executor(x, ids, weights,
experts)`.

`plug` turns a model's experts modules into `SeamExperts`, whose computation is an *executor* and
whose weights come from a *source*. Architectures that do not call `experts(hidden_states,
top_k_index, top_k_weights)` get a block that translates (`moelab.models.dialects`). Shapes: x [T,
H], ids [T, K] (E means "no expert"), weights [T, K] → [T, H]."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.models import guard
from moelab.models.dialects import BLOCKS, ROUTING, SEQUENCES, block_class
from moelab.models.gradients import refuse
from moelab.models.identity import require_same_model
from moelab.models.patches import Dressed, Patches, dress, put, take
from moelab.models.unchanged import FusedModule, Listener, Unchanged, forward

#: an expert's tensors by parameter name, in the architecture's own layout
Weights = dict[str, Tensor]
#: (layer, expert) → that expert's tensors
Source = Callable[[int, int], Weights]
#: runs the routed experts of one layer: (x [T, H], ids [T, K], weights [T, K], experts) → [T, H]
Run = Callable[[Tensor, Tensor, Tensor, "SeamExperts"], Tensor]


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
        return next(
            getattr(self.experts, count) for count in COUNTS if hasattr(self.experts, count)
        )

    def routing(self, router_output: Any) -> tuple[Tensor, Tensor]:
        """(ids [T, K], weights [T, K]) from what the router's forward returned; dropped tokens have
        id E."""
        if adapter := ROUTING.get(type(self.router).__name__):
            return adapter(self.router, router_output)
        _, weights, ids, *_ = router_output
        return ids, weights

    def listening(
        self, told: Callable[[Tensor, Tensor], None]
    ) -> tuple[Callable[..., Any], Callable, dict[str, Any]]:
        """(what registers it, a hook, its options): in each pass the hook calls told(ids [T, K],
        weights [T, K])."""
        if not isinstance(self.experts, SeamExperts) and type(self.router).__name__ in ROUTING:

            def of_router(_m: nn.Module, _args: tuple, out: Any) -> None:
                told(*self.routing(out))

            return self.router.register_forward_hook, Listener(told, of_router), {}

        def of_experts(_: nn.Module, args: tuple, kwargs: dict) -> None:
            ids, weights = [*args, *kwargs.values()][1:3]  # after the hidden states
            if ids.is_floating_point():
                raise ValueError(
                    f"{self.name}: {type(self.block).__name__} calls its experts with {ids.dtype} in "
                    f"place of ids, so its routing is not known; it needs lines in "
                    f"moelab/models/dialects.py"
                )
            told(ids, weights)

        hook = Listener(told, of_experts)
        return self.experts.register_forward_pre_hook, hook, {"with_kwargs": True}

    def ask(self, x: Tensor, own: bool = False) -> Any:
        """What the router's own code returns for x [..., H], called as its block does; hooks are
        for real passes. A kernel that was put in place of the code (`moelab.fast.fast_decode`) is
        asked instead, but for `own`.

        Raises ValueError: the router needs what is neither x nor kept by the block, such as the
        tokens' ids."""
        stock = type(self.router).forward
        if not own and isinstance(kernel := forward(self.router), FusedModule):
            return kernel(x.reshape(-1, x.shape[-1]))
        first, *others = _parameters(stock)
        given = {p.name: getattr(self.block, p.name) for p in others if hasattr(self.block, p.name)}
        if missing := [
            p.name
            for p in others
            if p.name not in given
            and p.default is p.empty
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]:
            raise ValueError(
                f"{self.name}: {type(self.router).__name__} needs {' and '.join(missing)} beside the "
                f"hidden states, so it cannot be asked what it would choose for a hidden state alone"
            )
        x = x.reshape(-1, x.shape[-1])
        # Capacity is counted along a sequence: each token is a sequence of its own, so that none is
        # dropped.
        x = x[:, None] if type(self.router).__name__ in SEQUENCES else x
        return stock(self.router, x, **given)


@cache
def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those of a method, without `self`."""
    return list(inspect.signature(forward).parameters.values())[1:]


def discover(model: nn.Module) -> list[MoELayer]:
    """The MoE layers of a model in execution order (an encoder's before its decoder's); ValueError
    for none."""
    layers = []
    for name, module in model.named_modules():
        block_name, _, last = name.rpartition(".")
        if last != "experts" or not any(hasattr(module, count) for count in COUNTS):
            continue
        block = model.get_submodule(block_name)
        router = next(
            (
                getattr(block, n)
                for n in ("gate", "router")
                if isinstance(getattr(block, n, None), nn.Module)
            ),
            None,
        )
        if router is None:
            raise ValueError(
                f"the MoE block {block_name} ({type(block).__name__}) has no child named gate or router; "
                f"this architecture needs a line in moelab/models/dialects.py"
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
    for config in vars(model).get("peft_config", {}).values():
        names = {
            name
            for layer in discover(model)
            if getattr(layer.experts, "resident", True) is False
            for name in layer.experts.shapes
        }
        modules = getattr(config, "target_modules", None)
        meant = [
            *(getattr(config, "target_parameters", None) or ()),
            *(f"{module}.weight" for module in (() if isinstance(modules, str) else modules or ())),
        ]
        if found := [
            name for name in meant if any(f".{name}".endswith(f".{own}") for own in names)
        ]:
            raise ValueError(
                f"this adapter is for the experts, too ({', '.join(sorted(found))}), which are not in "
                f"memory, so it cannot be put on them: open the model without memory=, or merge the "
                f"adapter into the checkpoint first"
            )


def named(part: Any) -> str:
    """What to call an executor, a policy or a predictor, whether it is a name, a function or an
    object."""
    return part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)


#: whose `plug` is: what it puts on belongs to the model until `unplug`, see `moelab.models.patches`
PLUG = "plug"
#: attributes of an experts module that say how many it has
COUNTS = ("num_experts", "num_routed_experts")


def banks(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a stock experts module that are experts', by name; a norm that all share is
    not among them."""
    return dict(experts.named_parameters(recurse=isinstance(experts, nn.ModuleDict)))


def plug(
    model: nn.Module, executor: Run | None = None, source: Source | None = None
) -> list[MoELayer]:
    """Turn a model's experts into `SeamExperts`, or change their executor or source, until the next
    `plug` or `unplug`.

    executor, source : None leaves what is there, at first `eager` and the module's own parameters.

    Raises ValueError: no MoE layer, or one whose experts compute what the seam does not
    (`moelab.models.guard`); an experts module with a forward of its own; an executor or source with
    weights of another model."""
    layers = _checked(model, executor, source)
    with Patches() as trial:  # what cannot be put on leaves nothing behind
        _put(trial, layers, executor, source)
        _put(PLUG, layers, executor, source)
    return layers


def _checked(model: nn.Module, executor: Run | None, source: Source | None) -> list[MoELayer]:
    """The model's layers, after checking their arithmetic and whose weights the parts are."""
    require_same_model(model, executor, source)
    layers = discover(model)
    for layer in layers:
        check(layer, model.dtype)
    return layers


def check(layer: MoELayer, dtype: torch.dtype) -> None:
    """Compare a layer's arithmetic with transformers' own, see `moelab.models.guard`; ValueError
    where it differs."""
    block, experts = (
        getattr(type(module), "stock", type(module)) for module in (layer.block, layer.experts)
    )
    guard.check(
        layer,
        dtype,
        experts,
        seam_class,
        eager,
        block_class(block) if block.__name__ in BLOCKS else None,
    )


def unplug(model: nn.Module) -> None:
    """Take off what `plug` has put on a model whose experts hold their own parameters."""
    layers = discover(model)
    for layer in layers:
        if isinstance(layer.experts, SeamExperts) and not layer.experts.resident:
            raise ValueError(
                f"{layer.name}: these experts hold no parameters of their own, so the stock "
                f"classes could not run; open the model with experts='resident'"
            )
    for layer in layers:
        take(PLUG, layer.experts)
        take(PLUG, layer.block)


@contextmanager
def plugged(
    model: nn.Module, executor: Run | None = None, source: Source | None = None
) -> Iterator[Run]:
    """`plug` for the length of a block."""
    layers = _checked(model, executor, source)
    with Patches() as patches:
        _put(patches, layers, executor, source)
        yield executor


def _put(
    owner: Patches | str, layers: list[MoELayer], executor: Run | None, source: Source | None
) -> None:
    for layer in layers:
        dress(owner, layer.experts, seam_class)
        dress(owner, layer.block, block_class)
        for name, value in (("layer", layer.index), ("executor", executor), ("source", source)):
            if value is not None:
                put(owner, layer.experts, name, value)


# --------------------------------------------------------------------------------------------------
# experts modules


class SeamExperts(Dressed, nn.Module):
    """Mixin over an architecture's experts class: computed by `executor`, weights from `source`
    (see `plug`)."""

    stock: type
    layer: int = -1
    executor: Run
    source: Source | None = None
    untraced: Callable[..., Tensor]  # `_executed`, of which torch.compile sees nothing
    compared: Callable[..., Tensor]  # the forward of `stock`, when the guard compared it
    # what transformers' decorator sets on the modules of the classes that it decorates
    has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, False, False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, SeamExperts):  # taken off, while somebody kept this method
            return type(self).forward(self, *args, **kwargs)
        return (self.untraced if torch.compiler.is_compiling() else self._executed)(*args, **kwargs)

    def _executed(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        if self.stock.forward is not self.compared:
            raise ValueError(
                f"somebody has replaced {self.stock.__name__}.forward since this model was opened, and "
                f"its experts would not run it: open the model again"
            )
        if not torch.is_grad_enabled():
            return execute(self.executor, hidden_states, top_k_index, top_k_weights, self)
        with torch.no_grad():
            y = execute(self.executor, hidden_states, top_k_index, top_k_weights, self)
        return refuse(y, hidden_states, top_k_weights, *self.parameters())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("shapes", ()):
            raise AttributeError(
                f"{name} of these experts is not in memory, so it cannot be another: open the model "
                f"without memory= and experts="
            )
        super().__setattr__(name, value)

    @property
    def resident(self) -> bool:
        return next(self._held(), None) is not None

    def _held(self) -> Iterator[str]:
        """The names of the parameters, those that torch.nn.utils.parametrize has put aside
        included."""
        yield from (name for name, held in self._parameters.items() if held is not None)
        yield from self._modules.get("parametrizations", ())

    def weights(self, expert: int) -> Weights:
        """One expert's tensors, from the source or else from the module's own parameters."""
        if self.source is not None:
            return self.source(self.layer, expert)
        if not self.resident:
            raise RuntimeError(
                "this model was opened with external experts and nothing supplies them: "
                "moelab.models.plug(model, source=…), or moelab.open_model(path)"
            )
        return self.own(expert)

    def own(self, expert: int) -> Weights:
        return {name: getattr(self, name)[expert] for name in self._held()}

    def ffn(self, x: Tensor, weights: Weights) -> Tensor:
        """One expert on the rows x [n, H] → [n, H], as the architecture's eager code computes
        it."""
        up = "gate_up_proj" if self.has_gate else "up_proj"
        h = self._linear(x, weights, up)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        y = self._linear(h, weights, "down_proj")
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    def activation(self) -> Unchanged:
        """What says whether the modules that this one is made of are still what they are now."""
        return Unchanged([*self.modules()][1:])

    def _linear(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        y = x @ weights[name] if self.is_transposed else F.linear(x, weights[name])
        return y + weights[name + "_bias"] if self.has_bias else y

    def weighted(self, x: Tensor, w: Tensor, weights: Weights) -> Tensor:
        """One expert's contribution: rows x [n, H] with routing weights w [n] → [n, H]."""
        return self.ffn(x, weights) * w[:, None]

    def contribution(self, x: Tensor, tokens: Tensor, w: Tensor, weights: Weights) -> Tensor:
        """One expert's contribution to its `tokens` [n] of the whole x [T, H] → [n, H], bit-equal
        to eager's."""
        return self.weighted(x[tokens], w, weights)

    def sum_dtype(self, x: torch.dtype, y: torch.dtype) -> torch.dtype:
        """The dtype in which contributions of dtype y to hidden states of dtype x are summed."""
        return x

    def accumulate(self, x: Tensor, contributions: list[tuple[int, Tensor, Tensor]]) -> Tensor:
        """Sum (expert, token indices [n], contribution [n, H]) in ascending expert order, as eager
        does."""
        wide = contributions[0][2].dtype if contributions else x.dtype
        out = torch.zeros_like(x, dtype=self.sum_dtype(x.dtype, wide))
        for _, tokens, y in sorted(contributions, key=lambda c: c[0]):
            out.index_add_(0, tokens, y.to(out.dtype))
        return out.to(x.dtype)


class _SumsWide(SeamExperts):
    """Contributions are summed as wide as they are: in fp32 where the routing weights are."""

    def sum_dtype(self, x: torch.dtype, y: torch.dtype) -> torch.dtype:
        return y


class _SumsInFP32(SeamExperts):
    """Contributions are summed in fp32, whatever they are."""

    def sum_dtype(self, x: torch.dtype, y: torch.dtype) -> torch.dtype:
        return torch.float32


class _ComputesInFP32(_SumsInFP32):
    """All in fp32, inputs, weights and routing weights widened."""

    def ffn(self, x: Tensor, weights: Weights) -> Tensor:
        return super().ffn(x.float(), {name: tensor.float() for name, tensor in weights.items()})

    def weighted(self, x: Tensor, w: Tensor, weights: Weights) -> Tensor:
        return self.ffn(x, weights) * w.float()[:, None]


class _Llama4Experts(SeamExperts):
    """[E, H, 2I] and [E, I, H]; the routing weight scales the expert's input; outputs are summed
    densely."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, True, False

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)

    def weighted(self, x: Tensor, w: Tensor, weights: Weights) -> Tensor:
        return self.ffn(x * w[:, None], weights)

    def contribution(self, x: Tensor, tokens: Tensor, w: Tensor, weights: Weights) -> Tensor:
        if x.dtype != torch.float32:
            return self.weighted(x[tokens], w, weights)
        # The stock block multiplies all T rows, unrouted ones by zero, and an fp32 GEMM rounds
        # differently with the number of rows: only the full-size one is bit-equal.
        all_w = x.new_zeros(len(x)).index_copy(0, tokens, w.to(x.dtype))  # [T]
        return self.weighted(x, all_w, weights)[tokens]

    def accumulate(self, x: Tensor, contributions: list[tuple[int, Tensor, Tensor]]) -> Tensor:
        # The stock block sums E dense outputs in one reduction; a sum over fewer rows rounds
        # differently.
        dense = x.new_zeros(self.num_experts, *x.shape)  # [E, T, H]
        for expert, tokens, y in contributions:
            dense[expert, tokens] = y
        return dense.sum(dim=0)


class _LongcatExperts(SeamExperts):
    """The experts that compute; those that give back their input are the block's
    (`moelab.models.dialects`)."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    @property
    def num_experts(self) -> int:
        return self.num_routed_experts


class _SwitchExperts(SeamExperts):
    """A ModuleDict of `wi`, ReLU, `wo`; the modules' own dtype rule is kept."""

    has_gate = has_bias = is_transposed = has_post_expert_norm = None  # not said in these words

    @property
    def resident(self) -> bool:
        return len(self) > 0

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(key) if self.resident else self._template[0]

    def own(self, expert: int) -> Weights:
        module = self[f"expert_{expert}"]
        weights = dict(module.named_parameters())
        if (
            weights.keys() != {"wi.weight", "wo.weight"}
            or Unchanged(module.modules()).listeners() is None
        ):
            raise ValueError(
                f"expert {expert} of MoE layer {self.layer} has an adapter or a hook, and is computed "
                f'from its weights alone: use executor="exact"'
            )
        return weights

    def ffn(self, x: Tensor, weights: Weights) -> Tensor:
        h = self["expert_0"].act(F.linear(x, weights["wi.weight"]))
        return F.linear(h.to(weights["wo.weight"].dtype), weights["wo.weight"])


def seam_class(cls: type) -> type:
    """The `SeamExperts` subclass of an architecture's experts class; itself of one that is."""
    return cls if issubclass(cls, SeamExperts) else _seam_class(cls, cls.forward)


@cache
def _seam_class(cls: type, forward: Callable[..., Tensor]) -> type:
    members = {
        "stock": cls,
        "compared": staticmethod(forward),
        "untraced": torch.compiler.disable(SeamExperts._executed),
    }
    return type("Seam" + cls.__name__, (KINDS.get(cls.__name__, SeamExperts), cls), members)


#: experts class → how it computes, where that is not transformers' usual loop; the guard finds
#: those that lack here
KINDS = {
    "Llama4TextExperts": _Llama4Experts,
    "SwitchTransformersExperts": _SwitchExperts,
    "LongcatFlashExperts": _LongcatExperts,
    "NemotronHExperts": _SumsWide,
    "Inkling2Experts": _SumsInFP32,
    "OpenAIPrivacyFilterExperts": _ComputesInFP32,
}


def leave_out(model: nn.Module) -> None:
    """Take the experts' parameters out of a model that has just been constructed, to open it
    without them."""
    for layer in discover(model):
        experts = layer.experts
        experts.shapes = guard.shapes(experts)
        if isinstance(experts, nn.ModuleDict):
            # One expert without memory stands for all: in a tuple, so that it is no submodule.
            experts._template = (experts["expert_0"],)
            experts.clear()
        else:
            for name in experts.shapes:
                delattr(experts, name)
        experts._is_hf_initialized = layer.block._is_hf_initialized = (
            True  # nothing for transformers to initialise
        )
        experts.__class__ = seam_class(type(experts))


# --------------------------------------------------------------------------------------------------------
# executors


def assignments(ids: Tensor, E: int) -> list[tuple[int, Tensor, Tensor]]:
    """(expert, which of the K choices [n], token [n]) of every expert that is hit, in eager's
    order."""
    T, K = ids.shape
    if (
        T == 1 and len(chosen := {expert: k for k, expert in enumerate(ids[0].tolist())}) == K
    ):  # a decode step
        places = _places(K, ids.device)
        return [
            (expert, places[chosen[expert]], places[0]) for expert in sorted(chosen) if expert != E
        ]
    flat = ids.T.reshape(-1)  # the first choices of all tokens, then the second …
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=E).tolist()
    parts = zip(counts, (order // T).split(counts), (order % T).split(counts))
    return [
        (expert, choice, token)
        for expert, (n, choice, token) in enumerate(parts)
        if n and expert != E
    ]


@cache
def _places(n: int, device: torch.device) -> tuple[Tensor, ...]:
    """0 … n − 1, a tensor [1] each; all callers have the same ones, so nobody may write into
    them."""
    with torch.inference_mode(False):  # or no gradient could pass what they index
        return torch.arange(n, device=device).split(1)


def execute(executor: Run, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts) -> Tensor:
    """What an executor returns; ValueError, naming it, unless that is [T, H] of x's dtype."""
    y = executor(x, ids, weights, experts)
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        given = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else f"{y!r:.80}"
        raise ValueError(
            f"the executor {named(executor)} returned {given}; it must return [T, H] like the hidden "
            f"states that it is given, here {x.dtype} {list(x.shape)}"
        )
    return y


def eager(x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts) -> Tensor:
    """transformers' eager loop, one expert's weights at a time; bit-identical to it."""
    contributions = [
        (
            expert,
            tokens,
            experts.contribution(x, tokens, weights[tokens, choice], experts.weights(expert)),
        )
        for expert, choice, tokens in assignments(ids, experts.num_experts)
    ]
    return experts.accumulate(x, contributions)


SeamExperts.executor = staticmethod(eager)
