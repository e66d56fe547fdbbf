"""What is written for NxD runs, and gives NxD's classes what they take. The classes here have the
parameters of neuronx_distributed's own."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from moelab.__main__ import main
from moelab.advice.neuron import plan
from moelab.advice.neuron_command import ROUTERS, python
from moelab.cards import MODELS, load_model


class Taken:
    def __init__(self, **given):
        self.__dict__.update(given)


class RouterTopK(Taken):
    def __init__(
        self,
        num_experts,
        top_k,
        hidden_size,
        act_fn="softmax",
        sequence_parallel_enabled=False,
        apply_act_fn_over_topk=False,
        bias=False,
    ):
        assert 0 < top_k <= num_experts and act_fn in ("softmax", "sigmoid")
        super().__init__(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})


class GroupLimitedRouter(Taken):
    def __init__(
        self, num_experts, top_k, hidden_size, n_group, topk_group, sequence_parallel_enabled=False
    ):
        super().__init__(num_experts=num_experts, n_group=n_group, topk_group=topk_group)


class RoutedExpertsMLPOpsConfig(Taken):
    def __init__(
        self,
        num_experts,
        hidden_size,
        intermediate_size,
        top_k,
        hidden_act,
        glu_mlp,
        bias=False,
        intermediate_size_actual=None,
        normalize_top_k_affinities=False,
        capacity_factor=None,
        enable_spmd_rank=False,
    ):
        assert top_k > 1 or not normalize_top_k_affinities
        super().__init__(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})


class BlockwiseMatmulConfig(Taken):
    KNOWN = {"block_size", "logical_nc_config", "skip_dma_token", "skip_dma_weight"} | {
        f"use_shard_on_{of}_dynamic_while" for of in ("intermediate", "block")
    }

    @classmethod
    def from_kwargs(cls, **given):
        assert given.keys() <= cls.KNOWN
        return cls(**given)


@pytest.fixture
def nxd(monkeypatch):
    """neuronx_distributed, of which only the parameters are there; what was initialized."""
    made = []
    contents = {
        "modules.moe": {
            "MoE": Taken,
            "routing": SimpleNamespace(
                RouterTopK=RouterTopK, GroupLimitedRouter=GroupLimitedRouter
            ),
        },
        "modules.moe.expert_mlps_v2": {"ExpertMLPsV2": Taken},
        "modules.moe.moe_configs": {
            of.__name__: of for of in (BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig)
        },
        "parallel_layers": {
            "parallel_state": SimpleNamespace(
                initialize_model_parallel=lambda **given: made.append(given)
            )
        },
    }
    for name in ("", ".modules", *(f".{of}" for of in contents)):
        module = ModuleType(f"neuronx_distributed{name}")
        module.__dict__.update(contents.get(name[1:], {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config = SimpleNamespace(hidden_act="silu", n_group=8, topk_group=4)
    config.get_text_config = lambda: config
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda name: config)
    return made


WRITTEN = [name for name in MODELS if load_model(name).router in ROUTERS]


@pytest.mark.parametrize("name", WRITTEN)
def test_it_runs(name, nxd):
    made = plan(name, cores=64, quantize="fp8")
    code: dict = {}
    exec(compile(python(made), "plan.py", "exec"), code)
    code["initialize"]()
    way, spec = made.way, load_model(name)
    assert nxd == [{"tensor_model_parallel_size": way.tp, "expert_model_parallel_size": way.ep}]
    layer = code["moe_layer"]()
    experts = layer.expert_mlps.routed_experts_mlp_config
    assert (experts.num_experts, experts.top_k, experts.hidden_size) == (spec.E, spec.K, spec.H)
    assert experts.intermediate_size % way.tp == 0 <= experts.intermediate_size - spec.I < way.tp
    assert (experts.intermediate_size_actual or spec.I) == spec.I
    assert layer.expert_mlps.blockwise_matmul_config.block_size == made.block_size
    config = code["NEURON_CONFIG"]
    assert config["moe_tp_degree"] * config["moe_ep_degree"] == config["tp_degree"] == 64
    assert config["quantization_dtype"] == "f8e4m3"


def test_the_command_writes_it(tmp_path):
    file = tmp_path / "plan.py"
    assert main(["neuron", "plan", "Mixtral-8x7B", "--cores", "8", "--python", str(file)]) == 0
    assert file.read_text() == python(plan("Mixtral-8x7B", cores=8))


def test_a_router_that_nxd_lacks_is_refused():
    with pytest.raises(ValueError, match="sparsemixer"):
        python(plan("Phi-3.5-MoE", cores=16))
