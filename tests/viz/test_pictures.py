"""The findings' pictures show the numbers that lie in results/; a page shows every picture, and all
are small."""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("plotly")

from moelab.base.files import results_root
from moelab.bench.results import sections_of
from moelab.viz import theme

ROOT = Path(__file__).parents[2]
RESULTS = results_root(ROOT / "results")
spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
findings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(findings)


def traces(figure, name):
    return [trace for trace in figure.data if trace.name == name]


def test_dropping_costs_points_with_intervals():
    rows = sections_of(RESULTS / "bench" / "ane_accuracy.json")
    figure, (task, row) = (
        findings.dropping(rows),
        next(
            (name, row)
            for name, row in rows["accuracy (measured), drops and padding (exact)"].items()
            if name == "spelling: weakest attention (NPUMoE)"
        ),
    )
    (trace,) = traces(figure, "spelling")
    at = list(trace.y).index(task.partition(": ")[2])
    assert trace.x[at] == pytest.approx(100 * row["difference"]) and len(trace.y) == 5
    assert trace.error_x.array[at] >= 196 * row["difference error"]  # Student's reach is longer


@pytest.mark.parametrize("name", findings.FINDINGS)
def test_the_picture_is_there_and_small(name):
    read, draw = findings.FINDINGS[name]
    assert theme.to_json(draw(read(RESULTS)))["data"]
    assert (RESULTS / f"{name}.png").stat().st_size <= 60_000
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    (alt,) = set(re.findall(rf"!\[(.+)\]\(\.\./results/{name}\.png\)", pages))
    assert len(alt) > 40
