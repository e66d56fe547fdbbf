"""Links that leave docs/: to a line of the code, a notebook, README. On GitHub they lead to the file;
on the site to its page here. After a build, every link and every anchor is looked up."""

import inspect
import os
import re
from functools import cache
from html import unescape
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from sphinx.util import logging

from _site import DOCS, ROOT

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s#]+)(?:#([^)\s]*))?\)")
SCRIPT = re.compile(r"(<script\b[^>]*>).*?(</script>)", re.S)  # what is in one is no HTML
CODE = ("moelab/**/*.py", "moelab/**/*.toml", "notebooks/**/*.py", "data/**/*.toml", "data/*.py")
#: outside of docs/ → the page that has it here
PAGES = {"README.md": "index", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}


@cache
def sources() -> dict[str, str]:
    """File of the repository → its page."""
    files = sorted({path for pattern in CODE for path in ROOT.glob(pattern)})
    return {
        name: f"source/{name}" for name in (path.relative_to(ROOT).as_posix() for path in files)
    }


def rewritten(text: str, folder: Path, page: str) -> str:
    """Markdown that lies in `folder`, with its links as they are on the page `page` of the site.
    What has no page here is left as text."""
    up = "../" * page.count("/")

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found.groups()
        if re.match(r"\w+:|/", target):
            return found[0]
        name = os.path.relpath(folder / unquote(target), ROOT).replace(os.sep, "/")
        if name.startswith("docs/"):
            inside = os.path.relpath(name, Path("docs", page).parent).replace(os.sep, "/")
            return f"[{words}]({inside}{'#' + anchor if anchor else ''})"
        if name in sources():
            line = f"#L-{anchor.lstrip('L').split('-')[0]}" if anchor else ""
            return (
                f'<a class="reference internal" href="{up}{sources()[name]}.html{line}">{words}</a>'
            )
        if name.startswith("notebooks/") and name.endswith(".ipynb"):
            return f"[{words}]({up}tutorials/{Path(name).name})"
        if name == "README.md" and anchor == "glossary" and (DOCS / "glossary.md").is_file():
            return f"[{words}]({up}glossary.md)"
        return f"[{words}]({up}{PAGES[name]}.md)" if name in PAGES else words

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)  # blocks of code stay as they are
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def _read(app, page: str, content: list[str]) -> None:
    path = Path(app.env.doc2path(page))
    if path.suffix == ".md":
        content[0] = rewritten(content[0], path.parent, page)


def of_object(domain: str, info: dict[str, str]) -> str | None:
    """Where the code of what autodoc describes is, seen from a page of reference/."""
    found = import_module(info["module"])
    try:
        for part in info["fullname"].split("."):
            found = getattr(found, part)
        found = inspect.unwrap(found)
        name = Path(inspect.getsourcefile(found)).relative_to(ROOT).as_posix()
        return f"../{sources()[name]}.html#L-{inspect.getsourcelines(found)[1]}"
    except (AttributeError, TypeError, KeyError, ValueError, OSError):
        return None


def _pages(_app):
    form = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
    for name, page in sources().items():
        code = (ROOT / name).read_text(encoding="utf-8")
        body = highlight(code, get_lexer_for_filename(name), form)
        yield page, {"title": name, "body": f"<h1>{name}</h1>\n{body}"}, "page.html"


def broken(site: Path) -> list[str]:
    """Links of the pages of a folder that lead to no file, or to no anchor of one."""
    texts = {
        path.resolve(): SCRIPT.sub(r"\1\2", path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    anchors = {
        path: set(re.findall(r"""\s(?:id|name)=["']([^"']+)["']""", text))
        for path, text in texts.items()
    }
    wrong = set()
    for path, text in texts.items():
        for link in set(
            re.findall(r"""<(?:a|img|link|script)\s[^>]*?(?:href|src)="([^"]*)\"""", text)
        ):
            target, _, anchor = unescape(link).partition("#")
            if re.match(r"\w+:|//", target):
                continue
            there = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            known = anchors.get(there, {anchor})
            if not there.exists() or anchor and unquote(anchor) not in known:
                wrong.add(f"{path.relative_to(site.resolve())} links to {link}")
    return sorted(wrong)


def _check(app, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        for line in broken(Path(app.outdir)):
            logging.getLogger(__name__).warning("%s, which is not there", line)


def setup(app) -> None:
    app.connect("source-read", _read)
    app.connect("html-collect-pages", _pages)
    app.connect("build-finished", _check)
