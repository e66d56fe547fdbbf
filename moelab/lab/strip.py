"""The git filter of notebooks: what is committed is the source, whatever JupyterLab has saved beside it.

    git config filter.nbstripout.clean ".venv/bin/python -m moelab.lab.strip"         (`make` does it)
"""

from __future__ import annotations

import sys

#: what Lab writes about the kernel, and changes with its version; cells' ids, which links and merges need, stay
DROPPED = tuple(f"metadata.language_info.{name}" for name in (
    "codemirror_mode", "file_extension", "mimetype", "nbconvert_exporter", "pygments_lexer", "version"))


def main() -> None:
    """Standard input to standard output, or the files named, by nbstripout."""
    sys.modules.setdefault("rfc3987_syntax", None)      # an optional package that takes seconds to import
    from nbstripout._nbstripout import main as strip
    sys.argv[1:1] = ["--keep-id", "--extra-keys", " ".join(DROPPED)]
    strip()


if __name__ == "__main__":
    main()
