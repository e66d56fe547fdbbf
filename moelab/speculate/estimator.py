"""The neural expert estimator: from the quasi-hidden state of a layer to the router logits of the
next one.

Source: Speculating Experts §6.1, §6.2, appendix A (Fig. 11). One small network serves all layers
and takes the place of the next router's linear layer; what follows that (softmax, groups,
renormalisation) is the architecture's own.

    x = A q + p_l        x = x + C silu(B x)        θ = W_head LayerNorm(x)

Ours, and the default, is the residual kind: θ is added to the next router's own logits on q, and
W_head starts at zero. Untrained it is that router, bit for bit, so that training begins where the
paper's kind arrives after many tokens.

Shapes: q [T, H], x [T, w], B [n·w, w], θ [T, E]. The paper gives parameter counts but neither w nor
n; `sized` finds w."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.base.files import load_tensors, save_tensors
from moelab.base.registry import find
from moelab.base.schema import Size, checked
from moelab.speculate.signals import DefaultVectors

FORMAT = "moelab.estimator/3"
TRAINED = "`moelab train estimator MODEL FILE` writes what fits"


class Estimator(nn.Module):
    """In the place of the next router, from nothing: the paper's.

    Predicts the router logits of layer l + 1 from the quasi-hidden state at layer l.

    width, expansion : w, the latent width, and n, how many times wider the residual block is
        inside.
    model_id : identity of the model it was trained for; "" for none yet.
    vectors : the default vectors that made q in training.
    choice : of each layer, whether it predicts better than the next router on q (§6.3).
    """

    #: whether what it gives is to be added to the next router's own logits on q
    residual = False
    ahead = 1  # layers

    def __init__(
        self, H: int, E: int, L: int, width: int, expansion: int = 4, model_id: str = ""
    ) -> None:
        super().__init__()
        self.config = dict(H=H, E=E, L=L, width=width, expansion=expansion)
        self.model_id = model_id
        self.vectors: DefaultVectors | None = None
        self.choice: tuple[bool, ...] | None = None
        self.A = nn.Linear(H, width)
        self.layer = nn.Embedding(L - 1, width)
        self.B = nn.Linear(width, expansion * width)
        self.C = nn.Linear(expansion * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, E)

    def forward(self, q: Tensor, layer: int | Tensor) -> Tensor:
        """Router logits of layer + 1, or what is added to them, float32 [T, E]; `layer` is one
        for all, or [T]."""
        x = self.A(q.float()) + self.layer.weight[layer]
        x = x + self.C(F.silu(self.B(x)))
        return self.head(self.norm(x))

    @classmethod
    def sized(cls, H: int, E: int, L: int, parameters: int) -> Estimator:
        """The estimator whose parameters come nearest to a budget; its width is a multiple of 8.

        §6.1: 4 M for GPT-OSS-20B, 17 M for Qwen3-30B-A3B, 45 M for GPT-OSS-120B.
        """
        # there are 8·w² + b·w + E parameters: solved for w
        b = H + E + L + 7
        width = 8 * round((math.sqrt(b * b + 32 * max(parameters - E, 0)) - b) / 128)
        if width < 8:
            raise ValueError(
                f"{parameters:,} parameters are too few for H={H}, E={E}; the smallest estimator has "
                f"{8 * 64 + b * 8 + E:,}"
            )
        return cls(H, E, L, width)

    def save(self, path: str | Path) -> Path:
        """Write it to `path` atomically (a .safetensors file), with its vectors; returns the path."""
        kind = next(name for name, known in ESTIMATORS.items() if known is type(self))
        tensors = self.state_dict()
        beside = self.vectors.tensors if self.vectors else {}
        tensors |= {VECTORS + name: tensor for name, tensor in beside.items()}
        about = {"kind": kind, "model_id": self.model_id, "config": self.config}
        weighted = self.vectors is not None and self.vectors.weighted
        return save_tensors(path, FORMAT, tensors, **about, choice=self.choice, weighted=weighted)

    @classmethod
    def load(cls, path: str | Path) -> Estimator:
        """Read an estimator of the kind that was saved; FileNotFoundError, ValueError if it is not
        readable, or of a kind that is not registered."""
        about = {"kind": str, "config": dict[str, Size], "model_id": str, "weighted": bool}
        about["choice"] = tuple[bool, ...] | None
        return load_tensors(path, FORMAT, "estimator", TRAINED, about, _loaded)


VECTORS = "vectors."  # beginning of their names in an estimator's file


def _loaded(
    tensors: dict[str, Tensor],
    kind: str,
    config: dict[str, int],
    model_id: str,
    weighted: bool,
    choice: tuple[bool, ...] | None,
) -> Estimator:
    with torch.device("meta"):  # no memory for what the file only claims to have
        estimator = find("estimator", kind)(**config, model_id=model_id)
    weights = {}
    for name, parameter in estimator.state_dict().items():
        tensor = checked(tensors, name, ("float32",), parameter.shape)
        weights[name] = tensor.clone()  # of its own: what safetensors gives lies in the file
    estimator.load_state_dict(weights, assign=True)
    beside = {name: of for name, of in tensors.items() if name.startswith(VECTORS)}
    if beside:
        beside = {name.removeprefix(VECTORS): of for name, of in beside.items()}
        estimator.vectors = DefaultVectors.of(beside, weighted, model_id)
    estimator.choice = choice
    return estimator.eval()


class ResidualEstimator(Estimator):
    """What the next router's logits on q lack: begins as that router (ours)."""

    residual = True

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


DEFAULT_ESTIMATOR = "residual"
#: name → estimator; a saved one says its name
ESTIMATORS: dict[str, type[Estimator]] = {"residual": ResidualEstimator, "appendix-a": Estimator}
