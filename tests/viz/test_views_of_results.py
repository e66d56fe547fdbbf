"""The views of checkpoints and of the arena: what they say without a widget, and
with one."""

import csv
import io
import shlex

import pytest

pytest.importorskip("ipywidgets")
pytest.importorskip("anywidget")
from moelab.__main__ import main
from moelab.base.files import small_model
from moelab.bench.arena import Contest, Standing
from moelab.viz import survey, views
from moelab.viz.views import standings, treemap


def table(view):
    return list(csv.DictReader(io.StringIO(view.csv())))


def test_modules_are_not_named_as_their_views():
    """Once such a module is imported, it hides the view of its name."""
    for name, module in views._HOMES.items():
        assert name != module and callable(getattr(views, name))


def test_the_model_map_holds_every_byte_and_colours_it():
    view = views.model_map()
    tree = view.data[0]
    by_name = {node.name: node for node in tree}
    assert tree[0].bytes == sum(part.stored.nbytes for part in survey.parts(small_model()))
    for node in tree:
        children = [other for other in tree if other.parent == node.name]
        assert not children or sum(child.bytes for child in children) == node.bytes
        values = [(child.bytes, child.value) for child in children if child.value is not None]
        if values:
            assert node.value == pytest.approx(
                sum(b * v for b, v in values) / sum(b for b, _ in values)
            )
    part = next(part for part in survey.parts(small_model()) if part.expert is not None)
    leaf = by_name[part.name]
    assert leaf.leaf and leaf.value == survey.bound(part)
    assert by_name[leaf.parent].label.startswith("expert ")
    assert len(table(view)) == len(tree)
    view.set(colour="error of int4")
    assert 0 < view.data[0][0].value < 0.2
    with pytest.raises(ValueError, match="it must be one of"):
        view.set(colour="popularity")


def test_the_copied_command_of_the_map_gives_the_same_map(tmp_path):
    view = views.model_map().set(colour="error of int4")
    out = tmp_path / "map.csv"
    assert main([*shlex.split(view.command(**view.values))[1:], "--output", str(out)]) == 0
    assert out.read_text() == view.csv().replace("\r\n", "\n")


CONTEST = Contest(
    {"prose": 80.0, "code": 60.0},
    [
        Standing("lru", False, {"prose": 40.0, "code": 45.0}),
        Standing("Mine", True, {"prose": 60.0}, "Trace\nE: x"),
    ],
)


def test_what_the_arena_shows():
    figure = standings.draw(CONTEST)
    assert [(bar.name, list(bar.y)) for bar in figure.data] == [
        ("lru", ["code", "prose"]),
        ("<b>Mine</b>", ["code", "prose"]),
    ]
    assert list(figure.data[0].x) == [75.0, 50.0] and list(figure.data[1].x) == [0.0, 75.0]
    assert "Mine raised E: x" in standings.words(CONTEST)[0]


def test_arena_from_the_laboratory(capsys):
    import moelab.lab
    from moelab.cache.policies import LRU

    class Broken(LRU):
        def victim(self, resident):
            raise RuntimeError("no idea")

    view = moelab.lab.arena(Broken, share=0.6, tokens=64, each=1)
    assert "Broken raised RuntimeError: no idea" in view.words[0]
    assert "in victim" in capsys.readouterr().err and table(view)[-1]["Broken, yours"] == ""


def test_tiny_tensors_do_not_take_all_colours_of_the_map():
    known = [(0.1, 1), (0.65, 600), (0.67, 600), (0.9, 1)]
    tree = [treemap.Node(str(v), "", "", nbytes, v, True) for v, nbytes in known]
    marker = treemap.draw(tree, treemap.BOUND).data[0].marker
    assert (marker["cmin"], marker["cmax"]) == (0.65, 0.67)


def test_every_view_is_on_the_command_line(tmp_path, capsys):
    out = tmp_path / "map.csv"
    assert main(["view", "model_map", "--output", str(out)]) == 0
    assert out.read_text() and "written to" in capsys.readouterr().out
    assert main(["arena", "nothing_here:Mine"]) == 2 and "mine:TakeTurns" in capsys.readouterr().err
    assert main(["view", "model_map", "one", "two"]) == 2 and "takes 1" in capsys.readouterr().err
