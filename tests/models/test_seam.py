"""The seam: one call a layer, computed by whoever is plugged in, bit-equal to transformers; and
nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moelab import open_model, record
from moelab.models import compat, discover, eager, plug, plugged
from moelab.models.patches import Patches
from tests.models import sweep, tiny

IDS = torch.arange(3, 14)[None]


def zero(x, ids, weights, experts):
    return torch.zeros_like(x)


def snapshot(model):
    """Everything that could be left behind: class, attributes, hooks, the dispatch's name."""
    found = {}
    for name, module in model.named_modules():
        held = set(vars(module))
        hooks = [len(value or ()) for key, value in vars(module).items() if "_hooks" in key]
        config = getattr(module, "config", None)
        found[name] = type(module), held, hooks, getattr(config, "_experts_implementation", None)
    return found


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_quantised_experts_are_dequantised_one_by_one(name, tmp_path):
    folder = tiny.save_few(name, tmp_path / "m")
    whole, one_by_one = (
        sweep.generate(open_model(folder, experts=how)) for how in ("resident", "external")
    )
    assert whole[1].std() > 0 and all(map(torch.equal, whole, one_by_one))


@pytest.mark.parametrize("turned", [False, True])
def test_experts_that_may_lie_either_way_round_are_read_as_the_whole_model_reads_them(
    turned, tmp_path
):
    """Qwen 3 VL's conversion turns a bank whose shape is not the model's; square ones it takes as
    they are."""
    sizes = {} if turned else {"moe_intermediate_size": 32}  # down: [E, H, I], H = I
    folder = tiny.save("qwen3_vl_moe", tmp_path / "m", torch.bfloat16, text_config=sizes)
    reference, external = open_model(folder), open_model(folder, experts="external")
    for ours, theirs in zip(discover(external), discover(reference)):
        for expert in range(ours.E):
            read = ours.seam.weights(expert)
            for name, bank in theirs.experts.named_parameters():
                assert torch.equal(read[name], bank[expert])


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4_text", "switch_transformers"])
def test_what_is_plugged_is_taken_off_whatever_happens(name, tmp_path):
    model = open_model(tiny.save(name, tmp_path / "m"))
    given = {"input_ids": IDS} | (
        {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    )
    for _ in range(2):  # as it was opened, then with what `plug` leaves on it
        exact, before = model(**given).logits, snapshot(model)
        with pytest.raises(KeyError), plugged(model, zero) as on:
            assert on is zero and not torch.equal(model(**given).logits, exact)
            with plugged(model, eager):
                assert torch.equal(model(**given).logits, exact)
            raise KeyError
        assert snapshot(model) == before and torch.equal(model(**given).logits, exact)
        with plugged(model, source=lambda layer, expert: {}), pytest.raises(KeyError):
            model(**given)
        assert snapshot(model) == before
        plug(model)


def test_classes_dispatched_by_name_stay_transformers_own(tmp_path):
    """Plugged, offloaded or opened without its experts; and another model is none of its
    business."""
    folder = tiny.save("mixtral", tmp_path / "m")
    other, exact = sweep.stock(folder), None
    for options in ({"executor": "fast"}, {"memory": 0.5}, {"experts": "external"}):
        with open_model(folder, **options) if "memory" in options else Patches():
            model = open_model(folder, **options)
            for layer in discover(model):
                assert type(layer.experts) is type(discover(other)[0].experts)
                assert compat.dispatches_by_name(type(layer.experts)) and layer.plugged
            found, exact = exact, other(IDS).logits
            assert found is None or torch.equal(found, exact)


def test_an_executor_sees_every_token_once(tmp_path):
    """An executor of one's own in a dozen lines: it counts, and drops each token's second
    choice."""
    model = open_model(tiny.save("mixtral", tmp_path / "m"))
    seen = []

    def first_choice_only(x, ids, weights, experts):
        seen.append((experts.layer, tuple(x.shape), tuple(ids.shape)))
        first = torch.arange(ids.shape[1]) == 0
        return eager(x, torch.where(first, ids, experts.num_experts), weights, experts)

    plug(model, executor=first_choice_only)
    dropped = model(IDS).logits
    assert seen == [(layer, (11, 32), (11, 2)) for layer in range(3)]
    plug(model, executor=eager)
    assert not torch.equal(model(IDS).logits, dropped)


def test_an_executor_that_is_a_module_is_no_child(tmp_path):
    model = open_model(tiny.save("mixtral", tmp_path / "m"))
    names = [name for name, _ in model.named_parameters()]
    with plugged(model, nn.Linear(32, 32)):
        assert [name for name, _ in model.named_parameters()] == names


def test_plugging_where_it_would_be_passed_by_is_refused(tmp_path):
    """A forward on the module itself, where the seam's is its class's."""
    model = open_model(tiny.save("llama4_text", tmp_path / "m"))
    discover(model)[-1].experts.forward = lambda x, ids, weights: x
    before = snapshot(model)
    for put_on in (lambda: plug(model, zero), lambda: plugged(model, zero).__enter__()):
        with pytest.raises(ValueError, match="forward of its own"):
            put_on()
        assert snapshot(model) == before


def test_weights_given_to_experts_on_disk_are_refused(tmp_path):
    model = open_model(tiny.save("mixtral", tmp_path / "m"), experts="external")
    discover(model)[1].experts.down_proj = nn.Parameter(torch.ones(8, 8, 8))
    with pytest.raises(ValueError, match="down_proj of these experts is not in memory"):
        model(IDS)


def test_what_is_no_routing_is_refused_with_the_table_that_it_needs(tmp_path):
    model = open_model(tiny.save("mixtral", tmp_path / "m"))
    layer = discover(model)[0]
    logits, weights, ids = layer.router(torch.randn(5, 32))
    assert layer.routing((logits, weights, ids))[0] is ids
    for output in ((weights, ids), logits.sum(), (logits, ids, weights)):
        with pytest.raises(ValueError, match="MixtralTopKRouter.*ROUTING"):
            layer.routing(output)
    experts = layer.experts
    turned = lambda x: experts(weights, ids, x)  # noqa: E731
    layer.block.forward = lambda x: turned(x.reshape(-1, 32)).reshape(x.shape)
    with pytest.raises(ValueError, match="MixtralTopKRouter needs .*ROUTING"):
        record(model, [[5, 6, 7, 8, 9]], max_new_tokens=1)
    with plugged(model, zero), pytest.raises(ValueError, match="MixtralExperts .*BLOCKS"):
        model(IDS)


@torch.no_grad()
def test_a_listener_that_is_taken_off_within_a_call_hears_nothing(tmp_path):
    """As by another thread: torch then calls the hook once more, without the keywords."""
    model = open_model(tiny.save("mixtral", tmp_path / "m"))
    heard, patches = [], Patches()
    with plugged(model, eager):
        layer = discover(model)[0]
        before = layer.experts.register_forward_pre_hook(lambda *_: patches.close())
        layer.listen(patches, lambda *of: heard.append(of))
        model(torch.tensor([[1, 2, 3]]))
        before.remove()
    assert not heard
