"""Whether a checkpoint is the whole model that its config describes, asked before a weight is read.

transformers fills a parameter that a checkpoint lacks with random numbers. Here the keys are mapped to parameters by
transformers' own tables and converted on the meta device; what is missing, unexpected or of another shape, unless the
architecture declares it tied or optional, is refused by name. The tensors of one kind, those whose names differ in
numbers only, are stored alike, and most kinds share one floating type; another may be fp32 if there are several of it,
which no accident explains, or if the architecture itself computes with it in fp32. Values are not checked.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from moelab.models import compat
from moelab.models.checkpoint import COUNTS, Checkpoint, blamed
from moelab.models.seam import MoELayer, banks, discover
from moelab.specs import MoESpec
from moelab.store import packings
from moelab.store.headers import DTYPES, Stored

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class LoadingPlan:
    """How a model is made of a checkpoint that is complete.

    twin : the model on the meta device.    dtype : of most of its floating-point weights.
    narrowed : keys of weights that are stored more precisely than the architecture computes with them.
    experts : for each MoE layer, the experts module's parameters by name and how each is made; {} in a store.
    expert_keys, ignored : the checkpoint's keys that feed experts, and that the architecture declares superfluous.
    """

    twin: torch.nn.Module
    layers: list[MoELayer]
    quantizer: Any
    dtype: torch.dtype
    narrowed: list[str]
    experts: list[dict[str, compat.ParameterPlan]]
    expert_keys: set[str]
    ignored: set[str]


@dataclass(frozen=True)
class Examined:
    """A model that is complete, before a weight of it is read."""

    checkpoint: Checkpoint
    config: Any
    spec: MoESpec
    plan: LoadingPlan

    def dtype(self, dtype: torch.dtype | str = "auto") -> torch.dtype:
        """What to compute in: as asked, or as config.json says, or else as most weights are stored."""
        if dtype != "auto":
            found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
            if not isinstance(found, torch.dtype) or not found.is_floating_point:
                raise ValueError(f"dtype is {dtype!r}; it must be 'auto' or a floating-point type of torch")
            return found
        return getattr(self.config, "dtype", None) or self.plan.dtype


def complete(checkpoint: Checkpoint, config: Any) -> LoadingPlan:
    """The plan of a checkpoint that holds exactly the model of this config.

    Raises ValueError: it does not, naming what is missing, unexpected, of another shape or another type; a dense model;
    an architecture that cannot be built with this config.
    """
    _plausible(checkpoint, config)
    compat.model_class(config)
    main = _main_type(checkpoint)
    with blamed(checkpoint.folder / "config.json", f"no {config.model_type} model can be built of this config"):
        if config.dtype is None:
            config = deepcopy(config)
            config.dtype = DTYPES[main]
        twin = compat.meta_twin(config)
        quantizer = compat.quantizer_for(config)
    layers = discover(twin)
    try:
        plans, foreign = compat.loading_plan(twin, checkpoint.tensors, quantizer)
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder} is not complete: {error}; download the checkpoint again") from error
    parameters = twin.state_dict()
    if block := getattr(getattr(quantizer, "quantization_config", None), "weight_block_size", None):
        _scales(checkpoint, plans, block)
    made = {name for plan in plans.values() for name in _made(checkpoint, plan, parameters, twin, quantizer)}
    made |= _experts_of_store(checkpoint, layers)
    missing, unexpected = compat.may_lack(twin, set(parameters) - made, made, set(foreign))
    has = f"has {_some(sorted(foreign[name] for name in unexpected))}, which has no place in"
    if missing:
        keys = compat.published_names(twin)
        names = [" and ".join([name, *(f"(as a key: {key})" for key in keys.get(name, ())[:2] if key != name)])
                 for name in sorted(missing)]
        raise ValueError(f"{checkpoint.folder} lacks {_some(names)}, which {config.model_type} with this config needs"
                         + (f"; it {has} it" if unexpected else "") + "; download the checkpoint again")
    if unexpected:
        raise ValueError(f"{checkpoint.folder} {has} a {config.model_type} model with this config; check config.json, "
                         f"or download the checkpoint again")
    narrowed = _types(checkpoint, plans, parameters, twin, quantizer, main)
    experts: list[dict[str, compat.ParameterPlan]] = []
    for layer in layers:
        prefix, own = layer.name + ".experts.", banks(layer.experts)
        experts.append({name: plans[prefix + name] for name in own if prefix + name in plans})
        if checkpoint.store is None and (together := own.keys() - experts[-1].keys()):
            raise ValueError(f"{checkpoint.folder}: {prefix}{min(together)} is made together with other parameters, "
                             f"and moelab reads experts one by one; this layout of {config.model_type} is not read")
    expert_keys = {key for plan in experts for p in plan.values() for key in p.keys}
    return LoadingPlan(twin, layers, quantizer, DTYPES[main], narrowed, experts, expert_keys, set(foreign.values()))


def _plausible(checkpoint: Checkpoint, config: Any) -> None:
    """ValueError for a config with many more layers than the checkpoint has tensors, or of anything else it counts."""
    most = max(1000, len(checkpoint.tensors))
    widest = max([most, *(n for entry in checkpoint.tensors.values() for n in entry.shape)])
    for part in [config, *(getattr(config, name, None) for name in type(config).sub_configs)]:
        for name, value in vars(part).items() if part is not None else ():
            limit = most if "layer" in name else widest
            if type(value) is int and value > limit and COUNTS.search(name):
                raise ValueError(f"{checkpoint.folder / 'config.json'} says {name} = {value:,}, and the checkpoint has "
                                 f"{len(checkpoint.tensors):,} tensors; one of the two is damaged or not the other's")


def _made(checkpoint: Checkpoint, plan: compat.ParameterPlan, parameters: dict[str, torch.Tensor],
          twin: torch.nn.Module, quantizer: Any) -> set[str]:
    """Names of what a plan makes; ValueError unless every one has the shape that the model's parameter has."""
    tensors = checkpoint.tensors
    for keys in plan.sources.values():
        if odd := _odd({key: tensors[key].shape for key in keys}):
            raise ValueError(f"{checkpoint.folder}: {_described(tensors, odd)}, unlike the others of {plan.target}; "
                             f"download the checkpoint again")
    stored = {pattern: [torch.empty(tensors[key].shape, dtype=DTYPES[tensors[key].dtype], device="meta")
                        for key in keys] for pattern, keys in plan.sources.items()}

    def wanted(name: str) -> str:
        return (f"{checkpoint.folder}: {name} is {list(parameters[name].shape)} in {twin.config.model_type} with this "
                f"config, and")

    try:
        if plan.converter is None:
            stored = {pattern: found[0] for pattern, found in stored.items()}
        made = compat.converted(plan, stored, twin, quantizer)
    except Exception as error:
        raise ValueError(f"{wanted(plan.target)} cannot be made of {_described(tensors, plan.keys)} "
                         f"({type(error).__name__}: {error}); download the checkpoint again") from error
    for name, tensor in made.items():
        if name in parameters and tensor.shape != parameters[name].shape:
            raise ValueError(f"{wanted(name)} {_described(tensors, plan.keys)}; download the checkpoint again")
    return set(made)


