"""The git filter of notebooks: what is committed is the source, whatever JupyterLab has saved
beside it.

    git config filter.nbstripout.clean ".venv/bin/python -m notebooks.strip"
    (`make` does it)

`make lab` has `after_saving` called too, or `git status` would list every notebook that was run:
git takes another size for a change, before it asks any filter."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

#: what Lab writes about the kernel, and changes with its version; cells' ids, which links and
#: merges need, stay
DROPPED = (
    "metadata.language_info.codemirror_mode metadata.language_info.file_extension "
    "metadata.language_info.mimetype metadata.language_info.nbconvert_exporter "
    "metadata.language_info.pygments_lexer metadata.language_info.version"
)


def after_saving(model: dict[str, Any], os_path: str, **_: Any) -> Thread | None:
    """Jupyter's hook after a file was saved: of a notebook, the thread that tells git, which takes
    seconds."""
    if model["type"] != "notebook":
        return None
    thread = Thread(target=tell_git, args=[Path(os_path)], daemon=True)
    thread.start()
    return thread


def tell_git(path: Path) -> None:
    """Let git's index know the size of a notebook whose source is the one that it has; else change
    nothing."""
    git = ["git", "-C", str(path.parent)]
    with suppress(OSError):  # no git, so nothing to tell
        same = subprocess.run([*git, "diff", "--quiet", "--", path.name], capture_output=True)
        if same.returncode == 0:
            subprocess.run([*git, "add", "-u", "--", path.name], capture_output=True)


def main() -> None:
    """Standard input to standard output, or the files named, by nbstripout."""
    # an optional package that takes seconds to import
    sys.modules.setdefault("rfc3987_syntax", None)
    from nbstripout._nbstripout import main as strip

    sys.argv[1:1] = ["--keep-id", "--extra-keys", DROPPED]
    try:
        strip()
    except Exception as error:  # nbstripout looks no closer than at what is JSON
        sys.exit(
            f"this is no notebook of Jupyter's format 4 ({type(error).__name__}: {error}); "
            "save it with Jupyter"
        )


if __name__ == "__main__":
    main()
