"""Whether a checkpoint is the whole model that its config describes, asked before a weight is read.

transformers fills a parameter that a checkpoint lacks with random numbers. Here the keys are mapped
to parameters by transformers' own tables and converted on the meta device; what is missing,
unexpected or of another shape, unless the architecture declares it tied or optional, is refused by
name. Any floating type is cast to the model's, as transformers casts it; codes want their scales.
Values are not checked."""

from __future__ import annotations

from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from moelab.checkpoint.checkpoint import FLOATS, Checkpoint, blamed
from moelab.configs import quantisation
from moelab.models import compat
from moelab.models.seam import MoELayer, banks, discover
from moelab.specs import MoESpec
from moelab.store.headers import DTYPES, Stored

#: types of FP8 weights, and of two FP4 codes in a byte
CODES = ("F8_E4M3", "F8_E5M2", "I8")


@dataclass(frozen=True)
class LoadingPlan:
    """How a model is made of a checkpoint that is complete.

    twin : the model on the meta device.    dtype : what transformers computes in where the config does not say.
    narrowed : keys of weights that are stored more precisely than the architecture computes with
        them.
    experts : for each MoE layer, the experts module's parameters by name and how each is made; {}
        in a store.
    stored : for each MoE layer, the type that holds a parameter of any of its experts exactly, by
        the expert's name.
    expert_keys, ignored : the checkpoint's keys that feed experts, and that the architecture
    declares superfluous."""

    twin: torch.nn.Module
    layers: list[MoELayer]
    quantizer: Any
    dtype: torch.dtype
    narrowed: list[str]
    experts: list[dict[str, compat.ParameterPlan]]
    stored: list[dict[str, torch.dtype]]
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
        """What to compute in: as asked, or as config.json says, or else as most weights are
        stored."""
        if dtype != "auto":
            found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
            if not isinstance(found, torch.dtype) or not found.is_floating_point:
                raise ValueError(
                    f"dtype is {dtype!r}; it must be 'auto' or a floating-point type of torch"
                )
            return found
        return getattr(self.config, "dtype", None) or self.plan.dtype


def complete(checkpoint: Checkpoint, config: Any) -> LoadingPlan:
    """The plan of a checkpoint that holds exactly the model of this config.

    Raises ValueError: it does not, naming what is missing, unexpected, of another shape, no
    floating-point number where the model has one, or a code without its scale; an architecture that
    cannot be built with this config; a dense one."""
    compat.model_class(config)
    main = _first_type(checkpoint)
    with blamed(
        checkpoint.folder / "config.json",
        f"no {config.model_type} model can be built of this config",
    ):
        if config.dtype is None:
            config = deepcopy(config)
            config.dtype = main
        twin = compat.meta_twin(config)
        quantizer = compat.quantizer_for(config)
    layers = discover(twin)
    try:
        plans, foreign = compat.loading_plan(twin, checkpoint.tensors, quantizer)
    except ValueError as error:
        raise ValueError(
            f"{checkpoint.folder} is not complete: {error}; download what is missing, or check "
            f"config.json"
        ) from error
    parameters = twin.state_dict()
    if quantisation(config) == "fp8":
        _scales(checkpoint, plans, quantizer.quantization_config.weight_block_size)
    made = {
        name
        for plan in plans.values()
        for name in _made(checkpoint, plan, parameters, twin, quantizer)
    }
    made |= _experts_of_store(checkpoint, layers)
    missing, unexpected = compat.may_lack(twin, set(parameters) - made, made, set(foreign))
    has = f"has {_some(sorted(foreign[name] for name in unexpected))}, which has no place in"
    if missing:
        keys = compat.published_names(twin)
        names = [
            " and ".join(
                [name, *(f"(as a key: {key})" for key in keys.get(name, ())[:2] if key != name)]
            )
            for name in sorted(missing)
        ]
        raise ValueError(
            f"{checkpoint.folder} lacks {_some(names)}, which {config.model_type} with this config needs"
            + (
                f"; it {has} it. The tensors of another layout, or of another model than config.json says, "
                f"are not read"
                if unexpected
                else "; download what is missing, or check config.json"
            )
        )
    if unexpected:
        raise ValueError(
            f"{checkpoint.folder} {has} a {config.model_type} model with this config; check config.json"
        )
    narrowed = _narrowed(checkpoint, plans, parameters, twin, quantizer)
    experts: list[dict[str, compat.ParameterPlan]] = []
    stored: list[dict[str, torch.dtype]] = []
    for layer in layers:
        prefix, own = layer.name + ".experts.", banks(layer.experts)
        experts.append({name: plans[prefix + name] for name in own if prefix + name in plans})
        if checkpoint.store is None and (together := own.keys() - experts[-1].keys()):
            raise ValueError(
                f"{checkpoint.folder}: {prefix}{min(together)} is made together with other parameters, "
                f"and moelab reads experts one by one; this layout of {config.model_type} is not read"
            )
        stored.append(_stored(checkpoint, experts[-1], parameters, quantizer))
    expert_keys = {key for plan in experts for p in plan.values() for key in p.keys}
    return LoadingPlan(
        twin, layers, quantizer, main, narrowed, experts, stored, expert_keys, set(foreign.values())
    )


