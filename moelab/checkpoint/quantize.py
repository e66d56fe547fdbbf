"""Experts rounded with their inputs at hand, and which of their matrices get how many bits.

Of a few thousand tokens a calibration keeps what each layer's experts were given. An expert's own
tokens count by the squares of their routing weights, all others a little, so that the rare experts,
too, are rounded by data. Its first matrix meets these inputs; its last one what the expert, its first
matrix rounded, makes of them.

"auto:4.5" gives each matrix of a layer (gate and up, down) a format of all its experts, so that one
call of a kernel multiplies them, within so many bits a weight. What is made small is the squared error
of the layers' outputs, measured on the same inputs, relative to the residual streams that they join.

Shapes: x [N, H]; second moments [n, n] of a matrix with n inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelab.base.files import load_tensors
from moelab.base.progress import progress
from moelab.base.schema import FLOATS, checked
from moelab.base.specs import MoESpec
from moelab.models.experts import SeamExperts, Weights, seam_of
from moelab.models.identity import same_source
from moelab.store.codec import Blobs
from moelab.store.codecs import read_codec
from moelab.store.layout import checksum

#: of a token that the router sent elsewhere, beside the mean of an expert's own
ELSEWHERE = 0.3
#: a matrix with more inputs is rounded by their squares alone, without feedback
FULL = 4096
#: that `auto` chooses from
CHOICES = ("mxfp4", "int4", "int8")
#: of a calibration's file
FORMAT = "moelab.calibration/1"
REMEDY = "moelab calibrate MODEL FILE --inputs 4096"


class Inputs(NamedTuple):
    """What a model's experts were given.

    x : [L, N, H], the inputs of N tokens; ids, weights : [L, N, K], their routing.
    gain : float32 [L], what a squared error of a layer's output counts: 1 / the mean square of the
        residual stream that it is added to.
    model_id : of the model, see `moelab.models.identity`."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gain: Tensor
    model_id: str

    @property
    def digest(self) -> str:
        """Eight hex digits."""
        return checksum(repr([*map(checksum, self[:-1])]).encode())[:8]

    @classmethod
    def read(cls, tensors: dict[str, Tensor], spec: MoESpec, model_id: str) -> Inputs | None:
        """Those among tensors of a file, checked; None if it has none. Raises ValueError."""
        if "x" not in tensors:
            return None
        x = checked(tensors, "x", FLOATS, (spec.L, None, spec.H))
        routing = spec.L, x.shape[1], spec.K
        ids = checked(tensors, "ids", ("int16",), routing, 0, spec.E)
        weights = checked(tensors, "weights", FLOATS, routing)
        return cls(x, ids, weights, checked(tensors, "gain", ("float32",), (spec.L,), 0), model_id)

    def require(self, model_id: str) -> Inputs:
        """These; ValueError if they are another model's."""
        if same_source(model_id, self.model_id):
            return self
        raise ValueError(
            f"this calibration belongs to the model {self.model_id}, not to {model_id}: calibrate the "
            f"model itself"
        )

    def of(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """(x [N, H] in fp32, the square of the routing weight of each token [N])."""
        own = self.ids[layer] == expert
        return self.x[layer].float(), (own * self.weights[layer].float()).square().sum(1)


def read_inputs(calibration: Any, spec: MoESpec, model_id: str) -> Inputs:
    """The inputs of a model in a `Calibration` or its file. Raises FileNotFoundError, ValueError: there
    are none, or another model's."""
    inputs = getattr(calibration, "inputs", None)
    if isinstance(calibration, str | Path):
        read = partial(Inputs.read, spec=spec)
        inputs = load_tensors(calibration, FORMAT, "calibration", REMEDY, {"model_id": str}, read)
    if inputs is None:
        raise ValueError(
            f"rounding is to look at what experts are given, and {calibration or 'no calibration'} has none "
            f"of their inputs: make one by `{REMEDY}`"
        )
    return inputs.require(model_id)


def quantize_expert(
    forms: str | dict[str, str],
    tensors: Weights,
    blobs: Blobs,
    experts: SeamExperts,
    inputs: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Round the matrices of an expert, in place; those that do not fit keep their bits.

    forms : a format or one of GGML's types, or that of each by name.
    inputs : as of `Inputs.of`."""
    for name, tensor in tensors.items():
        found = forms if isinstance(forms, str) else forms.get(name, CHOICES[-1])
        form = read_codec(found + ".T" * experts.is_transposed)
        if name in blobs and blobs[name][0] == form:
            continue
        blobs.pop(name, None)
        moments = None
        if inputs and (x := inputs_of(name, tensors, experts, inputs[0])) is not None:
            own = inputs[1]
            x = x * (own + ELSEWHERE * own.mean().clamp_min(1e-9)).sqrt()[:, None]
            moments = x.T @ x if x.shape[1] <= FULL else x.square().sum(0)
        if (blob := form.compress(tensor, moments)) is not None:
            blobs[name] = form, blob
            form.decompress(blob, tensor)


def inputs_of(name: str, tensors: Weights, experts: SeamExperts, x: Tensor) -> Tensor | None:
    """The inputs of one of an expert's matrices, when the expert is given x; None for one of which
    that is not known."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    if name == first:
        return x
    if name != "down_proj":
        return None
    wide = {key: w.float() for key, w in tensors.items() if key.startswith(first)}
    return experts.activate(experts.linear(x, wide, first))


def plan_bits(bits: float, read: Any, layers: list[Any], inputs: Inputs) -> list[dict[str, str]]:
    """The format of each matrix of each layer, for at most `bits` a weight of all that fit.

    read(layer, expert) → its tensors.    Raises ValueError for a budget below all formats."""
    costs = defaultdict(float)
    sizes = defaultdict(float)
    count = 0
    for layer in progress(layers, "measuring", unit="layer"):
        experts = seam_of(layer.experts)
        for expert in range(layer.E):
            tensors = read(layer.index, expert)
            given = inputs.of(layer.index, expert)
            for name, errors, nbytes in measured(tensors, experts, *given):
                costs[layer.index, name] += errors * inputs.gain[layer.index].double()
                sizes[layer.index, name] += nbytes
                count += tensors[name].numel()
    chosen = choose(
        torch.stack([*costs.values()]), torch.stack([*sizes.values()]), bits * count / 8
    )
    plan = [{} for _ in layers]
    for (layer, name), k in zip(costs, chosen):
        plan[layer][name] = CHOICES[k]
    return plan


def measured(
    tensors: Weights, experts: SeamExperts, x: Tensor, weight: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of each matrix that fits, if it alone is rounded to each of `CHOICES`: Σ weight · ‖change of the
    expert's output‖², a token of all, and its bytes."""
    own = weight > 0
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    exact = experts.ffn(x[own], wide)
    for name, tensor in wide.items():
        found = []
        for kind in CHOICES:
            form = read_codec(kind + ".T" * experts.is_transposed)
            if (blob := form.compress(tensor)) is None:
                break
            form.decompress(blob, rounded := torch.empty_like(tensor))
            change = (experts.ffn(x[own], wide | {name: rounded}) - exact).square().sum(1)
            found.append([(change * weight[own]).sum().item() / len(x), len(blob)])
        else:
            yield name, *torch.tensor(found, dtype=torch.float64).T


def choose(costs: Tensor, sizes: Tensor, budget: float) -> list[int]:
    """For each item one of its choices, so that Σ sizes ≤ budget and Σ costs is small: from the first
    on, step by step, what saves most a byte of what still fits.

    costs, sizes : [items, choices], sizes rising along choices. ValueError: the first do not fit."""
    chosen = torch.zeros(len(costs), dtype=torch.long)
    if (least := sizes[:, 0].sum()) > budget:
        raise ValueError(
            f"in {CHOICES[0]} all matrices take {least:,.0f} bytes, and the budget is {budget:,.0f}: "
            f"give more bits"
        )
    while True:
        cost, size = (of.gather(1, chosen[:, None]) for of in (costs, sizes))
        saved = (cost - costs) / (sizes - size).clamp_min(1)
        saved[(sizes <= size) | (sizes - size > budget - size.sum())] = 0
        if saved.max() <= 0:
            return chosen.tolist()
        item, choice = divmod(int(saved.argmax()), saved.shape[1])
        chosen[item] = choice
