"""Figures that are drawn when a test first asks for them, not while tests are collected; what holds
for each."""

from types import FunctionType


class Lazily(dict):
    """name → figure, given as name → function that draws it."""

    def __getitem__(self, name):
        value = super().__getitem__(name)
        if isinstance(value, FunctionType):
            value = self[name] = value()
        return value


def named(figure, name):
    """The trace of this name."""
    return next(trace for trace in figure.data if trace.name == name)


def check_axes(made, other):
    """A figure's axes have titles with units, it survives JSON, and its colours are another's."""
    import plotly.io as pio

    figure = pio.from_json(made.to_json())
    titles = [axis.title.text for axis in (*figure.select_xaxes(), *figure.select_yaxes())]
    assert any(title and "(" in title for title in titles)
    assert len(figure.data) == len(made.data) > 1
    assert figure.layout.template.layout.colorway == other.layout.template.layout.colorway
