from base64 import b64decode
from io import BytesIO

import numpy as np
import pytest

go = pytest.importorskip("plotly.graph_objects")
from moelab.viz import theme


def test_the_figure_itself_is_not_changed_and_its_own_settings_stay():
    fig = go.Figure(go.Scatter(y=[1]), layout={"title": {"text": "mine", "font": {"size": 30}}})
    before = fig.to_json()
    layout = theme.to_json(fig)["layout"]
    assert fig.to_json() == before and layout["title"]["font"]["size"] == 30
    assert layout["template"]["layout"]["colorway"][0] == theme.BLUE


def test_a_browser_that_is_missing_or_hangs_is_no_error(monkeypatch):
    figures = [theme.to_json(go.Figure())]
    assert (
        theme.render_png(figures, seconds=-0.9) == []
    )  # no browser starts within a tenth of a second
    monkeypatch.setattr(theme.sys, "executable", "/bin/false")
    assert theme.render_png(figures) == []


@pytest.mark.parametrize("colours", [3, 2000])
def test_a_picture_in_few_colours_looks_the_same(colours):
    Image, rng = pytest.importorskip("PIL.Image"), np.random.default_rng(0)
    rgb = rng.integers(0, 256, (colours, 3)).astype(np.uint8)[rng.integers(0, colours, (60, 80))]
    Image.fromarray(rgb).convert("RGBA").save(png := BytesIO(), "PNG")
    made = theme.in_few_colours(png.getvalue())
    picture = Image.open(BytesIO(made))
    shown = np.asarray(picture.convert("RGB")).astype(int)
    assert picture.mode == "P" and np.abs(shown - rgb).mean() <= (0 if colours == 3 else 20)
    assert theme.in_few_colours(made) == made and len(made) < len(png.getvalue())


def test_packed_arrays_are_the_same_numbers_on_a_line():
    z, sizes = [[1.25, 2.0, 3.0], [4.0, 5.0, 1e-9]], [*range(0, 900, 3)]
    trace = {
        "type": "heatmap",
        "z": z,
        "marker": {"size": sizes},
        "y": [None, 0.5] * 3,
        "text": ["7"] * 9,
        "customdata": [0.1] * 9,
        "x": [0, 1, 2],
        "colorscale": [[0.0, "red"], [1.0, "blue"]] * 4,
        "visible": [True] * 9,
    }
    (made,) = theme.packed([trace])
    assert {key for key in trace if made[key] != trace[key]} == {"z", "y", "marker"}
    flat = np.frombuffer(b64decode(made["z"]["bdata"]), made["z"]["dtype"]).reshape(2, 3)
    assert made["z"]["shape"] == "2, 3" and np.allclose(flat, z, rtol=1e-6, atol=0)
    y = np.frombuffer(b64decode(made["y"]["bdata"]), made["y"]["dtype"])
    assert np.array_equal(y, [np.nan, 0.5] * 3, equal_nan=True)
    assert (
        np.frombuffer(
            b64decode(made["marker"]["size"]["bdata"]), made["marker"]["size"]["dtype"]
        ).tolist()
        == sizes
    )
