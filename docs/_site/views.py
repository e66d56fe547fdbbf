"""Views of the small model as pages of their own, which play without a kernel, and their list; the
calculator of all model cards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moelab
from _site import keep
from moelab.advice import calculator
from moelab.advice.assumed import assumed
from moelab.advice.model import find_model
from moelab.advice.question import Question
from moelab.cards import load_device
from moelab.viz import views
from notebooks.studies import picker

#: view → what it shows
SHOWN = {
    "budget": "what another memory budget would give, by cache policy and machine",
    "scrubber": "token by token, which experts are needed, found, prefetched and missed",
    "theatre": "prefetching: timelines, waiting, and what executing predictions would cost",
    "model_map": "what fills the checkpoint",
    "claims": "what the five sources claim, what was found, and the verdict on each",
    "picker": "which configuration, for so much memory, such a disk and such a loss, llama.cpp beside it, as measured here",
}


def made() -> Iterator[tuple[str, Any]]:
    """Each view, by name, of one generation within half of the memory."""
    with moelab.open_model(memory="50%", prefetch="router") as lm:
        for name in ("budget", "scrubber", "theatre"):
            yield name, getattr(views, name)(lm)
    yield "model_map", views.model_map()
    yield "claims", views.claims()
    yield "picker", picker.view(picker.recorded())


def _list(_app) -> None:
    lines = [
        "# Views to play with",
        "",
        "Each is one page that can be kept or sent. [](../guide/views.md)",
    ]
    if not (Path(__file__).parents[1] / "guide" / "views.md").is_file():
        lines[-1] = "Each is one page that can be kept or sent."
    lines += [
        "",
        *(f'<a href="../views/{name}.html">{name}</a>\n: {what}\n' for name, what in SHOWN.items()),
        '<iframe src="../views/budget.html" title="the view budget" loading="lazy"></iframe>',
    ]
    keep("tutorials/views.md", "\n".join(lines))


def questions() -> list[Question]:
    """Of every model card, on one machine: the first is what the calculator's page begins with."""
    names = sorted(moelab.names("model"), key=lambda name: (name != "Qwen3-30B-A3B", name.lower()))
    models, device = map(find_model, names), load_device("m2-max")
    return [
        Question(one, device, 16 * 10**9, 4096, 1, 0.0, True, assumed(one.spec)) for one in models
    ]


def _pages(app, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        folder = Path(app.outdir) / "views"
        folder.mkdir(exist_ok=True)
        for name, view in made():
            (folder / f"{name}.html").write_text(view.html(), encoding="utf-8")
        (folder / "calculator.html").write_text(calculator.page(questions()), encoding="utf-8")


def setup(app) -> None:
    app.connect("builder-inited", _list)
    app.connect("build-finished", _pages)
