"""The model map: what fills a checkpoint, by bytes, coloured by what compression or quantisation
would do, or by use.

    views.model_map("Qwen/Qwen3-30B-A3B")       views.model_map(folder, counts=trace, colour="expert
                                                popularity")
    views.model_map("Qwen3-30B-A3B")            a card: bytes of its geometry, without weights

Layers, their experts, their tensors; a click opens one, and its bits under the microscope. The
checkpoint is read as it is, a sample of a tensor at a time (`moelab.viz.survey`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moelab.advice.model import Model, find_model
from moelab.calibration import Calibration
from moelab.checkpoint.checkpoint import locate
from moelab.files import absolute, atomic, cache_folder
from moelab.progress import progress
from moelab.records import Rows
from moelab.registry import like, names, require
from moelab.schema import naming
from moelab.store.headers import Stored
from moelab.table import format_value
from moelab.viz import survey
from moelab.viz.charts import finish
from moelab.viz.figures import microscope
from moelab.viz.plotly_json import Figure
from moelab.viz.theme import SCALE
from moelab.viz.views.base import menu
from moelab.viz.views.detailed import Detail, Detailed, html_rows

BOUND = "entropy bound"
POPULARITY = "expert popularity"
ERROR = "error of "
#: what a colour is, for its bar
SCALES = {BOUND: "compressed ÷ size", POPULARITY: "uses ÷ the layer's mean"}
#: rectangles beyond which an expert's tensors are one
MOST = 8000
#: bytes of a survey up to which all colours are there from the beginning, so that changing them
#: does not wait
SOON = 64 << 20


class Node(NamedTuple):
    """A rectangle: checkpoint, layer, expert or tensor. value : its colour, None for grey; part :
    of a tensor."""

    name: str
    parent: str
    label: str
    bytes: int
    value: float | None = None
    part: survey.Part | None = None


Shown = tuple[list[Node], str]  # rectangles, and what colours them


def parts_of(card: Model) -> list[survey.Part]:
    """All other weights of a card, and its experts, as bytes that no file holds, so that they have
    no colour."""
    others, expert = (
        Stored(Path(), "U8", (nbytes,), 0) for nbytes in (card.others, card.spec.expert_bytes)
    )
    return [survey.Part("other weights", "", None, others)] + [
        survey.Part(f"layers.{layer}.experts.{e}.weights", f"layers.{layer}", e, expert)
        for layer in card.spec.moe_layers
        for e in range(card.spec.E)
    ]


def nodes(parts: Sequence[survey.Part], values: Sequence[float | None], root: str) -> list[Node]:
    """The tree of all tensors; those above have the mean of their parts' values by bytes."""
    whole = len(parts) <= MOST
    found: dict[str, tuple[str, str, survey.Part | None]] = {
        root: ("", root, None)
    }  # parent, label, of a leaf its
    sums: dict[str, list[float]] = {
        root: [0, 0, 0.0]
    }  # part; bytes, those that have a value, bytes · value
    for part, value in zip(parts, values):
        up = [(root, "", root)]
        if part.layer:
            up.append((part.layer, root, part.layer))
        if part.expert is not None:
            up.append((f"{part.layer} expert {part.expert}", up[-1][0], f"expert {part.expert}"))
        if whole or part.expert is None:
            up.append((part.name, up[-1][0], part.label))
        for name, parent, label in up:
            found.setdefault(name, (parent, label, part if name == up[-1][0] else None))
            sums.setdefault(name, [0, 0, 0.0])[0] += part.stored.nbytes
            if value is not None:
                sums[name][1] += part.stored.nbytes
                sums[name][2] += part.stored.nbytes * value
    return [
        Node(
            name,
            parent,
            label,
            sums[name][0],
            sums[name][2] / sums[name][1] if sums[name][1] else None,
            part,
        )
        for name, (parent, label, part) in found.items()
    ]


