"""Tiny notebooks for the runner's tests."""

import pytest

PARAMETERS = "smoke: bool = True  # small and fast\nseed: int = 0  # random seed"

GOOD = [
    """from moelab.lab import open_run
run = open_run("good", dict(smoke=smoke, seed=seed))
run.metric("experts", 3, "experts", "exact")
run.metric("time", 1.5, "s", "measured")
run.takeaway("It has **{n}** experts & `code`.", n=3)
run.verdicts()""",
    """import plotly.graph_objects as go
fig = go.Figure(go.Scatter(y=[1, 2], name="</script><b>"))
run.figure("line", fig, caption="A line & its end [exact]", alt='It rises from 1 to 2, "always"')
run.save()""",
]


@pytest.fixture
def notebook(tmp_path):
    """notebook(name, *cells, parameters=…, tags=…) writes a notebook and returns its path."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("papermill")

    def write(name, *cells, parameters=PARAMETERS, tags=()):
        code = nbformat.v4.new_code_cell
        nb = nbformat.v4.new_notebook(
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        )
        nb.cells = (
            [code(parameters, metadata={"tags": ["parameters", *tags]})] if parameters else []
        )
        nb.cells += [code(cell) for cell in cells]
        path = tmp_path / f"{name}.ipynb"
        nbformat.write(nb, path)
        return path

    return write
