"""The model map: what fills a checkpoint, by bytes, coloured by what compression or quantisation
would do.

    views.model_map("Qwen/Qwen3-30B-A3B")

Layers, their experts, their tensors; a click opens one. The checkpoint is read as it is, a sample of a tensor at a time (`moelab.viz.survey`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import numpy as np
from plotly.graph_objects import Figure

from moelab.base.progress import progress
from moelab.base.records import Rows
from moelab.base.registry import names
from moelab.base.table import format_value
from moelab.checkpoint.checkpoint import locate
from moelab.viz import survey
from moelab.viz.charts import LOOKS, finish
from moelab.viz.theme import SCALE
from moelab.viz.views.base import View, menu

BOUND = "entropy bound"
ERROR = "error of "
#: rectangles beyond which an expert's tensors are one
MOST = 8000
#: bytes of a survey up to which a page has all colours
SOON = 64 << 20


class Node(NamedTuple):
    """A rectangle: checkpoint, layer, expert or tensor. value : its colour, None for grey. leaf :
    whether there is nothing in it."""

    name: str
    parent: str
    label: str
    bytes: int
    value: float | None = None
    leaf: bool = False


Shown = tuple[list[Node], str]  # rectangles, and what colours them


def nodes(parts: Sequence[survey.Part], values: Sequence[float | None], root: str) -> list[Node]:
    """The tree of all tensors; those above have the mean of their parts' values by bytes."""
    whole = len(parts) <= MOST
    about: dict[str, tuple[str, str, bool]] = {}  # parent, label, whether it is a leaf
    sums: dict[str, np.ndarray] = {}  # bytes, those that have a value, bytes · value
    for part, value in zip(parts, values):
        up = [(root, "", root)]
        if part.layer:
            up.append((part.layer, root, part.layer))
        if part.expert is not None:
            up.append((f"{part.layer} expert {part.expert}", up[-1][0], f"expert {part.expert}"))
        if whole or part.expert is None:
            up.append((part.name, up[-1][0], part.label))
        nbytes = part.stored.nbytes
        known = np.array([nbytes, nbytes * (value is not None), nbytes * (value or 0.0)])
        for name, parent, label in up:
            about.setdefault(name, (parent, label, name == up[-1][0]))
            sums[name] = sums.get(name, 0) + known
    return [
        Node(name, parent, label, int(nbytes), total / known if known else None, leaf)
        for (name, (parent, label, leaf)), (nbytes, known, total) in zip(
            about.items(), sums.values()
        )
    ]


def draw(tree: Sequence[Node], colour: str) -> Figure:
    """Rectangles as large as their bytes; two levels at a time, a click goes deeper."""
    there = [(node.value, node.bytes) for node in tree if node.value is not None and node.leaf]
    value, nbytes = zip(*there or [(0.0, 1)])
    # without the outermost per cent of the bytes: a few tiny tensors would else take all colours
    low, high = np.quantile(value, (0.01, 0.99), weights=nbytes, method="inverted_cdf").tolist()
    figure = Figure().add_treemap(
        ids=[node.name for node in tree],
        parents=[node.parent for node in tree],
        labels=[node.label for node in tree],
        values=[node.bytes for node in tree],
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
        },
        **LOOKS["treemap"],
        marker_colorbar_title_text="compressed ÷ size" if colour == BOUND else "relative error",
    )
    return finish(figure, **LOOKS["treemap_layout"])


def model_map(model: str | Path | None = None) -> View:
    """The checkpoint of a model as a map.

    model : a folder, a .safetensors file or a hub id, unconverted; None: the shipped small model.

    Raises FileNotFoundError, ValueError: no safetensors files, or a damaged one."""
    path = locate(model)[1]
    parts = survey.parts(path)
    colours = [BOUND, *(f"{ERROR}{name}" for name in names("format"))]

    @cache
    def values(colour: str) -> list[float | None]:
        form = colour.removeprefix(ERROR)
        every = progress(parts, colour, unit="tensor")
        if colour == BOUND:
            return [survey.bound(part) for part in every]
        return [survey.error(part, form) for part in every]

    def words(data: Shown) -> tuple[str, str]:
        (root, *_), colour = data
        said = "–" if root.value is None else format_value(float(f"{root.value:.4g}"))
        kind = "exact"
        if sampled := sum(part.stored.nbytes > survey.SAMPLE for part in parts):
            kind += f", but {sampled:,} tensors by samples of {survey.SAMPLE / 1e6:.2g} MB"
        return (
            f"{root.label}: {root.bytes / 1e6:,.1f} MB in {len(parts):,} parts; {colour}: {said} on "
            f"average ({kind}). Area: bytes. A click opens a layer or an expert.",
            f"Treemap of the checkpoint {root.label} by layer and tensor, coloured by {colour}.",
        )

    small = sum(min(part.stored.nbytes, survey.SAMPLE) for part in parts) <= SOON

    named = "" if model is None else f"{quote(str(model))} "
    return View(
        "model_map",
        {"colour": menu("colour", BOUND, colours)},
        lambda colour: (nodes(parts, values(colour), path.name), colour),
        lambda data: [draw(*data)],
        _rows,
        lambda colour: f"moelab view model_map {named}-p colour={quote(colour)}",
        words,
        ("colour",) if small else (),
    )


def _rows(data: Shown) -> Rows:
    tree, colour = data
    return [
        {"name": node.name, "part of": node.parent, "bytes": node.bytes, colour: node.value}
        for node in tree
    ]
