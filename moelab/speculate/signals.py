"""Default vectors and quasi-hidden states: the next router's input, predicted before this layer's
experts have run.

Source: Speculating Experts §3.1 and §3.2. What an expert adds to the residual stream is replaced by
its average.

    d_l = Σ_k g_{l,k} d_{l,e_k} + shared_l        q_l = norm_{l+1}(d_l + r_l)

Where a model scales or norms what the block adds (`moelab.models.stream`), d_l estimates what is
added before that and is put through it. What attention of layer l + 1, or a dense layer in between,
adds to the stream is missing from q. Shapes: d [L, E, H], shared [L, H], ids and weights [T, K], r
and q [T, H]."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab import recording
from moelab.checkpoint.opening import spec_of
from moelab.files import load_tensors, save_tensors
from moelab.models import SeamExperts, discover, eager, plugged
from moelab.models.identity import identity, same_source
from moelab.models.patches import Patches
from moelab.models.stream import Stream, streams, times
from moelab.progress import progress
from moelab.schema import checked
from moelab.specs import MoESpec

FORMAT = "moelab.default_vectors/2"


@dataclass(frozen=True, eq=False)
class DefaultVectors:
    """What experts add on average.

    d : float32 [L, E, H], mean output of each expert, not yet multiplied by its routing weight, but
        by the factor κ that the model may have for all (`moelab.models.stream`). One never chosen
        has the mean of its layer's experts.
    shared : float32 [L, H], mean of what is added beside the routed experts.
    counts : int64 [L, E], tokens behind each mean.
    weighted : whether `d` includes the routing weight, as it must where that scales the expert's
    input."""

    d: Tensor
    shared: Tensor
    counts: Tensor
    weighted: bool
    model_id: str

    def __post_init__(self) -> None:
        # L × [E + 1, H], with a last row of zeros for the id E, "no expert"
        object.__setattr__(self, "_tables", F.pad(self.d, (0, 0, 0, 1)).unbind(0))

    def layer_default(self, layer: int, ids: Tensor, weights: Tensor) -> Tensor:
        """d_l of tokens whose experts are `ids` [T, K] with `weights` [T, K]: float32 [T, H]  (§3.1)."""
        weights = (
            torch.ones_like(weights, dtype=torch.float32) if self.weighted else weights.float()
        )
        return (
            F.embedding_bag(ids, self._tables[layer], mode="sum", per_sample_weights=weights)
            + self.shared[layer]
        )

    def to(self, device: torch.device | str) -> DefaultVectors:
        return replace(self, d=self.d.to(device), shared=self.shared.to(device))

    def check(self, model: nn.Module, where: str = "") -> None:
        check_model(
            model,
            self.model_id,
            f"{where} these default vectors were measured on".lstrip(),
            "moelab.speculate.default_vectors(model, prompts) measures its own",
        )

    def save(self, path: str | Path) -> Path:
        return save_tensors(
            path,
            {"d": self.d, "shared": self.shared, "counts": self.counts},
            {"format": FORMAT, "model_id": self.model_id, "weighted": json.dumps(self.weighted)},
        )

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> DefaultVectors:
        """Read the default vectors of `model`; ValueError if they are not readable or another
        model's."""
        vectors = load_tensors(
            path,
            FORMAT,
            "default vectors",
            "default_vectors(…).save(path)",
            {"weighted": bool, "model_id": str},
            cls._loaded,
        )
        vectors.check(model, f"{path}:")
        check_geometry(model, vectors.counts.shape, path)
        return vectors

    @classmethod
    def _loaded(cls, tensors: dict[str, Tensor], weighted: bool, model_id: str) -> DefaultVectors:
        d = checked(tensors, "d", ("float32",), (None, None, None))
        return cls(
            d,
            checked(tensors, "shared", ("float32",), d.shape[::2]),
            checked(tensors, "counts", ("int64",), d.shape[:2], 0),
            weighted,
            model_id,
        )


def check_model(model: nn.Module, model_id: str, what: str, remedy: str) -> None:
    if not same_source(mine := identity(model), model_id):
        raise ValueError(
            f"{what} another model (identity {model_id}, this model's is {mine}); {remedy}"
        )


def check_geometry(model: nn.Module, shape: Sequence[int], path: str | Path) -> None:
    """ValueError unless a file's (L, E) are the model's."""
    if tuple(shape) != (wanted := (spec_of(model).L, spec_of(model).E)):
        raise ValueError(
            f"{path} is damaged: it is of {tuple(shape)} layers and experts, the model of {wanted}; make "
            "it again"
        )


