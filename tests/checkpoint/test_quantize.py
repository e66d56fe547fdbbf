"""Stores rounded by what experts are given, bits by matrix, and the importance matrix of llama.cpp."""

from __future__ import annotations

from itertools import product

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import open_model, record
from moelab.__main__ import main
from moelab.calibration import Calibration, calibrate
from moelab.checkpoint.convert import convert, kept_store
from moelab.checkpoint.export import export
from moelab.checkpoint.quantize import CHOICES, choose
from moelab.evaluation.imatrix import write_imatrix
from moelab.models import discover
from tests.models import tiny

PROMPTS = [list(range(3, 40)), list(range(50, 90)), [7, 5, 3] * 9]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "mlp_only_layers": []}
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("m") / "m", torch.bfloat16, **sizes)


@pytest.fixture(scope="module")
def calibration(source):
    return calibrate(record(open_model(source), PROMPTS, hidden=True), "a text", inputs=80)


def expert_errors(source, store, calibration):
    """Σ ‖x (w − ŵ)ᵀ‖² of gate and up over each expert's own tokens."""
    exact, other = open_model(source), open_model(store.folder)
    inputs, total = calibration.inputs, 0.0
    for before, after in zip(discover(exact), discover(other)):
        for e in range(before.E):
            x = inputs.x[before.index][(inputs.ids[before.index] == e).any(1)].float()
            d = before.experts.gate_up_proj[e].float() - after.experts.gate_up_proj[e].float()
            total += float((x @ d.T).square().sum())
    return total


def test_a_store_rounded_by_data_keeps_products_and_says_by_what(source, calibration, tmp_path):
    file = calibration.save(tmp_path / "c.safetensors")
    naive = convert(source, tmp_path / "naive", quantize="int4")
    ours = convert(source, tmp_path / "ours", quantize="int4", calibration=file)
    assert ours.quantized == f"int4@{calibration.inputs.digest}"
    assert ours.identity == f"{naive.identity.partition('-')[0]}-{ours.quantized}"
    assert expert_errors(source, ours, calibration) < 0.8 * expert_errors(
        source, naive, calibration
    )
    again = kept_store(source, quantize="int4", calibration=Calibration.load(file))
    sizes = [sorted((p.name, p.stat().st_size) for p in s.folder.iterdir()) for s in (ours, again)]
    assert sizes[0] == sizes[1] and kept_store(source, quantize="int4").folder != again.folder


@pytest.mark.filterwarnings("ignore:llama.cpp takes token ids only")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_gguf_file_rounded_by_data_keeps_products(source, calibration, kind, tmp_path, capsys):
    """As large as one to nearest, the same but for experts: decoded by
    gguf-py, gate and up make less of an error on what they are given."""
    file = calibration.save(tmp_path / "c.safetensors")
    how = ["--kind", kind, "--calibration", str(file)]
    assert main(["export", str(source), str(tmp_path / "data.gguf"), *how]) == 0
    export(source, tmp_path / "naive.gguf", kind)
    model, errors = open_model(source), []
    naive, ours = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("naive", "data"))
    for a, b in zip(naive.tensors, ours.tensors, strict=True):
        assert (a.name, a.tensor_type, a.data_offset) == (b.name, b.tensor_type, b.data_offset)
        assert "_exps" in a.name or a.data.tobytes() == b.data.tobytes()
    for read in (naive, ours):
        found, total = {tensor.name: tensor for tensor in read.tensors}, 0.0
        for layer in discover(model):
            for e in range(layer.E):
                chosen = (calibration.inputs.ids[layer.index] == e).any(1)
                x = calibration.inputs.x[layer.index][chosen].float()
                halves = layer.experts.gate_up_proj[e].detach().float().chunk(2)
                for name, exact in zip(("gate", "up"), halves):
                    tensor = found[
                        f"blk.{model.spec.moe_layers[layer.index]}.ffn_{name}_exps.weight"
                    ]
                    w = gguf.dequantize(tensor.data[e], tensor.tensor_type)
                    total += float((x @ (torch.from_numpy(w) - exact).T).square().sum())
        errors.append(total)
    assert errors[1] < 0.8 * errors[0]
    with open_model(tmp_path / "data.gguf", memory="50%"):
        pass
    other = tiny.save("mixtral", tmp_path / "other", torch.bfloat16)
    for refused, of, told in ((other, kind, "calibration"), (source, "BF16", "Q8_0")):
        how = ["--kind", of, "--calibration", str(file)]
        assert main(["export", str(refused), str(tmp_path / "no.gguf"), *how]) == 2
        assert told in capsys.readouterr().err and not (tmp_path / "no.gguf").exists()


