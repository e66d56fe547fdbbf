"""Errors in words for a person."""

from __future__ import annotations

import errno


def error_text(error: BaseException) -> str:
    """An error in words for a person."""
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])  # str() would put it between quotes
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename is not None else ""
        advice = {
            errno.ENOSPC: "; free some space, or write to another disk, and run the command again",
            errno.EACCES: "; choose another place, or change its permissions",
            errno.EROFS: "; choose another place",
        }.get(error.errno, "")
        return error.strerror + where + advice
    if isinstance(error, MemoryError):
        return (
            f"there is not enough memory for this{f' ({error})' if str(error) else ''}; ask for "
            "less"
        )
    return str(error) or type(error).__name__
