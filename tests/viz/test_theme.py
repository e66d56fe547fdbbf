import json

import pytest

go = pytest.importorskip("plotly.graph_objects")
from moelab.viz import theme    # noqa: E402


def luminance(colour):
    """Relative luminance of "#rrggbb" (WCAG 2)."""
    channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_figures_stay_small():
    assert len(json.dumps(theme.to_json(go.Figure()))) < 4000 < len(go.Figure(layout={"template": "plotly"}).to_json())


def test_the_figure_itself_is_not_changed_and_its_own_settings_stay():
    fig = go.Figure(go.Scatter(y=[1]), layout={"title": {"text": "mine", "font": {"size": 30}}})
    before = fig.to_json()
    layout = theme.to_json(fig)["layout"]
    assert fig.to_json() == before and layout["title"]["font"]["size"] == 30
    assert layout["template"]["layout"]["colorway"][0] == theme.BLUE


def test_neighbouring_traces_differ_in_more_than_colour():
    styles = list(zip(theme.DASHES, theme.MARKERS))
    assert len(set(styles)) == len(theme.PALETTE) == len(set(theme.MARKERS)) == len(set(theme.PATTERNS))


def test_the_sequential_scale_is_even_in_grey():
    values = [luminance(colour) for colour in theme.SEQUENTIAL]
    assert values == sorted(values) and values[-1] - values[0] > 0.6


def test_a_browser_that_is_missing_or_hangs_is_no_error(monkeypatch):
    figures = [theme.to_json(go.Figure())]
    assert theme.render_png(figures, seconds=-0.9) == []        # no browser starts within a tenth of a second
    monkeypatch.setattr(theme.sys, "executable", "/bin/false")
    assert theme.render_png(figures) == []
