"""The plan of a checkpoint: which tensor feeds which parameter, made before a weight is read.

transformers fills a parameter that a checkpoint lacks with random numbers. Here the keys are mapped
to parameters by transformers' own tables and converted on the meta device; what is missing,
unexpected or of another shape, unless the architecture declares it tied or optional, is refused by
name. Any floating type is cast to the model's, as transformers casts it; codes want their scales.
Values are not checked."""

from __future__ import annotations

import re
from collections import Counter
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

import torch

from moelab.base.configs import quantisation
from moelab.base.schema import blamed
from moelab.models import compat
from moelab.models.experts import banks, shapes
from moelab.models.seam import MoELayer, discover
from moelab.store.headers import DTYPES, Header, Tensors, on_meta
from moelab.store.layout import ExpertStore

#: safetensors' names of the types of plain weights
FLOATS = ("F64", "F32", "F16", "BF16")
#: types of FP8 weights, and of two FP4 codes in a byte
CODES = ("F8_E4M3", "F8_E5M2", "I8")


@dataclass(frozen=True)
class LoadingPlan:
    """How a model is made of a checkpoint that is complete.

    twin : the model on the meta device.
    config : as transformers is given it to fill the model (`models.quantizers.readable`).
    dtype : what transformers computes in where the config does not say.
    experts : for each MoE layer and expert, its parameters by name and how each is made; empty
        for a store.
    expert_keys, ignored : the checkpoint's keys that feed experts, and that the architecture
        declares superfluous.
    same : key → name of the parameters that are a tensor of the checkpoint as it is."""

    twin: torch.nn.Module
    config: Any
    layers: list[MoELayer]
    quantizer: Any
    dtype: torch.dtype
    experts: list[list[dict[str, compat.ParameterPlan]]]
    expert_keys: set[str]
    ignored: set[str]
    same: dict[str, str]


def make_plan(
    folder: Path, said: Path, tensors: Header, store: ExpertStore | None, config: Any
) -> LoadingPlan:
    """The plan of a checkpoint that holds exactly the model of its config, which the file `said` says.

    Raises ValueError: it does not, naming what is missing, unexpected, of another shape, no
    floating-point number where the model has one, or a code without its scale; an architecture that
    cannot be built with this config; a dense one."""
    from moelab.models import quantizers

    main = _first_type(folder, tensors)
    with blamed(said, f"no {config.model_type} model can be built of this config"):
        if config.dtype is None:
            config = copy(config)
            config.dtype = main
        twin = compat.meta_twin(config)
        readable = quantizers.readable(config)
        quantizer = quantizers.quantizer_for(readable)
    layers = discover(twin)
    parameters = twin.state_dict()
    with blamed(folder, "it is not complete, or another model than its config.json's"):
        plans, foreign = compat.loading_plan(twin, tensors, quantizer)
    scaled = quantisation(config) == "fp8"
    made = set()
    for plan in plans.values():
        made |= _made(plan, folder, tensors, twin, parameters, quantizer, scaled)
    if store is not None:
        made |= _experts_of_store(store, layers)
    lost, extra = compat.may_lack(twin, parameters.keys() - made, made, set(foreign))
    if lost or extra:
        extra = sorted(foreign[name] for name in extra)
        raise ValueError(
            f"{folder} lacks {_some(sorted(lost))} and has {_some(extra)} besides: its tensors are "
            f"not those of a {config.model_type} model with this config. Download what is "
            f"missing, or check config.json; other layouts are not read"
        )
    experts = [_by_expert(layer, plans) for layer in layers] if store is None else []
    targets = {p.target for of_layer in experts for expert in of_layer for p in expert.values()}
    expert_keys = {key for target in targets for key in plans[target].keys}
    ignored = set(foreign.values())
    same = {plan.keys[0]: name for name, plan in plans.items() if plan.converter is None}
    return LoadingPlan(twin, readable, layers, quantizer, main, experts, expert_keys, ignored, same)


def _by_expert(
    layer: MoELayer, plans: dict[str, compat.ParameterPlan]
) -> list[dict[str, compat.ParameterPlan]]:
    """For each expert of a layer, its parameters by name and how each is made. ValueError if one is
    made together with others, since experts are read one by one."""
    prefix = f"{layer.name}.experts."
    found = [{} for _ in range(layer.E)]
    for name, bank in banks(layer.experts).items():
        plan = plans.get(prefix + name)
        if plan is None:
            raise ValueError(
                f"{prefix}{name} is made together with other parameters, and experts are read one by "
                f"one; this layout is not read"
            )
        number = re.fullmatch(r"expert_(\d+)\.(.+)", name)  # of a parameter that is one expert's
        plan.single = number is not None
        if bank.dim() > layer.experts.get_parameter(name).dim():
            plan.rows = bank.shape[1]
        own = number[2] if number else name
        for expert in [int(number[1])] if number else range(layer.E):
            found[expert][own] = plan
    return found


