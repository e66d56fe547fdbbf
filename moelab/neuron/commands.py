"""`moelab neuron plan`: how to deploy a model on AWS Neuron, as text, JSON and Python for NxD.

moelab neuron plan DeepSeek-V3 --cores 64 --context 8192
moelab neuron plan MODEL --cores 16 --phase decode --batch 32 --python plan.py --output plan.json
"""

from __future__ import annotations

import argparse

from moelab.base.arguments import number, output, whole
from moelab.base.files import write_json, write_text
from moelab.base.records import Record
from moelab.base.table import duration, filled, percent, size, text_table
from moelab.neuron.plan import CONTEXT, KIND, SIZES, WEIGHTS, NeuronPlan, plan, up

#: of the command line, what the plan does not depend on
NOT_ASKED = ("main", "debug", "output", "python")

HALVES = {"I": "I", "H": "H", "block": "the blocks"}
#: router kind → NxD's class, and its arguments beyond the sizes; groups are the config's own
ROUTERS = {
    "softmax": ("RouterTopK", 'act_fn="softmax"'),
    "topk-softmax": ("RouterTopK", 'act_fn="softmax", apply_act_fn_over_topk=True'),
    "sigmoid": ("RouterTopK", 'act_fn="sigmoid"'),
    "sigmoid-group": ("GroupLimitedRouter", "n_group=config.n_group, topk_group=config.topk_group"),
}
PYTHON = '''\
"""{source} on {cores} logical NeuronCores of {device}, for {phase}, by `moelab neuron plan`:
{kind}."""

from neuronx_distributed.modules.moe import MoE, routing
from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from neuronx_distributed.modules.moe.moe_configs import (
    BlockwiseMatmulConfig,
    RoutedExpertsMLPOpsConfig,
)
from neuronx_distributed.parallel_layers import parallel_state
from transformers import AutoConfig

BLOCKWISE = dict({blockwise})
#: of NxD Inference: MoENeuronConfig(**NEURON_CONFIG)
NEURON_CONFIG = dict({neuron}
    blockwise_matmul_config=BLOCKWISE,
)


def initialize():
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size={tp}, expert_model_parallel_size={ep}
    )


def moe_layer(name={source!r}):
    config = AutoConfig.from_pretrained(name).get_text_config()
    sizes = dict(num_experts={E}, top_k={K}, hidden_size={H})
    router = routing.{router}(
        **sizes, {more}, sequence_parallel_enabled={sequence}
    )
    experts = ExpertMLPsV2(
        routed_experts_mlp_config=RoutedExpertsMLPOpsConfig(
            **sizes,
            intermediate_size={I},{actual}
            hidden_act=config.hidden_act,
            glu_mlp={gated},
            bias={bias},
            capacity_factor={capacity},
            normalize_top_k_affinities={normalize},
            enable_spmd_rank={spread},
        ),
        blockwise_matmul_config=BlockwiseMatmulConfig.from_kwargs(**BLOCKWISE),
        sequence_parallel_enabled={sequence},
    )
    return MoE(router=router, expert_mlps=experts, sequence_parallel_enabled={sequence})
'''


def python(made: NeuronPlan) -> str:
    """The plan as a module for NxD. ValueError: it has no such router."""
    asked, spec, way = made.asked, made.asked.spec, made.way
    if spec.router not in ROUTERS:
        raise ValueError(
            f"{spec.name} routes by {spec.router}, and NxD has {', '.join(ROUTERS)}: write a router on "
            "its RouterBase, and take the rest of the plan from --output FILE"
        )
    router, more = ROUTERS[spec.router]
    padded = up(spec.I, way.tp)
    sequence = asked.phase == "prefill"
    config = {
        "tp_degree": asked.cores,
        "moe_tp_degree": way.tp,
        "moe_ep_degree": way.ep,
        "logical_nc_config": 2,
        "batch_size": asked.batch,
        "ctx_batch_size": 1,
        "seq_len": asked.context,
        "sequence_parallel_enabled": sequence,
        "capacity_factor": asked.capacity_factor,
        "glu_mlp": spec.gated,
    }
    if asked.weights == "fp8":  # of a checkpoint that NxD has quantized
        config |= {"quantized": True, "quantization_dtype": "f8e4m3"}
        config |= {"quantized_checkpoints_path": f"{spec.name}-f8e4m3"}
    return PYTHON.format(
        source=asked.model.source,
        cores=asked.cores,
        device=asked.device.name,
        phase=asked.phase,
        kind=KIND,
        blockwise=_keywords(made.blockwise) + "\n",
        neuron=_keywords(config),
        tp=way.tp,
        ep=way.ep,
        router=router,
        more=more,
        E=spec.E,
        K=spec.K,
        H=spec.H,
        I=padded,
        actual=f"\n            intermediate_size_actual={spec.I}," if padded > spec.I else "",
        gated=spec.gated,
        bias=spec.bias,
        capacity=asked.capacity_factor,
        normalize='getattr(config, "norm_topk_prob", True)' if spec.K > 1 else False,
        spread=way.ep > 1,
        sequence=sequence,
    )