def _made(
    checkpoint: Checkpoint,
    plan: compat.ParameterPlan,
    parameters: dict[str, torch.Tensor],
    twin: torch.nn.Module,
    quantizer: Any,
) -> set[str]:
    """Names of what a plan makes; ValueError unless every one has the shape that the model's
    parameter has."""
    tensors = checkpoint.tensors
    for keys in plan.sources.values():
        if odd := _odd({key: tensors[key].shape for key in keys}):
            raise ValueError(
                f"{checkpoint.folder}: {_described(tensors, odd)}, unlike the others of {plan.target}; "
                f"this is not the model of its config.json"
            )
    stored = {
        pattern: [
            torch.empty(tensors[key].shape, dtype=DTYPES[tensors[key].dtype], device="meta")
            for key in keys
        ]
        for pattern, keys in plan.sources.items()
    }

    def wanted(name: str) -> str:
        return (
            f"{checkpoint.folder}: {name} is {list(parameters[name].shape)} in {twin.config.model_type} with this "
            f"config, and"
        )

    try:
        if plan.converter is None:
            stored = {pattern: found[0] for pattern, found in stored.items()}
        made = compat.converted(plan, stored, twin, quantizer)
    except Exception as error:
        raise ValueError(
            f"{wanted(plan.target)} cannot be made of {_described(tensors, plan.keys)} "
            f"({type(error).__name__}: {error})"
        ) from error
    for name, tensor in made.items():
        if name in parameters and tensor.shape != parameters[name].shape:
            raise ValueError(f"{wanted(name)} {_described(tensors, plan.keys)}; check config.json")
    return set(made)


def _odd(values: dict[str, Any]) -> list[str]:
    """The keys whose values are unlike the most common one; all, if no two are alike; none, if all
    are."""
    counts = Counter(values.values())
    usual, times = counts.most_common(1)[0]
    return (
        [key for key, value in values.items() if value != usual or times == 1]
        if len(counts) > 1
        else []
    )


def _experts_of_store(checkpoint: Checkpoint, layers: list[MoELayer]) -> set[str]:
    """Full names of the experts' parameters that a store has; ValueError where they are not the
    model's."""
    if checkpoint.store is None:
        return set()
    made = set()
    for i, layer in enumerate(layers):
        prefix, stacked = (
            layer.name + ".experts.",
            not isinstance(layer.experts, torch.nn.ModuleDict),
        )
        shapes = {prefix + name: tuple(p.shape) for name, p in banks(layer.experts).items()}
        stored: dict[str, tuple] = {}
        for there in checkpoint.store.layers[i : i + 1]:
            E = len(there.experts)
            for name, (_, shape) in there.tensors.items():
                stored |= (
                    {f"{there.module}.{name}": (E, *shape)}
                    if stacked
                    else {f"{there.module}.expert_{e}.{name}": tuple(shape) for e in range(E)}
                )
        if stored != shapes or len(checkpoint.store.layers) != len(layers):
            raise ValueError(
                f"{checkpoint.folder} holds other experts than its config.json describes (MoE layer {i} "
                f"of {len(layers)}); convert the model again"
            )
        made |= set(shapes)
    return made


