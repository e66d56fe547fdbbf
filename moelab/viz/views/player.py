"""The player of the token scrubber, which needs no kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets


class Player(anywidget.AnyWidget):
    """The text, the grid of experts and the buttons; `token` is the forward pass that is shown."""

    _esm = Path(__file__).with_name("player.js")
    data = traitlets.Dict().tag(sync=True)
    token = traitlets.Int().tag(sync=True)


def player(found: Any, token: int, moved: Callable[[int], None]) -> Player:
    """The player of a `moelab.viz.views.scrub.Scrub`; `moved` is told where it stopped."""
    from moelab.viz.views.scrub import content
    made = Player(data=content(found), token=token)
    made.observe(lambda change: moved(change["new"]), "token")
    return made
