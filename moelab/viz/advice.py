"""`moelab.advise`: an advice that draws itself in a notebook."""

from __future__ import annotations

from functools import wraps
from typing import Any

from moelab.advice import advise as answering
from moelab.advice.answer import Advice


class DrawnAdvice(Advice):
    """An advice with its figure; words alone where the packages that draw are missing."""

    def _ipython_display_(self) -> None:
        try:
            from moelab.viz.advice_figure import draw
        except ModuleNotFoundError:
            print(self)
        else:
            draw(self)


@wraps(answering.advise)
def advise(*given: Any, **options: Any) -> Advice:
    return DrawnAdvice(**vars(answering.advise(*given, **options)))
