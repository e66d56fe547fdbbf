"""The plan of a checkpoint: which tensor feeds which parameter, made before a weight is read.

transformers fills a parameter that a checkpoint lacks with random numbers. Here the keys are mapped
to parameters by transformers' own tables and converted on the meta device; what is missing,
unexpected or of another shape, unless the architecture declares it tied or optional, is refused by
name. Any floating type is cast to the model's, as transformers casts it; codes want their scales.
Values are not checked."""

from __future__ import annotations

from collections import Counter, defaultdict
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from moelab.checkpoint.config import blamed
from moelab.configs import quantisation
from moelab.models import compat
from moelab.models.seam import MoELayer, banks, discover
from moelab.store.headers import DTYPES, Stored
from moelab.store.layout import ExpertStore

#: safetensors' names of the types of plain weights
FLOATS = ("F64", "F32", "F16", "BF16")
#: types of FP8 weights, and of two FP4 codes in a byte
CODES = ("F8_E4M3", "F8_E5M2", "I8")


@dataclass(frozen=True)
class LoadingPlan:
    """How a model is made of a checkpoint that is complete.

    twin : the model on the meta device.
    dtype : what transformers computes in where the config does not say.
    experts : for each MoE layer and expert, its parameters by name and how each is made; {} in a
        store.
    stored : for each MoE layer, the type that holds a parameter of any of its experts exactly, by
        the expert's name.
    expert_keys, ignored : the checkpoint's keys that feed experts, and that the architecture
        declares superfluous."""

    twin: torch.nn.Module
    layers: list[MoELayer]
    quantizer: Any
    dtype: torch.dtype
    experts: list[list[dict[str, compat.ParameterPlan]]]
    stored: list[dict[str, torch.dtype]]
    expert_keys: set[str]
    ignored: set[str]


def make_plan(
    folder: Path, tensors: dict[str, Stored], store: ExpertStore | None, config: Any
) -> LoadingPlan:
    """The plan of a checkpoint that holds exactly the model of its config.

    Raises ValueError: it does not, naming what is missing, unexpected, of another shape, no
    floating-point number where the model has one, or a code without its scale; an architecture that
    cannot be built with this config; a dense one."""
    from moelab.models.quantizers import quantizer_for

    main = _first_type(folder, tensors)
    with blamed(
        folder / "config.json", f"no {config.model_type} model can be built of this config"
    ):
        if config.dtype is None:
            config = copy(config)
            config.dtype = main
        twin = compat.meta_twin(config)
        quantizer = quantizer_for(config)
    layers = discover(twin)
    try:
        plans, foreign = compat.loading_plan(twin, tensors, quantizer)
    except ValueError as error:
        raise ValueError(f"{folder} is not complete: {error}; check config.json") from error
    if quantisation(config) == "fp8":
        for plan in plans.values():
            _check_scales(folder, tensors, plan, quantizer.quantization_config.weight_block_size)
    checked = _Checked(folder, tensors, twin, twin.state_dict(), quantizer)
    made = {name for plan in plans.values() for name in checked.made(plan)}
    if store is not None:
        made |= _experts_of_store(store, layers)
    _require_all(folder, twin, set(checked.parameters) - made, made, foreign)
    for plan in plans.values():
        checked.require_same_kind(plan)
    experts = [_by_expert(layer, plans, store is None) for layer in layers]
    targets = {p.target for of_layer in experts for expert in of_layer for p in expert.values()}
    expert_keys = {key for target in targets for key in plans[target].keys}
    stored = [checked.types(of_layer) for of_layer in experts]
    ignored = set(foreign.values())
    return LoadingPlan(twin, layers, quantizer, main, experts, stored, expert_keys, ignored)


def _by_expert(
    layer: MoELayer, plans: dict[str, compat.ParameterPlan], all_of_them: bool
) -> list[dict[str, compat.ParameterPlan]]:
    """For each expert of a layer, its parameters by name and how each is made. ValueError if one is
    made together with others, since experts are read one by one."""
    prefix, found = f"{layer.name}.experts.", [{} for _ in range(layer.E)]
    for name in banks(layer.experts):
        plan = plans.get(prefix + name)
        if plan is None and all_of_them:
            raise ValueError(
                f"{prefix}{name} is made together with other parameters, and experts are read one by "
                f"one; this layout is not read"
            )
        number, own = compat.numbered_expert(name) or (None, name)
        if plan is not None:
            plan.single = number is not None
            for expert in range(layer.E) if number is None else [number]:
                found[expert][own] = plan
    return found


