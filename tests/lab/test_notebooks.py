"""Every notebook of the repository runs with smoke=True."""

import gc
import json
import os
import sys
from multiprocessing import get_context
from shutil import copyfile

import pytest

from moelab.base.files import CHECKOUT, small_model
from moelab.base.specs import MoESpec
from moelab.bench.synthesize import TOKENIZER, synthesize
from moelab.checkpoint.export import export
from moelab.lab.results import KINDS
from moelab.lab.runner import notebooks, tagged
from moelab.parallel.launch import HEAVY
from tests.depth import STRESS, depth
from tests.models import tiny

nbformat = pytest.importorskip("nbformat")
InteractiveShell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
every_notebook = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)


def run_cells(path, environment, parameters):
    """Run a notebook's cells in IPython, with parameters of its own."""
    os.environ.update(environment)
    os.chdir(CHECKOUT)
    sys.path.insert(0, str(path.parent))  # as in JupyterLab, what lies beside it
    gc.freeze()  # what was imported, which is most there is, is looked through by no collection
    shell = InteractiveShell.instance()
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "code":
            shell.run_cell(cell.source, store_history=True).raise_error()
            if "parameters" in cell.metadata.get("tags", ()):
                shell.push(parameters)


def smoke_run(path, folder, **parameters):
    """What a notebook finds with smoke=True, in a process that is forked from one that has imported
    what takes seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        [*HEAVY, "ipywidgets", "plotly.graph_objects", "moelab.offloading.offload"]
    )
    variables = {"MOELAB_HEADLESS": "1", "MOELAB_RUN_DIR": str(folder)}
    variables["IPYTHONDIR"] = str(folder / "ipython")
    given = (path, os.environ | variables, {"smoke": True} | parameters)
    process = context.Process(target=run_cells, args=given)
    process.start()
    process.join(3600 if STRESS else 500)
    process.kill()  # if it has not ended
    process.join()
    assert process.exitcode == 0
    return json.loads((folder / "metrics.json").read_text())


@every_notebook
def test_smoke_run(path, tmp_path):
    found = smoke_run(path, tmp_path)
    assert found["notebook"] == path.stem and found["metrics"]
    assert all(metric["kind"] in KINDS for metric in found["metrics"].values())
    # what it measures in seconds does not depend on what else runs
    if tagged(path, "side-by-side"):
        assert all(
            "cpu" in f"{name} {metric['unit']}".lower()
            for name, metric in found["metrics"].items()
            if metric["kind"] == "measured"
            and metric["unit"].split()[:1] in (["s"], ["ms"], ["GB/s"])
        )


@pytest.fixture(scope="session")
def foreign(tmp_path_factory):
    """A checkpoint that is not the shipped one: 1.5 GB in depth, else one whose experts compress
    very differently."""
    folder = tmp_path_factory.mktemp("foreign") / "model"
    if STRESS:
        how = {"vocab": 16_384, "heads": 16, "kv_heads": 4, "head_dim": 64}
        size = ("synthetic", "qwen3_moe", 9, tuple(range(9)), 32, 4, 1024, 768)
        return synthesize(folder, MoESpec(*size, **how))
    how = {"hidden_size": 96, "moe_intermediate_size": 96, "num_experts": 32, "vocab_size": 1024}
    how |= {"num_hidden_layers": 3, "mlp_only_layers": [], "max_position_embeddings": 1024}
    tiny.save_uneven(folder, bos_token_id=None, eos_token_id=0, **how)
    for name in TOKENIZER:
        copyfile(small_model() / name, folder / name)
    return folder


@pytest.mark.filterwarnings("ignore:llama.cpp takes token ids only")
@pytest.mark.parametrize(
    "path",
    depth([path for path in notebooks() if path.stem.startswith("03")], notebooks()),
    ids=lambda path: path.stem,
)
def test_smoke_run_of_a_gguf_file(path, tmp_path):
    file = export(None, tmp_path / "small.gguf", "Q8_0")
    assert smoke_run(path, tmp_path, model=str(file))["metrics"]


@pytest.mark.parametrize(
    "path",
    depth([], notebooks()),
    ids=lambda path: path.stem,
)
def test_smoke_run_of_another_model(path, foreign, tmp_path):
    assert smoke_run(path, tmp_path, model=str(foreign))["metrics"]
