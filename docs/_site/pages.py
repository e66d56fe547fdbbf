"""The pages that are written at each build: what the notebooks found, the claims, the command line,
the registries, the public names; and the table of contents."""

import re
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path

from _site import DOCS, ROOT, keep, keep_only
from _site.links import rewritten
from _site.tutorials import newest, question
from moelab import _HOMES, claims
from moelab.__main__ import COMMANDS, build_parser
from moelab.base import registry
from moelab.base.files import read_json
from moelab.base.table import markdown_table
from moelab.comparison import KINDS as KINDS_OF_NUMBERS
from moelab.comparison import MetricsFile
from moelab.viz.notebook import inert

#: caption → pages, first those that are read first; "folder/*" is what else lies there
CONTENTS = {
    "Guide": (
        "guide/install",
        "guide/open_model",
        "guide/memory",
        "guide/advise",
        "guide/calculator",
        "guide/*",
        "beside",
    ),
    "Tutorials": ("tutorials/index", "tutorials/[0-9]*", "tutorials/views"),
    "Results": ("found", "findings", "referee", "results", "papers/claims", "papers/*"),
    "Extending": ("extending/*",),
    "How it works": ("how_*",),
    "Reference": (
        "reference/api",
        "reference/names",
        "reference/cli/index",
        "reference/architectures",
        "glossary",
        "changelog",
        "contributing",
    ),
}
#: kind of the registry → what it is, and the class that one of one's own extends or looks like
KINDS = {
    "executor": ("Executors compute the experts", "moelab.experts.executor.Executor"),
    "cache": ("Caches say who leaves memory", "moelab.cache.policies.CachePolicy"),
    "predictor": (
        "Predictors say which experts come next",
        "moelab.speculate.predictors.Predictor",
    ),
    "estimator": ("Estimators are predictors that are trained", None),
    "codec": ("Codecs store experts", "moelab.store.codec.Codec"),
    "format": ("Formats round weights to few bits", None),
    "scheduler": ("Schedulers order reading and decompressing", None),
    "model": ("Cards of models", "moelab.base.specs.MoESpec"),
    "device": ("Cards of devices", "moelab.base.specs.DeviceSpec"),
}
GROUPS = {
    "Open and run": ("open_model", "using", "names", "describe", "advise"),
    "Record and prepare": (
        "prompts",
        "record",
        "calibrate",
        "convert",
        "restore",
        "kept_store",
        "profile",
    ),
    "Simulate": ("simulate",),
    "What they take and give": (),  # all others
}


