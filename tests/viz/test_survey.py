"""What a survey says of a checkpoint, against the tensors read whole."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from moelab.base.files import small_model
from moelab.store.headers import read_header
from moelab.viz import survey
from notebooks.studies.entropy import analyse

GENERATOR = torch.Generator().manual_seed(0)


def made(shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=GENERATOR).to(dtype)


@pytest.fixture
def checkpoint(tmp_path):
    """One layer of separate experts, one of stacked ones, and what is neither."""
    tensors = {
        "model.layers.2.mlp.experts.gate_up_proj": made((4, 64, 32)),
        "model.embed": made((50, 32)),
        "model.layers.10.norm.weight": made((32,)),
        "steps": torch.tensor(3),
    }
    tensors |= {f"model.layers.10.mlp.experts.{e}.up_proj.weight": made((64, 32)) for e in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def test_every_byte_belongs_to_one_part_and_layers_are_in_order(checkpoint):
    folder, tensors = checkpoint
    found = survey.parts(folder)
    assert sum(part.stored.nbytes for part in found) == sum(t.nbytes for t in tensors.values())
    assert len({part.name for part in found}) == len(found)
    assert list(dict.fromkeys(part.layer for part in found)) == [
        "",
        "model.layers.2",
        "model.layers.10",
    ]
    experts = [(part.layer[-2:], part.expert) for part in found if part.expert is not None]
    assert experts == [(layer, e) for layer in (".2", "10") for e in range(4)]
    stacked = next(part for part in found if part.name.endswith("gate_up_proj[2]"))
    whole = tensors["model.layers.2.mlp.experts.gate_up_proj"]
    assert torch.equal(survey.sample(stacked.stored), whole[2])


def test_bounds_are_those_of_the_whole_tensors():
    """The shipped model's tensors fit their samples, so its survey is exact."""
    expected = {row.name: row.bound for row in analyse(small_model()) if row.scope == "tensor"}
    found = [part for part in survey.parts(small_model()) if not part.name.endswith("]")]
    assert found
    assert {part.name: survey.bound(part) for part in found} == {
        part.name: expected[part.name] for part in found
    }


@given(
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    st.integers(1, 64).map(lambda n: 64 * n),
)
def test_a_sample_is_of_whole_rows_and_as_small_as_asked(tmp_path_factory, shape, dtype, most):
    whole = (torch.rand(shape, generator=GENERATOR) * 255).to(dtype)
    path = tmp_path_factory.mktemp("sample") / "one.safetensors"
    save_file({"one": whole}, path)
    with patch.object(survey, "SAMPLE", most):
        rows = survey.sample(read_header(path)["one"])
    n = shape[-1] if shape else 1
    flat = whole.reshape(-1, n) if n else whole.reshape(0, 0)
    known = {row.contiguous().view(torch.uint8).numpy().tobytes() for row in flat}
    if whole.nbytes <= most:
        assert rows.numel() == whole.numel()
    if len(flat) > 1 and n:
        assert {row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows} <= known
        assert rows.nbytes <= max(most, n * dtype.itemsize)


def test_what_is_no_number_has_no_error_and_no_bound(checkpoint):
    folder, _ = checkpoint
    by_name = {part.name: part for part in survey.parts(folder)}
    assert survey.error(by_name["model.layers.10.norm.weight"], "int8") is None  # stays as it is
    assert survey.error(by_name["steps"], "int8") is None and survey.bound(by_name["steps"]) is None


def test_int8_errors_against_a_naive_loop(checkpoint):
    folder, tensors = checkpoint
    name = "model.layers.10.mlp.experts.1.up_proj.weight"
    part = next(part for part in survey.parts(folder) if part.name == name)
    w, wrong = tensors[name].float(), 0.0
    for row in w:
        for group in row.split(32):
            scale = (group.abs().max() / 127).to(torch.bfloat16).float()
            for value in group.tolist():
                code = max(-127, min(127, round(value / scale.item())))
                wrong += (value - torch.tensor(code * scale.item()).to(torch.bfloat16).item()) ** 2
    assert survey.error(part, "int8") == pytest.approx(
        (wrong / w.square().sum().item()) ** 0.5, rel=1e-3
    )
