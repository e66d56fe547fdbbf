"""The guard: experts that compute what the seam does not are refused, and nothing else is
touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.mixtral import modeling_mixtral
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import moelab
from moelab import configs, open_model
from moelab.configs import spec_from_config
from moelab.models import compat, dialects, discover, experts, guard, plug
from tests.models import tiny


class Loop(MixtralExperts):
    """The usual loop written out, with a place for each invention."""

    sums, identity = None, False

    def expert(self, x, e):
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[e])

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x, dtype=self.sums or x.dtype)
        for e in range(self.num_experts + self.identity):
            token, choice = (ids == e).nonzero(as_tuple=True)
            y = self.expert(x[token], e) if e < self.num_experts else x[token]
            out.index_add_(0, token, (y * weights[token, choice, None]).to(out.dtype))
        return out.to(x.dtype)


class SumsInFP32(Loop):
    sums = torch.float32


class Clamps(Loop):
    def expert(self, x, e):
        return super().expert(x, e).clamp(-0.5, 0.5)


class GateLast(Loop):
    def expert(self, x, e):
        up, gate = F.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[e])


class WeighsTheInput(Loop):
    def forward(self, x, ids, weights):
        return super().forward(x * weights.amax(-1, keepdim=True).to(x.dtype), ids, weights)


class GivesBackTheInput(Loop):
    """The id after the last expert's gives back the token, as LongCat's do."""

    identity = True


class Sorts(Loop):
    """Another call than (x, ids, weights)."""

    def forward(self, x, sizes):
        return x


class Elsewhere(nn.Module):
    """Weights under other names."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, self._is_hf_initialized = config.num_local_experts, True
        H, I = config.hidden_size, config.intermediate_size
        self.w1 = nn.Parameter(torch.randn(self.num_experts, I, H))
        self.w2 = nn.Parameter(torch.randn(self.num_experts, H, I))


INVENTED = {
    SumsInFP32: "the sum over a token's experts",
    Clamps: "an expert otherwise",
    GateLast: "an expert otherwise",
    WeighsTheInput: "otherwise than the seam",
    GivesBackTheInput: "the id 4, which is no expert's",
    Sorts: "cannot be compared",
    Elsewhere: "cannot be compared",
}


