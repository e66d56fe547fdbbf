"""Docstrings, which are plain text with `code`, as reStructuredText; mathematics as MathML, which
browsers show without a library from the network."""

import re
from html import escape, unescape
from xml.etree import ElementTree

from docutils.nodes import SkipNode
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

PARAMETER = re.compile(r"([\w`*][\w`*, ./]*?) : (?=\S)")


def inline(text: str) -> str:
    """A line with its code marked twice and all other signs of reStructuredText escaped."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"`{part}`" if i % 2 else re.sub(r"([\\*|`]|_(?!\w))", r"\\\1", part)
        for i, part in enumerate(parts)
    )


def paragraph(lines: list[str]) -> list[str]:
    """One paragraph: a table in columns stays as it is, "name : what" is an item, all else flows."""
    if all(line.startswith("    ") for line in lines):
        return ["::", "", *lines]
    written: list[str] = []
    for line in lines:
        line = re.sub(r"(?<=\.) {2,}(?=\w+ : )", "\n", line)  # two parameters in a line
        for part in line.split("\n"):
            found = PARAMETER.match(part)
            if found:
                written += ["", f"- **{found[1].strip('`')}**: {inline(part[found.end() :])}"]
            elif written and written[-1].startswith(("- ", "  ")):
                written.append(f"  {inline(part.strip())}")
            else:
                written.append(inline(part.strip()))
    return written


def rewrite(_app, _what, _name, _obj, _options, lines: list[str]) -> None:
    """The hook `autodoc-process-docstring`."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    lines[:] = [line for block in blocks if block for line in [*paragraph(block.split("\n")), ""]]


def mathml(node, block: bool) -> str:
    """MathML; what it has no sign for is a warning, and shown as it is written."""
    # brackets grow without being told
    tex = re.sub(r"\\([bB]ig+[lrm]?|textstyle)(?![a-zA-Z])", "", node.astext())
    try:
        written = tex2mathml(tex, as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("mathematics: %s", error, location=node)
        return f"<code>{escape(tex)}</code>"
    written = re.sub(r"&(?!lt;|gt;|amp;)\w+;", lambda found: unescape(found[0]), written)
    tree = ElementTree.fromstring(re.sub(r" xmlns=\S+?(?=[ >])", "", written))
    for part in tree.iter("msub"):
        if part[0].tag == "munder" and part[0][-1].text == "\u23df":
            part.tag = "munder"  # what is written under a brace stands below it
    return ElementTree.tostring(tree, encoding="unicode")


def visit_math(translator, node) -> None:
    translator.body.append(mathml(node, False))
    raise SkipNode


def visit_block(translator, node) -> None:
    translator.body.append(f'<div class="math">{mathml(node, True)}</div>')
    raise SkipNode


def setup(app) -> None:
    app.connect("autodoc-process-docstring", rewrite)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_block, None))
