"""Whole models converted: what the folder holds, what its graphs compute, and what an interruption
leaves."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("coremltools")

import moelab
from moelab.ane.coreml import convert as convert_module
from moelab.ane.coreml.attention_graph import AttentionShape
from moelab.ane.coreml.convert import convert_model
from moelab.ane.coreml.converted import ConvertedModel, sealed
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.ffn_graph import expert_of, pack, unpack
from moelab.ane.plan import ANEPlan, LayerPlan, PlannedGroup
from moelab.models import plug
from moelab.static.tiers import Tiers
from tests.ane.coreml.test_graphs import in_chunks
from tests.models import tiny

SETTINGS = {"context": 64}


def make_plan(spec, chunk=16):
    """Two groups on the ANE and one on the CPU in each layer of eight experts."""
    groups = (
        PlannedGroup((2, 0, 5), 32, "ane", 1),
        PlannedGroup((7,), 16, "ane", 1),
        PlannedGroup((1, 3, 4, 6), 16, "cpu", 1),
    )
    capacity = tuple(32 if e in (2, 0, 5) else 16 for e in range(8))
    return ANEPlan(
        spec, chunk, "npumoe", (LayerPlan(Tiers((32, 16), capacity), groups, "ane"),) * spec.L
    )


@pytest.fixture(scope="module")
def converted(checkpoint, model, tmp_path_factory):
    return convert_model(
        checkpoint, tmp_path_factory.mktemp("converted") / "ane", make_plan(model.spec), **SETTINGS
    )


def test_the_manifest_says_what_runs_where(converted, checkpoint):
    layers = converted.layers
    assert [layer["moe"] for layer in layers] == [None, 0]
    assert [layer["attention"]["unit"] for layer in layers] == ["ane"] * 2
    assert [[g["unit"] for g in layer["groups"]] for layer in layers] == [[], ["ane", "ane", "cpu"]]
    assert "file" not in layers[1]["groups"][2]
    assert {
        p.relative_to(converted.folder).as_posix() for p in converted.folder.rglob("*.mlpackage")
    } == {entry["file"] for entry in converted.packages}
    assert len(converted.packages) == 4 and {p.name for p in converted.folder.iterdir()} == {
        "layers",
        "manifest.json",
    }
    for group in layers[1]["groups"][:2]:
        assert (
            group["difference"] < 1e-12
            and group["weight_bytes"] >= 2 * 3 * len(group["experts"]) * 32 * 24
        )
    assert converted.plan == make_plan(converted.plan.spec)
    assert converted.checkpoint().folder == checkpoint.resolve()


def test_group_graphs_compute_the_models_experts(converted, model):
    experts = plug(model)[0].seam
    for entry in converted.layers[1]["groups"][:2]:
        members, C = entry["experts"], entry["capacity"]
        slots = torch.randn(len(members) * C, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = torch.cat(
                [experts.ffn(rows, experts.weights(e)) for e, rows in zip(members, slots.split(C))]
            )
        y = unpack(Evaluator(converted.package(entry))({"x": pack(slots)})["y"])
        assert float((y - expected).square().mean().sqrt() / expected.square().mean().sqrt()) < 1e-3
    assert "file" not in converted.layers[1]["groups"][2]


def test_attention_graphs_compute_the_models_attention(converted, model):
    seen = {}

    def keep(module, args, kwargs, output):
        cos, sin = kwargs["position_embeddings"]
        seen[module.layer_idx] = kwargs["hidden_states"][0], cos[0], sin[0], output[0][0]

    hooks = [
        layer.self_attn.register_forward_hook(keep, with_kwargs=True)
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.randint(3, 90, (1, 50), generator=torch.Generator().manual_seed(0)))
    for hook in hooks:
        hook.remove()
    for layer in range(2):
        x, cos, sin, expected = seen[layer]
        entry = converted.layers[layer]
        run = Evaluator(converted.package(entry["attention"]))
        y = in_chunks(run, AttentionShape(**entry["attention_shape"]), x, cos, sin)
        torch.testing.assert_close(
            y.float(), expected, atol=2e-3, rtol=2e-3
        )  # weights rounded to fp16


def test_nothing_is_overwritten_and_settings_are_checked(converted, checkpoint, model, tmp_path):
    with pytest.raises(FileExistsError):
        convert_model(checkpoint, converted.folder, make_plan(model.spec))
    with pytest.raises(ValueError, match="weights"):
        convert_model(checkpoint, tmp_path / "out", make_plan(model.spec), weights="int4")
    with pytest.raises(ValueError, match="32"):
        convert_model(checkpoint, tmp_path / "out", make_plan(model.spec), context=100)
    other = tiny.save("mixtral", tmp_path / "other")
    with pytest.raises(ValueError, match="geometry"):
        convert_model(other, tmp_path / "out", make_plan(model.spec))
    with pytest.raises(ValueError, match="not the checkpoint"):
        converted.checkpoint(other)
    with pytest.raises(FileNotFoundError, match="no converted model"):
        ConvertedModel(tmp_path)


def verify(folder):
    """Compare all packages with their checksums."""
    converted = ConvertedModel(folder)
    for entry in converted.packages:
        converted.package(entry)


def test_damage_is_seen(converted, tmp_path):
    folder = shutil.copytree(converted.folder, tmp_path / "copy")
    verify(folder)
    copy = ConvertedModel(folder)
    weights = next((folder / copy.packages[2]["file"]).rglob("weight.bin"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match="group00"):
        verify(folder)
    shutil.rmtree(folder / copy.packages[2]["file"])
    with pytest.raises(FileNotFoundError, match="group00"):
        ConvertedModel(folder)


def test_an_interrupted_conversion_goes_on(converted, checkpoint, model, tmp_path, monkeypatch):
    destination, plan, made = tmp_path / "ane", make_plan(model.spec), []
    attention, groups = convert_module.save_program, convert_module.save_ffn

    def killed_at(n):
        def count(save):
            def call(path, *args, **options):
                made.append(path.name)
                if len(made) > n:
                    save(
                        path, *args, **options
                    )  # the package is there, the journal does not know it
                    raise KeyboardInterrupt
                return save(path, *args, **options)

            return call

        monkeypatch.setattr(convert_module, "save_program", count(attention))
        monkeypatch.setattr(convert_module, "save_ffn", count(groups))

    killed_at(2)
    with pytest.raises(KeyboardInterrupt):
        convert_model(checkpoint, destination, plan, **SETTINGS)
    part = tmp_path / "ane.part"
    assert not destination.exists() and (part / "journal.jsonl").read_text().count("\t") == 3
    with pytest.raises(FileExistsError, match="settings"):
        convert_model(checkpoint, destination, plan, context=96)
    with open(part / "journal.jsonl", "a") as journal:
        journal.write('{"file": "layers/001/gro')  # killed while it wrote
    damaged = next((part / "layers/001/attention.mlpackage").rglob("weight.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-8])
    made.clear()
    killed_at(99)
    result = convert_model(checkpoint, destination, plan, **SETTINGS)
    assert made == ["attention.mlpackage", "group00.mlpackage", "group01.mlpackage"]
    verify(result.folder)
    assert not part.exists() and [e["file"] for e in result.packages] == [
        e["file"] for e in converted.packages
    ]
    inputs = {"x": pack(torch.randn(96, 32))}
    again, first = (
        Evaluator(of.package(of.layers[1]["groups"][0]))(inputs)["y"] for of in (result, converted)
    )
    assert torch.equal(again, first)


KILLED = """
import os, signal, sys, tempfile
from moelab.ane.coreml.convert import convert_model
from moelab.ane.coreml.package import coremltools
from moelab.ane.plan import ANEPlan
ct = coremltools()
ct.models.MLModel.save = lambda *args: os.kill(os.getpid(), signal.SIGKILL)        # its temporary copy is written
convert_model(sys.argv[1], sys.argv[2], ANEPlan.load(sys.argv[3]))
"""


def test_a_kill_leaves_nothing_that_the_next_conversion_does_not_remove(
    checkpoint, model, tmp_path
):
    (tmp_path / "temporary").mkdir()
    plan = plan_of_all(model.spec)
    plan.save(tmp_path / "temporary/plan")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, checkpoint, tmp_path / "ane", tmp_path / "temporary/plan"],
        capture_output=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
    )
    assert killed.returncode == -9, killed.stderr
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == ["plan"]
    assert list((tmp_path / "ane.part/building").rglob("weight.bin"))
    convert_model(checkpoint, tmp_path / "ane", plan)
    assert {path.name for path in tmp_path.iterdir()} == {"temporary", "ane"}
    assert {path.name for path in (tmp_path / "ane").iterdir()} == {"layers", "manifest.json"}


def test_a_manifest_reads_nothing_outside_its_folder(converted, tmp_path):
    folder = shutil.copytree(converted.folder, tmp_path / "copy")
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in (
        "../ane/layers/001/group00.mlpackage",
        str(converted.folder / "layers/001/group00.mlpackage"),
        "layers/001/group01.mlpackage",
    ):
        manifest["layers"][1]["groups"][0]["file"] = name
        (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
        with pytest.raises((FileNotFoundError, ValueError), match="lacks|damaged"):
            verify(folder)


def test_compressed_weights_are_near(checkpoint, model, tmp_path):
    how = SETTINGS | {"weights": "int8"}
    result = convert_model(checkpoint, tmp_path / "ane", make_plan(model.spec), **how)
    found = [e["difference"] for e in result.packages if e["difference"] is not None]
    assert len(found) == 2 and all(1e-4 < difference < 0.1 for difference in found)


@pytest.mark.parametrize(
    "kind, says",
    [("llama4_text", "scale the experts' input"), ("switch_transformers", "encoder-decoders")],
)
def test_experts_without_graphs_are_refused_before_anything_is_written(kind, says, tmp_path):
    source = tiny.save(kind, tmp_path / "model")
    with pytest.raises(ValueError, match=says):
        convert_model(source, tmp_path / "ane", plan_of_all(moelab.open_model(source).spec))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def plan_of_all(spec, chunk=16):
    """All experts of a layer in one graph."""
    group = PlannedGroup(tuple(range(spec.E)), 16, "ane", 1)
    return ANEPlan(
        spec, chunk, "npumoe", (LayerPlan(Tiers((16,), (16,) * spec.E), (group,), "ane"),) * spec.L
    )


def test_a_graph_of_other_experts_than_the_models_is_not_kept(
    checkpoint, model, tmp_path, monkeypatch
):
    """Gate and up swapped: the graph still computes what it was built from, but not what the model
    does."""

    def swapped(module, tensors):
        right = expert_of(module, tensors)
        return replace(right, gate=right.up, up=right.gate)

    monkeypatch.setattr(convert_module, "expert_of", swapped)
    with pytest.raises(ValueError, match="does not compute what torch does"):
        convert_model(checkpoint, tmp_path / "ane", make_plan(model.spec), **SETTINGS)


def test_attention_without_a_graph_stays_on_the_cpu_and_says_so(tmp_path):
    source = tiny.save("gpt_oss", tmp_path / "gpt", num_hidden_layers=1)
    spec = moelab.open_model(source).spec
    plan = ANEPlan(
        spec,
        16,
        "npumoe",
        (LayerPlan(Tiers((16,), (16,) * 4), (PlannedGroup((0, 1, 2, 3), 16, "ane", 1),), "ane"),),
    )
    result = convert_model(source, tmp_path / "ane", plan, **SETTINGS)
    assert result.layers[0]["attention"] == {"unit": "cpu"} and "gpt_oss" in result.plan.problems[0]
    assert result.plan.layers[0].attention == "cpu"
    assert [entry["difference"] < 1e-3 for entry in result.packages] == [True]
