"""Tables of the five sources, as printed: `data/papers/*.toml`, one file a source.

A table says where it stands (`where`), what it holds with its units (`about`), its `columns` and
`rows`, and, if a model here was fitted to it, what (`fits`). What the sources claim with them is in
`moelab.claims`.
"""

from __future__ import annotations

import tomllib
from functools import cache

from moelab.base.files import shipped
from moelab.base.records import Record


@cache
def paper(source: str) -> Record:
    """The tables of a source, by name: "npumoe", "gpu-ndp", "speculating-experts" or "zipmoe"."""
    return tomllib.loads(shipped(f"papers/{source}.toml").read_text(encoding="utf-8"))
