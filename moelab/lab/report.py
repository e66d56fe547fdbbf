"""One static page: what the notebooks conclude, with the sources' claims and their verdicts, then
all figures.

Of every notebook the newest finished run, those in JupyterLab included. What is concluded is read
at once; figures, numbers and parameters unfold, and all of it is printed. The page is a single file
that works without a network: plotly.js is inside, once. Every figure has its caption and its
description for a screen reader."""

from __future__ import annotations

import argparse
import re
from html import escape
from pathlib import Path
from typing import Any

from moelab import claims
from moelab.comparison import FigureFile, KeptMetric, MetricsFile, RunFile, finished_runs
from moelab.files import read_json, results_root, write_text
from moelab.table import format_value

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, Helvetica, Arial, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid #888; padding-top: 1.5rem; }
table { border-collapse: collapse; margin: 1rem 0; width: 100%; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8886; vertical-align: top; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
figure { margin: 1.5rem 0; } figcaption { font-style: italic; margin-top: .4rem; }
.plot { background: white; min-height: 420px; }
.note { opacity: .8; }
@media print { body { max-width: none; margin: 0; font-size: 11pt; } figure, tr { break-inside: avoid; } }
"""
#: a figure is drawn when what hides it is opened; until then plotly would not know its width
SCRIPT = """
const figures = {};
addEventListener("toggle", (event) => event.target.querySelectorAll(".plot").forEach((plot) => {
  figures[plot.id]?.();
  delete figures[plot.id];
}), true);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));
"""
KINDS_NOTE = """Every number says what it is: <em>exact</em> (a count or a bit-for-bit check), <em>measured</em>
(on this machine), <em>simulated</em> (our policies on a device card), <em>modelled</em> (a fitted formula) or
<em>paper</em> (a source's figure)."""


def write_report(results: str | Path | None = None) -> Path:
    """Write report.html into `results_root(results)` from the newest finished runs; returns its
    path."""
    from moelab.viz.theme import plotly_js

    root = results_root(results)
    names = sorted(path.name for path in (root / "runs").glob("*") if path.is_dir())
    runs = [(name, found[-1]) for name in names if (found := finished_runs(name, root, lab=True))]
    contents = "".join(f'<li><a href="#{escape(name)}">{escape(name)}</a></li>' for name, _ in runs)
    answered = claims.rows(results=root)
    body = (
        "".join(_section(name, run, answered) for name, run in runs)
        or "<p>No notebook has finished yet.</p>"
    )
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>moelab: results</title>
<style>{STYLE}</style>
<script>{plotly_js()}</script>
<script>{SCRIPT}</script>
</head>
<body>
<main>
<h1>moelab: results</h1>
{
        _table(
            "Claims of the five sources, by verdict",
            ["verdict", "claims"],
            [[verdict, n] for verdict, n in claims.counts(answered).items()],
        )
    }
<p class="note">{KINDS_NOTE}</p>
<nav aria-label="Contents"><ul><li><a href="#claims">Claims</a></li>{contents}</ul></nav>
{body}
<section aria-labelledby="claims"><h2 id="claims">Claims</h2>
<p class="note">Verdicts follow rules (moelab/claims.py). What was fitted, or follows from what was, never counts as
reproduced; another model or machine than the source's shows a direction at most.</p>
{_ledger(answered)}</section>
</main>
</body>
</html>
"""
    return write_text(root / "report.html", page)


def _ledger(answered: list[claims.Row]) -> str:
    titles = dict.fromkeys(row.claim.title for row in answered)
    own = {title: [row for row in answered if row.claim.title == title] for title in titles}
    return "\n".join(
        _folded(
            f"{title}: {claims.summary(rows)}", _table("", claims.HEAD, [row.cells for row in rows])
        )
        for title, rows in own.items()
    )


def _section(name: str, run: Path, answered: list[claims.Row]) -> str:
    """What a run concludes and the verdicts on its claims; folded, its figures, its numbers, its
    parameters."""
    about = read_json(run / "run.json", RunFile)
    found = read_json(run / "metrics.json", MetricsFile) if (run / "metrics.json").exists() else {}
    said = dict.fromkeys(takeaway["text"] for takeaway in found.get("takeaways", ()))
    verdicts = [row for row in answered if row.claim.metric[:1] == (name,)]
    drawn = [
        _figure(f"{name}-{key}", run / figure["file"])
        for key, figure in found.get("figures", {}).items()
    ]
    tables = [_table(title, head, rows) for title, (head, *rows) in found.get("tables", {}).items()]
    numbers = _metrics_table(found.get("metrics", {}))
    parts = [
        f'<section aria-labelledby="{escape(name)}"><h2 id="{escape(name)}">{escape(name)}</h2>',
        f"<ul>{''.join(f'<li>{_markdown(text)}</li>' for text in said)}</ul>" if said else "",
        _folded(claims.summary(verdicts), _table("", claims.HEAD, [row.cells for row in verdicts]))
        if verdicts
        else "",
        _folded(f"Figures ({len(drawn)})", "".join(drawn)) if drawn else "",
        _folded("Numbers", numbers + "".join(tables)) if numbers or tables else "",
        _folded("Parameters and machine", _provenance(run.name, about)),
    ]
    return "\n".join(part for part in parts if part) + "</section>"


def _metrics_table(metrics: dict[str, KeptMetric]) -> str:
    rows = [[name, m["value"], m["unit"], m["kind"]] for name, m in metrics.items()]
    return _table("Metrics", ["metric", "value", "unit", "kind"], rows)


def _provenance(name: str, about: RunFile) -> str:
    """Where, on what and with which parameters a run was made."""
    env = about["env"]
    commit = (env["git"] or "no commit")[:12] + (
        "+changes" if (env["git"] or "").endswith("+changes") else ""
    )
    versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
    ran = f"""<p class="note">Run {escape(name)}, {about["seconds"]:.1f} s on {escape(env["cpu"])}
({escape(str(env["cores"]))} cores, {escape(env["device"])}); {escape(commit)}; {escape(versions)}</p>"""
    rows = [[key, value] for key, value in about["parameters"].items()]
    return ran + _table("Parameters", ["name", "value"], rows)


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n{content}</details>"


def _markdown(text: str) -> str:
    """The Markdown of a takeaway: bold, code and italics, none inside another."""
    tags = {"**": "strong", "`": "code", "*": "em"}
    return re.sub(
        r"(\*\*|`|\*)(?=\S)(.+?)\1",
        lambda found: f"<{tags[found[1]]}>{found[2]}</{tags[found[1]]}>",
        escape(text, quote=False),
    )


def _table(caption: str, head: list[str], rows: list[list[Any]]) -> str:
    if not rows:
        return ""
    heads = "".join(f'<th scope="col">{escape(str(text))}</th>' for text in head)
    lines = []
    for first, *rest in rows:
        cells = "".join(
            f"<td{' class=number' if isinstance(v, (int, float)) else ''}>{escape(format_value(v))}</td>"
            for v in rest
        )
        lines.append(f'<tr><th scope="row">{escape(str(first))}</th>{cells}</tr>')
    caption = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _figure(name: str, path: Path) -> str:
    """A live figure; its description is what a screen reader says in its place."""
    from moelab.viz.theme import in_script

    content = read_json(path, FigureFile)
    key, data, layout = map(
        in_script, (name, content["figure"]["data"], content["figure"]["layout"])
    )
    return f"""<figure>
<div class="plot" id="{escape(name)}" role="img" aria-label="{escape(content["alt"])}"></div>
<figcaption>{escape(content["caption"])}</figcaption>
<noscript><p>{escape(content["alt"])}</p></noscript>
<script>figures[{key}] = () => Plotly.newPlot({key}, {data}, {layout},
  {{responsive: true, displaylogo: false}});</script>
</figure>"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", metavar="FOLDER", help="where results lie (results/, or $MOELAB_RESULTS)"
    )


def main(args: argparse.Namespace) -> int:
    print(write_report(args.results))
    return 0
