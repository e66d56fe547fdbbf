"""A plain figure is what plotly makes of the same calls."""

import json
from copy import deepcopy

import numpy as np
import pytest

pytest.importorskip("plotly.graph_objects")

from plotly.subplots import make_subplots

from moelab.viz import theme
from moelab.viz.charts import DASHED, panels
from moelab.viz.plotly_json import Figure


def draw(figure, at):
    figure.add_bar(
        y=[3, 1],
        name="bars",
        marker={"color": "red", "pattern": {"shape": "x"}},
        error_y={"array": [1, 2]},
    )
    figure.add_scatter(x=[1, 2], y=[1.5, 4.0], text=None, line={"width": 1}, line_dash="dot", **at)
    figure.add_heatmap(
        z=[[1, 2]], colorbar={"title": {"text": "share"}}, colorbar_title_side="right", **at
    )
    figure.update_xaxes(title="x (s)").update_xaxes(title_font_size=9, type="log", **at)
    figure.update_yaxes(title="y (ms)", col=1).update_yaxes(range=[0, 1], showgrid=None)
    for place in ("top right", "bottom right"):
        figure.add_hline(
            y=0.5,
            line=DASHED,
            annotation_text=place,
            annotation_position=place,
            annotation_font={"size": 9},
            **at,
        )
    figure.add_vline(x=1, layer="below", annotation_text="here", **at)
    figure.add_vline(x=2, line=DASHED | {"dash": "dot"})
    figure.add_annotation(x=1, y=0, text="note", font_size=3)
    figure.update_annotations(font_color="#333")
    return figure.update_layout(
        margin_l=3, legend={"title": {"text": "kind"}}, legend_x=1, title="all", height=300
    )


@pytest.mark.parametrize("titles", [("a", "b"), ("",)])
def test_the_same_calls_give_the_same_figure(titles):
    before, widths = deepcopy(DASHED), (0.3, 0.7)[: len(titles)]
    ours, places = panels(titles, column_widths=widths)
    theirs = make_subplots(
        1, len(titles), subplot_titles=titles if titles[0] else None, column_widths=widths
    )
    theirs.update_xaxes(title="").update_yaxes(title="", col=1).update_annotations(font_size=13)
    at = places[-1]
    made, wanted = json.loads(draw(ours, at).to_json()), json.loads(draw(theirs, at).to_json())
    assert made["data"] == wanted["data"]
    wanted["layout"].pop("template", None)
    assert made["layout"].pop("template") == theme.TEMPLATE
    assert made["layout"] == wanted["layout"] and before == DASHED


def test_numpy_is_plain_json_and_what_is_missing_is_null():
    figure = Figure().add_scatter(
        x=np.arange(2), y=[np.float32(1), float("nan")], customdata=range(2)
    )
    (trace,) = theme.to_json(figure)["data"]
    assert trace == {"type": "scatter", "x": [0, 1], "y": [1, None], "customdata": [0, 1]}


def test_beside_its_own_it_has_what_plotly_has_which_checks():
    figure = Figure().add_bar(y=[1, 2])
    assert figure.data[0].y == (1, 2) and "plotly" in figure.to_html(include_plotlyjs=False)
    with pytest.raises(ValueError, match="colour"):
        Figure().add_bar(y=[1], colour="red").data