def _middle(values: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """The range of sorted (value, bytes) without the outermost per cent of the bytes: a few tiny
    tensors would else take all colours."""
    total = sum(nbytes for _, nbytes in values)
    before = 0
    low = None
    high = values[-1][0]
    for value, nbytes in values:
        before += nbytes
        if low is None and before > 0.01 * total:
            low = value
        if before >= 0.99 * total:
            high = value
            break
    return low, high


def draw(tree: Sequence[Node], colour: str) -> Figure:
    """Rectangles as large as their bytes; two levels at a time, a click goes deeper."""
    there = sorted(
        (node.value, node.bytes)
        for node in tree
        if node.value is not None and node.part is not None
    )
    low, high = _middle(there) if there else (0.0, 1.0)
    figure = Figure().add_treemap(
        ids=[node.name for node in tree],
        parents=[node.parent for node in tree],
        labels=[node.label for node in tree],
        values=[node.bytes for node in tree],
        branchvalues="total",
        maxdepth=3,
        customdata=[node.name for node in tree],
        text=[
            f"{node.bytes / 1e6:,.2f} MB" + ("" if node.value is None else f", {node.value:.4g}")
            for node in tree
        ],
        marker={
            "colors": [float("nan") if node.value is None else node.value for node in tree],
            "colorscale": SCALE,
            "cmin": low,
            "cmax": high,
            "showscale": bool(there),
            "line": {"width": 1},
            "colorbar": {
                "thickness": 20,
                "tickfont": {"size": 11},
                "title": {
                    "text": SCALES.get(colour, "relative error"),
                    "side": "right",
                    "font": {"size": 13},
                },
            },
        },
        hovertemplate="%{id}<br>%{text}<extra></extra>",
        tiling={"pad": 1},
        root={"color": "#bbbbbb"},
        textinfo="label",
    )
    # a margin that no tick widens, or every rectangle would be drawn anew with another colour
    return finish(
        figure,
        height=560,
        showlegend=False,
        margin={"l": 8, "r": 120, "t": 8, "b": 8, "autoexpand": False},
    )


def counted(counts: Any) -> np.ndarray | None:
    """Expert counts [L, E] of a trace, a calibration, the file of one, an .npy file or an array;
    None of None.

    Raises FileNotFoundError, ValueError: no such file, or nothing that has counts in it.
    """
    if isinstance(counts, (str, Path)) and (path := absolute(counts)).suffix == ".npy":
        with naming(path, "array of expert counts", "numpy.save(path, counts)"):
            return _counts(np.load(path))
    counts = Calibration.load(counts) if isinstance(counts, (str, Path)) else counts
    counts = counts.counts() if callable(getattr(counts, "counts", None)) else counts
    return None if counts is None else _counts(np.asarray(counts))


def _counts(found: np.ndarray) -> np.ndarray:
    if (
        found.ndim != 2
        or found.dtype.kind not in "iuf"
        or not (found >= 0).all()
        or not 0 < found.sum() < np.inf
    ):
        raise ValueError(
            f"counts of experts are numbers of 0 or more, [layers, experts], not all 0; these are "
            f"{found.dtype} {list(found.shape)}"
        )
    return found


def file_of(counts: Any) -> Path:
    """A file from which `counted` reads the same: the one that was given, else one of the cache, by
    its content."""
    if isinstance(counts, (str, Path)):
        return absolute(counts)
    seen = counted(counts)
    path = cache_folder("counts") / f"{sha256(seen.tobytes()).hexdigest()[:16]}.npy"
    if not path.exists():
        with atomic(path) as part, open(part, "wb") as file:
            np.save(file, seen)
    return path


def model_map(model: str | Path | None = None, counts: Any = None, colour: str = BOUND) -> Detailed:
    """The checkpoint of a model as a map.

    model : a folder, a .safetensors file or a hub id, unconverted; None: the shipped small model;
        or a card's name, of whose parts only the bytes are known, and with counts the popularity.
    counts : how often each expert is chosen, [L, E], or a trace or calibration of this model, or
        the file that `moelab calibrate` wrote: for "expert popularity".
    colour : at first: "entropy bound", "expert popularity" or "error of FORMAT".

    Raises FileNotFoundError, ValueError: no safetensors files, a damaged one, or counts of another
    geometry."""
    shown = _Map(model, counts)
    require("colour" + " without counts=" * (shown.seen is None), colour, shown.colours)
    shown.look_soon()
    return Detailed(
        "model_map",
        {"colour": menu("colour", colour, shown.colours)},
        shown.compute,
        lambda data: draw(*data),
        _rows,
        shown.command,
        shown.words,
        label="tensor",
        tell=_tell,
        names=lambda data: [node.name for node in data[0]][:MOST],
    )


class _Map:
    """The parts of a checkpoint and what they are coloured by."""

    def __init__(self, model: str | Path | None, counts: Any) -> None:
        self.model = model
        self.counts = counts
        card = find_model(model) if like("model", model) and not Path(model).exists() else None
        self.card, self.path = card, Path(card.spec.name) if card else locate(model)[1]
        self.parts = parts_of(card) if card else survey.parts(self.path)
        self.most = survey.sample_size(self.parts)
        self.seen = counted(counts)
        self.measures = {BOUND: lambda part: survey.bound(part, self.most)} | {
            f"{ERROR}{name}": lambda part, name=name: survey.error(part, name, self.most)
            for name in names("format")
        }
        self.colours = [*self.measures, *([POPULARITY] if self.seen is not None else [])]
        self.values = cache(self._values)

    def _values(self, colour: str) -> list[float | None]:
        if colour == POPULARITY:
            return survey.popularity(self.parts, self.seen)
        measure = self.measures[colour]
        return [measure(part) for part in progress(self.parts, colour, unit="tensor")]

    def look_soon(self) -> None:
        """Measure all colours of what is small at once."""
        if sum(min(part.stored.nbytes, self.most) for part in self.parts) <= SOON:
            for one in self.measures:
                self.values(one)

    def compute(self, colour: str) -> Shown:
        return nodes(self.parts, self.values(colour), self.path.name), colour

    def words(self, data: Shown) -> tuple[str, str]:
        tree, colour = data
        root = tree[0]
        sampled = sum(part.stored.nbytes > self.most for part in self.parts)
        if self.card:
            kind = f"by its card: experts' bytes are exact, others the {self.card.how}"
        elif not sampled or colour == POPULARITY:
            kind = "exact"
        else:
            kind = f"exact, but {sampled:,} tensors by samples of {self.most / 1e6:.2g} MB"
        said = "–" if root.value is None else format_value(float(f"{root.value:.4g}"))
        return (
            f"{root.label}: {root.bytes / 1e6:,.1f} MB in {len(self.parts):,} parts; {colour}: "
            f"{said} on average ({kind}). Area: bytes. A click opens a layer or an expert, and the "
            "bits of a tensor.",
            f"Treemap of the checkpoint {root.label} by layer and tensor, coloured by {colour}.",
        )

    def command(self, colour: str) -> tuple[str, str]:
        file = file_of(self.counts) if colour == POPULARITY else None
        words = [
            "moelab view model_map",
            *([str(self.model)] if self.model else []),
            *([f"--counts {file}"] if file else []),
            f"-p colour='{colour}'",
        ]
        given = [repr(str(self.model or self.path))]
        given += [f"counts={str(file)!r}"] if file else []
        call = f"views.model_map({', '.join([*given, f'colour={colour!r}'])})"
        return " ".join(words), f"from moelab.viz import views\n{call}"


def _rows(data: Shown) -> Rows:
    tree, colour = data
    return [
        {"name": node.name, "part of": node.parent, "bytes": node.bytes, colour: node.value}
        for node in tree
    ]


def _tell(data: Shown, name: str) -> Detail:
    tree, colour = data
    node = next(node for node in tree if node.name == name)
    part = node.part
    if part is None or survey.bound(part) is None:
        known = [("MB", node.bytes / 1e6), (colour, node.value)]
        return Detail(html_rows(["", node.name], known))
    about = [
        ("tensor", part.name),
        ("shape", " × ".join(map(str, part.stored.shape))),
        ("type", part.stored.dtype),
        ("MB", part.stored.nbytes / 1e6),
        (colour, node.value),
        ("read", min(part.stored.nbytes, survey.SAMPLE) / 1e6),
    ]
    bits = microscope(survey.histogram(part), part.stored.dtype)
    return Detail(html_rows(["", node.name], about), bits)
