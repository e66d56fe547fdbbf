"""What `docs/conf.py` needs to build the site from moelab and its results."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def keep(name: str, text: str) -> None:
    """Write a generated page of docs/, unless it is there already: Sphinx reads again what changed."""
    path = DOCS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def keep_only(folder: str, names: set[str]) -> None:
    """Remove what earlier builds wrote into a folder of generated pages."""
    for path in (DOCS / folder).glob("*"):
        if path.name not in names:
            path.unlink()