def _made(
    plan: compat.ParameterPlan,
    folder: Path,
    tensors: Header,
    twin: torch.nn.Module,
    parameters: Tensors,
    quantizer: Any,
    scaled: bool,
) -> set[str]:
    """Names of what a plan makes; ValueError unless each has the shape of the model's and is
    a float where that is one (any is cast to any other), and codes have scales.

    parameters : the twin's, by full name.
    scaled : whether weights are FP8 with scales."""
    shapes = Counter(tensors[key].shape for key in plan.keys)
    rare_first = sorted(plan.keys, key=lambda key: shapes[tensors[key].shape])
    said = (f"{key} is {tensors[key].dtype} {list(tensors[key].shape)}" for key in rare_first)
    given = f"of {_some([*said])}; check config.json"
    stored = {}
    for pattern, keys in plan.sources.items():
        stored[pattern] = [on_meta(tensors[key]) for key in keys]
        if len({tensor.shape for tensor in stored[pattern]}) > 1:
            raise ValueError(f"{folder}: {plan.target} cannot be made {given}")
    if plan.converter is None:
        stored = {pattern: found[0] for pattern, found in stored.items()}
    with blamed(folder, f"{plan.target} cannot be made {given}"):
        if scaled:
            _require_scales(plan, tensors, quantizer.quantization_config.weight_block_size or ())
        made = compat.converted(plan, stored, twin, quantizer)
    for name in made.keys() & parameters.keys():
        found = list(made[name].shape)
        wanted = list(parameters[name].shape)
        if found != wanted:
            raise ValueError(
                f"{folder}: {name} is {wanted} in {twin.config.model_type} with this "
                f"config, and {found} is made {given}"
            )
    kinds = {on_meta(tensors[key]).is_floating_point() for key in plan.keys}
    coded = quantizer and len(plan.sources) > 1  # what codes mean, the quantiser knows
    wanted = parameters[plan.target].dtype
    if kinds != {wanted.is_floating_point} and not coded:
        raise ValueError(f"{folder}: {plan.target} is {wanted} in the model, and is made {given}")
    return set(made)


def _require_scales(plan: compat.ParameterPlan, tensors: Header, block: tuple[int, ...]) -> None:
    """ValueError unless FP8 weights, and no others, have scales: one a tensor, or one a block
    if the config has such."""
    for pattern, keys in plan.sources.items():
        if pattern.endswith("_scale_inv"):
            continue
        for key, scale in zip_longest(keys, plan.sources.get(f"{pattern}_scale_inv", [])):
            weight = tensors[key]
            fits = weight.dtype in FLOATS and scale is None
            grid = ()
            if weight.dtype in CODES and scale is not None:
                of = tensors[scale]
                grid = tuple(-(-n // b) for n, b in zip(weight.shape, block))
                shaped = of.shape == grid or prod(of.shape) == 1 or weight.dtype == "I8"
                fits = (shaped or not grid) and DTYPES[of.dtype].is_floating_point
            if not fits:
                raise ValueError(
                    f"{key}, and no plain weights, should have a tensor of scales {list(grid)} or one scale"
                )


def _experts_of_store(store: ExpertStore, layers: list[MoELayer]) -> set[str]:
    """Full names of the experts' parameters that a store has; ValueError where they are not the
    model's."""
    wanted = [(f"{layer.name}.experts", layer.E, shapes(layer.experts)) for layer in layers]
    stored = [
        (
            of.module,
            len(of.experts),
            {name: shape for name, (_, shape) in of.tensors.items()},
        )
        for of in store.layers
    ]
    if stored != wanted:
        raise ValueError(
            f"{store.folder} holds other experts than its config.json describes; convert the model again"
        )
    return {f"{layer.name}.experts.{name}" for layer in layers for name in banks(layer.experts)}


def _first_type(folder: Path, tensors: Header) -> torch.dtype:
    """What transformers computes in where no config says: the type of the first plain weights of
    the first file."""
    floats = [(entry.file, key) for key, entry in tensors.items() if entry.dtype in FLOATS]
    if not floats:
        raise ValueError(
            f"{folder} has no floating-point weights, so it is no model that is run here"
        )
    return DTYPES[tensors[min(floats)[1]].dtype]


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(name[:300] for name in names[:4]) or "nothing"
    return shown + (f" and {len(names) - 4:,} more" if len(names) > 4 else "")
