"""Every notebook of the repository runs with smoke=True."""

import json
from shutil import copyfile

import pytest

from moelab.lab.results import KINDS
from moelab.lab.runner import notebooks, run_notebook
from moelab.files import small_model
from moelab.models.synthesize import TOKENIZER, synthesize
from moelab.specs import MoESpec
from tests.depth import STRESS
from tests.models import tiny
every_notebook = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)


@every_notebook
def test_smoke_run(path):
    directory = run_notebook(path, {"smoke": True}, timeout=300)
    found = json.loads((directory / "metrics.json").read_text())
    assert found["notebook"] == path.stem and found["metrics"]
    assert all(metric["kind"] in KINDS for metric in found["metrics"].values())


@pytest.fixture(scope="session")
def foreign(tmp_path_factory):
    """A checkpoint that is not the shipped one: 1.5 GB in depth, else one whose experts compress very differently."""
    folder = tmp_path_factory.mktemp("foreign") / "model"
    if STRESS:
        return synthesize(folder, MoESpec("synthetic", "qwen3_moe", 9, tuple(range(9)), 32, 4, 1024, 768, vocab=16_384,
                                          heads=16, kv_heads=4, head_dim=64))
    tiny.save_uneven(folder, hidden_size=96, moe_intermediate_size=96, num_experts=32, num_hidden_layers=3,
                     mlp_only_layers=[], vocab_size=1024, max_position_embeddings=1024, bos_token_id=None,
                     eos_token_id=0)
    for name in TOKENIZER:
        copyfile(small_model() / name, folder / name)
    return folder


@pytest.mark.stress
@every_notebook
def test_smoke_run_of_another_model(path, foreign):
    if not STRESS and path.stem != "03_cache_planning":
        pytest.skip("make stress runs all of them")
    directory = run_notebook(path, {"smoke": True, "model": str(foreign)}, timeout=3600)
    assert json.loads((directory / "metrics.json").read_text())["metrics"]
