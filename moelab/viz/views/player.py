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


def player(content: dict[str, Any], token: int, moved: Callable[[int], None]) -> Player:
    """The player of what `moelab.viz.views.scrub.content` returned; `moved` is told where it stopped."""
    made = Player(data=content, token=token)
    made.observe(lambda change: moved(change["new"]), "token")
    return made
