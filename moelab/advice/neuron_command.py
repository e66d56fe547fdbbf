"""`moelab neuron plan`: how to deploy a model on AWS Neuron, as text, JSON and Python for NxD.

moelab neuron plan DeepSeek-V3 --cores 64 --context 8192
moelab neuron plan MODEL --cores 16 --phase decode --batch 32 --python plan.py --output plan.json
"""

from __future__ import annotations

import argparse

from moelab.advice.neuron import KIND, SIZES, NeuronPlan, plan
from moelab.base.arguments import described
from moelab.base.files import beside, write_json, write_text
from moelab.base.table import duration, filled, percent, size, text_table

#: of the command line, what the plan does not depend on
NOT_ASKED = ("main", "debug", "command", "output", "python")

#: what a core's halves divide, in words; router kind → NxD's class, and its arguments beyond the
#: sizes; groups are the config's own
HALVES, ROUTERS, _ = beside(__file__).values()


def python(made: NeuronPlan) -> str:
    """The plan as a module for NxD. ValueError: it has no such router."""
    spec = made.spec
    if spec.router not in ROUTERS:
        raise ValueError(
            f"{spec.name} routes by {spec.router}, and NxD has {', '.join(ROUTERS)}: write a router on "
            "its RouterBase, and take the rest of the plan from --output FILE"
        )
    return f'''\
"""{made.model.source} on {made.cores} logical NeuronCores of {made.device.name}, for {made.phase}, by
`moelab neuron plan`: {KIND}."""

from neuronx_distributed.modules.moe import MoE, routing
from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from neuronx_distributed.modules.moe.moe_configs import (
    BlockwiseMatmulConfig,
    RoutedExpertsMLPOpsConfig,
)
from neuronx_distributed.parallel_layers import parallel_state
from transformers import AutoConfig

{_settings(made)}

{_layer(made)}'''


def _settings(made: NeuronPlan) -> str:
    """Of the blocks and of NxD Inference, and what initializes NxD."""
    way = made.way
    blockwise = "".join(f"\n    {name}={value!r}," for name, value in made.blockwise.items())
    fp8 = f"""
    quantized=True,
    quantization_dtype="f8e4m3",
    quantized_checkpoints_path="{made.spec.name}-f8e4m3",  # where NxD has written it"""
    return f"""\
BLOCKWISE = dict({blockwise}
)
#: of NxD Inference: MoENeuronConfig(**NEURON_CONFIG)
NEURON_CONFIG = dict(
    tp_degree={made.cores},
    moe_tp_degree={way.tp},
    moe_ep_degree={way.ep},
    logical_nc_config=2,
    batch_size={made.batch},
    ctx_batch_size=1,
    seq_len={made.context},
    sequence_parallel_enabled={made.phase == "prefill"},
    capacity_factor={made.capacity_factor},
    glu_mlp={made.spec.gated},
    blockwise_matmul_config=BLOCKWISE,{fp8 if made.weights == "fp8" else ""}
)


def initialize():
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size={way.tp}, expert_model_parallel_size={way.ep}
    )
"""


def _layer(made: NeuronPlan) -> str:
    """What builds a layer."""
    spec = made.spec
    router, more = ROUTERS[spec.router]
    if spec.bias and router == "RouterTopK":  # GPT-OSS's has one, too
        more += ", bias=True"
    padded = made.padded["I"]
    actual = f"\n            intermediate_size_actual={spec.I}," if padded > spec.I else ""
    normalize = 'getattr(config, "norm_topk_prob", True)' if spec.K > 1 else "False"
    return f"""\
def moe_layer(name={made.model.source!r}):
    config = AutoConfig.from_pretrained(name).get_text_config()
    sizes = dict(num_experts={spec.E}, top_k={spec.K}, hidden_size={spec.H})
    parallel = dict(sequence_parallel_enabled={made.phase == "prefill"})
    experts = ExpertMLPsV2(
        routed_experts_mlp_config=RoutedExpertsMLPOpsConfig(
            **sizes,
            intermediate_size={padded},{actual}
            hidden_act=config.hidden_act,
            glu_mlp={spec.gated},
            bias={spec.bias},
            capacity_factor={made.capacity_factor},
            normalize_top_k_affinities={normalize},
            enable_spmd_rank={made.way.ep > 1},
        ),
        blockwise_matmul_config=BlockwiseMatmulConfig.from_kwargs(**BLOCKWISE),
        **parallel,
    )
    router = routing.{router}(**sizes, **parallel, {more})
    return MoE(router=router, expert_mlps=experts, **parallel)
"""


def words(made: NeuronPlan) -> str:
    """The plan for a person."""
    spec, way = made.spec, made.way
    ratio = 1e3 * made.device["bf16_tflops"] / made.device["memory_bandwidth_gbs"]
    prefill = made.phase == "prefill"
    gathered = f"gathers {spec.K} of {spec.E} logits" if prefill else "not in sequence parallel"
    factor = made.capacity_factor
    dropped = f"capacity factor {factor:g}" if factor else "dropless"
    uneven = " The guide's worst group has 3 to 4 × the mean." if way.ep > 1 else ""
    return f"""\
{spec.name} on {made.cores} logical cores of {made.device.name}: {KIND}

{way}
Experts in {made.weights}, {spec.E // way.ep} a core, {dropped}; the router is copied, {gathered}.
Blocks of {made.block_size}, which skip padded tokens and repeated weights; a core's halves divide \
{HALVES[made.shard]}. The guide asks for {SIZES[-1]}, 400 to 500 FLOPs a byte, this card's bf16 rate for \
{ratio:.0f}, and an expert gets {made.rows:.4g} tokens of a prompt.
HBM a core: {", ".join(f"{of} {size(n)}" for of, n in made.memory.items())}: \
{size(made.nbytes)} of {size(made.usable)}.
{_phase(made, "prefill", f"a prompt of {made.context:,} tokens")}
{_phase(made, "decode", f"a token, batch {made.batch},")}
Bounds from below: even routing, perfect overlap.{uneven}"""


def _phase(made: NeuronPlan, phase: str, what: str) -> str:
    """What bounds it, in words."""
    bound = made.bound(phase)
    spec, way = made.spec, made.way
    if bound is None:
        more = f"--batch {-(-spec.E // spec.K)}" if phase == "decode" else "a longer --context"
        both = size(made.nbytes + made.memory["experts"])
        return (
            f"{phase}: NxD does not run so few tokens with ep = {way.ep}, which choose fewer than "
            f"{spec.E} experts. Give {more}, or plan with --phase {phase}; with "
            f"hybrid_sharding_config both plans are there at once, in {both} a core."
        )
    parts = ", ".join(f"{of} {duration(seconds)}" for of, seconds in bound.parts.items())
    return (
        f"{phase}: {what} in {duration(bound.seconds)}, limited by {bound.limited_by} ({parts}); "
        f"{bound.algorithm}."
    )


def table(made: NeuronPlan) -> str:
    """A row for each block size."""
    head = ["block size", "blocks", "computed", "padding", "weights once", "for each block"]
    rows = [
        [*map(str, (of.block_size, of.graph, of.computed)), percent(of.padding)]
        + [duration(of.once), duration(of.each)]
        for of in made.blocks
    ]
    return text_table(head, rows)


add_arguments = described(__file__, "arguments")


def main(args: argparse.Namespace) -> int:
    given = {name: of for name, of in vars(args).items() if name not in NOT_ASKED}
    made = plan(**given)
    print(filled("\n".join([words(made), "", table(made)])))
    if args.python:
        write_text(args.python, python(made))
    if args.output:
        write_json(args.output, made.record)
    return 0
