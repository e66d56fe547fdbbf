"""The notebooks as pages: of each the newest run that the runner finished, with its figures; where
there is none its source, which says so. Sphinx executes nothing."""

import json
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from _site import ROOT, keep, keep_only
from _site.links import rewritten
from moelab.base.files import read_json
from moelab.comparison import MetricsFile, finished_runs
from moelab.viz.theme import PLOTLY

#: what a reader is shown of an output, the first that there is
SHOWN = ("text/html", "image/svg+xml", "image/png", "text/markdown", "text/plain")


def newest(name: str) -> Path | None:
    """The newest run that the runner finished of a notebook."""
    runs = [run for run in finished_runs(name) if (run / f"{name}.ipynb").is_file()]
    return runs[-1] if runs else None


def text_of(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


def figure(output: dict[str, Any]) -> dict[str, Any]:
    """A plotly figure as HTML, which docs/_static/figures.js draws."""
    alt = text_of(output["data"].get("text/plain", "")).strip("[]").removeprefix("Figure: ")
    data, layout = (output["data"][PLOTLY][key] for key in ("data", "layout"))
    height = layout.get("height") or 420  # without one, a page of no fixed height shows a strip
    drawn = json.dumps({"data": data, "layout": layout | {"height": height}})
    drawn = drawn.replace("<", "\\u003c")  # nothing in it ends the script
    html = (
        f'<div class="plot" role="img" aria-label="{escape(alt)}" style="min-height: {height}px">'
        f'<script type="application/json">{drawn}</script>'
        f"<noscript>{escape(alt)}</noscript></div>"
    )
    return {"text/html": html}


def output(of: dict[str, Any]) -> dict[str, Any]:
    """What a page shows of an output: a figure, or the first kind that needs no kernel."""
    if "data" not in of:
        return of
    if PLOTLY in of["data"]:
        data = figure(of)
    else:
        data = {kind: of["data"][kind] for kind in SHOWN if kind in of["data"]}
        data = dict(list(data.items())[:1])
    return {"output_type": "display_data", "metadata": {}, "data": data}


def note(run: Path | None) -> str:
    """When and where a page was executed; parameters that were given are a cell of their own."""
    if run is None:
        return (
            ":::{note}\nThe source of the notebook, which has no finished run here. "
            "`make reproduce` runs all of them; their figures are then on these pages.\n:::"
        )
    about = read_json(run / "metrics.json", MetricsFile)
    env = about["env"]
    took = f", in {about['seconds']:.0f} s" if "seconds" in about else ""
    return (
        f":::{{note}}\nRun {run.name} on {env['cpu']}, {env['cores']} cores, {env['device']}, "
        f"commit {(env['git'] or 'unknown')[:12]}{took}. "
        f"Its controls move where it runs: `make lab`.\n:::"
    )


def page(source: Path) -> str:
    """The notebook of a page, as JSON."""
    run = newest(source.stem)
    content = json.loads((run / source.name if run else source).read_text(encoding="utf-8"))
    cells = content["cells"]
    for cell in cells:
        if cell["cell_type"] == "markdown":
            text = text_of(cell["source"])
            cell["source"] = rewritten(text, ROOT / "notebooks", f"tutorials/{source.stem}")
        elif "outputs" in cell:
            cell["outputs"] = [output(one) for one in cell["outputs"]]
            cell["metadata"] = {"tags": cell["metadata"].get("tags", [])}
    said = {"cell_type": "markdown", "metadata": {}, "id": "run", "source": note(run)}
    content["cells"] = [*cells[:1], said, *cells[1:]]
    content["metadata"] = {
        "kernelspec": {"name": "python3", "display_name": "Python 3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    return json.dumps(content, ensure_ascii=False, indent=1)


def question(source: Path) -> tuple[str, str]:
    """The title of a notebook, and the sentence of its first cell that asks."""
    first = text_of(json.loads(source.read_text(encoding="utf-8"))["cells"][0]["source"])
    title, _, rest = first.partition("\n")
    asked = rest.partition("**The question.**")[2].partition("\n\n")[0].split()
    return title.lstrip("# "), " ".join(asked)


def write(_app) -> None:
    """The hook `builder-inited`: all notebooks, and their list."""
    notebooks = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    keep_only("tutorials", {"index.md", "views.md", *(path.name for path in notebooks)})
    lines = ["# Tutorials", "", "Each notebook asks one question; `make lab` opens them.", ""]
    for path in notebooks:
        keep(f"tutorials/{path.name}", page(path))
        title, asked = question(path)
        lines.append(f"[{title}]({path.name})\n: {asked or 'The way in.'}\n")
    keep("tutorials/index.md", "\n".join(lines))


def _library(app, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        (Path(app.outdir) / "_static" / "plotly.min.js").write_text(
            get_plotlyjs(), encoding="utf-8"
        )


def setup(app) -> None:
    app.connect("builder-inited", write)
    app.connect("build-finished", _library)
