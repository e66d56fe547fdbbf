"""Running notebooks headlessly, keeping and comparing their results; an arena for
what one writes."""

from typing import Any

from moelab.lab.results import open_run

__all__ = ["arena", "open_run"]


def arena(mine: Any, of: Any = None, **how: Any) -> Any:
    """Rank a cache policy or an NDP schedule of one's own: `moelab.viz.views.arena`."""
    from moelab.viz import views

    return views.arena(mine, of, **how)