def _odd(values: dict[str, Any]) -> list[str]:
    """The keys whose values are unlike the most common one; all, if no two are alike; none, if all are."""
    counts = Counter(values.values())
    usual, times = counts.most_common(1)[0]
    return [key for key, value in values.items() if value != usual or times == 1] if len(counts) > 1 else []


def _experts_of_store(checkpoint: Checkpoint, layers: list[MoELayer]) -> set[str]:
    """Full names of the experts' parameters that a store has; ValueError where they are not the model's."""
    if checkpoint.store is None:
        return set()
    made = set()
    for i, layer in enumerate(layers):
        prefix, stacked = layer.name + ".experts.", not isinstance(layer.experts, torch.nn.ModuleDict)
        shapes = {prefix + name: tuple(p.shape) for name, p in banks(layer.experts).items()}
        stored: dict[str, tuple] = {}
        for there in checkpoint.store.layers[i:i + 1]:
            for e, entries in enumerate(there.experts):
                for name, entry in entries.items():
                    key = f"{there.module}.{name}" if stacked else f"{there.module}.expert_{e}.{name}"
                    stored[key] = (len(there.experts), *entry.shape) if stacked else tuple(entry.shape)
        if stored != shapes or len(checkpoint.store.layers) != len(layers):
            raise ValueError(f"{checkpoint.folder} holds other experts than its config.json describes (MoE layer {i} "
                             f"of {len(layers)}); convert the model again")
        made |= set(shapes)
    return made