@dataclass(frozen=True)
class _Checked:
    """What the checks of single parameters look at; parameters : the twin's, by full name."""

    folder: Path
    tensors: dict[str, Stored]
    twin: torch.nn.Module
    parameters: dict[str, torch.Tensor]
    quantizer: Any

    def made(self, plan: compat.ParameterPlan) -> set[str]:
        """Names of what a plan makes; ValueError unless each has the shape of the model's."""
        stored: dict[str, Any] = {}
        for pattern, keys in plan.sources.items():
            stored[pattern] = [self.tensors[key].empty("meta") for key in keys]
            usual, times = Counter(tensor.shape for tensor in stored[pattern]).most_common(1)[0]
            if times < len(keys):
                odd = [key for key in keys if times == 1 or self.tensors[key].shape != usual]
                raise ValueError(
                    f"{self.folder}: {_described(self.tensors, odd)}, unlike the others of {plan.target}"
                )
        if plan.converter is None:
            stored = {pattern: found[0] for pattern, found in stored.items()}
        given = f"of {_described(self.tensors, plan.keys)}; check config.json"
        try:
            made = compat.converted(plan, stored, self.twin, self.quantizer)
        except Exception as error:
            raise ValueError(
                f"{self.folder}: {plan.target} cannot be made {given} ({type(error).__name__}: {error})"
            ) from error
        for name, tensor in made.items():
            if name in self.parameters and tensor.shape != self.parameters[name].shape:
                raise ValueError(
                    f"{self.folder}: {name} is {list(self.parameters[name].shape)} in "
                    f"{self.twin.config.model_type} with this config, and {list(tensor.shape)} is made {given}"
                )
        return set(made)

    def require_same_kind(self, plan: compat.ParameterPlan) -> None:
        """ValueError for numbers of another kind than the model's; any float is cast to any other.
        What codes beside scales mean, the quantiser knows."""
        if self.quantizer and len(plan.sources) > 1 and not self._plain(plan):
            return
        wanted = self.parameters[plan.target].dtype
        for key in plan.keys:
            found = DTYPES[self.tensors[key].dtype]
            fits = (
                found.is_floating_point
                if wanted.is_floating_point
                else (not found.is_floating_point and compat.widest({found, wanted}) == wanted)
            )
            if not fits:
                raise ValueError(
                    f"{self.folder}: {_described(self.tensors, [key])}, where the model has {wanted}, "
                    f"and nothing says what its numbers mean"
                )

    def types(self, experts: list[dict[str, compat.ParameterPlan]]) -> dict[str, torch.dtype]:
        """`LoadingPlan.stored` of a layer's experts; what is dequantised has the model's type."""
        types = defaultdict(set)
        plans = {plan.target: (name, plan) for of_one in experts for name, plan in of_one.items()}
        for name, plan in plans.values():
            if self.quantizer is None or self._plain(plan):
                types[name] |= {DTYPES[self.tensors[key].dtype] for key in plan.keys}
            else:
                types[name].add(self.parameters[plan.target].dtype)
        return {name: compat.widest(found) for name, found in types.items()}

    def _plain(self, plan: compat.ParameterPlan) -> bool:
        return all(self.tensors[key].dtype in FLOATS for key in plan.keys)


def _require_all(
    folder: Path, twin: torch.nn.Module, missing: set[str], made: set[str], foreign: dict[str, str]
) -> None:
    """ValueError, by name, for parameters that no tensor makes, and tensors that make no
    parameter, but those that the architecture declares tied, optional or superfluous."""
    missing, unexpected = compat.may_lack(twin, missing, made, set(foreign))
    if missing or unexpected:
        lacks = f"lacks {_some(sorted(missing))}" if missing else ""
        extra = f"has {_some(sorted(foreign[name] for name in unexpected))}" if unexpected else ""
        raise ValueError(
            f"{folder} {' and '.join(filter(None, (lacks, extra)))}: its tensors are not those of a "
            f"{twin.config.model_type} model with this config. Download what is missing, or check "
            f"config.json; other layouts are not read"
        )


def _experts_of_store(store: ExpertStore, layers: list[MoELayer]) -> set[str]:
    """Full names of the experts' parameters that a store has; ValueError where they are not the
    model's."""
    wanted = {
        f"{layer.name}.experts.{name}": tuple(p.shape)
        for layer in layers
        for name, p in banks(layer.experts).items()
    }
    stored: dict[str, tuple[int, ...]] = {}
    for layer in store.layers:
        E = len(layer.experts)
        for name, (_, shape) in layer.tensors.items():
            stored |= (
                {f"{layer.module}.{name}": (E, *shape)}
                if layer.stacked
                else {f"{layer.module}.expert_{e}.{name}": tuple(shape) for e in range(E)}
            )
    if odd := [name for name in wanted | stored if wanted.get(name) != stored.get(name)]:
        raise ValueError(
            f"{store.folder} holds other experts than its config.json describes ({_some(odd)}); "
            f"convert the model again"
        )
    return set(wanted)


def _first_type(folder: Path, tensors: dict[str, Stored]) -> torch.dtype:
    """What transformers computes in where no config says: the type of the first plain weights of
    the first file."""
    floats = [(entry.file, key) for key, entry in tensors.items() if entry.dtype in FLOATS]
    if not floats:
        raise ValueError(
            f"{folder} has no floating-point weights, so it is no model that is run here"
        )
    return DTYPES[tensors[min(floats)[1]].dtype]


def _check_scales(
    folder: Path, tensors: dict[str, Stored], plan: compat.ParameterPlan, block: list[int] | None
) -> None:
    """ValueError unless FP8 weights, and no others, have scales: one a tensor, or by blocks if the
    config has such."""
    for pattern, keys in plan.sources.items():
        for key, scale in zip_longest(keys, plan.sources.get(f"{pattern}_scale_inv", [])):
            dtype, shape = tensors[key].dtype, tensors[key].shape
            grid = tuple(-(-n // b) for n, b in zip(shape, block or ()))
            if scale is None:
                fits = dtype in FLOATS or pattern.endswith("_scale_inv")
            else:
                whole = not block or dtype == "I8"
                shapes = (grid, (), (1,), (1,) * len(shape))
                fits = dtype in CODES and (whole or tensors[scale].shape in shapes)
                fits = fits and tensors[scale].dtype in (*FLOATS, "F8_E8M0")
            if not fits:
                beside = _described(tensors, [scale]) if scale else f"no {key}_scale_inv"
                raise ValueError(
                    f"{folder}: {_described(tensors, [key])} with {beside}; FP8 weights, and they alone, "
                    f"are read with scales {list(grid)} of that name, or one for a whole tensor"
                )


def _described(tensors: dict[str, Stored], keys: list[str]) -> str:
    return _some([f"{key} is {tensors[key].dtype} {list(tensors[key].shape)}" for key in keys])


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(name[:300] for name in names[:4])
    return shown + (f" and {len(names) - 4:,} more" if len(names) > 4 else "")