@pytest.mark.parametrize("bits", [4.3, 6.0])
def test_bits_stay_within_the_budget_and_experts_of_a_layer_alike(
    source, calibration, bits, tmp_path
):
    store = convert(source, tmp_path / "s", quantize=f"auto:{bits}", calibration=calibration)
    stored = weights = 0
    for layer in store.layers:
        for name in layer.tensors:
            assert len({entries[name].codec.name for entries in layer.experts}) == 1
            assert layer.experts[0][name].codec.name in CHOICES
            stored += sum(entries[name].stored() for entries in layer.experts)
            weights += sum(entries[name].n for entries in layer.experts)
    assert 8 * stored / weights <= bits
    ids = torch.tensor([PROMPTS[0]])
    wide = {"dtype": "float32"}  # in bf16 a router may choose otherwise
    with open_model(store.folder, memory="50%", executor="fast", **wide) as fast, torch.no_grad():
        logits = fast(ids).logits
    with open_model(store.folder, **wide) as plain, torch.no_grad():
        torch.testing.assert_close(logits, plain(ids).logits, atol=1e-3, rtol=1e-3)


def test_what_is_missing_foreign_or_too_little_is_refused(source, calibration, tmp_path, capsys):
    file = calibration.save(tmp_path / "c.safetensors")
    without = calibrate(record(open_model(source), PROMPTS)).save(tmp_path / "counts.safetensors")
    other = tiny.save("mixtral", tmp_path / "other", torch.bfloat16)
    for model, how, told in (
        (source, ["auto:5"], "--inputs"),
        (source, ["auto:5", "--calibration", str(without)], "none of their inputs"),
        (source, ["auto:3", "--calibration", str(file)], "more bits"),
        (other, ["int4", "--calibration", str(file)], "calibration"),
    ):
        assert main(["convert", str(model), str(tmp_path / "no"), "--quantize", *how]) == 2
        assert told in capsys.readouterr().err and not (tmp_path / "no").exists()
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(source), str(tmp_path / "no"), "--quantize", "int5"])
    assert "Did you mean 'int8'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="hidden"):
        calibrate(record(open_model(source), PROMPTS), inputs=8)


@given(st.integers(0, 2**20), st.integers(1, 5), st.floats(1, 3))
def test_choices_fit_and_nothing_that_fits_is_left_out(seed, n, share):
    """Against all combinations: never better than the best, nor left with what would still pay."""
    random = torch.Generator().manual_seed(seed)
    costs = torch.rand(n, 3, generator=random, dtype=torch.float64).sort(1, descending=True)[0]
    sizes = torch.randint(1, 100, (n, 3), generator=random).double().cumsum(1)
    budget = float(sizes[:, 0].sum()) * share
    chosen = torch.tensor(choose(costs, sizes, budget))
    rows = torch.arange(n)
    cost, size = costs[rows, chosen].sum(), sizes[rows, chosen].sum()
    every = [
        (costs[rows, k].sum(), sizes[rows, k].sum())
        for k in map(torch.tensor, product(range(3), repeat=n))
    ]
    best = min(c for c, s in every if s <= budget)
    assert size <= budget and best <= cost <= costs[:, 0].sum()
    for i in range(n):
        for k in range(int(chosen[i]) + 1, 3):
            assert (
                size + sizes[i, k] - sizes[i, chosen[i]] > budget
                or costs[i, k] == costs[i, chosen[i]]
            )


def test_an_importance_matrix_has_sums_of_squares_and_is_read_back(source, calibration, tmp_path):
    model = open_model(source)
    path = write_imatrix(tmp_path / "i.gguf", model, calibration)
    read = gguf.GGUFReader(path)
    assert read.get_field("general.type").contents() == "imatrix"
    found = {tensor.name: torch.tensor(tensor.data) for tensor in read.tensors}
    inputs = calibration.inputs
    for layer in discover(model):
        for e in range(layer.E):
            sums, n = torch.zeros(64), 0
            inner = torch.zeros(64)
            for x, ids in zip(inputs.x[layer.index].float(), inputs.ids[layer.index]):
                if e in ids.tolist():
                    gate, up = (layer.experts.gate_up_proj[e].float() @ x).chunk(2)
                    sums, n = sums + x**2, n + 1
                    inner = inner + (torch.nn.functional.silu(gate) * up).detach() ** 2
            for key, naive in (("gate", sums), ("up", sums), ("down", inner)):
                name = f"blk.{model.spec.moe_layers[layer.index]}.ffn_{key}_exps.weight"
                torch.testing.assert_close(found[f"{name}.in_sum2"][e], naive, rtol=1e-3, atol=1e-5)
                assert float(found[f"{name}.counts"][e]) == n
    counts = Calibration.load(path, source)
    assert counts.tokens == (80, 0)
    assert torch.equal(
        counts.counts(),
        torch.stack(
            [
                (inputs.ids[l, ..., None] == torch.arange(model.spec.E)).sum((0, 1))
                for l in range(model.spec.L)
            ]
        ),
    )
