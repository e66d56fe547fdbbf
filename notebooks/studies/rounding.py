"""What rounding that looks at data keeps, and which experts more bits should go to.

Loss and KL divergence are measured in one forward pass over windows of the test split, the model's own
experts against rounded ones; inputs of experts come from windows of the training split. Intervals,
95 %, are of a paired bootstrap over windows. Right answers are to moelab's own tasks (`moelab
evaluate`), all together, with the interval of the paired difference.

Who gets more bits: all experts are int4, and of each layer a quarter is int8, chosen by how often they
are used (popularity), by how much of the layer's error that takes away (sensitivity, measured on the
calibration: its errors count once for each token, so it has the popularity in it), by the same a token
(fragility), or at random. "per cent of the gap" is what of the KL between all int4 and all int8 it
closes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from moelab import open_model
from moelab.base.arguments import whole
from moelab.base.records import Numbers, Records
from moelab.calibration import calibrate
from moelab.checkpoint.quantize import (
    CHOICES,
    Inputs,
    inputs_of,
    measured,
    plan_bits,
    quantize_expert,
)
from moelab.evaluation.accuracy import TASKS, paired, task_prompts
from moelab.evaluation.scores import right_answers, text_windows
from moelab.models import discover, plugged
from moelab.recording import record
from moelab.store import fewbit
from moelab.store.ggml import FITTED, GGML

MEASURES = ("moelab/store", "moelab/checkpoint", "moelab/kernels")
DRAWS = 4000
BATCH = 8
AUTO = (4.5, 5.0)  # bits a weight


def run(
    model: str | None = None,
    windows: int = 48,
    tokens: int = 256,
    calibration: int = 64,
    questions: int = 25,
    ggml: str | None = None,
    seed: int = 0,
) -> dict[str, Records]:
    """{section: {row: {column: figure}}}."""
    live = open_model(model)
    texts = text_windows(live.tokenizer, "train", calibration, tokens, seed)
    trace = record(live, texts.tolist(), hidden=True)
    inputs = calibrate(trace, inputs=len(trace)).inputs
    test = text_windows(live.tokenizer, "test", windows, tokens, seed)
    with torch.no_grad(), plugged(live):
        compared = Compared(live, test, seed, questions)
        name = live.spec.name
        return {
            f"{name}: formats (measured)": formats(compared, inputs, ggml),
            f"{name}: who gets more bits (measured)": by_expert(compared, inputs, seed),
        }


class Compared:
    """A plugged model's own experts against others, on windows [n, S], and on so many questions a task."""

    def __init__(self, model: Any, windows: Tensor, seed: int, questions: int = 0) -> None:
        self.model, self.windows = model, windows
        asked = (windows.shape[1], seed)
        tasks = [task for task in TASKS if task != "loss" and questions]
        of = (task_prompts(model.tokenizer, task, questions, *asked) for task in tasks)
        self.prompts = [prompt for some in of for prompt in some]
        self.layers = discover(model)
        self.exact, self.right = self._read(None), self._answers(None)
        self.kept: dict[tuple, dict[str, Tensor]] = {}  # experts in one format, rounded once
        self.draws = np.random.default_rng(seed).integers(0, len(windows), (DRAWS, len(windows)))

    def _read(self, source: Any) -> list[Tensor]:
        with plugged(self.model, source=source):
            return [
                self.model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
                for ids in self.windows.split(BATCH)
            ]

    def _answers(self, source: Any) -> np.ndarray:
        """Of each question, whether the answer is right."""
        with plugged(self.model, source=source):
            return np.array(right_answers(self.model, self.prompts, BATCH, False, "tasks"), bool)

    def weights(self, layer: int, e: int) -> dict[str, Tensor]:
        return self.layers[layer].seam.weights(e)

    def rounded(
        self, form_of: Callable[[int, int], Any], inputs: Inputs | None, ask: bool = True
    ) -> tuple[np.ndarray, ...]:
        """`changed` by rounding each expert to its format, or each of its matrices to its own."""

        def change(layer: Any, e: int, tensors: dict[str, Tensor]) -> None:
            form = form_of(layer.index, e)
            key = str(form), layer.index, e, inputs is None
            if key not in self.kept:
                given = inputs and inputs.of(layer.index, e)
                quantize_expert(form, tensors, {}, layer.seam, given)
                self.kept[key] = tensors
            tensors |= self.kept[key]

        return self.changed(change, ask)

    def changed(self, change: Callable[..., None], ask: bool = True) -> tuple[np.ndarray, ...]:
        """(increase of the loss, KL) of each window, in nats a token, with experts whose tensors
        change(layer, expert, tensors) has changed; and whether answers are right, if asked."""
        kept = {}
        for layer in self.layers:
            for e in range(layer.E):
                tensors = {name: w.detach().clone() for name, w in layer.seam.weights(e).items()}
                change(layer, e, tensors)
                kept[layer.index, e] = tensors
        losses, divergences = [], []
        other = self._read(lambda layer, e: kept[layer, e])
        for p, q, ids in zip(self.exact, other, self.windows.split(BATCH)):
            losses.append((p - q).gather(2, ids[:, 1:, None])[..., 0].mean(1))
            divergences.append((p.exp() * (p - q)).sum(-1).mean(1))
        right = (
            self._answers(lambda layer, e: kept[layer, e]) if ask and self.prompts else self.right
        )
        return torch.cat(losses).numpy(), torch.cat(divergences).numpy(), right

    def mean(self, name: str, values: np.ndarray) -> Numbers:
        low, high = np.quantile(values[self.draws].mean(1), [0.025, 0.975])
        return {
            name: float(values.mean()),
            f"{name}, low": float(low),
            f"{name}, high": float(high),
        }

    def ratio(self, name: str, values: np.ndarray, base: np.ndarray) -> Numbers:
        drawn = values[self.draws].mean(1) / base[self.draws].mean(1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        ratio = float(values.mean() / base.mean())
        return {name: ratio, f"{name}, low": float(low), f"{name}, high": float(high)}


def formats(compared: Compared, inputs: Inputs, ggml: str | None) -> Records:
    """Each format and each kind of GGUF that is written, rounded to nearest and by data; formats
    chosen by matrix; and llama.cpp's kinds that fit, without and with an importance matrix; all beside
    int4 to nearest."""
    seam = compared.layers[0].seam
    found = {}
    for name in ("int4", *(name for name in fewbit.FORMATS if name != "int4"), *FITTED):
        bits = bits_of(seam, name)
        found[f"{name}, to nearest"] = bits, compared.rounded(lambda *_: name, None)
        found[f"{name}, by data"] = bits, compared.rounded(lambda *_: name, inputs)
    for budget in AUTO:
        plan = plan_bits(budget, compared.weights, compared.layers, inputs)
        bits = np.mean([bits_of(seam, forms) for forms in plan])
        found[f"auto:{budget:g}, by data"] = bits, compared.rounded(lambda l, _: plan[l], inputs)  # noqa: B023
    for name in ("Q4_0", "Q4_K", "Q6_K", "Q8_0") if ggml else ():
        n, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        if all(of[-1] % n == 0 for of in seam.shapes.values()):
            found[f"{name}, llama.cpp"] = 8 * size / n, compared.changed(Ggml(ggml, name))
            found[f"{name}, imatrix"] = 8 * size / n, compared.changed(Ggml(ggml, name, inputs))
    rows: Records = {}
    base = found["int4, to nearest"][1]
    for row, (bits, (loss, kl, right)) in found.items():
        rows[row] = {"bits a weight": float(bits)}
        rows[row] |= compared.mean("KL", kl) | compared.mean("loss increase", loss)
        rows[row] |= compared.ratio("loss increase / int4's", loss, base[0])
        rows[row] |= compared.ratio("KL / int4's", kl, base[1])
        if compared.prompts:
            off = paired(compared.right, right)
            points = off["difference"], *off["interval"]
            names = ("points", "points, low", "points, high")
            rows[row] |= {"right answers %": 100 * float(right.mean())}
            rows[row] |= {name: 100 * float(of) for name, of in zip(names, points)}
    return rows


def bits_of(seam: Any, forms: Any) -> float:
    """Bits a weight of an expert in a format, or of its matrices in their own, by name."""
    size = numel = 0
    for name, shape in seam.shapes.items():
        if len(shape) < 2:  # biases stay
            continue
        form = forms if isinstance(forms, str) else forms[name]
        form = GGML[form] if form in GGML else fewbit.find_format(form)
        size += form.nbytes(tuple(shape))
        numel += np.prod(shape)
    return float(8 * size / numel)


class Ggml:
    """A change of tensors: rounded by llama.cpp's own code, decoded by gguf-py.

    library : libggml-base.so, of any package of llama.cpp.    inputs : of its importance matrix."""

    def __init__(self, library: str, kind: str, inputs: Inputs | None = None) -> None:
        self.kind, self.inputs = GGMLQuantizationType[kind], inputs
        self.quantize = ctypes.CDLL(library).ggml_quantize_chunk
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        self.quantize.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
        self.quantize.restype = ctypes.c_size_t

    def __call__(self, layer: Any, e: int, tensors: dict[str, Tensor]) -> None:
        exact = dict(tensors)
        for name, w in exact.items():
            rows = w.float().contiguous()
            n, size = GGML_QUANT_SIZES[self.kind]
            out = torch.empty(len(rows), rows.shape[1] // n * size, dtype=torch.uint8)
            squares = None
            if self.inputs is not None:
                x, own = self.inputs.of(layer.index, e)
                given = inputs_of(name, exact, layer.seam, x[own > 0] if own.any() else x)
                squares = given.square().mean(0).contiguous()
            where = (of.data_ptr() for of in (rows, out))
            matrix = None if squares is None else squares.data_ptr()
            if self.quantize(int(self.kind), *where, 0, *rows.shape, matrix) != out.numel():
                raise ValueError(f"{self.kind.name}: llama.cpp wrote another number of bytes")
            tensors[name] = torch.from_numpy(dequantize(out.numpy(), self.kind)).to(w.dtype)


def by_expert(compared: Compared, inputs: Inputs, seed: int) -> Records:
    """A quarter of each layer's experts in int8, the others in int4, chosen in several ways."""
    L, E = len(compared.layers), compared.layers[0].E
    popular = torch.stack(
        [torch.bincount(ids.flatten().long(), minlength=E)[:E] for ids in inputs.ids]
    )
    low, high = CHOICES.index("int4"), CHOICES.index("int8")
    saved = torch.zeros(L, E)
    for layer in compared.layers:
        for e in range(E):
            weights = layer.seam.weights(e)
            for _, errors, _ in measured(weights, layer.seam, *inputs.of(layer.index, e)):
                saved[layer.index, e] += errors[low] - errors[high]
    random = torch.rand(L, E, generator=torch.Generator().manual_seed(seed))
    ways = {
        "popularity": popular.float(),
        "sensitivity": saved,
        "fragility": saved / popular.clamp_min(1),
        "random": random,
    }
    floor = compared.rounded(lambda *_: "int8", inputs, ask=False)[1]
    ceiling = compared.rounded(lambda *_: "int4", inputs, ask=False)[1]
    rows, found = {}, {}
    for name, score in ways.items():
        chosen = torch.zeros(L, E).scatter(1, score.topk(E // 4, 1).indices, 1.0).bool()
        form_of = lambda l, e: "int8" if chosen[l, e] else "int4"  # noqa: E731
        found[name] = compared.rounded(form_of, inputs, ask=False)[1]
        rows[name] = compared.mean("KL", found[name])
        closed = compared.ratio("share of the gap", ceiling - found[name], ceiling - floor)
        rows[name] |= {key.replace("share", "per cent"): 100 * of for key, of in closed.items()}
        if name != "popularity":
            rows[name] |= compared.mean("KL less popularity's", found[name] - found["popularity"])
    return rows


OPTIONS = {
    "model": (None, "a checkpoint folder, a store or a hub id; if not given, the small model"),
    "windows": (whole(2), "of the test split"),
    "tokens": (whole(2), "a window"),
    "calibration": (whole(1), "windows of the training split, from which inputs come"),
    "questions": (whole(0), "of each of moelab's own tasks; 0: none"),
    "ggml": (None, "libggml-base.so of a package of llama.cpp, for its kinds beside ours"),
    "seed": (whole(), "picks the windows"),
}
