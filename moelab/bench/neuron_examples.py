"""Worked examples of AWS's guide to MoE inference on Neuron, recomputed from the inputs that the
guide gives.

All are arithmetic, or modelled where they depend on a device's published rates; what the guide says
beside them is in the ledger (`moelab.claims`). Statements without inputs are left out."""

from __future__ import annotations

import torch

from moelab.cards import load_device, load_model
from moelab.static import blocks
from moelab.static.blockwise import BlockMap, block_map
from moelab.static.neuron import expected_unique


def intensity(T: int, weight_bytes: int) -> float:
    """FLOPs a byte of [T, 4096] @ [4096, 12288], bf16 in and out, so many bytes a weight."""
    return 2 * T * 4096 * 12288 / (2 * (T * 4096 + T * 12288) + weight_bytes * 4096 * 12288)


def gather_ratios() -> dict[str, float]:
    """How many times less is gathered after selection (8 weights in bf16 and 8 ids a token) than
    before (128 logits), by the type of the ids. The guide's 16 counts the weights alone."""
    return {
        str(ids).removeprefix("torch."): 128 * 2 / (8 * (2 + ids.itemsize))
        for ids in (torch.int64, torch.int32, torch.uint8)
    }


def router_bytes() -> tuple[float, float, float]:
    """Bytes of GPT-OSS-120B's router, of its 36 layers' routers, and their share of a logical
    core's memory."""
    router, routers = (blocks.router_bytes(2880, 128, layers) for layers in (1, 36))
    return (
        router,
        routers,
        routers / (1e9 * load_device("trn2")["memory_gb"] / 4),
    )  # four logical cores (LNC2)


def worst_padding() -> blocks.Padding:
    """The worst routing of 1000 tokens to distinct two of 8 experts that can be, B = 256."""
    return blocks.padding([769, 769, 457, 1, 1, 1, 1, 1], 1000, 2, 256, "text")


def figures() -> dict[str, tuple[float, str]]:
    """What the guide gives as one number each, from its own inputs: name → (value, unit)."""
    trn2 = load_device("trn2")
    oss = load_model("GPT-OSS-120B")
    router, routers, share = router_bytes()
    even = blocks.padding([250] * 8, 1000, 2, 256, "text")
    row = 2 * oss.H
    expert = 2 * 3 * oss.H * oss.I
    return {
        "router_mb": (router / 1e6, "MB"),
        "routers_mb": (routers / 1e6, "MB"),
        "router_share": (share, "of memory"),
        "gather_ratio_int32_ids": (gather_ratios()["int32"], "×"),
        "oss_top_k": (oss.K, ""),
        "oss_hidden": (oss.H, ""),
        "oss_intermediate": (oss.I, ""),
        "blocks_provisioned": (even.provisioned, "blocks"),
        "blocks_needed": (even.needed, "blocks"),
        "padding_to_provisioned": (even.worst_case, "of needed slots"),
        "padding_algorithmic": (even.algorithmic, "of routings"),
        "worst_possible_blocks": (worst_padding().needed, "blocks"),
        **{
            f"compute_bound_{dtype}": (blocks.intensity_target(trn2, dtype), "FLOPs/byte")
            for dtype in ("bf16", "fp8")
        },
        "token_skipping_saves": (row / (4 * row + expert), "of a block's bytes"),
        "intensity_prefill": (intensity(8192, 2), "FLOPs/byte"),
        "intensity_decode_batch_32": (intensity(32, 2), "FLOPs/byte"),
        **{
            f"provisioned_savings_{name}": (1 - min(batch * K, E) / E, "of experts")
            for name, E, K, batch in (
                ("DeepSeek", 256, 8, 16),
                ("GPT-OSS", 128, 8, 8),
                ("Llama4", 16, 1, 8),
            )
        },
        "experts_needed_256_8_32": (expected_unique(32, [8 / 256] * 256), "experts, even routing"),
    }


def six_tokens() -> BlockMap:
    """The guide's example of blocks of 4: tokens T0 … T5 of three experts."""
    return block_map(torch.tensor([[0], [1], [0], [2], [1], [0]]), 3, 4)
