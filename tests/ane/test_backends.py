"""A converted model's packages run whole prefills: what they compute, share with decoding, and
refuse."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("coremltools")

import moelab
from moelab.ane import commands, doctor
from moelab.ane.backends import ConvertedBackend, TorchBackend
from moelab.ane.coreml.convert import convert_model
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.parity import LOGITS, parity
from moelab.ane.plan import ANEPlan, LayerPlan, PlannedGroup
from moelab.ane.runtime import prefill_through
from moelab.static.tiers import Tiers
from tests.models import tiny

CHUNK, CONTEXT = 16, 64


def make_plan(spec):
    """Two groups on the ANE and one on the CPU in each layer of eight experts; the first
    overflows."""
    groups = (
        PlannedGroup((2, 0, 5), 4, "ane", 1),
        PlannedGroup((7,), 16, "ane", 1),
        PlannedGroup((1, 3, 4, 6), 16, "cpu", 1),
    )
    capacity = tuple(4 if e in (2, 0, 5) else 16 for e in range(8))
    return ANEPlan(
        spec, CHUNK, "npumoe", (LayerPlan(Tiers((16, 4), capacity), groups, "ane"),) * spec.L
    )


@pytest.fixture(scope="module")
def folder(checkpoint, model, tmp_path_factory):
    """Converted as it lies on the disk, with fp16 weights."""
    return convert_model(
        checkpoint,
        tmp_path_factory.mktemp("converted") / "ane",
        make_plan(model.spec),
        context=CONTEXT,
    ).folder


@pytest.fixture(scope="module")
def halves(model):
    """The model with its weights rounded to fp16, in float32: what a perfect conversion
    computes."""
    rounded = moelab.open_model(model.config._name_or_path)
    for p in rounded.parameters():
        p.data = p.data.half().float()
    return rounded


def backend_of(folder, mode="double"):
    return ConvertedBackend(ConvertedModel(folder), mode)


def prompt(n, seed=0):
    return torch.randint(3, 96, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_prefill_through_packages_is_the_models(folder, halves):
    expected = halves(prompt(41)).logits
    backend = backend_of(folder)
    with prefill_through(halves, backend, overflow="pad") as ane:
        found = halves(prompt(41)).logits
        assert ane.total.launches > 0
    assert torch.allclose(found, expected, atol=1e-4)
    assert "forward" not in vars(halves.base_model.layers[0].self_attn)


@torch.no_grad()
def test_the_packages_are_really_run(folder, halves):
    """A backend whose graphs return zeros changes the logits: attention and experts both come from
    it."""
    expected = halves(prompt(20)).logits
    for what in ("group", "attention"):

        def silent(package, what=what):
            run = Evaluator(package)

            def zeros(inputs):
                return {name: (what not in package.name) * y for name, y in run(inputs).items()}

            zeros.dtype = torch.float64
            return zeros

        backend = ConvertedBackend(ConvertedModel(folder), runner=silent)
        with prefill_through(halves, backend, overflow="pad"):
            assert (halves(prompt(20)).logits - expected).abs().max() > 1e-2


@torch.no_grad()
def test_pruned_it_drops_what_torch_drops(folder, halves):
    found = {}
    for name, backend in (
        ("torch", TorchBackend(ConvertedModel(folder).plan)),
        ("graphs", backend_of(folder)),
    ):
        with prefill_through(halves, backend, order="router") as ane:
            found[name] = halves(prompt(48, 3)).logits, ane.total
    assert torch.allclose(found["torch"][0], found["graphs"][0], atol=1e-4)
    assert found["torch"][1] == found["graphs"][1] and found["torch"][1].drop_rate > 0


@torch.no_grad()
def test_decoding_goes_on_from_the_packages_cache(folder, halves):
    ids = prompt(35, 1)
    expected = halves.generate(ids, max_new_tokens=6, do_sample=False)
    with prefill_through(halves, backend_of(folder), overflow="pad"):
        assert torch.equal(halves.generate(ids, max_new_tokens=6, do_sample=False), expected)


def test_parity_measures_differences_and_judges_them(folder, halves, model):
    prompts = [prompt(n, n)[0].tolist() for n in (9, 33)]
    found = parity(backend_of(folder), halves, prompts)
    assert (
        found.ok and found.same.all() and found.last.max() < 1e-4 and found.backend == "evaluator"
    )
    assert found.counts.drop_rate == 0
    summary = found.summary()
    assert summary["prompts"] == 2 and summary["passed"] is True
    half = parity(backend_of(folder, "fp16"), model, prompts)
    assert half.last.max() > 0 and half.last.max() > found.last.max()
    assert half.ok and half.limit == np.inf  # nothing to judge it by but its tokens
    loud = parity(
        backend_of(folder, "fp16"), model, prompts, rounding=replace(half, last=half.last + 1)
    )
    assert loud.ok and loud.limit == pytest.approx(3 * (half.last.max() + 1))
    assert (
        not replace(half, limit=LOGITS, last=half.last + LOGITS).ok
        and not replace(half, same=~half.same).ok
    )
    other = moelab.open_model(model.config._name_or_path)
    other.base_model.layers[
        1
    ].self_attn.o_proj.weight.data *= 1.5  # no longer the model that was converted
    worse = parity(backend_of(folder), other, prompts)
    assert not worse.ok and worse.last.max() > LOGITS
    with pytest.raises(ValueError, match="at least one"):
        parity(backend_of(folder), model, [])


@pytest.mark.parametrize("part", ["group00", "attention"])
@torch.no_grad()
def test_a_package_that_was_changed_is_run_by_nobody(part, folder, halves, tmp_path, monkeypatch):
    """Its numbers would be wrong without a word: every way to run or read it refuses it."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = next((copy / f"layers/001/{part}.mlpackage").rglob("weight.bin"))
    data = bytearray(weights.read_bytes())
    data[-200] ^= 64
    weights.write_bytes(data)
    converted = ConvertedModel(copy)
    monkeypatch.setattr(doctor, "probe", lambda *given: {"error": "it is not run"})
    monkeypatch.setattr(doctor, "require_mac", lambda what: None)
    with pytest.raises(ValueError, match=f"{part}.* is damaged"):
        ConvertedBackend(converted)
    with pytest.raises(ValueError, match=f"{part}.* is damaged"):
        doctor.diagnose(converted)
    with pytest.raises(ValueError, match=f"{part}.* is damaged"):
        commands.lint(SimpleNamespace(packages=[copy]))


def test_another_models_weights_are_refused(folder, model, tmp_path):
    kind = {"num_hidden_layers": 2, "mlp_only_layers": [0]}
    other = moelab.open_model(tiny.save("qwen3_moe", tmp_path / "other", seed=1, **kind))
    backend = backend_of(folder)
    with (
        pytest.raises(ValueError, match="other is not the checkpoint"),
        prefill_through(other, backend),
    ):
        pass
    assert "forward" not in vars(other.base_model)
    other.config._name_or_path = ""
    with (
        pytest.raises(ValueError, match="this model is not the checkpoint"),
        prefill_through(other, backend),
    ):
        pass
    with prefill_through(model, backend):
        pass