def mixtral(dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = tiny.config("mixtral")
    return compat.model_class(config)._from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("cls", INVENTED, ids=lambda cls: cls.__name__)
def test_an_invented_class_is_refused_with_what_it_does(cls, monkeypatch):
    monkeypatch.setattr(modeling_mixtral, "MixtralExperts", cls)
    model = mixtral()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"{cls.__name__} of transformers .*{INVENTED[cls]}"):
        plug(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert {type(layer.experts) for layer in discover(model)} == {cls}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_without_the_experts_in_memory_as_well(monkeypatch, tmp_path):
    folder = tiny.save("mixtral", tmp_path / "m", torch.bfloat16)
    other = type("MixtralExperts", (Clamps,), {"__module__": modeling_mixtral.__name__})
    monkeypatch.setattr(modeling_mixtral, "MixtralExperts", other)
    with pytest.raises(ValueError, match="MixtralExperts of .*otherwise than the seam"):
        open_model(folder, experts="external")


def test_the_usual_loop_is_let_through_whoever_wrote_it(monkeypatch):
    monkeypatch.setattr(modeling_mixtral, "MixtralExperts", Loop)
    model, ids = mixtral(), torch.arange(3, 20)[None]
    expected = model(ids).logits
    plug(model)
    assert torch.equal(model(ids).logits, expected)


def test_reading_the_router_otherwise_than_the_block_is_refused(monkeypatch):
    """The block's translation is right; predictors and records would take the second-best experts
    for the best."""

    def worst(router, output):
        return (-output[1]).topk(router.top_k, dim=1).indices, output[0]

    monkeypatch.setitem(dialects.ROUTING, "Llama4Router", worst)
    config = tiny.config("llama4_text")
    model = compat.model_class(config)._from_config(config, dtype=torch.bfloat16).eval()
    with pytest.raises(ValueError, match="than ROUTING reads .*Llama4Router.*dialects.py"):
        plug(model)


def test_a_block_that_passes_no_ids_is_told_of(monkeypatch, tmp_path):
    """In memory nothing is plugged, so nothing is compared, and the routing is heard where experts
    are called."""

    def dense(self, x):
        return self.experts(x.reshape(-1, x.shape[-1]), *[torch.ones(1, 2)] * 2)

    monkeypatch.setattr(modeling_mixtral.MixtralSparseMoeBlock, "forward", dense)
    said = "MixtralSparseMoeBlock calls .* torch.float32 in place of ids"
    with moelab.open_model(tiny.save("mixtral", tmp_path / "m", torch.bfloat16)) as lm:
        with pytest.raises(ValueError, match=said):
            lm(torch.arange(3, 9)[None])


OWNERS = {
    "Llama4TextExperts": "llama4_text",
    "SwitchTransformersExperts": "switch_transformers",
    "LongcatFlashExperts": "longcat_flash",
    "NemotronHExperts": "nemotron_h",
    "Inkling2Experts": "inkling2_text",
    "OpenAIPrivacyFilterExperts": "openai_privacy_filter",
}


@pytest.mark.parametrize("name", experts.KINDS)
def test_each_kind_of_experts_is_needed(name, monkeypatch):
    """Without its entry every architecture that has one is refused."""
    config = tiny.config(OWNERS[name])
    if name == "OpenAIPrivacyFilterExperts":
        make = transformers.AutoModelForTokenClassification.from_config
    else:
        make = compat.model_class(config)._from_config
    layer = discover(make(config, dtype=torch.bfloat16))[0]
    with monkeypatch.context() as without:
        without.delitem(experts.KINDS, name)
        with pytest.raises(ValueError, match=name):
            guard.check([layer], torch.bfloat16)
    guard.check([layer], torch.bfloat16)


def test_a_model_is_compared_once_in_each_dtype(monkeypatch):
    ran = []

    class Counted(Loop):
        def forward(self, x, ids, weights):
            ran.append(x.dtype)
            return super().forward(x, ids, weights)

    monkeypatch.setattr(modeling_mixtral, "MixtralExperts", Counted)
    model, runs = mixtral(), []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        ran.clear()
        plug(model.to(dtype))
        runs.append(bool(ran))
    assert runs == [True, False, True]


LARGE = {
    "mixtral": dict(hidden_size=4096, intermediate_size=14336, num_local_experts=8, head_dim=128),
    "qwen3_moe": dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128),
    "gpt_oss": dict(hidden_size=2880, intermediate_size=2880, num_local_experts=128),
    "llama4_text": dict(hidden_size=5120, intermediate_size=8192, num_local_experts=16),
    "longcat_flash": dict(
        hidden_size=6144, expert_ffn_hidden_size=2048, n_routed_experts=512, zero_expert_num=256
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_models_miniature_is_small(name, monkeypatch):
    """Whatever the model's size, weights of a few megabytes are made; the model itself has none
    here."""
    made, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: made.append(randn(*a, **k)) or made[-1])
    guard.check(discover(compat.meta_twin(tiny.config(name, **LARGE[name]))), torch.float32)
    assert 0 < sum(tensor.numel() for tensor in made) < 2e7


@pytest.mark.parametrize(
    "fact, value", [("E", 5), ("I", 25), ("H", 33), ("moe_layers", (0, 1)), ("gated", False)]
)
def test_a_spec_that_is_not_the_models_is_refused(fact, value):
    config = tiny.config("mixtral")
    layers = discover(compat.meta_twin(config))
    spec = spec_from_config(config)
    guard.check_spec(spec, layers)
    with pytest.raises(ValueError, match=r"mixtral\): model.layers.0.mlp has .* and by its config"):
        guard.check_spec(replace(spec, **{fact: value}), layers)


def test_a_config_that_is_read_wrongly_opens_nothing(monkeypatch, tmp_path):
    folder = tiny.save("mixtral", tmp_path / "m")
    monkeypatch.setitem(configs.EXCEPTIONS, "mixtral", {"moe_layers": lambda config: [0, 2]})
    for use in (open_model, lambda folder: moelab.convert(folder, tmp_path / "s")):
        with pytest.raises(ValueError, match="3 MoE layers, and by its config 2"):
            use(folder)


def test_longcats_rows_without_an_expert_have_no_place_in_a_store(tmp_path):
    said = "12 rows for 8 experts.*longcat_flash cannot be converted"
    with pytest.raises(ValueError, match=said):
        moelab.convert(tiny.save("longcat_flash", tmp_path / "m"), tmp_path / "s")


def test_a_width_by_layer_is_no_number_of_layers(tmp_path):
    """Gemma 4's `vocab_size_per_layer_input` is 262,144."""
    open_model(tiny.save("gemma4_text", tmp_path / "m"))
