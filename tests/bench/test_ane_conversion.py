"""A conversion and its checks on a tiny model: what is written, what fp16 does, and what noise
does."""

import pytest
import torch

import moelab
from moelab.ane.plan import make_plan
from moelab.bench import ane_conversion
from tests.models import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(
        "qwen3_moe",
        tmp_path_factory.mktemp("model") / "tiny",
        num_hidden_layers=2,
        mlp_only_layers=[],
    )


@pytest.fixture(scope="module")
def plan(checkpoint):
    spec = moelab.open_model(checkpoint).spec
    counts = [[8 - e for e in range(spec.E)]] * spec.L
    return make_plan(spec, counts, 12, 32, 4, cold_share=0.2, min_rows=0)


def test_the_first_layers_are_planned_and_the_others_left(plan):
    partly = ane_conversion.on_first_layers(plan, 1)
    assert partly.layers[0] == plan.layers[0] and plan.layers[1].on("ane")
    assert partly.layers[1].attention == "cpu" and not partly.layers[1].on("ane")
    assert [g.experts for g in partly.layers[1].groups] == [
        g.experts for g in plan.layers[1].groups
    ]
    assert ane_conversion.on_first_layers(plan, 9) == plan


def test_a_conversion_says_what_it_wrote(checkpoint, plan, tmp_path):
    pytest.importorskip("coremltools")
    partly = ane_conversion.on_first_layers(plan, 1)
    found = ane_conversion.convert(str(checkpoint), tmp_path / "converted", partly, 33)
    kinds = found.kinds()
    assert found.model.manifest["settings"]["context"] == 64
    assert [one.difference for one in kinds["attention"]] == [None]
    assert (
        sum(map(len, kinds.values()))
        == len(found.packages)
        == len(found.model.packages)
        == 1 + partly.launches
    )
    assert found.difference == 0.0
    tensors = 4 + 3 * sum(len(group.experts) for group in partly.layers[0].on("ane"))
    assert (
        0 <= found.weight_bytes - found.expected_bytes <= 192 * (tensors + len(kinds)) + 1024
    )  # headers, alignment
    assert 0 < ane_conversion.fp16_error(found.model) < 1e-2


def test_noise_of_no_size_changes_nothing(checkpoint):
    model = moelab.open_model(checkpoint, dtype=torch.float32)
    hooks = [list(layer.experts._forward_hooks) for layer in moelab.models.discover(model)]
    prompts = [[5, 6, 7], [8, 9]]
    calm, wild = (ane_conversion.shaken(model, prompts, size) for size in (0.0, 0.3))
    assert [len(one) for one in calm] == [3, 2] and all(float(one.max()) == 0 for one in calm)
    assert all(float(one.min()) > 0 for one in wild)
    assert [list(layer.experts._forward_hooks) for layer in moelab.models.discover(model)] == hooks