def _main_type(checkpoint: Checkpoint) -> str:
    """The floating-point type of most of a checkpoint's weights."""
    floats: Counter[str] = Counter()
    for key, entry in checkpoint.tensors.items():
        if entry.dtype in FLOATS and key.rpartition(".")[2] not in packings.SCALES:
            floats[entry.dtype] += prod(entry.shape)
    if not floats.total():
        raise ValueError(f"{checkpoint.folder} has no floating-point weights, so it is no model that is run here")
    return floats.most_common(1)[0][0]


def _scales(checkpoint: Checkpoint, plans: dict[str, compat.ParameterPlan], block: list[int]) -> None:
    """ValueError unless FP8 weights have scales, each for one of their blocks, and all of one type."""
    tensors = checkpoint.tensors
    pairs = [(key, scales[i:i + 1], _odd({key: tensors[key].dtype for key in keys}))
             for plan in plans.values() for pattern, keys in plan.sources.items()
             for scales in [plan.sources.get(f"{pattern}_scale_inv", [])] for i, key in enumerate(keys)
             if scales or tensors[key].dtype == "F8_E4M3"]
    wrong = set(_odd({scale: tensors[scale].dtype for _, scales, _ in pairs for scale in scales}))
    for key, scales, odd in pairs:
        grid = tuple(-(-n // b) for n, b in zip(tensors[key].shape, block))
        fits = tensors[key].dtype == "F8_E4M3" and [tensors[scale].shape for scale in scales] == [grid]
        if key in odd or not wrong.isdisjoint(scales) or not fits and tensors[key].dtype != "I8":   # two codes of FP4
            found = _described(tensors, scales) or f"no {key}_scale_inv"
            raise ValueError(f"{checkpoint.folder}: {_described(tensors, [key])} with {found}; it should be F8_E4M3 "
                             f"with scales {list(grid)} of the same type as all others; download the checkpoint again")


def _types(checkpoint: Checkpoint, plans: dict[str, compat.ParameterPlan], parameters: dict[str, torch.Tensor],
           twin: torch.nn.Module, quantizer: Any, main: str) -> list[str]:
    """Keys of weights that lose precision; ValueError for a type neither its siblings' nor kept by the architecture."""
    tensors, narrowed = checkpoint.tensors, []
    kinds = defaultdict(list)
    for plan in plans.values():
        for key in plan.keys:
            kinds[re.sub(r"\d+", "#", key), len(plan.sources)].append((key, plan))
    computed = twin.config.dtype
    for members in kinds.values():
        if odd := _odd({key: tensors[key].dtype for key, _ in members}):
            raise ValueError(f"{checkpoint.folder}: {_described(tensors, odd)}, unlike the others of its kind; "
                             f"download the checkpoint again")
        key, plan = members[0]
        usual = tensors[key].dtype
        either = any(getattr(op, "check_dims", False) for op in getattr(plan.converter, "operations", ()))
        if either and len({tensors[key].shape for key, _ in members}) > 1:      # it may lie transposed, but all alike
            raise ValueError(f"{checkpoint.folder}: {_described(tensors, [key for key, _ in members])}, which are not "
                             f"laid out alike; download the checkpoint again")
        if len(plan.sources) > 1 and any(tensors[key].dtype not in FLOATS for key in plan.keys):
            continue                        # codes and scales: what the quantiser stores, it knows
        kept = compat.kept_in_fp32(twin, plan.target, parameters[plan.target])
        target = parameters[plan.target].dtype
        fits = usual == main or usual == "F32" and (kept or len(members) > 1)
        if not fits if target.is_floating_point else DTYPES[usual] != target:
            raise ValueError(f"{checkpoint.folder}: {_described(tensors, [key])}, where the checkpoint's other weights "
                             f"are {main}" + ("" if target.is_floating_point else f" and the model has {target}")
                             + "; download the checkpoint again")
        if target.is_floating_point and not kept and torch.promote_types(DTYPES[usual], computed) != computed:
            narrowed.append(key)
    return narrowed


def _described(tensors: dict[str, Stored], keys: list[str]) -> str:
    return _some([f"{key} is {tensors[key].dtype} {list(tensors[key].shape)}" for key in keys])


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(name[:300] for name in names[:4]) + (f" and {len(names) - 4:,} more" if len(names) > 4 else "")