def _contents() -> str:
    """The table of contents, of the pages that there are."""
    there = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    there |= {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.ipynb")}
    trees, listed = [], set()
    for caption, wanted in CONTENTS.items():
        pages: list[str] = []
        for one in wanted:
            matching = {
                page
                for page in there
                if Path(page).match(one) and page.count("/") == one.count("/")
            }
            pages += sorted(matching - listed - set(pages))
        listed |= set(pages)
        trees += ["```{toctree}", ":hidden:", f":caption: {caption}", ""]
        trees += [*map(_entry, pages), "```", ""]
    return "\n".join(trees)


def _entry(page: str) -> str:
    """A page in the table of contents; of a notebook what its title says before the colon."""
    source = ROOT / "notebooks" / f"{Path(page).name}.ipynb"
    return f"{question(source)[0].partition(':')[0]} <{page}>" if source.is_file() else page


def _index(_app, page: str, content: list[str]) -> None:
    if page == "index":
        content[0] += "\n\n" + _contents()


def _findings(n: int = 3) -> Iterable[str]:
    """The first findings of docs/findings.md: what each says in bold or in its heading, and its picture."""
    path = DOCS / "findings.md"
    if not path.is_file():
        return
    said = ""
    for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
        if found := re.match(r"##+ (.+)|\*\*(.+?)\*\*", block.strip(), re.S):
            said = " ".join((found[1] or found[2]).split())
        if n and said and (picture := re.match(r"!\[.*\]\(.*\)", block.strip(), re.S)):
            yield from (f"**{said}**", "", " ".join(picture[0].split()), "")
            said, n = "", n - 1


def found() -> str:
    """What the notebooks found: three findings, then what each notebook concludes and its verdicts."""
    answered = claims.rows()
    lines = ["# What the notebooks found", "", *_findings()]
    if (DOCS / "findings.md").is_file():
        lines += ["All findings, how to see them and what would refute them: [](findings.md).", ""]
    lines += [
        f"Every number says what it is: {', '.join(f'*{kind}*' for kind in KINDS_OF_NUMBERS)}.",
        "",
    ]
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        run, name = newest(path.stem), path.stem
        lines += [f"## {question(path)[0]}", "", f"[The notebook](tutorials/{name}.ipynb)", ""]
        if run is None:
            lines += ["No finished run here: `make reproduce` runs it.", ""]
        else:
            takeaways = read_json(run / "metrics.json", MetricsFile).get("takeaways", [])
            lines += [f"- {inert(text)}" for text in dict.fromkeys(t["text"] for t in takeaways)]
            lines += [""]
        if own := [row for row in answered if row.claim.metric[:1] == (name,)]:
            rows = [[row.cells[i] for i in (0, 2, 3, 5)] for row in own]
            table = markdown_table(["claim", "source", "ours", "verdict"], rows)
            lines += [f":::{{dropdown}} {claims.summary(own)}", inert(table), ":::", ""]
    return "\n".join(lines)


def _select(name: str, label: str, options: dict[str, str]) -> str:
    items = "".join(
        f'<option value="{escape(value)}">{escape(text)}</option>'
        for value, text in options.items()
    )
    return f'<label>{label} <select name="{name}"><option value="">all</option>{items}</select></label>'


def ledger() -> str:
    """All claims in one table, which docs/_static/claims.js filters."""
    answered = claims.rows()
    titles = {row.claim.source: row.claim.title for row in answered}
    counts = claims.counts(answered)
    rows = []
    for row in answered:
        where, model, said, ours, kind, verdict, why = map(escape, row.cells)
        small = " · ".join(filter(None, (model, why)))
        rows.append(
            f'<tr data-source="{escape(row.claim.source)}" data-verdict="{verdict}"><td>{where}<br>'
            f"<small>{small}</small></td><td>{said}</td><td>{ours}<br><small>{kind}</small></td>"
            f"<td>{verdict}</td></tr>"
        )
    form = (
        '<form class="claims">'
        + _select("source", "Source", titles)
        + _select("verdict", "Verdict", {v: f"{v} ({n})" for v, n in counts.items()})
        + '<label>Words <input name="words" type="search"></label><output></output></form>'
    )
    heads = "".join(f'<th scope="col">{h}</th>' for h in ("claim", "source", "ours", "verdict"))
    table = f'<table class="claims"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    by_source = Counter((row.claim.source, row.verdict) for row in answered)
    overview = [
        [
            f'<a href="?source={source}">{source}</a>',
            *(by_source[source, verdict] or "" for verdict in counts),
        ]
        for source in titles
    ]
    return "\n".join(
        [
            "# What the sources claim",
            "",
            "Verdicts follow [rules](../../moelab/claims.py). What was fitted, or follows from what was, "
            "never counts as reproduced; another model or machine than the source's shows a direction at most.",
            "",
            markdown_table(["source", *counts], overview),
            "",
            "```{raw} html",
            form,
            f'<div class="claims">{table}</div>',
            "```",
        ]
    )


def commands() -> None:
    """A page a command, and their list."""
    keep_only("reference/cli", {"index.md", *(f"{name}.md" for name in COMMANDS)})
    lines = ["# Command line", "", "`moelab COMMAND`, or `python -m moelab COMMAND`.", ""]
    for name, (_, purpose, example) in COMMANDS.items():
        parser = build_parser([name])
        parser = next(a for a in parser._actions if a.dest == "COMMAND" or a.choices).choices[name]
        text = parser.format_help().replace(str(Path.home()), "~")
        keep(f"reference/cli/{name}.md", f"# moelab {name}\n\n```text\n{text}```\n")
        lines.append(f"[moelab {name}]({name}.md)\n: {purpose[0].upper()}{purpose[1:]}. ")
        lines[-1] += f"`moelab {name} {example}`\n".replace(" `\n", "`\n")
    keep(
        "reference/cli/index.md",
        "\n".join([*lines, "```{toctree}", ":hidden:", "", *COMMANDS, "```"]),
    )


def names() -> str:
    """Every kind of the registry, and the class that one of one's own is like."""
    lines = ["# Names", "", "What is chosen by name; `moelab.describe(kind)` prints the same.", ""]
    for kind, (title, home) in KINDS.items():
        rows = [[f"`{name}`", *told] for name, told in registry.describe(kind).items()]
        lines += [f"## {title}", "", f'`moelab.names("{kind}")`', ""]
        lines += [inert(markdown_table(["name", "what it is for", "of"], rows)), ""]
        if home:
            lines += ["```{eval-rst}", f".. autoclass:: {home}", "   :members:", "```", ""]
    return "\n".join(lines)


def api() -> str:
    """The public names."""
    rest = [name for name in _HOMES if not any(name in group for group in GROUPS.values())]
    lines = ["# Python", ""]
    for title, group in GROUPS.items():
        lines += [f"## {title}", ""]
        for name in group or rest:
            kind = "autoclass" if name[0].isupper() else "autofunction"
            lines += ["```{eval-rst}", f".. {kind}:: moelab.{name}"]
            lines += ["   :members:"] * (kind == "autoclass") + ["```", ""]
        if title == "Open and run":
            lines += ["What `model.moelab` is:", "", "```{eval-rst}"]
            lines += [".. autoclass:: moelab.offloading.session.Session", "   :members:", "```", ""]
    return "\n".join(lines)


def write(_app) -> None:
    """The hook `builder-inited`."""
    keep("found.md", found())
    keep("papers/claims.md", ledger())
    keep("reference/names.md", names())
    keep("reference/api.md", api())
    commands()
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8")
            keep(name.lower(), rewritten(text, ROOT, name.lower().removesuffix(".md")))


def setup(app) -> None:
    app.connect("builder-inited", write)
    app.connect("source-read", _index)
    # the contents may change while the text of the index does not
    app.connect("env-get-outdated", lambda *_: ["index"])
