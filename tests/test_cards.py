"""The cards: complete, sourced, equal to transformers' configs, and as heavy as their publishers
say."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import transformers

from moelab import cards
from moelab.base.configs import spec_from_config
from moelab.simulation.costs import BESIDE

WANTED = {
    "Phi-3.5-MoE",
    "Phi-tiny-MoE",
    "Qwen3-30B-A3B",
    "Qwen3-235B-A22B",
    "Qwen1.5-MoE-A2.7B",
    "DeepSeek-MoE-16B",
    "DeepSeek-V2-Lite",
    "DeepSeek-V2-Lite-Chat",
    "DeepSeek-V3",
    "Mixtral-8x7B",
    "GPT-OSS-20B",
    "GPT-OSS-120B",
    "GLM-4.7-Flash",
    "Llama4-Scout",
    "Llama4-Maverick",
    "Switch-Large-128",
    "OLMoE-1B-7B",
    "Gemma-4-26B-A4B",
}
UNIFIED = {
    "jetson-agx-orin-64gb",
    "jetson-agx-orin-32gb",
    "raspberry-pi-5",
    "m2-max",
    "m2-ultra",
    "oneplus-12",
}
DISCRETE = {
    "rtx-3060-12gb",
    "rtx-3090",
    "rtx-4060-ti-16gb",
    "rtx-4070-laptop-8gb",
    "rtx-4090",
    "rtx-5070-ti",
    "rtx-5080",
    "rtx-5090",
    "rtx-pro-6000",
    "rtx-a6000",
    "a100-80gb",
    "h100-80gb",
    "h200-141gb",
    "gh200-96gb",
}
PARTS = {"ndp-dimm-ddr4", "lpddr-ndp", "hbm-pim"}  # memory that computes: no machine by itself
DEVICES = UNIFIED | DISCRETE | PARTS | {"i7-14700", "trn2"}
NO_DISK_FIGURE = {"m2-ultra"}  # none was found published
PAPERS = {"NPUMoE", "GPU-NDP", "Speculating Experts", "AWS Neuron MoE guide", "ZipMoE"}

#: the configs that the cards claim to repeat, in transformers' words; what is not said is
#: transformers' default
CONFIGS = {
    "Phi-3.5-MoE": lambda: transformers.PhimoeConfig(),
    "Phi-tiny-MoE": lambda: transformers.PhimoeConfig(
        intermediate_size=448, num_attention_heads=16, num_key_value_heads=4, head_dim=128
    ),
    "Qwen3-30B-A3B": lambda: transformers.Qwen3MoeConfig(num_hidden_layers=48, head_dim=128),
    "Qwen3-235B-A22B": lambda: transformers.Qwen3MoeConfig(
        num_hidden_layers=94,
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_attention_heads=64,
        head_dim=128,
    ),
    "Qwen1.5-MoE-A2.7B": lambda: transformers.Qwen2MoeConfig(),
    "DeepSeek-MoE-16B": lambda: SimpleNamespace(
        model_type="deepseek",
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=64,
        n_shared_experts=2,
        moe_layer_freq=1,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        torch_dtype="bfloat16",
    ),
    "DeepSeek-V2-Lite": lambda: transformers.DeepseekV2Config(
        num_hidden_layers=27,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        vocab_size=102400,
    ),
    "DeepSeek-V2-Lite-Chat": lambda: CONFIGS["DeepSeek-V2-Lite"](),
    "DeepSeek-V3": lambda: transformers.DeepseekV3Config(
        quantization_config={"quant_method": "fp8"}
    ),
    "Mixtral-8x7B": lambda: transformers.MixtralConfig(),
    "GPT-OSS-20B": lambda: transformers.GptOssConfig(
        num_hidden_layers=24, num_local_experts=32, quantization_config={"quant_method": "mxfp4"}
    ),
    "GPT-OSS-120B": lambda: transformers.GptOssConfig(
        quantization_config={"quant_method": "mxfp4"}
    ),
    "GLM-4.7-Flash": lambda: transformers.Glm4MoeLiteConfig(),
    "Llama4-Scout": lambda: transformers.Llama4Config(),
    "Llama4-Maverick": lambda: transformers.Llama4TextConfig(
        num_local_experts=128, interleave_moe_layer_step=2
    ),
    "Switch-Large-128": lambda: transformers.SwitchTransformersConfig(
        d_model=1024,
        d_ff=4096,
        num_layers=24,
        num_decoder_layers=24,
        num_heads=16,
        num_experts=128,
        num_sparse_encoder_layers=12,
        num_sparse_decoder_layers=12,
    ),
    "OLMoE-1B-7B": lambda: transformers.OlmoeConfig(intermediate_size=1024),
    "Gemma-4-26B-A4B": lambda: transformers.Gemma4TextConfig(
        num_hidden_layers=30,
        hidden_size=2816,
        intermediate_size=2112,
        num_attention_heads=16,
        num_key_value_heads=8,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
}

NO_ACTIVE_COUNT = {"Switch-Large-128"}  # a token passes through the encoder or the decoder


def test_there_is_a_card_for_everything_that_the_sources_use():
    assert set(cards.MODELS) == WANTED == set(CONFIGS)
    assert set(cards.DEVICES) == DEVICES


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_model_card_is_whole_and_sourced(name):
    card = cards.load_card(name)
    parts = ["name", "hub", "notes", "geometry", "figures", "papers"]
    assert list(card) == parts + ["routing"] * ("routing" in card)
    assert list(card["geometry"]) == list(cards.load_card("Mixtral-8x7B")["geometry"])
    assert card["name"] == name and card["hub"].count("/") == 1
    assert card["geometry"]["source"].strip() and all(note.strip() for note in card["notes"])
    assert (
        list(card["figures"])
        == ["total_params", "active_params"][: 1 if name in NO_ACTIVE_COUNT else 2]
    )
    for figure in card["figures"].values():
        assert (
            figure["kind"] == "published"
            and figure["unit"] == "parameters"
            and figure["source"].strip()
        )
    if "routing" in card:
        assert card["routing"]["kind"] == "fitted" and card["routing"]["source"].strip()
    assert set(card["papers"]) <= PAPERS and all(place.strip() for place in card["papers"].values())


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_card_is_what_transformers_config_gives(name):
    assert cards.load_model(name) == spec_from_config(CONFIGS[name](), name=name)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_device_card_is_whole_and_sourced(name):
    assert list(cards.load_card(name)) == ["name", "notes", "figures"]
    device = cards.load_device(name)
    assert {"memory_gb", "memory_bandwidth_gbs"} <= set(device.figures)
    assert all(figure.source.strip() for figure in device.figures.values())
    if name in DISCRETE:  # what `moelab.simulation.costs.MachineRates` reads of a GPU
        assert {"link_bandwidth_gbs", "bf16_tflops", *BESIDE} <= set(device.figures)


@pytest.mark.parametrize(
    "load, wrong, meant",
    [
        (cards.load_model, "qwen3-30b-a3b", "Qwen3-30B-A3B"),
        (cards.load_card, "RTX A6000", "rtx-a6000"),
    ],
)
def test_an_unknown_name_says_what_there_is(load, wrong, meant):
    with pytest.raises(
        ValueError, match=f"no card '{wrong}'.*Did you mean '{meant}'.*There are: .*{meant}"
    ):
        load(wrong)


@pytest.mark.parametrize(
    "line, problem",
    [
        ('unit = "MB/s"', "in the unit that its name ends in: _gbs"),
        ('value = "fast"', "must be a finite number"),
        ("value = 0", "must be above 0"),
        ("value = nan", "must be a finite number"),
        ('kind = "guessed"', "one of measured, published, fitted"),
        ('source = ""\nsauce = "x"', "sauce"),
        (None, "source"),
    ],
)
def test_a_figure_that_means_something_else_is_named(line, problem, tmp_path):
    figure = {
        "value": "value = 2.1",
        "unit": 'unit = "GB/s"',
        "kind": 'kind = "measured"',
        "source": 'source = "fio"',
    }
    figure |= {"source": ""} if line is None else {line.partition(" ")[0]: line}
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(['name = "Mine"', "[figures.storage_read_gbs]", *figure.values()]))
    with pytest.raises(
        ValueError, match=r"mine.toml .*figures.storage_read_gbs.*" + re.escape(problem)
    ):
        cards.load_device(file)


def test_a_card_of_your_own_is_read_from_its_path_as_it_is_now(tmp_path):
    file = tmp_path / "mine.toml"
    for rate in (2.5, 3.5):
        file.write_text(
            f"name = 'Mine'\n[figures.storage_read_gbs]\nvalue = {rate}\nunit = 'GB/s'\n"
            "kind = 'measured'\nsource = 'fio'"
        )
        for path in (file, str(file)):
            assert (
                cards.load_device(path).name == "Mine"
                and cards.load_device(path)["storage_read_gbs"] == rate
            )
    for text, told in (("name = 'Mine'", "it lacks figures"), ("name =", "is no readable card")):
        file.write_text(text)
        with pytest.raises(ValueError, match=told):
            cards.load_device(file)
    with pytest.raises(FileNotFoundError):
        cards.load_device(tmp_path / "other.toml")
