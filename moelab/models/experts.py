"""The experts of one MoE layer as executors see them, and how each architecture computes one.

Shapes: x [T, H], ids [T, K] (E means "no expert"), weights [T, K] → [T, H]."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.models import compat
from moelab.models.gradients import refuse
from moelab.models.unchanged import Unchanged

#: an expert's tensors by parameter name, in the architecture's own layout
Weights = dict[str, Tensor]
#: (layer, expert) → that expert's tensors
Source = Callable[[int, int], Weights]
#: runs the routed experts of one layer: (x [T, H], ids [T, K], weights [T, K], experts) → [T, H]
Run = Callable[[Tensor, Tensor, Tensor, "SeamExperts"], Tensor]


#: what transformers' decorator of experts classes sets on their modules
DECLARED = {"has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "is_concatenated"}


class SeamExperts:
    """One layer's experts: who computes them, where their weights come from, and their arithmetic.

    It is the attribute `seam` of the experts module while moelab runs that.

    module : transformers' experts module.
    layer : its index among the MoE layers.
    executor : computes the layer; `eager` at first.
    engine : of an offloaded model, what is called in the executor's place: it loads the experts and
        has the executor compute them. None: all weights are at hand.
    source : supplies an expert's weights; None: the module's own parameters.
    resident : whether the module holds its experts' parameters.
    shapes : parameter name → shape of one expert's tensor.
    has_gate, has_bias, is_transposed, has_post_expert_norm, is_concatenated : as transformers'
        decorator `use_experts_implementation` declares them; the last is None without it."""

    has_gate = True
    has_bias = False
    is_transposed = False
    has_post_expert_norm = False
    is_concatenated: bool | None = None

    def __init__(self, module: nn.Module, layer: int = 0) -> None:
        self.module = module
        self.layer = layer
        self.executor: Run = eager
        self.engine: Run | None = None
        self.source: Source | None = None
        self.resident = True
        self.shapes = shapes(module)
        for setting in DECLARED & vars(module).keys():
            setattr(self, setting, getattr(module, setting))

    @property
    def num_experts(self) -> int:
        return expert_count(self.module)

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
        """One expert's tensors of the module's own parameters."""
        return {name: getattr(self.module, name)[expert] for name in self.shapes}

    def forget_own(self) -> None:
        """Take the experts' parameters out of the module."""
        for name in self.shapes:
            child, _, own = name.rpartition(".")
            delattr(self.module.get_submodule(child), own)
        self.resident = False

    def activate(self, h: Tensor) -> Tensor:
        """The architecture's gate [n, 2I] → [n, I], or activation [n, I] where there is no gate."""
        return compat.apply_gate(self.module, h) if self.has_gate else self.module.act_fn(h)

    def linear(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """The product with one of an expert's matrices, and its bias if it has one."""
        y = x @ weights[name] if self.is_transposed else F.linear(x, weights[name])
        return y + weights[name + "_bias"] if self.has_bias else y

    def ffn(self, x: Tensor, weights: Weights) -> Tensor:
        """One expert on the rows x [n, H] → [n, H], as the architecture's eager code computes
        it."""
        h = self.activate(self.linear(x, weights, "gate_up_proj" if self.has_gate else "up_proj"))
        y = self.linear(h, weights, "down_proj")
        return self.module.post_expert_norm(y) if self.has_post_expert_norm else y

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


def seam_of(module: nn.Module, layer: int = 0) -> SeamExperts:
    """What a module has for a seam, or would have. Raises ValueError for a class that transformers
    does not dispatch by name, and that is not among `KINDS`: nobody knows what it computes."""
    if "seam" in vars(module):
        return module.seam
    cls = type(module)
    known = [KINDS[one.__name__] for one in cls.__mro__ if one.__name__ in KINDS]
    if not known and not compat.dispatches_by_name(cls):
        raise ValueError(
            f"{cls.__name__} may compute anything: its forward is not that of "
            f"use_experts_implementation. Say how in a subclass of SeamExperts, named in "
            f"moelab.models.experts.KINDS; until then it is run without moelab"
        )
    return [*known, SeamExperts][0](module, layer)


def expert_count(module: nn.Module) -> int | None:
    """How many experts with weights an experts module has; None for any other module."""
    if hasattr(module, "num_experts"):
        return module.num_experts
    return getattr(module, "num_routed_experts", None)


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Parameter name → shape of one expert's tensor, of experts in memory or not."""
    if "seam" in vars(module):
        return module.seam.shapes
    if isinstance(module, nn.ModuleDict):
        return {name: tuple(p.shape) for name, p in module["expert_0"].named_parameters()}
    return {name: tuple(bank.shape[1:]) for name, bank in banks(module).items()}


def banks(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a stock experts module by parameter name, [E, …] each, or each expert's own
    where it holds modules; a norm that all share is not among them."""
    if type(module).__name__ in ROWS:
        rows = module.named_parameters()
        return {name: p.unflatten(0, (module.num_experts, -1)) for name, p in rows}
    return dict(module.named_parameters(recurse=isinstance(module, nn.ModuleDict)))


# --------------------------------------------------------------------------------------------------
# architectures whose experts compute otherwise than transformers' usual loop


class _SumsWide(SeamExperts):
    """Contributions are summed as wide as they are: in fp32 where the routing weights are."""

    def sum_dtype(self, x: torch.dtype, y: torch.dtype) -> torch.dtype:
        return y


class _SumsInFP32(SeamExperts):
    """Contributions are summed in fp32, whatever they are."""

    def sum_dtype(self, x: torch.dtype, y: torch.dtype) -> torch.dtype:
        return torch.float32


class _Llama4Experts(SeamExperts):
    """[E, H, 2I] and [E, I, H]; the routing weight scales the expert's input; outputs are summed
    densely."""

    is_transposed = True

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


class _SwitchExperts(SeamExperts):
    """A ModuleDict of `wi`, ReLU, `wo`; the modules' own dtype rule is kept."""

    has_gate = False  # by the name that others have

    def __init__(self, module: nn.Module, layer: int = 0) -> None:
        super().__init__(module, layer)
        self.first = module["expert_0"]  # stands for all, once they are forgotten

    def own(self, expert: int) -> Weights:
        module = self.module[f"expert_{expert}"]
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

    def forget_own(self) -> None:
        self.module.clear()
        self.resident = False

    def ffn(self, x: Tensor, weights: Weights) -> Tensor:
        h = self.first.act(F.linear(x, weights["wi.weight"]))
        return F.linear(h.to(weights["wo.weight"].dtype), weights["wo.weight"])


class _DbrxExperts(SeamExperts):
    """All experts' rows in one matrix [E·I, H], three of them in the module `mlp`, whose code
    computes an expert of the views that it is given."""

    has_gate = False  # by the name that others have

    def own(self, expert: int) -> Weights:
        return {name: bank[expert] for name, bank in banks(self.module).items()}

    def ffn(self, x: Tensor, weights: Weights) -> Tensor:
        return self.module.mlp(x, *(weights[f"mlp.{name}"] for name in ("w1", "v1", "w2")))


#: experts classes that hold all experts' rows in one matrix
ROWS = ("DbrxExperts", "SeamDbrxExperts")
#: experts class → how it computes, where that is not transformers' usual loop, or where transformers
#: does not dispatch it by name; `tests.models.sweep` compares all with transformers, bit for bit
KINDS: dict[str, type[SeamExperts]] = {
    "Llama4TextExperts": _Llama4Experts,
    "SwitchTransformersExperts": _SwitchExperts,
    "LongcatFlashExperts": SeamExperts,  # without those that give back their input: `dialects`
    "DbrxExperts": _DbrxExperts,
    "NemotronHExperts": _SumsWide,
    "Step3p7Experts": SeamExperts,
    "Inkling2Experts": _SumsInFP32,
}


# --------------------------------------------------------------------------------------------------
# running a layer


def run(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of every experts module behind the seam."""
    layer = _untraced if torch.compiler.is_compiling() else _layer
    return layer(module.seam, hidden_states, top_k_index, top_k_weights)


def _layer(experts: SeamExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    if not experts.resident and compat.parameters_of(experts.module):
        raise ValueError(
            f"{', '.join(compat.parameters_of(experts.module))} of these experts is not in memory, so it cannot "
            f"be another: open the model without memory= and experts="
        )
    if ids.shape != weights.shape:
        raise ValueError(
            f"{type(experts.module).__name__} was called with hidden states {list(x.shape)}, ids "
            f"{list(ids.shape)} and weights {list(weights.shape)}; a block that calls it otherwise than "
            f"(hidden_states, ids, weights) needs an entry in moelab.models.dialects.BLOCKS"
        )
    executor = experts.engine or experts.executor
    if not torch.is_grad_enabled():
        return execute(executor, x, ids, weights, experts)
    with torch.no_grad():
        y = execute(executor, x, ids, weights, experts)
    return refuse(y, x, weights, *experts.module.parameters())


_untraced = compat.uncompiled(_layer)


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


def named(part: Any) -> str:
    """What to call an executor, a policy or a predictor, whether it is a name, a function or an
    object."""
    return part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)


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
