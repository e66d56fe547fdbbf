"""The seam against transformers' own eager forward: bit for bit, on every architecture."""

from __future__ import annotations

import pytest
import torch

from moelab import open_model
from moelab.models import discover, eager, plug, plugged
from moelab.models.seam import SeamExperts
from tests.depth import in_turn
from tests.models import tiny
from tests.models.sweep import generate


@pytest.mark.stress
@pytest.mark.parametrize(
    "name, dtype", in_turn(tiny.ARCHITECTURES, [torch.float32, torch.bfloat16])
)
def test_external_and_plugged_experts_equal_eager_bit_for_bit(name, dtype, tmp_path):
    folder = tiny.save(name, tmp_path / name, dtype)
    resident, external = open_model(folder), open_model(folder, experts="external")
    assert all(
        isinstance(layer.experts, SeamExperts) and not layer.experts.resident
        for layer in discover(external)
    )
    expected = [generate(resident, seed) for seed in range(2)]
    plug(resident)
    for model in (external, resident):
        for seed, (tokens, logits) in enumerate(expected):
            found_tokens, found_logits = generate(model, seed)
            assert torch.equal(found_tokens, tokens) and torch.equal(found_logits, logits)


@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_quantised_experts_are_dequantised_one_by_one(name, tmp_path):
    folder = tiny.save_few(name, tmp_path / "m")
    reference, external = open_model(folder), open_model(folder, experts="external")
    tokens, logits = generate(reference, 0)
    tokens_external, logits_external = generate(external, 0)
    assert torch.isfinite(logits).all() and logits.std() > 0
    assert torch.equal(tokens, tokens_external) and torch.equal(logits, logits_external)


def test_plugged_is_undone_whatever_happens(tmp_path):
    model = open_model(tiny.save("qwen3_moe", tmp_path / "m"))
    stock, x = type(discover(model)[0].experts), torch.randint(3, 96, (1, 9))

    def zero(x, ids, weights, experts):
        return torch.zeros_like(x)

    before = model(x).logits
    for _ in range(2):  # as it was opened, then with an executor of its own
        with pytest.raises(KeyError), plugged(model, zero) as given:
            assert given is zero and not torch.equal(model(x).logits, before)
            raise KeyError
        assert torch.equal(model(x).logits, before) and type(discover(model)[0].experts) is stock
        plug(model)
        stock = type(discover(model)[0].experts)
    with plugged(model, source=lambda layer, expert: {}), pytest.raises(KeyError):
        model(x)
    assert torch.equal(model(x).logits, before)


def test_an_executor_sees_every_token_once(tmp_path):
    """A dozen-line executor of one's own: here it counts, and drops the second choice of every
    token."""
    model = open_model(tiny.save("mixtral", tmp_path / "m"))
    seen = []

    def first_choice_only(x, ids, weights, experts):
        seen.append((experts.layer, tuple(x.shape), tuple(ids.shape)))
        return eager(
            x,
            torch.where(torch.arange(ids.shape[1]) == 0, ids, experts.num_experts),
            weights,
            experts,
        )

    plug(model, executor=first_choice_only)
    ids = torch.arange(3, 14)[None]
    dropped = model(ids).logits
    assert seen == [(layer, (11, 32), (11, 2)) for layer in range(3)]
    plug(model, executor=eager)
    assert not torch.equal(model(ids).logits, dropped)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_that_may_lie_either_way_round_are_read_as_the_whole_model_reads_them(
    turned, tmp_path
):
    """Qwen 3 VL's conversion turns a bank whose shape is not the model's; square ones it takes as
    they are."""
    folder = tiny.save(
        "qwen3_vl_moe",
        tmp_path / "m",
        torch.bfloat16,
        text_config={} if turned else {"moe_intermediate_size": 32},
    )  # down: [E, H, I], H = I
    reference, external = open_model(folder), open_model(folder, experts="external")
    for ours, theirs in zip(discover(external), discover(reference)):
        for expert in range(ours.E):
            read = ours.experts.weights(expert)
            assert all(
                torch.equal(read[name], bank[expert])
                for name, bank in theirs.experts.named_parameters()
            )