def _keywords(given: Record) -> str:
    return "".join(f"\n    {name}={value!r}," for name, value in given.items())


def words(made: NeuronPlan) -> str:
    """The plan for a person."""
    asked, spec, way = made.asked, made.asked.spec, made.way
    ratio = 1e3 * asked.device["bf16_tflops"] / asked.device["memory_bandwidth_gbs"]
    prefill = asked.phase == "prefill"
    gathered = f"gathers {spec.K} of {spec.E} logits" if prefill else "not in sequence parallel"
    factor = asked.capacity_factor
    dropped = f"capacity factor {factor:g}" if factor else "dropless"
    uneven = " The guide's worst group has 3 to 4 × the mean." if way.ep > 1 else ""
    return f"""\
{spec.name} on {asked.cores} logical cores of {asked.device.name}: {KIND}

{way}
Experts in {asked.weights}, {spec.E // way.ep} a core, {dropped}; the router is copied, {gathered}.
Blocks of {asked.block_size}, which skip padded tokens and repeated weights; a core's halves divide \
{HALVES[made.shard]}. {SIZES[-1]} FLOPs a byte are the guide's 400 to 500, {ratio:.0f} would do for this \
card's bf16, and an expert gets {asked.rows:.4g} tokens of a prompt.
HBM a core: {", ".join(f"{of} {size(n)}" for of, n in made.memory.items())}: \
{size(made.nbytes)} of {size(asked.usable)}.
{_phase(made, "prefill", f"a prompt of {asked.context:,} tokens")}
{_phase(made, "decode", f"a token, batch {asked.batch},")}
Bounds from below: even routing, perfect overlap.{uneven}"""


def _phase(made: NeuronPlan, phase: str, what: str) -> str:
    """What bounds it, in words."""
    bound = getattr(made, phase)
    spec, way = made.asked.spec, made.way
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    command = commands.add_parser(
        "plan",
        help="degrees, blocks, memory and bounds of a model on NeuronCores",
        description="Plan a model on NeuronCores; modelled, nothing runs on Neuron.",
    )
    command.add_argument("model", help="a card's name, a hub id, a checkpoint folder or a store")
    command.add_argument("--device", default="trn2", help="a device card (default: trn2)")
    command.add_argument(
        "--cores",
        type=whole(1),
        default=64,
        metavar="N",
        help="logical cores, two physical ones each (default: 64, of a trn2.48xlarge)",
    )
    command.add_argument(
        "--phase",
        choices=("prefill", "decode"),
        default="prefill",
        help="whose degrees are chosen (default: prefill)",
    )
    command.add_argument(
        "--batch", type=whole(1), default=1, metavar="N", help="sequences that decode together"
    )
    command.add_argument(
        "--context", type=whole(1), metavar="N", help=f"tokens of a sequence (default: {CONTEXT})"
    )
    command.add_argument(
        "--quantize",
        choices=WEIGHTS,
        help="weights of the experts (default: the checkpoint's, else bf16)",
    )
    command.add_argument(
        "--capacity-factor",
        type=number(above=0),
        metavar="X",
        help="drop what is beyond it (default: drop nothing)",
    )
    command.add_argument("--output", type=output, metavar="FILE", help="write the plan as JSON")
    command.add_argument("--python", type=output, metavar="FILE", help="write it for NxD")


def main(args: argparse.Namespace) -> int:
    given = {name: of for name, of in vars(args).items() if name not in NOT_ASKED}
    made = plan(**given)
    print(filled("\n".join([words(made), "", table(made)])))
    if args.python:
        write_text(args.python, python(made))
    if args.output:
        write_json(args.output, made.record)
    return 0
