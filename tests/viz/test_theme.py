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


@pytest.mark.parametrize("colours", [3, 2000])
def test_a_picture_in_few_colours_looks_the_same(colours):
    Image, rng = pytest.importorskip("PIL.Image"), np.random.default_rng(0)
    rgb = rng.integers(0, 256, (colours, 3)).astype(np.uint8)[rng.integers(0, colours, (60, 80))]
    Image.fromarray(rgb).convert("RGBA").save(png := BytesIO(), "PNG")
    made = theme.in_few_colours(png.getvalue())
    picture = Image.open(BytesIO(made))
    shown = np.asarray(picture.convert("RGB")).astype(int)
    assert picture.mode == "P" and np.abs(shown - rgb).mean() <= (0 if colours == 3 else 20)
    assert len(made) < len(png.getvalue())