def quasi_hidden(path: Sequence[Stream], r: Tensor, d: Tensor) -> Tensor:
    """q = norm(d + r), with the norm of the layer that is predicted: [T, H] in r's dtype  (§3.2).

    path : the residual stream around this layer, those in between and the one that is predicted.
    r, d : residual stream before this layer's norm, and this layer's default, [T, H] each.
    """
    here, *between, following = path
    x = here.added(r, d)
    factor = following.carry
    for stream in between:
        factor *= stream.carry * stream.keep
    return following.router_input(times(factor, x).to(r.dtype))


def default_vectors(model: Any, prompts: Sequence[Any], max_new_tokens: int = 0) -> DefaultVectors:
    """Measure a model's default vectors on `prompts`, in memory that does not grow with them.

    prompts : texts, `moelab.datasets.Prompt`s or lists of token ids; run one by one, so that no
        padding is averaged.
    max_new_tokens : tokens generated greedily after each prompt, which count too.

    Experts are computed one by one, as with the executor "exact", whichever the model was opened
    with.

    Raises ValueError: no prompts, an empty one, no tokenizer for texts, an architecture whose
        residual stream is of an unknown kind.
    """
    spec, ids = spec_of(model), recording.token_ids(prompts, getattr(model, "tokenizer", None))
    with Patches() as patches:
        patches.callback(model.train, model.training)
        if (engine := getattr(getattr(model, "moelab", None), "engine", None)) is not None:
            patches.put(engine, "executor", None)
        patches.enter_context(plugged(model, engine or eager))
        weighted = type(discover(model)[0].seam).weighted is not SeamExperts.weighted
        sums = _Sums(spec, streams(model), weighted)
        sums.attach(patches)
        model.eval()
        for prompt in progress(ids, "default vectors", unit="prompt"):
            tokens = torch.tensor([prompt], device=model.device)
            with torch.no_grad():
                recording.run(model, tokens, torch.ones_like(tokens), max_new_tokens, {})
    return sums.vectors(identity(model))


class _Sums:
    """Sums and counts of experts' outputs, and of what else a layer adds to the stream, seen by
    hooks."""

    def __init__(self, spec: MoESpec, streams: list[Stream], weighted: bool) -> None:
        self.streams, self.weighted = streams, weighted
        self.sums = torch.zeros(spec.L, spec.E, spec.H, dtype=torch.float64)
        self.counts, self.shared = (
            torch.zeros(spec.L, spec.E, dtype=torch.long),
            torch.zeros_like(self.sums[:, 0]),
        )
        self.tokens = torch.zeros_like(self.counts[:, 0])
        self.routed: dict[int, Tensor] = {}

    def attach(self, patches: Patches) -> None:
        for stream in self.streams:
            for method in (self.contribution, self.accumulate):
                seam = stream.layer.seam
                patches.put(seam, method.__name__, partial(method, seam))
            for hook in stream.listen(partial(self._after, stream.layer.index)):
                patches.callback(hook.remove)

    def contribution(
        self, experts: SeamExperts, x: Tensor, tokens: Tensor, w: Tensor, weights: dict[str, Tensor]
    ) -> Tensor:
        """An expert's, which knows what it was before it was weighted."""
        if self.weighted:
            y = out = type(experts).contribution(experts, x, tokens, w, weights)
        else:
            y = experts.ffn(x[tokens], weights)
            out = y * w[:, None]
        out.unweighted = y
        return out

    def accumulate(
        self, experts: SeamExperts, x: Tensor, contributions: list[tuple[int, Tensor, Tensor]]
    ) -> Tensor:
        for expert, _, out in contributions:
            self.sums[experts.layer, expert] += out.unweighted.cpu().sum(0, dtype=torch.float64)
            self.counts[experts.layer, expert] += len(out)
        out = type(experts).accumulate(experts, x, contributions)
        self.routed[experts.layer] = out.clone()  # a block may add its shared experts in place
        return out

    def _after(self, layer: int, v: Tensor) -> None:
        routed = self.streams[layer].scale * self.routed.pop(layer).cpu().double()
        rest = v.reshape(-1, v.shape[-1]).cpu().double() - routed
        self.shared[layer] += rest.sum(0)
        self.tokens[layer] += len(rest)

    def vectors(self, model_id: str) -> DefaultVectors:
        n = self.counts[..., None]
        sums = (
            self.sums
            * torch.tensor([stream.scale for stream in self.streams], dtype=torch.float64)[
                :, None, None
            ]
        )
        layer_mean = sums.sum(1, keepdim=True) / n.sum(1, keepdim=True).clamp(min=1)  # [L, 1, H]
        d = torch.where(n > 0, sums / n.clamp(min=1), layer_mean)
        shared = self.shared / self.tokens[:, None].clamp(min=1)
        return DefaultVectors(d.float(), shared.float(), self.counts, self.weighted, model_id)
