"""The site: `make docs`, or `python -m sphinx docs build/site`.

Pages lie in docs/. What is generated at each build, and what git ignores, is written by docs/_site:
tutorials from the newest runs, claims, what the notebooks found, the command line, the registries."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from _site import docstrings, links, pages, tutorials, views  # noqa: E402

from moelab import __version__  # noqa: E402

project, release = "moelab", __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx_design",
    "sphinx_copybutton",
]
exclude_patterns = ["_site"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "gfm"
autodoc_member_order = "bysource"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_title = "moelab"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["figures.js", "claims.js"]
html_copy_source = html_show_sphinx = html_show_copyright = False
html_show_search_summary = False  # it needs a server
html_math_renderer = "mathml"
copybutton_exclude = ".linenos, .gp, .go"
linkcode_resolve = links.of_object


def setup(app):
    for part in (pages, tutorials, views, docstrings, links):
        part.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
