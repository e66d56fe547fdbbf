"""spec_from_config against the modules that transformers builds from the same config, on the meta
device."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.configs import spec_from_config
from moelab.base.schema import typed
from moelab.base.specs import DTYPE_BYTES, MoESpec
from moelab.models import deepseek  # noqa: F401  (makes transformers know it)

#: architecture → what is changed in transformers' own defaults, mostly to make some layers dense
ARCHITECTURES: dict[str, dict] = {
    "qwen3_moe": {"num_hidden_layers": 5, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    "qwen2_moe": {"num_hidden_layers": 4, "mlp_only_layers": [2]},
    "mixtral": {"num_hidden_layers": 2},
    "phimoe": {"num_hidden_layers": 2},
    "olmoe": {"num_hidden_layers": 2},
    "deepseek_v2": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_experts_per_tok": 6},
    "deepseek_v3": {"num_hidden_layers": 4, "first_k_dense_replace": 2},
    "glm4_moe_lite": {"num_hidden_layers": 3},
    "gpt_oss": {"num_hidden_layers": 2},
    "llama4_text": {"num_hidden_layers": 4, "interleave_moe_layer_step": 2},
    "switch_transformers": {
        "num_layers": 6,
        "num_decoder_layers": 4,
        "num_sparse_encoder_layers": 3,
        "num_sparse_decoder_layers": 1,
        "num_experts": 4,
    },
    "ernie4_5_moe": {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_end_index": 4},
    "granitemoeshared": {"num_hidden_layers": 2, "shared_intermediate_size": 96},
    "hunyuan_v1_moe": {"num_hidden_layers": 2, "num_experts": 8, "moe_topk": 2, "head_dim": 128},
    "jamba": {"num_hidden_layers": 4},
    "minimax_m2": {"num_hidden_layers": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "qwen3_next": {"num_hidden_layers": 4, "mlp_only_layers": [0]},
    "solar_open": {"num_hidden_layers": 2},
}
NESTED = ("llama4", "qwen3_vl_moe", "glm4v_moe")


def build(config: transformers.PretrainedConfig) -> torch.nn.Module:
    """The model without its language head, weightless."""
    with torch.device("meta"):
        if config.model_type == "deepseek":  # transformers knows it as a causal model only
            return transformers.AutoModelForCausalLM.from_config(config).model
        return transformers.AutoModel.from_config(config)


def found(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, torch.nn.Module]]:
    """(path, MoE block, experts) of every MoE layer in the order of the modules."""
    return [
        (path, model.get_submodule(path.rpartition(".")[0]), module)
        for path, module in model.named_modules()
        if path.endswith(".experts") and hasattr(module, "num_experts")
    ]


def expert_shape(experts: torch.nn.Module) -> tuple[int, int, bool, bool]:
    """(H, I, gated, bias), from the weights alone: the down projection's two sizes, and what else
    there is."""
    if isinstance(experts, torch.nn.ModuleDict):
        one = experts["expert_0"]
        return (
            one.wo.out_features,
            one.wo.in_features,
            len(list(one.parameters())) == 3,
            one.wo.bias is not None,
        )
    gated, bias = hasattr(experts, "gate_up_proj"), hasattr(experts, "down_proj_bias")
    sizes = tuple(experts.down_proj.shape[1:])
    transposed = getattr(experts, "is_transposed", type(experts).__name__ == "Llama4TextExperts")
    H, I = reversed(sizes) if transposed else sizes
    return H, I, gated, bias


def down_in(mlp: torch.nn.Module) -> int:
    """Intermediate size of an ordinary MLP: inputs of the one projection that leads back to the
    hidden size."""
    for name in ("down_proj", "wo", "output_linear", "w2"):
        if hasattr(mlp, name):
            return getattr(mlp, name).in_features
    raise AssertionError(f"no down projection in {mlp}")


def top_k(block: torch.nn.Module) -> int:
    for holder in (block, *block.children()):
        for name in ("top_k", "num_experts_per_tok"):
            if isinstance(getattr(holder, name, None), int):
                return getattr(holder, name)
    return 1  # Switch has no such attribute: it takes the argmax


def check(spec: MoESpec, config: transformers.PretrainedConfig) -> None:
    model = build(config)
    blocks = found(model)
    first_decoder = len(model.encoder.block) if hasattr(model, "encoder") else 0
    layers = [
        int(re.search(r"\.(\d+)\.", path)[1]) + first_decoder * path.startswith("decoder")
        for path, *_ in blocks
    ]
    assert list(spec.moe_layers) == layers
    for path, block, experts in blocks:
        assert (spec.H, spec.I, spec.gated, spec.bias) == expert_shape(experts)
        assert experts.num_experts == spec.E
        assert top_k(block) == spec.K
        layer = model.get_submodule(
            path.rsplit(".", 2)[0]
        )  # Granite keeps its shared MLP beside the block
        shared = [
            module
            for holder in (block, layer)
            for name, module in holder.named_children()
            if "shared" in name and not isinstance(module, torch.nn.Linear)
        ]
        assert spec.shared_I == sum(down_in(module) for module in shared)
        if not isinstance(experts, torch.nn.ModuleDict):
            assert spec.expert_params * spec.E == sum(p.numel() for p in experts.parameters())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_spec_is_what_transformers_builds(name):
    config = transformers.AutoConfig.for_model(name, **ARCHITECTURES[name])
    check(spec_from_config(config), config)


@pytest.mark.parametrize("name", NESTED)
def test_multimodal_configs_count_by_their_language_model(name):
    config = transformers.AutoConfig.for_model(name)
    config.text_config.num_hidden_layers = 2
    if name == "llama4":
        config.text_config.moe_layers = [1]
    spec = spec_from_config(config)
    assert spec.model_type == config.text_config.model_type
    assert spec == spec_from_config(config.text_config)
    check(spec, config.text_config)


@pytest.mark.parametrize("every", [1, 2])
def test_deepseek_moe_16b_against_the_model_that_is_built_for_it(every):
    config = transformers.AutoConfig.for_model(
        "deepseek", num_hidden_layers=5, moe_layer_freq=every
    )
    spec = spec_from_config(config)
    assert spec.router == "softmax"
    check(spec, config)


@pytest.mark.parametrize(
    "name, router",
    [
        ("phimoe", "sparsemixer"),
        ("deepseek_v3", "sigmoid-group"),
        ("gpt_oss", "topk-softmax"),
        ("llama4_text", "sigmoid"),
        ("switch_transformers", "top1"),
    ],
)
def test_router(name, router):
    assert spec_from_config(transformers.AutoConfig.for_model(name)).router == router


@pytest.mark.parametrize(
    "settings, dtype",
    [
        ({}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": torch.float16}, "float16"),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "float8_e4m3fn"),
    ],
)
def test_dtype(settings, dtype):
    assert spec_from_config(transformers.GptOssConfig(**settings)).dtype == dtype


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        transformers.Qwen2Config(),
        transformers.GPT2Config(),
        transformers.Qwen3MoeConfig(num_hidden_layers=2, mlp_only_layers=[0, 1]),
    ],
)
def test_a_dense_model_is_refused(config):
    with pytest.raises(ValueError, match="is a dense model.*looked for.*Open"):
        spec_from_config(config)


# ------------------------------------------------------------------------------------------- the
# records themselves

geometry = st.builds(
    lambda layers, E, K, sizes, gated, bias, dtype: MoESpec(
        "m", "t", layers, (0,), E, min(K, E), *sizes, gated=gated, bias=bias, dtype=dtype
    ),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 9),
    st.tuples(st.integers(1, 64), st.integers(1, 64)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(sorted(DTYPE_BYTES)),
)


@given(geometry)
def test_sizes_are_those_of_the_matrices(spec):
    matrices = [(spec.I, spec.H)] * (2 if spec.gated else 1) + [(spec.H, spec.I)]
    weights = sum(rows * columns for rows, columns in matrices)
    biases = spec.bias * sum(rows for rows, _ in matrices)
    assert spec.expert_params == weights + biases
    wide = 4 if spec.dtype == "float32" else 2
    assert spec.expert_bytes == round(weights * DTYPE_BYTES[spec.dtype]) + biases * wide
    assert spec.experts_bytes == spec.L * spec.E * spec.expert_bytes
    assert spec.routed_bytes <= spec.experts_bytes


@given(geometry)
def test_a_spec_survives_a_dictionary_and_is_known_by_its_geometry(spec):
    assert typed(asdict(spec), MoESpec) == spec
    assert spec.with_dtype("int8").fingerprint() == spec.fingerprint()
    wider = replace(spec, H=spec.H + 1)
    assert wider.fingerprint() != spec.fingerprint()


@pytest.mark.parametrize(
    "change, message",
    [({"K": 9}, "only E=8"), ({"H": 0}, "H is 0"), ({"dtype": "int3"}, "unknown dtype 'int3'")],
)
def test_an_impossible_geometry_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MoESpec(
            **{
                **dict(name="m", model_type="t", num_layers=1, moe_layers=(0,), E=8, K=2, H=4, I=4),
                **change,
            }
        )