def _first_type(checkpoint: Checkpoint) -> torch.dtype:
    """What transformers computes in where no config says: the type of the first plain weights of
    the first file."""
    floats = [
        (entry.file, key) for key, entry in checkpoint.tensors.items() if entry.dtype in FLOATS
    ]
    if not floats:
        raise ValueError(
            f"{checkpoint.folder} has no floating-point weights, so it is no model that is run here"
        )
    return DTYPES[checkpoint.tensors[min(floats)[1]].dtype]


def _scales(
    checkpoint: Checkpoint, plans: dict[str, compat.ParameterPlan], block: list[int] | None
) -> None:
    """ValueError unless FP8 weights, and no others, have scales: one a tensor, or by blocks if the
    config has such."""
    tensors = checkpoint.tensors
    for plan in plans.values():
        for pattern, keys in plan.sources.items():
            for key, scale in zip_longest(keys, plan.sources.get(f"{pattern}_scale_inv", [])):
                dtype, shape = tensors[key].dtype, tensors[key].shape
                grid = tuple(-(-n // b) for n, b in zip(shape, block or ()))
                if scale:
                    fits = (
                        not block
                        or dtype == "I8"
                        or tensors[scale].shape in (grid, (), (1,), (1,) * len(shape))
                    )
                    fits = fits and dtype in CODES
                else:
                    fits = dtype in FLOATS or pattern.endswith("_scale_inv")
                if not fits:
                    raise ValueError(
                        f"{checkpoint.folder}: {_described(tensors, [key])} with "
                        f"{_described(tensors, [scale]) if scale else f'no {key}_scale_inv'}; FP8 weights, and they "
                        f"alone, are read with scales {list(grid)} of that name, or one for a whole tensor"
                    )


def _narrowed(
    checkpoint: Checkpoint,
    plans: dict[str, compat.ParameterPlan],
    parameters: dict[str, torch.Tensor],
    twin: torch.nn.Module,
    quantizer: Any,
) -> list[str]:
    """Keys of weights that lose precision; ValueError for numbers of another kind than the
    model's."""
    tensors, narrowed = checkpoint.tensors, []
    for plan in plans.values():
        if (
            quantizer is not None
            and len(plan.sources) > 1
            and any(tensors[k].dtype not in FLOATS for k in plan.keys)
        ):
            continue  # codes and scales: what the quantiser stores, it knows
        parameter = parameters[plan.target]
        for key in plan.keys:
            dtype, floating = DTYPES[tensors[key].dtype], parameter.is_floating_point()
            wider = compat.widest({dtype, parameter.dtype}) != parameter.dtype
            if dtype.is_floating_point != floating or wider and not floating:
                raise ValueError(
                    f"{checkpoint.folder}: {_described(tensors, [key])}, where the model has "
                    f"{parameter.dtype}, and nothing says what its numbers mean"
                )
            if (
                wider
                and dtype.itemsize > 1
                and not compat.kept_in_fp32(twin, plan.target, parameter)
            ):
                narrowed.append(key)
    return narrowed


def _stored(
    checkpoint: Checkpoint,
    plans: dict[str, compat.ParameterPlan],
    parameters: dict[str, torch.Tensor],
    quantizer: Any,
) -> dict[str, torch.dtype]:
    """Of a layer's experts, by the parameter's name in one: see `LoadingPlan`; what is dequantised
    has the model's."""
    types = defaultdict(set)
    for name, plan in plans.items():
        stored = {checkpoint.tensors[key].dtype for key in plan.keys}
        types[(compat.numbered_expert(name) or (0, name))[1]] |= (
            {DTYPES[dtype] for dtype in stored}
            if quantizer is None or stored <= {*FLOATS}
            else {parameters[plan.target].dtype}
        )
    return {name: compat.widest(found) for name, found in types.items()}


def _described(tensors: dict[str, Stored], keys: list[str]) -> str:
    return _some([f"{key} is {tensors[key].dtype} {list(tensors[key].shape)}" for key in keys])


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(name[:300] for name in names[:4]) + (
        f" and {len(names) - 4:,} more" if len(names) > 4 else ""
    )
