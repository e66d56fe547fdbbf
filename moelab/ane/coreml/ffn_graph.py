"""Expert FFN graphs for the Neural Engine: G experts of one capacity C in one Core ML package.

Source: NPUMoE §4.2 (grouped expert execution, Fig. 11), §3.2 (linear layers as 1×1 convolutions)
and §A.4. The graph splits its input into G slices, runs each through its own expert and joins them.
Slots lie in Apple's form, (1, H, 1, G·C): channels, then a long last axis. The paper's, (G·C, H, 1,
1), has a singleton last axis that is padded to 64 bytes, 32 times at fp16. Routing weights are
applied on the CPU (§4.2 step 6)."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moelab.ane.coreml.package import coremltools, quiet

#: weight formats → bits a weight
WEIGHTS = {"fp16": 16, "int8": 8}
#: GPT-OSS: sigmoid(ALPHA·gate)·gate·(up + 1), both clamped to ±LIMIT (gate from above only)
ALPHA = 1.702
LIMIT = 7.0
#: activation → the same in torch, by which an architecture's own is recognised
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_SCRATCH = threading.RLock()


@dataclass(frozen=True, eq=False)
class Expert:
    """One expert's matrices in fp16: up and gate [I, H], down [H, I], biases [I], [H], [I]; None
    where it has none."""

    up: np.ndarray
    down: np.ndarray
    gate: np.ndarray
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    gate_bias: np.ndarray | None = None


def half(tensor: Tensor | np.ndarray, name: str = "a weight") -> np.ndarray:
    """A tensor in fp16; ValueError where it does not fit."""
    tensor = torch.as_tensor(tensor).detach().float().cpu()
    if not bool((tensor.abs() <= 65504).all()):
        raise ValueError(
            f"{name} holds {float(tensor.abs().max()):.4g}, beyond fp16's 65504; the Neural Engine "
            f"computes in fp16 only, so this layer must stay on the CPU"
        )
    return tensor.half().contiguous().numpy()


def expert_of(experts: Any, tensors: dict[str, Tensor]) -> Expert:
    """One expert's tensors, in the layout of `experts`, whose own parameters are not read, as plain
    matrices.

    Raises ValueError: experts without a gate or with a norm after them, or weights beyond fp16.
    """
    if experts.has_post_expert_norm or not experts.has_gate:
        raise ValueError(
            f"{type(experts.module).__name__} has no gate, or a norm after each expert (norms run on "
            "the CPU, NPUMoE §3.2); no graph computes that"
        )

    def read(name: str) -> Tensor | None:
        found = tensors.get(name)
        return found.T if found is not None and experts.is_transposed and found.dim() > 1 else found

    def halves(name: str) -> list[Tensor | None]:
        """[up, gate] of fused rows [2I, …], concatenated or interleaved."""
        if (rows := read(name)) is None:
            return [None, None]
        both = rows.chunk(2) if experts.is_concatenated is not False else (rows[::2], rows[1::2])
        return list(both[::-1])

    up, gate = halves("gate_up_proj")
    up_bias, gate_bias = halves("gate_up_proj_bias")
    found = (up, read("down_proj"), gate, up_bias, read("down_proj_bias"), gate_bias)
    return Expert(*(None if tensor is None else half(tensor) for tensor in found))


def activation_of(experts: Any) -> str:
    """A key of `ACTIVATIONS`, or "clamped", by what the module computes, not by its name;
    ValueError for others."""
    gate = torch.linspace(-9, 9, 37, dtype=torch.float64)
    up = -0.9 * gate
    concatenated = experts.is_concatenated is not False
    rows = torch.cat([gate, up]) if concatenated else torch.stack([gate, up], -1).flatten()
    h = experts.activate(rows)
    kinds = {name: of(gate) * up for name, of in ACTIVATIONS.items()}
    low = gate.clamp(max=LIMIT)
    kinds["clamped"] = (up.clamp(-LIMIT, LIMIT) + 1) * low * torch.sigmoid(ALPHA * low)
    for name, expected in kinds.items():
        if torch.allclose(h, expected):
            return name
    raise ValueError(
        f"the activation of {type(experts.module).__name__} is none of {', '.join(kinds)}; its "
        "experts must stay on the CPU"
    )


def pack(slots: Tensor) -> Tensor:
    """The G·C slots [G·C, H] as a graph takes them, (1, H, 1, G·C)."""
    return slots.T[None, :, None].contiguous()


def unpack(y: Tensor) -> Tensor:
    """The inverse of `pack`: [G·C, H]."""
    return y[0, :, 0].T.contiguous()


def ffn_program(experts: Sequence[Expert], capacity: int, activation: str = "silu") -> Any:
    """The MIL program of a group: input x and output y, fp16, (1, H, 1, G·C)."""
    ct = coremltools()
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    G = len(experts)
    spec = mb.TensorSpec(shape=(1, experts[0].up.shape[1], 1, G * capacity), dtype=types.fp16)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS18)
    def program(x):
        if G == 1:
            return ffn(mb, x, experts[0], activation)
        slices = mb.split(x=x, num_splits=G, axis=3)
        outs = [
            ffn(mb, part, expert, activation, f"e{g}")
            for g, (part, expert) in enumerate(zip(slices, experts))
        ]
        return mb.concat(values=outs, axis=3, name="y")

    return program


def conv(mb: Any, x: Any, weight: np.ndarray, bias: np.ndarray | None, name: str) -> Any:
    """A linear layer [out, in] as a 1×1 convolution."""
    return mb.conv(
        x=x, weight=weight[:, :, None, None], name=name, **({} if bias is None else {"bias": bias})
    )


def ffn(mb: Any, x: Any, expert: Expert, activation: str = "silu", name: str = "y") -> Any:
    """One expert on the slots x."""
    up = conv(mb, x, expert.up, expert.up_bias, f"{name}_up")
    gate = conv(mb, x, expert.gate, expert.gate_bias, f"{name}_gate")
    if activation == "clamped":
        gate = mb.minimum(x=gate, y=np.float16(LIMIT))
        up = mb.add(
            x=mb.clip(x=up, alpha=np.float16(-LIMIT), beta=np.float16(LIMIT)), y=np.float16(1)
        )
        active = mb.mul(x=gate, y=mb.sigmoid(x=mb.mul(x=gate, y=np.float16(ALPHA))))
    elif activation == "silu":
        active = mb.silu(x=gate)
    else:
        active = mb.gelu(x=gate, mode="EXACT" if activation == "gelu" else "TANH_APPROXIMATION")
    return conv(mb, mb.mul(x=active, y=up), expert.down, expert.down_bias, name)


def save_ffn(
    path: str | Path,
    experts: Sequence[Expert],
    capacity: int,
    activation: str = "silu",
    weights: str = "fp16",
) -> Path:
    """Write the package of a group of experts; returns its path.

    weights : a key of `WEIGHTS`. int8 is per output channel."""
    return save_program(path, ffn_program(experts, capacity, activation), weights)


@contextmanager
def scratch(path: Path) -> Iterator[None]:
    """Within the block temporary files of this process lie in a folder beside `path`, which then is
    removed.

    coremltools keeps a copy of each package there until the process ends, and for good if the
    process is killed."""
    with _SCRATCH, tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def save_program(
    path: str | Path, program: Any, weights: str = "fp16", inputs: list[Any] | None = None
) -> Path:
    """Save a MIL program as a package, without coremltools' passes: they are slow and find nothing
    in our graphs."""
    ct = coremltools()
    path = Path(path).absolute()
    import coremltools.optimize.coreml as cto

    with scratch(path), quiet():
        model = ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            inputs=inputs,
            compute_precision=ct.precision.FLOAT16,
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
        if weights == "int8":
            how = cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=0)
            config = cto.OptimizationConfig(op_type_configs={"conv": how})
            model = cto.linear_quantize_weights(model, config)
        model.save(str(path))
    return path
