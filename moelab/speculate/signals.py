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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab import recording
from moelab.base.files import load_tensors, save_tensors
from moelab.base.progress import progress
from moelab.base.schema import checked
from moelab.checkpoint.opening import spec_of
from moelab.models import SeamExperts, assignments, plugged
from moelab.models.identity import identity, same_source
from moelab.models.patches import Patches
from moelab.models.stream import Stream, streams

FORMAT = "moelab.vectors/1"
MEASURED = "`moelab train vectors MODEL FILE` writes what fits"


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

    @cached_property
    def tables(self) -> Sequence[Tensor]:
        """d of each layer, [E + 1, H], with a last row of zeros for the id E, "no expert"."""
        return F.pad(self.d, (0, 0, 0, 1)).unbind(0)

    def layer_default(self, layer: int, ids: Tensor, weights: Tensor) -> Tensor:
        """d_l of tokens whose experts are `ids` [T, K] with `weights` [T, K]: float32 [T, H]  (§3.1)."""
        weights = torch.ones_like(weights).float() if self.weighted else weights.float()
        d = F.embedding_bag(ids, self.tables[layer], mode="sum", per_sample_weights=weights)
        return d + self.shared[layer]

    def to(self, device: torch.device | str) -> DefaultVectors:
        return replace(self, d=self.d.to(device), shared=self.shared.to(device))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"d": self.d, "shared": self.shared, "counts": self.counts}

    @classmethod
    def of(cls, tensors: dict[str, Tensor], weighted: bool, model_id: str) -> DefaultVectors:
        """Of what `tensors` gave. ValueError for others."""
        L, E, H = checked(tensors, "d", ("float32",), (None, None, None)).shape
        shared = checked(tensors, "shared", ("float32",), (L, H))
        counts = checked(tensors, "counts", ("int64",), (L, E), 0)
        return cls(tensors["d"], shared, counts, weighted, model_id)

    def save(self, path: str | Path) -> Path:
        """Write to `path` atomically (a .safetensors file); returns the path."""
        about = {"weighted": self.weighted, "model_id": self.model_id}
        return save_tensors(path, FORMAT, self.tensors, **about)

    @classmethod
    def load(cls, path: str | Path) -> DefaultVectors:
        """Raises FileNotFoundError, ValueError: not a whole and readable file of default vectors."""
        about = {"weighted": bool, "model_id": str}
        what = "file of default vectors"
        return load_tensors(path, FORMAT, what, MEASURED, about, cls.of)


def check_model(
    model: nn.Module, model_id: str, what: str, remedy: str, L: int = 0, E: int = 0
) -> None:
    """ValueError if `what` was made from another model than this one, or says so and has other layers
    L and experts E."""
    if not same_source(mine := identity(model), model_id):
        raise ValueError(
            f"{what} of another model (identity {model_id}, this model's is {mine}); {remedy}"
        )
    if L and (wanted := (spec_of(model).L, spec_of(model).E)) != (L, E):
        raise ValueError(f"{what} damaged: of {(L, E)} layers and experts, not {wanted}; {remedy}")


def quasi_hidden(path: Sequence[Stream], r: Tensor, d: Tensor) -> Tensor:
    """q = norm(d + r), with the norm of the layer that is predicted: [T, H] in r's dtype  (§3.2).

    path : the residual stream around this layer, those in between and the one that is predicted.
    r, d : residual stream before this layer's norm, and this layer's default, [T, H] each.
    """
    here, *_, following = path
    return following.router_input(here.added(r, d).to(r.dtype))


def default_vectors(model: Any, prompts: Sequence[Any]) -> DefaultVectors:
    """Measure a model's default vectors on `prompts`, in memory that does not grow with them.

    prompts : texts, `moelab.prompts` or lists of token ids; run one by one, so that no
        padding is averaged.

    Experts are computed one by one, as with the executor "exact", whichever the model was opened
    with.

    Raises ValueError: no prompts, an empty one, no tokenizer for texts, an architecture whose
        residual stream is of an unknown kind.
    """
    ids = recording.token_ids(prompts, getattr(model, "tokenizer", None))
    with Patches() as patches:
        sums = _Sums(model)
        patches.enter_context(plugged(model, sums))
        for stream in sums.streams:
            stream.listen(patches, partial(sums.add, stream.layer.index))
        patches.callback(model.train, model.training)
        model.eval()
        for prompt in progress(ids, "default vectors", unit="prompt"):
            tokens = torch.tensor([prompt], device=model.device)
            with torch.no_grad():
                recording.run(model, tokens, torch.ones_like(tokens), 0, {})
    return sums.vectors(identity(model))


class _Sums:
    """An executor that computes as `eager` does, and adds up what each expert puts out; beside it,
    what each layer adds to the stream."""

    def __init__(self, model: Any) -> None:
        spec = spec_of(model)
        self.streams = streams(model)
        self.weighted = False  # whether the architecture scales an expert's input by its weight
        self.sums = torch.zeros(spec.L, spec.E, spec.H, dtype=torch.float64)
        self.counts = torch.zeros(spec.L, spec.E, dtype=torch.long)
        self.routed, self.added = torch.zeros(2, spec.L, spec.H, dtype=torch.float64)
        self.tokens = torch.zeros(spec.L, 1, dtype=torch.long)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts) -> Tensor:
        self.weighted = type(experts).weighted is not SeamExperts.weighted
        contributions = []
        for expert, choice, tokens in assignments(ids, experts.num_experts):
            w = weights[tokens, choice]
            tensors = experts.weights(expert)
            if self.weighted:
                y = out = experts.contribution(x, tokens, w, tensors)
            else:
                y = experts.ffn(x[tokens], tensors)
                out = y * w[:, None]
            contributions.append((expert, tokens, out))
            self.sums[experts.layer, expert] += y.cpu().sum(0, dtype=torch.float64)
            self.counts[experts.layer, expert] += len(y)
        out = experts.accumulate(x, contributions)
        self.routed[experts.layer] += out.cpu().sum(0, dtype=torch.float64)
        return out

    def add(self, layer: int, v: Tensor) -> None:
        """The layer adds v [B, S, H] or [T, H] to the stream."""
        v = v.reshape(-1, v.shape[-1]).cpu()
        self.added[layer] += v.sum(0, dtype=torch.float64)
        self.tokens[layer] += len(v)

    def vectors(self, model_id: str) -> DefaultVectors:
        scale = torch.tensor([stream.scale for stream in self.streams], dtype=torch.float64)
        sums = self.sums * scale[:, None, None]
        n = self.counts[..., None]
        of_layer = sums.sum(1, keepdim=True) / n.sum(1, keepdim=True).clamp(min=1)  # [L, 1, H]
        d = torch.where(n > 0, sums / n.clamp(min=1), of_layer)
        shared = (self.added - self.routed * scale[:, None]) / self.tokens.clamp(min=1)
        return DefaultVectors(d.float(), shared.float(), self.counts, self.weighted, model_id)
