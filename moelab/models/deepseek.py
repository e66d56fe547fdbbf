"""DeepSeek-MoE-16B (`model_type: deepseek`), which transformers does not have: Llama with
DeepSeek-V2's MoE block.

The published checkpoint brings its own code; this is the same network out of transformers' parts.
Importing this file makes AutoConfig and AutoModelForCausalLM know it, and transformers how its
checkpoint is laid out."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe


class DeepseekConfig(LlamaConfig):
    model_type = "deepseek"
    attribute_map = {"num_experts": "n_routed_experts"}
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1408
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1


class DeepseekForCausalLM(LlamaForCausalLM):
    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            if index >= config.first_k_dense_replace and index % config.moe_layer_freq == 0:
                layer.mlp = DeepseekV2Moe(config)
        self.post_init()


AutoConfig.register("deepseek", DeepseekConfig)
AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
register_checkpoint_conversion_mapping("deepseek", get_checkpoint_conversion_mapping("deepseek_v2"))
